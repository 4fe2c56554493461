"""UniFace: one threshold for the cosines of all samples and classes.

Source: Zhou et al., "UniFace", ICCV 2023 (the unified cross-entropy loss).
Shapes: B = samples, the global batch.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .angles import at_least_float32
from .margin import Margin, Published, State, cosine_margin, number_above
from .negatives import Negatives, negatives_of


class UniFace(Margin):
    """One trained threshold for all samples and classes: for verification at one threshold.

    softplus(-(s (c_y - m) - b)) + l sum_j softplus(s c_j - b), with a trained threshold b.

    b begins as ln(10 C) for the C classes that count in the loss. The authors' program clips s c - b to [-s, s], where
    gradients end, and computes log(1 + exp(z)) as written, which overflows. Here neither happens.

    Args:
        margin: m in [0, 1), a cosine.
        weight: l, of the negatives, above 0.
    """

    family = "hard_and_sums"
    published = (Published("uniface", "UniFace", "ICCV 2023"),)

    link = "sum"

    def __init__(self, scale: float = 64.0, margin: float = 0.4, weight: float = 1.0, **schedule: Any) -> None:
        super().__init__(scale, **schedule)
        self.margin = cosine_margin("margin", margin, " for uniface")
        self.weight = self.negative_weight = number_above("weight", weight, 0.0, " (of the negatives)")
        self.threshold = nn.Parameter(torch.zeros(()))

    @torch.no_grad()
    def prepare(self, num_classes: int, num_counted: int) -> None:
        """Set the first threshold."""
        self.threshold.fill_(math.log(10.0 * num_counted))

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        return self.scale * (at_least_float32(cosine) - self.share * self.margin) - state["threshold"]

    def negatives(self, cosine: Tensor, norm: Tensor, state: State) -> Negatives:
        """Return s c - b."""
        return negatives_of("linear", cosine, scale=self.scale, offset=-state["threshold"])

    def negative_offset(self, state: State) -> Tensor:
        """Return -b, ()."""
        return -state["threshold"]

    @property
    def logit_bound(self) -> float:
        """Infinite, since the threshold is trained; a sum of softplus needs no bound."""
        return math.inf
