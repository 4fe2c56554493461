"""What the head asks of a margin. losses/margin.py documents the interface; partial_fc imports nothing of losses/.

Shapes: B = samples of the global (micro-)batch, c = classes of one chunk.
"""

from typing import Protocol

from torch import Tensor


class NegativesLike(Protocol):
    """The function from the cosines of the negatives to their logits; see losses/negatives.py."""

    @property
    def kind(self) -> str:
        """The name of the function."""

    @property
    def coefficients(self) -> Tensor:
        """(6, B) fp32: scale, quadratic, slope, constant, threshold and offset of each sample."""

    @property
    def straight(self) -> bool:
        """Whether the derivative is the scale."""

    def logits(self, cosine: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (c, B) of cosines (c, B), and their derivatives with respect to the cosines (c, B)."""
