"""ArcFace against its equation, row by row."""

import math

import pytest
import torch

from losses.arcface import ArcFace

pytestmark = pytest.mark.numeric


def _reference(cosine: float, scale: float, margin: float) -> float:
    """Return Eq. 3, and the authors' continuation where theta + m > pi."""
    theta = math.acos(cosine)
    if theta + margin <= math.pi:
        return scale * math.cos(theta + margin)
    return scale * (cosine - margin * math.sin(margin))


@pytest.mark.parametrize("margin", [0.0, 0.3, 0.5, 1.0, math.pi / 2])
def test_target_matches_eq_3_row_by_row(margin: float) -> None:
    cosine = torch.linspace(-1.0, 1.0, 201, dtype=torch.float64)
    expected = torch.tensor([_reference(c, 64.0, margin) for c in cosine.tolist()], dtype=torch.float64)
    torch.testing.assert_close(ArcFace(64.0, margin).target(cosine, torch.ones_like(cosine)), expected)


def test_logit_falls_on_where_the_cosine_of_the_sum_would_rise() -> None:
    theta = torch.tensor([math.pi - 0.51, math.pi - 0.49, math.pi - 0.1, math.pi], dtype=torch.float64)
    logits = ArcFace(scale=1.0, margin=0.5).target(theta.cos(), torch.ones_like(theta))
    assert logits[0] > -1.0
    assert (logits[1:] < -1.0).all()
    assert (logits.diff() < 0).all()
    torch.testing.assert_close(logits[3].item(), -1.0 - 0.5 * math.sin(0.5))


def test_exact_slope_is_the_ratio_of_sines() -> None:
    cosine = torch.tensor([0.9, 0.5, 0.0, -0.5], dtype=torch.float64, requires_grad=True)
    ArcFace(scale=1.0, margin=0.5).target(cosine, torch.ones(4)).sum().backward()
    assert cosine.grad is not None
    expected = [math.sin(math.acos(c) + 0.5) / math.sin(math.acos(c)) for c in cosine.tolist()]
    torch.testing.assert_close(cosine.grad, torch.tensor(expected, dtype=torch.float64))
    assert [round(value, 3) for value in expected] == [1.867, 1.154, 0.878, 0.601]


def test_gradient_at_the_embedding_is_finite_when_it_equals_its_centre() -> None:
    centre = torch.nn.functional.normalize(torch.ones(64, 512) + torch.arange(64).view(-1, 1), dim=1)
    embedding = (3.0 * centre).requires_grad_()
    cosine = (torch.nn.functional.normalize(embedding, dim=1) * centre).sum(dim=1)
    ArcFace().target(cosine, embedding.norm(dim=1)).sum().backward()
    assert embedding.grad is not None
    assert torch.isfinite(embedding.grad).all()
