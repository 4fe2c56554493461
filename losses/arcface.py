"""ArcFace: add a fixed margin to the angle between an embedding and the centre of its class.

Source: Deng et al., "ArcFace", CVPR 2019, https://arxiv.org/abs/1801.07698, Eq. 3. Beyond theta + m = pi the cosine would
rise again and reward a larger angle. There the logit is s (cos theta - m sin m), which continues to fall, as in the authors'
first code.
Shapes: B = samples, the global batch.
"""

from typing import Any

from torch import Tensor

from .angles import at_least_float32, cos_of_sum
from .margin import Margin, Published, angle_margin


class ArcFace(Margin):
    """A margin on the angle: the usual choice.

    The logit is s cos(theta + m); `margin` is m, in radians.
    """

    published: tuple[Published, ...] = (
        Published("arcface", "ArcFace", "1801.07698"),
        Published("sub_center", "Sub-center ArcFace, K = 3", "ECCV 2020", head={"sub_centers": 3}),
    )

    def __init__(self, scale: float = 64.0, margin: float = 0.5, **shared: Any) -> None:
        super().__init__(scale, **shared)
        self.margin = angle_margin("margin", margin, f" for {type(self).__name__.lower()}")

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        cosine = at_least_float32(cosine)
        return self.logits_with_derivative(cosine, *cos_of_sum(cosine, self.share * self.margin))
