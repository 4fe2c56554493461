"""Wrong labels of a training set, found in the embeddings of its images.

Each identity gets the centre of its dominant cluster, as Sub-center ArcFace does after training (Deng et al., ECCV 2020: the
sub-centre of most images is dominant, and images far from it are dropped). Here the cluster is found in the embeddings, so that
any network will do, and its limits come from the distributions of cosines in the set itself (mixture.py).
Shapes: n = images, D = embedding size, C = identities, m = images of an identity.
"""

from collections.abc import Iterator
from math import comb, exp, isqrt, log
from typing import NamedTuple

import numpy as np

from data.decisions import Decision, join
from eval.embedding_table import Faces
from utils.cli import progress

from .mixture import BINS, Border, bins, find_border, histogram

FEWEST = 20  # identities with several images, without which there are no distributions
SMALLEST = 3  # images of a second person under a label; two may be alike by chance
_SURE = 0.95  # of a merge, a split or an overlap
_MOST = 2048  # images of one identity that are compared with one another
_SAMPLE = 4096  # images whose cosines with others make a distribution
_PAIRS = 1 << 25  # cosines of a distribution
_CLEAR = 1e-4  # probability of an impostor
_CELLS, _LEAST = 1 << 23, 32  # cosines at once, 32 MB; but so many rows: with fewer, a product waits for the memory
_ROUNDS = 3  # of centres from members, and members from centres


class Centres(NamedTuple):
    """The dominant cluster of each identity."""

    unit: np.ndarray  # (C, D) float32; zeros for an identity without two images that agree
    size: np.ndarray  # (C,) int64, images in the cluster
    own: np.ndarray  # (n,) float32, cosine of each image and the centre of its label without this image; -1 without a centre
    border: Border  # between images of the person and others


class Found(NamedTuple):
    """The findings; positions of images are those of the rows of the vectors, identities are labels."""

    labels: np.ndarray  # (n,) int64, after the merges; the number of a person is the lowest of the labels
    merges: list[tuple[int, int, float, float]]  # (identity, other identity, cosine of the centres, probability)
    centres: Centres  # after the merges
    lead: np.ndarray  # (n,) half of what the own centre is nearer than the nearest other, as cosines; 1 for clear images
    border: Border  # of the leads
    impostors: np.ndarray  # (BINS,) leads of images under labels of others
    wrong: np.ndarray  # (w,) int64, images that are not of their identity
    other: np.ndarray  # (w,) int64, the identity with the nearest centre
    other_cosine: np.ndarray  # (w,)
    other_sure: np.ndarray  # (w,) probability that the image is of this identity
    splits: list[tuple[int, np.ndarray, float]]  # (identity, images (m,) of another person, probability)
    pair_border: Border


def clean(vectors: np.ndarray, labels: np.ndarray, far: float | None = None) -> Found:
    """Find wrong images, identities that are one person, and identities that are two.

    Args:
        vectors: (n, D) float32 of length 1.
        labels: (n,) int64, 0 to C - 1.
        far: share of the images of other people that a centre accepts; None = where the errors are fewest.

    Raises:
        ValueError: fewer than FEWEST identities have several images, or the images of fewer than half as many agree.
    """
    count = int(labels.max()) + 1
    keys = row_keys(vectors)
    members = _by_label(np.arange(len(labels)), keys, labels)
    several = sum(len(rows) > 1 for rows in members)
    if several < FEWEST:
        raise ValueError(f"distributions need at least {FEWEST} identities with several images, got {several}")
    sample = np.argsort(keys, kind="stable")[:_SAMPLE]
    pair_border, pair_far = _pairs(vectors, labels, members, sample)
    core = np.zeros(len(labels), dtype=bool)
    for rows in progress(members, None, "finding clusters", "identity"):
        core[_dominant(vectors, rows, pair_border.cosine)] = True
    centres = _refine(vectors, labels, core, count, sample, far, _ROUNDS)
    there = np.flatnonzero(centres.size)
    merges = [(int(there[a]), int(there[b]), cosine, sure) for a, b, cosine, sure in near_pairs(centres.unit[there])]
    if merges:
        labels = join(count, ((a, b) for a, b, *_ in merges))[labels]
        centres = _refine(vectors, labels, centres.own > centres.border.cosine, count, sample, far, 1)
    # far above the border the nearest other centre changes nothing, and finding it for all images would take hours
    unclear = np.flatnonzero(centres.border.sure(centres.own) > _CLEAR)
    clear = np.count_nonzero(centres.border.impostor > _CLEAR) * 2 / BINS - 1
    near_cosine, near_identity, near_lead = _nearest(vectors, labels, unclear, centres)
    lead = np.ones(len(labels))
    lead[unclear] = (centres.own[unclear] - near_cosine) / 2
    right = sample[centres.own[sample] > centres.border.cosine]
    others, alone = _impostor_leads(vectors, labels, right, centres, clear)
    border = find_border(histogram(lead), others, far)
    # the leads of clear images are not known: no border lies between the last that is and theirs
    border = border._replace(cosine=min(border.cosine, float(lead[unclear].max(initial=0))))
    wrong = unclear[lead[unclear] <= border.cosine]
    wrong = wrong[(centres.size > 0)[labels[wrong]] | (np.bincount(labels)[labels[wrong]] > 1)]
    place = np.searchsorted(unclear, wrong)
    stay = find_border(histogram(near_lead[place]), alone).sure(near_lead[place])
    other = near_identity[place], near_cosine[place]
    found = Found(labels, merges, centres, lead, border, others, wrong, *other, 1 - stay, [], pair_border)
    return found._replace(splits=_splits(vectors, keys, found, pair_far))


def row_keys(vectors: np.ndarray) -> np.ndarray:
    """Return hashes of rows, (n,) uint64. Where some rows are taken, they are the first by these, in any order."""
    keys = np.empty(len(vectors), dtype=np.uint64)
    odd = np.random.default_rng(0).integers(0, 1 << 63, vectors.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    for rows in _blocks(np.arange(len(vectors)), vectors.shape[1], "ordering vectors"):
        keys[rows] = (np.ascontiguousarray(vectors[rows]).view(np.uint32) * odd).sum(axis=1) >> np.uint64(16)
    return keys


def _by_label(rows: np.ndarray, keys: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """Return those of the rows (r,) that have each label, in the order of the labels, and then of the keys."""
    order = rows[np.lexsort((keys[rows], labels[rows]))]
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if len(order) else []


def _blocks(rows: np.ndarray, width: int, what: str = "comparing") -> Iterator[np.ndarray]:
    """Yield the rows in parts, so that a part times `width` has at most _CELLS numbers, or _LEAST rows; a bar says `what`."""
    step = max(_LEAST, _CELLS // width)
    for begin in progress(range(0, len(rows), step), None, what, "block", delay=5):
        yield rows[begin : begin + step]


def _pairs(vectors: np.ndarray, labels: np.ndarray, members: list[np.ndarray], sample: np.ndarray) -> tuple[Border, float]:
    """Return the border of two images of one person, and the share of the pairs of different labels above it."""
    same, others = np.zeros(BINS), np.zeros(BINS)
    for rows in progress(members, None, "comparing images", "identity"):
        if len(rows) > 1:
            x = vectors[rows[:_MOST]]
            same += histogram((x @ x.T)[np.triu_indices(len(x), 1)]) / len(x)  # each image counts once, not each pair
    x = vectors[sample]
    for part in _blocks(np.arange(len(x)), len(x)):
        others += histogram((x[part] @ x.T)[labels[sample[part], None] != labels[sample]])
    border = find_border(same, others)
    return border, float(others[int(bins(np.array(border.cosine))) :].sum() / others.sum())


def _dominant(vectors: np.ndarray, rows: np.ndarray, cosine: float) -> np.ndarray:
    """Return those of the rows that are near the one with the most neighbours; of equal ones, that with the largest sum."""
    x = vectors[rows[:_MOST]]
    likeness = x @ x.T
    near = likeness > cosine
    np.fill_diagonal(near, True)
    return rows[:_MOST][near[np.lexsort((likeness.sum(axis=1), near.sum(axis=1)))[-1]]]


def _refine(
    vectors: np.ndarray, labels: np.ndarray, core: np.ndarray, count: int, sample: np.ndarray, far: float | None, rounds: int
) -> Centres:
    """Return the centres of the images (n,) bool in `core`; between two rounds it becomes the images above the border."""
    for number in range(rounds):
        size = np.bincount(labels[core], minlength=count)
        size[size < 2] = 0
        core = core & (size > 0)[labels]
        sums = np.zeros((count, vectors.shape[1]), dtype=np.float32)
        order = np.flatnonzero(core)
        for rows in _blocks(order[np.argsort(labels[order], kind="stable")], vectors.shape[1], "averaging"):
            people, begins = np.unique(labels[rows], return_index=True)
            sums[people] += np.add.reduceat(vectors[rows], begins, axis=0)
        own = np.full(len(labels), -1, dtype=np.float32)
        judged = np.flatnonzero((size > 0)[labels])
        for rows in _blocks(judged, vectors.shape[1]):
            x = vectors[rows]
            rest = sums[labels[rows]] - np.where(core[rows, None], x, 0)
            own[rows] = (x * rest).sum(axis=1) / np.maximum(np.linalg.norm(rest, axis=1), 1e-6)
        unit = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-6)
        there = np.flatnonzero(size)
        if len(there) < FEWEST // 2:
            raise ValueError("images of one label are no more alike than others: wrong labels, or an unfit network")
        impostors = np.zeros(BINS, dtype=np.int64)
        few, known = sample[: max(256, _PAIRS // max(1, len(there)))], unit[there].T
        for rows in _blocks(few, len(there)):
            impostors += histogram((vectors[rows] @ known)[labels[rows, None] != there])
        border = find_border(histogram(own[judged]), impostors, far)
        if number < rounds - 1:
            core = own > border.cosine
    return Centres(unit, size, own, border)


def find_overlap(found: Found, test: Faces, name: str) -> list[Decision]:
    """Return decisions to drop the identities whose centre is that of a person of a table of test pictures, the surest first.

    Raises:
        ValueError: a picture has no person.
    """
    labels, people = test.labels()
    sums = np.zeros((len(people), test.vectors.shape[1]), dtype=np.float32)
    np.add.at(sums, labels, test.vectors)
    there = np.flatnonzero(found.centres.size)
    pairs = near_pairs(sums / np.linalg.norm(sums, axis=1, keepdims=True), found.centres.unit[there])
    whys = [f"{people[a]} of {name}, cosine {cosine:.3f}" for a, _, cosine, _ in pairs]
    return [Decision("drop", None, int(there[b]), "", sure, why) for (_, b, _, sure), why in zip(pairs, whys, strict=True)]


def near_pairs(one: np.ndarray, other: np.ndarray | None = None) -> list[tuple[int, int, float, float]]:
    """Return (row, row, cosine, probability) of the pairs of centres that are one person, the nearest first.

    Nearly all pairs are of two people. The tail of -log(1 - cosine^2) is continued as an exponential, as it is for random
    directions.

    Args:
        one, other: (a, D) and (b, D) float32 of length 1; None pairs `one` with itself, each pair once.
    """
    right = one if other is None else other
    total = len(one) * (len(one) - 1) / 2 if other is None else len(one) * len(other)
    if total < 10:
        return []
    counts = np.zeros(BINS, dtype=np.int64)
    sampled = np.argsort(row_keys(one), kind="stable")[: min(_SAMPLE, max(256, _PAIRS // len(right)))]
    for rows in _blocks(sampled, len(right)):
        cosines = one[rows] @ right.T
        counts += histogram(cosines if other is not None else cosines[rows[:, None] != np.arange(len(right))])
    most = len(one) / 2 if other is None else min(len(one), len(right))  # that may be one person; less than half of the tail
    share = min(0.1, max(1e-3, 20 / total, 2 * most / total))
    above = np.cumsum(counts[::-1])[::-1] / counts.sum()
    far, near = (_bent(int(np.flatnonzero(above >= part)[-1]) * 2 / BINS - 1) for part in (2 * share, share))
    rate = _tail_rate(far, near, share * min(total, counts.sum()))
    # more do not pass than may be there
    floor = np.sqrt(1 - np.exp(-max(0.0, near + np.log(total * share / (2 * most)) / rate)))
    found: list[tuple[float, int, int]] = []
    step = isqrt(_CELLS)
    tiles = [(i, j) for i in range(0, len(one), step) for j in range(i if other is None else 0, len(right), step)]
    for i, j in progress(tiles, None, "comparing centres", "block"):
        cosines = one[i : i + step] @ right[j : j + step].T
        if other is None and i == j:
            cosines[np.tri(len(cosines), dtype=bool)] = -2
        a, b = np.divmod(np.flatnonzero(cosines > floor), cosines.shape[1])  # np.nonzero takes ten times as long
        found += zip(cosines[a, b].tolist(), (a + i).tolist(), (b + j).tolist(), strict=True)
    found.sort(reverse=True)
    beyond = _beyond_chance([_bent(cosine) for cosine, _, _ in found], share * total, near, rate)
    if len(beyond) > 2 * most:  # nobody is told from others
        return []
    return [(a, b, cosine, sure) for (cosine, a, b), sure in zip(found, beyond, strict=False)]


def _bent(cosine: float) -> float:
    return float(-np.log1p(-(min(max(cosine, 0.0), 1 - 1e-7) ** 2)))


def _tail_rate(far: float, near: float, count: float) -> float:
    """Return the rate of an exponential tail, as low as it is with 95 %: 2 `count` values exceed far, half of them near.

    The standard error of the rate, relative to it, is 1 / root of `count`.
    """
    return float(np.log(2) / max(near - far, 2 / BINS) * max(0.1, 1 - 1.645 / np.sqrt(count)))


def _beyond_chance(values: list[float], expected: float, near: float, rate: float) -> list[float]:
    """Return the probabilities of those of the values, the largest first, that chance does not explain.

    By chance `expected` values exceed `near`, with an exponential tail. By Benjamini and Hochberg's rule (1995), the k largest
    are taken, for the largest k for which at most 1 - _SURE of them are expected.
    """
    chance = [expected * float(np.exp(-rate * (value - near))) / k for k, value in enumerate(values, 1)]
    least = np.minimum.accumulate(chance[::-1])[::-1]  # of all lists with the value
    return [1 - wrong for wrong in least.tolist() if wrong <= 1 - _SURE]


def _nearest(vectors: np.ndarray, labels: np.ndarray, rows: np.ndarray, centres: Centres) -> list[np.ndarray]:
    """Return the cosines with the nearest centres of other identities than the labels of the rows (r,), and these identities.

    And half of the distance to the cosine of the second nearest.
    """
    parts = [tuple(np.zeros(0, kind) for kind in (np.float32, np.int64, np.float32))]
    for some, there, likeness in _likeness(vectors, labels, rows, centres):
        line, best = np.arange(len(some)), likeness.argmax(axis=1)
        cosine = likeness[line, best]
        likeness[line, best] = -1
        parts.append((cosine, there[best], (cosine - likeness.max(axis=1)) / 2))
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def _likeness(
    vectors: np.ndarray, labels: np.ndarray, rows: np.ndarray, centres: Centres
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield some of the rows (r,), the identities with a centre (c,) and the cosines (r, c); -1 with the own identity."""
    there = np.flatnonzero(centres.size)
    unit = centres.unit[there]
    for some in _blocks(rows, max(len(there), vectors.shape[1]), "searching centres"):
        likeness = vectors[some] @ unit.T
        likeness[labels[some, None] == there] = -1
        yield some, there, likeness


def _impostor_leads(
    vectors: np.ndarray, labels: np.ndarray, rows: np.ndarray, centres: Centres, clear: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return histograms of what the right images (r,) would be if their own identity were not there.

    The first: their leads under each other label. The second: the lead of the nearest of these.
    """
    under, first = np.zeros(BINS, dtype=np.int64), np.zeros(BINS, dtype=np.int64)
    for some, _, likeness in _likeness(vectors, labels, rows[: max(256, _PAIRS // len(centres.size))], centres):
        other = likeness > -1
        line, best = np.arange(len(some)), likeness.argmax(axis=1)
        cosine = likeness[line, best]
        likeness[line, best] = -1
        second = likeness.max(axis=1)
        likeness[line, best] = cosine
        lead = np.where(likeness > clear, 1, (likeness - cosine[:, None]) / 2)
        lead[line, best] = np.where(cosine > clear, 1, (cosine - second) / 2)
        under += histogram(lead[other])
        first += histogram((cosine - second) / 2)
    return under, first


def _halves(vectors: np.ndarray, keys: np.ndarray, found: Found) -> list[tuple[int, np.ndarray, float]]:
    """Return the smaller halves of identities whose centre is that of two people: images (m,) that are not wrong.

    The images are parted by two means. Those of one person agree across the halves nearly as within them: minus the logarithm
    of the ratio of the mean cosines has an exponential tail, and what is beyond it has two people, if the cosine of the halves'
    centres is also below two thirds of the usual one, which two ages of one person are not. Halves below a third of the images
    are left out, since images of a second person who has fewer are far from the centre; and identities that were merged, whose
    halves may be their labels.
    """
    merged = {identity for pair in found.merges for identity in pair[:2]}
    right = np.ones(len(keys), dtype=bool)
    right[found.wrong] = False
    right &= (found.centres.size > 0)[found.labels]
    parted: list[tuple[float, int, np.ndarray, float]] = []
    for rows in progress(_by_label(np.flatnonzero(right), keys, found.labels), None, "parting", "identity"):
        if int(found.labels[rows[0]]) in merged:
            continue
        x = vectors[rows[:_MOST]]
        likeness = x @ x.T
        ends = np.unravel_index(likeness.argmin(), likeness.shape)
        second = likeness[ends[0]] < likeness[ends[1]]
        for _ in range(_ROUNDS):
            one, other = (half / max(1e-6, np.linalg.norm(half)) for half in (x[~second].sum(axis=0), x[second].sum(axis=0)))
            second = x @ one < x @ other
        whole = vectors[rows] @ (other - one) > 0
        smaller = whole if 2 * np.count_nonzero(whole) <= len(rows) else ~whole
        if min(np.count_nonzero(second), np.count_nonzero(~second)) < max(SMALLEST, len(x) / 3):
            continue
        within = 1.0
        for side in (second, ~second):
            size = np.count_nonzero(side)
            within *= max(1e-3, (likeness[np.ix_(side, side)].sum() - size) / (size * (size - 1)))
        ratio = likeness[np.ix_(second, ~second)].mean() / within**0.5
        parted.append((-log(max(1e-3, ratio)), int(found.labels[rows[0]]), rows[smaller], float(one @ other)))
    if len(parted) < FEWEST:
        return []
    parted.sort(key=lambda one: -one[0])
    values, count = [value for value, *_ in parted], 0.25 * len(parted)
    far, near = np.quantile(values, (0.5, 0.75)).tolist()
    beyond = _beyond_chance(values, count, near, _tail_rate(far, near, count))
    usual = float(np.median([cosine for *_, cosine in parted]))
    pairs = zip(parted, beyond, strict=False)
    return [(identity, rows, sure) for (_, identity, rows, cosine), sure in pairs if cosine < 2 / 3 * usual]


def _splits(vectors: np.ndarray, keys: np.ndarray, found: Found, pair_far: float) -> list[tuple[int, np.ndarray, float]]:
    """Return the halves of identities that are two people, with wrong images near to them, and groups of wrong images.

    A group is one other person without an identity of its own. By chance, one of k images has s - 1 or more neighbours with a
    probability of at most k (k - 1 over s - 1) FAR^(s - 1). All identities are tested, so this is multiplied by their number;
    as logarithms, since the binomial may exceed any float.
    """
    splits, rest = [], found.wrong[found.other_sure < 0.5]
    wrong = {int(found.labels[rows[0]]): rows for rows in _by_label(rest, keys, found.labels)}
    for identity, half, sure in _halves(vectors, keys, found):
        centre = vectors[half].sum(axis=0)
        own = wrong.get(identity, half[:0])
        near = vectors[own] @ centre > found.centres.border.cosine * np.linalg.norm(centre)
        splits.append((identity, np.sort(np.concatenate([half, own[near]])), sure))
        wrong[identity] = own[~near]
    groups = [rows for rows in wrong.values() if len(rows)]
    for rows in groups:
        while len(rows) >= SMALLEST:
            group, k = _dominant(vectors, rows, found.pair_border.cosine), len(rows)
            total = vectors[group].sum(axis=0)
            rest_of = total - vectors[group]
            own = (vectors[group] * rest_of).sum(axis=1) / np.maximum(np.linalg.norm(rest_of, axis=1), 1e-6)
            group = group[own > found.centres.border.cosine]
            s = len(group)
            chance = log(len(groups) * k * comb(k - 1, s - 1)) + (s - 1) * log(max(pair_far, 1e-12)) if s >= SMALLEST else 0.0
            if chance > log(1 - _SURE):
                break
            splits.append((int(found.labels[rows[0]]), np.sort(group), 1 - exp(chance)))
            rows = rows[~np.isin(rows, group)]
    return splits
