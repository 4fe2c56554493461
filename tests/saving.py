"""One checkpoint at once, for tests that need one on the disk, and a disk that is full."""

import errno
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from utils.checkpoint.format import BACKBONE, SOFTMAX, TRAINER, checkpoint_path
from utils.checkpoint.writer import CheckpointWriter, RetentionPolicy, Shard
from utils.distributed import World

Tensors = dict[str, Tensor]
ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def as_files(
    backbone: Tensors, softmax: Tensors, slots: tuple[int, int], trainer: dict[str, Any], facts: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of CheckpointWriter.save for a run with one head."""
    return {"files": {BACKBONE: backbone, TRAINER: trainer, SOFTMAX: Shard(softmax, slots)}, "facts": facts}


def save_now(
    run_folder: Path,
    step: int,
    backbone: Tensors,
    softmax: Tensors,
    slots: tuple[int, int],
    trainer: dict[str, Any],
    facts: dict[str, Any],
    world: World = ALONE,
    keep: RetentionPolicy | None = None,
) -> Path:
    """Save one checkpoint and wait for it; collective. Return its folder. Errors as in CheckpointWriter.save."""
    writer = CheckpointWriter(run_folder, world, keep or RetentionPolicy(last=1 << 30), background=False)
    writer.save(step, **as_files(backbone, softmax, slots, trainer, facts), last=True)
    return checkpoint_path(run_folder, step)


def no_space(*args: Any) -> None:
    """Stand in for what writes, on a disk that is full."""
    raise OSError(errno.ENOSPC, "No space left on device")
