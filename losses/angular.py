"""Logits that are functions of the angle, not of its cosine: Li-ArcFace and QAMFace.

Their negatives need the angle of every class, too, and have an infinite derivative with respect to the cosine at |cosine| = 1,
where it is evaluated off the poles (negatives.py). Both fall with the angle up to pi + m, so no continuation is needed.
Shapes: B = samples, the global batch.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .angles import at_least_float32, off_the_poles, sin_of
from .margin import Margin, Published, State, angle_margin
from .negatives import Negatives, negatives_of


class LiArcFace(Margin):
    """Linear in the angle, so it pulls equally at all angles: for small networks and embeddings.

    s (pi - 2 (theta + m)) / pi for the target class, s (pi - 2 theta_j) / pi for the others; `margin` is m, in radians.

    Source: Li et al., "AirFace", ICCVW 2019, https://arxiv.org/abs/1907.12256.
    """

    family = "angles"
    published = (Published("li_arcface", "Li-ArcFace", "1907.12256"),)

    def __init__(self, scale: float = 64.0, margin: float = 0.45, **schedule: Any) -> None:
        super().__init__(scale, **schedule)
        self.margin = angle_margin("margin", margin, " for li_arcface")

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        cosine = at_least_float32(cosine)
        with torch.no_grad():
            theta = cosine.clamp(-1.0, 1.0).acos()
            derivative = 2.0 / math.pi / sin_of(off_the_poles(cosine))
        return self.logits_with_derivative(cosine, 1.0 - (theta + self.share * self.margin) * (2.0 / math.pi), derivative)

    def negatives(self, cosine: Tensor, norm: Tensor, state: State) -> Negatives:
        """Return (pi - 2 theta) / pi."""
        return negatives_of("angle", cosine, scale=self.scale)


class QAMFace(Margin):
    """Quadratic in the angle, with logits up to 237: to compare with.

    s (2 pi - (theta + m))^2 for the target class, s (2 pi - theta_j)^2 for the others; `margin` is m, in radians.

    Source: quadratic additive angular margin, known from the code of cavaface (https://github.com/cavalleria/cavaface) alone.
    The logits reach 4 pi^2 s, 237 with s = 6, so they need fp32 and the maxima of the batch.
    """

    family = "angles"
    published = (Published("qamface", "QAMFace", "code only"),)

    def __init__(self, scale: float = 6.0, margin: float = 0.5, **schedule: Any) -> None:
        super().__init__(scale, **schedule)
        self.margin = angle_margin("margin", margin, " for qamface")

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        cosine = at_least_float32(cosine)
        with torch.no_grad():
            inside = off_the_poles(cosine)
            rest = 2.0 * math.pi - (cosine.clamp(-1.0, 1.0).acos() + self.share * self.margin)
            rest_inside = 2.0 * math.pi - (inside.acos() + self.share * self.margin)
        return self.logits_with_derivative(cosine, rest * rest, 2.0 * rest_inside / sin_of(inside))

    def negatives(self, cosine: Tensor, norm: Tensor, state: State) -> Negatives:
        """Return (2 pi - theta)^2."""
        return negatives_of("angle_squared", cosine, scale=self.scale)

    @property
    def logit_bound(self) -> float:
        """s (2 pi)^2, of a negative with angle 0."""
        return self.scale * (2.0 * math.pi) ** 2

    @property
    def lowest_negative(self) -> float:
        """s pi^2, of a negative with angle pi."""
        return self.scale * math.pi**2
