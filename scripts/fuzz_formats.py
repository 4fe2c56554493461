"""Feed damaged files to the readers: python -m scripts.fuzz_formats --minutes 10

Takes the good and bad files of tests/fixtures (or of --seeds), damages .rec, .idx and .bin bytes at random, and reads them as
training and evaluation do. Each must end in a value or a ValueError, within seconds and
without large memory. Anything else is a find: its files are kept in --out, and the exit status is 1.

Example: python -m scripts.fuzz_formats --minutes 10 --seed 1
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m scripts.fuzz_formats")

import argparse
import faulthandler
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.record_dataset import RecordDataset
from data.recordio import IndexedRecordFile, unpack
from eval.pairs import read_bin
from utils.cli import make_parser
from utils.image import decode_rgb
from utils.program import guarded

from .face_files import progress, whole

MAX_GROWTH = 64  # MiB of resident memory that reading one damaged file may take
MAX_SECONDS = 20  # for one damaged file, on a busy machine
_WORDS = (0, 1, 2, 3, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 29, 2 << 29, 3 << 29, 7 << 29, (1 << 29) - 1, 0xCED7230A)
_SEEDS = Path(__file__).parent.parent / "tests" / "fixtures"


class Seed(NamedTuple):
    """A file, or a record file with its index, to be damaged."""

    files: dict[str, bytes]  # by name
    read: Callable[[Path], None]


class Find(NamedTuple):
    """A damaged file that ended in something else than a value or a ValueError."""

    number: int
    what: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and fuzz; return the exit status."""
    parser = make_parser("python -m scripts.fuzz_formats", __doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default 1)")
    parser.add_argument("--cases", type=whole(0), default=0, help="stop after so many cases; 0 = when the time is up")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the damage (default 0)")
    parser.add_argument("--seeds", type=Path, nargs="*", default=[_SEEDS], help="folders with .rec and .bin files")
    parser.add_argument("--out", type=Path, default=Path("fuzz_finds"), help="folder for what was found (default fuzz_finds)")
    parser.add_argument("--json", type=Path, help="write counts and finds to this file")
    options = parser.parse_args(arguments)
    return guarded(lambda: fuzz(options))


def fuzz(options: argparse.Namespace) -> None:
    """Damage and read until the time is up; raise ValueError at the end if there were finds."""
    seeds = load_seeds(options.seeds)
    finds: list[Find] = []
    counts: Counter[str] = Counter()
    end = time.monotonic() + 60 * options.minutes
    number, slowest, largest = 0, 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder, progress([], options.cases or None, "fuzzing", "case") as bar:
        quiet = _silence_libjpeg()
        try:
            while time.monotonic() < end and (not options.cases or number < options.cases):
                rng = np.random.default_rng([options.seed, number])
                seed = seeds[int(rng.integers(len(seeds)))]
                files = damage(seed.files, seeds, rng)
                outcome, seconds, growth = try_to_read(seed, files, Path(folder))
                slowest, largest = max(slowest, seconds), max(largest, growth)
                counts[outcome.split(":")[0]] += 1
                if outcome not in ("value", "error"):
                    finds.append(Find(number, outcome))
                    _keep(options.out / str(number), files)
                number += 1
                bar.update()
        finally:
            _restore(quiet)
    report: dict[str, Any] = {
        "cases": number,
        "outcomes": dict(counts),
        "slowest_seconds": round(slowest, 3),
        "largest_growth_mib": round(largest, 1),
        "finds": [find._asdict() for find in finds],
    }
    print(json.dumps({name: value for name, value in report.items() if name != "finds"}))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    for find in finds[:20]:
        print(f"case {find.number}: {find.what}")
    if finds:
        raise ValueError(f"{len(finds)} of {number} cases ended badly; their files are in {options.out}")


def load_seeds(folders: Sequence[Path]) -> list[Seed]:
    """Return the files below the folders: .rec with the .idx and property beside it, and .bin."""
    seeds = []
    for folder in folders:
        for path in sorted(folder.rglob("*.rec")):
            files = {"train.rec": path.read_bytes()}
            for source, name in ((path.with_suffix(".idx"), "train.idx"), (path.with_name("property"), "property")):
                if source.is_file():
                    files[name] = source.read_bytes()
            seeds.append(Seed(files, read_records))
        seeds += [Seed({"set.bin": path.read_bytes()}, read_pairs) for path in sorted(folder.rglob("*.bin"))]
    seeds = [seed for seed in seeds if any(seed.files.values())]
    if not seeds:
        raise ValueError(f"--seeds must name folders with .rec or .bin files; {', '.join(map(str, folders))} have none")
    return seeds


def damage(files: dict[str, bytes], seeds: Sequence[Seed], rng: np.random.Generator) -> dict[str, bytes]:
    """Return the files with one to eight changes to one of them, or to two, or without its index."""
    changed = {name: bytearray(data) for name, data in files.items()}
    if "train.idx" in changed and rng.random() < 0.1:
        del changed["train.idx"]
    names = sorted(changed)
    for name in set(rng.choice(names, int(rng.integers(1, 3))).tolist()):
        for _ in range(int(rng.geometric(0.4))):
            _change(changed[name], seeds, rng)
    return {name: bytes(data) for name, data in changed.items()}


def _change(data: bytearray, seeds: Sequence[Seed], rng: np.random.Generator) -> None:
    """Make one change to the bytes, in place."""
    place = int(rng.integers(len(data) + 1)) if rng.random() < 0.7 else int(rng.integers(min(len(data), 64) + 1))
    length = int(rng.integers(1, 40))
    kind = int(rng.integers(8))
    if kind == 0 and place < len(data):
        data[place] ^= 1 << int(rng.integers(8))
    elif kind == 1 and place < len(data):
        data[place] = int(rng.integers(256))
    elif kind == 2:
        data[place : place + 4] = _WORDS[int(rng.integers(len(_WORDS)))].to_bytes(4, "little" if rng.random() < 0.8 else "big")
    elif kind == 3:
        del data[place : place + length]
    elif kind == 4:
        data[place:place] = rng.bytes(length)
    elif kind == 5:
        data[place:place] = data[place : place + length]
    elif kind == 6 and rng.random() < 0.3:
        del data[place:]
    else:
        other = seeds[int(rng.integers(len(seeds)))].files
        source = other[sorted(other)[int(rng.integers(len(other)))]]
        begin = int(rng.integers(len(source) + 1))
        data[place : place + length] = source[begin : begin + length]


def try_to_read(seed: Seed, files: dict[str, bytes], folder: Path) -> tuple[str, float, float]:
    """Return ("value", "error" or what went wrong, seconds, MiB that resident memory rose by)."""
    for name in ("train.rec", "train.idx", "property", "set.bin"):
        (folder / name).unlink(missing_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    before = _reset_peak()
    faulthandler.dump_traceback_later(10 * MAX_SECONDS, exit=True)  # a hang ends the program with a trace
    begun = time.monotonic()
    try:
        seed.read(folder)
        outcome = "value"
    except ValueError as error:
        outcome = "error" if "\n" not in str(error) else f"several lines: {error}"
    except Exception as error:  # this is what the program looks for
        outcome = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    faulthandler.cancel_dump_traceback_later()
    growth = _peak() - before
    if seconds > MAX_SECONDS:
        outcome = f"slow: {seconds:.1f} s, then {outcome}"
    if growth > MAX_GROWTH:
        outcome = f"large: {growth:.0f} MiB, then {outcome}"
    return outcome, seconds, growth


def read_records(folder: Path) -> None:
    """Read a record file in every way: record by record, and as a face set."""
    first: ValueError | None = None
    try:
        records = IndexedRecordFile(folder / "train.rec", folder / "train.idx")
        for position in range(len(records)):
            try:
                record = unpack(records.read_position(position))
                if len(record.payload):
                    decode_rgb(record.payload)
            except ValueError as error:
                first = first or error
    except ValueError as error:
        first = error
    dataset = RecordDataset(folder)
    pixels = np.empty((112, 112, 3), dtype=np.uint8)
    for index in range(dataset.num_images):
        try:
            dataset.decode_into(index, pixels)
        except ValueError as error:
            first = first or error
    if first is not None:
        raise first


def read_pairs(folder: Path) -> None:
    """Read a verification set and decode its images."""
    pairs = read_bin(folder / "set.bin")
    for index in range(len(pairs.images)):
        pairs.decode(index)


def _reset_peak() -> float:
    """Set the peak of resident memory back to what there is now, and return it in MiB."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _peak()


def _peak() -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def _silence_libjpeg() -> int:
    """Send what C libraries write to stderr nowhere (libjpeg remarks on every damage); return the old stderr."""
    sys.stderr.flush()
    old = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    sys.stderr = os.fdopen(os.dup(old), "w", buffering=1)
    return old


def _restore(old: int) -> None:
    os.dup2(old, 2)
    os.close(old)
    sys.stderr = sys.__stderr__


def _keep(folder: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


if __name__ == "__main__":
    raise SystemExit(main())
