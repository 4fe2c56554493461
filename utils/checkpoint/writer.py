"""Saving checkpoints while training goes on.

A save copies the state to host memory, and training waits for nothing more. A thread of each rank then writes the rank's part
into a hidden folder. The collective of each optimizer step tells when all ranks are done. The ranks then exchange sizes and
hashes, and a thread of rank 0 writes the manifest, renames the folder to its final name and prunes old checkpoints. So no
thread communicates, and an unfinished checkpoint is a hidden folder, which the next start deletes.
"""

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

from utils.distributed import SharedError, World, all_gather_objects, any_ranks
from utils.distributed.patience import patiently
from utils.memory import available_bytes

from .format import checkpoint_path, commit, partial_path, shard_name
from .host_copy import HostCopy, host_bytes
from .retention import prune
from .tensor_file import NotFiniteError, write_object, write_tensors


class RetentionPolicy(NamedTuple):
    """Which checkpoints stay when a new one is complete."""

    last: int = 2  # so many newest
    every: int = 0  # also every N-th optimizer step; 0 disables
    best: int = 1  # also so many with the highest scores


class Shard(NamedTuple):
    """A rank's rows of what all ranks hold together, such as the class centres of a head.

    Args:
        rows: tensors by name, (stop - start, ...) each.
        slots: [start, stop), whose rows they are.
    """

    rows: dict[str, Tensor]
    slots: tuple[int, int]


class CheckpointWriter:
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
        self.background, self.max_failed, self.warn = background, max_failed, warn
        self.failed = 0  # saves in a row
        self._allowed = max_failed
        self.saved_at = time.monotonic()  # when this rank began its last save
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=_be_nice)
        self._host_copy = HostCopy(world.device, warn)
        self._job: Future[dict[str, Any]] | None = None
        self._manifest: dict[str, Any] | None = None  # of the checkpoint being written, until its parts are written
        self._partial = self._final = run_folder

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Complete the save under way if all ranks come here: a run that stops at a bad loss must not lose its checkpoint."""
        if error is None or self.world.world_size == 1 or isinstance(error, SharedError):
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
        return self._job is not None and not self._job.done()

    def minutes_since_save(self) -> float:
        """Return the minutes since the last save began. Not collective."""
        return (time.monotonic() - self.saved_at) / 60

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
        copy = self._copy_of(states) if self.background else None
        (waits,) = any_ranks([copy is None], world)  # if one rank has to wait for the disk, the others would wait for it later
        if waits and self.background:
            self.warn("checkpoint: no memory for a copy of the state, so training waits until it is on the disk")
        states = states if copy is None else copy
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)

        def write_parts() -> dict[str, Any]:
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
        if not self._host_copy.has_memory() and not _has_room(states, self.world):
            return None
        try:
            copy: dict[str, Any] = self._host_copy.take(states)
        except MemoryError:
            return None
        return copy

    def advance(self, any_writing: bool) -> None:
        """Take the next step of the save under way, unless there is none or a rank still writes.

        Args:
            any_writing: whether `is_writing` held on any rank, the same answer on all of them.

        Raises:
            SharedError: as for `save`.
        """
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
        """Wait until the save under way is complete.

        Raises:
            SharedError: as for `save`.
        """
        while self._job is not None:
            with patiently(self.world, "saving"):
                self._job.exception()  # waits
            self.advance(any_writing=False)

    def _complete(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if self.world.rank == 0:
            commit(self._partial, self._final, manifest)
            try:
                return {"warnings": prune(self.run_folder, self.keep.last, self.keep.every, self.keep.best)}
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
        self.warn(
            f"{text}. Training goes on; it stops if that happens {self.max_failed - self.failed + 1} time(s) more in a row"
        )


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
    return (
        ""
        if error is None
        else str(error)
        if isinstance(error, (OSError, NotFiniteError))
        else f"{type(error).__name__}: {error}"
    )


def _has_room(states: Any, world: World) -> bool:
    """Return whether the host's free memory holds a copy of what this rank saves, with a tenth to spare."""
    return 1.1 * host_bytes(states) < available_bytes(world._replace(device=torch.device("cpu")))
