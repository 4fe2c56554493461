"""Computes the loss of each sample from the sums over all shards, and the factors that turn these sums into gradients.

Shapes: B = samples of the global (micro-)batch, D = embedding size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .collectives import Collectives
from .softmax import Batch, Chunk, MarginLike, TwoPass


class SampleFactors(NamedTuple):
    """The factors of each sample in the formulas of softmax.py, fp32."""

    loss: Tensor  # (), the mean over the samples
    negatives: Tensor  # (B,) gain exp(K - lse_i) / B
    grad_target_cosine: Tensor  # (B,)
    grad_norm: Tensor | None  # (B,), with respect to the norm of the embedding, for margins that depend on it


def sample_factors(
    margin: MarginLike, batch: Batch, norm: Tensor, z_sum: Tensor, by_target: Tensor, gain: float
) -> SampleFactors:
    """Return the mean loss and the factors of its gradients.

    Args:
        norm: (B,) of the embeddings.
        z_sum, by_target: (B,) sum_j E_ij and sum_j E_ij dz_ij/dt_i over the negatives of all shards.
        gain: factor that is still missing in U and in the gradients of the centres; see TwoPass.gain.
    """
    num_samples, shift = len(norm), batch.shift
    with torch.enable_grad():
        cosine, norm = batch.target_cosine.detach().requires_grad_(), norm.detach().requires_grad_()
        logit = margin.target(cosine, norm, batch.state)
    log_z = torch.log(z_sum) + shift
    lse = torch.logaddexp(log_z, logit.detach())
    loss = (lse - logit.detach()).mean()
    by_logit = -torch.exp(log_z - lse) / num_samples  # (p - 1) / B without cancellation
    grad_cosine, grad_norm = torch.autograd.grad(logit, (cosine, norm), by_logit, allow_unused=True)
    factor = torch.exp(shift - lse) / num_samples
    grad_target_cosine = factor * by_target + (0.0 if grad_cosine is None else grad_cosine)
    return SampleFactors(loss, factor * gain, grad_target_cosine, grad_norm)


def sums_over_shards(
    passes: TwoPass,
    collectives: Collectives,
    batch: Batch,
    norm: Tensor,
    shift: float | None,
    chunks: list[Chunk],
    micro: int,
) -> tuple[Batch, Tensor, Tensor, Tensor]:
    """Return the batch with target cosines, K and state; Z and sum_j E dz/dt (B,) over all shards; U (B, D) of this one.

    One all-reduce of (Z, target cosine) is enough if nothing in the chunks depends on the target class.

    Args:
        batch: with the target cosines of the samples whose class is in this shard, 0 for the others.
        norm: (B,) of the embeddings.
        shift: K, or None if the samples' maxima must be found first.
    """
    if shift is not None and passes.margin.linear_negatives:
        batch = batch._replace(shift=shift)
        z_sum, u_sum, by_target = passes.forward(batch, chunks, micro)
        z_sum, cosine = collectives.sum(torch.stack([z_sum, batch.target_cosine]))
        return batch._replace(target_cosine=cosine, state=passes.margin.observe(cosine, norm)), z_sum, u_sum, by_target
    collectives.sum(batch.target_cosine)  # the chunks need every sample's target cosine, or its maximum
    batch = batch._replace(state=passes.margin.observe(batch.target_cosine, norm))
    if shift is None:
        batch = batch._replace(shift=collectives.max(passes.sample_maximum(batch, chunks)))
    else:
        batch = batch._replace(shift=shift)
    z_sum, u_sum, by_target = passes.forward(batch, chunks, micro)
    z_sum, by_target = collectives.sum(torch.stack([z_sum, by_target]))
    return batch, z_sum, u_sum, by_target


class ReadyGradient(torch.autograd.Function):
    """A loss whose forward also computes the gradient of the embeddings; backward only returns it.

    apply(embeddings (b, D), compute), where compute(embeddings fp32, detached) returns (loss, gradient (b, D)).
    """

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, compute: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """Return the loss, and keep its gradient."""
        loss, gradient = compute(embeddings.detach().float())
        ctx.save_for_backward(gradient.to(embeddings.dtype))
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """Return the kept gradient times the gradient of the loss."""
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0], None
