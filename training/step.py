"""The gradients of one optimizer step: forward and backward over its micro-batches.

Shapes: b = images of this rank in one micro-batch, A = micro-batches per optimizer step, D = embedding size.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from data.augment import prepare
from data.loader import LoadedBatch
from utils import distributed
from utils.distributed import World

from .model import Model
from .setup import Task


class LossTerm(NamedTuple):
    """A part of the loss of one micro-batch.

    Args:
        name: for messages.
        value: scalar, differentiable with respect to this rank's embeddings or weights.
        over_all_ranks: whether its gradient here is already this rank's part of the gradient of the mean over the global batch,
            as the head's is; otherwise `value` is a mean over this rank's samples.
        weight: factor.
    """

    name: str
    value: Tensor
    over_all_ranks: bool
    weight: float = 1.0


def backward(terms: Iterable[LossTerm], world_size: int, loss_scale: float = 1.0, accumulation: int = 1) -> dict[str, float]:
    """Run the backward pass of the weighted sum of terms, times loss_scale / accumulation; return the terms' values by name.

    DDP takes the mean of the gradients over the ranks, which is right for means over a rank's own samples. What is a part of
    the gradient of a global mean has to be summed over the ranks: times world_size cancels the mean.
    """
    total: Tensor | None = None
    terms = list(terms)
    for term in terms:
        scale = term.weight * ((world_size if term.over_all_ranks else 1) * loss_scale / accumulation)
        total = term.value * scale if total is None else total + term.value * scale
    assert total is not None, "a loss has at least one term"
    total.backward()
    return {term.name: float(term.value.detach()) for term in terms}  # after: the host waits for the device here


class StepResult(NamedTuple):
    """What an optimizer step computed besides the gradients.

    Args:
        loss: the weighted sum of the terms.
        losses: the mean loss of each task over the global batch, by its name.
        embeddings: of each task, those of each micro-batch (b, D), in the order of the batches.
    """

    loss: float
    losses: dict[str, float]
    embeddings: list[list[Tensor]]


def forward_backward(
    model: Model,
    parallel: nn.Module,
    tasks: Sequence[Task],
    batches: Sequence[LoadedBatch],
    step: int,
    accumulation: int,
    world: World,
) -> StepResult:
    """Leave the gradients of an optimizer step in backbone and heads.

    Args:
        parallel: the backbone behind distributed.as_data_parallel.
        batches: this rank's images of the step, of each task.
        step: number of the optimizer step.
    """
    for task, batch in zip(tasks, batches, strict=True):
        model.heads[task.name].begin_step(batch.labels.view(accumulation, -1), step)
    model.optimizer.zero_grad(set_to_none=True)
    total, losses = 0.0, dict.fromkeys((task.name for task in tasks), 0.0)
    outputs: list[list[Tensor]] = [[] for _ in tasks]
    images = [batch.images.chunk(accumulation) for batch in batches]
    mirrored = [batch.mirrored.chunk(accumulation) for batch in batches]
    for micro_step in range(accumulation):
        with distributed.gradients_shared(parallel, now=micro_step == accumulation - 1):
            with torch.autocast(world.device.type, dtype=model.autocast, enabled=model.autocast is not None):
                embeddings = _embed(parallel, [(i[micro_step], m[micro_step]) for i, m in zip(images, mirrored, strict=True)])
            terms = []
            for task, given, kept in zip(tasks, embeddings, outputs, strict=True):
                loss = model.heads[task.name](given, micro_step)
                terms.append(LossTerm(task.name, loss, over_all_ranks=True, weight=task.weight))
                kept.append(given.detach())
            values = backward(terms, world.world_size, model.scaler.scale, accumulation)
        total += sum(term.weight * values[term.name] for term in terms) / accumulation
        losses = {name: losses[name] + values[name] / accumulation for name in losses}
    return StepResult(total, losses, outputs)


def _embed(parallel: nn.Module, parts: Sequence[tuple[Tensor, Tensor]]) -> Sequence[Tensor]:
    """Return the float embeddings (b, D) of each part, from one forward pass, as DDP wants it, over the images of all."""
    if len(parts) == 1:
        return [parallel(prepare(*parts[0])).float()]
    images = torch.cat([prepare(*part) for part in parts])
    embeddings: Tensor = parallel(images).float()
    return embeddings.split([len(pixels) for pixels, _ in parts])
