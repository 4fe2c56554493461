"""Compare this project's reader with real mxnet: python -m scripts.data.check_with_mxnet SET ...

For each record it compares the bytes, flag, label, ids, payload, and the decoded pixels. mxnet cannot be installed with a
current NumPy, so it runs in a separate environment, made once from requirements-mxnet.txt (Python 3.8 to 3.11).

SET: a folder with train.rec, and train.idx if it has one.

Example: python -m scripts.data.check_with_mxnet datasets/demo --every 10
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m scripts.data.check_with_mxnet")

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.recordio.image_record import IndexedRecordFile, unpack
from utils.cli import int_in_range, make_parser, progress
from utils.image import decode_rgb
from utils.program import run_main

_ROOT = Path(__file__).parents[2]
_SHOWN = 20  # differences that are printed


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and compare; return the exit status."""
    parser = make_parser("python -m scripts.data.check_with_mxnet", __doc__)
    parser.add_argument("sets", type=Path, nargs="+", help="folders with train.rec")
    parser.add_argument("--every", type=int_in_range(1), default=1, help="compare every N-th record (default 1: all)")
    parser.add_argument("--venv", type=Path, default=_ROOT / ".venv-mxnet", help="environment of mxnet (default .venv-mxnet)")
    parser.add_argument("--python", default=sys.executable, help="Python 3.8 to 3.11 for that environment (default: this one)")
    options = parser.parse_args(arguments)
    return run_main(lambda: check(options))


def check(options: argparse.Namespace) -> None:
    """Compare all sets; raise ValueError at the end if any record differs."""
    for folder in options.sets:
        if not (folder / "train.rec").is_file():
            raise ValueError(f"{folder}: no train.rec in it")
    python = prepare_judge(options.venv, options.python)
    total = sum(compare(folder, ask_judge(python, folder, options.every), options.every) for folder in options.sets)
    if total:
        raise ValueError(f"mxnet reads {total} record(s) differently")


def prepare_judge(venv: Path, base: str) -> Path:
    """Return the Python of an environment with mxnet; make it if it is missing or its requirements have changed."""
    requirements = _ROOT / "requirements-mxnet.txt"
    python, mark = venv / "bin" / "python", venv / "installed"
    if mark.is_file() and mark.read_text() == requirements.read_text():
        return python
    print(f"making the environment of mxnet in {venv}")
    for command in (
        [base, "-m", "venv", str(venv)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements)],
        [str(python), "-c", "import mxnet"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(
                f"mxnet's environment cannot be made ('{' '.join(command[-3:])}'): {last}. "
                "It needs Python 3.8 to 3.11; give one with --python"
            )
    mark.write_text(requirements.read_text())
    return python


def ask_judge(python: Path, folder: Path, every: int) -> Iterator[dict[str, Any]]:
    """Yield what mxnet reads, record by record."""
    command = [str(python), "-I", str(_ROOT / "scripts" / "data" / "mxnet_judge.py"), str(folder), "--every", str(every)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as judge:
        assert judge.stdout is not None and judge.stderr is not None
        for line in judge.stdout:
            yield json.loads(line)
        said = judge.stderr.read()
    if judge.returncode:
        raise ValueError(f"mxnet stopped on {folder} with status {judge.returncode}: {said.strip()[-300:]}")


def compare(folder: Path, judged: Iterator[dict[str, Any]], every: int = 1) -> int:
    """Print the differences of one set; return the number of records that differ.

    An image that only one of the two decodes is reported and counted separately: a WebP, which mxnet cannot decode, or a
    truncated JPEG, which mxnet pads with gray and which is an error here.
    """
    records = IndexedRecordFile(folder / "train.rec", folder / "train.idx")
    equal = differ = one_sided = 0
    positions = range(0, len(records), every)
    with progress([], len(positions), f"comparing {folder.name}", "record") as bar:
        for position, theirs in zip(positions, judged, strict=True):
            bar.update()
            ours = {"key": int(records.keys[position]), **describe(records, position)}
            names = [name for name in {**ours, **theirs} if name != "error" and ours.get(name) != theirs.get(name)]
            if ("error" in ours) != ("error" in theirs):
                names.append("error")
            if not names:
                equal += 1
                continue
            one = names == ["pixels"] and (ours["pixels"] is None) != (theirs["pixels"] is None)
            one_sided, differ = one_sided + one, differ + (not one)
            if one_sided + differ <= _SHOWN:
                what = ", ".join(f"{name} {ours.get(name)} here, {theirs.get(name)} by mxnet" for name in names)
                if one:
                    what = "decoded here, not by mxnet" if ours["pixels"] else "decoded by mxnet, rejected here as damaged"
                print(f"record {theirs['key']} of {records.path}: {what}")
    total = equal + differ + one_sided
    print(f"{folder}: {equal} of {total} records equal (bytes, header, payload, pixels), {one_sided} decoded by only one")
    return differ


def describe(records: IndexedRecordFile, position: int) -> dict[str, Any]:
    """Return what our reader finds in a record, with the keys of mxnet_judge.py."""
    try:
        raw = bytes(records.read_position(position))
    except ValueError as error:
        return {"error": str(error)}
    found: dict[str, Any] = {"raw": _hash(raw)}
    try:
        record = unpack(raw)
    except ValueError as error:
        return {**found, "error": str(error)}
    if isinstance(record.label, np.ndarray):
        found |= {"flag": len(record.label), "label": repr([float(value) for value in record.label])}
    else:
        found |= {"flag": 0, "label": repr(float(record.label))}
    found |= {"id": record.id, "id2": record.id2, "payload": _hash(record.payload)}
    if len(record.payload):
        try:
            pixels = decode_rgb(record.payload)
            found["pixels"] = [list(pixels.shape), _hash(pixels.tobytes())]
        except ValueError:
            found["pixels"] = None
    return found


def _hash(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


if __name__ == "__main__":
    raise SystemExit(main())
