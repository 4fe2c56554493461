"""Verification numbers against the published evaluator's (fixtures/metrics), slow loops, and scikit-learn.

fixtures/metrics/expected.json: what insightface's evaluate() gives, for pairs made by the formula it names.
"""

import csv
import itertools
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ks_2samp
from sklearn.metrics import roc_auc_score, roc_curve
from sklearn.model_selection import KFold

from eval import verification
from eval.pair_sets.bin_file import PairSet
from eval.verification import (
    VerificationResult,
    area_under_roc,
    bootstrap_intervals,
    equal_error_rate,
    exact_fold_accuracy,
    fold_accuracy,
    fuse_views,
    minimum_dcf,
    operating_points,
    pair_distances,
    verify,
)

EXPECTED = json.loads((Path(__file__).parent / "fixtures" / "metrics" / "expected.json").read_text())


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def _pairs_by_formula(n: int, d: int, noise: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rs = np.random.RandomState(n + d)
    a = rs.randn(n, d)
    same = (np.arange(n) // max(1, n // 20)) % 2 == 0
    b = np.where(same[:, None], a, rs.randn(n, d)) + noise * rs.randn(n, d)
    return _unit(a), _unit(b), same


def _random_distances(num_pairs: int, seed: int, digits: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Return distances that overlap and, being rounded, tie with each other and with the thresholds."""
    rng = np.random.default_rng(seed)
    same = rng.random(num_pairs) < 0.5
    distances = np.where(same, rng.normal(1.2, 0.4, num_pairs), rng.normal(1.8, 0.4, num_pairs))
    return np.round(np.clip(distances, 0, 4), digits), same


def _check_published(expected: dict[str, Any], result: VerificationResult) -> None:
    assert result.accuracy_per_fold.tolist() == expected["accuracy_per_fold"]  # to the last bit
    assert result.accuracy == expected["accuracy_mean"]
    assert result.accuracy_std == expected["accuracy_std"]


@pytest.mark.numeric
@pytest.mark.parametrize("name", list(EXPECTED))
def test_accuracy_of_every_fold_equals_the_published_evaluator(name: str) -> None:
    expected = EXPECTED[name]
    _check_published(expected, verify(*_pairs_by_formula(expected["n"], expected["d"], expected["noise"]), xnorm=1.0))


def test_london_pixels_equal_the_published_evaluator(face_oracle: Path) -> None:
    metrics = face_oracle / "oracle" / "metrics"
    expected = json.loads((metrics / "expected.json").read_text())["london_pixels"]
    plain, mirrored = (np.load(metrics / f"london_pixels_e{view}.npy") for view in (0, 1))
    with open(face_oracle / "london" / "london_pairs.csv", newline="") as file:
        same = np.array([row["same"] == "1" for row in csv.DictReader(file)])
    result = PairSet("", [], np.arange(0, len(plain), 2), np.arange(1, len(plain), 2), same).verify_views(plain, mirrored)
    _check_published(expected, result)
    assert result.xnorm == pytest.approx(expected["xnorm"], rel=1e-6)  # the expected number was summed in fp32


@pytest.mark.parametrize(("num_pairs", "num_folds"), [(103, 10), (100, 10), (7, 3), (10, 10), (2, 2)])
def test_fold_accuracy_equals_a_loop_over_folds_and_thresholds(num_pairs: int, num_folds: int) -> None:
    distances, same = _random_distances(num_pairs, seed=num_pairs)
    thresholds = np.arange(0, 4, 0.01)
    accuracies, chosen = fold_accuracy(distances, same, num_folds)
    for fold, (train, held_out) in enumerate(KFold(num_folds).split(distances)):
        best_accuracy, best_threshold = -1.0, math.nan
        for threshold in thresholds:
            accuracy = float(np.mean((distances[train] < threshold) == same[train]))
            if accuracy > best_accuracy:  # strict: the first of equals stays
                best_accuracy, best_threshold = accuracy, threshold
        assert chosen[fold] == best_threshold
        assert accuracies[fold] == np.sum((distances[held_out] < best_threshold) == same[held_out]) / held_out.size


def test_tar_needs_one_impostor_pair_per_inverse_far() -> None:
    genuine = np.linspace(0.0, 1.0, 10)
    for num_impostor, target, tar in [(1000, "1e-3", 1.0), (999, "1e-3", None), (10, "1e-1", 1.0)]:
        (point,) = operating_points(genuine, np.full(num_impostor, 3.0), [target])
        assert (point.target, point.tar) == (target, tar)


@pytest.mark.parametrize("seed", range(5))
def test_auc_equals_scikit_learn_with_ties(seed: int) -> None:
    distances, same = _random_distances(300, seed, digits=1)
    auc = area_under_roc(np.sort(distances[same]), np.sort(distances[~same]))
    assert auc == pytest.approx(roc_auc_score(same, -distances), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_at_the_equal_error_rate_a_walk_along_the_roc_curve_has_far_equal_frr(seed: int) -> None:
    distances, same = _random_distances(101, seed, digits=1)
    genuine, impostor = distances[same], distances[~same]
    points = [(float(np.mean(impostor < t)), float(np.mean(genuine >= t))) for t in [*np.unique(distances), 5.0]]
    for (far0, frr0), (far1, frr1) in itertools.pairwise(points):
        if far0 <= frr0 and far1 >= frr1:
            part = (frr0 - far0) / ((far1 - far0) + (frr0 - frr1))
            assert equal_error_rate(np.sort(genuine), np.sort(impostor)) == pytest.approx(far0 + part * (far1 - far0))
            return
    pytest.fail("the ROC curve has no point where FAR = FRR")


def test_separated_pairs_have_no_errors_and_reversed_pairs_have_only_errors() -> None:
    near, far = np.linspace(0.0, 1.0, 7), np.linspace(2.0, 3.0, 5)
    assert (area_under_roc(near, far), equal_error_rate(near, far)) == (1.0, 0.0)
    assert (area_under_roc(far, near), equal_error_rate(far, near)) == (0.0, 1.0)


def test_fuse_views_gives_unit_rows_of_the_sum_and_keeps_zero_rows() -> None:
    plain = np.array([[1.0, 2.0], [3.0, -4.0], [0.0, 0.0]], dtype=np.float32)
    mirrored = np.array([[2.0, 2.0], [3.0, -4.0], [0.0, 0.0]], dtype=np.float32)
    before = plain.copy()
    fused = fuse_views(plain, mirrored)
    assert fused.dtype == np.float64
    np.testing.assert_allclose(fused, [[0.6, 0.8], [0.6, -0.8], [0.0, 0.0]])
    np.testing.assert_array_equal(plain, before)
    result = PairSet("", [], np.arange(10) % 3, np.arange(10) % 2, np.arange(10) < 5).verify_views(plain, mirrored)
    assert result.xnorm == pytest.approx((5**0.5 + 5 + 8**0.5 + 5) / 6)


def test_verify_hands_over_pairs_counts_and_every_number():
    a, b, same = _pairs_by_formula(60, 8, 2.0)
    result = verify(a, b, same.astype(np.int64), num_folds=6, xnorm=21.5)
    assert (result.num_genuine, result.num_impostor, result.xnorm) == (int(same.sum()), int((~same).sum()), 21.5)
    assert result.accuracy_per_fold.shape == result.threshold_per_fold.shape == (6,) and result.same.dtype == bool
    np.testing.assert_array_equal(result.distances, pair_distances(a, b))
    assert result.auc == pytest.approx(roc_auc_score(same, -result.distances), abs=1e-12)
    assert result.exact_accuracy == np.mean(exact_fold_accuracy(result.distances, same, np.arange(60) // 10)[0])
    genuine, impostor = np.sort(result.distances[same]), np.sort(result.distances[~same])
    assert result.min_dcf == minimum_dcf(genuine, impostor)
    intervals, right = result.intervals(), genuine[:, None] < impostor  # DeLong's variance, from all comparisons
    parts = [np.var(right.mean(axis=axis), ddof=1) / right.shape[1 - axis] for axis in (0, 1)]
    half = 1.96 * sum(parts) ** 0.5
    assert intervals["auc"] == pytest.approx((result.auc - half, result.auc + half))
    assert intervals["eer"][0] < result.eer < intervals["eer"][1]


@pytest.mark.numeric
def test_an_image_of_many_pairs_needs_one_row_and_the_numbers_are_those_of_a_row_for_each_pair():
    views = np.random.default_rng(0).normal(size=(2, 30, 512))
    pairs = PairSet("", [], np.arange(4000) % 30, np.arange(4000) % 7, np.arange(4000) % 3 < 2)
    tracemalloc.start()
    result = pairs.verify_views(*views)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 4000 * 512 * 8 / 2  # bytes
    alone, fused = (pair_distances(rows[pairs.first], rows[pairs.second]) for rows in map(_unit, (views[0], views.sum(axis=0))))
    assert result.plain_accuracy == np.mean(fold_accuracy(alone, pairs.same)[0])
    np.testing.assert_allclose(result.distances, fused, atol=1e-12)


@pytest.mark.parametrize("kind", [True, False])
def test_set_with_one_kind_of_pairs_has_accuracy_and_no_rates(kind: bool) -> None:
    a = _pairs_by_formula(40, 8, 0.01)[0]
    result = verify(a, a if kind else -a, np.full(40, kind), xnorm=1.0)
    assert result.accuracy == 1.0
    assert (result.auc, result.eer) == (None, None)
    assert set(result.tar_at_far.values()) == {None}


def test_fewer_pairs_than_folds_are_refused() -> None:
    a, b, same = _pairs_by_formula(9, 4, 0.1)
    with pytest.raises(ValueError, match=r"num_folds must be from 2 to the number of pairs, got 10 folds for 9 pairs"):
        verify(a, b, same, xnorm=1.0)
    with pytest.raises(ValueError, match="got 1 folds for 9 pairs"):
        verify(a, b, same, num_folds=1, xnorm=1.0)


def test_nan_and_infinity_are_refused_with_their_number() -> None:
    a, b, same = _pairs_by_formula(20, 4, 0.1)
    a[3, 1] = np.nan
    b[[3, 7]] = np.inf
    with pytest.raises(ValueError, match="3 of 40 embeddings hold NaN or infinity"):
        verify(a, b, same, xnorm=1.0)


def test_raw_embeddings_are_refused() -> None:
    a, b, same = _pairs_by_formula(20, 4, 0.1)
    with pytest.raises(ValueError, match=r"20 of 40 embeddings are not of unit length .* fuse_views"):
        verify(21.0 * a, b, same, xnorm=1.0)


def test_arrays_that_do_not_match_are_refused() -> None:
    a, b, same = _pairs_by_formula(20, 4, 0.1)
    with pytest.raises(ValueError, match=r"got \(20, 4\), \(20, 4\) and \(19,\)"):
        verify(a, b, same[:-1], xnorm=1.0)
    with pytest.raises(ValueError, match=r"got \(20, 4\), \(19, 4\) and \(20,\)"):
        verify(a, b[:-1], same, xnorm=1.0)


def _distances(seed: int, num_genuine: int = 300, num_impostor: int = 700, digits: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted distances; rounding to two digits makes many ties."""
    rng = np.random.default_rng(seed)
    genuine, impostor = rng.normal(1.0, 0.4, num_genuine), rng.normal(1.9, 0.3, num_impostor)
    return tuple(np.sort(values.clip(0, 4).round(digits)) for values in (genuine, impostor))


@pytest.mark.parametrize("seed", range(5))
def test_points_equal_a_search_over_scikit_learns_roc(seed: int):
    genuine, impostor = _distances(seed)
    labels = np.repeat([1, 0], [len(genuine), len(impostor)])
    far, tar, _ = roc_curve(labels, -np.concatenate([genuine, impostor]), drop_intermediate=False)
    for point in operating_points(genuine, impostor, ("1", "0.5", "1e-1", "2e-2", "1e-2")):
        allowed = far <= float(point.target) + 1e-12
        assert point.far == pytest.approx(far[allowed].max()) and point.tar == pytest.approx(tar[allowed].max())
        assert point.num_accepted == round(point.far * 700)
        # the threshold does what it says, also as a cosine
        assert np.mean(impostor < point.threshold) == point.far and np.mean(genuine < point.threshold) == point.tar
        assert np.mean(1 - genuine / 2 > point.cosine) == pytest.approx(point.tar)


def test_what_too_few_impostors_cannot_carry_is_not_measurable():
    genuine, impostor = _distances(0)
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
    genuine, impostor = _distances(3)
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
    distances, same = _random_distances(120, seed, digits)
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
    genuine, impostor = _distances(99, 200_000, 200_000, digits=9)
    truth = operating_points(genuine, impostor, ("1e-1",))[0].tar
    hits = 0
    for seed in range(40):
        interval = bootstrap_intervals(*_distances(seed, 200, 400, digits=9), 0.9, ("1e-1", "1e-6"), samples=200, seed=seed)
        assert "1e-6" not in interval
        hits += interval["1e-1"][0] <= truth <= interval["1e-1"][1]
    assert hits >= 33


@pytest.mark.parametrize("digits", [9, 1])  # 1: with ties
def test_intervals_are_those_of_pairs_drawn_again_one_by_one(digits: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verification, "_interval", lambda values: values)
    kinds, rng, targets = _distances(3, 60, 35, digits=digits), np.random.default_rng(0), ("1e-1", "5e-1")
    found = bootstrap_intervals(*kinds, 0.9, targets, samples=2000)
    drawn: dict[str, list] = {}
    for _ in range(2000):
        sample = [np.sort(rng.choice(kind, kind.size)) for kind in kinds]
        for point in operating_points(*sample, targets):
            drawn.setdefault(point.target, []).append(point.tar)
        drawn.setdefault("eer", []).append(equal_error_rate(*sample))
    assert found.keys() - drawn.keys() == {"accuracy"}
    for name, values in drawn.items():  # as far apart as two draws from one distribution are in one of 10,000 tests
        assert ks_2samp(*np.round([found[name], values], 9)).pvalue > 1e-4, name


def test_the_interval_of_accuracy_is_that_of_a_share():
    low, high = bootstrap_intervals(*_distances(0, 3000, 3000), 0.95, ())["accuracy"]
    width = 1.96 * np.sqrt(0.95 * 0.05 / 6000)
    assert low == pytest.approx(0.95 - width, abs=1e-3) and high == pytest.approx(0.95 + width, abs=1e-3)
