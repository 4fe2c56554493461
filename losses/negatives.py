"""How the logits of the negatives follow from their cosines: as data, so that a kernel computes them in one sweep.

A negative is a class that is not the sample's own. The functions of the cosine c differ in few numbers, which may depend on the
sample, and are constants in the derivative:

    linear         s c + o
    hard           s (q c^2 + p c + k) + o where c > h, otherwise s c + o     (CurricularFace, MV-Softmax, NPCFace)
    arcneg         s (w c + w - 1) with w = p exp(-(c - h)^2 / k), which has no derivative               (ArcNegFace)
    circle         s [c + k]_+ (c - k); the bracket has no derivative                                   (Circle loss)
    angle          s (pi - 2 theta) / pi                                                                (Li-ArcFace)
    angle_squared  s (2 pi - theta)^2                                                                      (QAMFace)
    power          s (2 ((c + 1) / 2)^p - 1 + k) + o                                                   (SphereFace2)

with s = scale, q = quadratic, p = slope, k = constant, h = threshold, o = offset. A new function needs a name here and in the
kernels of partial_fc, which tests compare with `logits`.
Shapes: B = samples, the global batch; c = classes of one chunk of the head.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("linear", "hard", "arcneg", "circle", "angle", "angle_squared", "power")
COEFFICIENTS = ("scale", "quadratic", "slope", "constant", "threshold", "offset")

# Closer to |cosine| = 1, derivatives with respect to the angle are evaluated at 1 - this value, where d theta / d cosine is
# 224. At 1 it is infinite. The embedding's gradient hardly changes, since d cosine / d embedding goes to 0 as fast.
POLE_EPS = 1e-5


class Negatives(NamedTuple):
    """The function from the cosines of the negatives to their logits, for the samples of one batch."""

    kind: str  # one of KINDS
    coefficients: Tensor  # (6, B) fp32, in the order of COEFFICIENTS
    straight: bool = False  # the derivative is the scale, as if the function were linear

    def logits(self, cosine: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (c, B) of cosines (c, B), and their derivatives with respect to the cosines (c, B).

        Both are computed in fp32, or in fp64 if the cosines are. Cosines that rounding put beyond [-1, 1] give finite
        numbers, too.
        """
        cosine = cosine.to(torch.promote_types(cosine.dtype, torch.float32))
        scale, quadratic, slope, constant, threshold, offset = self.coefficients
        if self.kind == "linear":
            value, derivative = cosine, torch.ones_like(cosine)
        elif self.kind == "hard":
            hard = cosine > threshold
            value = torch.where(hard, (quadratic * cosine + slope) * cosine + constant, cosine)
            derivative = torch.where(hard, 2.0 * quadratic * cosine + slope, 1.0)
        elif self.kind == "arcneg":
            derivative = slope * torch.exp(-((cosine - threshold) ** 2) / constant)
            value = derivative * cosine + derivative - 1.0
        elif self.kind == "circle":
            derivative = (cosine + constant).clamp_min(0.0)
            value = derivative * (cosine - constant)
        elif self.kind == "power":
            half = ((cosine + 1.0) * 0.5).clamp(0.0, 1.0)
            value = 2.0 * half**slope - 1.0 + constant
            derivative = slope * half ** (slope - 1.0)
        else:
            theta = cosine.clamp(-1.0, 1.0).acos()
            inside = cosine.clamp(-1.0 + POLE_EPS, 1.0 - POLE_EPS)
            by_cosine = ((1.0 - inside) * (1.0 + inside)).rsqrt()  # -d theta / d cosine
            if self.kind == "angle":
                value, derivative = 1.0 - theta * (2.0 / math.pi), by_cosine * (2.0 / math.pi)
            elif self.kind == "angle_squared":
                rest = 2.0 * math.pi - theta
                value, derivative = rest * rest, 2.0 * (2.0 * math.pi - inside.acos()) * by_cosine
            else:
                raise ValueError(f"kind must be one of {', '.join(KINDS)}, got '{self.kind}'")
        if self.straight:
            derivative = torch.ones_like(cosine)
        return scale * value + offset, scale * derivative


def negatives_of(kind: str, like: Tensor, straight: bool = False, **coefficients: float | Tensor) -> Negatives:
    """Return Negatives with the given coefficients; those not given are 0.

    Args:
        like: any (B,) tensor, for number and device of the samples.
        coefficients: by the names of COEFFICIENTS: a number, a tensor of one number, or one number for each sample (B,).
    """
    rows = like.new_zeros((len(COEFFICIENTS), len(like)), dtype=torch.float32)
    for row, name in zip(rows, COEFFICIENTS, strict=True):
        value = coefficients.pop(name, 0.0)
        if isinstance(value, Tensor):
            row.copy_(value.detach())
        else:
            row.fill_(value)
    assert not coefficients, f"no coefficient has the name {', '.join(coefficients)}"
    return Negatives(kind, rows, straight)
