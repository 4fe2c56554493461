"""Combined margin: m1 multiplies the angle, m2 is added to it, m3 is subtracted from the cosine.

Source: Deng et al., "ArcFace", CVPR 2019, https://arxiv.org/abs/1801.07698, Eq. 4, s (cos(m1 theta + m2) - m3). The
cosine rises again where x = m1 theta + m2 exceeds pi. It is therefore replaced by psi(x) of SphereFace, which
equals cos(x) up to pi, is continuous, and never rises (angles.py).
Shapes: B = samples, the global batch.
"""

import math
from typing import Any

from torch import Tensor

from .angles import at_least_float32, psi
from .margin import Margin, Published, angle_margin, cosine_margin, number_in


class Combined(Margin):
    """A factor on the angle, a margin on it and one on the cosine: to mix them.

    Args:
        m1: factor on the angle (SphereFace: 1.35). A schedule of the margin begins between 1 and this.
        m2: radians added to the angle (ArcFace: 0.5).
        m3: subtracted from the cosine (CosFace: 0.4).
    """

    published = (Published("combined", "Combined margin", "1801.07698"),)

    def __init__(self, scale: float = 64.0, m1: float = 1.0, m2: float = 0.3, m3: float = 0.2, **shared: Any) -> None:
        super().__init__(scale, **shared)
        self.m1 = number_in("m1", m1, 1.0, math.inf, " (a factor on the angle; 1 leaves it as it is)")
        self.m2, self.m3 = angle_margin("m2", m2), cosine_margin("m3", m3)

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        cosine = at_least_float32(cosine)
        m1 = self.share * self.m1 + (1.0 - self.share)
        value, derivative = psi(cosine, m1, self.share * self.m2)
        return self.logits_with_derivative(cosine, value - self.share * self.m3, derivative)
