"""Thresholds from data: which part of the cosines that were measured follows a distribution that is known.

Cosines are kept as histograms of BINS bins over [-1, 1], so memory does not grow with their number.
Source of the share of a known component: Storey, "A direct approach to false discovery rates", J. R. Statist. Soc. B 2002.
"""

from typing import NamedTuple

import numpy as np

BINS = 2000
_SMOOTH = 20  # bins, standard deviation of the kernel that smooths a histogram before two are divided
_BULK = (0.5, 0.95)  # quantiles of the known distribution between which its share is measured


class Border(NamedTuple):
    """What separates the impostors among some cosines from the rest."""

    share: float  # of the impostors
    cosine: float  # at most this: more likely an impostor than not
    impostor: np.ndarray  # (BINS,) probability that a cosine of a bin is an impostor's; never rises

    def sure(self, cosines: np.ndarray) -> np.ndarray:
        """Return the probability of an impostor for each cosine."""
        return self.impostor[bins(cosines)]


def bins(cosines: np.ndarray) -> np.ndarray:
    """Return the bin of each cosine."""
    return np.clip((cosines + 1) * (BINS / 2), 0, BINS - 1).astype(np.int32)


def histogram(cosines: np.ndarray) -> np.ndarray:
    """Return (BINS,) int64 counts of cosines of any shape."""
    return np.bincount(bins(cosines).ravel(), minlength=BINS)


def find_border(observed: np.ndarray, impostors: np.ndarray, far: float | None = None) -> Border:
    """Split cosines that are a mixture of impostors, whose distribution is known, and others, whose distribution is not.

    With F and H the distribution functions of both, s = min F / H is the share of the impostors, since the others only add to
    F, and little where H is in its bulk. The border makes the fewest errors: accepted impostors s (1 - H) and rejected others
    F - s H, together s + F - 2 s H.

    Args:
        observed, impostors: histograms.
        far: share of the impostors above the border; None = where the errors are fewest.
    """
    from sklearn.isotonic import isotonic_regression  # here alone: it takes a second

    f, h = (np.cumsum(counts) / max(1, counts.sum()) for counts in (observed, impostors))
    bulk = (h >= _BULK[0]) & (h <= _BULK[1])
    share = float(np.clip((f[bulk] / h[bulk]).min(initial=1.0), 0, 1)) if bulk.any() else 0.0
    if far is None:
        errors = f - 2 * share * h
        errors[: int(np.searchsorted(h, 0.5))] = np.inf
        best = np.flatnonzero(errors <= errors.min() + 1e-12)
        runs = np.split(best, np.flatnonzero(np.diff(best) > 1) + 1)
        border = (runs[0][0] + runs[0][-1]) / 2  # the middle of a gap, where all are equal
    else:
        border = float(np.searchsorted(h, 1 - far))
    reach = np.arange(-4 * _SMOOTH, 4 * _SMOOTH + 1)
    kernel = np.exp(-((reach / _SMOOTH) ** 2) / 2)
    mass, known = (np.convolve(np.diff(part, prepend=0.0), kernel, "same") for part in (f, h))
    ratio = np.clip(share * known / np.maximum(mass, 1e-12), 0, 1)
    falling = isotonic_regression(ratio, sample_weight=mass + 1e-12, increasing=False)
    return Border(share, float((border + 1) / (BINS / 2) - 1), falling)
