"""The part of the head for a margin, dense: all logits whole, gradients by autograd, in the type of the embeddings.

Only the derivatives of the negatives are not autograd's: `Negatives` gives them, as it does to the kernels.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from losses.margin import Margin, State
from partial_fc.collectives import Collectives


def cosines_of(embeddings: Tensor, centres: Tensor) -> Tensor:
    """Return the (B, C) cosines."""
    return F.normalize(embeddings) @ F.normalize(centres).t()


def negative_logits(margin: Margin, cosine: Tensor, own: Tensor, norm: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Return logits of cosines (B, C) as negatives, and which are hard, (B, C) each; own are the target cosines (B,)."""
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
    of_class: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, State]:
    """Return each sample's loss (B,), and the state that `commit` takes.

    cosine (B, C) and norm (B,) are differentiable. left_out: (B, C) bool, negatives that are not in the loss.
    log_weights: (C,) or (B, C), the logarithm of how often a negative counts. of_class: numbers (B,) of the classes, by name.
    """
    own = cosine.gather(1, labels[:, None]).squeeze(1)
    state = margin.observe(own.detach(), norm.detach(), seed, of_class)
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
    """Optimizer steps of a margin over all classes, without an update of the centres and of what is trained.

    `numbers` are those of the classes, by name: (C, ...), the trained ones differentiable.
    """

    def __init__(self, margin: Margin, num_classes: int, dim: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.margin, self.steps = margin, 0
        margin.prepare(num_classes, num_classes)
        self.numbers = {
            name: torch.full((num_classes, *number.shape), number.first, dtype=dtype, requires_grad=number.trained)
            for name, number in margin.class_numbers(dim).items()
        }

    def _of_all_classes(self) -> Tensor | float:
        """Return what the loss has of all classes, differentiable by the gradients that the margin gives."""
        found = self.margin.class_penalty({name: value.detach() for name, value in self.numbers.items()}, self._num_classes())
        if found is None:
            return 0.0
        value, gradients = found
        for name, gradient in gradients.items():
            value = value + (gradient * (self.numbers[name] - self.numbers[name].detach())).sum()
        return value

    def _num_classes(self) -> int:
        return len(next(iter(self.numbers.values()))) if self.numbers else 0

    def _after_step(self, micro_batches: Sequence[tuple[Tensor, Tensor]], good: Tensor) -> None:
        numbers = {name: value.detach() for name, value in self.numbers.items()}
        for embeddings, labels in micro_batches:
            self.margin.collect(numbers, labels, F.normalize(embeddings.detach()).float(), good)
        self.margin.refresh(numbers, self.steps, good, Collectives(1))

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

        micro_batches: embeddings (B, D) and labels (B,) of each; centres: (C, D); active: (C,) bool, the classes in the loss.
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
            of_class = {name: value[labels] for name, value in self.numbers.items() if value.dim() == 1}
            of_samples, state = losses_of_cosines(self.margin, cosine, norm, labels, left_out, log_weights, seed, of_class)
            losses.append(of_samples.mean())
            states.append(state)
        self.margin.commit(states, good)
        self._after_step(micro_batches, torch.tensor(True) if good is None else good)
        return torch.stack(losses).mean() + self._of_all_classes()
