"""95 % confidence intervals of the numbers of a set: accuracy, TAR at each FAR, EER and AUC.

Source of the AUC's interval: DeLong, DeLong and Clarke-Pearson, "Comparing the areas under two or more correlated receiver
operating characteristic curves", Biometrics 1988.
"""

import numpy as np

from .operating_points import bootstrap_intervals
from .verification import VerificationResult, equal_error_rate

Intervals = dict[str, tuple[float, float]]
_EER_SAMPLES = 200  # fewer than for TAR, because each costs much more


def intervals_95(result: VerificationResult) -> Intervals:
    """Return (low, high) by "accuracy", FAR as in FAR_TARGETS, "eer" and "auc"; unmeasurable ones are left out."""
    genuine, impostor = np.sort(result.distances[result.same]), np.sort(result.distances[~result.same])
    targets = [point.target for point in result.points if point.tar is not None]
    found = bootstrap_intervals(genuine, impostor, result.accuracy, targets)
    if result.auc is not None:
        found["eer"] = eer_interval(genuine, impostor)
        found["auc"] = auc_interval(genuine, impostor, result.auc)
    return found


def eer_interval(genuine: np.ndarray, impostor: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return the interval of the EER by resampling genuine and impostor pairs, from their sorted distances."""
    rng = np.random.default_rng(seed)
    rates = [
        equal_error_rate(*(np.sort(rng.choice(distances, distances.size)) for distances in (genuine, impostor)))
        for _ in range(_EER_SAMPLES)
    ]
    low, high = np.quantile(rates, [0.025, 0.975])
    return float(low), float(high)


def auc_interval(genuine: np.ndarray, impostor: np.ndarray, auc: float) -> tuple[float, float]:
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
