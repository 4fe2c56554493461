"""What the loss of an untrained network must be: a check that catches wrong labels, class counts and scales at once.

The embeddings and centres of the first step are independent directions in D dimensions, so a cosine is about normal with
deviation 1 / sqrt(D), and the loss is -target(0) + E[log sum exp(s cosine)] over the active classes. For many classes the
expectation is ln(classes) + s^2 / (2 D); that needs s^2 / D <= 2 ln(classes) (Derrida, "Random-energy model", 1981), beyond
which a few largest cosines make the sum, and drawing them is the simplest exact way.
"""

import math

import torch
from torch import Tensor

from .margin import Margin

_TOLERANCE = 0.3
_DRAWS = 64


def expected_first_loss(margin: Margin, num_active: int, embedding_size: int) -> tuple[float, float]:
    """Return (expected loss, tolerance) of the first step with num_active classes in the softmax."""
    zero = torch.zeros(1)
    own = float(margin.target(zero, torch.full((1,), math.sqrt(embedding_size)))[0])
    variance = margin.scale**2 / embedding_size
    if variance <= math.log(max(num_active, 2)):
        return -own + math.log(num_active) + variance / 2, _TOLERANCE
    sums = _draw_sums(margin, min(num_active, 200_000), embedding_size)
    # rows of an untrained network resemble one another, so their mean scatters nearly as one row does
    return float(sums.mean()) - own, _TOLERANCE + float(sums.std())


def judge_first_loss(loss: float, margin: Margin, num_active: int, embedding_size: int) -> tuple[str, bool]:
    """Return a line that compares the first loss with what an untrained network must show, and whether it agrees."""
    expected, tolerance = expected_first_loss(margin, num_active, embedding_size)
    text = f"first loss {loss:.3f}, expected {expected:.2f} +- {tolerance:.2f} for {num_active} active classes"
    if abs(loss - expected) <= tolerance:
        return text, True
    return f"{text}: check labels, number of classes and loss.scale", False


def _draw_sums(margin: Margin, num_active: int, embedding_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    cosine = torch.randn(_DRAWS, num_active, generator=generator) / math.sqrt(embedding_size)
    return torch.logsumexp(margin.scale * cosine, dim=1)
