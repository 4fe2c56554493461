"""Class centres of another run, read by their labels; and a head that begins with them, and with images of new classes.

Shapes: C = classes of the other run, D = embedding size, n = classes asked for. With K > 1 sub-centers, (C, D) and (n, D) are
(C, K, D) and (n, K, D).
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.checkpoint.format import find_checkpoint, read_manifest, slots_by_head
from utils.checkpoint.reading import class_order, head_named, shards_of
from utils.checkpoint.tensor_file import RefusedError, is_plain, load_plain, mapped_tensor
from utils.files import read_numbers
from utils.text import prefix_errors

from .centres.shard import INITIAL_STD, slots_of_classes
from .centres.sub_centers import rows_of_slots
from .head import PartialFC

ClassMeans = Callable[[np.ndarray], tuple[Tensor, np.ndarray]]  # labels (n,) -> (n, D) directions, (n,) bool: has any image

_BLOCK = 65536  # centres read at once
_SAMPLE = 4096  # centres from which the mean norm is estimated


class InitCounts(NamedTuple):
    """How many of this rank's class centres came from each source."""

    kept: int
    from_images: int
    random: int

    def __str__(self) -> str:
        return f"{self.kept} kept, {self.from_images} from images, {self.random} at random"


@torch.no_grad()
def init_centres(
    head: PartialFC,
    source_path: str,
    class_map: str,
    class_means: ClassMeans | None,
    name: str = "",
    keys: tuple[str, str] = ("init.head", "init.classes"),
) -> InitCounts:
    """Fill this rank's centres before the first step; the same centres on any number of ranks.

    Centres of the source keep their norm, which determines how fast they turn. New ones get the mean norm of the source's
    centres, or without a source the norm of a random start. Of several sub-centers, images give the first one its
    direction, so that it is the dominant one from the start, and the others stay random.

    Args:
        source_path: a path for open_centres; "" = every class is new.
        class_map: a path for read_class_map; "" = the source has the same labels.
        class_means: returns the mean direction of images of new classes; None = they stay random.
        name: of the head, which a checkpoint with several must have.
        keys: of both paths, for errors.

    Raises:
        ValueError: the source does not fit.
    """
    source = old_of_new = None
    if source_path:
        with prefix_errors(keys[0]):
            source = open_centres(Path(source_path), name)
        if class_map:
            with prefix_errors(keys[1]):
                old_of_new = read_class_map(Path(class_map), source.num_classes, head.num_classes)
    labels = head.shard_classes()
    old = np.full(len(labels), -1, dtype=np.int64)
    store, several = head.centre_store, head.config.sub_centers
    norm = float(torch.linalg.vector_norm(torch.full((head.embedding_size,), INITIAL_STD)))  # that of a random start
    if source is not None:
        _check_source(source, head, old_of_new is not None, keys)
        old = labels if old_of_new is None else old_of_new[labels]
        used = np.arange(source.num_classes) if old_of_new is None else old_of_new[old_of_new >= 0]
        norm = float(source.read(used[:_SAMPLE]).norm(dim=-1).mean())
    kept = np.flatnonzero(old >= 0)
    for start in range(0, len(kept), _BLOCK):
        rows = kept[start : start + _BLOCK]
        assert source is not None
        values = source.read(old[rows])
        norms = values.norm(dim=-1).view(len(rows), -1)
        # without a direction it would turn without bound
        bad = np.flatnonzero(~((norms > 0) & norms.isfinite()).all(dim=1).numpy())
        if len(bad):
            raise ValueError(
                f"{keys[0]}: in {source.name} the centre of label {old[rows[bad[0]]]} is zero or not finite; leave that label "
                f"out of {keys[1]}, so that its class counts as new, or take an earlier checkpoint"
            )
        store.write_centres(torch.from_numpy(rows_of_slots(rows, several)), values.reshape(-1, head.embedding_size))
    new, filled = np.flatnonzero(old < 0), 0
    for start in range(0, len(new), _BLOCK):
        rows = new[start : start + _BLOCK]
        if source is not None:  # new centres keep their random directions but get the norm of the others
            index = torch.from_numpy(rows_of_slots(rows, several))
            values = store.tensors["centres"][index].float()
            values *= norm / values.norm(dim=-1, keepdim=True).clamp_min(1e-12)
            store.write_centres(index, values)
        if class_means is not None:
            means, found = class_means(labels[rows])
            store.write_centres(torch.from_numpy(rows[found] * several), means[torch.from_numpy(found)] * norm)
            filled += int(found.sum())
    store.refresh_norms()
    return InitCounts(len(kept), filled, len(new) - filled)


def _check_source(source: "CentreSource", head: PartialFC, is_mapped: bool, keys: tuple[str, str]) -> None:
    """Raise ValueError unless the centres fit into the head."""
    if source.embedding_size != head.embedding_size:
        raise ValueError(
            f"{keys[0]}: the class centres of {source.name} have {source.embedding_size} numbers, "
            f"backbone.embedding_size is {head.embedding_size}"
        )
    if not is_mapped and source.num_classes != head.num_classes:
        raise ValueError(
            f"{keys[0]}: {source.name} has {source.num_classes} classes, the data {head.num_classes}; "
            f"say with {keys[1]} which label there is which label here"
        )
    if source.sub_centers != head.config.sub_centers:
        raise ValueError(
            f"{keys[0]}: {source.name} has {source.sub_centers} centres for each class, this run has head.sub_centers="
            f"{head.config.sub_centers}; set head.sub_centers={source.sub_centers}, or leave {keys[0]} empty"
        )


class CentreSource(NamedTuple):
    """Where class centres can be read."""

    name: str
    num_classes: int
    embedding_size: int
    read: Callable[[np.ndarray], Tensor]  # labels (n,) int64 -> their centres (n, D) float32, as stored; reads no other rows
    sub_centers: int = 1  # K


def has_head(path: str, name: str) -> bool:
    """Return whether a path is a run folder or checkpoint with a head of that name."""
    return bool(path) and Path(path).is_dir() and name in slots_by_head(read_manifest(find_checkpoint(Path(path))))


def open_centres(path: Path, name: str = "") -> CentreSource:
    """Return the class centres at path.

    Args:
        path: run folder (its newest checkpoint), checkpoint folder, or a matrix (C, D) with row i for label i: .safetensors
            (key `weight`, or the only tensor), .pt or .pth (a tensor, or {"weight": tensor}), as face checkpoint merge
            writes it.
        name: of the head, of a checkpoint with several.

    Raises:
        ValueError: nothing is there, or it does not hold class centres.
    """
    if path.is_dir():
        return _open_checkpoint(find_checkpoint(path), name)
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
    except RefusedError as error:
        raise ValueError(f"{path}: {error}") from None
    except Exception as error:  # many kinds: weights_only rejects code with pickle.UnpicklingError, damage is a RuntimeError
        raise ValueError(f"{path}: cannot be read as class centres ({type(error).__name__})") from None
    value = value.get("weight") if isinstance(value, dict) else value
    if not isinstance(value, Tensor):
        raise ValueError(f"{path}: must hold a tensor, or a dict with the tensor 'weight'")
    if not is_plain(value):
        raise ValueError(f"{path}: its tensor is no plain one with memory for all its numbers; save a copy of it")
    return value


def _open_checkpoint(checkpoint: Path, name: str) -> CentreSource:
    head = head_named(checkpoint, name)
    num_classes, seed = class_order(checkpoint, head)
    files = shards_of(checkpoint, num_classes, head)
    shards = [(slots, *_scaled(checkpoint / name)) for slots, name in files]
    row = tuple(shards[0][1].shape[1:]) if shards[0][1].ndim in (2, 3) else (0,)
    dim = row[-1]
    for (low, high), centres, scale in shards:
        if tuple(centres.shape) != (high - low, *row) or not scale.is_floating_point() or scale.shape != centres.shape[:-1]:
            raise ValueError(
                f"checkpoint {checkpoint}: the centres of slots {low} to {high - 1} must be a matrix of {high - low} rows of "
                f"{dim or 'D'} floats, got {centres.dtype} {tuple(centres.shape)}"
            )

    def read(labels: np.ndarray) -> Tensor:
        slots = slots_of_classes(labels, num_classes, seed)
        rows = torch.empty(len(labels), *row)
        for (low, high), centres, scale in shards:
            here = np.flatnonzero((slots >= low) & (slots < high))
            index = torch.from_numpy(slots[here] - low)
            rows[torch.from_numpy(here)] = centres[index].float() * scale[index, ..., None]
        return rows

    return CentreSource(str(checkpoint), num_classes, dim, read, row[0] if len(row) == 2 else 1)


def _scaled(path: Path) -> tuple[Tensor, Tensor]:
    """Return the centres (n, ..., D) of a file, and what to multiply them by, (n, ...); integers if it has none."""
    centres = mapped_tensor(path, "centres")
    if centres.dtype == torch.int8:
        return centres, mapped_tensor(path, "centres_scale")
    return centres, centres.new_ones(()).expand(centres.shape[:-1])


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
