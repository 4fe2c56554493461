"""Requests 2 MiB pages for large CPU tensors: with 4 KiB pages, TLB misses over gigabytes cost a tenth of a step."""

import ctypes
import functools
import sys
from typing import Any

from torch import Tensor

_ADVISE_HUGE = 14  # MADV_HUGEPAGE of Linux, in every architecture's madvise(2)
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


@functools.cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
