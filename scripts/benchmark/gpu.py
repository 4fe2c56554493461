"""Run the GPU tests and the ordinary benchmarks on one GPU, one after the other: face bench gpu --out gpu

tests        the tests that need a GPU (pytest -m gpu)
head         steps of the head against plain heads: time, memory, share of the rate of bare products
backbones    forward and backward passes of the networks
train        whole training steps against a plain loop
neighbours   the search for neighbours
capacity     how many identities fit on this device, found by trying
data         the loader
checkpoint   how long training waits for saves

Every part is a program in a process of its own with a deadline below ten minutes, so one that fails, hangs or runs out of
memory costs itself only. The folder --out has the figures of each part (NAME.json), its output (NAME.txt), and summary.json,
which is complete after every part. This program needs torch alone: what else is missing it names at the start, and a part that
ends at an import is "skipped: needs PACKAGE". The exit status is 1 if another part failed or was not reached, or none ran.

Examples:
  face bench gpu --out gpu
  face bench gpu --device cpu --quick --parts capacity data
"""

import argparse
import datetime
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts.doctor import check_package, read_pins
from utils import distributed
from utils.cli import make_parser
from utils.program import run_main
from utils.text import pip_install

from .kit import machine, write_json

_ROOT = Path(__file__).parents[2]


class _Part(NamedTuple):
    command: tuple[str, ...]  # after `python -m`, with {device}, {json} and {memory}, GiB
    seconds: int  # its deadline where the whole takes half an hour


def _benchmark(name: str, seconds: int, *options: str) -> _Part:
    return _Part((f"scripts.benchmark.{name}", *options, "--json", "{json}"), seconds)


_HEAD_ALONE = ("--backbone", "none", "--batch", "128", "--find")
_TESTS = ("pytest", "-vv", "-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors", "--durations=20")
PARTS = {
    "tests": _Part(_TESTS, 300),  # with the files of _gpu_tests
    "head": _benchmark("head", 300, "--device", "{device}"),
    "backbones": _benchmark("backbones", 240, "--device", "{device}"),
    "train": _benchmark("train", 240, "--device", "{device}"),
    "neighbours": _benchmark("neighbours", 180, "--device", "{device}"),
    "capacity": _benchmark("capacity", 120, "--device", "{device}", "--memory", "{memory}", *_HEAD_ALONE),
    "data": _benchmark("data", 240),
    "checkpoint": _benchmark("checkpoint", 180),
}


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face bench gpu", __doc__)
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
    pins = list(read_pins(_ROOT / "requirements.txt"))
    pins += [pin for pin in read_pins(_ROOT / "requirements-dev.txt") if pin.package == "pytest"]
    if missing := [f"{pin.package}=={pin.version}" for pin in pins if check_package(pin)[0]]:
        print(f"missing here: {', '.join(missing)}; for parts that need them: {pip_install(*missing)}", flush=True)
    summary: dict[str, Any] = {"machine": machine(options.device), "quick": options.quick, "begun": now, "missing": missing}
    parts = summary["parts"] = {}
    ends = time.monotonic() + 60 * options.minutes
    for name in options.parts:
        seconds = min(PARTS[name].seconds * options.minutes / 30, ends - time.monotonic())
        print(f"{name:<11}at most {max(0.0, seconds):.0f} s ...", flush=True)
        begun = time.monotonic()
        parts[name] = _run(name, options, seconds) if seconds > 1 else {"status": "not started: --minutes were over"}
        parts[name]["seconds"] = round(time.monotonic() - begun, 1)
        write_json(options.out / "summary.json", summary)
        print(f"{name:<11}{', '.join(map(str, parts[name].values()))} s", flush=True)
    status = {name: part["status"].partition(":")[0] for name, part in parts.items()}
    failed = [name for name in status if status[name] not in ("complete", "skipped")]
    if failed or "complete" not in status.values():
        raise ValueError(f"not complete: {', '.join(failed or status)}; {options.out}/NAME.txt has their output")


def _gpu_tests() -> list[str]:
    """Return the files with tests marked gpu or of the fixture `device`, by their text, as others may not be imported here."""
    marked = re.compile(r"\bmark\.gpu\b|^def test_\w+\([^)]*\bdevice: torch", re.M)
    paths = sorted((_ROOT / "tests").glob("test_*.py"))
    return [f"tests/{path.name}" for path in paths if marked.search(path.read_text("utf-8"))]


def _run(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own; return how it ended."""
    # on the CPU as little as finds its answer soon
    memory = 0.9 * torch.cuda.mem_get_info()[0] / 2**30 if options.device == "cuda" else 0.5
    places = {"device": options.device, "json": str(options.out.resolve() / f"{name}.json"), "memory": f"{memory:.2f}"}
    words = [word.format(**places) for word in PARTS[name].command]
    words += _gpu_tests() if name == "tests" else ["--quick"] * options.quick
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    # what a part has said before it is killed is in its file; our tests on a GPU need no plugin of pytest
    environment |= {"PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with open(options.out / f"{name}.txt", "wb") as output:
        command = [sys.executable, "-m", *words]
        process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            ended = f"failed with status {code}" if (code := process.wait(seconds)) else "complete"
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # also what the part has started
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            ended = f"killed at its deadline of {seconds:.0f} s"
    return _judged(ended, (options.out / f"{name}.txt").read_text("utf-8", errors="replace"))


def _judged(ended: str, said: str) -> dict[str, Any]:
    """Return the status of a part, and how many of its tests ended how, from its end and its output.

    It is skipped if its last line, or that of every file of tests that could not be collected, says that a package is missing.
    """
    tests = Counter(re.findall(r"^tests/\S+::.* (PASSED|FAILED|ERROR|SKIPPED)\b", said, re.M))
    last = "\n".join([line for line in said.splitlines() if line.startswith("E  ")] + said.splitlines()[-1:])
    missing = re.findall(r"No module named '?(\w+)", last)
    others = [name for name in missing if (_ROOT / name).exists() or (_ROOT / f"{name}.py").exists()]
    faults = tests["FAILED"] + tests["ERROR"] + len(others)
    if ended.startswith("failed") and missing and not faults and len(missing) >= said.count("ERROR collecting"):
        needs = f"needs {', '.join(sorted(set(missing)))}"
        ended = f"complete: but for what {needs}" if tests["PASSED"] else f"skipped: {needs}"
    return {"status": ended, "tests": dict(tests)} if tests else {"status": ended}


if __name__ == "__main__":
    raise SystemExit(main())
