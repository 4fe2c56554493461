"""Attack every input of this project: python -m tests.attack.fuzz --minutes 10

The fuzzer first makes valid files, and takes those of tests/fixtures: sets in every form, lists, landmarks, images,
configurations, checkpoints, weights, files of arcface_torch, galleries, results. It damages them at random, and generates
well-formed files with false contents. The program that a user would start reads each case, in a process with limits of time,
memory and files. It must succeed, or end with one line `error: ...`. Anything else is a find, and so is a case that runs code
or writes files outside its folder. Finds are minimised and kept in --out, and the exit status is then 1. Case N of seed S is
always the same.

Examples:
  python -m tests.attack.fuzz --minutes 10 --seed 1
  python -m tests.attack.fuzz --inputs trainer --seed 1 --only 17
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m tests.attack.fuzz")

import argparse
import functools
import importlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import cv2
import torch
import tqdm

from partial_fc.kernels import cpu as cpu_kernels
from utils.cli import int_in_range, make_parser, progress
from utils.program import run_main

from . import (
    fuzz_inputs_config,
    fuzz_inputs_gallery,
    fuzz_inputs_images,
    fuzz_inputs_runs,
    fuzz_inputs_sets,
    fuzz_inputs_tables,
)
from .fuzz_cases import Outcome, run_cases
from .fuzz_files import Place
from .fuzz_finds import keep, minimise, run_one
from .fuzz_inputs import Input, make_case
from .fuzz_seeds import make_seeds

# imported before the first fork, so that no child spends its time on them
_MODULES = (
    "train", "eval.__main__", "deploy.serve.server", "torch._dynamo", "torch.utils.tensorboard", "onnxruntime",
    "matplotlib.figure", "matplotlib.backends.backend_agg", "matplotlib.font_manager",
)  # fmt: skip
_PROGRAMS = (
    "arcface_torch.export_checkpoint", "arcface_torch.import_checkpoint", "arcface_torch.import_config", "checkpoint",
    "data.align", "data.convert_bin", "data.folder_to_rec", "data.pairs_to_bin", "data.verify", "deploy.card", "deploy.detect",
    "deploy.enrol", "deploy.gallery", "deploy.search", "deploy.verify",
)  # fmt: skip
_KEPT = 50  # finds that are minimised, one of each kind; the others are only counted


@dataclass
class Tally:
    """The results of one input."""

    cases: int = 0
    read: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    largest_mib: float = 0.0
    finds: Counter[str] = field(default_factory=Counter)  # by kind

    def add(self, outcome: Outcome) -> None:
        """Count the outcome of a case."""
        self.cases += 1
        self.read += outcome.kind == "read"
        self.refused += outcome.kind == "refused"
        self.slowest, self.largest_mib = max(self.slowest, outcome.seconds), max(self.largest_mib, outcome.growth)
        if outcome.is_find:
            self.finds[outcome.kind] += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and fuzz; return the exit status."""
    parser = make_parser("python -m tests.attack.fuzz", __doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="duration (default 1)")
    parser.add_argument("--cases", type=int_in_range(0), default=0, help="stop after N cases; 0 = when the time is up")
    parser.add_argument("--seed", type=int_in_range(0), default=0, help="random seed (default 0)")
    parser.add_argument("--inputs", nargs="+", metavar="NAME", default=[], help="attack only these; a wrong one lists them")
    parser.add_argument("--only", type=int_in_range(0), metavar="N", help="run only case N of one input, and show its output")
    parser.add_argument("--out", type=Path, default=Path("fuzz_finds"), help="folder for finds (default fuzz_finds)")
    parser.add_argument("--json", type=Path, help="write counts and finds to this file")
    options = parser.parse_args(arguments)
    return run_main(lambda: fuzz(options))


def fuzz(options: argparse.Namespace) -> None:
    """Make and run cases until the time is up; raise ValueError at the end if there were finds."""
    with tempfile.TemporaryDirectory() as name:
        inputs = load_inputs(Path(name), options.inputs)
        places = {key: Place.below(Path(name) / "cases" / key) for key in inputs}
        if options.only is not None:
            _show_one(inputs, places, options)
            return
        tallies = attack(inputs, places, options)
    report = {key: {**asdict(tally), "finds": dict(tally.finds)} for key, tally in tallies.items()}
    if options.json:
        options.json.write_text(
            json.dumps({"seed": options.seed, "minutes": options.minutes, "inputs": report}, indent=1) + "\n"
        )
    print(f"{'input':<20}{'cases':>9}{'read':>9}{'refused':>9}{'slowest s':>11}{'most MiB':>10}{'finds':>7}")
    for key, tally in tallies.items():
        numbers = f"{tally.cases:>9,}{tally.read:>9,}{tally.refused:>9,}{tally.slowest:>11.2f}{tally.largest_mib:>10.0f}"
        print(f"{key:<20}{numbers}{tally.finds.total():>7}")
    total, found = sum(tally.cases for tally in tallies.values()), sum(tally.finds.total() for tally in tallies.values())
    print(f"{'all':<20}{total:>9,}{'':>48}{found:>7}"[:75])
    if found:
        raise ValueError(f"{found} of {total} cases ended badly; one of each kind is in {options.out}")


def load_inputs(folder: Path, names: Sequence[str] = ()) -> dict[str, Input]:
    """Make the valid files below a folder; return the inputs with these names, or all inputs.

    Raises:
        ValueError: a name is unknown.
    """
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    tqdm.tqdm.monitor_interval = 0  # its thread would not survive a fork
    cpu_kernels.load()  # asks the compiler, which no case may
    for module in (*_MODULES, *(f"scripts.{program}" for program in _PROGRAMS)):
        try:
            importlib.import_module(module)
        except ImportError:
            if module in ("train", "eval.__main__"):
                raise
    seeds = folder / "seeds"
    seeds.mkdir()
    make_seeds(seeds)
    inputs = {
        name: entry
        for part in (fuzz_inputs_sets, fuzz_inputs_tables, fuzz_inputs_images, fuzz_inputs_runs, fuzz_inputs_gallery)
        for name, entry in part.inputs(seeds).items()
    }
    inputs |= fuzz_inputs_config.inputs()
    unknown = [name for name in names if name not in inputs]
    if unknown:
        raise ValueError(f"--inputs: no input {unknown[0]}; choose from {', '.join(inputs)}")
    return {name: entry for name, entry in inputs.items() if not names or name in names}


def attack(inputs: dict[str, Input], places: dict[str, Place], options: argparse.Namespace) -> dict[str, Tally]:
    """Run cases until the time is up, always of the input with the least time so far; keep one find of each kind."""
    tallies = {name: Tally() for name in inputs}
    kept: set[tuple[str, str]] = set()
    beside = {name: Place.below(place.root.with_name(f"{name} small")) for name, place in places.items()}  # for single cases
    end, number = time.monotonic() + 60 * options.minutes, 0
    with progress([], options.cases or None, "fuzzing", "case") as bar:
        while time.monotonic() < end and (not options.cases or number < options.cases):
            name = min(tallies, key=lambda key: tallies[key].seconds)
            entry, place, tally, begun = inputs[name], places[name], tallies[name], time.monotonic()
            batch = min(entry.batch, options.cases - number if options.cases else entry.batch)
            numbers = range(tally.cases, tally.cases + batch)
            makers = [functools.partial(make_case, name, entry, options.seed, one) for one in numbers]
            for one, outcome in zip(numbers, run_cases(place, makers, entry.sound, entry.memory), strict=True):
                if outcome.kind == "hang":  # run it again: the machine may just be busy
                    outcome = run_one(makers[one - numbers[0]](), beside[name], entry.sound, entry.memory)
                tally.add(outcome)
                bar.update()
                number += 1
                if outcome.is_find and (name, outcome.kind) not in kept and len(kept) < _KEPT:
                    kept.add((name, outcome.kind))
                    _keep(name, entry, beside[name], one, outcome, options)
            tally.seconds += time.monotonic() - begun
    return tallies


def _keep(name: str, entry: Input, place: Place, number: int, outcome: Outcome, options: argparse.Namespace) -> None:
    """Minimise a find, and write it with the command that reproduces it."""
    again = f"python -m tests.attack.fuzz --inputs {name} --seed {options.seed} --only {number}"
    facts: dict[str, Any] = {"input": name, "kind": outcome.kind, "repeat": again}
    try:
        case = make_case(name, entry, options.seed, number)
        small = minimise(case, outcome.kind, place, entry.sound, entry.memory, min(30.0, 3 * options.minutes))
    except Exception as error:  # of the fuzzer itself; the find still counts
        print(f"\n{name} {number}: the case cannot be minimised: {error!r}")
        return
    keep(options.out / f"{name}-{number}", small, facts, outcome.detail)
    print(f"\n{name}: {outcome.kind}\n  {again}", flush=True)


def _show_one(inputs: dict[str, Input], places: dict[str, Place], options: argparse.Namespace) -> None:
    """Run one case and print its outcome; raise ValueError if it is a find."""
    if len(inputs) != 1:
        raise ValueError("--only N needs one input: --inputs NAME")
    ((name, entry),) = inputs.items()
    case = make_case(name, entry, options.seed, options.only)
    outcome = run_one(case, places[name], entry.sound, entry.memory)
    print(f"{case.command}\n{ {key: len(data) if isinstance(data, bytes) else data for key, data in case.files.items()} }")
    print(os.fsdecode(os.fsencode(outcome.detail)).encode("ascii", "backslashreplace").decode())
    print(f"{outcome.kind}, {outcome.seconds:.2f} s, {outcome.growth:.0f} MiB")
    if outcome.is_find:
        raise ValueError(f"case {options.only} of {name} ended badly: {outcome.kind}")


if __name__ == "__main__":
    raise SystemExit(main())
