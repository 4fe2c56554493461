import numpy as np
import pytest

from partial_fc.sampling import ActiveSet, draw_active


def _members(active: ActiveSet) -> np.ndarray:
    runs = [np.arange(start, stop) for start, stop in active.runs]
    return np.concatenate([*runs, active.extra])


def test_positives_are_active_the_budget_is_met_and_nothing_is_twice():
    rng = np.random.default_rng(0)
    for trial in range(300):
        num_local = int(rng.integers(1, 60))
        positives = np.flatnonzero(rng.random(num_local) < rng.random())
        rate = float(rng.uniform(0.01, 1))
        members = _members(draw_active(positives, num_local, rate, trial))
        assert (
            len(set(members.tolist())) == len(members) == max(len(positives), min(num_local, max(1, round(rate * num_local))))
        )
        assert members.min(initial=0) >= 0 and members.max(initial=0) < num_local
        assert set(positives.tolist()) <= set(members.tolist())


def test_each_negative_is_drawn_with_the_same_probability():
    positives = np.array([0, 1, 2, 10, 30, 31, 49])  # crowded and lonely ones, both ends
    draws, num_local = 20000, 50
    counts = np.zeros(num_local)
    for seed in range(draws):
        counts[_members(draw_active(positives, num_local, 0.4, seed))] += 1
    negatives = np.delete(counts, positives)
    expected = draws * (20 - len(positives)) / (num_local - len(positives))
    # neighbours are drawn together, so the sum is no chi-square; each count alone is binomial, and 43 of them stay in 4.5 sigma
    deviation = np.sqrt(expected * (1 - expected / draws))
    assert np.abs(negatives - expected).max() < 4.5 * deviation


def test_full_rate_takes_the_whole_shard_as_one_run():
    assert draw_active(np.array([1, 3]), 10, 1.0, 0).runs == [(0, 10)]


@pytest.mark.parametrize("seed", range(5))
def test_the_draw_is_a_function_of_the_seed(seed: int):
    first, second = (_members(draw_active(np.array([4]), 1000, 0.1, seed)) for _ in range(2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, _members(draw_active(np.array([4]), 1000, 0.1, seed + 100)))
