import numpy as np
import pytest
from sklearn.metrics import roc_curve

from eval.operating_points import bootstrap_intervals, exact_fold_accuracy, minimum_dcf, operating_points


def _pairs(seed: int, num_genuine: int = 300, num_impostor: int = 700, digits: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted distances; rounding to two digits makes many ties."""
    rng = np.random.default_rng(seed)
    genuine, impostor = rng.normal(1.0, 0.4, num_genuine), rng.normal(1.9, 0.3, num_impostor)
    return tuple(np.sort(values.clip(0, 4).round(digits)) for values in (genuine, impostor))


@pytest.mark.parametrize("seed", range(5))
def test_points_equal_a_search_over_scikit_learns_roc(seed: int):
    genuine, impostor = _pairs(seed)
    labels = np.repeat([1, 0], [len(genuine), len(impostor)])
    far, tar, _ = roc_curve(labels, -np.concatenate([genuine, impostor]), drop_intermediate=False)
    for point in operating_points(genuine, impostor, ("1e-1", "1e-2")):
        allowed = far <= float(point.target) + 1e-12
        assert point.far == pytest.approx(far[allowed].max()) and point.tar == pytest.approx(tar[allowed].max())
        assert point.num_accepted == round(point.far * 700)
        # the threshold does what it says, also as a cosine
        assert np.mean(impostor < point.threshold) == point.far and np.mean(genuine < point.threshold) == point.tar
        assert np.mean(1 - genuine / 2 > point.cosine) == pytest.approx(point.tar)


def test_what_too_few_impostors_cannot_carry_is_not_measurable():
    genuine, impostor = _pairs(0)
    found = {point.target: point for point in operating_points(genuine, impostor)}
    assert found["1e-2"].tar is not None and found["1e-2"].num_accepted <= 7
    assert found["1e-3"].tar is None and found["1e-3"].threshold is None and found["1e-3"].cosine is None
    assert all(point.tar is None for point in operating_points(genuine[:0], impostor))


def test_separated_pairs_have_a_threshold_between_them():
    point = operating_points(np.array([0.1, 0.2]), np.array([1.0] * 10), ("1e-1",))[0]
    assert point.tar == 1.0 and point.far == 0.0 and 0.2 < point.threshold < 1.0  # ten equal impostors: none may pass
    everyone = operating_points(np.array([0.1]), np.array([1.0]), ("1",))[0]
    assert everyone.far == 1.0 and everyone.threshold == 4.0


@pytest.mark.parametrize("p_target", [0.01, 0.5, 0.9])
def test_minimum_dcf_equals_a_loop_over_all_thresholds(p_target: float):
    genuine, impostor = _pairs(3)
    costs = [
        p_target * np.mean(genuine >= threshold) + (1 - p_target) * np.mean(impostor < threshold)
        for threshold in [0.0, *np.unique(np.concatenate([genuine, impostor])) + 1e-6, 5.0]
    ]
    assert minimum_dcf(genuine, impostor, p_target) == pytest.approx(min(costs) / min(p_target, 1 - p_target))


def test_minimum_dcf_of_perfect_and_useless_systems():
    assert minimum_dcf(np.array([0.1]), np.array([1.0])) == 0.0
    assert minimum_dcf(np.array([1.0]), np.array([1.0])) == 1.0
    assert minimum_dcf(np.array([]), np.array([1.0])) is None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("digits", [1, 6])
def test_exact_thresholds_equal_a_loop_over_all_of_them(seed: int, digits: int):
    rng = np.random.default_rng(seed)
    same = rng.random(120) < 0.5
    distances = np.where(same, rng.normal(1, 0.4, 120), rng.normal(1.6, 0.4, 120)).clip(0, 4).round(digits)
    folds = np.repeat(np.arange(5), 24)
    accuracies, thresholds = exact_fold_accuracy(distances, same, folds)
    for fold in range(5):
        train = folds != fold
        values = np.unique(distances[train])
        cuts = [values[0] - 1, *(values[1:] + values[:-1]) / 2, values[-1] + 1]
        scores = [np.mean((distances[train] < cut) == same[train]) for cut in cuts]
        assert np.mean((distances[train] < thresholds[fold]) == same[train]) == pytest.approx(max(scores))
        assert accuracies[fold] == np.mean((distances[~train] < thresholds[fold]) == same[~train])


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """Sets drawn again and again from one population: its TAR lies in most of their intervals."""
    genuine, impostor = _pairs(99, 200_000, 200_000, digits=9)
    truth = operating_points(genuine, impostor, ("1e-1",))[0].tar
    hits = 0
    for seed in range(40):
        interval = bootstrap_intervals(*_pairs(seed, 200, 400, digits=9), 0.9, ("1e-1", "1e-6"), samples=200, seed=seed)
        assert "1e-6" not in interval
        hits += interval["1e-1"][0] <= truth <= interval["1e-1"][1]
    assert hits >= 33


def test_the_interval_of_accuracy_is_that_of_a_share():
    low, high = bootstrap_intervals(*_pairs(0, 3000, 3000), 0.95, ())["accuracy"]
    width = 1.96 * np.sqrt(0.95 * 0.05 / 6000)
    assert low == pytest.approx(0.95 - width, abs=1e-3) and high == pytest.approx(0.95 + width, abs=1e-3)
