"""The head's scratch memory: buffers that are made once and used again in every step, and the cache of exponentials.

A fresh tensor of a few megabytes costs more in page faults than the arithmetic on it; and what is made once cannot grow.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from utils.huge_pages import with_huge_pages

if TYPE_CHECKING:  # they take the workspace as an argument
    from .kernels.plain import PlainKernels


class Workspace:
    """Named buffers, and room for at most cache_bytes of one step's exponentials, on one device.

    Args:
        kernels: what works on them, see kernels/__init__.py.
    """

    def __init__(self, device: torch.device, cache_bytes: int, kernels: "PlainKernels") -> None:
        self.device = device
        self.kernels = kernels
        self.cache_bytes = cache_bytes
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._cache = torch.empty(0, dtype=torch.uint8, device=device)
        self._used = 0

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor with undefined content; the next call with this name and dtype gives the same memory."""
        size = math.prod(shape)
        found = self._buffers.get((name, dtype))
        if found is None or found.numel() < size:
            found = self._buffers[name, dtype] = with_huge_pages(torch.empty(size, dtype=dtype, device=self.device))
        return found[:size].view(shape)

    def begin_cache(self, wanted_bytes: int) -> None:
        """Forget what is cached, and make room for the step to come: what it wants, up to the budget."""
        self._used = 0
        room = min(wanted_bytes, self.cache_bytes)
        if room > self._cache.numel():
            self._cache = self._cache.new_empty(0)  # give the smaller one back before the larger is made
            self._cache = with_huge_pages(torch.empty(room, dtype=torch.uint8, device=self.device))

    def cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Return room in the cache that lasts until the next begin_cache, or None if the budget is spent."""
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > self._cache.numel():
            return None
        block = self._cache[self._used : self._used + size].view(dtype).view(shape)
        self._used += -(-size // 64) * 64  # rows of the next block start at a cache line
        return block
