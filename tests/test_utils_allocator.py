"""A program keeps the memory that it frees, so that the kernel does not clear it again and again, unless it is told not to."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TENSORS, PAGES = 100, (32 << 20) // 4096
# as every program runs, train.py too: the page faults of tensors that are made one after the other
PROGRAM = f"""
import resource, torch
from utils.program import run_main
def run():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({TENSORS}):
        torch.ones(8 << 20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
raise SystemExit(run_main(run))
"""


def _faults(**environment: str) -> int:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "FACE_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, env=inherited | environment
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc")
def test_a_program_keeps_the_memory_that_it_frees_unless_somebody_says_otherwise():
    pages = TENSORS * PAGES  # of 4 KiB; larger pages fault less often
    usual, kept = _faults(FACE_ALLOCATOR="system"), _faults()
    # a small allocation may stand in the way of a tensor, which then takes the next room, of the 256 MiB that the heap grows by
    assert usual > pages / 600 and usual > 5 * kept
    assert _faults(MALLOC_ARENA_MAX="4") > 5 * kept  # whoever has set glibc's own variables has a reason
