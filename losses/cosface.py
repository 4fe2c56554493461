"""CosFace: subtract a fixed margin from the target cosine.

Source: Wang et al., "CosFace", CVPR 2018, https://arxiv.org/abs/1801.09414, Eq. 4. The same as
AM-Softmax, Wang et al., "Additive Margin Softmax", 2018, https://arxiv.org/abs/1801.05599, published with scale 30 and
margin 0.35.
Shapes: B = samples, the global batch.
"""

from typing import Any

from torch import Tensor

from .angles import at_least_float32
from .margin import Margin, Published, cosine_margin


class CosFace(Margin):
    """A margin on the cosine, milder at the start than ArcFace's: usual with sampled classes.

    The logit is s (cos theta - m).

    Args:
        margin: subtracted from the cosine.
        gradient: both choices are the same here, because the derivative is always `scale`.
    """

    published = (
        Published("cosface", "CosFace", "1801.09414"),
        Published("am_softmax", "AM-Softmax", "1801.05599", {"scale": 30.0, "margin": 0.35}),
    )

    def __init__(self, scale: float = 64.0, margin: float = 0.4, **shared: Any) -> None:
        super().__init__(scale, **shared)
        self.margin = cosine_margin("margin", margin, " for cosface")

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        return self.scale * (at_least_float32(cosine) - self.share * self.margin)
