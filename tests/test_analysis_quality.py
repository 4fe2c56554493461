"""Error versus discard curves: against loops over all pairs and every order of discarding, and planted truth."""

import itertools
import math

import numpy as np
import pytest
from test_analysis_clustering import _faces

import analysis.all_pairs
from analysis.quality import WITHIN, Discard, error_versus_discard, ideal


def slow_curve(
    vectors: np.ndarray, labels: np.ndarray, threshold: float, values: np.ndarray, lower: bool
) -> list[tuple[float, float, float, float]]:
    """Return (limit, share of pictures, share of comparisons, FNMR) of each step, by looking at every pair again."""
    known = [row for row in range(len(values)) if not math.isnan(values[row])]
    exact, steps, total = vectors.astype(float), [], 0
    for limit in sorted({values[row] for row in known}, reverse=lower):
        kept = {row for row in known if (values[row] <= limit if lower else values[row] >= limit)}
        wrong = []
        for a, b in itertools.combinations(range(len(labels)), 2):
            if labels[a] == labels[b] and a in kept and b in kept:
                cosine = float(exact[a] @ exact[b])
                assert abs(cosine - threshold) > 1e-6  # float32 must not decide it
                wrong.append(cosine <= threshold)
        total = total or len(wrong)
        if wrong:
            steps.append((limit, 1 - len(kept) / len(known), 1 - len(wrong) / total, sum(wrong) / len(wrong)))
    return steps


@pytest.mark.parametrize("rows", [512, 2])
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("levels", [4, 1000])
def test_a_curve_is_that_of_a_loop_over_all_pairs(monkeypatch: pytest.MonkeyPatch, levels: int, lower: bool, rows: int):
    monkeypatch.setattr(analysis.all_pairs, "_PERSON_ROWS", rows)
    rng = np.random.default_rng(levels)
    vectors, labels = _faces(11, 5, 1.0, levels, dim=8)
    labels[:2] = 11, 12  # alone
    values = rng.integers(0, levels, 55).astype(float)  # of 4 levels, most are equal
    values[rng.choice(55, 7, replace=False)] = np.nan
    other = rng.random(55)
    measures = {"other": other, "one": values}
    found = error_versus_discard(vectors, labels, 0.4, measures, ["one"] if lower else [])
    assert list(found) == ["other", "one"]
    expected = slow_curve(vectors, labels, 0.4, values, lower)
    one = found["one"]
    assert one.known == 48 and 0.1 < one.at(0) < 0.9
    np.testing.assert_allclose(
        np.stack([one.limits, one.pictures / 48, one.shares, one.fnmr], axis=1), np.array(expected), rtol=0, atol=1e-14
    )
    limits, _, _, fnmr = np.array(slow_curve(vectors, labels, 0.4, other, False)).T
    assert found["other"].limits.tolist() == limits.tolist()
    np.testing.assert_allclose(found["other"].fnmr, fnmr, rtol=0, atol=1e-14)
    # the area as a sum of a step function over a fine grid, whose points lie between the steps
    grid = (np.arange(20_000) + 0.5) / 20_000 * WITHIN
    slow = np.mean([[rate for *_, share, rate in expected if share <= at][-1] for at in grid])
    assert one.area() == pytest.approx(slow, abs=len(expected) / 20_000)
    # a gate keeps what its row of the loop says, and the next level would discard more than is allowed
    for share in (0.0, 0.1, 0.3):
        allowed = [step for step in expected if step[1] <= share + 1e-12]
        gate = one.gate(share)
        if len(allowed) == 1:
            assert gate is None
        else:
            assert gate is not None and tuple(gate) == pytest.approx((*allowed[-1][:3], expected[0][3], allowed[-1][3]))
    assert one.gate(0.0) is None and found["other"].gate(0.3) is not None


def test_no_order_of_discarding_is_below_the_ideal_and_the_right_one_reaches_it():
    # people of two pictures; the comparison of each person in `wrong` is a false non-match
    vectors, labels = np.repeat(np.eye(5, dtype=np.float32), 2, axis=0), np.repeat(np.arange(5), 2)
    wrong = [1, 4]
    for person in wrong:
        vectors[2 * person] = -vectors[2 * person]
    for order in itertools.permutations(range(5)):
        values = np.repeat(np.argsort(order), 2).astype(float)
        one = error_versus_discard(vectors, labels, 0.5, {"it": values}, [])["it"]
        assert (one.fnmr >= ideal(2 / 5, one.shares) - 1e-14).all()
        if set(order[:2]) == set(wrong):
            np.testing.assert_allclose(one.fnmr, ideal(2 / 5, one.shares), rtol=0, atol=1e-14)
    for fnmr in (0.0, 0.05, 0.3, 0.999, 1.0):
        one = Discard(np.zeros(1), np.zeros(1, np.int64), np.array([1000]), np.array([round(1000 * fnmr)]), 2000)
        grid = (np.arange(10_000) + 0.5) / 10_000 * WITHIN
        assert one.ideal_area() == pytest.approx(ideal(fnmr, grid).mean(), abs=1e-7)
        assert one.area() == pytest.approx(fnmr) and one.gain() == (pytest.approx(0, abs=1e-12) if 0 < fnmr < 1 else None)


def test_a_planted_measure_is_nearly_ideal_and_a_random_one_gains_nothing():
    rng = np.random.default_rng(2)
    labels = np.repeat(np.arange(3000), 2)
    vectors = np.zeros((6000, 2), dtype=np.float32)
    poor = np.zeros(6000, dtype=bool)
    poor[::2] = rng.random(3000) < 0.15  # the first of two pictures fails its comparison
    vectors[np.arange(6000), poor.astype(int)] = 1
    measures = {"planted": poor + rng.random(6000) / 2, "random": rng.random(6000)}
    found = error_versus_discard(vectors, labels, 0.5, measures, ["planted"])
    rate = poor.sum() / 3000
    # each step of the curve discards one comparison, so it is at most 1 / 3000 of the share behind the ideal one
    gain = found["planted"].gain()
    assert gain is not None and 1 - 1 / 3000 / (rate / 2) < gain <= 1
    # FNMR of the 2400 comparisons that are left differs from that of all by chance, 5 standard errors at most
    assert abs(found["random"].at(WITHIN) - rate) < 5 * math.sqrt(rate * (1 - rate) / 2400)
    assert abs(found["random"].gain() or 0) < 0.25


def test_a_measure_that_no_comparison_has_is_refused():
    vectors, labels = np.eye(3, dtype=np.float32), np.array([0, 0, 1])
    for values in ([np.nan] * 3, [1.0, np.nan, 2.0]):
        with pytest.raises(ValueError, match=r"^it: no two pictures of one person have it$"):
            error_versus_discard(vectors, labels, 0.5, {"it": np.array(values)}, [])
