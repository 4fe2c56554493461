"""Lets a process keep the memory that it frees, where the C library is glibc.

glibc returns each large tensor to the kernel when it is freed, and the kernel clears every page again when the next one is
allocated. That took a quarter of the time of a training step on a CPU. These settings keep the memory in the process.
"""

import ctypes
import os
import sys

SWITCH = "FACE_ALLOCATOR"
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
_LARGEST = 1 << 30  # bytes of an allocation that comes from the memory that is kept
_LARGEST_BEFORE_2_35 = 1 << 25  # what older versions of glibc accept
_KEPT, _STEP = (1 << 31) - 1, 256 << 20  # bytes that are free and yet kept; bytes by which the memory grows


def keep_freed_memory() -> bool:
    """Set the allocator of this process; return whether that was done.

    It is not done with FACE_ALLOCATOR=system, where somebody has set glibc's own variables, or where the C library is another.
    """
    theirs = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    if os.environ.get(SWITCH) == "system" or theirs or not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    large = libc.mallopt(_MMAP_THRESHOLD, _LARGEST) or libc.mallopt(_MMAP_THRESHOLD, _LARGEST_BEFORE_2_35)
    return bool(large and libc.mallopt(_TRIM_THRESHOLD, _KEPT) and libc.mallopt(_TOP_PAD, _STEP))
