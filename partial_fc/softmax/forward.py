"""The forward pass of a micro-batch: its loss, the gradient of its embeddings, and what the update needs of it.

One all-reduce is enough where the negatives are one scale times the cosine and K is constant: then no chunk depends on the
target class. Other margins need the target cosines first. Shards whose K are their own maxima gather their sums, and each
rank adds them in the same order. So there are never more than two.
Shapes: b = samples of this rank, B = b * world_size, D = embedding size, n = samples of B whose class lies in this shard.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from utils.randomness import derive

from ..centres.margin_numbers import MarginNumbers
from ..centres.sub_centers import target_centres
from ..collectives import Collectives
from ..config import HeadConfig
from ..sampling.planning import StepPlan
from .loss import GlobalSums, SampleLosses, factor_of_u, norm_gradient, pull_of, sample_losses
from .passes import Batch, Pull, ShardSums, State, TwoPass


class Step(NamedTuple):
    """What begin_step of the head decided and the forwards since left behind, until its step() uses it."""

    plan: StepPlan
    pulls: list[Pull]  # of each micro-batch, like states and losses
    states: list[State]
    losses: list[Tensor]
    gradients: dict[str, Tensor]  # of the margin's trained numbers, summed over the micro-batches
    # this shard's part of what the loss has of all classes, and its gradients, if the loss has that
    class_penalties: list[tuple[Tensor, dict[str, Tensor]]]


class Forward:
    """The forward passes of a rank, and the margin's part in the optimizer step."""

    def __init__(
        self, passes: TwoPass, numbers: MarginNumbers, collectives: Collectives, config: HeadConfig, rank: int, seed: int
    ) -> None:
        self.margin, self.passes, self.numbers, self.collectives = passes.margin, passes, numbers, collectives
        self.config, self.rank, self.seed = config, rank, seed  # of the head

    def compute(self, step: Step, embeddings: Tensor, micro: int) -> tuple[Tensor, Tensor]:
        """Return (mean loss over all ranks, its gradient for this rank's (b, D) embeddings), and add to the step."""
        everyone = self.collectives.all_gather(embeddings.to(self.config.wire_dtype)).float()
        mine = slice(self.rank * len(embeddings), (self.rank + 1) * len(embeddings))
        norm = torch.linalg.vector_norm(everyone, dim=1, keepdim=True).clamp_min(1e-12)
        unit = everyone / norm  # a zero row stays zero
        here, rows = step.plan.owners[micro], step.plan.local[micro]  # the samples whose class lies here, and its slot
        passes = self.passes
        own = unit.index_select(0, here)
        centres, which = target_centres(passes.centre_store, rows, own, passes.sub_centers)
        cosine = unit.new_zeros(len(unit)).index_copy_(0, here, (own * centres).sum(dim=1))
        nearest = None if which is None else torch.zeros_like(step.plan.places[micro]).index_copy_(0, here, which)
        batch = Batch(unit, norm.squeeze(1), cosine, step.plan.places[micro], {}, nearest=nearest)
        class_rows = self._class_rows(step, here, rows, len(unit))
        batch, class_rows, local, total = self._sums_over_shards(step, batch, class_rows, micro)
        losses = sample_losses(self.margin, batch, total, self.config, self.numbers.trained)
        factor = factor_of_u(losses, local.shift, passes.gain(batch))
        slope = passes.slope(batch) if passes.spreads_evenly(batch) else None
        pull = pull_of(batch, losses, factor, local.shift, slope)
        gradient = local.u.mul_(factor[:, None])
        spread = losses.spread if pull.even is None else pull.even
        if spread is not None and local.slopes is not None:
            gradient -= spread[:, None] * local.slopes
        gradient.index_add_(0, here, centres * pull.whole_target[here, None])
        gradient = self.collectives.reduce_scatter(gradient.to(self.config.wire_dtype)).float()
        along = (gradient * unit[mine]).sum(dim=1, keepdim=True)
        gradient = (gradient - unit[mine] * along) / norm[mine]
        by_norm = norm_gradient(self.margin, batch, losses, along.squeeze(1), mine)
        if by_norm is not None:
            gradient += unit[mine] * by_norm[:, None]
        loss = losses.loss if not step.class_penalties else losses.loss + class_rows[-1, 0]
        self._add_gradients(step, here, rows, losses)
        step.pulls.append(pull)
        step.states.append(losses.state)
        step.losses.append(loss)
        return loss, gradient

    def step_margin(self, step: Step, lr: float, good: Tensor) -> None:
        """Store the margin's statistics, and update its trained numbers, unless good, () bool, is False."""
        self.margin.commit(step.states, good)
        share = 1.0 / len(step.pulls)
        self.numbers.update({name: gradient * share for name, gradient in step.gradients.items()}, lr, good)
        samples = zip(step.pulls, step.plan.owners, step.plan.local, strict=True)
        for pull, here, rows in samples if self.numbers.tensors else ():
            self.margin.collect(self.numbers.tensors, rows, pull.batch.unit[here], good)
        self.margin.refresh(self.numbers.tensors, step.plan.labels.step + 1, good, self.collectives)

    def _class_rows(self, step: Step, here: Tensor, rows: Tensor, count: int) -> Tensor:
        """Return (k, B) numbers of the samples' classes, and, if the loss has it, a row of its part of all classes."""
        penalty = None if step.pulls else self.margin.class_penalty(self.numbers.tensors, self.numbers.num_classes)
        if penalty is not None:
            step.class_penalties.append(penalty)
        given = self.numbers.by_sample(here, rows, count)
        return torch.cat([given, *(value.expand(1, count) for value, _ in step.class_penalties)])

    def _add_gradients(self, step: Step, here: Tensor, rows: Tensor, losses: SampleLosses) -> None:
        """Add the gradients of the margin's trained numbers."""
        for name, gradient in losses.by_trained.items():
            if name in self.numbers.trained:
                gradient = self.numbers.summed_by_row(rows, gradient[here])
                for _, by_class in step.class_penalties:
                    gradient = gradient + by_class[name]
            step.gradients[name] = step.gradients[name] + gradient if name in step.gradients else gradient

    def _sums_over_shards(
        self, step: Step, batch: Batch, rows: Tensor, micro: int
    ) -> tuple[Batch, Tensor, ShardSums, GlobalSums]:
        """Return the batch with target cosines, state and function; the rows of all shards; the sums of this shard and of all.

        Args:
            batch: with the target cosines of the samples whose class is in this shard, 0 for the others.
            rows: (k, B) more numbers to add up over the shards, fp32.
        """
        margin, passes, collectives, chunks = self.margin, self.passes, self.collectives, step.plan.chunks

        def observed(cosine: Tensor, numbers: Tensor) -> Batch:
            of_class = dict(zip(self.numbers.scalars, numbers, strict=False))
            state = margin.observe(cosine, batch.norm, derive(self.seed, "margin", step.plan.labels.step, micro), of_class)
            return batch._replace(target_cosine=cosine, state=state)

        if margin.linear_negatives and margin.constant_scale and passes.shift is not None:
            if any(chunk.weights is not None for chunk in chunks) or (passes.smooths and not passes.spreads_evenly(batch)):
                batch = batch._replace(function=margin.negatives(batch.target_cosine, batch.norm, {}))
            local = passes.forward(batch, chunks, micro)
            more = [] if local.spread is None else [*local.spread]
            if passes.weighs:  # sum_j E z
                more.append(passes.gain(batch) * (batch.unit * local.u).sum(dim=1))
            summed = collectives.sum(torch.stack([local.sums[0], batch.target_cosine, *rows, *more]))
            cosine, rows, rest = summed[1], summed[2 : 2 + len(rows)], summed[2 + len(rows) :]
            batch = observed(cosine, rows)
            spread = rest[:2] if passes.smooths else None
            mean_logit = rest[-1] / summed[0].clamp_min(1e-37) if passes.weighs else None
            return batch, rows, local, GlobalSums(torch.log(summed[0]) + passes.shift, local.sums[1:], spread, mean_logit)
        first = collectives.sum(torch.stack([batch.target_cosine, *rows]))
        cosine, rows = first[0], first[1:]
        batch = observed(cosine, rows)
        batch = batch._replace(function=margin.negatives(cosine, batch.norm, batch.state))
        local = passes.forward(batch, chunks, micro)
        parts = local.sums if local.spread is None else torch.cat([local.sums, local.spread])
        if isinstance(local.shift, Tensor):
            whole = collectives.all_gather(torch.cat([local.shift[None], parts])[None])
            z_sums, summed = whole[:, 1], whole[:, 1:].sum(dim=0)
            log_z = torch.logsumexp(torch.log(z_sums) + whole[:, 0], dim=0)
        else:
            summed = collectives.sum(parts)
            log_z = summed[0] if margin.link == "sum" else torch.log(summed[0]) + local.shift
        return batch, rows, local, GlobalSums(log_z, summed[1:3], summed[3:] if local.spread is not None else None)
