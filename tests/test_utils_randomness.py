import numpy as np
import pytest

from utils.randomness import derive, permute, uniform, unpermute


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_permute_is_a_permutation_and_unpermute_its_inverse(size: int):
    image = permute(np.arange(size), size, seed=5)
    assert sorted(image.tolist()) == list(range(size))
    assert np.array_equal(unpermute(image, size, seed=5), np.arange(size))


def test_the_order_never_changes_because_checkpoints_rely_on_it():
    assert permute(np.arange(10), 10, 1).tolist() == [7, 9, 3, 8, 0, 6, 4, 1, 2, 5]
    assert permute(np.array([0, 1, 42_474_556]), 42_474_557, 7).tolist() == [31911923, 20101995, 41724349]
    assert derive(2048, "slots") == 229603924560810245


def test_each_place_is_equally_likely_over_the_seeds():
    counts = np.zeros((5, 5))
    for seed in range(1500):
        counts[np.arange(5), permute(np.arange(5), 5, seed)] += 1
    assert np.abs(counts - 300).max() < 4.5 * np.sqrt(300 * 0.8)


def test_seeds_differ_by_purpose_and_by_number():
    seeds = [
        derive(s, *parts) for s in (0, 1, 2**62) for parts in ((), ("a",), ("b",), ("a", 1), ("a", 2), (1,), (-1,), ("a1",))
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_uniform_is_uniform_and_a_function_of_the_index():
    draws = uniform(3, np.arange(100_000))
    assert np.array_equal(draws[500:600], uniform(3, np.arange(500, 600)))
    histogram = np.histogram(draws, bins=10, range=(0, 1))[0]
    assert np.abs(histogram - 10_000).max() < 4.5 * np.sqrt(10_000 * 0.9)
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02


def test_an_index_outside_the_range_is_an_error():
    with pytest.raises(ValueError, match=r"index 10 is outside \[0, 10\)"):
        permute(np.array([3, 10]), 10, 0)
