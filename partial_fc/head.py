"""PartialFC: the classifier over all identities, its centres sharded over the ranks, trained by its own optimizer.

Source: An et al., https://arxiv.org/abs/2010.05222 and https://arxiv.org/abs/2203.15565. One optimizer step is

    head.begin_step(labels, step)          # every micro-batch's labels: check, share, draw the active classes
    loss = head(embeddings, micro)         # once per micro-batch; loss.backward() gives the embeddings' gradient
    head.step(lr)                          # after the last forward: gradient and update of the active centres

so centres have no .grad: their gradient exists for one chunk at a time, inside step(). Nothing in step() waits for the
backbone's backward; called before it on CUDA, it runs beside it on a stream of its own. Gradients are those of the mean loss
over the global batch; a data-parallel backbone averages over the ranks, so the caller multiplies its loss by world_size.

Shapes: b = rows of this rank per micro-batch, B = b * world_size, D = embedding size, A = micro-batches.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from utils.randomness import derive

from .collectives import Collectives
from .kernels import choose_kernels, update_rows, why_plain
from .loss import ReadyGradient, row_factors, sums_over_shards
from .neighbours import NeighbourGraph
from .row_optimizer import LazyDecay, RowAdamW, RowOptimizer, RowSGD
from .sampling import draw_active, num_active
from .shard import check_labels, classes_of_slots, shard_range, slots_of_classes
from .side_stream import SideStream
from .softmax import Batch, Chunk, TwoPass, auto_chunk, constant_shift, plan_chunks, unit_rows
from .state import CentreState, Read
from .workspace import Workspace

MEBI = 1 << 20


class _Step(NamedTuple):
    """What begin_step decided and the forwards since left behind, until step() uses it."""

    number: int
    slots: np.ndarray  # (A, B) slot of each row's class, all ranks
    owners: list[np.ndarray]  # per micro-batch: the rows whose class lies here, (n,)
    chunks: list[Chunk]
    batches: list[Batch]
    factors: list[Tensor]
    targets: list[Tensor]
    losses: list[Tensor]


class PartialFC(nn.Module):
    """Margin softmax over num_classes identities, of which this rank holds a balanced shard.

    Args:
        margin: maps cosines to logits (losses.Margin); its `scale`, `logit_bound` and methods are used.
        num_classes: C, at least world_size.
        embedding_size: D.
        rank, world_size: this process among those that share the classes.
        seed: of the slots, the first centres, the sampling and the rounding.
        sample_rate: share of the centres in each step's softmax, in (0, 1].
        optimizer: RowSGD or RowAdamW, of the centres.
        state: "exact", "lean" or "tiny", how centres and moments are stored; see state.py.
        inactive_rows: "keep" leaves the centres that a step did not sample as they are, as in the papers; "decay" does to them
            what a dense optimizer would have done.
        sampling: "uniform", or "neighbours": up to half of the negatives are the classes nearest to the batch's own.
        num_neighbours, neighbours_every: classes kept per class, and optimizer steps between rebuilds of that graph.
        filter_above: negatives with a larger cosine are left out, as likely to be the same person; None = none are.
        matmul_dtype: float32 or bfloat16, of the matrix products; sums are float32.
        wire_dtype: float32 or bfloat16, of the embeddings and their gradients on their way between ranks.
        chunk: classes handled at once; 0 = what suits the device.
        cache_mb: MiB for exponentials that the second pass need not compute again.
        kernels: "auto" = C on the CPU and Triton on CUDA where they can be had, otherwise "plain" torch.
        device: where the shard lives.
    """

    def __init__(
        self,
        margin: Any,
        num_classes: int,
        embedding_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        sample_rate: float = 1.0,
        optimizer: RowOptimizer | None = None,
        state: str = "exact",
        inactive_rows: str = "keep",
        sampling: str = "uniform",
        num_neighbours: int = 10,
        neighbours_every: int = 1000,
        filter_above: float | None = None,
        matmul_dtype: torch.dtype = torch.float32,
        wire_dtype: torch.dtype = torch.float32,
        chunk: int = 0,
        cache_mb: int = 128,
        kernels: str = "auto",
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if num_classes < world_size:
            raise ValueError(
                f"head: {num_classes} classes cannot be shared by {world_size} processes; each needs one. Start fewer processes"
            )
        self.margin, device = margin, torch.device(device)
        self.num_classes, self.embedding_size = num_classes, embedding_size
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.sample_rate, self.wire_dtype = sample_rate, wire_dtype
        self.optimizer = RowSGD() if optimizer is None else optimizer
        self.first_slot, self.end_slot = shard_range(num_classes, rank, world_size)
        self.chunk = min(chunk or auto_chunk(device.type, matmul_dtype), self.end_slot - self.first_slot)
        self.collectives = Collectives(world_size)
        self.workspace = Workspace(device, cache_mb * MEBI, choose_kernels(kernels, device, embedding_size))
        self.warnings: tuple[str, ...] = ()  # what a user should know
        if reason := why_plain(kernels, device, embedding_size):
            missing = "C" if device.type == "cpu" else "Triton"
            self.warnings = (
                f"head: plain torch does the work of the {missing} kernels, so its steps take longer, up to 2.4 times on "
                f"a CPU: {reason}. head.kernels=plain asks for that and says no more",
            )
        # at rate 1 every row is updated in every step, so there is nothing to catch up with
        self._decay = LazyDecay(self.optimizer) if inactive_rows == "decay" and sample_rate < 1 else None
        count_updates = isinstance(self.optimizer, RowAdamW) or self._decay is not None
        self.state = CentreState(
            self.end_slot - self.first_slot,
            embedding_size,
            state,
            second_moment=isinstance(self.optimizer, RowAdamW),
            count_updates=count_updates,
            block=self.chunk,
            workspace=self.workspace,
        )
        self.state.fill_initial(self.first_slot, seed)
        self._passes = TwoPass(margin, self.state, self.workspace, matmul_dtype, filter_above)
        self._shift = constant_shift(margin, num_classes)
        self._graph: NeighbourGraph | None = None
        if sampling == "neighbours" and num_classes > 1:
            self._graph = NeighbourGraph(num_classes, rank, num_neighbours, neighbours_every, self.collectives, device)
        self._beside = SideStream(device)
        self.positive_cosine = torch.zeros((), device=device)
        self._current: _Step | None = None
        self._number = 0  # of the optimizer step begun last
        self._classes: np.ndarray | None = None  # distinct slots of its batch, all ranks

    @property
    def centres(self) -> Tensor:
        """This rank's centres as stored, (stop - start, D), in slot order."""
        return self.state.tensors["centres"]

    @property
    def momentum(self) -> Tensor:
        """This rank's momentum as stored, (stop - start, D)."""
        return self.state.tensors["momentum"]

    def describe(self) -> str:
        """Return a line for the log: what the head is and how it computes."""
        kernels = {"c": "C kernels", "triton": "Triton kernels", "plain": "plain torch"}[self.workspace.kernels]
        size, dtype = (
            (self.end_slot - self.first_slot) * self.state.bytes_per_row / MEBI,
            str(self._passes.dtype).removeprefix("torch."),
        )
        here = f"{self.end_slot - self.first_slot} here in {size:.1f} MiB ({self.state.form})"
        return f"head: {self.num_classes} classes, {here}, {dtype} products, {kernels}"

    def begin_step(self, labels: Tensor, step: int) -> None:
        """Share the labels of one optimizer step, check them, and draw the active classes. A collective call.

        Args:
            labels: (A, b) int64, the classes of this rank's rows in each micro-batch; b is equal on all ranks.
            step: the number of the optimizer step; with the seed and the rank it fixes the draw.

        Raises:
            SharedError: on every rank, naming labels outside [0, num_classes).
        """
        gathered = self.collectives.gather_labels(labels.t().contiguous(), self.workspace.device)  # (B, A)
        everyone = gathered.t().numpy()
        check_labels(everyone, self.num_classes, step)
        slots = slots_of_classes(everyone.reshape(-1), self.num_classes, self.seed).reshape(everyone.shape)
        local = slots - self.first_slot
        here = (slots >= self.first_slot) & (slots < self.end_slot)
        self._number, self._classes = step, np.unique(slots)
        if self._graph is not None and self._graph.is_due(step):
            self._beside.wait()
            self._graph.rebuild(self.state, self._passes.dtype)
        near = None if self._graph is None else self._graph.near(self._classes)
        draw_seed = derive(self.seed, "active", step, self.rank)
        active = draw_active(np.unique(local[here]), self.end_slot - self.first_slot, self.sample_rate, draw_seed, near)
        owners = [np.flatnonzero(mask) for mask in here]
        own = [(rows, local[micro, rows]) for micro, rows in enumerate(owners)]
        chunks = plan_chunks(active, own, self.chunk, self.workspace.device)
        self._current = _Step(step, slots, owners, chunks, [], [], [], [])

    def num_people(self) -> int:
        """Return how many different classes the images of the step begun last have, over all ranks."""
        return 0 if self._classes is None else len(self._classes)

    def num_active(self) -> int:
        """Return how many classes, over all ranks, are in the softmax of the step begun last."""
        if self._classes is None:
            raise RuntimeError("head: call begin_step(labels, step) before num_active()")
        total = 0
        for rank in range(self.world_size):
            start, stop = shard_range(self.num_classes, rank, self.world_size)
            positives = int(np.sum((self._classes >= start) & (self._classes < stop)))
            total += num_active(stop - start, positives, self.sample_rate)
        return total

    def active_rows(self) -> np.ndarray:
        """Return which of this shard's rows are in the softmax of the step begun, (n,) int64."""
        parts = [chunk.select for chunk in self._step().chunks]
        rows = [np.arange(p.start, p.stop) if isinstance(p, slice) else p.cpu().numpy() for p in parts]
        return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)

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
        loss: Tensor = ReadyGradient.apply(embeddings, lambda given: self._compute(given, micro))
        return loss

    @torch.no_grad()
    def step(self, lr: float) -> bool:
        """Update the active centres from the gradient of the mean loss over the micro-batches since begin_step.

        Return False if nothing was updated, on all ranks, because a loss was not finite. On CUDA the work is only enqueued,
        the same holds there, and True is returned.
        """
        current = self._step()
        if len(current.batches) != len(current.slots):
            raise ValueError(f"head: step() after {len(current.batches)} of {len(current.slots)} micro-batches")
        finite = torch.stack(current.losses).isfinite().all().reshape(1)
        # a Triton kernel reads the flag where it lies; otherwise the host has to
        apply = finite if self.workspace.kernels == "triton" and self._decay is None else None
        self._current = None
        if apply is None and not bool(finite):
            return False
        share = 1.0 / len(current.batches)
        factors = [factor * share for factor in current.factors]
        targets = [target * share for target in current.targets]
        seed = derive(self.seed, "rounding", current.number, self.rank)
        self._begin_noise("rounding", current.number)
        with self._beside.run(keep=(current, factors, targets, apply)):
            passes = self._passes.gradients(current.batches, factors, targets, current.chunks)
            for number, (chunk, gradient, own) in enumerate(passes):
                update_rows(self.optimizer, self.state, chunk.select, gradient, own, lr, seed + number, apply)
            if self._decay is not None:
                self._decay.record(lr)
                if self._decay.is_long():
                    self._decay.catch_up_all(self.state, self.chunk)
        return True

    @torch.no_grad()
    def shard_state(self) -> dict[str, Tensor]:
        """Return this rank's rows by name, (stop - start, ...) each, in slot order; rows that lag are brought up to date."""
        self._beside.wait()
        if self._decay is not None:
            self._begin_noise("all rows", self._number)
            self._decay.catch_up_all(self.state, self.chunk)
        rows = {**self.state.tensors, "inverse_norms": self.state.inverse_norms}
        if isinstance(self.optimizer, RowSGD):
            rows.pop("updates", None)  # says only how far rows lag, which is nothing now
        if self._graph is not None:
            rows["neighbours"] = self._graph.slots
        return rows

    @torch.no_grad()
    def load_rows(self, read: Read) -> None:
        """Fill this shard from read(start slot, stop slot) -> tensors by name, of any world size and state format."""
        also = {} if self._graph is None else {"neighbours": self._graph.slots}
        self.state.read_rows(lambda low, high: read(self.first_slot + low, self.first_slot + high), also)
        if self._decay is not None:
            self._decay.resume(self.state)

    def shard_classes(self) -> np.ndarray:
        """Return the class (label) of each of this shard's rows, (stop - start,) int64."""
        return classes_of_slots(np.arange(self.first_slot, self.end_slot), self.num_classes, self.seed)

    def _step(self) -> _Step:
        if self._current is None:
            raise RuntimeError("head: call begin_step(labels, step) before forward() and step()")
        return self._current

    def _compute(self, embeddings: Tensor, micro: int) -> tuple[Tensor, Tensor]:
        """Return (mean loss, its gradient for this rank's (b, D) embeddings), and keep what step() needs."""
        step = self._step()
        if micro == 0:
            self._begin_passes(step, rows=len(embeddings) * self.world_size)
        everyone = self.collectives.all_gather(embeddings.to(self.wire_dtype)).float()
        mine = slice(self.rank * len(embeddings), (self.rank + 1) * len(embeddings))
        unit, norm = unit_rows(everyone)
        own = torch.from_numpy(step.owners[micro]).to(unit.device)
        own_slots = torch.from_numpy(step.slots[micro, step.owners[micro]] - self.first_slot).to(unit.device)
        own_centres = self.centres[own_slots].float() * self.state.inverse_norms[own_slots, None]
        cosine = unit.new_zeros(len(unit))
        cosine[own] = (unit[own] * own_centres).sum(dim=1)
        batch, z_sum, u_sum, by_target = sums_over_shards(
            self._passes, self.collectives, Batch(unit, cosine, 0.0), self._shift, step.chunks, micro
        )
        rows = row_factors(self.margin, batch.target_cosine, norm.squeeze(1), z_sum, by_target, batch.shift, self._passes.gain)
        gradient = u_sum.mul_(rows.negatives[:, None])
        gradient.index_add_(0, own, own_centres * rows.target[own, None])
        gradient = self.collectives.reduce_scatter(gradient.to(self.wire_dtype)).float()
        gradient = (gradient - unit[mine] * (gradient * unit[mine]).sum(dim=1, keepdim=True)) / norm[mine]
        if rows.by_norm is not None:
            gradient += unit[mine] * rows.by_norm[mine, None]
        step.batches.append(batch)
        step.factors.append(rows.negatives)
        step.targets.append(rows.target)
        step.losses.append(rows.loss)
        self.positive_cosine = batch.target_cosine.mean()
        return rows.loss, gradient

    def _begin_passes(self, step: _Step, rows: int) -> None:
        self._beside.wait()  # the buffers and the centres may be in use by the step before
        self._passes.begin(step.chunks, rows, len(step.slots))
        if self._decay is not None:
            self._begin_noise("catch up", step.number)
            for chunk in step.chunks:
                self._decay.catch_up(self.state, chunk.select)

    def _begin_noise(self, purpose: str, number: int) -> None:
        if self.state.noise is not None:
            self.state.noise.begin(derive(self.seed, purpose, number, self.rank))
