"""The expected loss of an untrained network. Comparing with it finds a wrong number of classes, scale or margin.

The embeddings and centres of the first step are independent directions in D dimensions. So a cosine is approximately normal
with standard deviation 1 / sqrt(D), and the loss of one image is log sum exp(logits) - target logit. For many classes the first
term is about ln(classes) + s^2 / (2 D) if s^2 / D <= 2 ln(classes) (Derrida, "Random-energy model", 1981). For up to 200,000
classes it is sampled, which is always right.

The tolerance is three standard deviations of the mean over the batch. The target cosines of images of different people are
independent, so their contribution falls with the batch size. That of the first term does not fall: an untrained network gives
all images nearly the same embedding, so all of them have nearly the same sum.
"""

import copy
import math
from typing import NamedTuple

import torch

from .margin import Margin

_LEAST_TOLERANCE = 0.3  # for effects outside the model: embeddings that are not quite normal, augmentation, dropout
_DRAWS = 64
_DRAWN_CLASSES = 200_000  # at most; 64 x 200,000 numbers are 51 MB


class FirstLoss(NamedTuple):
    """The expected loss of the first step, and its tolerance."""

    expected: float
    tolerance: float


def expected_first_loss(margin: Margin, num_active: int, embedding_size: int, num_people: int) -> FirstLoss:
    """Return the expected mean loss of the first step.

    Args:
        num_active: classes in the softmax, over all ranks.
        num_people: different classes among the images of the batch.
    """
    margin = copy.deepcopy(margin).cpu()  # its statistics may be on the GPU
    generator = torch.Generator().manual_seed(0)
    deviation = 1.0 / math.sqrt(embedding_size)
    norm = torch.full((4096,), math.sqrt(embedding_size))
    cosines = torch.randn(4096, generator=generator) * deviation
    state = margin.observe(cosines, norm)
    targets = margin.target(cosines, norm, state)
    at_zero = float(margin.target(torch.zeros(1), norm[:1], state)[0])
    variance = (margin.scale * deviation) ** 2
    if num_active > _DRAWN_CLASSES and variance <= math.log(num_active):
        mean = math.log(num_active) + variance / 2
        spread = math.sqrt(math.expm1(variance) / num_active)
    else:
        drawn = max(1, min(num_active, _DRAWN_CLASSES) - 1)
        logits = torch.randn(_DRAWS, drawn, generator=generator) * (margin.scale * deviation)
        sums = torch.logaddexp(torch.logsumexp(logits, dim=1), torch.tensor(at_zero))
        mean, spread = float(sums.mean()), float(sums.std())
    spread = math.hypot(spread, float(targets.std()) / math.sqrt(max(1, num_people)))
    return FirstLoss(mean - float(targets.mean()), max(_LEAST_TOLERANCE, 3 * spread))


def judge_first_loss(loss: float, margin: Margin, num_active: int, embedding_size: int, num_people: int) -> tuple[str, bool]:
    """Return a line that compares the first loss with that of an untrained network, and whether they agree."""
    expected, tolerance = expected_first_loss(margin, num_active, embedding_size, num_people)
    text = f"first loss {loss:.3f}, expected {expected:.2f} +- {tolerance:.2f} for {num_active} active classes"
    if abs(loss - expected) <= tolerance:
        return text, True
    return f"{text}: check labels, number of classes and loss.scale", False
