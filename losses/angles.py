"""Margins on the angle as functions of the cosine: values and derivatives, computed without autograd.

Autograd through acos or a square root gives infinity at |cosine| = 1, and NaN even in a branch that torch.where does not
take. Here derivatives with respect to the angle are evaluated off the poles, so all results are finite.
Shapes: B = samples, the global batch.
"""

import math

import torch
from torch import Tensor

from .negatives import POLE_EPS

_SIN_AT_POLES = math.sqrt(POLE_EPS * (2.0 - POLE_EPS))  # of the angles that off_the_poles returns there


def at_least_float32(cosine: Tensor) -> Tensor:
    """Return cosine in fp32 or better, because a step of fp16 near 1, 2^-11, is 0.03 in the logit."""
    return cosine.to(torch.promote_types(cosine.dtype, torch.float32))


def off_the_poles(cosine: Tensor) -> Tensor:
    """Return cosine, kept far enough from +1 and -1 that derivatives of the angle stay moderate."""
    return cosine.clamp(-1.0 + POLE_EPS, 1.0 - POLE_EPS)


def sin_of(cosine: Tensor) -> Tensor:
    """Return the (B,) sines of the angles with these cosines (B,), all in [-1, 1]."""
    return ((1.0 - cosine) * (1.0 + cosine)).sqrt()


def _cos_and_sin(margin: float | Tensor) -> tuple[float | Tensor, float | Tensor]:
    if isinstance(margin, Tensor):
        return margin.cos(), margin.sin()
    return math.cos(margin), math.sin(margin)


@torch.no_grad()
def bare_cos_of_sum(cosine: Tensor, margin: float) -> Tensor:
    """Return cos(theta + m), (B,), which rises again where theta + m exceeds pi. Thresholds of hard negatives are so."""
    cos_m, sin_m = _cos_and_sin(margin)
    c = at_least_float32(cosine).clamp(-1.0, 1.0)
    return c * cos_m - sin_of(c) * sin_m


@torch.no_grad()
def cos_of_sum(cosine: Tensor, margin: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return cos(theta + m), (B,), and its derivative with respect to cos theta, (B,).

    Where theta + m exceeds pi, the cosine would rise again. There the value is cos theta - m sin m, which continues to fall,
    as in the first code of ArcFace's authors. Where theta + m is below 0, as it can be for a negative m, the value is 1.

    Args:
        cosine: (B,) of theta, fp32 or fp64; rounding may put it beyond [-1, 1].
        margin: m in [0, pi], or (B,) of [-pi / 2, pi].
    """
    cos_m, sin_m = _cos_and_sin(margin)
    c = cosine.clamp(-1.0, 1.0)
    within = c >= -cos_m  # theta + m <= pi
    if isinstance(margin, Tensor):
        within = within | (margin < 0)
    sin = sin_of(c)
    value = torch.where(within, c * cos_m - sin * sin_m, c - margin * sin_m)
    # d cos(theta + m) / d cos theta = sin(theta + m) / sin theta; beyond pi the derivative is 1.
    derivative = torch.where(within, cos_m + sin_m * off_the_poles(c) / sin.clamp_min(_SIN_AT_POLES), 1.0)
    if isinstance(margin, Tensor):
        below = (margin < 0) & (c > cos_m)  # theta + m < 0
        value, derivative = value.masked_fill(below, 1.0), derivative.masked_fill(below, 0.0)
    return value, derivative


@torch.no_grad()
def psi(cosine: Tensor, factor: float, margin: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return psi(x) for x = factor theta + m, (B,), and its derivative with respect to cos theta, (B,).

    psi(x) = (-1)^k cos(x) - 2k with k = floor(x / pi) equals cos(x) up to pi, is continuous, and never rises: Liu et al.,
    "SphereFace", CVPR 2017, https://arxiv.org/abs/1704.08063, Section 3.3.

    Args:
        cosine: (B,) of theta, fp32 or fp64; rounding may put it beyond [-1, 1].
        margin: m.
    """
    x = factor * cosine.clamp(-1.0, 1.0).acos() + margin
    k = (x / math.pi).floor()
    value = (1.0 - 2.0 * (k % 2)) * x.cos() - 2.0 * k
    # d psi / d cos theta = factor (-1)^k sin(x) / sin theta, and (-1)^k sin(x) = |sin(x)|.
    theta = off_the_poles(cosine).acos()
    return value, factor * (factor * theta + margin).sin().abs() / theta.sin()
