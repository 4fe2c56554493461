"""The numbers of a 1:1 verification set: accuracy by the published protocol, TAR at FAR, AUC, EER, thresholds and intervals.

Source: the protocol of LFW (Huang et al., 2007, "unrestricted") as face recognition papers use it. The embedding is
l2norm(plain + mirrored), the distance is squared Euclidean, and a pair is predicted "same" below a threshold of
0, 0.01, ..., 3.99. Each of 10 contiguous folds is scored at the threshold that is best on the other nine, the first of
equals. A prediction is a strict comparison, distance < threshold, everywhere in this module.
Source of the AUC's interval: DeLong, DeLong and Clarke-Pearson, "Comparing the areas under two or more correlated receiver
operating characteristic curves", Biometrics 1988.
Shapes: N = images, D = embedding size, P = pairs, F = folds, T = thresholds, B = bootstrap samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .protocol import Figures, Result

FAR_TARGETS = ("1e-1", "1e-2", "1e-3", "1e-4", "1e-5", "1e-6")


class OperatingPoint(NamedTuple):
    """A threshold with the largest FAR that is not above the target; None if there are fewer than 1 / target impostor pairs."""

    target: str  # the requested FAR, as written in FAR_TARGETS
    tar: float | None  # at the threshold
    far: float | None
    threshold: float | None  # squared distance below which a pair is accepted
    num_accepted: int  # impostor pairs accepted at the threshold; a rate that rests on a handful of them is a guess

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


def operating_points(genuine: np.ndarray, impostor: np.ndarray, targets: Sequence[str] = FAR_TARGETS) -> list[OperatingPoint]:
    """Return a point for each target, from sorted distances of genuine and impostor pairs.

    The threshold is half-way between the last accepted pair and the first impostor pair that must not be accepted, so that new
    pairs near the border fall to either side.
    """
    points = []
    for target in targets:
        allowed = _allowed(impostor, target)
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


def _allowed(impostor: np.ndarray, target: str) -> int:
    """Return how many impostor pairs may be accepted at a FAR."""
    return int(impostor.size * float(target) + 1e-9)  # 1e-9: 10 * 0.1 must not fall below 1


def minimum_dcf(genuine: np.ndarray, impostor: np.ndarray, p_target: float = 0.01) -> float | None:
    """Return the smallest detection cost, as a share of the cost of the better of "accept all" and "reject all".

    DCF = p FRR + (1 - p) FAR with equal costs of both errors (NIST SRE), over all thresholds, from sorted distances; p is the
    prior probability that a comparison is genuine. None without both kinds of pairs.
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
    first of equally good ones is taken. Pairs have distances (P,), same (P,) bool, and folds (P,) int, 0 to F - 1.
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
    genuine: np.ndarray, impostor: np.ndarray, accuracy: float, targets: Sequence[str], samples: int = 1000, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Return 95 % intervals: "accuracy", the "eer", and the TAR at each FAR that can be measured, by resampling pairs.

    Genuine and impostor pairs, sorted distances, are resampled separately, and the threshold is chosen again in each sample.
    The resampled number of right answers is binomial, by the mean accuracy over the folds. Pairs are assumed independent;
    pairs that share a person are not, so the true intervals are somewhat wider. No sample is drawn pair by pair: the place of
    its k-th smallest distance has a beta distribution, and how many pairs lie between two distances a binomial one.
    """
    rng, num_pairs = np.random.default_rng(seed), genuine.size + impostor.size
    found = {"accuracy": _interval(rng.binomial(num_pairs, accuracy, samples) / num_pairs)}
    if not genuine.size or not impostor.size:
        return found
    for target in targets:
        if allowed := _allowed(impostor, target):
            places = (impostor.size * rng.beta(allowed + 1, impostor.size - allowed, samples)).astype(int)
            accepted = np.searchsorted(genuine, impostor[np.minimum(places, impostor.size - 1)])
            found[target] = _interval(rng.binomial(genuine.size, accepted / genuine.size) / genuine.size)
    found["eer"] = _interval(_resampled_eer(genuine, impostor, samples, rng))
    return found


def _resampled_eer(genuine: np.ndarray, impostor: np.ndarray, samples: int, rng: np.random.Generator) -> np.ndarray:
    """Return the EER (B,) of samples, where FAR reaches FRR: found by bisection. Rows are of genuine and of impostor pairs."""
    sizes = np.array([[genuine.size], [impostor.size]])
    values = np.unique(np.concatenate([genuine, impostor]))
    below = np.stack([np.append(np.searchsorted(kind, values), kind.size) for kind in (genuine, impostor)])
    low, high = np.zeros(samples, dtype=int), np.full(samples, values.size)
    at_low, at_high = np.zeros((2, samples), dtype=int), np.repeat(sizes, samples, axis=1)
    while np.any(high - low > 1):
        middle = (low + high) // 2
        share = (below[:, middle] - below[:, low]) / np.maximum(below[:, high] - below[:, low], 1)
        here = at_low + rng.binomial(at_high - at_low, share)
        reached = here[1] * genuine.size >= (genuine.size - here[0]) * impostor.size
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
        at_low, at_high = np.where(reached, at_low, here), np.where(reached, here, at_high)
    (tar_low, far_low), (tar_high, far_high) = at_low / sizes, at_high / sizes
    gap_low, gap_high = far_low + tar_low - 1, far_high + tar_high - 1
    return far_high - gap_high / (gap_high - gap_low) * (far_high - far_low)  # as in equal_rate


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


FOLDS = 10  # those of the published protocol, for every set
_ACCURACY_THRESHOLDS = (4.0, 0.01)  # end (exclusive), step
_ROWS_AT_ONCE = 256  # their float64 differences stay in the processor's cache
Pairs = tuple[np.ndarray, np.ndarray]  # (P,) int64 twice: the rows of each pair


@dataclass(frozen=True, eq=False)
class VerificationResult(Result):
    """The result of `verify`. Rates and accuracies are in [0, 1]."""

    accuracy: float  # mean over the folds
    accuracy_std: float  # population standard deviation over the folds (ddof 0)
    accuracy_per_fold: np.ndarray  # (F,)
    threshold_per_fold: np.ndarray  # (F,), squared distances
    xnorm: float  # mean norm of the raw embeddings
    auc: float | None  # area under the ROC curve, ties counted half; None without both kinds of pairs
    eer: float | None  # the rate at which FAR and FRR are equal; None without both kinds of pairs
    points: list[OperatingPoint]  # at each FAR of FAR_TARGETS
    exact_accuracy: float  # mean over the folds with the best of all thresholds instead of the grid's
    min_dcf: float | None  # minimum detection cost at a prior of 0.01; None without both kinds of pairs
    plain_accuracy: float | None  # mean over the folds for the embeddings without their mirror images; None if not requested
    num_genuine: int
    num_impostor: int
    distances: np.ndarray  # (P,) squared, 0 to 4
    same: np.ndarray  # (P,) bool, True for genuine pairs
    norms: np.ndarray  # (N,) of the raw embeddings of the images; (0,) if they were not given

    @property
    def tar_at_far(self) -> dict[str, float | None]:
        """FAR, as written in FAR_TARGETS, to TAR; None if there are fewer than 1 / FAR impostor pairs."""
        return {point.target: point.tar for point in self.points}

    @property
    def cosine_threshold(self) -> float:
        """The mean over the folds of the accuracy threshold, as a cosine similarity: a pair is accepted above it."""
        return 1.0 - float(np.mean(self.threshold_per_fold)) / 2.0

    @property
    def figures(self) -> Figures:
        return {
            "accuracy": self.accuracy,
            "accuracy_std": self.accuracy_std,
            "cosine_threshold": self.cosine_threshold,
            "exact_accuracy": self.exact_accuracy,
            "plain_accuracy": self.plain_accuracy,
            **{f"tar@{far}": tar for far, tar in self.tar_at_far.items()},
            "min_dcf": self.min_dcf,
            "eer": self.eer,
            "auc": self.auc,
            "xnorm": self.xnorm,
        }

    def as_json(self) -> dict[str, Any]:
        return {
            **{key: value for key, value in self.figures.items() if "@" not in key},
            "accuracy_per_fold": self.accuracy_per_fold.tolist(),
            "squared_distance_threshold_per_fold": self.threshold_per_fold.tolist(),
            "tar_at_far": self.tar_at_far,
            "operating_points": [point.as_json() for point in self.points],
            "num_genuine": int(self.num_genuine),
            "num_impostor": int(self.num_impostor),
            "roc": _thinned_roc(self),
            "similarities": _similarities(self),
        }

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return (low, high) by "accuracy", FAR as in FAR_TARGETS, "eer" and "auc"; unmeasurable ones are left out."""
        genuine, impostor = np.sort(self.distances[self.same]), np.sort(self.distances[~self.same])
        targets = [point.target for point in self.points if point.tar is not None]
        found = bootstrap_intervals(genuine, impostor, self.accuracy, targets)
        if self.auc is not None:
            found["auc"] = _auc_interval(genuine, impostor, self.auc)
        return found


def fuse_views(plain: np.ndarray, mirrored: np.ndarray) -> np.ndarray:
    """Return the (N, D) float64 unit rows l2norm(plain + mirrored), from the raw embeddings (N, D) of both views.

    A row of zeros stays zero.
    """
    return unit_rows(plain.astype(np.float64) + mirrored)


def pair_distances(embeddings_a: np.ndarray, embeddings_b: np.ndarray, pairs: Pairs | None = None) -> np.ndarray:
    """Return the (P,) squared Euclidean distances between rows (P, D) and rows (P, D), or those of `pairs`, in float64."""
    first, second = pairs or (np.arange(len(embeddings_a)),) * 2
    distances = np.empty(len(first))
    for start in range(0, len(distances), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        difference = np.subtract(embeddings_a[first[rows]], embeddings_b[second[rows]], dtype=np.float64)
        distances[rows] = np.square(difference, out=difference).sum(axis=1)
    return distances


def verify(
    embeddings_a: np.ndarray,
    embeddings_b: np.ndarray,
    same: np.ndarray,
    num_folds: int = FOLDS,
    *,
    xnorm: float,
    pairs: Pairs | None = None,
    plain_distances: np.ndarray | None = None,
    norms: np.ndarray | None = None,
) -> VerificationResult:
    """Return all the numbers of a set from its unit embeddings (P, D), (P, D) and labels (P,).

    Args:
        embeddings_a, embeddings_b: the images of each pair, rows of `fuse_views`.
        pairs: which rows of the two are a pair, so that an image in many pairs needs one row; None = those of one place.
        xnorm: the mean norm of the raw embeddings of both views, copied to the result.
        plain_distances: (P,), of the embeddings without their mirror images.
        norms: (N,), copied to the result.
    """
    first, second = pairs = pairs or (np.arange(len(embeddings_a)),) * 2
    if embeddings_a.ndim != 2 or embeddings_a.shape != embeddings_b.shape or not same.shape == first.shape == second.shape:
        raise ValueError(
            "verification takes two arrays (P, D) and labels (P,), "
            f"got {embeddings_a.shape}, {embeddings_b.shape} and {same.shape}"
        )
    same = same.astype(bool)
    _check_unit_rows(embeddings_a, *([] if embeddings_b is embeddings_a else [embeddings_b]))
    distances = pair_distances(embeddings_a, embeddings_b, pairs)
    accuracy_per_fold, threshold_per_fold = fold_accuracy(distances, same, num_folds)
    genuine, impostor = np.sort(distances[same]), np.sort(distances[~same])
    both_kinds = genuine.size > 0 and impostor.size > 0
    return VerificationResult(
        accuracy=float(np.mean(accuracy_per_fold)),
        accuracy_std=float(np.std(accuracy_per_fold)),
        accuracy_per_fold=accuracy_per_fold,
        threshold_per_fold=threshold_per_fold,
        xnorm=xnorm,
        auc=area_under_roc(genuine, impostor) if both_kinds else None,
        eer=equal_error_rate(genuine, impostor) if both_kinds else None,
        points=operating_points(genuine, impostor),
        exact_accuracy=float(np.mean(exact_fold_accuracy(distances, same, _fold_of_pair(same.size, num_folds))[0])),
        min_dcf=minimum_dcf(genuine, impostor),
        plain_accuracy=None if plain_distances is None else float(np.mean(fold_accuracy(plain_distances, same, num_folds)[0])),
        num_genuine=genuine.size,
        num_impostor=impostor.size,
        distances=distances,
        same=same,
        norms=np.empty(0) if norms is None else norms,
    )


def fold_accuracy(distances: np.ndarray, same: np.ndarray, num_folds: int = FOLDS) -> tuple[np.ndarray, np.ndarray]:
    """Return (F,) accuracies of the held-out folds and their (F,) thresholds, from distances (P,) and labels (P,)."""
    thresholds = np.arange(0, *_ACCURACY_THRESHOLDS)
    place = np.where(same, 0, num_folds) + _fold_of_pair(distances.size, num_folds)
    first = np.searchsorted(thresholds, distances, side="right")  # (P,), the first threshold above each distance
    num_bins = thresholds.size + 1  # the last bin has the pairs that no threshold accepts
    counts = np.bincount(place * num_bins + first, minlength=2 * num_folds * num_bins)
    genuine, impostor = counts.reshape(2, num_folds, num_bins).cumsum(axis=2)  # accepted, and in the last bin all
    correct = genuine[:, :-1] + (impostor[:, -1:] - impostor[:, :-1])  # (F, T)
    # Counts instead of rates give the same best threshold of the other folds, without rounding in the comparison.
    best = np.argmax(correct.sum(axis=0) - correct, axis=1)  # (F,), the first of equals
    return correct[np.arange(num_folds), best] / (genuine + impostor)[:, -1], thresholds[best]


def area_under_roc(genuine: np.ndarray, impostor: np.ndarray) -> float:
    """Return the probability that a genuine pair is nearer than an impostor pair, ties half, from sorted distances."""
    nearer = np.searchsorted(impostor, genuine, side="left")  # impostors nearer than each genuine pair
    nearer_or_equal = np.searchsorted(impostor, genuine, side="right")
    return float(1.0 - (nearer + nearer_or_equal).sum() / (2.0 * genuine.size * impostor.size))


def equal_error_rate(genuine: np.ndarray, impostor: np.ndarray) -> float:
    """Return the rate at which FAR = FRR, interpolated linearly on the ROC curve, from sorted distances."""
    thresholds = np.append(np.unique(np.concatenate([genuine, impostor])), np.inf)
    far = np.searchsorted(impostor, thresholds, side="left") / impostor.size
    return equal_rate(far, 1.0 - np.searchsorted(genuine, thresholds, side="left") / genuine.size)


def equal_rate(far: np.ndarray, frr: np.ndarray) -> float:
    """Return the rate at which FAR = FRR, interpolated linearly, from both (T,) at ever looser thresholds."""
    gap = far - frr  # rises from -1 to 1
    right = int(np.argmax(gap >= 0.0))
    weight = gap[right] / (gap[right] - gap[right - 1])
    return float(far[right] - weight * (far[right] - far[right - 1]))


def row_norms(embeddings: np.ndarray) -> np.ndarray:
    """Return the (N,) norms of rows (N, D), in float64."""
    rows = embeddings.astype(np.float64, copy=False)
    return np.sqrt(np.einsum("nd,nd->n", rows, rows))


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """Return rows (n, D) as float64 of length 1; zero rows stay zero."""
    norms = row_norms(rows)
    return rows.astype(np.float64, copy=False) / np.where(norms == 0, 1, norms)[:, None]


def _check_unit_rows(*embeddings: np.ndarray) -> None:
    """Raise ValueError for rows that are not finite, or neither of unit length nor zero."""
    norms = np.concatenate(list(map(row_norms, embeddings)))
    num_bad = int(np.count_nonzero(~np.isfinite(norms)))
    if num_bad:
        raise ValueError(
            f"{num_bad} of {norms.size} embeddings hold NaN or infinity: the network has diverged, "
            "evaluate an earlier checkpoint, or train again with a lower learning rate"
        )
    is_off = (np.abs(norms - 1.0) > 1e-3) & (norms != 0.0)
    if is_off.any():
        raise ValueError(
            f"{np.count_nonzero(is_off)} of {norms.size} embeddings are not of unit length (norms {norms.min():.4g} to "
            f"{norms.max():.4g}): the thresholds 0 to 4 need the rows of fuse_views"
        )


def _fold_of_pair(num_pairs: int, num_folds: int) -> np.ndarray:
    """Return the (P,) fold numbers: contiguous folds, the first num_pairs % num_folds of which are one pair longer."""
    if num_folds < 2 or num_pairs < num_folds:
        raise ValueError(f"num_folds must be from 2 to the number of pairs, got {num_folds} folds for {num_pairs} pairs")
    sizes = np.full(num_folds, num_pairs // num_folds)
    sizes[: num_pairs % num_folds] += 1
    return np.repeat(np.arange(num_folds), sizes)


def roc_curve(result: VerificationResult) -> tuple[np.ndarray, np.ndarray]:
    """Return (FAR, TAR) at every threshold between two distances, both ascending; at most (P + 1,)."""
    order = np.argsort(result.distances, kind="stable")
    same, distances = result.same[order], result.distances[order]
    last_of_equals = np.append(distances[1:] != distances[:-1], True)
    tar = np.cumsum(same)[last_of_equals] / max(result.num_genuine, 1)
    far = np.cumsum(~same)[last_of_equals] / max(result.num_impostor, 1)
    return np.append(0.0, far), np.append(0.0, tar)


def similarity_bins(result: VerificationResult) -> np.ndarray:
    """Return the edges of equal intervals between the smallest and the largest cosine of all pairs."""
    low, high = 1.0 - float(result.distances.max()) / 2.0, 1.0 - float(result.distances.min()) / 2.0
    return np.linspace(low, high, 50) if high - low > 1e-9 else np.linspace(low - 0.01, low + 0.01, 3)


def _thinned_roc(result: VerificationResult, points: int = 200) -> dict[str, list[float]]:
    """Return {"far": [...], "tar": [...]}: the ROC curve at `points` values of FAR, evenly spaced on a logarithmic axis."""
    far, tar = roc_curve(result)
    if result.num_impostor == 0 or result.num_genuine == 0:
        return {"far": [], "tar": []}
    wanted = np.unique(np.append(0.0, np.geomspace(1 / result.num_impostor, 1.0, points)))
    places = np.searchsorted(far, wanted, side="right") - 1  # the largest FAR that is not above
    return {"far": far[places].tolist(), "tar": tar[places].tolist()}


def _similarities(result: VerificationResult) -> dict[str, list]:
    """Return {"cosine": edges, "genuine": counts, "impostor": counts}: how many pairs of each kind lie between two edges."""
    cosine, edges = 1.0 - result.distances / 2.0, similarity_bins(result)
    kinds = {"genuine": result.same, "impostor": ~result.same}
    counts = {kind: np.histogram(cosine[mask], edges)[0].tolist() for kind, mask in kinds.items()}
    return {"cosine": edges.tolist(), **counts}


def _auc_interval(genuine: np.ndarray, impostor: np.ndarray, auc: float) -> tuple[float, float]:
    """Return the interval of the AUC from sorted distances, by DeLong's variance."""

    def shares(of: np.ndarray, among: np.ndarray) -> np.ndarray:
        nearer = np.searchsorted(among, of, side="left") + np.searchsorted(among, of, side="right")
        return nearer / (2 * among.size)

    variance = sum(
        float(np.var(shares(of, among), ddof=1)) / of.size
        for of, among in ((genuine, impostor), (impostor, genuine))
        if of.size > 1
    )
    half = 1.96 * variance**0.5
    return max(0.0, auc - half), min(1.0, auc + half)
