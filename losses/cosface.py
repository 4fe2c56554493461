"""CosFace: subtract a fixed margin from the target cosine.

Source: Wang et al., "CosFace", CVPR 2018, https://arxiv.org/abs/1801.09414, Eq. 4.
Shapes: B = samples, the global batch.
"""

from typing import Any

from torch import Tensor

from .margin import Margin, at_least_float32


class CosFace(Margin):
    """Args:
    margin: subtracted from the cosine.
    gradient: both choices are the same here, because the derivative is always `scale`.
    """

    def __init__(self, scale: float = 64.0, margin: float = 0.4, gradient: str = "exact") -> None:
        super().__init__(scale, gradient)
        if not 0.0 <= margin < 1.0:
            raise ValueError(f"margin must be in [0, 1) for cosface (a cosine, not an angle), got {margin}")
        self.margin = float(margin)

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        """Return the (B,) logits of the target classes, from their cosines (B,); the norms (B,) are not used."""
        return self.scale * (at_least_float32(cosine) - self.margin)
