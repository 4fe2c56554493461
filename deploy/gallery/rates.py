"""How often a gallery answers right: rank-k, and the open-set rates at a threshold."""

from collections.abc import Sequence

import numpy as np

from eval.identification import identify

from .search import Searcher

_RANKS = (1, 5)


def measure(
    searcher: Searcher, embeddings: np.ndarray, people: Sequence[str], threshold: float | None
) -> dict[str, float | int | None]:
    """Return the rates of queries (n, D) whose people are known; None = not measurable with these queries.

    FNIR is the share of the queries with an enrolled person that do not find this person first and above the threshold. FPIR is
    the share of the queries without one that find anybody above it.
    """
    wide = embeddings.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    unit = (wide / np.where(norms > 0, norms, 1)).astype(np.float32)
    number_of = {name: number for number, name in enumerate(searcher.people)}
    owners = np.array([number_of.get(name, -1) for name in people])
    found = identify(searcher.entries, searcher.owner, unit, owners)
    rates: dict[str, float | int | None] = {
        "queries_of_enrolled_people": found.num_mated,
        "queries_of_others": found.num_unmated,
        **{f"rank_{k}": found.rank_rate(k) for k in _RANKS},
    }
    if threshold is not None:
        mated, alarms = found.rank > 0, found.best > threshold
        right = (found.rank == 1) & (found.own > threshold)
        rates["fnir_at_the_threshold"] = float(np.mean(~right[mated])) if mated.any() else None
        rates["fpir_at_the_threshold"] = float(np.mean(alarms[~mated])) if (~mated).any() else None
    return rates
