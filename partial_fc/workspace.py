"""What the head takes of a device: buffers that are reused in every step, the cache of exponentials, and a stream of its own.

A new tensor of a few megabytes costs more in page faults than the arithmetic on it. Reused buffers also bound the memory.
"""

import contextlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from utils.allocator import with_huge_pages


class Workspace:
    """Named buffers, and a cache for one step's exponentials, on one device."""

    def __init__(self, device: torch.device, cache_budget: int | Callable[[], int]) -> None:
        self.device = device
        # bytes that the cache may take; or a function that returns the bytes that are free, of which it takes a quarter at most
        self.cache_budget = cache_budget
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._cache = torch.empty(0, dtype=torch.uint8, device=device)
        self._used = 0
        self._refused = 0  # bytes that the budget did not allow

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous, uninitialised tensor; the next call with this name and dtype returns the same memory."""
        size = math.prod(shape)
        found = self._buffers.get((name, dtype))
        if found is None or found.numel() < size:
            if found is not None and found.is_cuda:  # another stream than that of its allocation may still use it
                found.record_stream(torch.cuda.current_stream(found.device))
            self._buffers.pop((name, dtype), None)
            found = None  # free the smaller one before the larger is allocated
            found = self._buffers[name, dtype] = with_huge_pages(torch.empty(size, dtype=dtype, device=self.device))
        return found[:size].view(shape)

    def begin_cache(self, wanted_bytes: int) -> None:
        """Clear the cache and make room for the next step: wanted_bytes, up to the budget."""
        self._used = 0
        held = self._cache.numel()
        if wanted_bytes <= held or wanted_bytes <= self._refused:
            return
        budget = self.cache_budget
        room = min(wanted_bytes, budget if isinstance(budget, int) else (budget() + held) // 4)
        if room < wanted_bytes:
            self._refused = wanted_bytes  # the free memory is looked at once, not in every step
        if room > held:
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


class SideStream:
    """Runs the update of the centres on CUDA, and what travels there, beside the backbone's update and its next forward pass.

    The backward pass comes before it, because its gradient decides whether anything is updated. On the CPU all runs in order.
    The tensors that the work on it reads must be kept until `wait`: the allocator tracks only the main stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready: torch.cuda.Event | None = None
        self._kept: list[object] = []

    def mark(self) -> None:
        """Let the next `run` wait for the work enqueued so far, which makes all that it reads."""
        if self._stream is not None:
            self._ready = torch.cuda.current_stream(self._stream.device).record_event()

    def run(self, keep: object) -> contextlib.AbstractContextManager[object]:
        """Return a context whose CUDA work starts after the work enqueued before `mark`, in parallel with all enqueued since.

        Args:
            keep: an object that holds the tensors that the work reads.
        """
        if self._stream is None:
            return contextlib.nullcontext()
        assert self._ready is not None, "mark comes first"
        self._kept.append(keep)
        self._stream.wait_event(self._ready)
        return torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Make the work enqueued next wait for the work of this stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._kept.clear()
