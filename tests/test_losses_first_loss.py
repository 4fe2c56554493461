"""The loss expected of the first step, against losses of random embeddings and centres."""

import math

import pytest
import torch
import torch.nn.functional as F
from dense_reference import dense_loss

from losses import build_margin
from losses.first_loss import expected_first_loss, judge_first_loss
from losses.margin import Margin


def _arcface(scale: float = 64.0) -> Margin:
    return build_margin("arcface", scale=scale, margin=0.5)


def _first_loss(margin: Margin, num_classes: int, dim: int, batch: int, alike: float, seed: int) -> float:
    """Return a dense first loss; `alike` = 1 gives all images the same embedding, as an untrained network nearly does."""
    generator = torch.Generator().manual_seed(seed)
    centres = F.normalize(torch.randn(num_classes, dim, generator=generator, dtype=torch.float64))
    common, own = (torch.randn(rows, dim, generator=generator, dtype=torch.float64) for rows in (1, batch))
    embeddings = F.normalize(math.sqrt(alike) * common + math.sqrt(1 - alike) * own)
    labels = torch.randperm(num_classes, generator=generator)[:batch]
    return float(dense_loss(margin, embeddings, centres, labels))


@pytest.mark.parametrize("alike", [0.0, 1.0])
@pytest.mark.parametrize(
    ("num_classes", "dim", "batch", "scale"), [(8000, 512, 16, 64), (8000, 512, 256, 64), (100, 64, 64, 16), (2000, 512, 2, 64)]
)
def test_sound_labels_are_found_sound_at_any_batch(num_classes: int, dim: int, batch: int, scale: float, alike: float):
    margin = _arcface(scale)
    losses = [_first_loss(margin, num_classes, dim, batch, alike, seed) for seed in range(20)]
    verdicts = [judge_first_loss(loss, margin, num_classes, dim, batch)[1] for loss in losses]
    assert sum(verdicts) >= 19  # three standard deviations: one in 370 is beyond them
    expected, tolerance = expected_first_loss(margin, num_classes, dim, batch)
    standard_error = tolerance / 3 / math.sqrt(len(losses))
    assert abs(sum(losses) / len(losses) - expected) < 4 * standard_error


def test_a_wrong_scale_margin_or_number_of_classes_is_found():
    margin = _arcface()
    for loss in (
        _first_loss(_arcface(32.0), 8000, 512, 256, 1.0, 0),
        _first_loss(build_margin("cosface", scale=64.0, margin=0.35), 8000, 512, 256, 1.0, 0),
        _first_loss(margin, 1000, 512, 256, 1.0, 0),
    ):
        text, sound = judge_first_loss(loss, margin, 8000, 512, 256)
        assert not sound and text.endswith("check labels, number of classes and loss.scale")


def test_millions_of_classes_take_the_formula_and_agree_with_what_is_drawn():
    """Just below and above the number from which nothing is drawn."""
    low, high = (expected_first_loss(_arcface(), classes, 512, 1024) for classes in (200_000, 200_001))
    assert abs(low.expected - high.expected) < low.tolerance / 3
    assert low.tolerance == pytest.approx(high.tolerance, rel=0.5)
    assert expected_first_loss(_arcface(), 10_000_000, 512, 1024).tolerance == 0.3
