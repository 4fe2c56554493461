"""The head's scratch memory: buffers that are allocated once and reused in every step, and the cache of exponentials.

A new tensor of a few megabytes costs more in page faults than the arithmetic on it. Reused buffers also bound the memory.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from utils.huge_pages import with_huge_pages

if TYPE_CHECKING:  # the kernels import this module
    from .kernels.plain import PlainKernels


class Workspace:
    """Named buffers, and a cache of at most cache_bytes for one step's exponentials, on one device.

    Args:
        kernels: the kernels that work on the buffers, see kernels/__init__.py.
    """

    def __init__(self, device: torch.device, cache_bytes: int, kernels: "PlainKernels") -> None:
        self.device = device
        self.kernels = kernels
        self.cache_bytes = cache_bytes
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._cache = torch.empty(0, dtype=torch.uint8, device=device)
        self._used = 0

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous, uninitialised tensor; the next call with this name and dtype returns the same memory."""
        size = math.prod(shape)
        found = self._buffers.get((name, dtype))
        if found is None or found.numel() < size:
            found = self._buffers[name, dtype] = with_huge_pages(torch.empty(size, dtype=dtype, device=self.device))
        return found[:size].view(shape)

    def begin_cache(self, wanted_bytes: int) -> None:
        """Clear the cache and make room for the next step: wanted_bytes, up to the budget."""
        self._used = 0
        room = min(wanted_bytes, self.cache_bytes)
        if room > self._cache.numel():
            self._cache = self._cache.new_empty(0)  # free the smaller one before the larger is allocated
            self._cache = with_huge_pages(torch.empty(room, dtype=torch.uint8, device=self.device))

    def cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return memory of the cache, valid until the next begin_cache, or None if the budget is used up."""
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > self._cache.numel():
            return None
        block = self._cache[self._used : self._used + size].view(dtype).view(shape)
        self._used += -(-size // 64) * 64  # rows of the next block start at a cache line
        return block
