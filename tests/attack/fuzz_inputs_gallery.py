"""Inputs of scripts.deploy that somebody else may have made: a gallery, a results.json, the fields of a model card."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from .fuzz_files import Case, Entry, Fifo, Folder, Link
from .fuzz_grammar import TEXTS, Rng, change_tree, damage, pick
from .fuzz_inputs import Input, Sound
from .fuzz_seeds import CHECKPOINT, files_below

_DATABASE, _VECTORS, _FACES = "g/gallery.sqlite", "g/vectors_00000001.bin", "g/faces_00000001.bin"
_COMMANDS = (
    ["scripts.deploy.search", "runs/tiny", "g", "people", "--labelled", "--sheet", "sheet.png", "--json", "found.json"],
    ["scripts.deploy.search", "runs/tiny", "g", "people", "--by", "template", "--threshold", "0.5"],
    ["scripts.deploy.enrol", "runs/tiny", "g", "people"],
    ["scripts.deploy.gallery", "show", "g", "--people", "--images", "--json", "shown.json"],
    ["scripts.deploy.gallery", "check", "g"],
    ["scripts.deploy.gallery", "compact", "g"],
    ["scripts.deploy.gallery", "remove", "g", "--image", "1"],
    ["scripts.deploy.gallery", "reembed", "g", "runs/tiny"],
)
_COLUMNS = {
    "facts": "title digest embedding_size image_size detector which vectors faces num_rows faces_end changes id",
    "people": "id name",
    "images": "id person picture hash face norm quality added vector vector_sum face_at face_size face_sum",
}
_VALUES = ("-1", "0", "1", "2", "9223372036854775807", "1e308", "NULL", "'x'", "x'00'", "char(27) || '[2J'", "zeroblob(70000)",
           "CAST(x'ff' AS TEXT)", "'../canary'", "99999999", "0.5")  # fmt: skip
_CHANGES = (
    "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = 'CREATE TABLE people (id, name)' WHERE name = 'people'",
    "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET rootpage = 2",
    "CREATE TRIGGER t AFTER INSERT ON images BEGIN DELETE FROM people; END",
    "CREATE VIEW v AS SELECT 1",
    "DELETE FROM people",
    "DELETE FROM facts",
    "DELETE FROM images",
    "INSERT INTO erasures (kind, at, size) VALUES ('vectors', 0, 9223372036854775807)",
    "INSERT INTO erasures (kind, at, size) VALUES ('../canary', -5, 'x')",
    "UPDATE images SET vector = 1 - vector",
    "PRAGMA user_version = 7",
)
_NAMES = ("-journal", "-wal", "-shm", ".unfinished")
_RESULTS, _FIELDS = "r.json", "card/card.yaml"
_OF_SET: dict[str, Any] = {
    "accuracy": 0.9,
    "eer": 0.1,
    "auc": 0.95,
    "num_genuine": 20,
    "num_impostor": 20,
    "operating_points": [
        {"target": "1e-1", "tar": 0.9, "far": 0.1, "cosine_threshold": 0.3, "num_accepted": 2},
        {"target": "1e-2", "tar": None, "far": None, "cosine_threshold": None, "num_accepted": 0},
    ],
    "intervals_95": {"accuracy": [0.8, 0.95], "1e-1": [0.7, 0.95], "auc": None},
    "roc": {"far": [0.0, 0.1, 1.0], "tar": [0.5, 0.9, 1.0]},
    "similarities": {"cosine": [-1.0, 0.0, 1.0], "genuine": [2, 18], "impostor": [15, 5]},
}
_RATES = {"lfw": _OF_SET, "ema/lfw": _OF_SET}
_KEYS = ("intended_use", "limits", "contact")
_CARD = ["scripts.deploy.card", "runs/tiny", "--results", _RESULTS, "--out", "card"]
_VERIFY = ["scripts.deploy.verify", "runs/tiny", "people/p0/0.jpg", "people/p1/0.jpg", "--far", "1e-1", "--results", _RESULTS]


def inputs(seeds: Path) -> dict[str, Input]:
    """Return the inputs by name, from the seeds of fuzz_seeds.make_seeds."""
    run = {name: data for name, data in files_below(seeds / "run").items() if name.startswith(CHECKPOINT)}
    parts = {f"{name}/{file}": data for name in ("g", "people") for file, data in files_below(seeds / name).items()}
    crops = {name: data for name, data in parts.items() if name.startswith("people/")}
    card = {_FIELDS: b"contact: a@b.example\n", _RESULTS: json.dumps(_RATES).encode()}
    return {
        "gallery": Input({**run, **parts}, [_database, _files], 700, 5),
        "results": Input({**run, **crops, **card}, [_results, _fields], 700, 5),
    }


def _database(sound: Sound, rng: Rng) -> Case:
    """Return a case whose database is a valid one of SQLite with false contents, or a damaged one."""
    data = bytes(sound[_DATABASE] or b"")  # type: ignore[arg-type]
    if rng.random() < 0.3 or not hasattr(sqlite3.Connection, "deserialize"):  # Python 3.10 has not
        data = damage(data, [data], rng) if rng.random() < 0.7 else data[: int(rng.integers(len(data)))]
    else:
        database = sqlite3.connect(":memory:", isolation_level=None)
        database.deserialize(data)
        for _ in range(int(rng.geometric(0.6))):
            table = str(pick(rng, sorted(_COLUMNS)))
            column = str(pick(rng, _COLUMNS[table].split()))
            change = f"UPDATE OR IGNORE {table} SET {column} = {pick(rng, _VALUES)} WHERE id = {int(rng.integers(1, 3))}"
            try:
                database.executescript(str(pick(rng, _CHANGES)) if rng.random() < 0.3 else change)
            except sqlite3.Error:  # a rule of the table, or what an earlier change broke
                continue
        data = database.serialize()
        database.close()
    return Case(list(pick(rng, _COMMANDS)), {_DATABASE: data})


def _files(sound: Sound, rng: Rng) -> Case:
    """Return a case with damaged vectors and faces, odd files, and journals that SQLite would play back."""
    files: dict[str, Entry] = {}
    for name in (_VECTORS, _FACES):
        data = bytes(sound[name] or b"")  # type: ignore[arg-type]
        kind = rng.random()
        if kind < 0.4:
            files[name] = damage(data, [data], rng)
        elif kind < 0.5:
            files[name] = np.full(len(data) // 4, np.nan, dtype="<f4").tobytes()
        elif kind < 0.6:
            files[name] = pick(rng, (None, b"", Fifo(), Folder(), Link("../canary"), Link("/dev/zero")))
    if rng.random() < 0.4:
        end = len(b"../canary").to_bytes(4, "big") + sum(b"../canary").to_bytes(4, "big") + bytes.fromhex("d9d505f920a163d7")
        journal = bytes.fromhex("d9d505f920a163d7") + rng.bytes(600)
        chosen = pick(rng, (journal, journal + b"../canary" + end, rng.bytes(40), b"", Link("../canary"), Fifo()))
        files[f"{_DATABASE}{pick(rng, _NAMES)}"] = chosen
    if rng.random() < 0.2:
        files["g/gallery.lock"] = pick(rng, (Link("../canary"), Fifo(), Folder(), b"9" * 99, b"\x1b[2J"))
    if rng.random() < 0.1:
        files[_DATABASE] = pick(rng, (None, b"", Fifo(), Folder(), Link("../canary"), Link("/dev/zero"), rng.bytes(5000)))
    return Case(list(pick(rng, _COMMANDS)), files)


def _results(sound: Sound, rng: Rng) -> Case:
    """Return a case with well-formed results of wrong values, or damaged ones."""
    data = bytes(sound[_RESULTS] or b"")  # type: ignore[arg-type]
    kind = rng.random()
    if kind < 0.7:
        data = json.dumps(change_tree(_RATES, rng)).encode()
    elif kind < 0.8:
        data = pick(rng, (b"", b"null", b"[]", b"[" * 5000, b'{"lfw": ' + b"9" * 5000 + b"}", b'{"\\ud800": {}}'))
    else:
        data = damage(data, [data], rng)
    return Case(list(_CARD if rng.random() < 0.3 else _VERIFY), {_RESULTS: data})


def _fields(sound: Sound, rng: Rng) -> Case:
    """Return a case with odd texts of a card, or a damaged file of them."""
    texts = {str(key): pick(rng, (*TEXTS, "<script>x</script>", "# a\n| b |", "![x](/etc/passwd)")) for key in _KEYS}
    try:
        data = yaml.safe_dump(change_tree(texts, rng), allow_unicode=True).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, RecursionError, ValueError):
        data = b"contact: &a [*a]\n"
    return Case(list(_CARD), {_FIELDS: damage(data, [data], rng) if rng.random() < 0.3 else data})
