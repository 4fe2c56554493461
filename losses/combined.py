"""Combined margin: m1 multiplies the angle, m2 is added to it, m3 is subtracted from the cosine.

Source: Deng et al., "ArcFace", CVPR 2019, https://arxiv.org/abs/1801.07698, Eq. 4, s (cos(m1 theta + m2) - m3). The
cosine rises again where x = m1 theta + m2 exceeds pi. It is therefore replaced by psi(x) = (-1)^k cos(x) - 2k with
k = floor(x / pi) (Liu et al., "SphereFace", CVPR 2017, https://arxiv.org/abs/1704.08063, Section 3.3), which equals cos(x)
up to pi, is continuous, and never rises.
Shapes: B = samples, the global batch.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .margin import Margin, at_least_float32, off_the_poles


class Combined(Margin):
    """Args:
    m1: factor on the angle (SphereFace: 1.35).
    m2: radians added to the angle (ArcFace: 0.5).
    m3: subtracted from the cosine (CosFace: 0.4).
    """

    def __init__(self, scale: float = 64.0, m1: float = 1.0, m2: float = 0.3, m3: float = 0.2, gradient: str = "exact") -> None:
        super().__init__(scale, gradient)
        if not (math.isfinite(m1) and m1 >= 1.0):
            raise ValueError(f"m1 must be 1 or more (a factor on the angle; 1 leaves it as it is), got {m1}")
        if not 0.0 <= m2 <= math.pi / 2:
            raise ValueError(f"m2 must be in [0, pi / 2] (radians, not degrees), got {m2}")
        if not 0.0 <= m3 < 1.0:
            raise ValueError(f"m3 must be in [0, 1) (a cosine, not an angle), got {m3}")
        self.m1, self.m2, self.m3 = float(m1), float(m2), float(m3)

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        """Return the (B,) logits of the target classes, from their cosines (B,); the norms (B,) are not used."""
        cosine = at_least_float32(cosine)
        with torch.no_grad():
            x = self.m1 * cosine.clamp(-1.0, 1.0).acos() + self.m2
            k = (x / math.pi).floor()
            value = (1.0 - 2.0 * (k % 2)) * x.cos() - 2.0 * k - self.m3
            # d psi / d cos theta = m1 (-1)^k sin(x) / sin theta, and (-1)^k sin(x) = |sin(x)|.
            theta = off_the_poles(cosine).acos()
            derivative = self.m1 * (self.m1 * theta + self.m2).sin().abs() / theta.sin()
        return self.logits_with_derivative(cosine, value, derivative)
