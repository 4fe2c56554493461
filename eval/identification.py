"""1:N identification: which person of the gallery a probe shows, if any.

Closed set: rank-k (CMC) is the share of the mated probes, whose person is in the gallery, with that person among the first k.
Open set: probes without a mate must raise no alarm. At the threshold where a share FPIR of them does, TPIR is the share of the
mated probes that find the right person first, with a score above the threshold (Grother and Ngan, NIST FRVT 1:N).
Shapes: G = gallery entries, S = people in the gallery, Q = probes, D = embedding size.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_CELLS_AT_ONCE = 1 << 23  # scores of some probes to all entries: 64 MiB


@dataclass(frozen=True, eq=False)
class IdentificationResult:
    """The result of `identify`.

    Args:
        rank: (Q,) int64, the rank of the right person, from 1 on; 0 for probes whose person is not in the gallery.
        own: (Q,) the score of the right person; -inf without one.
        best: (Q,) the highest score of any person.
    """

    rank: np.ndarray
    own: np.ndarray
    best: np.ndarray

    @property
    def num_mated(self) -> int:
        """Probes whose person is in the gallery."""
        return int(np.count_nonzero(self.rank))

    @property
    def num_unmated(self) -> int:
        """Probes whose person is not in the gallery."""
        return len(self.rank) - self.num_mated

    def rank_rate(self, k: int) -> float | None:
        """Return the share of mated probes whose person is among the first k; None without mated probes."""
        mated = self.rank[self.rank > 0]
        return float(np.mean(mated <= k)) if len(mated) else None

    def tpir_at_fpir(self, fpir: float) -> float | None:
        """Return TPIR at the lowest threshold at which at most a share `fpir` of the unmated probes raises an alarm.

        None if it cannot be measured: fewer than 1 / fpir probes without a mate, or none with one.
        """
        alarms = np.sort(self.best[self.rank == 0])[::-1]
        allowed = int(len(alarms) * fpir + 1e-9)
        if not allowed or not self.num_mated:
            return None
        limit = alarms[allowed] if allowed < len(alarms) else -np.inf  # this score and equal ones must raise no alarm
        found = (self.rank == 1) & (self.own > limit)
        return float(np.count_nonzero(found) / self.num_mated)


def identify(
    gallery: np.ndarray,
    gallery_people: np.ndarray,
    probes: np.ndarray,
    probe_people: np.ndarray,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> IdentificationResult:
    """Search every probe in the gallery; a person's score is the best score of the person's entries.

    Among people with equal scores the right one is ranked last, so that a constant network gets no credit.

    Args:
        gallery: (G, D) unit rows.
        gallery_people: (G,) integers.
        probes: (Q, D) unit rows.
        probe_people: (Q,) integers; those that are not in gallery_people have no mate.
        progress: wraps the chunks, for example in a progress bar.
    """
    if not len(gallery) or not len(probes):
        raise ValueError(f"identification needs a gallery and probes, got {len(gallery)} and {len(probes)} images")
    order = np.argsort(gallery_people, kind="stable")
    people, begins = np.unique(gallery_people[order], return_index=True)
    entries = gallery[order]
    column = np.searchsorted(people, probe_people)
    column[people[np.minimum(column, len(people) - 1)] != probe_people] = -1
    rank = np.zeros(len(probes), dtype=np.int64)
    own, best = np.full(len(probes), -np.inf), np.empty(len(probes))
    chunk = max(1, _CELLS_AT_ONCE // len(gallery))
    for begin in progress(range(0, len(probes), chunk)):
        rows = slice(begin, min(begin + chunk, len(probes)))
        scores = np.maximum.reduceat(probes[rows] @ entries.T, begins, axis=1)  # (rows, S)
        best[rows] = scores.max(axis=1)
        mated = np.flatnonzero(column[rows] >= 0)
        right = scores[mated, column[rows][mated]]
        own[begin + mated] = right
        rank[begin + mated] = np.count_nonzero(scores[mated] >= right[:, None], axis=1)
    return IdentificationResult(rank, own, best)
