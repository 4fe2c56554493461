"""Numbers of a step that are read a step late, so that the host never waits for the device that still computes them."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .step import StepResult


class StepValues(NamedTuple):
    """What an optimizer step came to, on the host."""

    step: int
    losses: dict[str, float]  # of the tasks
    loss: float
    grad_norm: float
    loss_scale: float
    good: bool  # whether loss and gradient were finite on all ranks
    embeddings: Sequence[Sequence[Tensor]]  # of each task and micro-batch, on the device


class LateValues:
    """The steps whose numbers are not read yet, oldest first."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[StepValues, Tensor, torch.cuda.Event | None]] = deque()

    def post(self, step: int, result: StepResult) -> None:
        """Start to copy the numbers of a step to the host."""
        numbers = torch.stack([result.loss, result.grad_norm, result.loss_scale, result.good.float(), *result.losses.values()])
        copied = None
        if numbers.is_cuda:
            numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        values = StepValues(step, dict.fromkeys(result.losses, 0.0), 0.0, 0.0, 0.0, True, result.embeddings)
        self._waiting.append((values, numbers, copied))

    def take(self, before: int) -> list[StepValues]:
        """Return the steps before `before` that were not taken yet; wait for the device where it still computes them."""
        taken = []
        while self._waiting and self._waiting[0][0].step < before:
            values, numbers, copied = self._waiting.popleft()
            if copied is not None:
                copied.synchronize()
            loss, grad_norm, loss_scale, good, *losses = numbers.tolist()
            by_task = dict(zip(values.losses, losses, strict=True))
            taken.append(values._replace(loss=loss, grad_norm=grad_norm, loss_scale=loss_scale, good=good > 0, losses=by_task))
        return taken
