"""ArcFace: add a fixed margin to the angle between an embedding and the centre of its class.

Source: Deng et al., "ArcFace", CVPR 2019, https://arxiv.org/abs/1801.07698, Eq. 3. Beyond theta + m = pi the cosine would
rise again and reward a larger angle. There the logit is s (cos theta - m sin m), which continues to fall, as in the authors'
first code.
Shapes: B = samples, the global batch.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .margin import Margin, at_least_float32, off_the_poles


class ArcFace(Margin):
    """Args:
    margin: angle m in radians.
    """

    def __init__(self, scale: float = 64.0, margin: float = 0.5, gradient: str = "exact") -> None:
        super().__init__(scale, gradient)
        if not 0.0 <= margin <= math.pi / 2:
            raise ValueError(f"margin must be in [0, pi / 2] for arcface (radians, not degrees), got {margin}")
        self.margin = float(margin)

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        """Return the (B,) logits of the target classes, from their cosines (B,); the norms (B,) are not used."""
        cosine = at_least_float32(cosine)
        cos_m, sin_m = math.cos(self.margin), math.sin(self.margin)
        with torch.no_grad():
            c = cosine.clamp(-1.0, 1.0)
            sin_theta = ((1.0 - c) * (1.0 + c)).sqrt()
            within = c >= -cos_m  # theta + m <= pi
            value = torch.where(within, c * cos_m - sin_theta * sin_m, c - self.margin * sin_m)
            # d cos(theta + m) / d cos theta = sin(theta + m) / sin theta; beyond pi the derivative is 1.
            c = off_the_poles(c)
            derivative = torch.where(within, cos_m + sin_m * c / ((1.0 - c) * (1.0 + c)).sqrt(), 1.0)
        return self.logits_with_derivative(cosine, value, derivative)
