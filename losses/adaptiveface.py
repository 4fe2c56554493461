"""AdaptiveFace: a trained margin for each class.

Source: Liu et al., "AdaptiveFace: Adaptive Margin and Sampling for Face Recognition", CVPR 2019, Section 3.2 (AdaM-Softmax).
Shapes: B = samples, the global batch; n = classes of one shard.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .angles import at_least_float32
from .margin import ClassNumber, Margin, Published, State, cosine_margin, number_in


class AdaptiveFace(Margin):
    """A trained margin for each class: for classes of very different sizes.

    s (cos theta - m_y) for the target class, plus weight (1 - mean of m over all classes).

    The second term pulls all margins up in every step, those of classes outside the batch and the sample as well; the first
    pulls those of the batch's classes down. So classes that are far from their samples end with small margins. The margins
    live with the centres and have their learning rate, but no weight decay. They are kept in [0, 1].

    Args:
        margin: the first margin of each class, in [0, 1), a cosine. The paper does not say; this is AM-Softmax's.
        weight: lambda, of the second term, 0 or more. Each class has 1 / classes of its pull, as in the paper.
    """

    family = "adaptive"
    published = (Published("adaptiveface", "AdaptiveFace", "CVPR 2019"),)

    def __init__(self, scale: float = 30.0, margin: float = 0.35, weight: float = 70.0, **schedule: Any) -> None:
        super().__init__(scale, **schedule)
        self.margin = cosine_margin("margin", margin, " for adaptiveface")
        self.weight = number_in("weight", weight, 0.0, 1e6, " (of the pull on all margins)")

    def class_numbers(self, dim: int) -> Mapping[str, ClassNumber]:
        """Return the margin of each class, trained."""
        return {"margin": ClassNumber((), self.margin, trained=True, low=0.0, high=1.0)}

    def class_penalty(self, numbers: Mapping[str, Tensor], num_classes: int) -> tuple[Tensor, State]:
        """Return weight (1 - mean m) of all num_classes classes as far as it is this shard's, and its gradients (n,)."""
        share, margins = self.weight / num_classes, numbers["margin"]
        return share * (1.0 - margins).sum(), {"margin": torch.full_like(margins, -share)}

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        return self.scale * (at_least_float32(cosine) - self.share * state["margin"])
