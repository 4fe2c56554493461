"""MagFace: a margin that grows with the norm of the embedding, and a penalty that lets norms grow.

Source: Meng et al., "MagFace", CVPR 2021, https://arxiv.org/abs/2103.06627.
Shapes: B = samples, the global batch.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .angles import at_least_float32, cos_of_sum, sin_of
from .margin import Margin, Published, angle_margin, number_above, number_in


class MagFace(Margin):
    """A margin that grows with |x|, so that |x| tells an image's quality.

    s cos(theta + m(a)) with m(a) = (u_m - l_m) / (u_a - l_a) (a - l_a) + l_m, plus weight (1 / a + a / u_a^2).

    a is |x|, clipped to [l_a, u_a], and has a gradient through both terms. The first makes norms of hard samples shorter;
    without it, as with a margin that is applied straight-through, only the penalty is left, and all norms grow. So there is no
    argument `gradient`.

    Args:
        l_a, u_a: least and largest norm, 0 < l_a < u_a. The authors finetune an ArcFace network with 1 and 51,
            l_m 0.45, u_m 1 and weight 5.
        l_m, u_m: least and largest angle in radians, l_m <= u_m.
        weight: lambda_g, of the penalty; 0 or more.
    """

    family = "adaptive"
    published = (Published("magface", "MagFace", "2103.06627", training="train.epochs=25"),)

    def __init__(
        self,
        scale: float = 64.0,
        l_a: float = 10.0,
        u_a: float = 110.0,
        l_m: float = 0.45,
        u_m: float = 0.8,
        weight: float = 35.0,
        **schedule: Any,
    ) -> None:
        super().__init__(scale, **schedule)
        self.l_a = number_above("l_a", l_a, 0.0, " (a norm)")
        self.u_a = number_above("u_a", u_a, self.l_a, ", which is l_a")
        self.l_m, self.u_m = angle_margin("l_m", l_m), angle_margin("u_m", u_m)
        if self.u_m < self.l_m:
            raise ValueError(f"u_m must be l_m or more (long embeddings have larger margins), got {u_m} with l_m={l_m}")
        self.weight = number_in("weight", weight, 0.0, math.inf, " (of the penalty)")

    def _clipped(self, norm: Tensor) -> Tensor:
        return at_least_float32(norm).clamp(self.l_a, self.u_a)

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        cosine = at_least_float32(cosine)
        slope = (self.u_m - self.l_m) / (self.u_a - self.l_a)
        margin = self.share * (slope * (self._clipped(norm) - self.l_a) + self.l_m)
        logits = self.logits_with_derivative(cosine, *cos_of_sum(cosine, margin.detach()))
        with torch.no_grad():
            c = cosine.clamp(-1.0, 1.0)
            cos_m, sin_m = margin.cos(), margin.sin()
            # d cos(theta + m) / d m = -sin(theta + m); beyond pi it is that of -m sin m
            by_margin = torch.where(c >= -cos_m, -(sin_of(c) * cos_m + c * sin_m), -(sin_m + margin * cos_m))
        return logits + self.scale * by_margin * (margin - margin.detach())

    def penalty(self, norm: Tensor) -> Tensor:
        """Return weight (1 / a + a / u_a^2), (B,), which falls with the norm up to u_a."""
        a = self._clipped(norm)
        return self.weight * (1.0 / a + a / self.u_a**2)
