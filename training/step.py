"""The gradients of one optimizer step: forward and backward over its micro-batches.

Shapes: b = images of this rank in one micro-batch, A = micro-batches per optimizer step, D = embedding size.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from data.augment import prepare
from data.loader import LoadedBatch
from utils import distributed
from utils.distributed import World

from .model import Model


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


def backward(terms: Iterable[LossTerm], world_size: int, loss_scale: float = 1.0, accumulation: int = 1) -> float:
    """Run the backward pass of the sum of terms, times loss_scale / accumulation; return the sum itself, of this rank.

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
    return sum(term.weight * float(term.value.detach()) for term in terms)  # after: the host waits for the device here


def forward_backward(
    model: Model, parallel: nn.Module, batch: LoadedBatch, step: int, accumulation: int, world: World
) -> tuple[float, list[Tensor]]:
    """Leave the gradients of an optimizer step in backbone and head; return the mean loss, and A times the embeddings (b, D).

    Args:
        parallel: the backbone behind distributed.as_data_parallel.
        step: number of the optimizer step.
    """
    model.head.begin_step(batch.labels.view(accumulation, -1), step)
    model.optimizer.zero_grad(set_to_none=True)
    loss, outputs = 0.0, []
    micro_batches = zip(batch.images.chunk(accumulation), batch.mirrored.chunk(accumulation), strict=True)
    for micro_step, (images, mirrored) in enumerate(micro_batches):
        with distributed.gradients_shared(parallel, now=micro_step == accumulation - 1):
            with torch.autocast(world.device.type, dtype=model.autocast, enabled=model.autocast is not None):
                embeddings = parallel(prepare(images, mirrored))
            terms = [LossTerm("head", model.head(embeddings.float(), micro_step), over_all_ranks=True)]
            loss += backward(terms, world.world_size, model.scaler.scale, accumulation) / accumulation
        outputs.append(embeddings.detach())
    return loss, outputs
