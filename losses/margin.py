"""The interface between a margin and the head: cosines in, logits out.

Source: the losses of Wang et al. (CosFace), Deng et al. (ArcFace), Liu et al. (SphereFace) and their successors are all
cross-entropy on logits that are a function of the cosines. They differ only in that function.
Shapes: B = samples, the global batch; K = classes of one chunk of the head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from utils.suggest import did_you_mean

GRADIENTS = ("exact", "straight_through")

# Closer to |cosine| = 1, exact derivatives are evaluated at 1 - this value, where d theta / d cosine is 224. At 1 it is
# infinite. The embedding's gradient hardly changes, since d cosine / d embedding goes to 0 as fast.
_DERIVATIVE_EPS = 1e-5


class Margin(nn.Module):
    """Maps cosines to logits, without knowledge of ranks, labels or class centres. Subclasses define `target`.

    A margin with batch statistics, such as the mean cosine, also defines `observe` and `commit`. In an optimizer step

        state = margin.observe(target_cosine, norm)       # once per micro-batch; changes nothing
        margin.target(..., state), margin.negatives(..., state)
        margin.commit([state of each micro-batch])        # once, when the step updates the centres

    The head may rely on the following:
    - `target` and `negatives` depend only on their arguments, sample by sample, and change no buffer. The head may call them on
      any samples and any chunk of classes, and again in the update.
    - `target` is differentiable by autograd with respect to `cosine`. Its values and derivatives are finite for every finite
      cosine, including rounding errors beyond [-1, 1], and it never falls when the cosine rises. It computes in fp32 or
      better, for any autocast setting and any input dtype.
    - For cosines in [-1, 1], no target logit is above `logit_bound` and no negative logit is above it in absolute value. A
      cosine that rounding puts beyond 1 may exceed it in proportion.
    - If `linear_negatives` is true, `negatives(cosine, ...)` is exactly `scale * cosine`, and the head may put the scale into a
      matrix product instead of calling it. Otherwise its derivative comes from autograd.
    - A margin keeps state between steps in buffers, so `state_dict` and `.to(device)` include it. The state is equal on all
      ranks, since `observe` gets the global batch.

    Args:
        scale: factor s on all cosines.
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
        """Return the (B, K) logits of the other classes, from their cosines (B, K) and the target cosines (B, 1)."""
        return self.scale * cosine

    def observe(self, target_cosine: Tensor, norm: Tensor) -> Any:
        """Return the state of a micro-batch that target and negatives need, from its target cosines and norms (B,), fp32.

        All micro-batches see the buffers of the last optimizer step, so accumulation changes no sample's margin.
        """
        return None

    def commit(self, states: Sequence[Any]) -> None:
        """Update the buffers from the states that `observe` returned for the micro-batches of an optimizer step."""

    @property
    def observes(self) -> bool:
        """Whether the margin defines `observe`."""
        return type(self).observe is not Margin.observe

    @property
    def logit_bound(self) -> float:
        """An upper bound of all target logits and of |negative logit|. Override it together with `negatives`."""
        return self.scale

    @property
    def linear_negatives(self) -> bool:
        """Whether the negative logits are exactly scale * cosine."""
        return type(self).negatives is Margin.negatives

    def logits_with_derivative(self, cosine: Tensor, value: Tensor, derivative: Tensor) -> Tensor:
        """Return the (B,) logits scale * value. Their derivative is scale * derivative, or scale if straight-through.

        Autograd through acos or a square root gives infinity at |cosine| = 1, and NaN even in a branch that torch.where
        does not take. So `value` and `derivative`, both (B,), are computed without autograd.
        """
        distance = cosine - cosine.detach()  # zero, but autograd sees the identity
        if self.gradient == "exact":
            distance = derivative * distance
        return self.scale * (value + distance)


def at_least_float32(cosine: Tensor) -> Tensor:
    """Return cosine in fp32 or better, because a step of fp16 near 1, 2^-11, is 0.03 in the logit."""
    return cosine.to(torch.promote_types(cosine.dtype, torch.float32))


def off_the_poles(cosine: Tensor) -> Tensor:
    """Return cosine, kept far enough from +1 and -1 that derivatives of the angle stay moderate."""
    return cosine.clamp(-1.0 + _DERIVATIVE_EPS, 1.0 - _DERIVATIVE_EPS)
