"""Where the class centres of a shard and their moments lie: on the device, in host memory, or in a file.

host    page-locked memory of the host, which kernels of CUDA reach over the bus at its own address: the update moves each
        number once in each direction, and the host waits for nothing. What is multiplied is copied to the device before it is
        needed, see CentreStore.fetch. A CPU has no other memory than that, so there it is the same as device.
disk    a file that is mapped into memory: the kernel keeps as much of it in memory as there is room for, and writes back what
        changed. CPU only: no driver lets a GPU write into the pages of a file.

The file has no name, so nothing is left of it however the process ends, and nobody else opens it. No run reads what a killed
one left half written: a run goes on from its checkpoint, which appears under its name when it is complete. The blocks of the
file are reserved before training, because a page for which the disk has no block would kill the process.
"""

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.allocator import lock_for, with_huge_pages

PLACEMENTS = ("device", "host", "disk")
_ALIGNED = 4096  # bytes; each tensor begins at a page


def is_elsewhere(placement: str, device: str) -> bool:
    """Return whether the centres take no memory of the device, cpu or cuda."""
    return placement == "disk" or (placement == "host" and device != "cpu")


class Memory:
    """Memory for tensors of rows, all zeros at first.

    Args:
        placement: one of PLACEMENTS.
        size: bytes that may be asked for, each tensor filled up to whole pages; see `padded`.
        folder: where the file of `disk` takes its space; it must exist. None = the folder for temporary files.

    Raises:
        ValueError: the host or the disk has no room.
    """

    def __init__(self, placement: str, device: torch.device, size: int, folder: Path | None = None) -> None:
        self.device, self.is_file = device, placement == "disk"
        self.is_far = placement == "host" and device.type != "cpu"  # from the device
        self._used = 0
        self._map: mmap.mmap | None = None
        if self.is_file:
            if device.type != "cpu":
                raise ValueError("head.placement=disk needs run.device=cpu, since no GPU writes into a file; set host")
            self._map = _file_without_a_name(size, folder)
        if not self.is_far:
            return
        try:
            self._map = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # a fork never reads it, but would get a copy of what is locked
            self._map.madvise(mmap.MADV_DONTFORK)
            self._far = torch.as_tensor(_Locked(self._map, device), device=device)
        except (OSError, RuntimeError) as error:
            words = str(error).splitlines()[0]
            raise ValueError(
                f"head.placement=host: {size / 2**30:.2f} GiB of host memory cannot be locked for the GPU: {words}. Start "
                "fewer processes on this machine, or set head.placement=device, or a smaller head.storage"
            ) from None

    @staticmethod
    def padded(count: int, dtype: torch.dtype) -> int:
        """Return the bytes that a tensor of so many numbers takes."""
        return -(-count * dtype.itemsize // _ALIGNED) * _ALIGNED

    def zeros(self, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a tensor of zeros that the device reads and writes, and the same memory as a tensor of the host.

        Where the memory is that of the device both are one tensor.
        """
        if self._map is None:
            tensor = with_huge_pages(torch.zeros(shape, dtype=dtype, device=self.device))
            return tensor, tensor
        count, start = shape[0] * shape[1], self._used
        self._used += self.padded(count, dtype)
        host = torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(shape)
        return (self._far[start:][: count * dtype.itemsize].view(dtype).view(shape) if self.is_far else host), host


def _file_without_a_name(size: int, folder: Path | None) -> mmap.mmap:
    """Return the shared mapping of a new file, for which the disk has reserved `size` bytes."""
    where = Path(tempfile.gettempdir()) if folder is None else folder
    try:
        with tempfile.TemporaryFile(dir=where) as file:  # the mapping keeps it
            if hasattr(os, "posix_fallocate"):  # not on macOS, where nothing is reserved
                os.posix_fallocate(file.fileno(), 0, max(1, size))
            file.truncate(max(1, size))
            return mmap.mmap(file.fileno(), max(1, size))
    except OSError as error:
        raise ValueError(
            f"head.placement=disk: {where} has no room for a file of {size / 2**30:.2f} GiB: {error.strerror or error}. Free "
            "that much, set run.output to another disk, or a smaller head.storage"
        ) from None


class _Locked:
    """A mapping of memory that the GPU may use until no tensor has it any more; torch.as_tensor makes a CUDA tensor of it."""

    def __init__(self, memory: mmap.mmap, device: torch.device) -> None:
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._memory, self._address = memory, 0
        if words := lock_for(device, whole):
            raise RuntimeError(words)
        self._address = whole.data_ptr()
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (len(whole),),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        if self._address:
            torch.cuda.cudart().cudaHostUnregister(self._address)
