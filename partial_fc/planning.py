"""What is decided of an optimizer step before its embeddings exist: whose labels, which classes are active, in which chunks.

All of it follows from the labels, the seed and the number of the step. So a thread can decide it while the step before is
computed, and upload it to the device in one copy.
Shapes: A = micro-batches, B = samples of the global micro-batch, c = classes of one chunk.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .centre_store import Select
from .sampling import ActiveSet

_ALIGNMENT = 64  # bytes


class Chunk(NamedTuple):
    """Active local slots that are processed at once, and the samples whose target class is among them."""

    select: Select  # consecutive slots (a view of the centres) or single slots (a copy)
    size: int
    targets: list[tuple[Tensor, Tensor]]  # per micro-batch: (class_index, sample_index), int64


class SharedLabels(NamedTuple):
    """The labels of a step of all ranks."""

    step: int
    slots: np.ndarray  # (A, B) slot of each sample's class
    classes: np.ndarray  # distinct slots, ascending


class StepPlan(NamedTuple):
    """The part of a step that a shard computes."""

    labels: SharedLabels
    owners: list[Tensor]  # per micro-batch: the samples whose class lies in this shard (n,), int64
    local: list[Tensor]  # per micro-batch: the local slots of their classes (n,), int64
    chunks: list[Chunk]


def plan_step(labels: SharedLabels, active: ActiveSet, slots: range, size: int, device: torch.device) -> StepPlan:
    """Return the plan of a step, its indices on the device.

    Args:
        active: the active local slots.
        slots: those of this shard.
        size: the most classes of a chunk.
    """
    here = (labels.slots >= slots.start) & (labels.slots < slots.stop)
    owners = [np.flatnonzero(mask) for mask in here]
    local = [row[samples] - slots.start for row, samples in zip(labels.slots, owners, strict=True)]
    pieces: list[tuple[int, int] | np.ndarray] = []
    for start, stop in active.runs:
        pieces += [(low, min(low + size, stop)) for low in range(start, stop, size)]
    pieces += [active.extra[low : low + size] for low in range(0, len(active.extra), size)]
    sizes = [piece[1] - piece[0] if isinstance(piece, tuple) else len(piece) for piece in pieces]
    begins = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    arrays, cuts = [*owners, *local], []
    for samples, chosen in zip(owners, local, strict=True):
        places = active.places(chosen)
        order = np.argsort(places, kind="stable")
        cuts.append(np.searchsorted(places[order], begins))
        arrays += [places[order] - np.repeat(begins[:-1], np.diff(cuts[-1])), samples[order]]
    arrays += [piece for piece in pieces if isinstance(piece, np.ndarray)]
    tensors = iter(upload(arrays, device))
    owned, chosen_here = ([next(tensors) for _ in owners] for _ in range(2))
    shares = []
    for bounds in cuts:
        class_index, sample_index = next(tensors), next(tensors)
        shares.append([(class_index[low:high], sample_index[low:high]) for low, high in itertools.pairwise(bounds)])
    chunks = []
    for number, (piece, count) in enumerate(zip(pieces, sizes, strict=True)):
        select = slice(*piece) if isinstance(piece, tuple) else next(tensors)
        chunks.append(Chunk(select, count, [share[number] for share in shares]))
    return StepPlan(labels, owned, chosen_here, chunks)


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return int64 arrays as tensors on the device, by a single copy that the host does not wait for."""
    places = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)])
    # memory of its own for each step: the copy may still read it when the next step is planned
    host = torch.empty(int(places[-1]) // 8, dtype=torch.int64, pin_memory=device.type == "cuda")
    packed = host.numpy()
    for place, array in zip(places, arrays, strict=False):
        packed[place // 8 : place // 8 + len(array)] = array
    block = host.to(device, non_blocking=True)
    return [block[place // 8 : place // 8 + len(array)] for place, array in zip(places, arrays, strict=False)]
