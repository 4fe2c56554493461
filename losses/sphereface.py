"""SphereFace: multiply the angle. The two versions differ in scale and derivative.

Both replace the cosine of m theta, which rises and falls, by psi(m theta), which never rises (angles.py).
Shapes: B = samples, the global batch.
"""

import math
from typing import Any

from torch import Tensor

from .angles import at_least_float32, psi
from .combined import Combined
from .margin import Margin, Published, State, number_in


class SphereFace(Margin):
    """A factor on the angle, with |x| as the scale: to compare with.

    |x| (w cos theta + psi(m theta)) / (1 + w) for the target class, |x| cos theta_j for the others.

    Source: Liu et al., "SphereFace", CVPR 2017, https://arxiv.org/abs/1704.08063, Eq. 7. The scale is the length of the
    embedding, which has a gradient in all logits. A training does not begin to learn with m = 4 at once, so the authors'
    settings mix in the cosine with weight w = max(5, 1000 / (1 + 0.12 n)) in step n. The weight follows the step's number,
    which a resumed run knows.

    Args:
        margin: m, a factor on the angle, in [1, 10]. A schedule of the margin begins between 1 and this.
        annealed: whether the cosine is mixed in; if not, w = 0.
        gradient: "straight_through" gives the target logit the derivative |x| with respect to the cosine.
    """

    family = "multiplied"
    published = (Published("sphereface", "SphereFace", "1704.08063"),)

    def __init__(self, margin: float = 4.0, annealed: bool = True, **shared: Any) -> None:
        super().__init__(1.0, **shared)
        self.margin = number_in("margin", margin, 1.0, 10.0, " for sphereface (a factor on the angle)")
        self.annealed = annealed
        self.at_step(1)

    def at_step(self, step: int) -> None:
        """Set the weight of the cosine, and the share of the margin."""
        super().at_step(step)
        self.cosine_weight = max(5.0, 1000.0 / (1.0 + 0.12 * step)) if self.annealed else 0.0

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        cosine = at_least_float32(cosine)
        factor = self.share * self.margin + (1.0 - self.share)
        value = self.logits_with_derivative(cosine, *psi(cosine, factor))
        return at_least_float32(norm) * (self.cosine_weight * cosine + value) / (1.0 + self.cosine_weight)

    def negative_scale(self, norm: Tensor, state: State) -> Tensor:
        """Return the norms (B,)."""
        return at_least_float32(norm)

    @property
    def logit_bound(self) -> float:
        """Infinite: embeddings may have any length."""
        return math.inf


class SphereFaceR(Combined):
    """A factor on the angle, with a fixed scale: it begins to learn early.

    s psi(m theta) for the target class, with the derivative s: characteristic gradient detachment.

    Source: Liu et al., "SphereFace Revived", TPAMI 2022, https://arxiv.org/abs/2109.05565. The exact derivative is 0 where
    m theta is a multiple of pi, so samples near there would hardly learn; and near theta = 0 it is m^2 times that of the
    cosine. Holding psi(m theta) - cos theta constant avoids both, and annealing becomes needless.

    Args:
        margin: m, a factor on the angle, in [1, 10]. A schedule of the margin begins between 1 and this.
        gradient: "straight_through" is the published one.
    """

    family = "multiplied"
    published = (Published("sphereface_r", "SphereFace-R", "2109.05565"),)

    def __init__(self, scale: float = 30.0, margin: float = 1.7, gradient: str = "straight_through", **schedule: Any) -> None:
        self.margin = number_in("margin", margin, 1.0, 10.0, " for sphereface_r (a factor on the angle)")
        super().__init__(scale, margin, 0.0, 0.0, gradient=gradient, **schedule)
