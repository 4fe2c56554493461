"""Run the tests that need a GPU; without one they are collected, and say why they are skipped."""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/gpu_parts/gpu_tests.py is no program; python -m scripts lists them")

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from .measuring import Context, Row

_ROOT = Path(__file__).parents[3]


def measure(context: Context) -> Iterator[Row]:
    """Yield a row per test: its outcome, seconds, and the reason if it was skipped or failed.

    Raises:
        ValueError: pytest could not run them.
    """
    report = context.folder / "tests.xml"
    # without a GPU only those files are collected that have no other tests, which saves importing all of them
    files = ["tests"] if context.device.type == "cuda" else sorted(map(str, _ROOT.glob("tests/test_gpu_*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(command, cwd=_ROOT, env=environment)
    if done.returncode > 1 or not report.is_file():
        raise ValueError(f"pytest ended with status {done.returncode}")
    for case in ElementTree.parse(report).iter("testcase"):
        row: Row = {"test": f"{case.get('classname')}::{case.get('name')}", "seconds": float(case.get("time", 0))}
        row["outcome"] = "passed"
        for kind in ("skipped", "failure", "error"):
            found = case.find(kind)
            if found is not None:
                row["outcome"] = "skipped" if kind == "skipped" else "failed"
                row["failed" if kind != "skipped" else "reason"] = str(found.get("message"))[:300]
        yield row
