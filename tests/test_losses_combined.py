"""The combined margin against its equation, row by row, and reduced to the margins it contains."""

import math

import pytest
import torch

from losses.arcface import ArcFace
from losses.combined import Combined
from losses.cosface import CosFace

pytestmark = pytest.mark.numeric

COSINE = torch.linspace(-1.0, 1.0, 401, dtype=torch.float64)
NORM = torch.ones_like(COSINE)


def _reference(cosine: float, m1: float, m2: float, m3: float) -> float:
    """Return psi(m1 theta + m2) - m3, with psi by its definition on each interval [k pi, (k + 1) pi]."""
    x, k = m1 * math.acos(cosine) + m2, 0
    while x > (k + 1) * math.pi:
        k += 1
    return (-1) ** k * math.cos(x) - 2 * k - m3


@pytest.mark.parametrize("m", [(1.0, 0.5, 0.0), (1.0, 0.3, 0.2), (1.35, 0.0, 0.0), (4.0, 0.0, 0.0), (1.7, 0.3, 0.1)])
def test_target_matches_its_equation_row_by_row(m: tuple[float, float, float]) -> None:
    expected = torch.tensor([64.0 * _reference(c, *m) for c in COSINE.tolist()], dtype=torch.float64)
    torch.testing.assert_close(Combined(64.0, *m).target(COSINE, NORM), expected)


@pytest.mark.parametrize("margin", [0.0, 0.3, 0.5])
def test_m2_alone_is_arcface_up_to_theta_plus_m_equal_pi(margin: float) -> None:
    within = COSINE[COSINE.acos() + margin <= math.pi].requires_grad_()
    logits = [
        loss.target(within, torch.ones_like(within)) for loss in (Combined(64.0, 1.0, margin, 0.0), ArcFace(64.0, margin))
    ]
    torch.testing.assert_close(logits[0], logits[1])
    slopes = [torch.autograd.grad(value.sum(), within)[0] for value in logits]
    torch.testing.assert_close(slopes[0], slopes[1])


def test_m3_alone_is_cosface() -> None:
    torch.testing.assert_close(Combined(64.0, 1.0, 0.0, 0.4).target(COSINE, NORM), CosFace(64.0, 0.4).target(COSINE, NORM))


@pytest.mark.parametrize("m", [(1.0, 0.5, 0.0), (1.35, 0.0, 0.0), (4.0, 0.0, 0.0), (2.5, 1.0, 0.3)])
def test_target_is_continuous_and_falls_with_the_angle(m: tuple[float, float, float]) -> None:
    theta = torch.linspace(0.0, math.pi, 10001, dtype=torch.float64)
    logits = Combined(1.0, *m).target(theta.cos(), torch.ones_like(theta))
    steps = logits.diff()
    assert (steps <= 1e-9).all()  # flat, to rounding, where m1 theta + m2 passes a multiple of pi
    assert steps.abs().max() <= m[0] * (theta[1] - theta[0]) * (1 + 1e-6)  # |d psi / d theta| is at most m1


@pytest.mark.parametrize("m", [(1.35, 0.0, 0.0), (4.0, 0.0, 0.0), (2.5, 1.0, 0.3)])
def test_slope_equals_finite_differences_away_from_the_joints(m: tuple[float, float, float]) -> None:
    theta = torch.linspace(0.05, 3.09, 500, dtype=torch.float64)
    phase = (m[0] * theta + m[1]).remainder(math.pi)
    cosine = theta[(phase > 0.02) & (phase < math.pi - 0.02)].cos().requires_grad_()
    margin, step, norm = Combined(1.0, *m), 1e-6, torch.ones(1)
    (slope,) = torch.autograd.grad(margin.target(cosine, norm).sum(), cosine)
    expected = (margin.target(cosine + step, norm) - margin.target(cosine - step, norm)) / (2 * step)
    torch.testing.assert_close(slope, expected.detach(), rtol=1e-5, atol=1e-6)  # truncation; rounding: 2^-53 / step = 1e-10
