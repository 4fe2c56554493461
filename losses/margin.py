"""The interface between a margin and the head: cosines in, logits out.

Source: the losses of Wang et al. (CosFace), Deng et al. (ArcFace), Liu et al. (SphereFace) and their successors all are
cross-entropy on logits that are a function of the cosines, and differ in that function alone.
Shapes: B = samples, the global batch; K = classes of one chunk of the head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from utils.suggest import did_you_mean

GRADIENTS = ("exact", "straight_through")

# Where |cosine| is nearer to 1, exact derivatives are taken at 1 - this: d theta / d cosine goes to infinity there and is
# 224 here. The embedding's gradient loses little, since d cosine / d embedding goes to 0 as fast.
_DERIVATIVE_EPS = 1e-5


class Margin(nn.Module):
    """Maps cosines to logits. It knows no ranks, no labels and no class weights; subclasses define `target`.

    A margin with statistics of the batch, such as the mean cosine, defines `observe` and `commit` as well. In an optimizer step

        state = margin.observe(target_cosine, norm)       # once for each micro-batch; changes nothing
        margin.target(..., state), margin.negatives(..., state)
        margin.commit([state of each micro-batch])        # once, where the step updates the centres

    What a head may rely on:
    - `target` and `negatives` are functions of their arguments alone, sample by sample, and change no buffer: the head may call
      them on any samples and any chunk of classes, and again in the update.
    - `target` is differentiable by autograd with respect to `cosine`; its values and derivatives are finite for every
      finite cosine, rounding errors beyond [-1, 1] included, and it never falls when the cosine rises. It computes in
      fp32 or better, whatever autocast is on and whatever comes in.
    - For cosines in [-1, 1], no target logit is above `logit_bound` and no negative logit is above it in absolute
      value; a cosine that rounding puts beyond 1 may exceed it in proportion.
    - Where `linear_negatives` is true, `negatives(cosine, ...)` is `scale * cosine` exactly, and the head may put the
      scale into a matrix product instead of calling it. Otherwise its derivative comes from autograd.
    - What a margin keeps between steps lies in its buffers, where `state_dict` and `.to(device)` find it. It is equal on all
      ranks, since `observe` is given the global batch.

    Args:
        scale: radius s of the sphere the logits live on.
        gradient: "exact" differentiates the margin; "straight_through" gives every target logit the derivative `scale`,
            as arcface_torch does. The values are the same.
    """

    def __init__(self, scale: float = 64.0, gradient: str = "exact") -> None:
        super().__init__()
        if not 0 < scale <= 1e30:  # false of nan
            raise ValueError(f"scale must be a number above 0 and at most 1e30 (64 is usual), got {scale}")
        if gradient not in GRADIENTS:
            raise ValueError(
                f"gradient must be one of {', '.join(GRADIENTS)}, got '{gradient}'.{did_you_mean(gradient, GRADIENTS)}"
            )
        self.scale = float(scale)
        self.gradient = gradient

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        """Return the (B,) logits of the target classes, from their cosines (B,) and the norms of the embeddings (B,)."""
        raise NotImplementedError(f"{type(self).__name__} must define target(cosine, norm, state)")

    def negatives(self, cosine: Tensor, target_cosine: Tensor, state: Any = None) -> Tensor:
        """Return the (B, K) logits of other classes, from their cosines (B, K) and those of the target classes (B, 1)."""
        return self.scale * cosine

    def observe(self, target_cosine: Tensor, norm: Tensor) -> Any:
        """Return what target and negatives need to know of a micro-batch, from its cosines and norms (B,), fp32.

        The buffers are those of the last optimizer step for every micro-batch, so that accumulation changes no sample's margin.
        """
        return None

    def commit(self, states: Sequence[Any]) -> None:
        """Update the buffers from what `observe` returned for the micro-batches of an optimizer step."""

    @property
    def observes(self) -> bool:
        """True where the margin defines `observe`."""
        return type(self).observe is not Margin.observe

    @property
    def logit_bound(self) -> float:
        """An upper bound of |any negative logit| and of any target logit. A margin that overrides negatives sets it."""
        return self.scale

    @property
    def linear_negatives(self) -> bool:
        """True where negatives is scale * cosine and nothing else."""
        return type(self).negatives is Margin.negatives

    def logits_with_derivative(self, cosine: Tensor, value: Tensor, derivative: Tensor) -> Tensor:
        """Return the (B,) logits scale * value, whose derivative by cosine is scale * derivative, or scale if straight.

        Autograd through acos or a square root is infinite at |cosine| = 1, and NaN even in a branch that torch.where
        does not take; so `value` and `derivative`, both (B,), are computed without it.
        """
        distance = cosine - cosine.detach()  # zero, but autograd sees the identity
        if self.gradient == "exact":
            distance = derivative * distance
        return self.scale * (value + distance)


def at_least_float32(cosine: Tensor) -> Tensor:
    """Return cosine in fp32, or as it is if it has more digits: 2^-11, a step of fp16 near 1, is 0.03 in the logit."""
    return cosine.to(torch.promote_types(cosine.dtype, torch.float32))


def off_the_poles(cosine: Tensor) -> Tensor:
    """Return cosine, moved off +1 and -1 to where derivatives by the angle are still of moderate size."""
    return cosine.clamp(-1.0 + _DERIVATIVE_EPS, 1.0 - _DERIVATIVE_EPS)
