"""PartialFC: the classifier over all identities, its centres sharded over the ranks, trained by its own optimizer.

Source: An et al., https://arxiv.org/abs/2010.05222 and https://arxiv.org/abs/2203.15565. One optimizer step is

    head.begin_step(labels, step)          # every micro-batch's labels: check, share, draw the active classes
                                           # or head.prepare(labels, step) in a thread, and its result here
    loss = head(embeddings, micro)         # once per micro-batch; loss.backward() gives the embeddings' gradient
    head.step(lr)                          # after the last forward: gradient and update of the active centres

so centres have no .grad: their gradient exists for one chunk at a time, inside step(). On CUDA the update is enqueued on a
stream of its own. It waits for the flag that lets it happen, and runs beside what is enqueued after that: see settle().
Gradients are those of the mean loss over the global batch; a data-parallel backbone averages over the ranks, so the caller
multiplies its loss by world_size.

Shapes: b = samples of this rank per micro-batch, B = b * world_size, D = embedding size, A = micro-batches.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from utils.memory import free_bytes
from utils.randomness import derive

from .centres.margin_numbers import MarginNumbers
from .centres.row_optimizer import LazyDecay
from .centres.shard import check_labels, classes_of_slots, shard_range, slots_of_classes
from .centres.store import CentreStore, Read
from .centres.sub_centers import by_slot
from .collectives import Collectives
from .config import HeadConfig
from .kernels import build_kernels, choose_kernels, why_plain
from .kernels.plain import auto_chunk
from .sampling.planning import NeighbourGraph, SharedLabels, StepPlan, active_of_all_ranks, draw_active, plan_step
from .softmax.choice import choose_form
from .softmax.forward import Forward, Step
from .softmax.loss import ReadyGradient, check_loss
from .softmax.passes import TwoPass, constant_shift
from .workspace import SideStream, Workspace

if TYPE_CHECKING:  # parts do not import one another
    from losses.margin import Margin


class PartialFC(nn.Module):
    """Margin softmax over num_classes identities, of which this rank holds a balanced shard.

    Args:
        margin: maps cosines to logits (losses.Margin). It moves to the device with the head.
        num_classes: C, at least world_size.
        embedding_size: D.
        rank, world_size: this process among those that share the classes.
        seed: of the slots, the first centres, the sampling and the rounding.
        config: storage, sampling, arithmetic and optimizer of the centres.
        device: which computes, and where the shard lives unless config.placement says otherwise.
        folder: where the file of placement=disk takes its space; None = the folder for temporary files.
    """

    def __init__(
        self,
        margin: "Margin",
        num_classes: int,
        embedding_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        config: HeadConfig | None = None,
        device: torch.device | str = "cpu",
        folder: Path | None = None,
    ) -> None:
        super().__init__()
        if num_classes < world_size:
            raise ValueError(
                f"head: {num_classes} classes cannot be shared by {world_size} processes; each needs one. Start fewer processes"
            )
        device = torch.device(device)
        config = HeadConfig() if config is None else config
        check_loss(margin, config, num_classes)
        self.margin = margin.to(device)
        self.num_classes, self.embedding_size = num_classes, embedding_size
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.config = config
        self.first_slot, self.end_slot = shard_range(num_classes, rank, world_size)
        self.num_slots = self.end_slot - self.first_slot
        per_class = config.sub_centers
        rows = min(config.chunk or auto_chunk(device.type, config.matmul_dtype), self.num_slots * per_class)
        self.chunk = max(1, rows // per_class) * per_class  # rows of the centres, all those of each class
        self.collectives = Collectives(world_size)
        # a rank does not know how many share its machine's memory, so it counts all of them
        budget = config.cache_mb << 20 if config.cache_mb >= 0 else functools.partial(free_bytes, device, world_size)
        self.workspace = Workspace(device, budget)
        self.kernels = build_kernels(choose_kernels(config.kernels, device, embedding_size), self.workspace)
        self.warnings: tuple[str, ...] = ()  # what a user should know
        if reason := why_plain(config.kernels, device, embedding_size):
            missing = "C" if device.type == "cpu" else "Triton"
            self.warnings = (
                f"head: plain torch does the work of the {missing} kernels, so its steps take longer, up to 2.4 times on "
                f"a CPU: {reason}. head.kernels=plain asks for that and says no more",
            )
        self._decay = LazyDecay(config.optimizer) if config.decays else None
        self.centre_store = CentreStore(
            self.num_slots * per_class,
            embedding_size,
            config.storage,
            second_moment=config.has_second_moment,
            count_updates=config.counts_updates,
            block=self.chunk,
            workspace=self.workspace,
            placement=config.placement,
            folder=folder,
            frozen=config.frozen,
        )
        self.centre_store.fill_initial(self.first_slot * per_class, seed)
        margin.prepare(num_classes, self.first_counted)
        self._numbers = MarginNumbers(margin, self.num_slots, num_classes, embedding_size, config.optimizer, device)
        self._passes = TwoPass(margin, self.centre_store, self.kernels, config, constant_shift(margin, num_classes))
        self._forward = Forward(self._passes, self._numbers, self.collectives, config, rank, seed)
        self._graph: NeighbourGraph | None = None
        if config.sampling == "neighbours" and num_classes > 1:
            self._graph = NeighbourGraph(num_classes, rank, config, seed, self.collectives, device)
        self.news = ""  # what the log should say about the step begun last
        self._beside = SideStream(device)
        self.positive_cosine = torch.zeros((), device=device)
        self._current: Step | None = None
        self._number = 0  # of the optimizer step begun last
        self._stage = -1  # the first step of its stage
        self._classes: np.ndarray | None = None  # distinct slots of its batch, all ranks

    @property
    def centres(self) -> Tensor:
        """This rank's centres as stored, (num_slots, D), in slot order; (num_slots, K, D) of K sub-centers."""
        self._beside.wait()
        return by_slot(self.centre_store.tensors, self.config.sub_centers)["centres"]

    @torch.no_grad()
    def choose_form(self, samples: int, recorded: str = "") -> str:
        """Choose how exponentials are computed for a global micro-batch of so many samples; see softmax/choice.py."""
        return choose_form(self._passes, self.config, self.chunk, samples, recorded, self.collectives)

    def describe(self) -> str:
        """Return a line for the log: what the head is and how it computes."""
        size = self.centre_store.num_rows * self.centre_store.bytes_per_row / 2**20
        several = f" of {self.config.sub_centers} sub-centers" if self.config.sub_centers > 1 else ""
        dtype = str(self._passes.dtype).removeprefix("torch.")
        where = "" if self.config.placement == "device" else f" on the {self.config.placement}"
        here = f"{self.num_slots} here in {size:.1f} MiB{where} ({self.centre_store.form})"
        kind = "frozen head" if self.config.frozen else "head"
        return f"{kind}: {self.num_classes} classes{several}, {here}, {dtype} products, {self.kernels.words}"

    def frozen(self, folder: Path | None = None) -> "PartialFC":
        """Return a head with the same classes in the same slots, whose centres never change; only its margin learns.

        Each of its steps begins with `plan` of this head, so the same classes are active in both. The folder is as in __init__.
        """
        size, place = (self.num_classes, self.embedding_size), (self.rank, self.world_size, self.seed)
        head = PartialFC(copy.deepcopy(self.margin), *size, *place, self.config.as_frozen(), self.workspace.device, folder)
        head.kernels.fused = self.kernels.fused
        return head

    @property
    def plan(self) -> StepPlan:
        """What is active in the step begun."""
        return self._step().plan

    def prepare(self, labels: Tensor, step: int, flags: Sequence[bool] = ()) -> StepPlan | SharedLabels:
        """Share the labels of one optimizer step, check them, and draw the active classes unless that takes a graph.

        A collective call over a group of its own, so a thread may make it while the step before is computed.

        Args:
            labels: (A, b) int64 on the CPU, the classes of this rank's samples in each micro-batch; b is equal on all ranks.
            step: the number of the optimizer step; with the seed and the rank it fixes the draw.
            flags: what this rank tells the others, see SharedLabels.

        Raises:
            SharedError: on every rank, naming labels outside [0, num_classes).
        """
        shared_labels, held = self.collectives.gather_labels(labels, flags)
        everyone = shared_labels.numpy()  # (A, B)
        check_labels(everyone, self.num_classes, step)
        slots = slots_of_classes(everyone.reshape(-1), self.num_classes, self.seed).reshape(everyone.shape)
        classes = np.unique(slots, return_counts=True)[0]  # without the counts numpy hashes, which takes ten times as long
        shared = SharedLabels(step, slots, classes, held)
        return self._plan(shared, None) if self._graph is None else shared  # the graph changes with the centres

    def begin_step(self, prepared: StepPlan | SharedLabels | Tensor, step: int) -> None:
        """Begin an optimizer step.

        Args:
            prepared: what `prepare` returned for this step; or the labels, as `prepare` takes them.
        """
        if isinstance(prepared, Tensor):
            prepared = self.prepare(prepared, step)
        news: list[str] = []
        if isinstance(prepared, SharedLabels):
            assert self._graph is not None
            near = None
            if self.config.rate_at(step) < 1:  # where all classes are active, none has to be near
                if self._graph.is_due(step):
                    self.catch_up("neighbours")
                    news.append(self._graph.rebuild(self.centre_store, self._passes.dtype, step))
                near = self._graph.near(prepared.classes)
            prepared = self._plan(prepared, near)
        self._number, self._classes = step, prepared.labels.classes
        self.margin.at_step(step + 1)
        self._passes.shift = constant_shift(self.margin, self.num_classes)
        self.news = "; ".join(filter(None, [*news, self._stage_news(step)]))
        self._current = Step(prepared, [], [], [], {}, [])
        if self.config.fetches_at(self.config.rate_at(step)):
            self._beside.mark()  # after the update before, on its stream, and beside the backbone's forward pass
            with self._beside.run(keep=prepared):
                self._passes.fetch(prepared.chunks)

    def _stage_news(self, step: int) -> str:
        """Return a line for the log if the step is the first of a stage, or the first that this process takes in it."""
        begun = [first for first, _ in self.config.rates if first <= step]
        if not begun or begun[-1] == self._stage:
            return ""
        self._stage = begun[-1]
        values = {"sample_rate": self.config.rate_at(step), **self.margin.arguments_at(step + 1)}
        return f"head after step {self._stage}: {', '.join(f'{name} {value:g}' for name, value in values.items())}"

    def _plan(self, labels: SharedLabels, near: np.ndarray | None) -> StepPlan:
        classes = labels.classes
        positives = classes[(classes >= self.first_slot) & (classes < self.end_slot)] - self.first_slot
        seed = derive(self.seed, "active", labels.step, self.rank)
        rate = self.config.rate_at(labels.step)
        active = draw_active(positives, self.num_slots, rate, seed, near)
        slots, weighs = range(self.first_slot, self.end_slot), self.config.logit_correction == "log_r"
        per_class = self.config.sub_centers
        plan = plan_step(labels, active, slots, self.chunk // per_class, self.workspace.device, weighs, per_class)
        if rate < 1:
            self.centre_store.read_ahead([chunk.select for chunk in plan.chunks])
        return plan

    def num_people(self) -> int:
        """Return how many different classes the images of the step begun last have, over all ranks."""
        return 0 if self._classes is None else len(self._classes)

    def num_active(self) -> int:
        """Return how many classes, over all ranks, are in the softmax of the step begun last."""
        if self._classes is None:
            raise RuntimeError("head: call begin_step(labels, step) before num_active()")
        return self._active_for(self._classes, weighted=False)

    def num_counted(self) -> int:
        """Return for how many classes those of num_active() stand: more, if head.logit_correction weighs them."""
        return self._active_for(self._classes, weighted=self.config.logit_correction == "log_r")

    @property
    def first_counted(self) -> int:
        """For how many classes the active ones stand before any batch is known; the margin's first numbers follow from it."""
        return self._active_for(None, weighted=self.config.logit_correction == "log_r")

    def _active_for(self, classes: np.ndarray | None, weighted: bool) -> int:
        rate = self.config.rate_at(0 if classes is None else self._number)
        return active_of_all_ranks(classes, self.num_classes, self.world_size, rate, weighted)

    def forward(self, embeddings: Tensor, micro: int = 0) -> Tensor:
        """Return the scalar mean loss over all ranks' rows of micro-batch number `micro`, equal on all ranks.

        Args:
            embeddings: (b, D) raw (not normalised) embeddings of this rank's rows; differentiable.
        """
        step = self._step()
        if len(step.pulls) != micro:
            raise ValueError(f"head: micro-batch {micro} out of turn, expected {len(step.pulls)}; call each in order, once")
        rows, expected = len(embeddings) * self.world_size, step.plan.labels.slots.shape[1]
        if rows != expected:
            raise ValueError(f"head: {rows} embeddings over all ranks for {expected} labels; give begin_step the same rows")
        return ReadyGradient.apply(embeddings, lambda given: self._compute(given, micro))

    @torch.no_grad()
    def step(self, lr: float, good: Tensor | None = None) -> None:
        """Update the active centres from the gradient of the mean loss over the micro-batches since begin_step.

        Nothing is updated, on all ranks, if a loss is not finite. On CUDA the work is only enqueued.

        Args:
            good: () bool, equal on all ranks; False also keeps everything as it is.
        """
        self.settle(lr, good)()

    @torch.no_grad()
    def settle(self, lr: float, good: Tensor | None = None) -> Callable[[], None]:
        """Begin `step`: decide whether to update, and update the margin. Return what enqueues the update of the centres.

        On CUDA the update reads nothing that is computed later than `good`, so it runs beside what is enqueued between.
        """
        current = self._step()
        plan = current.plan
        if len(current.pulls) != len(plan.owners):
            raise ValueError(f"head: step() after {len(current.pulls)} of {len(plan.owners)} micro-batches")
        total = current.losses[0] if len(current.losses) == 1 else torch.stack(current.losses).sum()
        finite = total - total == 0  # two launches; isfinite takes four
        finite = finite if good is None else finite & good
        # C and Triton read the flag where it lies; for plain torch the host has to
        apply = finite.float().reshape(1) if self.kernels.reads_flag and self._decay is None else None
        self._beside.mark()
        self._current = None
        self._forward.step_margin(current, lr, finite)
        return functools.partial(self._update, current, lr, finite, apply)

    @torch.no_grad()
    def _update(self, current: Step, lr: float, finite: Tensor, apply: Tensor | None) -> None:
        if self.config.frozen or (apply is None and not bool(finite)):
            return
        plan, share = current.plan, 1.0 / len(current.pulls)
        seed = derive(self.seed, "rounding", plan.labels.step, self.rank)
        self._begin_noise("rounding", plan.labels.step)
        with self._beside.run(keep=(current, apply)):
            pulls = [pull.times(share) for pull in current.pulls]
            for number, gradient in enumerate(self._passes.gradients(pulls, plan.chunks)):
                self.kernels.update_rows(self.config.optimizer, self.centre_store, gradient, lr, seed + number, apply)
            self.centre_store.forget()
            if self._decay is not None and self._decay.record(lr):
                self._decay.catch_up_all(self.centre_store, self.chunk)

    @torch.no_grad()
    def catch_up(self, purpose: str) -> None:
        """Bring rows that lag up to date, for whom all centres are read; the purpose is a part of the rounding's seed."""
        self._beside.wait()
        if self._decay is not None:
            self._begin_noise(purpose, self._number)
            self._decay.catch_up_all(self.centre_store, self.chunk)

    @torch.no_grad()
    def shard_state(self) -> dict[str, Tensor]:
        """Return this rank's rows by name, (num_slots, ...) each, in slot order; rows that lag are brought up to date."""
        self.catch_up("all rows")
        rows = {**self.centre_store.tensors, "inverse_norms": self.centre_store.inverse_norms}
        if not self.config.has_second_moment:
            rows.pop("updates", None)  # says only how far rows lag, which is nothing now
        others = {} if self._graph is None else {"neighbours": self._graph.slots}
        return {**by_slot(rows, self.config.sub_centers), **others, **self._numbers.saved()}

    @torch.no_grad()
    def load_rows(self, read: Read) -> None:
        """Fill this shard from read(start slot, stop slot) -> tensors by name, of any world size and storage."""
        self._beside.wait()
        also = self._numbers.saved() | ({} if self._graph is None else {"neighbours": self._graph.slots})
        start, per_class = self.first_slot, self.config.sub_centers
        self.centre_store.read_rows(lambda low, high: read(start + low, start + high), also, per_class)
        if self._graph is not None:
            self._graph.loaded()
        if self._decay is not None:
            self._decay.resume(self.centre_store)

    def shard_classes(self) -> np.ndarray:
        """Return the class (label) in each of this shard's slots, (num_slots,) int64."""
        return classes_of_slots(np.arange(self.first_slot, self.end_slot), self.num_classes, self.seed)

    def _step(self) -> Step:
        if self._current is None:
            raise RuntimeError("head: call begin_step(labels, step) before forward() and step()")
        return self._current

    def _compute(self, embeddings: Tensor, micro: int) -> tuple[Tensor, Tensor]:
        """Return (mean loss, its gradient for this rank's (b, D) embeddings), and keep what step() needs."""
        step = self._step()
        if micro == 0:
            self._beside.wait()  # the buffers and the centres may be in use by the step before
            self._passes.begin(step.plan.chunks, len(embeddings) * self.world_size, len(step.plan.owners))
            if self._decay is not None:
                self._begin_noise("catch up", step.plan.labels.step)
                for chunk in step.plan.chunks:
                    self._decay.catch_up(self.centre_store, chunk.select)
        loss, gradient = self._forward.compute(step, embeddings, micro)
        self.positive_cosine = step.pulls[-1].batch.target_cosine.mean()
        return loss, gradient

    def _begin_noise(self, purpose: str, number: int) -> None:
        if self.centre_store.noise is not None:
            self.centre_store.noise.begin(derive(self.seed, purpose, number, self.rank))
