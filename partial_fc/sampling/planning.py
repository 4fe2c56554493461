"""What is decided of an optimizer step before its embeddings exist: which classes are active, in which chunks, whose labels.

All of it follows from the labels, the seed and the number of the step. So a thread can decide it while the step before is
computed, and upload it to the device in one copy.

Source of the sampling: An et al., "Partial FC", https://arxiv.org/abs/2010.05222, and "Killing Two Birds with One Stone", CVPR
2022, https://arxiv.org/abs/2203.15565. Every class in the batch (a positive) is active; negatives fill the budget of
round(sample_rate x local classes). Instead of drawing a random number per class, a run of consecutive slots is taken. Slots are
randomly permuted classes (see shard.py), so each negative has the same probability, and no row has to be copied. Part of the
budget may go to the nearest classes of the batch's classes (see neighbours.py); the run then fills the rest.
Shapes: A = micro-batches, B = samples of the global micro-batch, c = classes of one chunk. A place is the number of an active
class in the order of the chunks; the chunk that begins at place p has the places p to p + c - 1.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.randomness import derive

from ..centres.shard import shard_range
from ..centres.store import Select
from ..centres.sub_centers import rows_of_slots

_ALIGNMENT = 64  # bytes


class ActiveSet(NamedTuple):
    """Active local slots of one step: `runs` of consecutive slots [start, stop), and `extra` (int64, ascending) ones.

    Args:
        certain: those that were not drawn (int64, ascending): their inclusion probability is 1.
        weight: 1 / inclusion probability of the others.
    """

    runs: list[tuple[int, int]]
    extra: np.ndarray
    certain: np.ndarray = np.empty(0, dtype=np.int64)
    weight: float = 1.0

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs) + len(self.extra)

    def places(self, slots: np.ndarray) -> np.ndarray:
        """Return the position of each of these active slots in the order runs, then extra; (n,) int64."""
        before = sum(stop - start for start, stop in self.runs)
        places = before + np.searchsorted(self.extra, slots)
        offset = 0
        for start, stop in self.runs:
            inside = (slots >= start) & (slots < stop)
            places[inside] = slots[inside] - start + offset
            offset += stop - start
        return places


def num_active(num_local: int, num_positives: int, sample_rate: float) -> int:
    """Return how many of a shard's classes are active: its budget, or the number of positives if that is larger."""
    return max(num_positives, min(num_local, max(1, round(sample_rate * num_local))))


def active_of_all_ranks(
    classes: np.ndarray | None, num_classes: int, world_size: int, sample_rate: float, weighted: bool = False
) -> int:
    """Return how many classes are active, over all ranks.

    Args:
        classes: distinct slots of the batch's classes, of all ranks; None = of an empty batch.
        weighted: count each active class by its weight, 1 / inclusion probability. A shard whose budget the batch's classes
            fill draws none, so there they stand for themselves alone.
    """
    total = 0
    for rank in range(world_size):
        start, stop = shard_range(num_classes, rank, world_size)
        positives = 0 if classes is None else int(np.sum((classes >= start) & (classes < stop)))
        active = num_active(stop - start, positives, sample_rate)
        total += stop - start if weighted and active > positives else active
    return total


def draw_active(
    positives: np.ndarray, num_local: int, sample_rate: float, seed: int, neighbours: np.ndarray | None = None
) -> ActiveSet:
    """Return the active local slots of one step; this takes microseconds for any number of classes.

    Negatives are consecutive in the circle of all slots that are neither positives nor chosen neighbours, from a uniform random
    start. So each is active with the same probability, exactly (budget - chosen) / (local classes - chosen).

    Args:
        positives: (P,) int64 local slots of the batch's classes, ascending and distinct.
        num_local: slots of the shard.
        sample_rate: share of the slots that should be active, in (0, 1].
        seed: of this step and rank.
        neighbours: int64 local slots to prefer as negatives, the nearest first, repeats and positives allowed. They take at
            most half of the budget that the positives leave.
    """
    budget = num_active(num_local, len(positives), sample_rate)
    if budget >= num_local:
        return ActiveSet([(0, num_local)] if num_local else [], positives[:0])
    chosen = positives
    if neighbours is not None and len(neighbours):
        chosen = np.union1d(positives, _first_distinct(neighbours, positives, (budget - len(positives)) // 2))
    num_wanted, num_others = budget - len(chosen), num_local - len(chosen)
    if num_wanted == 0:
        return ActiveSet([], chosen, chosen)
    # uniform in range(num_others); the bias of the modulus is below 2^-40 for any number of classes that fits a machine
    first = derive(seed, "negatives") % num_others
    last = first + num_wanted - 1
    runs = []
    for low, high in ((first, min(last, num_others - 1)), (0, last - num_others)):
        if low <= high:
            runs.append((_slot_of_other(low, chosen), _slot_of_other(high, chosen) + 1))
    inside = np.zeros(len(chosen), dtype=bool)
    for start, stop in runs:
        inside |= (chosen >= start) & (chosen < stop)
    return ActiveSet(sorted(runs), chosen[~inside], chosen, num_others / num_wanted)


def _first_distinct(neighbours: np.ndarray, positives: np.ndarray, most: int) -> np.ndarray:
    """Return the first `most` distinct neighbours that are not positives, in any order."""
    distinct, first_seen = np.unique(neighbours, return_index=True)
    new = ~np.isin(distinct, positives, assume_unique=True)
    distinct, first_seen = distinct[new], first_seen[new]
    return distinct[np.argsort(first_seen)[:most]]


def _slot_of_other(number: int, chosen: np.ndarray) -> int:
    """Return the slot of the number-th slot (from 0) that is not chosen."""
    before = chosen - np.arange(len(chosen))  # how many others precede each chosen one
    return number + int(np.searchsorted(before, number, side="right"))


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
    owners_on_device, local_on_device, places_on_device = ([next(tensors) for _ in owners] for _ in range(3))
    by_class, drawn_not = (next(tensors), next(tensors)), next(tensors)
    weights: Tensor | None = None
    if weighs and active.weight != 1.0:
        weights = torch.full((len(active),), active.weight, device=device).index_fill_(0, drawn_not, 1.0)
    chunks = []
    for piece, count, begin, (low, high) in zip(pieces, sizes, begins.tolist(), itertools.pairwise(cuts), strict=False):
        select = slice(piece[0] * sub_centers, piece[1] * sub_centers) if isinstance(piece, tuple) else next(tensors)
        weight = None if weights is None else weights[begin : begin + count]
        chunks.append(Chunk(select, count, begin, (by_class[0][low:high], by_class[1][low:high]), weight))
    return StepPlan(labels, owners_on_device, local_on_device, places_on_device, chunks)


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
