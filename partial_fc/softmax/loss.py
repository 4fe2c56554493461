"""Computes the loss of each sample from the sums over all shards, and how strongly it pulls at target and negatives.

For a softmax, with q = 1 - p of the target class and N classes in the sample's sum, ce = lse - t = -log p, and

    loss = ((1 - e) ce + e (lse - (t + sum_j z_j) / N)) q^g
    dloss/dz_j = A p_j - S,  dloss/dt = -q A + (e - e / N) q^g,  A = q^g + loss g p / q,  S = q^g e / N

with label smoothing e, as torch's cross entropy has it, and the focal exponent g, whose factor has a gradient, too (Lin et
al., "Focal Loss", https://arxiv.org/abs/1708.02002, Eq. 4). Both are 0 by default. A margin whose link is "sum" has

    loss = a softplus(-t) + b sum_j r_j softplus(z_j),  dloss/dt = -a sigmoid(-t)

Shapes: B = samples of the global (micro-)batch.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import HeadConfig
from .passes import Batch, Pull, State, constant_shifts

if TYPE_CHECKING:  # parts do not import one another
    from losses.margin import Margin

_TINY = 1e-30
# Of EM: rounds as they are, so that acceleration does not choose another fixed point, and cycles of three rounds with it. Of
# 1,000 draws of 6 to 512 entropies of five kinds, all ended within 3e-6 of 2,000 rounds; with 200 as they are, within 6e-3.
_ROUNDS, _CYCLES = 20, 10


class GlobalSums(NamedTuple):
    """The sums over the negatives of all shards."""

    log_z: Tensor  # (B,) log sum_j exp(z); of a "sum" link the sum of softplus(z)
    others: Tensor  # (2, B) the other rows of ShardSums.sums
    spread: Tensor | None = None  # (2, B), as in ShardSums
    mean_logit: Tensor | None = None  # (B,) sum_j exp(z) z / sum_j exp(z), for weights by entropy


class SampleLosses(NamedTuple):
    """The loss of a micro-batch and its derivatives, (B,) fp32, those of the mean over the samples unless said otherwise."""

    loss: Tensor  # (), the mean over the samples
    state: State  # of the margin, completed
    # A of each sample's own loss, by which the probabilities of its negatives are multiplied; of a "sum" link the weight of
    # their losses. None = 1
    by_negatives: Tensor | None
    by_target: Tensor  # with respect to the target cosine
    by_norm: Tensor | None  # with respect to the embedding's norm, through target and penalty; None = 0
    by_trained: dict[str, Tensor]  # by name: of a margin's parameters (), of the numbers of the samples' classes (B,)
    lse: Tensor | None  # of the softmax; None for a "sum" link
    spread: Tensor | None = None  # S, for label smoothing


def check_loss(margin: "Margin", config: HeadConfig, num_classes: int) -> None:
    """Raise ValueError if there is nothing to learn, or the loss is bent or weighted as margin and head cannot."""
    if num_classes == 1 and margin.link != "sum":
        raise ValueError(f"head: {type(margin).__name__} needs two classes or more: of one alone the softmax is always 1")
    for key, value in (("focal", config.focal), ("label_smoothing", config.label_smoothing)):
        if value and margin.link == "sum":
            raise ValueError(
                f"loss.{key} must be 0 for {type(margin).__name__}, got {value}: it bends the probabilities of a softmax, and "
                f"this loss is a sum over the classes. Set loss.{key}=0"
            )
    if not config.entropy_weights:
        return
    linear = margin.linear_negatives and margin.constant_scale
    wrong = [] if linear else [type(margin).__name__]
    wrong += ["so large a loss.scale"] * (linear and None in constant_shifts(margin, num_classes))
    wrong += ["head.logit_correction=log_r"] * (config.logit_correction != "none")
    wrong += ["head.interclass_filtering_threshold"] * (config.interclass_filtering_threshold > 0)
    # one negative that is nearer than the target: its logit, rounded, less itself would be the entropy
    wrong += ["head.matmul_dtype=bf16"] * (config.matmul_dtype != torch.float32)
    wrong += ["train.tf32=true"] * torch.backends.cuda.matmul.allow_tf32
    if wrong:
        raise ValueError(
            f"loss.entropy_weights must be false with {' and '.join(wrong)}: it needs the logits of all negatives in fp32, "
            "as one scale, below some 80, times their cosines. Set it to false, or the other back"
        )


def sample_losses(
    margin: "Margin", batch: Batch, sums: GlobalSums, config: HeadConfig, trained_of_class: tuple[str, ...] = ()
) -> SampleLosses:
    """Return the losses and how they depend on what the head knows of each sample.

    Args:
        trained_of_class: names in the state that are trained numbers of the samples' classes.
    """
    state = margin.complete(batch.state, sums.log_z, sums.others)
    parameters = tuple(name for name, _ in margin.named_parameters())
    with torch.enable_grad():
        cosine, norm = (given.detach().requires_grad_() for given in (batch.target_cosine, batch.norm))
        leaves = {name: state[name].detach().requires_grad_() for name in (*parameters, *trained_of_class)}
        with_leaves = {**state, **leaves}
        logit = margin.target(cosine, norm, with_leaves)
        offset = margin.negative_offset(with_leaves) if leaves else None
        penalty = margin.penalty(norm)
    count, t = len(cosine), logit.detach()
    lse, by_negatives, spread = None, None, None
    if margin.link == "sum":
        loss = (margin.target_weight * F.softplus(-t) + margin.negative_weight * sums.log_z).mean()
        by_logit = -margin.target_weight * torch.sigmoid(-t) / count
        by_negatives = torch.full_like(t, margin.negative_weight)
    else:
        lse = torch.logaddexp(sums.log_z, t)
        if config.focal == config.label_smoothing == 0.0:
            loss = lse - t
            by_logit = torch.exp(sums.log_z - lse) / -count  # (p - 1) / B without cancellation
        else:
            loss, by_logit, by_negatives, spread = _bent(sums, lse, t, config)
        if sums.mean_logit is not None:
            own = F.softplus(sums.log_z - t)  # -log p without cancellation, as the entropy of an easy sample is near 0
            weights = entropy_weights(torch.exp(-own) * own + torch.exp(sums.log_z - lse) * (lse - sums.mean_logit))
            loss, by_logit = weights * loss, weights * by_logit
            by_negatives = weights if by_negatives is None else weights * by_negatives
            spread = None if spread is None else weights * spread
        loss = loss.mean()
    with torch.enable_grad():  # a sum, not grad_outputs: for those torch imports sympy, half a second of each process
        total = torch.dot(logit, by_logit)
        if offset is not None:
            total = total + offset * ((margin.negative_weight / count) * sums.others[0].sum())
        if penalty is not None:
            total = total + (mean := penalty.mean())
            loss = loss + mean.detach()
    wanted = (cosine, norm, *leaves.values())
    by_cosine, by_norm, *grads = torch.autograd.grad(total, wanted, allow_unused=True)
    by_trained = {
        name: torch.zeros_like(leaf) if grad is None else grad.clone()  # it may be the memory of another gradient
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }
    by_target = torch.zeros_like(t) if by_cosine is None else by_cosine
    return SampleLosses(loss, state, by_negatives, by_target, by_norm, by_trained, lse, spread)


def _bent(sums: GlobalSums, lse: Tensor, t: Tensor, config: HeadConfig) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return (loss of each sample, dloss/dt, A, S) with focal factor and label smoothing."""
    g, e, count = config.focal, config.label_smoothing, len(t)
    loss, q = F.softplus(sums.log_z - t), torch.exp(sums.log_z - lse)  # lse - t would cancel, and with it a part of A
    share: float | Tensor = 0.0
    if sums.spread is not None:
        negatives, logits = sums.spread
        share = e / (negatives + 1.0)
        loss = (1.0 - e) * loss + (e * lse - share * (t + logits))
    focal: float | Tensor = 1.0
    a: float | Tensor = 1.0
    if g:
        safe = q.clamp_min(_TINY)
        focal = safe**g
        a = focal + loss * g * torch.exp(t - lse) * safe ** (g - 1.0)
        loss = loss * focal
    by_logit = (-q * a + (e - share) * focal) / count
    spread = share * focal / count if isinstance(share, Tensor) else None
    return loss, by_logit, a if isinstance(a, Tensor) else None, spread


def entropy_weights(entropy: Tensor) -> Tensor:
    """Return the weights of samples by the entropy of their softmax, from 1 to 2, both (B,): TopoFR's SDE.

    Source: Dan et al., NeurIPS 2024, https://arxiv.org/abs/2410.10587. A sample weighs 2 - g, with g the probability that it
    is easy: that its entropy belongs to a normal density around 0 and not to a uniform one, in a mixture that EM fits to the
    batch. In the authors' code (facechain, face_module/TopoFR) the entropies of every other sample are negative; here each
    sample has both signs, so that their order means nothing. They add 1e-5 to a probability before its logarithm, and their
    further factor 1 - p is cut to an integer, which makes it 1. Rounds of EM are accelerated: Varadhan and Roland, "Simple and
    globally convergent methods for accelerating the convergence of any EM algorithm", 2008, scheme S3.
    """
    squares = entropy.double().square()
    squares = squares / squares.mean().clamp_min(_TINY)
    weighed = torch.stack([torch.ones_like(squares), squares]) / len(squares)

    def easy(share: Tensor, variance: Tensor, density: Tensor) -> Tensor:  # g
        odds = torch.log(share / ((1.0 - share) * density * (2.0 * math.pi * variance).sqrt()))
        return torch.sigmoid(odds - squares / (2.0 * variance))

    def moments(g: Tensor) -> Tensor:  # logs of the means of g and of g x^2
        return torch.mv(weighed, g).clamp_min(_TINY).log()

    def refit(logs: Tensor) -> Tensor:  # g, from the parameters that follow from the moments
        part, spread = logs.exp().clamp_max(1.0 - 1e-6)
        share = part.clamp_max(0.5)
        outside = 3.0 * (1.0 - spread) / (part * (1.0 - share))
        density = torch.where(outside < 1e-3, 1e-3, 0.5 * torch.rsqrt(outside))
        return easy(share, spread / part + 1e-3, density)

    logs = moments(easy(*(squares.new_full((), value) for value in (0.1, 1.001, 0.2))))
    for _ in range(_ROUNDS):
        logs = moments(refit(logs))
    for _ in range(_CYCLES):
        first = moments(refit(logs))
        second = moments(refit(first))
        step, turn = first - logs, second - 2.0 * first + logs
        length = (step.norm() / turn.norm().clamp_min(_TINY)).clamp(1.0, 64.0)
        logs = moments(refit(logs + 2.0 * length * step + length.square() * turn))
    return (2.0 - refit(logs)).float()


def norm_gradient(margin: "Margin", batch: Batch, losses: SampleLosses, along: Tensor, mine: slice) -> Tensor | None:
    """Return dL/d|x| (b,) of this rank's samples, None if it is 0.

    If the scale s of linear negatives depends on the norm, a logit s cos_j has the derivative s' cos_j = s'/s dz/dcos cos_j,
    and the sum over the negatives of dL/dcos_j cos_j is the gradient of the unit embedding times that embedding, but for
    the target class.

    Args:
        along: (b,) the gradient of the unit embedding times that embedding.
    """
    by_norm = None if losses.by_norm is None else losses.by_norm[mine]
    if not margin.linear_negatives or margin.constant_scale:
        return by_norm
    with torch.enable_grad():
        norm = batch.norm[mine].detach().requires_grad_()
        scale = margin.negative_scale(norm, batch.state)
    if not isinstance(scale, Tensor) or not scale.requires_grad:
        return by_norm
    with torch.enable_grad():
        total = scale.sum()
    (slope,) = torch.autograd.grad(total, (norm,))
    negatives = along - losses.by_target[mine] * batch.target_cosine[mine]
    added = negatives * slope / scale.detach()
    return added if by_norm is None else by_norm + added


def factor_of_u(losses: SampleLosses, shift: float | Tensor, gain: float) -> Tensor:
    """Return the factor (B,) that turns U of a shard, which was computed with this K, into its part of the gradient of x."""
    if losses.lse is None:
        return _mean_of(losses)
    factor = torch.exp(shift - losses.lse) / len(losses.lse)
    return (factor if losses.by_negatives is None else factor * losses.by_negatives) * gain


def pull_of(batch: Batch, losses: SampleLosses, factor: Tensor, shift: float | Tensor, slope: float | Tensor | None) -> Pull:
    """Return what the update pass needs of a micro-batch.

    Args:
        factor: of U.
        shift: K of this shard; a tensor if it differs between chunks.
        slope: dz/dcos of linear negatives; None if label smoothing must ask for weights of its own.
    """
    if losses.spread is not None and slope is None:
        mean = _mean_of(losses)
        return Pull(batch, mean, losses.by_target, losses.lse, losses.spread / mean.clamp_min(_TINY))
    even = None if losses.spread is None or slope is None else losses.spread * slope
    if isinstance(shift, Tensor):
        return Pull(batch, _mean_of(losses), losses.by_target, losses.lse, None, even)
    return Pull(batch, factor, losses.by_target, None, None, even)


def _mean_of(losses: SampleLosses) -> Tensor:
    """Return A / B."""
    ones = torch.ones_like(losses.by_target) if losses.by_negatives is None else losses.by_negatives
    return ones / len(ones)


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
