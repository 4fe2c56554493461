"""PartialFC: the classifier over all identities, its centres sharded over the ranks, trained by its own optimizer.

Source: An et al., https://arxiv.org/abs/2010.05222 and https://arxiv.org/abs/2203.15565. One optimizer step is

    head.begin_step(labels, step)          # every micro-batch's labels: check, share, draw the active classes
    loss = head(embeddings, micro)         # once per micro-batch; loss.backward() gives the embeddings' gradient
    head.step(lr)                          # gradient and update of the active centres

so centres have no .grad: their gradient exists for one chunk at a time, inside step(). Gradients are those of the mean loss
over the global batch; a data-parallel backbone averages over the ranks, so the caller multiplies its loss by world_size.

Shapes: b = rows of this rank per micro-batch, B = b * world_size, D = embedding size, A = micro-batches.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from utils.distributed import SharedError
from utils.randomness import derive

from .collectives import Collectives
from .sampling import draw_active, num_active
from .shard import classes_of_slots, initial_centres, shard_range, slots_of_classes
from .softmax import (
    Batch,
    Chunk,
    centre_gradients,
    forward_pass,
    needs_row_maximum,
    plan_chunks,
    row_maximum,
    unit_rows,
)

STATE_NAMES = ("centres", "momentum")


class _Step(NamedTuple):
    """What begin_step decided and the forwards since left behind, until step() uses it."""

    slots: np.ndarray  # (A, B) slot of each row's class, all ranks
    owners: list[np.ndarray]  # per micro-batch: the rows whose class lies here, (n,)
    chunks: list[Chunk]
    batches: list[Batch]
    factors: list[Tensor]
    targets: list[Tensor]


class PartialFC(nn.Module):
    """Margin softmax over num_classes identities, of which this rank holds a balanced shard.

    Args:
        margin: maps cosines to logits (losses.Margin); its `scale`, `logit_bound` and methods are used.
        num_classes: C, at least world_size.
        embedding_size: D.
        rank, world_size: this process among those that share the classes.
        seed: of the slots, the first centres and the sampling.
        sample_rate: share of the centres in each step's softmax, in (0, 1].
        momentum, weight_decay: of the centres' SGD; both touch active rows only, as in the papers.
        matmul_dtype: float32 or bfloat16, of the matrix products; sums and states are float32.
        chunk: classes handled at once.
        device: where the shard lives.
    """

    centres: Tensor
    momentum: Tensor

    def __init__(
        self,
        margin: Any,
        num_classes: int,
        embedding_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        sample_rate: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        matmul_dtype: torch.dtype = torch.float32,
        chunk: int = 4096,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if num_classes < world_size:
            raise ValueError(
                f"head: {num_classes} classes cannot be shared by {world_size} processes; each needs one. Start fewer processes"
            )
        self.margin = margin
        self.num_classes, self.embedding_size = num_classes, embedding_size
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.sample_rate, self.momentum_factor, self.weight_decay = sample_rate, momentum, weight_decay
        self.matmul_dtype, self.chunk = matmul_dtype, chunk
        self.start, self.stop = shard_range(num_classes, rank, world_size)
        centres = initial_centres(self.start, self.stop, embedding_size, seed).to(device)
        self.register_buffer("centres", centres)
        self.register_buffer("momentum", torch.zeros_like(centres))
        self.collectives = Collectives(world_size)
        self.positive_cosine = torch.zeros((), device=device)
        self._current: _Step | None = None

    def begin_step(self, labels: Tensor, step: int) -> None:
        """Share the labels of one optimizer step, check them, and draw the active classes. A collective call.

        Args:
            labels: (A, b) int64, the classes of this rank's rows in each micro-batch; b is equal on all ranks.
            step: the number of the optimizer step; with the seed and the rank it fixes the draw.

        Raises:
            SharedError: on every rank, naming labels outside [0, num_classes).
        """
        gathered = self.collectives.gather_labels(labels.t().contiguous(), self.centres.device)  # (B, A)
        everyone = gathered.t().numpy()
        wrong = np.unique(everyone[(everyone < 0) | (everyone >= self.num_classes)])
        if wrong.size:
            raise SharedError(
                f"labels must be in [0, {self.num_classes}), the number of classes; step {step} has "
                f"{', '.join(map(str, wrong[:5]))}. "
                "Correct data.num_classes or the labels"
            )
        slots = slots_of_classes(everyone.reshape(-1), self.num_classes, self.seed).reshape(everyone.shape)
        local = slots - self.start
        here = (slots >= self.start) & (slots < self.stop)
        positives = np.unique(local[here])
        draw_seed = derive(self.seed, "active", step, self.rank)
        active = draw_active(positives, self.stop - self.start, self.sample_rate, draw_seed)
        owners = [np.flatnonzero(mask) for mask in here]
        own = [(rows, local[micro, rows]) for micro, rows in enumerate(owners)]
        chunks = plan_chunks(active, own, self.chunk, self.centres.device)
        self._current = _Step(slots, owners, chunks, [], [], [])

    def num_active(self) -> int:
        """Return how many classes, over all ranks, are in the softmax of the step begun."""
        positives, total = np.unique(self._step().slots), 0
        for rank in range(self.world_size):
            start, stop = shard_range(self.num_classes, rank, self.world_size)
            here = int(np.sum((positives >= start) & (positives < stop)))
            total += num_active(stop - start, here, self.sample_rate)
        return total

    def forward(self, embeddings: Tensor, micro: int = 0) -> Tensor:
        """Return the scalar mean loss over all ranks' rows of micro-batch number `micro`, equal on all ranks.

        Args:
            embeddings: (b, D) raw (not normalised) embeddings of this rank's rows; differentiable.
        """
        step = self._step()
        if len(step.batches) != micro:
            raise ValueError(
                f"head: micro-batch {micro} out of turn, expected {len(step.batches)}; call them in order, once each"
            )
        rows, expected = len(embeddings) * self.world_size, step.slots.shape[1]
        if rows != expected:
            raise ValueError(f"head: {rows} embeddings over all ranks for {expected} labels; give begin_step the same rows")
        loss: Tensor = _Loss.apply(embeddings, self, micro)
        return loss

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the active centres by SGD with momentum and weight decay from the micro-batches since begin_step.

        m <- momentum m + g + weight_decay w, w <- w - lr m, g the gradient of the mean loss over the micro-batches.
        """
        current = self._step()
        share = 1.0 / len(current.batches)
        factors = [factor * share for factor in current.factors]
        targets = [target * share for target in current.targets]
        for slots, rows, gradient in centre_gradients(
            self.margin, current.batches, factors, targets, self.centres, current.chunks, self.matmul_dtype
        ):
            momentum = self.momentum[slots]
            momentum.mul_(self.momentum_factor).add_(gradient).add_(rows, alpha=self.weight_decay)
            rows.add_(momentum, alpha=-lr)
            if not isinstance(slots, slice):  # single slots were copied out; runs of slots are views, updated in place
                self.momentum[slots], self.centres[slots] = momentum, rows
        self._current = None

    def skip_step(self) -> None:
        """Forget the step begun without any update, for example after an overflow in the backbone's gradients."""
        self._current = None

    def shard_state(self) -> dict[str, Tensor]:
        """Return this rank's rows, {"centres", "momentum"}: (stop - start, D), in slot order."""
        return {name: getattr(self, name) for name in STATE_NAMES}

    @torch.no_grad()
    def load_rows(self, read: Callable[[int, int], dict[str, Tensor]]) -> None:
        """Fill this shard from read(start slot, stop slot) -> {"centres", "momentum"}, written at any world size."""
        rows = read(self.start, self.stop)
        for name in STATE_NAMES:
            mine = getattr(self, name)
            if rows[name].shape != mine.shape:
                raise ValueError(f"head: saved {name} are {tuple(rows[name].shape)}, this run needs {tuple(mine.shape)}")
            mine.copy_(rows[name])

    def shard_classes(self) -> np.ndarray:
        """Return the class (label) of each of this shard's rows, (stop - start,) int64."""
        return classes_of_slots(np.arange(self.start, self.stop), self.num_classes, self.seed)

    def _step(self) -> _Step:
        if self._current is None:
            raise RuntimeError("head: call begin_step(labels, step) before forward() and step()")
        return self._current

    def _compute(self, embeddings: Tensor, micro: int) -> tuple[Tensor, Tensor]:
        """Return (mean loss, its gradient for this rank's (b, D) embeddings), and keep what step() needs."""
        step = self._step()
        local_unit, local_norm = unit_rows(embeddings)
        unit, norm = unit_rows(self.collectives.all_gather(embeddings))
        own = torch.from_numpy(step.owners[micro]).to(unit.device)
        own_slots = torch.from_numpy(step.slots[micro, step.owners[micro]] - self.start).to(unit.device)
        own_centres, _ = unit_rows(self.centres[own_slots])
        cosine = unit.new_zeros(len(unit))
        cosine[own] = (unit[own] * own_centres).sum(dim=1)
        batch, z_sum, u_sum, by_target = self._sums(Batch(unit, cosine[:, None], None), micro)

        with torch.enable_grad():
            leaf_cosine = batch.target_cosine.squeeze(1).detach().requires_grad_()
            leaf_norm = norm.squeeze(1).requires_grad_()
            logit = self.margin.target(leaf_cosine, leaf_norm)
        shift = torch.zeros_like(z_sum) if batch.shift is None else batch.shift.squeeze(1)
        log_z = torch.log(z_sum) + shift
        lse = torch.logaddexp(log_z, logit.detach())
        loss = (lse - logit.detach()).mean()
        by_logit = -torch.exp(log_z - lse) / len(unit)  # (p - 1) / B without cancellation
        by_cosine, by_norm = torch.autograd.grad(logit, (leaf_cosine, leaf_norm), by_logit, allow_unused=True)
        factor = torch.exp(shift - lse) / len(unit)
        target = factor * by_target + (0.0 if by_cosine is None else by_cosine)

        gradient = u_sum.mul_(factor[:, None])
        gradient.index_add_(0, own, own_centres * target[own, None])
        gradient = self.collectives.reduce_scatter(gradient)
        gradient = (gradient - local_unit * (gradient * local_unit).sum(dim=1, keepdim=True)) / local_norm
        if by_norm is not None:
            mine = slice(self.rank * len(embeddings), (self.rank + 1) * len(embeddings))
            gradient += local_unit * by_norm[mine, None]
        step.batches.append(batch)
        step.factors.append(factor)
        step.targets.append(target)
        self.positive_cosine = leaf_cosine.detach().mean()
        return loss, gradient

    def _sums(self, batch: Batch, micro: int) -> tuple[Batch, Tensor, Tensor, Tensor]:
        """Run the forward pass; return (batch with its target cosines and K filled in, Z, U, sum_j E dz/dt).

        Z and the last are summed over the ranks, U is this shard's share. batch.target_cosine comes in with the rows that this
        shard owns, 0 elsewhere.
        """
        chunks, cosine = self._step().chunks, batch.target_cosine
        bounded = not needs_row_maximum(self.margin, self.num_classes)
        if bounded and self.margin.linear_negatives:  # one all-reduce of 2B floats
            z_sum, u_sum, by_target = forward_pass(self.margin, batch, self.centres, chunks, micro, self.matmul_dtype)
            z_sum, cosine = self.collectives.sum(torch.stack([z_sum, cosine.squeeze(1)]))
            return batch._replace(target_cosine=cosine[:, None]), z_sum, u_sum, by_target
        self.collectives.sum(cosine)  # the chunks need every row's target cosine
        if not bounded:
            largest = row_maximum(self.margin, batch, self.centres, chunks, micro, self.matmul_dtype)
            batch = batch._replace(shift=self.collectives.max(largest).clamp_min_(-1e30))
        z_sum, u_sum, by_target = forward_pass(self.margin, batch, self.centres, chunks, micro, self.matmul_dtype)
        z_sum, by_target = self.collectives.sum(torch.stack([z_sum, by_target]))
        return batch, z_sum, u_sum, by_target


class _Loss(torch.autograd.Function):
    """The loss with the embeddings' gradient computed in its forward; backward only hands it on."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, head: PartialFC, micro: int) -> Tensor:
        loss, gradient = head._compute(embeddings.detach().float(), micro)
        ctx.save_for_backward(gradient.to(embeddings.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0], None, None
