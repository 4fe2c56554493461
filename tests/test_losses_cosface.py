"""CosFace against its equation, row by row."""

import pytest
import torch

from losses.cosface import CosFace

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(("scale", "margin"), [(64.0, 0.4), (30.0, 0.35), (64.0, 0.0)])
def test_target_matches_eq_4_row_by_row(scale: float, margin: float) -> None:
    cosine = torch.tensor([-1.0, -0.3, 0.0, 0.99], dtype=torch.float64)
    expected = torch.tensor([scale * (c - margin) for c in cosine.tolist()], dtype=torch.float64)
    torch.testing.assert_close(CosFace(scale, margin).target(cosine, norm=torch.ones(4)), expected)


def test_both_gradients_are_the_scale() -> None:
    for gradient in ("exact", "straight_through"):
        cosine = torch.tensor([-1.0, -0.3, 0.0, 1.0 + 2.4e-7], requires_grad=True)
        CosFace(gradient=gradient).target(cosine, torch.ones(4)).sum().backward()
        assert cosine.grad is not None
        assert cosine.grad.tolist() == [64.0] * 4
