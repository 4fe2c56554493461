"""A program keeps the memory that it frees, so that the kernel does not clear it again and again, unless it is told not to."""

import ctypes
import importlib
import mmap
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from scripts.benchmark.kit import run_ranks
from utils.allocator import read_ahead
from utils.program import run_main

ROOT = Path(__file__).parent.parent
TENSORS, PAGES = 60, (32 << 20) // 4096
LIMITS = (resource.RLIMIT_DATA, resource.RLIMIT_AS)  # -1 = none
REFERENCE = "from test_utils_allocator import page_faults\nraise ValueError(page_faults())\n"


def page_faults(rank: int = 0) -> int:
    """Return the page faults of tensors that are made one after the other."""
    import torch

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(TENSORS):
        torch.ones(8 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def program(limits: list[str]) -> int:
    """Print them as every program runs, train.py too, with these limits of the process: a `main` for tiny_runs."""
    for kind in limits:
        resource.setrlimit(int(kind), (2**40, 2**40))
    return run_main(lambda: print(page_faults()))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc")
@pytest.mark.skipif(any(resource.getrlimit(kind)[0] >= 0 for kind in LIMITS), reason="ulimit -d or -v is set here")
def test_a_program_keeps_the_memory_that_it_frees_unless_somebody_says_otherwise(tmp_path: Path):
    pages = TENSORS * PAGES  # of 4 KiB; larger pages fault less often
    start = importlib.import_module("tiny_runs").Started  # here: the process of arcface_torch imports this file as well
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "FACE_", "GLIBC_"))}

    def faults(*limits: int, **environment: str) -> int:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return int(start(program, [[str(kind) for kind in limits]], folder, inherited | environment).wait().stdout)

    usual, kept = faults(FACE_ALLOCATOR="system"), faults()
    # a small allocation may stand in the way of a tensor, which then takes the next room, of the 256 MiB that the heap grows by
    assert usual > pages / 600 and usual > 5 * kept
    # whoever has set glibc's own variables has a reason
    assert faults(MALLOC_ARENA_MAX="4") > 5 * kept
    for limit in LIMITS:  # kept memory would count
        assert faults(limit) > 5 * kept
    (tmp_path / "backbones.py").write_text(REFERENCE)
    command = [sys.executable, "scripts/benchmark/arcface_torch_loop.py", str(tmp_path), "{}"]
    environment = inherited | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert usual > 5 * int(re.fullmatch(r"error: --reference .*: ValueError: (\d+)\n", done.stderr)[1])
    assert usual > 5 * run_ranks(page_faults, 1)[0]


def _resident(tensor: torch.Tensor) -> list[bool]:
    """Return which pages of mapped rows of a page each are in memory."""
    found = (ctypes.c_ubyte * len(tensor))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), found) == 0
    return [bool(page & 1) for page in found]


def test_rows_of_a_file_are_read_before_they_are_touched(tmp_path: Path):
    path, rows = tmp_path / "rows", 4096
    path.write_bytes(bytes(rows * 4096))
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        tensor = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8).view(rows, 4096)
    if any(_resident(tensor)):
        pytest.skip("a file system that lies in memory")
    read_ahead(tensor, 1000, 1500)
    deadline = time.monotonic() + 30
    while not all(_resident(tensor[1000:1500])):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not any(_resident(tensor[:900])) and not any(_resident(tensor[2000:]))
