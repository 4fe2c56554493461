"""How far two right answers may lie apart: bounds from the arithmetic, the same on every processor.

Processors and libraries add in different orders, with and without fused multiply-add. Every operation rounds its result by at
most u = eps / 2 of it. The signs of these errors are as good as random, so a sum of n terms errs by some sqrt(n) u times its
size: by more than 4 sqrt(n) u with probability 2 exp(-8) at most (Higham and Mary, "A New Approach to Probabilistic Rounding
Error Analysis", 2019). Formulas alone are compared in float64, where torch's and pytest's default tolerances (1e-7, 1e-6) are
far above any rounding.
"""

import torch

FP32_UNIT = torch.finfo(torch.float32).eps / 2


def rounding_bound(dtype: torch.dtype, terms: float, size: float = 1.0) -> float:
    """Return how far a sum of `terms` products may lie from the exact one, where their absolute values add up to `size`."""
    return 4 * terms**0.5 * torch.finfo(dtype).eps / 2 * size


def head_bounds(scale: float, dim: int, rows: int) -> tuple[float, float]:
    """Return the bounds of a head's fp32 step: of its loss, absolute, and of its gradients, relative to their norms.

    A logit is `scale` times a cosine, a sum of `dim` products of unit vectors that were rounded, too. The loss is a mean over
    rows, which evens out the rows' own errors. The relative error of exp(logit) is the absolute one of the logit; a norm over
    many of them does not need the factor 4.
    """
    loss = rounding_bound(torch.float32, 1, scale) + rounding_bound(torch.float32, dim / rows, scale)
    return loss, rounding_bound(torch.float32, dim, scale) / 4


def network_bound() -> float:
    """Return the bound of the tests' r18 of width 1/8 in fp32, relative to its largest output.

    It has 18 layers, whose sums have up to 64 x 9 products.
    """
    return rounding_bound(torch.float32, 18 * 576)


def bf16_half_step(largest: float) -> float:
    """Return the largest rounding error of bf16 numbers up to `largest`: half a step of its 8 significant bits."""
    return 2.0 ** (torch.tensor(largest).log2().floor().item() - 8)
