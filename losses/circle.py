"""Circle loss: every cosine has a weight of its own, by how far it is from its optimum.

Source: Sun et al., "Circle Loss", CVPR 2020, https://arxiv.org/abs/2002.10857, with class-level labels: the centre of
a sample's class is its one positive, and the loss is the cross entropy over the classes.
Shapes: B = samples, the global batch.
"""

from typing import Any

from torch import Tensor

from .angles import at_least_float32
from .margin import Margin, Published, State, cosine_margin
from .negatives import Negatives, negatives_of


class Circle(Margin):
    """Each cosine weighs by its distance from its optimum; may need a lower learning rate.

    s [1 + m - c]_+ (c - (1 - m)) for the target class, s [c_j + m]_+ (c_j - m) for the others.

    The brackets are weights without a gradient. With a gradient through them, negatives with cosines in (-m, 0) would be pulled
    towards the sample, since the derivative of c^2 - m^2 is 2 c.

    Args:
        scale: s, four times that of other losses, since the weights are below 1 + m.
        margin: m in [0, 1), a cosine.
    """

    family = "multiplied"
    published = (Published("circle", "Circle loss", "2002.10857"),)

    def __init__(self, scale: float = 256.0, margin: float = 0.25, **schedule: Any) -> None:
        super().__init__(scale, **schedule)
        self.margin = cosine_margin("margin", margin, " for circle")

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        cosine, margin = at_least_float32(cosine), self.share * self.margin
        weight = (1.0 + margin - cosine.detach()).clamp_min(0.0)
        return self.scale * weight * (cosine - (1.0 - margin))

    def negatives(self, cosine: Tensor, norm: Tensor, state: State) -> Negatives:
        """Return [c + m]_+ (c - m)."""
        return negatives_of("circle", cosine, scale=self.scale, constant=self.share * self.margin)

    @property
    def logit_bound(self) -> float:
        """s max(1 - m^2, m^2), of a negative or target with cosine 1, with the m of any step."""
        return self.scale * max(1.0 - (self.margin_start * self.margin) ** 2, self.margin**2)

    @property
    def lowest_negative(self) -> float:
        """-s m^2: the logit of a negative is s (c^2 - m^2) where it is not 0."""
        return -self.scale * self.margin**2
