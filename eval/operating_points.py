"""Thresholds of a 1:1 system and their error rates: TAR at FAR, minimum DCF, exact thresholds, and bootstrap intervals.

All distances are squared, of unit embeddings, 0 to 4; a pair is accepted below the threshold. cosine = 1 - distance / 2.
Shapes: P = pairs, F = folds, B = bootstrap samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FAR_TARGETS = ("1e-1", "1e-2", "1e-3", "1e-4", "1e-5", "1e-6")


@dataclass(frozen=True)
class OperatingPoint:
    """A threshold with the largest FAR that is not above the target.

    Args:
        target: the requested FAR, as written in FAR_TARGETS.
        tar, far: the rates at the threshold; None if there are fewer than 1 / target impostor pairs ("not measurable").
        threshold: squared distance below which a pair is accepted; None if not measurable.
        num_accepted: impostor pairs accepted at the threshold; a rate that rests on a handful of them is a guess.
    """

    target: str
    tar: float | None
    far: float | None
    threshold: float | None
    num_accepted: int

    @property
    def cosine(self) -> float | None:
        """The threshold as a cosine similarity: a pair is accepted above it."""
        return None if self.threshold is None else 1.0 - self.threshold / 2.0

    def as_json(self) -> dict[str, str | float | int | None]:
        """Return the point as plain values; the keys say what the thresholds are."""
        return {
            "target": self.target,
            "tar": self.tar,
            "far": self.far,
            "cosine_threshold": self.cosine,
            "squared_distance_threshold": self.threshold,
            "num_accepted": self.num_accepted,
        }


def operating_points(
    genuine: np.ndarray, impostor: np.ndarray, far_targets: Sequence[str] = FAR_TARGETS
) -> list[OperatingPoint]:
    """Return a point for each target, from sorted distances of genuine and impostor pairs.

    The threshold is half-way between the last accepted pair and the first impostor pair that must not be accepted, so that new
    pairs near the border fall to either side.
    """
    points = []
    for target in far_targets:
        allowed = int(impostor.size * float(target) + 1e-9)  # 1e-9: 10 * 0.1 must not fall below 1
        if allowed == 0 or genuine.size == 0:
            points.append(OperatingPoint(target, None, None, None, 0))
            continue
        # the nearest impostor that must be rejected: below its distance, `allowed` or fewer impostors are accepted
        limit = float(impostor[allowed]) if allowed < impostor.size else np.inf
        num_impostor = int(np.searchsorted(impostor, limit, side="left"))
        num_genuine = int(np.searchsorted(genuine, limit, side="left"))
        below = max([-np.inf, *genuine[num_genuine - 1 : num_genuine], *impostor[num_impostor - 1 : num_impostor]])
        threshold = 4.0 if limit == np.inf else limit if below == -np.inf else (limit + float(below)) / 2
        points.append(OperatingPoint(target, num_genuine / genuine.size, num_impostor / impostor.size, threshold, num_impostor))
    return points


def minimum_dcf(genuine: np.ndarray, impostor: np.ndarray, p_target: float = 0.01) -> float | None:
    """Return the smallest detection cost, as a share of the cost of the better of "accept all" and "reject all".

    DCF = p FRR + (1 - p) FAR with equal costs of both errors (NIST SRE), over all thresholds. None without both kinds of pairs.

    Args:
        genuine, impostor: sorted distances.
        p_target: prior probability that a comparison is genuine.
    """
    if not genuine.size or not impostor.size:
        return None
    thresholds = np.append(np.unique(np.concatenate([genuine, impostor])), np.inf)
    far = np.searchsorted(impostor, thresholds, side="left") / impostor.size
    frr = 1.0 - np.searchsorted(genuine, thresholds, side="left") / genuine.size
    return float((p_target * frr + (1 - p_target) * far).min() / min(p_target, 1 - p_target))


def exact_fold_accuracy(distances: np.ndarray, same: np.ndarray, fold_of_pair: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (F,) accuracies of the held-out folds and their (F,) thresholds, with the best of all thresholds, not of a grid.

    The candidates are the mid-points between neighbouring distances of the other folds, and one below and one above all. The
    first of equally good ones is taken.

    Args:
        distances: (P,).
        same: (P,) bool.
        fold_of_pair: (P,) int, 0 to F - 1.
    """
    order = np.argsort(distances, kind="stable")
    ranked, is_same, fold = distances[order], same[order], fold_of_pair[order]
    accuracies, thresholds = [], []
    for number in range(int(fold_of_pair.max()) + 1):
        train = fold != number
        values = ranked[train]
        gain = np.where(is_same[train], 1, -1)  # change in the number of correct answers when one more pair is accepted
        correct = np.concatenate([[0], np.cumsum(gain)])
        cuts = np.concatenate([[True], values[1:] != values[:-1], [True]])  # equal distances fall to the same side
        best = int(np.flatnonzero(cuts)[np.argmax(correct[cuts])])
        ends = np.concatenate([[max(0.0, values[0] - 1e-3)], values, [values[-1] + 1e-3]])
        threshold = (ends[best] + ends[best + 1]) / 2
        accuracies.append(np.mean((ranked[~train] < threshold) == is_same[~train]))
        thresholds.append(threshold)
    return np.array(accuracies), np.array(thresholds)


def bootstrap_intervals(
    genuine: np.ndarray, impostor: np.ndarray, accuracy: float, far_targets: Sequence[str], samples: int = 1000, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Return 95 % intervals: "accuracy", and the TAR at each FAR that can be measured, by resampling pairs.

    Genuine and impostor pairs are resampled separately, and the threshold is chosen again in each sample. The resampled number
    of right answers is binomial. Pairs are assumed independent; pairs that share a person are not, so the true intervals are
    somewhat wider.

    Args:
        genuine, impostor: sorted distances.
        accuracy: mean over the folds.
    """
    rng = np.random.default_rng(seed)
    num_pairs = genuine.size + impostor.size
    found = {"accuracy": _interval(rng.binomial(num_pairs, accuracy, samples) / num_pairs)}
    wanted = [target for target in far_targets if int(impostor.size * float(target) + 1e-9) and genuine.size]
    rates: dict[str, list[float]] = {target: [] for target in wanted}
    for _ in range(samples if wanted else 0):
        # sorted samples with replacement, made from counts, so that no sorting is needed
        impostors = np.repeat(impostor, rng.multinomial(impostor.size, np.full(impostor.size, 1 / impostor.size)))
        genuines = np.repeat(genuine, rng.multinomial(genuine.size, np.full(genuine.size, 1 / genuine.size)))
        for point in operating_points(genuines, impostors, wanted):
            rates[point.target].append(point.tar or 0.0)
    return found | {target: _interval(np.array(values)) for target, values in rates.items()}


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
