"""Saving checkpoints while training goes on.

A save copies the state to host memory, and training waits for nothing more. A thread of each rank then writes the rank's part
into a hidden folder. The flags of each optimizer step tell when all ranks are done. The ranks then exchange sizes and
hashes, and a thread of rank 0 writes the manifest, renames the folder to its final name and prunes old checkpoints. So no
thread communicates, and an unfinished checkpoint is a hidden folder, which the next start deletes.

All tensors of the copy lie in one mapping of exactly the bytes that they need, which is kept from save to save. For CUDA it is
registered as pinned memory as a whole. torch's allocator of pinned memory would round each tensor up to a power of two: 64 GiB
for one of 38.
"""

import contextlib
import errno
import math
import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from utils.allocator import lock_for, with_huge_pages
from utils.distributed import SharedError, World, all_gather_objects, any_ranks
from utils.distributed.patience import patiently
from utils.memory import available_bytes

from .format import RetentionPolicy, checkpoint_path, commit, partial_path, prune, shard_name
from .tensor_file import NotFiniteError, write_object, write_tensors

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
    """Memory of the host for copies of a state, one at a time; pinned if `device`, where most of the state lies, is CUDA."""

    def __init__(self, device: torch.device, warn: Callable[[str], object]) -> None:
        self.device, self.warn = device, warn  # which shows a line to the user
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
        into = iter(self._tensors)
        return _mapped(state, lambda tensor: next(into).copy_(tensor.detach(), non_blocking=self._registered > 0))

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
            self._register(whole)
        start = 0
        for place in places:  # each with a storage of its own, since torch.save writes whole storages
            count = max(1, math.prod(place.shape))
            numbers = torch.frombuffer(memory, dtype=place.dtype, count=count, offset=start)
            self._tensors.append(numbers.as_strided(place.shape, place.strides))
            start += place.size
        self._places = places

    def _register(self, whole: Tensor) -> None:
        if not (words := lock_for(self.device, whole)):
            self._registered = whole.data_ptr()
            return
        self.warn(
            f"checkpoint: {whole.nbytes / 2**30:.2f} GiB of host memory cannot be pinned ({words}), so at each save training "
            "waits longer for the copy of the state. More free memory on the host helps, or fewer processes on it"
        )


def host_bytes(state: Any) -> int:
    """Return how many bytes of host memory a copy of a state takes."""
    return sum(_place(tensor).size for tensor in _tensors_in(state))


def _place(tensor: Tensor) -> _Place:
    dense = torch.empty_like(tensor, device="meta")  # keeps the layout, such as channels_last
    return _Place(tensor.dtype, tuple(tensor.shape), dense.stride())


def _tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(value, found.append)
    return found


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a state with what `change` makes of each tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    return value


class Shard(NamedTuple):
    """A rank's rows of what all ranks hold together, such as the class centres of a head."""

    rows: dict[str, Tensor]  # tensors by name, (stop - start, ...) each
    slots: tuple[int, int]  # [start, stop), whose rows they are


class CheckpointWriter(contextlib.AbstractContextManager["CheckpointWriter"]):
    """Saves the checkpoints of one run. All methods are collective unless they say otherwise.

    A failed save (a full disk, a missing right) is a warning, and training goes on until more than max_failed saves in a row
    have failed. Numbers that are not finite are never saved: the run stops at once, because no training recovers from them.

    Args:
        background: write beside training, from a second copy of this rank's state in host memory. If this is false, or one
            rank's host has no room for the copy, training waits for the disk instead.
        warn: shows a line to the user.
    """

    def __init__(
        self,
        run_folder: Path,
        world: World,
        keep: RetentionPolicy,
        background: bool = True,
        max_failed: int = 0,
        warn: Callable[[str], object] = print,
    ) -> None:
        self.run_folder, self.world, self.keep = run_folder, world, keep
        self._was_there = run_folder.is_dir()
        self.background, self.max_failed, self.warn = background, max_failed, warn
        self.failed = 0  # saves in a row
        self._allowed = max_failed
        self.saved_at = time.monotonic()  # when this rank began its last save
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_be_nice)
        self._host_copy = HostCopy(world.device, warn)
        self._job: Future[dict[str, Any]] | None = None
        self._manifest: dict[str, Any] | None = None  # of the checkpoint being written, until its parts are written
        self._partial = self._final = run_folder

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Complete the save under way if all ranks come here: a run that stops at a bad loss must not lose its checkpoint."""
        if error is not None and self.world.world_size > 1 and not isinstance(error, SharedError):
            return  # to unpin memory CUDA waits for its kernels, and one of NCCL's may wait for a rank that is gone
        try:
            self.finish()
        except SharedError as failure:
            if error is None:
                raise
            self.warn(str(failure))
        if not self.is_writing:
            self._host_copy.release()

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes something. Not collective."""
        return (job := self._job) is not None and not job.done()  # of which another thread asks too

    def is_overdue(self, minutes: float) -> bool:
        """Whether this is rank 0 and its last save began so many minutes ago; 0 = never. Not collective."""
        return self.world.rank == 0 and 0 < minutes <= (time.monotonic() - self.saved_at) / 60

    def save(self, step: int, files: dict[str, Any], facts: dict[str, Any], last: bool = False) -> None:
        """Begin to save; return when the tensors may change again.

        Args:
            files: states by name, as reading.read_file gives them back: tensors by name for NAME.safetensors and plain values
                for NAME.pt, which are equal on all ranks, so rank 0 writes them; or a Shard, of which each rank writes its
                own, for a name without a suffix.
            facts: what a resumed run must share (classes, embedding size, ...), and what people want to know (score).
            last: no later save can make up for this one: return when it is complete, and allow no failure.

        Raises:
            SharedError: on every rank, if more than max_failed saves have failed in a row, or numbers are not finite.
        """
        self.finish()
        world, self._allowed = self.world, 0 if last else self.max_failed
        self.saved_at = time.monotonic()
        self._final = checkpoint_path(self.run_folder, step)
        self._partial = partial = partial_path(self._final)
        self._manifest = {"step": step, "world_size": world.world_size, **facts}
        states, slots = _this_ranks_files(files, world)
        background = self.background and not (last and world.device.type == "cpu")  # nothing is computed beside the last one
        copy = self._copy_of(states) if background else None
        (waits,) = any_ranks([copy is None], world)  # if one rank has to wait for the disk, the others would wait for it later
        if waits and background:
            self.warn("checkpoint: no memory for a copy of the state, so training waits until it is on the disk")
        states = states if copy is None else copy
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

        def write_parts() -> dict[str, Any]:
            if self._was_there and not self.run_folder.is_dir():
                raise FileNotFoundError(errno.ENOENT, "the run's folder was removed or renamed", str(self.run_folder))
            partial.mkdir(parents=True, exist_ok=True)
            written: dict[str, Any] = {}
            for name, state in states.items():
                write = write_tensors if name.endswith(".safetensors") else write_object
                written[name] = write(partial / name, state)
                if name in slots:
                    written[name]["slots"] = list(slots[name])
            return written

        self._job = self._pool.submit(write_parts)
        if last or waits:
            self.finish()

    def _copy_of(self, states: dict[str, Any]) -> dict[str, Any] | None:
        """Return a copy of this rank's state in host memory, or None without room for it."""
        room = available_bytes(self.world._replace(device=torch.device("cpu")))
        if not self._host_copy.has_memory() and 1.1 * host_bytes(states) >= room:  # a tenth to spare
            return None
        try:
            copy: dict[str, Any] = self._host_copy.take(states)
        except MemoryError:
            return None
        return copy

    def advance(self, any_writing: bool) -> None:
        """Take the next step of the save under way, unless `is_writing` held on any rank; SharedError as for `save`."""
        if self._job is None or any_writing:
            return
        failure = self._job.exception()
        result = {} if failure else self._job.result()
        self._job = None
        parts = all_gather_objects((result, _in_words(failure), isinstance(failure, NotFiniteError)), self.world)
        errors = {text: [r for r, (_, other, _) in enumerate(parts) if other == text] for _, text, _ in parts if text}
        if errors:
            words = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in errors.items())
            self._give_up(words, diverged=any(not_finite for *_, not_finite in parts))
        elif self._manifest is None:
            self.failed = 0
            for line in parts[0][0]["warnings"]:
                self.warn(line)
        else:
            manifest, self._manifest = self._manifest, None
            manifest["files"] = {name: entry for written, *_ in parts for name, entry in written.items()}
            self._job = self._pool.submit(self._complete, manifest)

    def finish(self) -> None:
        """Wait until the save under way is complete; SharedError as for `save`."""
        while self._job is not None:
            with patiently(self.world, "saving"):
                self._job.exception()  # waits
            self.advance(any_writing=False)

    def _complete(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if self.world.rank == 0:
            commit(self._partial, self._final, manifest)
            try:
                return {"warnings": prune(self.run_folder, self.keep)}
            except (OSError, ValueError) as error:  # the new one is complete all the same
                return {"warnings": [f"checkpoint: an old one cannot be deleted: {error}"]}
        return {}

    def _give_up(self, error: str, diverged: bool) -> None:
        self._manifest = None
        self.failed += 1
        if self.world.rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)
        text = f"checkpoint: {self._final.name} could not be saved ({error}); the ones before are untouched"
        if diverged:
            raise SharedError(
                f"{text}. Lower optimizer.lr or head.lr_factor, set optimizer.clip_norm, or lengthen schedule.warmup_epochs"
            )
        if self.failed > self._allowed:
            raise SharedError(f"{text}. Make room or mend the folder; the same command goes on from there")
        self.warn(f"{text}. Training goes on; it stops after {self.max_failed - self.failed + 1} more in a row")


def _this_ranks_files(files: dict[str, Any], world: World) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """Return the states that this rank writes by file name, and the slots of those that are shards."""
    states, slots = {}, {}
    for name, state in files.items():
        if isinstance(state, Shard):
            file = shard_name(world.rank, world.world_size, name)
            states[file], slots[file] = state
        elif world.rank == 0:
            states[name] = state
    return states, slots


def _be_nice() -> None:
    """Give training precedence where processors are short; on Linux a niceness belongs to a thread and those it starts."""
    if sys.platform.startswith("linux"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)  # a quarter of a contended core


def _in_words(error: BaseException | None) -> str:
    if error is None or isinstance(error, (OSError, NotFiniteError)):
        return str(error or "")
    return f"{type(error).__name__}: {error}"
