"""Inputs of the analysis: tables of embeddings with their groups and measures, decisions about a set, and journals."""

import csv
import io
from pathlib import Path

import numpy as np

from .fuzz_files import Case, Entry
from .fuzz_grammar import TEXTS, Rng, damage, pick
from .fuzz_inputs import Input, Maker, Sound
from .fuzz_seeds import encoded, files_below

_ODD = (*TEXTS, "0", "1", "-1", "1.5", "1e308", "9" * 400, "\u0661", "\u2028", '"', ",", "drop", "move", "merge", "split", "p1")
_FAR = ["--far", "0.2", "--out", "out"]
_PROGRAMS = {
    "t.npy": (
        ["scripts.analysis.pairs", "t.npy", "--out", "out"],
        ["scripts.analysis.cluster", "t.npy", "--threshold", "0.5", "--out", "c.csv"],
        ["scripts.analysis.clean", "t.npy", "people", "--out", "out"],
    ),
    "groups.csv": (["scripts.analysis.groups", "t.npy", "--groups", "groups.csv", "--by", "kind", *_FAR],),
    "pairs.csv": (["scripts.analysis.groups", "t.npy", "--pairs", "pairs.csv", "--by", "att", *_FAR],),
    "measures.csv": (["scripts.analysis.quality", "t.npy", "--from", "measures.csv", "--columns", "norm", "sharp", *_FAR],),
    "decisions.csv": (["scripts.data.filter", "people", "new", "--decisions", "decisions.csv"],),
}


def inputs(seeds: Path) -> dict[str, Input]:
    """Return the inputs by name, from the seeds of fuzz_seeds.make_seeds."""
    sound: Sound = dict(files_below(seeds / "tables"))
    journal = sound.pop("out/unfinished") or b""
    assert isinstance(journal, bytes)
    names = [row[0] for row in csv.reader((seeds / "tables" / "t.csv").read_text().splitlines()[1:])]
    sound |= {f"people/{name}": encoded(number % 3) for number, name in enumerate(names)}
    return {
        "table": Input(sound, [_table("t.npy"), _table("t.csv"), _arrays], 300, 10),
        "table-texts": Input(sound, [_table(name) for name in _PROGRAMS if name != "t.npy"], 300, 10),
        "journal": Input(sound, [lambda sound, rng: _journal(journal, rng)], 300, 10),
    }


def _table(name: str) -> Maker:
    """Return a maker that damages a file, or changes some cells of a text, and starts a program that reads it."""
    programs = _PROGRAMS["t.npy" if name == "t.csv" else name]

    def make(sound: Sound, rng: Rng) -> Case:
        data = sound[name]
        assert isinstance(data, bytes)
        if name.endswith(".csv") and rng.random() < 0.7:
            rows = list(csv.reader(io.StringIO(data.decode(), newline="")))
            for _ in range(int(rng.integers(1, 4))):
                row = pick(rng, rows)
                row[int(rng.integers(len(row)))] = str(pick(rng, _ODD))
            text = io.StringIO(newline="")
            csv.writer(text, escapechar="\\").writerows(rows)  # Python 3.10 writes no NUL without it
            changed = text.getvalue().encode("utf-8", "surrogatepass")
        else:
            changed = damage(data, [entry for entry in sound.values() if isinstance(entry, bytes)], rng)
        return Case(list(pick(rng, programs)), {name: changed})

    return make


def _arrays(sound: Sound, rng: Rng) -> Case:
    """Return a case with another array in place of the vectors: of another shape, another dtype, or odd numbers."""
    data = sound["t.npy"]
    assert isinstance(data, bytes)
    vectors = np.load(io.BytesIO(data))
    row, column = int(rng.integers(len(vectors))), int(rng.integers(vectors.shape[1]))
    vectors[row, column] = pick(rng, (np.nan, np.inf, 0.0, 1e30, -1.0, vectors[row, column]))
    dtypes = (np.float32, np.float64, np.float16, np.int8, np.complex64, ">f4", "U3")
    with np.errstate(all="ignore"):
        vectors = vectors.astype(pick(rng, dtypes))
    shapes = (vectors, vectors[0], vectors[:, :0], vectors[:0], vectors[None], vectors[:-1], np.asfortranarray(vectors))
    file = io.BytesIO()
    np.save(file, pick(rng, shapes))
    return Case(list(pick(rng, _PROGRAMS["t.npy"])), {"t.npy": file.getvalue()})


def _journal(journal: bytes, rng: Rng) -> Case:
    """Return a case that goes on with the damaged journal of a count that was stopped."""
    files: dict[str, Entry] = {"out/unfinished": damage(journal, [journal], rng)}
    return Case(list(_PROGRAMS["t.npy"][0]), files)
