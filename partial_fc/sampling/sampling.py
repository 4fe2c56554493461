"""Partial FC's sampling: chooses the class centres that take part in a step.

Source: An et al., "Partial FC", https://arxiv.org/abs/2010.05222, and "Killing Two Birds with One Stone", CVPR 2022,
https://arxiv.org/abs/2203.15565. Every class in the batch (a positive) is active; negatives fill the budget of
round(sample_rate x local classes). Instead of drawing a random number per class, a run of consecutive slots is taken. Slots are
randomly permuted classes (see shard.py), so each negative has the same probability, and no row has to be copied.

Part of the budget may go to the nearest classes of the batch's classes (see neighbours.py); the run then fills the rest.
"""

from typing import NamedTuple

import numpy as np

from utils.randomness import derive

from ..centres.shard import shard_range


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
