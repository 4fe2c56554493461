"""Measure everything worth knowing of one GPU in ten minutes: python -m scripts.benchmark.gpu [--json FILE] [--out FILE]

machine     versions; rates of copies, matrix products and launches
tests       the tests that need a GPU
head        steps of the head over identities, sample rate, storage, batch, cache and chunk, beside what limits them
backbone    forward and backward passes of three networks in three precisions, eager, compiled and as a CUDA graph
training    train.py as a user starts it, on synthetic images; what its steps wait for, and a timeline of them
loader      images per second of 1 to 16 decoder threads beside a main thread that launches work
checkpoint  how long training waits for saves of a big head, and the memory of the host
largest     as many identities as the card holds, up to 85 million: one step

Every part is a process of its own with a deadline, so one that fails or hangs costs itself only. The JSON is complete after
every part. The exit status is 1 if a part failed or was not reached. On the CPU (--device cpu) the same parts run, and leave
out what only CUDA can tell.

Examples:
  python -m scripts.benchmark.gpu --json gpu.json --out gpu.html
  python -m scripts.benchmark.gpu --device cpu --quick
  python -m scripts.benchmark.gpu --parts head backbone --minutes 5
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m scripts.benchmark.gpu")

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from utils import distributed
from utils.cli import make_parser
from utils.files import replace_text
from utils.program import run_main

from .gpu_parts import gpu_tests, heads, largest, loading, machine, networks, page, saving, trainings
from .gpu_parts.measuring import Context, Row

_LAST_LINES = 25  # of the output of a part that failed


class _Part(NamedTuple):
    measure: Callable[[Context], Iterator[Row]]
    seconds: int  # its deadline where the whole takes ten minutes


PARTS = {
    "machine": _Part(machine.measure, 30),
    "tests": _Part(gpu_tests.measure, 120),
    "head": _Part(heads.measure, 150),
    "backbone": _Part(networks.measure, 150),
    "training": _Part(trainings.measure, 120),
    "loader": _Part(loading.measure, 45),
    "checkpoint": _Part(saving.measure, 75),
    "largest": _Part(largest.measure, 45),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and measure; return the exit status."""
    parser = make_parser("python -m scripts.benchmark.gpu", __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default cuda)")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="default: all, in this order")
    parser.add_argument("--minutes", type=float, default=10.0, help="deadline of all parts together; each has a share of it")
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute on two cores")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="all figures, written after every part")
    parser.add_argument("--out", type=Path, default=Path("gpu.html"), help="the report, one page with pictures")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return run_main(lambda: _work(json.loads(options.worker)))
    return run_main(lambda: benchmark(options))


def benchmark(options: argparse.Namespace) -> None:
    """Run the chosen parts one after the other, and write JSON and page.

    Raises:
        ValueError: there is no such device; or, after everything else, a part failed.
    """
    if not options.minutes > 0:
        raise ValueError(f"--minutes must be above 0, got {options.minutes:g}")
    distributed.choose_device(options.device, 0)
    now = datetime.datetime.now().isoformat(timespec="seconds")
    result: dict[str, Any] = {"device": options.device, "quick": options.quick, "begun": now, "parts": {}}
    ends = time.monotonic() + 60 * options.minutes
    for name in options.parts:
        seconds = min(PARTS[name].seconds * options.minutes / 10, ends - time.monotonic())
        print(f"{name:<11}at most {max(0.0, seconds):.0f} s ...", flush=True)
        found = _run(name, options, seconds) if seconds > 1 else _failure("not started", 0.0, "--minutes were over")
        result["parts"][name] = found
        replace_text(options.json, json.dumps(result, indent=1) + "\n")  # complete at any time
        print(f"{name:<11}{found['status']}, {found['seconds']:.1f} s, {len(found['rows'])} rows {found['reason']}", flush=True)
    page.write(result, options.out)
    print(f"written: {options.json}, {options.out}")
    failed = [name for name, part in result["parts"].items() if part["status"] != "complete"]
    if failed:
        raise ValueError(f"not complete: {', '.join(failed)}; {options.out} has their last lines")


def _failure(status: str, seconds: float, reason: str) -> dict[str, Any]:
    return {"status": status, "seconds": seconds, "reason": reason, "rows": [], "last_lines": []}


def _run(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run a part in a process of its own; return its rows and how it ended."""
    with tempfile.TemporaryDirectory(prefix="benchmark_gpu_") as folder:
        rows, output = Path(folder) / "rows", Path(folder) / "output"
        case = {"part": name, "device": options.device, "quick": options.quick, "folder": folder, "rows": str(rows)}
        command = [sys.executable, "-m", "scripts.benchmark.gpu", "--worker", json.dumps(case)]
        begun, reason, status = time.monotonic(), "", "complete"
        with open(output, "wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code = process.wait(seconds)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # also what the part has started
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                status, reason, code = "killed at its deadline", f"longer than {seconds:.0f} s", 0
        measured = [json.loads(line) for line in rows.read_text().splitlines()] if rows.is_file() else []
        lines = output.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
    failed = [row for row in measured if "failed" in row]
    if code:
        status, reason = "failed", f"status {code}: {lines[-1] if lines else 'no output'}"
    elif failed and status == "complete":
        status, reason = "failed", f"{len(failed)} of its cases, the first with: {failed[0]['failed']}"
    found = _failure(status, time.monotonic() - begun, reason)
    return {**found, "rows": measured, "last_lines": [] if status == "complete" else lines}


def _work(case: dict[str, Any]) -> None:
    """Measure one part in this process; every row is in the file as soon as it is known."""
    device = distributed.choose_device(case["device"], 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    with open(case["rows"], "w", buffering=1) as file:
        for row in PARTS[case["part"]].measure(Context(device, case["quick"], Path(case["folder"]))):
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
