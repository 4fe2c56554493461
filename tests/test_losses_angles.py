"""Margins on the angle against their formulas, one sample at a time, with derivatives from finite differences."""

import math

import loss_references
import pytest
import torch
from rounding import FP32_UNIT

from losses.angles import bare_cos_of_sum, cos_of_sum, off_the_poles, psi

pytestmark = pytest.mark.numeric

THETA = torch.linspace(0.02, 3.12, 156, dtype=torch.float64)


@pytest.mark.parametrize("margin", [-1.5, -0.4, -0.05, 0.0, 0.3, 1.5])
def test_cosine_of_a_sum_continues_beyond_pi_and_stops_below_zero(margin: float) -> None:
    margins = torch.full_like(THETA, margin)
    value, derivative = cos_of_sum(THETA.cos(), margins)
    expected = torch.stack([loss_references.cos_of_sum(c, margin) for c in THETA.cos()])
    torch.testing.assert_close(value, expected)
    step = 1e-6
    upper, lower = (cos_of_sum(THETA.cos() + shift, margins)[0] for shift in (step, -step))
    smooth = ((THETA + margin).abs() > 1e-3) & ((THETA + margin - math.pi).abs() > 1e-3)
    torch.testing.assert_close(derivative[smooth], ((upper - lower) / (2 * step))[smooth], rtol=1e-5, atol=1e-5)
    if margin >= 0:
        for one, other in zip(cos_of_sum(THETA.cos(), margin), (value, derivative), strict=True):
            assert torch.equal(one, other)
    else:
        assert (derivative[THETA + margin < 0] == 0).all() and (derivative[THETA + margin > 1e-3] > 0).all()


def test_bare_cosine_of_a_sum_rises_again_beyond_pi_and_is_computed_in_fp32() -> None:
    torch.testing.assert_close(bare_cos_of_sum(THETA.cos(), 0.5), (THETA + 0.5).cos())
    half = THETA.cos().half()
    torch.testing.assert_close(bare_cos_of_sum(half, 0.5), bare_cos_of_sum(half.float(), 0.5), rtol=0.0, atol=0.0)
    assert bare_cos_of_sum(torch.tensor([1.0 + 2.4e-7, -1.0 - 2.4e-7]), 0.5).isfinite().all()


@pytest.mark.parametrize(("factor", "margin"), [(1.0, 0.0), (1.35, 0.2), (4.0, 0.0), (10.0, 0.0)])
def test_psi_never_rises(factor: float, margin: float) -> None:
    value, derivative = psi(THETA.cos(), factor, margin)
    expected = []
    for theta in THETA.tolist():
        k = math.floor((factor * theta + margin) / math.pi)
        expected.append((-1) ** k * math.cos(factor * theta + margin) - 2 * k)
    torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64))
    assert (value.diff() < 0).all() and (derivative >= 0).all()


def test_poles_are_kept_away_by_a_fixed_distance() -> None:
    kept = off_the_poles(torch.tensor([-2.0, -1.0, 0.3, 1.0]))
    torch.testing.assert_close(kept, torch.tensor([-1 + 1e-5, -1 + 1e-5, 0.3, 1 - 1e-5]), rtol=FP32_UNIT, atol=0.0)
