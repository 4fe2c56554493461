import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from eval import identification
from eval.identification import Identification, IdentificationResult, identify

pytestmark = pytest.mark.numeric


def _unit(rng: np.random.Generator, count: int) -> np.ndarray:
    rows = rng.normal(size=(count, 8))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("cells", [1, 100, 1 << 20])
def test_ranks_equal_a_slow_search(cells: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(identification, "_CELLS_AT_ONCE", cells)
    rng = np.random.default_rng(0)
    gallery, people = _unit(rng, 40), rng.integers(100, 115, 40)
    probes, wanted = _unit(rng, 60), rng.integers(95, 120, 60)
    chunks: list[int] = []
    found = identify(gallery, people, probes, wanted, lambda parts: chunks.append(len(parts)) or parts)
    assert chunks == [1 if cells > 100 else 2]  # each reads the gallery, so there are few
    for q in range(60):
        scores = {p: max(float(gallery[g] @ probes[q]) for g in np.flatnonzero(people == p)) for p in set(people.tolist())}
        assert found.best[q] == pytest.approx(max(scores.values()))
        if int(wanted[q]) not in scores:
            assert found.rank[q] == 0 and found.own[q] == -np.inf
            continue
        right = scores[int(wanted[q])]
        assert found.own[q] == pytest.approx(right)
        assert found.rank[q] == 1 + sum(score > right + 1e-12 for score in scores.values())


def test_a_large_gallery_is_never_copied(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(identification, "_ROWS_AT_ONCE", 100)
    raw = np.random.default_rng(2).normal(size=(20_000, 64)).astype(np.float32)
    raw[7] = 0
    wanted = raw / np.where(raw.any(axis=1), np.linalg.norm(raw, axis=1), 1)[:, None]
    searching = Identification.__new__(Identification)
    searching._people = [np.arange(20_000), np.array([9])]
    embed = SimpleNamespace(sums=lambda decode, count: raw, bar=iter)
    tracemalloc.start()
    gallery = searching._unit_rows(SimpleNamespace(num_stored=20_000), embed)
    rates = searching._rates([gallery, wanted[9:10]], embed)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(gallery, wanted) and rates.figures["rank_1"] == 1
    assert most < raw.nbytes


def test_rates_equal_a_walk_over_all_thresholds():
    rng = np.random.default_rng(1)
    rank = rng.integers(0, 4, 500)
    best = rng.normal(size=500).round(1)
    own = np.where(rank == 0, -np.inf, np.where(rank == 1, best, best - 0.5))
    found = IdentificationResult(rank, own, best)
    for k in (1, 2, 3):
        assert found.rank_rate(k) == np.mean(rank[rank > 0] <= k)
    for fpir in (0.01, 0.1, 0.5):
        rates = [
            np.mean((rank[rank > 0] == 1) & (own[rank > 0] > threshold))
            for threshold in [-9.0, *np.unique(best)]
            if np.mean(best[rank == 0] > threshold) <= fpir
        ]
        assert found.tpir_at_fpir(fpir) == max(rates)


def test_rates_that_the_probes_cannot_tell_are_none():
    rng = np.random.default_rng(2)
    gallery = _unit(rng, 5)
    closed = identify(gallery, np.arange(5), gallery, np.arange(5))
    assert closed.rank_rate(1) == 1.0 and closed.tpir_at_fpir(0.1) is None and closed.num_unmated == 0
    strangers = identify(gallery, np.arange(5), gallery, np.arange(5) + 10)
    assert strangers.rank_rate(1) is None and strangers.tpir_at_fpir(0.5) is None and strangers.num_mated == 0
    with pytest.raises(ValueError, match="needs a gallery and probes"):
        identify(gallery[:0], np.arange(0), gallery, np.arange(5))


def test_a_network_that_says_the_same_of_all_earns_nothing():
    same = np.tile([[1.0, 0.0]], (6, 1))
    found = identify(same, np.arange(6), same, np.arange(6))
    assert found.rank.tolist() == [6] * 6
