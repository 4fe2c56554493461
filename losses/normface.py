"""NormFace: the scaled cosines themselves, without a margin.

Source: Wang et al., "NormFace", ACM MM 2017, https://arxiv.org/abs/1704.06369. The same as COCO: Liu et al., "Rethinking
Feature Discrimination and Polymerization", 2017, https://arxiv.org/abs/1710.00870. OpenSphere trains it with scale 30. All
logits are s cos theta; a scale of about 1, as without normalisation, would leave the loss high for ever.
Shapes: B = samples, the global batch.
"""

from typing import Any

from torch import Tensor

from .angles import at_least_float32
from .margin import Margin, Published


class NormFace(Margin):
    """The scaled cosine without a margin: it shows what a margin is worth."""

    published = (Published("normface", "NormFace", "1704.06369"),)

    def __init__(self, scale: float = 64.0) -> None:
        super().__init__(scale)

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        return self.scale * at_least_float32(cosine)
