"""The numbers of a margin that training changes: its parameters, equal on all ranks, and those that it keeps of each class.

The parameters are updated by the same optimizer as the class centres, but for weight decay, which would pull a bias or a margin
to 0. Their moments are buffers of the margin, so its state dict has them. The numbers of classes live beside the centres of the
shard: they are saved with them, by slot, and a run with another number of processes reads them back by slot.
Shapes: B = samples of the global micro-batch, D = embedding size, n = classes of the shard, k = samples whose class lies in it.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .row_optimizer import RowAdamW, RowOptimizer

if TYPE_CHECKING:  # parts do not import one another
    from losses.margin import Margin

PREFIX = "margin_"  # of their names in a checkpoint


class MarginNumbers:
    """The parameters of a margin and the numbers of a shard's classes, with their moments.

    Args:
        margin: gets buffers for the moments of its parameters.
        num_slots: n.
        num_classes: of all shards.
        dim: D.
    """

    def __init__(
        self, margin: "Margin", num_slots: int, num_classes: int, dim: int, optimizer: RowOptimizer, device: torch.device
    ) -> None:
        self.num_classes, self.optimizer = num_classes, optimizer
        self.specs = dict(margin.class_numbers(dim))
        self.tensors = {
            name: torch.full((num_slots, *spec.shape), spec.first, dtype=torch.float32, device=device)
            for name, spec in self.specs.items()
        }
        self.scalars = tuple(name for name, spec in self.specs.items() if spec.shape == ())  # what margin.observe is given
        self.trained = tuple(name for name, spec in self.specs.items() if spec.trained)
        self.parameters = dict(margin.named_parameters())
        moments = ("momentum", "variance") if isinstance(optimizer, RowAdamW) else ("momentum",)
        self._moments: dict[str, list[Tensor]] = {}
        for name, parameter in self.parameters.items():
            self._moments[name] = [torch.zeros_like(parameter, requires_grad=False) for _ in moments]
            for kind, moment in zip(moments, self._moments[name], strict=True):
                margin.register_buffer(f"{name}_{kind}", moment)
        for name in self.trained:
            self._moments[name] = [torch.zeros_like(self.tensors[name]) for _ in moments]
            for kind, moment in zip(moments, self._moments[name], strict=True):
                self.tensors[f"{name}_{kind}"] = moment
        self._updates: Tensor | None = None
        if self._moments and isinstance(optimizer, RowAdamW):
            self._updates = torch.zeros((), device=device)
            margin.register_buffer("updates", self._updates)

    def saved(self) -> dict[str, Tensor]:
        """Return the numbers of the shard's classes and their moments, (n, ...) each, by their names in a checkpoint."""
        return {PREFIX + name: tensor for name, tensor in self.tensors.items()}

    def by_sample(self, samples: Tensor, rows: Tensor, count: int) -> Tensor:
        """Return (numbers, B) of the samples' classes, in the order of `scalars`; 0 where the class is in another shard.

        Args:
            samples, rows: (k,) int64, those with a class in this shard, and its row.
            count: B.
        """
        given = torch.zeros(len(self.scalars), count, device=rows.device)
        for row, name in zip(given, self.scalars, strict=True):
            row[samples] = self.tensors[name][rows]
        return given

    @torch.no_grad()
    def update(self, gradients: dict[str, Tensor], lr: float, good: Tensor) -> None:
        """Update all trained numbers from their gradients, unless good, () bool, is False."""
        if not self._moments:
            return
        if self._updates is not None:
            self._updates += good
        for name, moments in self._moments.items():
            value = self.parameters[name] if name in self.parameters else self.tensors[name]
            gradient = gradients[name]
            if isinstance(self.optimizer, RowAdamW):
                assert self._updates is not None
                first, second = moments
                beta1, beta2 = self.optimizer.beta1, self.optimizer.beta2
                _keep(first, torch.lerp(gradient, first, beta1), good)
                _keep(second, torch.lerp(gradient.square(), second, beta2), good)
                count = self._updates.clamp_min(1.0)
                root = (second / (1.0 - beta2**count)).sqrt() + self.optimizer.eps
                new = value - lr * (first / (1.0 - beta1**count)) / root
            else:
                _keep(moments[0], moments[0] * self.optimizer.momentum + gradient, good)
                ahead = gradient + self.optimizer.momentum * moments[0] if self.optimizer.nesterov else moments[0]
                new = value - lr * ahead
            if name in self.specs:
                new = new.clamp(self.specs[name].low, self.specs[name].high)
            _keep(value, new, good)

    def summed_by_row(self, rows: Tensor, values: Tensor) -> Tensor:
        """Return (n,) the sums of values (k,) by row (k,), in a fixed order.

        index_add_ has no fixed order on CUDA, so a run that resumes would not get the same bits.
        """
        total = torch.zeros(len(next(iter(self.tensors.values()))), device=values.device)
        total[rows] = (rows[:, None] == rows[None]).to(values.dtype) @ values  # of each sample those with its row
        return total


def _keep(target: Tensor, value: Tensor, good: Tensor) -> None:
    target.copy_(torch.where(good, value, target))
