"""Confidence intervals of error rates over pairs that share people, and how much the rates of groups differ.

Source of the intervals: Fogliato, Patil and Perona, "Confidence intervals for error rates in 1:1 matching tasks", arXiv
2306.01198: Wilson's interval, with as many trials as give the variance over people.
Sources of the measures: Howard et al., "Evaluating proposed fairness models for face recognition algorithms", arXiv 2203.05051
(Gini, GARBE); de Freitas Pereira and Marcel, arXiv 2011.02395 (FDR); Grother, NISTIR 8429 (max / min, max / geometric mean).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MIN_ERRORS, MIN_PEOPLE = 10, 10  # fewer show nothing; see `Rate.stated`
_NORMAL = 1.959964  # 97.5 % quantile


class Rate(NamedTuple):
    """Errors over pairs of a group, or of two groups."""

    errors: int
    pairs: int
    people: int  # who take part; of two groups, those of the smaller one
    expected: float  # errors, if the rate were that of all groups together
    low: float  # 95 % interval
    high: float

    @property
    def stated(self) -> bool:
        """Whether there are enough people and pairs for a number."""
        return self.pairs > 0 and self.people >= MIN_PEOPLE and max(self.errors, self.expected) >= MIN_ERRORS

    @property
    def value(self) -> float | None:
        """The rate; None if it is not stated."""
        return self.errors / self.pairs if self.stated else None


class Spread(NamedTuple):
    """What people contribute to a rate."""

    errors: np.ndarray  # (people,), in which each takes part
    pairs: np.ndarray  # (people,)
    people: int  # as of `Rate`
    weights: np.ndarray | float = 1.0  # (people,) 1 / the probability that a person is in this sample


def wilson(rate: float, trials: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a rate that was seen in so many independent trials."""
    square = _NORMAL**2 / trials
    middle = (rate + square / 2) / (1 + square)
    half = _NORMAL * np.sqrt(rate * (1 - rate) / trials + square / (4 * trials)) / (1 + square)
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


def make_rate(errors: int, pairs: int, pooled: float, spread: Spread, independent: int) -> Rate:
    """Return a rate with its interval.

    The variance of a ratio of sums over people is that of its derivative by the weight of each person (the infinitesimal
    jackknife). Pairs are never counted as more trials than they are. A sample with few errors shows no variance: then only
    pairs that share no person count as trials.

    Args:
        pooled: the rate of all groups together.
        independent: the most pairs of which no two share a person.
    """
    if not pairs:
        return Rate(0, 0, spread.people, 0.0, 0.0, 1.0)
    rate = errors / pairs
    derivatives = (spread.errors - rate * spread.pairs) / pairs
    variance = float((spread.weights * derivatives**2).sum()) * spread.people / max(1, spread.people - 1)
    seen = variance > 0 and (spread.errors.sum() >= MIN_ERRORS or np.all(spread.weights == 1))
    trials = min(pairs, rate * (1 - rate) / variance) if seen else independent
    return Rate(errors, pairs, spread.people, pooled * pairs, *wilson(rate, max(1.0, trials)))


def spread_of_list(people: np.ndarray, wrong: np.ndarray) -> Spread:
    """Return what people contribute to a rate, from pairs of people (P, 2) and whether each pair is wrong (P,)."""
    found, places = np.unique(people, return_inverse=True)
    places = places.reshape(-1, 2)
    two = places[:, 0] != places[:, 1]
    errors = np.bincount(places[:, 0], wrong, len(found)) + np.bincount(places[two, 1], wrong[two], len(found))
    pairs = np.bincount(places[:, 0], minlength=len(found)) + np.bincount(places[two, 1], minlength=len(found))
    return Spread(errors, pairs, len(found))


def measures(rates: Sequence[Rate]) -> dict[str, float | None]:
    """Return how much the stated rates of groups differ; None = less than two are stated, or one is zero and divides.

    gini: sum of |x_i - x_j| over all i and j, / (2 n^2 mean), * n / (n - 1): 0 = all equal, 1 = one group has all errors.
    """
    values = np.array([rate.value for rate in rates if rate.value is not None])
    count, mean = len(values), float(values.mean()) if len(values) else 0.0
    keys = ("max_over_min", "max_over_geometric_mean", "geometric_mean", "max_minus_min", "gini")
    if count < 2 or not mean:
        return dict.fromkeys(keys)
    least, most = float(values.min()), float(values.max())
    middle = float(np.exp(np.log(values).mean())) if least else None
    gini = float(np.abs(values[:, None] - values).sum()) / (2 * count**2 * mean) * count / (count - 1)
    ratios = (most / least, most / middle) if middle else (None, None)
    return dict(zip(keys, (*ratios, middle, most - least, gini), strict=True))


def differences(
    fmr: Sequence[Rate], fnmr: Sequence[Rate]
) -> tuple[dict[str, float | None], dict[str, float | None], dict[str, float | None]]:
    """Return the measures of each rate, and those of both: fdr and garbe, with a weight (alpha) of 1/2 for each rate."""
    found = measures(fmr), measures(fnmr)
    gaps, ginis = ([float(one[key] or 0) for one in found] for key in ("max_minus_min", "gini"))
    measured = all(one["gini"] is not None for one in found)
    return *found, {"fdr": 1 - sum(gaps) / 2 if measured else None, "garbe": sum(ginis) / 2 if measured else None}
