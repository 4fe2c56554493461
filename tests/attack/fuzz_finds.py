"""Minimises finds of the fuzzer, and writes them to disk."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .fuzz_cases import Outcome, run_cases
from .fuzz_files import Case, Files, Place, dump_case


def minimise(case: Case, kind: str, place: Place, sound: Files, memory: float, seconds: float) -> Case:
    """Return a smaller case with the same outcome: fewer files, and fewer bytes in each; take at most `seconds`."""
    end = time.monotonic() + seconds

    def ends_so(smaller: Case) -> bool:
        return time.monotonic() < end and run_one(smaller, place, sound, memory).kind == kind

    for name in list(case.files):
        smaller = case._replace(files={other: entry for other, entry in case.files.items() if other != name})
        if ends_so(smaller):
            case = smaller
    for number in range(len(case.command) - 1, 1, -1):
        smaller = case._replace(command=case.command[:number] + case.command[number + 1 :])
        if ends_so(smaller):
            case = smaller
    for name, entry in case.files.items():
        if isinstance(entry, bytes):
            case = _shorten(case, name, entry, ends_so, end)
    return case


def _shorten(case: Case, name: str, data: bytes, ends_so: Callable[[Case], bool], end: float) -> Case:
    """Cut pieces out of a file, large ones first, as long as the outcome stays the same, until the time `end`."""
    size = len(data) // 2
    while size:
        place = 0
        while place < len(data) and time.monotonic() < end:
            shorter = data[:place] + data[place + size :]
            smaller = case._replace(files={**case.files, name: shorter})
            if ends_so(smaller):
                case, data = smaller, shorter
            else:
                place += size
        size //= 2
    return case


def run_one(case: Case, place: Place, sound: Files, memory: float) -> Outcome:
    """Run one case in its own child."""
    (outcome,) = run_cases(place, [lambda: case], sound, memory)
    return outcome


def keep(folder: Path, case: Case, facts: Mapping[str, Any], said: str) -> None:
    """Write a find: case.json, and the output of the program."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case.json").write_text(dump_case(case, facts))
    (folder / "said.txt").write_text(said, errors="backslashreplace")
