"""What is decided of an optimizer step before its embeddings exist: which classes are active, in which chunks, whose labels.

All of it follows from the labels, the seed and the number of the step. So a thread can decide it while the step before is
computed, and upload it to the device in one copy.

Source of the sampling: An et al., "Partial FC", https://arxiv.org/abs/2010.05222, and "Killing Two Birds with One Stone", CVPR
2022, https://arxiv.org/abs/2203.15565. Every class in the batch (a positive) is active; negatives fill the budget of
round(sample_rate x local classes). Instead of drawing a random number per class, a run of consecutive slots is taken. Slots are
randomly permuted classes (see shard.py), so each negative has the same probability, and no row has to be copied. Part of the
budget may go to the nearest classes of the batch's classes; the run then fills the rest.

Source: the k-nearest-neighbour softmax of Song et al., "Large-Scale Training System for 100-Million Classification at
Alibaba", KDD 2020, https://arxiv.org/abs/2102.06025. The graph is rebuilt every few hundred steps: each rank searches all
classes for the neighbours of its own, exactly or by inverted lists (neighbour_search.py).
Neighbours are slot numbers, so the neighbours of a class do not depend on the number of ranks.

Shapes: A = micro-batches, B = samples of the global micro-batch, c = classes of one chunk. A place is the number of an active
class in the order of the chunks; the chunk that begins at place p has the places p to p + c - 1, n = classes of
this shard, C = all classes, k = neighbours per class.
"""

import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.randomness import derive, permute

from ..centres.shard import shard_range
from ..centres.store import CentreStore, Select
from ..centres.sub_centers import rows_of_slots
from ..collectives import Collectives
from ..config import HeadConfig
from .neighbour_search import QUERIES, InvertedLists, Nearest, UnitCentres, block_bytes, hits, list_bytes, search_exact

_ALIGNMENT = 64  # bytes


class ActiveSet(NamedTuple):
    """Active local slots of one step: `runs` of consecutive slots [start, stop), and `extra` (int64, ascending) ones."""

    runs: list[tuple[int, int]]
    extra: np.ndarray
    certain: np.ndarray = np.empty(0, dtype=np.int64)  # those that were not drawn, ascending: their inclusion probability is 1
    weight: float = 1.0  # 1 / inclusion probability of the others

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
        near = _first_distinct(neighbours, positives, (budget - len(positives)) // 2)
        chosen = np.sort(np.concatenate([positives, near]))
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
    """Active local slots that are processed at once, and the samples whose target class is among them."""

    select: Select  # consecutive rows of the centres (a view) or single ones (a copy); K for each class, see sub_centers.py
    size: int  # c
    begin: int  # the place of its first class
    # (class_index, sample_index), int64 (n,): class_index in [0, c) ascends, and within a class sample_index, which counts the
    # samples of all micro-batches, in [0, A * B)
    targets: tuple[Tensor, Tensor]
    weights: Tensor | None = None  # 1 / inclusion probability of each class, (c,) fp32; None = they are not used, or 1

    @property
    def num_rows(self) -> int:
        """How many rows are selected: c K."""
        return len(self.select) if isinstance(self.select, Tensor) else self.select.stop - self.select.start


class SharedLabels(NamedTuple):
    """The labels of a step of all ranks, and the flags that came with them."""

    step: int
    slots: np.ndarray  # (A, B) slot of each sample's class
    classes: np.ndarray  # distinct slots, ascending
    flags: Sequence[bool] = ()  # for each that the ranks gave, whether it holds on any of them


class StepPlan(NamedTuple):
    """The part of a step that a shard computes."""

    labels: SharedLabels
    owners: list[Tensor]  # per micro-batch: the samples whose class lies in this shard (n,), int64
    local: list[Tensor]  # per micro-batch: the local slots of their classes (n,), int64
    places: list[Tensor]  # per micro-batch: the place of each sample's class (B,), int64; -1 if it does not lie in this shard
    chunks: list[Chunk]


def plan_step(
    labels: SharedLabels, active: ActiveSet, slots: range, size: int, device: torch.device, weighs: bool, sub_centers: int
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


_FOUND_BYTES = 12  # of each neighbour of a query until all of them are searched: cosine, slot and its copy
_CHECKED = 256  # classes whose approximate neighbours are compared with the exact ones


class NeighbourGraph:
    """Slots of the k nearest classes of each class of this shard, (n, k) int32, nearest first; -1 before the first rebuild.

    The search by inverted lists also leaves -1 where it saw fewer than k classes.

    Args:
        config: k (fewer if there are fewer other classes), how to search, and the optimizer steps between rebuilds.
        seed: of the head; equal on all ranks.
    """

    def __init__(
        self, num_classes: int, rank: int, config: HeadConfig, seed: int, collectives: Collectives, device: torch.device
    ) -> None:
        self.num_classes, self.rank, self.config, self.seed, self.collectives = num_classes, rank, config, seed, collectives
        self.first_slot, self.end_slot = shard_range(num_classes, rank, collectives.world_size)
        self.k = min(config.neighbours, num_classes - 1)
        self.slots = torch.full((self.end_slot - self.first_slot, self.k), -1, dtype=torch.int32, device=device)
        self._on_host: np.ndarray | None = None  # a copy of the slots, so that no draw waits for the device

    def is_due(self, step: int) -> bool:
        """Return whether to rebuild the graph before this optimizer step, of a sample rate below 1.

        Also where a stage of rate 1, which needs no graph, has ended; never before the first step, as all centres are random.
        """
        return step > 0 and (step % self.config.neighbours_every == 0 or self.config.rate_at(step - 1) == 1)

    def loaded(self) -> None:
        """Note that the slots were filled from a checkpoint."""
        self._on_host = None

    @torch.no_grad()
    def rebuild(self, store: CentreStore, dtype: torch.dtype, step: int) -> str:
        """Find all neighbours again from the current centres, with products in dtype. A collective call.

        Args:
            step: of the optimizer; with the seed it fixes the lists.

        Returns:
            A line for the log about an approximate search, otherwise "".
        """
        self._on_host = None
        begun = time.perf_counter()
        centres = UnitCentres(store, self.num_classes, self.rank, dtype, self.collectives)
        rows = torch.arange(len(self.slots), device=self.slots.device)
        lists = None
        if self.config.searches_lists(self.num_classes):
            lists = InvertedLists(centres, derive(self.seed, "neighbours", step))
        most = -(-self.num_classes // self.collectives.world_size)  # classes of the largest shard: all ranks search as often
        for low in range(0, most, QUERIES):
            found = self._search(centres, lists, rows[low : low + QUERIES])
            self.slots[low : low + QUERIES] = found.slots
        if lists is None:
            return ""
        compared, recall = self._check(centres, lists, step)
        return (
            f"neighbours of {self.num_classes} classes in {time.perf_counter() - begun:.1f} s: {lists.num_lists} lists, "
            f"{min(self.config.neighbours_probes, lists.num_lists)} searched for each, {100 * compared:.2g} % of all pairs; "
            f"recall {recall:.3f}, by {min(_CHECKED, self.num_classes)} classes"
        )

    def near(self, slots: np.ndarray) -> np.ndarray:
        """Return the rows of this shard that are neighbours of these distinct slots of any rank, each slot's nearest first.

        A collective call, because each rank knows only the neighbours of its own classes. Repeats are possible. (m,) int64.
        """
        if self._on_host is None:
            self._on_host = self.slots.cpu().numpy()
        here = (slots >= self.first_slot) & (slots < self.end_slot)
        known = np.zeros((len(slots), self.k), dtype=np.int32)  # slot + 1, or 0, so that the sum over ranks is the slot + 1
        known[here] = self._on_host[slots[here] - self.first_slot] + 1
        shared = self.collectives.sum(torch.from_numpy(known)).numpy().T.reshape(-1)
        rows = shared.astype(np.int64) - 1 - self.first_slot
        return rows[(rows >= 0) & (rows < self.end_slot - self.first_slot)]

    def _search(self, centres: UnitCentres, lists: InvertedLists | None, rows: torch.Tensor) -> Nearest:
        if lists is None:
            return search_exact(centres, rows, self.k)
        return lists.search(rows, self.k, self.config.neighbours_probes)

    def _check(self, centres: UnitCentres, lists: InvertedLists, step: int) -> tuple[float, float]:
        """Return the share of all pairs of classes that were compared, and the recall for a sample of classes."""
        pairs = float(lists.compared)
        slots = permute(np.arange(min(_CHECKED, self.num_classes)), self.num_classes, derive(self.seed, "recall", step))
        rows = torch.from_numpy(slots[(slots >= self.first_slot) & (slots < self.end_slot)] - self.first_slot)
        rows = rows.to(self.slots.device)
        right = hits(self._search(centres, lists, rows), self._search(centres, None, rows))
        sums = torch.stack([right.sum().double(), right.new_tensor(pairs, dtype=torch.float64)])
        right_ones, compared = self.collectives.sum(sums).tolist()
        return compared / self.num_classes**2, right_ones / (len(slots) * self.k)


def search_bytes(config: HeadConfig, num_classes: int, num_local: int, dim: int, device: str) -> int:
    """Return the bytes that a rebuild takes beside the graph itself: bounded, but for 40 per class of the shard with lists."""
    k = min(config.neighbours, num_classes - 1)
    size = block_bytes(device, dim, config.matmul_dtype, k) + _FOUND_BYTES * k * min(QUERIES, num_local)
    if config.searches_lists(num_classes):
        size += list_bytes(num_classes, num_local, dim, config.matmul_dtype, device, config.neighbours_probes)
    return size
