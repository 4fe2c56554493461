"""The part of the head for a margin, dense: all logits whole, gradients by autograd, in the type of the embeddings.

Only the derivatives of the negatives are not autograd's: `Negatives` gives them, as it does to the kernels.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from losses.margin import Margin, State


def cosines_of(embeddings: Tensor, centres: Tensor) -> Tensor:
    """Return the (B, C) cosines."""
    return F.normalize(embeddings) @ F.normalize(centres).t()


def negative_logits(margin: Margin, cosine: Tensor, own: Tensor, norm: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Return the logits (B, C) of cosines (B, C) as negatives, and which of them are hard (B, C).

    Args:
        own: (B,) the target cosines.
    """
    if margin.linear_negatives:
        scale = margin.negative_scale(norm, state)
        scale = scale[:, None] if isinstance(scale, Tensor) and scale.dim() else scale
        return scale * cosine, torch.zeros_like(cosine, dtype=torch.bool)
    negatives = margin.negatives(own.detach(), norm.detach(), state)
    value, derivative = (part.t() for part in negatives.logits(cosine.detach().t()))
    logits = value + derivative * (cosine - cosine.detach())
    offset = margin.negative_offset(state)
    if offset is not None:
        logits = logits + (offset - offset.detach())
    threshold = negatives.coefficients[4][:, None]
    return logits, (cosine > threshold) if negatives.kind == "hard" else torch.zeros_like(cosine, dtype=torch.bool)


def losses_of_cosines(
    margin: Margin,
    cosine: Tensor,
    norm: Tensor,
    labels: Tensor,
    left_out: Tensor | None = None,
    log_weights: Tensor | None = None,
    seed: int = 0,
) -> tuple[Tensor, State]:
    """Return each sample's loss (B,), and the state that `commit` takes.

    Args:
        cosine: (B, C), differentiable.
        norm: (B,) of the embeddings, differentiable.
        left_out: (B, C) bool, negatives that are not in the loss.
        log_weights: (C,) or (B, C), the logarithm of how often a negative counts.
    """
    own = cosine.gather(1, labels[:, None]).squeeze(1)
    state = margin.observe(own.detach(), norm.detach(), seed)
    is_negative = ~F.one_hot(labels, cosine.shape[1]).bool()
    if left_out is not None:
        is_negative = is_negative & ~left_out
    logits, hard = negative_logits(margin, cosine, own, norm, state)
    log_weights = torch.zeros_like(cosine) if log_weights is None else log_weights.expand_as(cosine)
    log_z = (logits + log_weights).masked_fill(~is_negative, -torch.inf).logsumexp(1)
    hard = hard & is_negative
    counts = torch.stack([hard.sum(dim=1).to(cosine.dtype), (cosine.detach() * hard).sum(dim=1)])
    state = margin.complete(state, log_z.detach(), counts)
    target = margin.target(own, norm, state)
    if margin.link == "softmax":
        losses = torch.logaddexp(log_z, target) - target
    else:
        negatives = (log_weights.exp() * F.softplus(logits)).masked_fill(~is_negative, 0.0).sum(dim=1)
        losses = margin.target_weight * F.softplus(-target) + margin.negative_weight * negatives
    penalty = margin.penalty(norm)
    return losses if penalty is None else losses + penalty, state


class DenseMargin:
    """Optimizer steps of a margin over all classes, without an update of the centres."""

    def __init__(self, margin: Margin, num_classes: int, num_active: int | None = None) -> None:
        self.margin, self.steps = margin, 0
        margin.prepare(num_classes, num_classes if num_active is None else num_active)

    def step(
        self,
        micro_batches: Sequence[tuple[Tensor, Tensor]],
        centres: Tensor,
        good: Tensor | None = None,
        active: Tensor | None = None,
        limit: float | None = None,
        log_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the mean loss of an optimizer step, differentiable, and commit its states.

        Args:
            micro_batches: embeddings (B, D) and labels (B,) of each.
            centres: (C, D).
            active: (C,) bool, the classes in the loss.
            limit: negatives with a larger cosine are not in the loss.
        """
        self.steps += 1
        self.margin.at_step(self.steps)
        losses, states = [], []
        for number, (embeddings, labels) in enumerate(micro_batches):
            cosine = cosines_of(embeddings, centres)
            left_out = torch.zeros_like(cosine, dtype=torch.bool) if limit is None else cosine > limit
            if active is not None:
                left_out = left_out | ~active
            norm, seed = embeddings.norm(dim=1), 1000 * self.steps + number
            of_samples, state = losses_of_cosines(self.margin, cosine, norm, labels, left_out, log_weights, seed)
            losses.append(of_samples.mean())
            states.append(state)
        self.margin.commit(states, good)
        return torch.stack(losses).mean()
