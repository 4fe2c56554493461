import numpy as np
import pytest

from eval.pair_sets.sample import sample_pairs


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_pairs_are_balanced_distinct_and_folds_share_no_one(seed: int):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 60, 500)
    first, second, same = sample_pairs(labels, 400, 10, seed)
    assert first.shape == second.shape == same.shape == (400,)
    assert same.reshape(10, 40).sum(axis=1).tolist() == [20] * 10
    np.testing.assert_array_equal(labels[first] == labels[second], same)
    assert (first != second).all()
    assert len({frozenset(pair) for pair in zip(first.tolist(), second.tolist(), strict=True)}) == 400
    people = [set(labels[np.stack([first, second])[:, 40 * fold : 40 * (fold + 1)]].ravel()) for fold in range(10)]
    assert sum(map(len, people)) == len(set().union(*people))


def test_one_person_with_many_images_does_not_rule():
    labels = np.concatenate([np.zeros(1000, dtype=int), np.repeat(np.arange(1, 21), 3)])
    first, _, same = sample_pairs(labels, 80, 2, 0)
    genuine = labels[first[same]]
    assert np.bincount(genuine).max() <= 5  # 20 genuine pairs of a fold go round 10 or 11 people


def test_every_pair_there_is_can_be_drawn():
    labels = np.repeat(np.arange(4), 3)  # two people of 3 images in each fold: 6 genuine pairs, 9 impostor pairs
    first, second, same = sample_pairs(labels, 24, 2, 5)
    assert len({frozenset(pair) for pair in zip(first[same].tolist(), second[same].tolist(), strict=True)}) == 12


def test_the_seed_decides_which_pairs_are_drawn():
    labels = np.repeat(np.arange(30), 4)
    one, again, other = (sample_pairs(labels, 100, 5, seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "pairs, folds, said", [(30, 10, "multiple of 2 x 10"), (0, 1, "multiple"), (200, 10, "at most 40 pairs")]
)
def test_what_cannot_be_drawn_is_said(pairs: int, folds: int, said: str):
    with pytest.raises(ValueError, match=said):
        sample_pairs(np.repeat(np.arange(20), 2), pairs, folds, 0)


def test_as_many_pairs_as_the_error_says_can_be_drawn():
    labels = np.repeat(np.arange(20), 2)
    assert len(sample_pairs(labels, 40, 10, 0)[2]) == 40


def test_any_cut_into_folds_is_nearly_balanced():
    same = sample_pairs(np.repeat(np.arange(60), 4), 300, 10, 0)[2]
    for folds in (3, 7, 10):
        assert all(abs(2 * part.sum() - len(part)) <= 1 for part in np.array_split(same, folds))
