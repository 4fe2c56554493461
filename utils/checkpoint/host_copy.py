"""A copy of a run's state in host memory, which is kept from save to save.

All tensors lie in one mapping of exactly the bytes that they need. For CUDA it is registered as pinned memory as a whole.
torch's allocator of pinned memory would round each tensor up to a power of two: 64 GiB for one of 38.
"""

import math
import mmap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from utils.huge_pages import with_huge_pages

_ALIGNED = 64  # bytes; each tensor begins at a multiple of it, a line of the processor's cache


class _Place(NamedTuple):
    """What the memory holds of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes in the memory; torch makes no tensor from a buffer of none."""
        return -(-max(1, math.prod(self.shape)) * self.dtype.itemsize // _ALIGNED) * _ALIGNED


class HostCopy:
    """Memory of the host for copies of a state, one at a time.

    Args:
        device: where most of the state lies. For CUDA the memory is pinned.
        warn: shows a line to the user.
    """

    def __init__(self, device: torch.device, warn: Callable[[str], object]) -> None:
        self.device, self.warn = device, warn
        self._places: list[_Place] = []
        self._tensors: list[Tensor] = []
        self._registered = 0  # address of the pinned memory, 0 = none

    def has_memory(self) -> bool:
        """Return whether memory of an earlier copy is there; to allocate it again costs several times the copy."""
        return bool(self._tensors)

    def take(self, state: Any) -> Any:
        """Return a copy of a state, tensors in dicts, lists and tuples; it is valid until the next call.

        On CUDA the copy is only enqueued on the current stream.

        Raises:
            MemoryError: the host has no room.
        """
        places = [_place(tensor) for tensor in _tensors_in(state)]
        if places != self._places:
            self.release()
            self._allocate(places)
        return _copied(state, iter(self._tensors), non_blocking=self._registered > 0)

    def release(self) -> None:
        """Give the memory back once nobody uses the last copy any more; what is pinned is ordinary memory from now on."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered)
        self._places, self._tensors, self._registered = [], [], 0

    def _allocate(self, places: list[_Place]) -> None:
        size = max(1, sum(place.size for place in places))
        try:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no {size} bytes of memory: {error}") from None
        whole = with_huge_pages(torch.frombuffer(memory, dtype=torch.uint8))
        if self.device.type == "cuda":
            self._register(whole.data_ptr(), size)
        start = 0
        for place in places:  # each with a storage of its own, since torch.save writes whole storages
            count = max(1, math.prod(place.shape))
            numbers = torch.frombuffer(memory, dtype=place.dtype, count=count, offset=start)
            self._tensors.append(numbers.as_strided(place.shape, place.strides))
            start += place.size
        self._places = places

    def _register(self, address: int, size: int) -> None:
        try:
            error = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # 0: cudaHostRegisterDefault
            words = f"error {error} of cudaHostRegister" if error else ""
        except RuntimeError as failure:
            words = str(failure).splitlines()[0]
        if not words:
            self._registered = address
            return
        _clear_last_error(self.device)
        self.warn(
            f"checkpoint: {size / 2**30:.2f} GiB of host memory cannot be pinned ({words}), so at each save training waits "
            "longer for the copy of the state. More free memory on the host helps, or fewer processes on it"
        )


def host_bytes(state: Any) -> int:
    """Return how many bytes of host memory a copy of a state takes."""
    return sum(_place(tensor).size for tensor in _tensors_in(state))


def _place(tensor: Tensor) -> _Place:
    dense = torch.empty_like(tensor, device="meta")  # keeps the layout, such as channels_last
    return _Place(tensor.dtype, tuple(tensor.shape), dense.stride())


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


def _copied(value: Any, into: Iterator[Tensor], non_blocking: bool) -> Any:
    """Return the value with a copy of each tensor, in the memory that comes next in the order of `_tensors_in`."""
    if isinstance(value, Tensor):
        return next(into).copy_(value.detach(), non_blocking=non_blocking)
    if isinstance(value, dict):
        return {key: _copied(item, into, non_blocking) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item, into, non_blocking) for item in value)
    return value


def _clear_last_error(device: torch.device) -> None:
    """Let a small kernel fail of the error that CUDA remembers of a failed call; the next one would report it as its own."""
    try:
        torch.ones(1, device=device)
    except RuntimeError:
        return
