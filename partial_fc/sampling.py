"""Which class centres take part in a step: Partial FC's sampling.

Source: An et al., "Partial FC", https://arxiv.org/abs/2010.05222, and "Killing Two Birds with One Stone", CVPR 2022,
https://arxiv.org/abs/2203.15565. Every class that the batch holds (a positive) is active; negatives fill the budget of
round(sample_rate x local classes). Instead of scoring every class, a run of consecutive slots is taken: slots are randomly
permuted classes (see shard.py), so each negative is drawn with the same probability, and no row has to be copied.
"""

from typing import NamedTuple

import numpy as np

from utils.randomness import derive


class ActiveSet(NamedTuple):
    """Local slots of one step: `runs` of consecutive slots [start, stop), and `extra` (int64, ascending) outside the runs."""

    runs: list[tuple[int, int]]
    extra: np.ndarray

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs) + len(self.extra)


def num_active(num_local: int, num_positives: int, sample_rate: float) -> int:
    """Return how many of a shard's classes are active: its budget, or its positives where they are more."""
    return max(num_positives, min(num_local, max(1, round(sample_rate * num_local))))


def draw_active(positives: np.ndarray, num_local: int, sample_rate: float, seed: int) -> ActiveSet:
    """Return the active local slots of one step.

    Negatives are consecutive in the circle of all slots that are not positive, from a uniform start; so each of them is active
    with the same probability, exactly (budget - positives) / (local classes - positives).

    Args:
        positives: (P,) int64 local slots of the batch's own classes, ascending and distinct.
        num_local: slots of the shard.
        sample_rate: share of the slots that should be active, in (0, 1].
        seed: of this step and rank.
    """
    budget = num_active(num_local, len(positives), sample_rate)
    if budget >= num_local:
        return ActiveSet([(0, num_local)] if num_local else [], positives[:0])
    num_wanted, num_negatives = budget - len(positives), num_local - len(positives)
    if num_wanted == 0:
        return ActiveSet([], positives)
    # uniform in range(num_negatives); the bias of the modulus is below 2^-40 for any number of classes that fits a machine
    first = derive(seed, "negatives") % num_negatives
    last = first + num_wanted - 1
    runs = []
    for low, high in ((first, min(last, num_negatives - 1)), (0, last - num_negatives)):
        if low <= high:
            runs.append((_slot_of_negative(low, positives), _slot_of_negative(high, positives) + 1))
    inside = np.zeros(len(positives), dtype=bool)
    for start, stop in runs:
        inside |= (positives >= start) & (positives < stop)
    return ActiveSet(sorted(runs), positives[~inside])


def _slot_of_negative(number: int, positives: np.ndarray) -> int:
    """Return the slot of the number-th slot (from 0) that is not positive."""
    before = positives - np.arange(len(positives))  # how many negatives lie before each positive
    return number + int(np.searchsorted(before, number, side="right"))
