"""Reads class centres of another run by their labels, from a checkpoint of any number of ranks or from one matrix.

Shapes: C = classes there, D = embedding size, n = classes asked for. With K > 1 sub-centers, (C, D) and (n, D) are (C, K, D)
and (n, K, D).
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.checkpoint.format import find_checkpoint
from utils.checkpoint.reading import class_order, shards_of
from utils.checkpoint.tensor_file import is_plain, load_plain, mapped_tensor
from utils.files import read_numbers

from .shard import slots_of_classes


class CentreSource(NamedTuple):
    """Where class centres can be read."""

    name: str
    num_classes: int
    embedding_size: int
    read: Callable[[np.ndarray], Tensor]  # labels (n,) int64 -> their centres (n, D) float32, as stored; reads no other rows
    sub_centers: int = 1  # K


def open_centres(path: Path) -> CentreSource:
    """Return the class centres at path.

    Args:
        path: run folder (its newest checkpoint), checkpoint folder, or a matrix (C, D) with row i for label i: .safetensors
            (key `weight`, or the only tensor), .pt or .pth (a tensor, or {"weight": tensor}), as scripts.checkpoint merge
            writes it.

    Raises:
        ValueError: nothing is there, or it does not hold class centres.
    """
    if path.is_dir():
        return _open_checkpoint(find_checkpoint(path))
    if not path.is_file():
        raise ValueError(f"no run folder, checkpoint or matrix of class centres at {path}")
    rows = mapped_tensor(path, "weight") if path.suffix == ".safetensors" else _matrix(path)
    if rows.ndim not in (2, 3) or not rows.is_floating_point():
        raise ValueError(
            f"{path}: class centres must be a matrix (classes, D) of floats, or (classes, sub-centers, D), got {rows.dtype} "
            f"{tuple(rows.shape)}"
        )
    several = rows.shape[1] if rows.ndim == 3 else 1
    rows = rows.squeeze(1) if several == 1 and rows.ndim == 3 else rows
    return CentreSource(str(path), len(rows), rows.shape[-1], lambda labels: rows[torch.from_numpy(labels)].float(), several)


def _matrix(path: Path) -> Tensor:
    try:
        value = load_plain(path)
    except Exception as error:  # many kinds: weights_only rejects code with pickle.UnpicklingError, damage is a RuntimeError
        raise ValueError(f"{path}: cannot be read as class centres ({type(error).__name__})") from None
    value = value.get("weight") if isinstance(value, dict) else value
    if not isinstance(value, Tensor):
        raise ValueError(f"{path}: must hold a tensor, or a dict with the tensor 'weight'")
    if not is_plain(value):
        raise ValueError(f"{path}: its tensor is no plain one with memory for all its numbers; save a copy of it")
    return value


def _open_checkpoint(checkpoint: Path) -> CentreSource:
    num_classes, seed = class_order(checkpoint)
    shards = [(slots, mapped_tensor(checkpoint / name, "centres")) for slots, name in shards_of(checkpoint, num_classes)]
    row = tuple(shards[0][1].shape[1:]) if shards[0][1].ndim in (2, 3) else (0,)
    dim = row[-1]
    for (low, high), centres in shards:
        if tuple(centres.shape) != (high - low, *row) or not centres.is_floating_point():
            raise ValueError(
                f"checkpoint {checkpoint}: the centres of slots {low} to {high - 1} must be a matrix of {high - low} rows of "
                f"{dim or 'D'} floats, got {centres.dtype} {tuple(centres.shape)}"
            )

    def read(labels: np.ndarray) -> Tensor:
        slots = slots_of_classes(labels, num_classes, seed)
        rows = torch.empty(len(labels), *row)
        for (low, high), centres in shards:
            here = np.flatnonzero((slots >= low) & (slots < high))
            rows[torch.from_numpy(here)] = centres[torch.from_numpy(slots[here] - low)].float()
        return rows

    return CentreSource(str(checkpoint), num_classes, dim, read, row[0] if len(row) == 2 else 1)


def read_class_map(path: Path, num_old: int, num_new: int) -> np.ndarray:
    """Return for each label here the label it has in another training, (num_new,) int64, -1 for none.

    Args:
        path: UTF-8 text, a line `old new` for each class that both have; # begins a comment.

    Raises:
        ValueError: naming the line.
    """
    old_of_new = np.full(num_new, -1, dtype=np.int64)
    for number, (old, new) in read_numbers(path, "old new"):
        if old >= num_old or new >= num_new:
            raise ValueError(
                f"{path}: line {number}: labels must be below {num_old} (old) and {num_new} (new), got {old} and {new}"
            )
        if old_of_new[new] >= 0:
            raise ValueError(f"{path}: line {number}: label {new} has an old label already, {old_of_new[new]}")
        old_of_new[new] = old
    if not (old_of_new >= 0).any():
        raise ValueError(f"{path}: maps no class")
    return old_of_new
