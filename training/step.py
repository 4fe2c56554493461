"""One optimizer step: forward and backward over its micro-batches, the update of backbone and
centres, and its numbers, which are read a step late so that the host never waits for the device.

Shapes: b = images of this rank in one micro-batch, A = micro-batches per optimizer step, D = embedding size.
"""

import functools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from easydict import EasyDict
from torch import Tensor, nn

from backbones.kprpe import landmark_error
from data.augment import mirror, prepare
from utils import distributed
from utils.distributed import World
from utils.optim import set_learning_rate, step_if, unscale_and_clip_grad_norm_, weights_of
from utils.randomness import derive

from .ahead import PreparedStep
from .compatible import COMPATIBLE
from .model import Model
from .setup import Task
from .teachers import AVERAGE, SumOverRanks
from .topology import PREFIX, topology_loss

LANDMARKS = "landmarks"  # the loss by which a network learns them: the mean error in sides of the image, missing ones as 0


class LossTerm(NamedTuple):
    """A part of the loss of one micro-batch.

    The gradient of the value with respect to this rank's embeddings or weights is this rank's part of the gradient of the mean
    over the global batch, as the head's is.
    """

    name: str  # for messages
    value: Tensor  # scalar
    weight: float = 1.0  # factor


def backward(
    terms: Sequence[LossTerm], world_size: int, loss_scale: float | Tensor = 1.0, accumulation: int = 1
) -> dict[str, Tensor]:
    """Run the backward pass of the weighted sum of terms, times loss_scale / accumulation; return the terms' values by name.

    DDP takes the mean of the gradients over the ranks, of which this is the sum: times world_size cancels the mean.
    """
    assert terms, "a loss has at least one term"
    total = functools.reduce(torch.add, [term.value * (term.weight * (world_size / accumulation)) for term in terms])
    (total * loss_scale if isinstance(loss_scale, Tensor) or loss_scale != 1 else total).backward()
    return {term.name: term.value.detach() for term in terms}


class StepResult(NamedTuple):
    """What an optimizer step computed, on the device."""

    loss: Tensor  # the weighted sum of the terms
    losses: dict[str, Tensor]  # the mean loss of each task over the global batch, by its name, and those of other terms
    embeddings: list[list[Tensor]]  # of each task, those of each micro-batch (b, D), in the order of the batches
    grad_norm: Tensor  # of the backbone, before it was clipped
    loss_scale: Tensor  # of fp16, which the step used
    good: Tensor  # whether loss and gradient were finite, the same on all ranks


def train_step(
    config: EasyDict,
    tasks: Sequence[Task],
    model: Model,
    parallel: nn.Module,
    prepared: PreparedStep,
    rates: tuple[float, float],
    world: World,
) -> StepResult:
    """Take one optimizer step with backbone and centres; on CUDA it is enqueued only, and the host waits for nothing.

    If the loss or the gradient is not finite, nothing changes but the loss scale of fp16.

    Args:
        parallel: the backbone behind distributed.as_data_parallel.
        rates: learning rates of the step, of the backbone before the factors of rules, and of the class centres before
            head.lr_factor.
    """
    set_learning_rate(model.optimizer, rates[0])
    # for dropout; a resumed run draws the same
    torch.manual_seed(derive(config.run.seed, "step", prepared.number, world.rank))
    loss, losses, embeddings = forward_backward(model, parallel, tasks, prepared, config.train.accumulation, world)
    scale = model.scaler.scale
    clip_norm, clip_value = config.optimizer.clip_norm, config.optimizer.clip_value
    grad_norm = unscale_and_clip_grad_norm_(weights_of(model.optimizer), scale, clip_norm, clip_value)
    # the same on all ranks: these are functions of the head's sums and of DDP's averages, whose bits are the same on all ranks
    good = loss - loss == grad_norm - grad_norm  # finite: the difference of others is NaN, which equals nothing
    factors = {task.name: task.config.head.lr_factor for task in tasks}
    rate = {name: rates[1] * factors.get(name, config.head.lr_factor) for name in model.heads}
    updates = [head.settle(rate[name], good) for name, head in model.heads.items()]
    step_if(model.optimizer, good)  # before the updates: the host needs long to enqueue those, on a stream of their own
    if model.ema is not None:
        model.ema.update(good)
    model.scaler.update(good)
    for update in updates:
        update()
    return StepResult(loss, losses, embeddings, grad_norm, scale, good)


def forward_backward(
    model: Model, parallel: nn.Module, tasks: Sequence[Task], prepared: PreparedStep, accumulation: int, world: World
) -> tuple[Tensor, dict[str, Tensor], list[list[Tensor]]]:
    """Leave the gradients of an optimizer step in backbone and heads; return loss, losses and embeddings of `StepResult`."""
    batches = prepared.batches
    for task, plan in zip(tasks, prepared.plans, strict=True):
        model.heads[task.name].begin_step(plan, prepared.number)
    old = model.heads.get(COMPATIBLE)
    if old is not None:
        old.begin_step(model.heads[tasks[0].name].plan, prepared.number)
    begin_gradients(model.optimizer, keep=accumulation > 1 and world.device.type == "cuda")
    zero = torch.zeros((), device=world.device)
    teacher, total = model.teacher, zero
    if (
        teacher is not None and teacher.identity == AVERAGE
    ):  # each rank has statistics of its own, but after a save those of rank 0
        distributed.broadcast_statistics(teacher.network, world)
    losses: dict[str, Tensor] = {}
    outputs: list[list[Tensor]] = [[] for _ in tasks]
    images = [batch.images.chunk(accumulation) for batch in batches]
    mirrored = [batch.mirrored.chunk(accumulation) for batch in batches]
    indices = batches[0].indices.chunk(accumulation)
    landmarks = [batch.landmarks.chunk(accumulation) for batch in batches if batch.landmarks is not None]
    for micro_step in range(accumulation):
        with distributed.gradients_shared(parallel, now=micro_step == accumulation - 1):
            with torch.autocast(world.device.type, dtype=model.autocast, enabled=model.autocast is not None):
                parts = [(i[micro_step], m[micro_step]) for i, m in zip(images, mirrored, strict=True)]
                taught = None if teacher is None else teacher.embed(parts, indices[micro_step])
                points = torch.cat([part[micro_step] for part in landmarks]) if landmarks else None
                embeddings, found = _embed(parallel, parts, points)
            terms = []
            for task, given, part, kept in zip(tasks, embeddings, parts, outputs, strict=True):
                head = model.heads[task.name]
                terms.append(LossTerm(task.name, head(given, micro_step), weight=task.weight))
                if task.config.loss.topology:
                    loss = topology_loss(mirror(*part), given, head.rank, head.collectives)
                    weight = task.weight * task.config.loss.topology
                    terms.append(LossTerm(f"{PREFIX}{task.name}", loss, weight=weight))
                kept.append(given.detach())
            if old is not None:
                weight = tasks[0].weight * model.compatible_weight
                terms.append(LossTerm(COMPATIBLE, old(embeddings[0], micro_step), weight=weight))
            if teacher is not None and taught is not None:
                ranks = model.heads[tasks[0].name].collectives
                taught_losses = teacher.compare(torch.cat(list(embeddings)), taught, ranks)
                for name, (value, weight) in taught_losses.items():
                    terms.append(LossTerm(name, value, weight=weight))
            if points is not None and found is not None:
                error = landmark_error(found, points) / (found.numel() * world.world_size)
                shared = SumOverRanks.apply(error, 1.0, model.heads[tasks[0].name].collectives)
                terms.append(LossTerm(LANDMARKS, shared))
            loss_scale = model.scaler.scale if model.scaler.enabled else 1.0
            values = backward(terms, world.world_size, loss_scale, accumulation)
        for term in terms:
            total = total + term.weight * values[term.name] / accumulation
        losses = {name: losses.get(name, zero) + value / accumulation for name, value in values.items()}
    return total, losses, outputs


def begin_gradients(optimizer: torch.optim.Optimizer, keep: bool) -> None:
    """Forget the gradients of the last step; if keep, as zeros, to which those of all micro-batches are added.

    Otherwise the first backward pass makes their memory. If it is a CUDA graph, its next run would write there again.
    """
    if keep:
        optimizer.zero_grad(set_to_none=False)
    for weight in weights_of(optimizer):
        if not keep:
            weight.grad = None
        elif weight.grad is None:
            weight.grad = torch.zeros_like(weight)


def _embed(
    parallel: nn.Module, parts: Sequence[tuple[Tensor, Tensor]], points: Tensor | None
) -> tuple[Sequence[Tensor], Tensor | None]:
    """Return the float embeddings (b, D) of each part, from one forward pass, as DDP wants it, over the images of all.

    A network that takes the landmarks `points` (., 5, 2) of all images returns those (., 5, 2) that it found itself, too.
    """
    inputs = [prepare(*parts[0]) if len(parts) == 1 else torch.cat([prepare(*part) for part in parts])]
    output: Tensor = parallel(*inputs, *([] if points is None else [points]))
    found = None
    if points is not None:
        output, found = output.tensor_split([output.shape[1] - points[0].numel()], dim=1)
        found = found.unflatten(1, points.shape[1:])
    output = output.to(torch.float32, copy=True)  # a CUDA graph writes its output again
    return [output] if len(parts) == 1 else output.split([len(pixels) for pixels, _ in parts]), found


class StepValues(NamedTuple):
    """What an optimizer step came to, on the host."""

    step: int
    losses: dict[str, float]  # of the tasks, and of other terms
    loss: float
    grad_norm: float
    loss_scale: float
    good: bool  # whether loss and gradient were finite on all ranks
    embeddings: Sequence[Sequence[Tensor]]  # of each task and micro-batch, on the device


class LateValues:
    """The steps whose numbers are not read yet, oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, StepResult, Tensor, torch.cuda.Event | None]] = deque()

    def post(self, step: int, result: StepResult) -> None:
        """Start to copy the numbers of a step to the host."""
        numbers = torch.stack([result.loss, result.grad_norm, result.loss_scale, result.good.float(), *result.losses.values()])
        copied = None
        if numbers.is_cuda:
            numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._waiting.append((step, result, numbers, copied))

    def take(self, before: int) -> list[StepValues]:
        """Return the steps before `before` that were not taken yet; wait for the device where it still computes them."""
        taken = []
        while self._waiting and self._waiting[0][0] < before:
            step, result, numbers, copied = self._waiting.popleft()
            if copied is not None:
                copied.synchronize()
            loss, grad_norm, loss_scale, good, *losses = numbers.tolist()
            by_task = dict(zip(result.losses, losses, strict=True))
            taken.append(StepValues(step, by_task, loss, grad_norm, loss_scale, good > 0, result.embeddings))
        return taken
