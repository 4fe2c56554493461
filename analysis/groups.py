"""Error rates of groups of people at one threshold, their intervals, and how much they differ.

Terms: ISO/IEC 19795-10 calls differences of FMR or FNMR between groups differential performance.
Source of the intervals: Fogliato, Patil and Perona, "Confidence intervals for error rates in 1:1 matching tasks", arXiv
2306.01198: the variance of a rate over people, not over pairs, and Wilson's interval with as many trials as give that variance.
Source of the measures: Grother, NISTIR 8429 (max / min, max / geometric mean); Howard et al., arXiv 2203.05051 (GARBE).
Shapes: n = pictures, D = embedding size, G = groups, B = bins of cosines, P = pairs of a list.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from deploy.journal import Journal

from .all_pairs import NUM_BINS, count_pairs

MAX_GROUPS = 64
MIN_ERRORS, MIN_PEOPLE = 10, 10  # fewer show nothing; see `Rate.stated`
_SAMPLED = 2_000  # people of a group whose errors tell the variance; its own error is then some percent
_ROWS, _COLUMNS = 1024, 8192  # of a block of cosines
_COUNTS = 1 << 26  # of all bins of all pairs of groups: 0.5 GiB
_NORMAL = 1.959964  # 97.5 % quantile


class Rate(NamedTuple):
    """Errors of a kind in a group."""

    errors: int
    pairs: int
    people: int  # who take part
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
    """What some people of a group contribute to a rate: errors and pairs in which each takes part, (people,) each."""

    errors: np.ndarray
    pairs: np.ndarray
    people: int  # of the group, who have such pairs


class Outcome(NamedTuple):
    """The rates of groups at one threshold."""

    names: list[str]
    edges: np.ndarray  # (B + 1,) of bins
    genuine: np.ndarray  # (G, B) int64, pairs of one person in each bin
    impostor: np.ndarray  # (G, B) int64, pairs of two people of one group
    alike: list[tuple[float, int, int]]  # cosine and rows of the most similar pictures of two people
    threshold: float  # a cosine: a pair is accepted from it on
    fmr: list[Rate]  # of each group
    fnmr: list[Rate]
    pooled: tuple[float, float]  # FMR of all impostor pairs, FNMR of all genuine pairs of one group
    false_matches: np.ndarray  # (G, G) int64, of groups g <= h
    impostor_pairs: np.ndarray
    false_non_matches: np.ndarray  # (G, G) int64, of pairs of a person's pictures in groups g <= h
    genuine_pairs: np.ndarray


def wilson(rate: float, trials: float) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a rate that was seen in so many independent trials."""
    square = _NORMAL**2 / trials
    middle = (rate + square / 2) / (1 + square)
    half = _NORMAL * np.sqrt(rate * (1 - rate) / trials + square / (4 * trials)) / (1 + square)
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


def make_rate(errors: int, pairs: int, pooled: float, spread: Spread, independent: int) -> Rate:
    """Return a rate with its interval.

    The variance of a ratio of sums over people is that of its derivative by the weight of each person (the infinitesimal
    jackknife). Pairs are never counted as more trials than they are. Without an error there is no variance to see: then only
    pairs that share no person count as trials.

    Args:
        independent: the most pairs of which no two share a person.
    """
    if not pairs:
        return Rate(0, 0, spread.people, 0.0, 0.0, 1.0)
    rate = errors / pairs
    derivatives = (spread.errors - rate * spread.pairs) / pairs
    count, sampled = spread.people, max(1, len(derivatives))
    variance = float((derivatives**2).sum()) * count / sampled * count / max(1, count - 1)
    trials = min(pairs, rate * (1 - rate) / variance) if variance > 0 else independent
    return Rate(errors, pairs, count, pooled * pairs, *wilson(rate, max(1.0, trials)))


def place_of(edges: np.ndarray, impostor: np.ndarray, genuine: np.ndarray, far: float | None, threshold: float | None) -> int:
    """Return the number of the first bin that is accepted.

    Args:
        edges: (B + 1,) of bins, ascending.
        impostor, genuine: (B,) counts of all groups together.
        far: of all impostor pairs; the threshold is the lowest edge at which it is not exceeded.
        threshold: without `far`: a cosine; counts as the next edge from it on.

    Raises:
        ValueError: there are too few pairs.
    """
    if not impostor.any() or not genuine.any():
        raise ValueError("the groups have no pairs of one person, or none of two people; are the people of the table right?")
    if threshold is not None:
        return int(np.searchsorted(edges[:-1], threshold))
    total = int(impostor.sum())
    allowed = int(total * float(far or 0) + 1e-9)  # 1e-9: 10 * 0.1 must not fall below 1
    if not allowed:
        raise ValueError(f"--far {far:g} needs {int(np.ceil(1 / float(far or 1))):,} impostor pairs, there are {total:,}")
    above = np.append(impostor[::-1].cumsum()[::-1], 0)
    return int(np.argmax(above <= allowed))


def spreads_of_table(vectors: np.ndarray, labels: np.ndarray, rows: np.ndarray, edge: float) -> tuple[Spread, Spread]:
    """Return what people contribute to FNMR and FMR within a group, from blocks of cosines.

    Args:
        vectors: (n, D) float32 of length 1.
        labels: (n,) int64, the people.
        rows: of the group, by ascending label.
    """
    people, counts = np.unique(labels[rows], return_counts=True)
    chosen = people[np.unique(np.linspace(0, len(people) - 1, min(len(people), _SAMPLED)).round().astype(int))]
    mine = rows[np.isin(labels[rows], chosen)]
    errors = np.zeros((2, len(chosen)), dtype=np.int64)
    for begin in range(0, len(mine), _ROWS):
        left = mine[begin : begin + _ROWS]
        owners = np.searchsorted(chosen, labels[left])
        for start in range(0, len(rows), _COLUMNS):
            right = rows[start : start + _COLUMNS]
            accepted = vectors[left] @ vectors[right].T >= edge
            same = labels[left][:, None] == labels[right]
            found = accepted & ~same, ~accepted & same & (left[:, None] != right)
            for kind, wrong in enumerate(found):
                errors[kind] += np.bincount(owners, wrong.sum(axis=1), len(chosen)).astype(np.int64)
    sizes = counts[np.searchsorted(people, chosen)]
    genuine = Spread(errors[1] // 2, sizes * (sizes - 1) // 2, int((counts > 1).sum()))
    return genuine, Spread(errors[0], sizes * (len(rows) - sizes), len(people) if len(people) > 1 else 0)


def genuine_across(vectors: np.ndarray, labels: np.ndarray, groups: np.ndarray, num_groups: int, edge: float) -> np.ndarray:
    """Return (2, G, G) int64: rejected and all pairs of a person's pictures that lie in two groups g < h."""
    found = np.zeros((2, num_groups, num_groups), dtype=np.int64)
    order = np.argsort(labels, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(labels[order])) + 1, len(order))
    for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        rows = order[begin:end]
        if (groups[rows] == groups[rows[0]]).all():
            continue
        member = np.eye(num_groups)[groups[rows]]
        for start in range(0, len(rows), _ROWS):
            part = slice(start, start + _ROWS)
            rejected = vectors[rows[part]] @ vectors[rows].T < edge
            found[0] += (member[part].T @ rejected @ member).astype(np.int64)
            found[1] += np.outer(member[part].sum(axis=0), member.sum(axis=0)).astype(np.int64)
    return np.triu(found, 1)


def measures(rates: Sequence[Rate]) -> dict[str, float | None]:
    """Return how much the stated rates of groups differ; None = less than two are stated, or one is zero and divides.

    gini: sum of |x_i - x_j| over all i and j, / (2 n^2 mean), * n / (n - 1): 0 = all equal, 1 = one group has all errors.
    """
    values = np.array([rate.value for rate in rates if rate.value is not None])
    count, mean = len(values), float(values.mean()) if len(values) else 0.0
    if count < 2 or not mean:
        return dict.fromkeys(("max_over_min", "max_over_geometric_mean", "geometric_mean", "gini"))
    middle = float(np.exp(np.log(values).mean())) if values.min() > 0 else None
    return {
        "max_over_min": float(values.max() / values.min()) if middle else None,
        "max_over_geometric_mean": float(values.max() / middle) if middle else None,
        "geometric_mean": middle,
        "gini": float(np.abs(values[:, None] - values).sum() / (2 * count**2 * mean) * count / (count - 1)),
    }


def garbe(fmr: dict[str, Any], fnmr: dict[str, Any]) -> float | None:
    """Return the mean of the two Gini coefficients (GARBE with alpha = 0.5); None if one cannot be measured."""
    return None if fmr["gini"] is None or fnmr["gini"] is None else (fmr["gini"] + fnmr["gini"]) / 2


class PairList(NamedTuple):
    """Pairs of pictures that a list names."""

    first: np.ndarray  # (P,) int64, rows of the table
    second: np.ndarray
    same: np.ndarray  # (P,) bool
    groups: np.ndarray  # (P, 2) int64, of the two pictures
    people: np.ndarray  # (P, 2) int64
    names: list[str]  # of the groups
    missing: int  # pairs that have a picture without a row


def count_list(vectors: np.ndarray, pairs: PairList, num_bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the bins of the pairs (P,), the edges of bins, and counts as of `count_pairs`: genuine and impostor."""
    bins = np.zeros(len(pairs.first), dtype=np.int64)
    for begin in range(0, len(bins), _COLUMNS):
        part = slice(begin, begin + _COLUMNS)
        cosines = (vectors[pairs.first[part]].astype(np.float64) * vectors[pairs.second[part]]).sum(axis=1)
        bins[part] = np.clip((cosines + 1) * num_bins / 2, 0, num_bins - 1)
    low, high = pairs.groups.min(axis=1), pairs.groups.max(axis=1)
    genuine = np.zeros((len(pairs.names), num_bins), dtype=np.int64)
    impostor = np.zeros((len(pairs.names), len(pairs.names), num_bins), dtype=np.int64)
    own = pairs.same & (low == high)
    np.add.at(genuine, (low[own], bins[own]), 1)
    np.add.at(impostor, (low[~pairs.same], high[~pairs.same], bins[~pairs.same]), 1)
    return bins, np.linspace(-1.0, 1.0, num_bins + 1), genuine, impostor


def spread_of_list(people: np.ndarray, wrong: np.ndarray) -> Spread:
    """Return what people contribute to a rate, from pairs of people (P, 2) and whether each pair is wrong (P,)."""
    found, places = np.unique(people, return_inverse=True)
    places = places.reshape(-1, 2)
    two = places[:, 0] != places[:, 1]
    errors = np.bincount(places[:, 0], wrong, len(found)) + np.bincount(places[two, 1], wrong[two], len(found))
    pairs = np.bincount(places[:, 0], minlength=len(found)) + np.bincount(places[two, 1], minlength=len(found))
    return Spread(errors, pairs, len(found))


def measure_table(
    vectors: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray,
    names: list[str],
    far: float | None,
    threshold: float | None,
    worst: int,
    journal: Journal | None = None,
    advance: Callable[[int], object] = int,
) -> Outcome:
    """Return the rates of groups over all pairs of a table.

    FMR of a group: pairs of two people, both pictures of the group. FNMR of a group: pairs of one person, both pictures of the
    group; where a person is in two groups, pairs across them count for neither, and are in `genuine_pairs`.

    Args:
        vectors: (n, D) float32 of length 1.
        labels: (n,) int64, the people.
        groups: (n,) int64 from 0, all of `names`.
        worst: most similar pictures of two people to return.
        journal, advance: as of `count_pairs`.
    """
    num_bins = NUM_BINS
    while num_bins * len(names) ** 2 > _COUNTS:
        num_bins //= 2
    counts = count_pairs(vectors, labels, groups, num_bins, worst, journal, advance)
    place = place_of(counts.edges, counts.impostor.sum(axis=(0, 1)), counts.genuine.sum(axis=0), far, threshold)
    order, edge = np.lexsort((labels, groups)), float(counts.edges[place])
    ends = np.searchsorted(groups[order], np.arange(len(names) + 1))
    spreads = [spreads_of_table(vectors, labels, order[ends[g] : ends[g + 1]], edge) for g in range(len(names))]
    across = genuine_across(vectors, labels, groups, len(names), edge)
    alike = list(zip(*(part.tolist() for part in counts.lookalikes), strict=True))
    return _outcome(names, counts.edges, counts.genuine, counts.impostor, place, spreads, across, alike)


def measure_list(vectors: np.ndarray, pairs: PairList, far: float | None, threshold: float | None, worst: int) -> Outcome:
    """Return the rates of groups over the pairs of a list, as `measure_table` does."""
    bins, edges, genuine, impostor = count_list(vectors, pairs, NUM_BINS // 4)
    place = place_of(edges, impostor.sum(axis=(0, 1)), genuine.sum(axis=0), far, threshold)
    across = np.zeros((2, len(pairs.names), len(pairs.names)), dtype=np.int64)
    low, high = pairs.groups.min(axis=1), pairs.groups.max(axis=1)
    for layer, which in enumerate((pairs.same & (bins < place), pairs.same)):
        np.add.at(across[layer], (low[which], high[which]), 1)
    spreads = []
    for group in range(len(pairs.names)):
        own = (low == group) & (high == group)
        spreads.append(
            (
                spread_of_list(pairs.people[own & pairs.same], bins[own & pairs.same] < place),
                spread_of_list(pairs.people[own & ~pairs.same], bins[own & ~pairs.same] >= place),
            )
        )
    others = np.flatnonzero(~pairs.same)
    top = others[np.argsort(-bins[others], kind="stable")[:worst]]
    alike = [(float(edges[bins[i]]), int(pairs.first[i]), int(pairs.second[i])) for i in top]
    return _outcome(pairs.names, edges, genuine, impostor, place, spreads, np.triu(across, 1), alike)


def _outcome(
    names: list[str],
    edges: np.ndarray,
    genuine: np.ndarray,
    impostor: np.ndarray,
    place: int,
    spreads: Sequence[tuple[Spread, Spread]],
    across: np.ndarray,
    alike: list[tuple[float, int, int]],
) -> Outcome:
    false_matches, impostor_pairs = impostor[..., place:].sum(axis=-1), impostor.sum(axis=-1)
    rejected, total = genuine[:, :place].sum(axis=-1), genuine.sum(axis=-1)
    pooled = (float(false_matches.sum() / impostor_pairs.sum()), float(rejected.sum() / total.sum()))
    fmr, fnmr = [], []
    for group, (own, other) in enumerate(spreads):
        pairs = int(impostor_pairs[group, group])
        fmr.append(make_rate(int(false_matches[group, group]), pairs, pooled[0], other, other.people // 2))
        fnmr.append(make_rate(int(rejected[group]), int(total[group]), pooled[1], own, own.people))
    within = np.stack([np.diag(rejected), np.diag(total)])
    inside = np.ascontiguousarray(np.einsum("ggb->gb", impostor))
    return Outcome(
        names, edges, genuine, inside, alike, float(edges[place]), fmr, fnmr, pooled, false_matches, impostor_pairs,
        *(across + within),
    )  # fmt: skip
