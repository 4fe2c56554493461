"""Run the GPU tests and the ordinary benchmarks on one GPU, one after the other: python -m scripts.benchmark.gpu --out gpu

tests        the tests that need a GPU (pytest -m gpu)
head         steps of the head against plain heads: time, memory, share of the rate of bare products
backbones    forward and backward passes of the networks
train        whole training steps against a plain loop
neighbours   the search for neighbours
capacity     how many identities fit on this device, found by trying
data         the loader
checkpoint   how long training waits for saves

Every part is a program in a process of its own with a deadline, so one that fails, hangs or runs out of memory costs itself
only. The folder --out has the figures of each part (NAME.json), its output (NAME.txt), and summary.json, which is complete
after every part. The exit status is 1 if a part failed or was not reached.

Examples:
  python -m scripts.benchmark.gpu --out gpu
  python -m scripts.benchmark.gpu --device cpu --quick --parts capacity data
"""

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from utils import distributed
from utils.cli import make_parser
from utils.files import write_file
from utils.memory import free_bytes
from utils.program import run_main

from .kit import machine

_ROOT = Path(__file__).parents[2]


class _Part(NamedTuple):
    command: tuple[str, ...]  # after `python -m`, with {device}, {json} and {memory}, GiB
    seconds: int  # its deadline where the whole takes half an hour


def _benchmark(name: str, seconds: int, *options: str) -> _Part:
    return _Part((f"scripts.benchmark.{name}", *options, "--json", "{json}"), seconds)


_HEAD_ALONE = ("--backbone", "none", "--batch", "128", "--find")
PARTS = {
    "tests": _Part(("pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"), 300),
    "head": _benchmark("head", 300, "--device", "{device}"),
    "backbones": _benchmark("backbones", 240, "--device", "{device}"),
    "train": _benchmark("train", 240, "--device", "{device}"),
    "neighbours": _benchmark("neighbours", 180, "--device", "{device}"),
    "capacity": _benchmark("capacity", 120, "--device", "{device}", "--memory", "{memory}", *_HEAD_ALONE),
    "data": _benchmark("data", 240),
    "checkpoint": _benchmark("checkpoint", 180),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and measure; return the exit status."""
    parser = make_parser("python -m scripts.benchmark.gpu", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default cuda)")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="default: all, in this order")
    parser.add_argument("--minutes", type=float, default=30.0, help="deadline of all parts together; each has a share of it")
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute on two cores for each part")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of all figures and outputs")
    return run_main(benchmark, parser.parse_args(arguments))


def benchmark(options: argparse.Namespace) -> None:
    """Run the chosen parts one after the other.

    Raises:
        ValueError: there is no such device; or, after everything else, a part failed.
    """
    if not options.minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {options.minutes:g}")
    distributed.choose_device(options.device, 0)
    options.out.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now().isoformat(timespec="seconds")
    summary: dict[str, Any] = {"machine": machine(options.device), "quick": options.quick, "begun": now, "parts": {}}
    ends = time.monotonic() + 60 * options.minutes
    for name in options.parts:
        seconds = min(PARTS[name].seconds * options.minutes / 30, ends - time.monotonic())
        print(f"{name:<11}at most {max(0.0, seconds):.0f} s ...", flush=True)
        begun = time.monotonic()
        status = _run(name, options, seconds) if seconds > 1 else "not started: --minutes were over"
        summary["parts"][name] = {"status": status, "seconds": time.monotonic() - begun}
        write_file(options.out / "summary.json", json.dumps(summary, indent=1) + "\n")  # complete at any time
        print(f"{name:<11}{status}, {time.monotonic() - begun:.1f} s", flush=True)
    failed = [name for name, part in summary["parts"].items() if part["status"] != "complete"]
    if failed:
        raise ValueError(f"not complete: {', '.join(failed)}; {options.out}/NAME.txt has their output")


def _run(name: str, options: argparse.Namespace, seconds: float) -> str:
    """Run a part in a process of its own; return how it ended."""
    # on the CPU as little as finds its answer soon
    memory = 0.9 * free_bytes(torch.device("cuda"), 1) / 2**30 if options.device == "cuda" else 0.5
    places = {"device": options.device, "json": str(options.out.resolve() / f"{name}.json"), "memory": f"{memory:.2f}"}
    words = [word.format(**places) for word in PARTS[name].command]
    if options.quick and name != "tests":
        words.append("--quick")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    with open(options.out / f"{name}.txt", "wb") as output:
        command = [sys.executable, "-m", *words]
        process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # also what the part has started
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return f"killed at its deadline of {seconds:.0f} s"
            raise
    return f"failed with status {code}" if code else "complete"


if __name__ == "__main__":
    raise SystemExit(main())
