"""What is decided of an optimizer step before its embeddings exist: whose labels, which classes are active, in which chunks.

All of it follows from the labels, the seed and the number of the step. So a thread can decide it while the step before is
computed, and upload it to the device in one copy.
Shapes: A = micro-batches, B = samples of the global micro-batch, c = classes of one chunk. A place is the number of an active
class in the order of the chunks; the chunk that begins at place p has the places p to p + c - 1.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..centres.store import Select
from ..centres.sub_centers import rows_of_slots
from .sampling import ActiveSet

_ALIGNMENT = 64  # bytes


class Chunk(NamedTuple):
    """Active local slots that are processed at once, and the samples whose target class is among them.

    Args:
        select: rows of the centres: consecutive ones (a view) or single ones (a copy); K for each class, see sub_centers.py.
        size: c.
        begin: the place of its first class.
        targets: (class_index, sample_index), int64 (n,): class_index in [0, c) ascends, and within a class sample_index, which
            counts the samples of all micro-batches, in [0, A * B).
        weights: 1 / inclusion probability of each class, (c,) fp32; None = they are not used, or 1.
    """

    select: Select
    size: int
    begin: int
    targets: tuple[Tensor, Tensor]
    weights: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """How many rows are selected: c K."""
        return len(self.select) if isinstance(self.select, Tensor) else self.select.stop - self.select.start


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
    places: list[Tensor]  # per micro-batch: the place of each sample's class (B,), int64; -1 if it does not lie in this shard
    chunks: list[Chunk]


def plan_step(
    labels: SharedLabels,
    active: ActiveSet,
    slots: range,
    size: int,
    device: torch.device,
    weighs: bool = False,
    sub_centers: int = 1,
) -> StepPlan:
    """Return the plan of a step, its indices on the device.

    Args:
        active: the active local slots.
        slots: those of this shard.
        size: the most classes of a chunk.
        weighs: whether the chunks get the weights of their classes.
        sub_centers: K.
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
    places = np.full(labels.slots.shape, -1, dtype=np.int64)
    for row, samples, chosen in zip(places, owners, local, strict=True):
        row[samples] = active.places(chosen)
    order = np.argsort(places.reshape(-1), kind="stable")[np.sum(places < 0) :]  # of the samples with a class in this shard
    ordered = places.reshape(-1)[order]
    cuts = np.searchsorted(ordered, begins)
    class_index = ordered - np.repeat(begins[:-1], np.diff(cuts))
    singles = [rows_of_slots(piece, sub_centers) for piece in pieces if isinstance(piece, np.ndarray)]
    certain = active.places(active.certain)
    tensors = iter(upload([*owners, *local, *places, class_index, order, certain, *singles], device))
    on_device = [[next(tensors) for _ in owners] for _ in range(3)]
    by_class, drawn_not = (next(tensors), next(tensors)), next(tensors)
    weights: Tensor | None = None
    if weighs and active.weight != 1.0:
        weights = torch.full((len(active),), active.weight, device=device).index_fill_(0, drawn_not, 1.0)
    chunks = []
    for piece, count, begin, (low, high) in zip(pieces, sizes, begins.tolist(), itertools.pairwise(cuts), strict=False):
        select = slice(piece[0] * sub_centers, piece[1] * sub_centers) if isinstance(piece, tuple) else next(tensors)
        weight = None if weights is None else weights[begin : begin + count]
        chunks.append(Chunk(select, count, begin, (by_class[0][low:high], by_class[1][low:high]), weight))
    owned, of_owned, placed = on_device
    return StepPlan(labels, owned, of_owned, placed, chunks)


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
