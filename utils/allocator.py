"""Lets a process keep the memory that it frees, where the C library is glibc; tells kernel and GPU how memory will be used.

glibc returns each large tensor to the kernel when it is freed, and the kernel clears every page again when the next one is
allocated. That took a quarter of the time of a training step on a CPU. These settings keep the memory in the process.
"""

import contextlib
import ctypes
import functools
import os
import resource
import sys
from typing import Any

import torch
from torch import Tensor

SWITCH = "FACE_ALLOCATOR"
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
_LARGEST = 1 << 30  # bytes of an allocation that comes from the memory that is kept
_LARGEST_BEFORE_2_35 = 1 << 25  # what older versions of glibc accept
_KEPT, _STEP = (1 << 31) - 1, 256 << 20  # bytes that are free and yet kept; bytes by which the memory grows


def keep_freed_memory() -> bool:
    """Set the allocator of this process; return whether that was done.

    It is not done with FACE_ALLOCATOR=system, where somebody has set glibc's own variables, where the C library is another, or
    where this process has a limit of its own (ulimit -d or -v), which would count the memory that is kept.
    """
    theirs = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    if os.environ.get(SWITCH) == "system" or theirs or not sys.platform.startswith("linux"):
        return False
    if any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    large = libc.mallopt(_MMAP_THRESHOLD, _LARGEST) or libc.mallopt(_MMAP_THRESHOLD, _LARGEST_BEFORE_2_35)
    return bool(large and libc.mallopt(_TRIM_THRESHOLD, _KEPT) and libc.mallopt(_TOP_PAD, _STEP))


def out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation of Python, numpy or torch failed, on the CPU or a GPU."""
    words = ("can't allocate memory", "not enough memory", "CUDA error: out of memory")  # torch's on Linux, elsewhere, CUDA's
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(word in str(error) for word in words)


_ADVISE_NEEDED, _ADVISE_HUGE = 3, 14  # MADV_WILLNEED and MADV_HUGEPAGE of Linux, in every architecture's madvise(2)
_PAGE = 4096
_LARGE = 4 << 20


def with_huge_pages(tensor: Tensor) -> Tensor:
    """Request huge pages for a new tensor that was not written to yet, and return it; does nothing if unsupported."""
    madvise = _madvise()
    if tensor.device.type == "cpu" and tensor.nbytes >= _LARGE and madvise is not None:
        first = -(-tensor.data_ptr() // _PAGE) * _PAGE
        size = (tensor.data_ptr() + tensor.nbytes - first) // _PAGE * _PAGE
        madvise(first, size, _ADVISE_HUGE)
    return tensor


def read_ahead(tensor: Tensor, low: int, high: int) -> None:
    """Let the kernel begin to read the rows [low, high) of a tensor that is mapped from a file; does nothing if unsupported.

    Other threads run meanwhile, as they do not in mmap.madvise of Python.
    """
    madvise, row = _madvise(), tensor.nbytes // len(tensor)
    begin, end = tensor.data_ptr() + low * row, tensor.data_ptr() + high * row
    if madvise is not None:
        madvise(begin // _PAGE * _PAGE, end - begin // _PAGE * _PAGE, _ADVISE_NEEDED)


@functools.cache
def _madvise() -> Any:
    function = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform.startswith("linux") else None
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def lock_for(device: torch.device, memory: Tensor) -> str:
    """Lock memory of the host, which a GPU then copies beside other work; return why it could not, or "".

    torch.cuda.cudart().cudaHostUnregister unlocks it.
    """
    try:
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # 0: cudaHostRegisterDefault
        words = f"error {error} of cudaHostRegister" if error else ""
    except RuntimeError as failure:
        words = str(failure).splitlines()[0]
    if words:
        _clear_last_error(device)
    return words


def _clear_last_error(device: torch.device) -> None:
    """Let a small kernel fail of the error that CUDA remembers of a failed call; the next one would report it as its own."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
