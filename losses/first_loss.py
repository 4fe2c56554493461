"""The expected loss of an untrained network, by sampling. Comparing with it finds wrong labels, classes, scale or margin.

In the first step embeddings and centres are independent directions in D dimensions, so a cosine is approximately normal with
standard deviation 1 / sqrt(D). The margin itself computes the losses of samples with such cosines.
Shapes: R = samples drawn, n = negatives drawn for each.
"""

import copy
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .margin import Margin

_LEAST_TOLERANCE = 0.3  # for effects outside the model: embeddings that are not quite normal, augmentation, dropout
_SAMPLES, _NEAREST, _OTHERS = 128, 4096, 4096


class FirstLoss(NamedTuple):
    """The expected loss of the first step, and its tolerance."""

    expected: float
    tolerance: float


class FirstStep(NamedTuple):
    """What the first loss depends on, beside the margin."""

    num_active: int  # classes in the loss, over all ranks
    embedding_size: int
    num_people: int  # different classes among the images of the batch
    num_counted: int | None = None  # classes that they stand for (head.logit_correction); None = themselves
    prepared: tuple[int, int] | None = None  # with what the head prepared the margin; None = the margin is as it should be
    focal: float = 0.0  # gamma
    label_smoothing: float = 0.0
    sub_centers: int = 1  # centres of each class, of which the nearest counts
    entropy_weights: bool = False


def _cosines(above: Tensor, step: FirstStep) -> Tensor:
    """Return the cosines that are exceeded with the probabilities `above` (float64): of the nearest of the sub-centers."""
    normal = -torch.special.ndtri(-torch.expm1(torch.log1p(-above) / step.sub_centers))
    return (normal / math.sqrt(step.embedding_size)).float()


def _draw_negatives(step: FirstStep, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return cosines (n, R) of negatives, and how many classes each stands for (n, 1).

    Few of many classes may dominate a sum of exponentials. So of many, the nearest are drawn as the order statistics that they
    are, one by one, and the others stand for equal parts of the rest.
    """
    count = max(1, step.num_active - 1)
    weight = max(1, (step.num_counted or step.num_active) - 1) / count
    if count <= _NEAREST + _OTHERS:
        above = torch.rand(count, _SAMPLES, dtype=torch.float64, generator=generator)
        return _cosines(above, step), torch.full((count, 1), weight)
    gaps = torch.empty(_NEAREST, _SAMPLES, dtype=torch.float64).exponential_(generator=generator)
    nearest = gaps.cumsum(0) / count
    places = torch.rand(_OTHERS, _SAMPLES, dtype=torch.float64, generator=generator) + torch.arange(_OTHERS)[:, None]
    others = nearest[-1] + (1.0 - nearest[-1]) * places / _OTHERS
    weights = torch.cat([torch.ones(_NEAREST, 1), torch.full((_OTHERS, 1), (count - _NEAREST) / _OTHERS)])
    return _cosines(torch.cat([nearest, others]), step), weight * weights


def _losses(margin: Margin, step: FirstStep, own: Tensor, cosine: Tensor, weights: Tensor, length: float) -> Tensor:
    """Return the losses (R,) of samples of this length, from target cosines (R,) and those of negatives (n, R)."""
    norm = torch.full_like(own, length)
    state = margin.observe(own, norm)
    negatives = margin.negatives(own, norm, state)
    logits, _ = negatives.logits(cosine)
    hard = weights * (cosine > negatives.coefficients[4])
    log_z = (logits + weights.log()).logsumexp(0)
    state = margin.complete(state, log_z, torch.stack([hard.sum(0), (hard * cosine).sum(0)]))
    target = margin.target(own, norm, state)
    if margin.link == "softmax":
        losses = torch.logaddexp(log_z, target) - target
        focus = (-torch.expm1(-losses)) ** step.focal
        mean_logit = (weights * logits).sum(0) / weights.sum()
        losses = focus * (losses + step.label_smoothing * (target - mean_logit))
    else:
        losses = margin.target_weight * F.softplus(-target) + margin.negative_weight * (weights * F.softplus(logits)).sum(0)
    penalty = margin.penalty(norm)
    return losses if penalty is None else losses + penalty


@torch.no_grad()
def expected_first_loss(margin: Margin, step: FirstStep) -> FirstLoss:
    """Return the expected mean loss of the first step. Draws no number of a global generator.

    The tolerance is three standard deviations of the mean over the batch. What comes of the target cosines of different people
    falls with their number. What comes of the negatives does not: an untrained network gives all images nearly the same
    embedding. Embeddings behind a batch normalisation have lengths near sqrt(D); if the loss depends on them, the tolerance
    covers sqrt(D / 2) to sqrt(2 D).
    """
    margin = copy.deepcopy(margin).cpu()  # its statistics may be on the GPU
    if step.prepared is not None:  # what is trained has moved in the step whose loss is judged
        margin.prepare(*step.prepared)
        margin.at_step(1)
    own = _cosines((torch.arange(_SAMPLES, dtype=torch.float64) + 0.5) / _SAMPLES, step)
    cosine, weights = _draw_negatives(step, torch.Generator().manual_seed(0))
    length = math.sqrt(step.embedding_size)
    losses = _losses(margin, step, own, cosine, weights, length)
    expected = float(losses.mean())
    by_negatives = _losses(margin, step, own.mean().expand_as(own), cosine, weights, length).std()
    by_own = _losses(margin, step, own, cosine[:, :1].expand_as(cosine), weights, length).std()
    tolerance = 3.0 * math.hypot(float(by_negatives), float(by_own) / math.sqrt(max(1, step.num_people)))
    others = [float(_losses(margin, step, own, cosine, weights, length * factor).mean()) for factor in (0.5**0.5, 2**0.5)]
    change = max(abs(other - expected) for other in others)
    # of all classes, whose numbers are equal in the first step: that of a single one
    numbers = margin.class_numbers(step.embedding_size).items()
    of_class = margin.class_penalty({name: torch.full((1, *number.shape), number.first) for name, number in numbers}, 1)
    expected += 0.0 if of_class is None else float(of_class[0])
    weight = 1.47 if step.entropy_weights else 1.0  # of each image, where all entropies are equal
    return FirstLoss(weight * expected, weight**2 * (max(_LEAST_TOLERANCE, tolerance) + change))


def judge_first_loss(loss: float, margin: Margin, step: FirstStep) -> tuple[str, bool]:
    """Return a line that compares the first loss with that of an untrained network, and whether they agree.

    Args:
        margin: in its first step, or, with step.prepared, in any: its first numbers are computed again.
    """
    expected, tolerance = expected_first_loss(margin, step)
    if not (math.isfinite(expected) and math.isfinite(tolerance)):
        name = type(margin).__name__
        return f"first loss {loss:.3f} for {step.num_active} active classes; what to expect of {name} is not known", True
    text = f"first loss {loss:.3f}, expected {expected:.2f} +- {tolerance:.2f} for {step.num_active} active classes"
    if abs(loss - expected) <= tolerance:
        return text, True
    return f"{text}: check labels, number of classes and loss.scale", False
