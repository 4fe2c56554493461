"""The plan of a step against slow loops over its labels: every sample's target class is found in its chunk, and there alone."""

import numpy as np
import pytest
import torch
from scipy.special import chdtrc

from partial_fc.sampling.planning import ActiveSet, SharedLabels, draw_active, plan_step
from utils.randomness import derive

SLOTS = range(10, 30)  # of this shard, of 40
LABELS = np.array([[12, 12, 35, 29, 12, 10], [29, 3, 12, 17, 18, 12]])  # two micro-batches; 35 and 3 lie in other shards


@pytest.mark.parametrize(
    "active",
    [
        ActiveSet([(0, 20)], np.empty(0, dtype=np.int64)),
        ActiveSet([(1, 4), (8, 13)], np.array([0, 7, 15, 19])),
        ActiveSet([], np.array([0, 2, 7, 8, 19])),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 64])
def test_places_and_targets_are_those_of_every_sample(active: ActiveSet, size: int):
    plan = plan_step(SharedLabels(0, LABELS, np.unique(LABELS)), active, SLOTS, size, torch.device("cpu"), False, 1)
    order = [slot for start, stop in active.runs for slot in range(start, stop)] + active.extra.tolist()
    begin, found = 0, []
    for chunk in plan.chunks:
        slots = torch.arange(len(SLOTS))[chunk.select].tolist()
        assert chunk.begin == begin and slots == order[begin : begin + chunk.size] and 0 < chunk.size <= size
        class_index, sample_index = (tensor.tolist() for tensor in chunk.targets)
        pairs = list(zip(class_index, sample_index, strict=True))
        assert pairs == sorted(pairs)  # by class, then by sample: the order of their addition
        found += [(sample, SLOTS.start + slots[row]) for row, sample in pairs]
        begin += chunk.size
    assert begin == len(order)
    here = [(sample, slot) for sample, slot in enumerate(LABELS.reshape(-1).tolist()) if slot in SLOTS]
    assert sorted(found) == here
    for micro, slots in enumerate(LABELS.tolist()):
        assert plan.places[micro].tolist() == [order.index(s - SLOTS.start) if s in SLOTS else -1 for s in slots]
        assert plan.owners[micro].tolist() == [sample for sample, slot in enumerate(slots) if slot in SLOTS]
        assert plan.local[micro].tolist() == [slot - SLOTS.start for slot in slots if slot in SLOTS]


def test_a_shard_without_a_class_of_the_batch_has_no_target():
    active = ActiveSet([(0, 5)], np.empty(0, dtype=np.int64))
    plan = plan_step(SharedLabels(0, LABELS, np.unique(LABELS)), active, range(30, 35), 3, torch.device("cpu"), False, 1)
    assert [len(chunk.targets[0]) for chunk in plan.chunks] == [0, 0]
    assert all(not (places >= 0).any() for places in plan.places)


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


def test_every_class_is_active_with_probability_r_by_a_chi_square_test():
    num_local, rate, draws = 1000, 0.1, 4000
    counts = np.zeros(num_local)
    for seed in range(draws):
        counts[_members(draw_active(np.zeros(0, dtype=np.int64), num_local, rate, derive(seed, "test")))] += 1
    assert counts.mean() == draws * rate
    # a draw is a run of 100 slots, so of the slots k, k + 100, k + 200, ... exactly one is in it: a multinomial each
    for offset in range(0, 100, 7):
        chosen = counts[offset::100]
        assert chosen.sum() == draws
        statistic = ((chosen - draws / 10) ** 2 / (draws / 10)).sum()
        assert chdtrc(9, statistic) > 1e-4


def test_neighbours_come_before_random_negatives_and_take_at_most_half_of_the_budget():
    positives, neighbours = np.array([5, 50, 500]), np.array([7, 5, 9, 7, 11, 50, *range(600, 700)])
    for seed in range(200):
        members = set(_members(draw_active(positives, 1000, 0.043, seed, neighbours)).tolist())
        assert len(members) == 43
        assert {5, 50, 500, 7, 9, 11, *range(600, 617)} <= members  # the first 20 new ones of 40 negatives
    others = np.zeros(1000)
    for seed in range(3000):
        others[_members(draw_active(positives, 1000, 0.043, seed, neighbours))] += 1
    rest = np.delete(others, [5, 50, 500, 7, 9, 11, *range(600, 617)])
    assert rest.mean() == pytest.approx(3000 * 20 / 977)
    assert np.abs(rest - rest.mean()).max() < 4.5 * rest.mean() ** 0.5


def test_places_number_the_active_slots_in_the_order_of_the_chunks():
    active = draw_active(np.array([3, 90, 95]), 100, 0.3, 5)
    members = _members(active)
    assert active.places(members).tolist() == list(range(30))
