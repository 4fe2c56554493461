"""The checks of the torturer after every blow. They read the files with their own code, not with this program's readers.

The format is that of docs/running.md. Each check returns a line for each fault; an empty list means no fault.
"""

import fcntl
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

KEEP_LAST = 2  # the default of configs/base.yaml
_WIDTHS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I8": "i1", "U8": "u1"}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a .safetensors file; bfloat16 as float32.

    Raises:
        ValueError, KeyError: it does not follow the format.
    """
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    tensors, reached = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        if first != reached:
            raise ValueError(f"{name} begins at {first}, the one before ends at {reached}")
        reached = last
        values = np.frombuffer(body[first:last], _WIDTHS[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            values = (values.astype("<u4") << 16).view("<f4")
        tensors[name] = values
    if reached != len(body):
        raise ValueError(f"its tensors end at {reached}, the file has {len(body)}")
    return tensors


def check_checkpoint(folder: Path, classes: int) -> list[str]:
    """Return the faults of a complete checkpoint: in its files, sizes, hashes, numbers, and class centres."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        faults, files = [], manifest["files"]
        if manifest["step"] != int(folder.name.removeprefix("step_")):
            faults.append(f"its manifest is of step {manifest['step']}")
        there = {path.name for path in folder.iterdir()} - {"manifest.json"}
        if there != set(files):
            faults.append(f"the manifest names {sorted(files)}, the folder holds {sorted(there)}")
        for name in sorted(there & set(files)):
            data = (folder / name).read_bytes()
            if len(data) != files[name]["size"] or xxhash.xxh3_128_hexdigest(data) != files[name]["xxh3_128"]:
                faults.append(f"{name} has another size or hash than the manifest says")
                continue
            numbers = read_safetensors(folder / name) if name.endswith(".safetensors") else _numbers_of(folder / name)
            faults += [f"{name}: {key} is not finite" for key, values in numbers.items() if not np.isfinite(values).all()]
            first, last = files[name].get("slots", (0, 0))
            if last and any(len(values) != last - first for values in numbers.values()):
                faults.append(f"{name} has another number of rows than its slots {first} to {last}")
        reached = 0
        for first, last in sorted(entry["slots"] for entry in files.values() if "slots" in entry):
            if first != reached:
                faults.append(f"class centres from {reached} to {first} are missing, or there twice")
            reached = last
        if reached != classes:
            faults.append(f"its files hold class centres up to {reached} of {classes}")
    except Exception as error:  # a damaged file may raise anything
        faults = [f"cannot be read: {type(error).__name__}: {error}"]
    return [f"{folder.name}: {fault}" for fault in faults]


def _numbers_of(path: Path) -> dict[str, np.ndarray]:
    """Return all tensors and floats of a trainer.pt by their path in it."""
    found: dict[str, np.ndarray] = {}

    def collect(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value.double().numpy()
        elif isinstance(value, float):
            found[name] = np.array(value)
        elif isinstance(value, (dict, list, tuple)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                collect(item, f"{name}.{key}")

    collect(torch.load(path, map_location="cpu", weights_only=True), "")
    return found


class History:
    """The observations so far of a run folder with this number of classes, which later states must agree with."""

    def __init__(self, folder: Path, classes: int) -> None:
        self.folder, self.classes = folder, classes
        self.sealed: dict[int, tuple[str, float | None]] = {}  # hash of the manifest and score of every checkpoint ever seen
        self.present: set[int] = set()
        self.may_lack_steps = False  # a full disk may cost lines of metrics.jsonl

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint seen, 0 = none."""
        return max(self.sealed, default=0)

    def check(self) -> list[str]:
        """Compare the run folder with earlier observations, and return the faults."""
        found = {int(path.name[5:]): path for path in (self.folder / "checkpoints").glob("step_*")}
        faults = [line for path in found.values() for line in check_checkpoint(path, self.classes)]
        now: dict[int, tuple[str, float | None]] = {}
        for step, path in found.items():
            manifest = path / "manifest.json"
            if manifest.is_file():
                text = manifest.read_bytes()
                score = json.loads(text).get("score") if not faults else None
                now[step] = (xxhash.xxh3_128_hexdigest(text), score)
                if step in self.sealed and self.sealed[step][0] != now[step][0]:
                    faults.append(f"step {step} was sealed before and is another one now")
        if max(found, default=0) < self.newest:
            faults.append(f"the newest checkpoint was step {self.newest}, now it is {max(found, default=0)}")
        known = {**self.sealed, **now}
        if back := set(found) & (set(self.sealed) - self.present):
            faults.append(f"checkpoints that were gone are there again: {sorted(back)}")
        for step in self.present - set(found):
            score = self.sealed[step][1]
            better = score is None or any((known[s][1] or -math.inf, s) > (score, step) for s in found if s in known)
            if sum(s > step for s in found) < KEEP_LAST or not better:
                faults.append(f"step {step} is gone, which was one of the newest {KEEP_LAST} or the best")
        if aside := [path.name for path in (self.folder / "checkpoints").glob("damaged_*")]:
            faults.append(f"was put aside as damaged: {aside}")
        self.sealed, self.present = known, set(found)
        return faults + check_metrics(self.folder / "metrics.jsonl", self.may_lack_steps) + check_lock(self.folder)


def check_metrics(path: Path, may_lack_steps: bool = False) -> list[str]:
    """Return the faults of a metrics.jsonl whose writer may have been killed in the middle of its last line."""
    if not path.is_file():
        return []
    *lines, _ = path.read_text(errors="replace").split("\n")
    faults, seen = [], Counter[tuple[str, int]]()
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            seen[record["kind"], int(record["step"])] += 1
        except (ValueError, KeyError, TypeError):
            faults.append(f"metrics.jsonl: line {number} is {line[:80]!r}")
    faults += [f"metrics.jsonl: step {step} ({kind}) is there {n} times" for (kind, step), n in seen.items() if n > 1]
    trained = [step for kind, step in seen if kind == "train"]
    if trained != sorted(trained):
        faults.append("metrics.jsonl: its steps do not rise")
    lacking = sorted(set(range(1, max(trained, default=0) + 1)) - set(trained))
    if lacking and not may_lack_steps:
        faults.append(f"metrics.jsonl: steps {lacking[:9]} are missing")
    return faults


def check_best(folder: Path) -> list[str]:
    """Return a line if the best score of a finished run's metrics.jsonl is that of no checkpoint."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = [record["accuracy"] for record in records if record["kind"] == "tiny"]
    kept = [json.loads(path.read_text()).get("score") for path in sorted((folder / "checkpoints").glob("step_*/manifest.json"))]
    return [] if max(scores) in kept else [f"the best score was {max(scores)}, the checkpoints that are left have {kept}"]


def check_lock(folder: Path) -> list[str]:
    """Return a line if a process still holds the lock of a run folder."""
    try:
        with (folder / ".lock").open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        pass
    except OSError:
        return ["the run folder is still locked"]
    return []


def check_said(said: str, interrupted_at_start: bool) -> list[str]:
    """Return signs of an unexpected error in the stderr of the processes; Python itself shows a Ctrl-C while it starts."""
    if interrupted_at_start and "KeyboardInterrupt" in said:
        said = ""
    bad = re.search(r"Traceback|Exception ignored|Exception in thread|Fatal Python error|in use by another job", said)
    return [f"stderr has {said[bad.start() : bad.start() + 60].splitlines()[0]!r}"] if bad else []


def check_resumed(log: str, newest: int) -> list[str]:
    """Return a line unless a start's part of train.log shows that it resumed from the newest checkpoint (0 = a new run)."""
    if not re.search(r" step \d+/", log):
        return []  # it did not get that far
    step = max(map(int, re.findall(r"resumed from \S+ after step (\d+)", log)), default=0)
    return [] if step == newest else [f"started after step {step}, the newest checkpoint was step {newest}"]


def wait_until(condition: Any, seconds: float, pause: float = 0.02) -> float | None:
    """Wait until condition() holds; return the seconds, None if it does not hold in time."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            return None
        time.sleep(pause)
    return time.monotonic() - begun


def weights_of(run: Path, step: int) -> dict[str, bytes]:
    """Return the bytes of a checkpoint's files of weights and class centres, by name."""
    paths: Iterable[Path] = (run / "checkpoints" / f"step_{step:08d}").glob("*.safetensors")
    return {path.name: path.read_bytes() for path in paths}
