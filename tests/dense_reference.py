"""The one independent head of the tests: float64, all logits whole, autograd, every row updated by the textbook formula.

It takes margins in the type of its embeddings: `copy.deepcopy(margin).double()` where a margin keeps statistics.
"""

import copy

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense_margin import cosines_of, losses_of_cosines
from torch import Tensor

from losses.margin import Margin
from partial_fc import PartialFC, RowAdamW, RowSGD
from partial_fc.centres.shard import initial_centres, slots_of_classes


def all_centres(num_classes: int, dim: int, seed: int, sub_centers: int = 1) -> Tensor:
    """Return the (C, D) first centres in class order; (C, K, D) of K sub-centers."""
    slots = slots_of_classes(np.arange(num_classes), num_classes, seed)
    rows = initial_centres(0, num_classes * sub_centers, dim, seed)
    return (rows if sub_centers == 1 else rows.view(num_classes, sub_centers, dim))[torch.from_numpy(slots)]


def dense_loss(margin: Margin, embeddings: Tensor, centres: Tensor, labels: Tensor, active: Tensor | None = None) -> Tensor:
    """Return the mean margin softmax loss over the active classes (C,) bool."""
    cosine = cosines_of(embeddings, centres)
    left_out = None if active is None else (~active).expand_as(cosine)
    return losses_of_cosines(margin, cosine, embeddings.norm(dim=1), labels, left_out)[0].mean()


class DenseHead:
    """All classes on one process. Rows that are not active keep centres and moments, as head.inactive_rows=keep says."""

    def __init__(self, margin: Margin, centres: Tensor, optimizer: RowSGD | RowAdamW) -> None:
        self.margin, self.optimizer = copy.deepcopy(margin).double(), optimizer  # with statistics of its own
        self.centres = centres.double()
        self.momentum, self.variance = torch.zeros_like(self.centres), torch.zeros_like(self.centres)
        self.updates = torch.zeros(len(centres), 1, dtype=torch.float64)

    def step(self, embeddings: Tensor, labels: Tensor, lr: float, active: Tensor | None = None) -> tuple[float, Tensor, Tensor]:
        """Return (loss, its gradient for the embeddings, for the centres), all before the update that this makes."""
        x, w = embeddings.double().requires_grad_(), self.centres.clone().requires_grad_()
        loss = dense_loss(self.margin, x, w, labels, active)
        loss.backward()
        assert x.grad is not None and w.grad is not None
        cosine = (F.normalize(x) * F.normalize(w)[labels]).sum(dim=1).detach()
        self.margin.commit([self.margin.observe(cosine, x.detach().norm(dim=1))])
        rows = torch.ones(len(w), dtype=torch.bool) if active is None else active
        self._update(rows, w.grad[rows], lr)
        return loss.item(), x.grad, w.grad

    def _update(self, rows: Tensor, gradient: Tensor, lr: float) -> None:
        w, o = self.centres[rows], self.optimizer
        if isinstance(o, RowSGD):
            self.momentum[rows] = o.momentum * self.momentum[rows] + gradient + o.weight_decay * w
            ahead = gradient + o.weight_decay * w + o.momentum * self.momentum[rows]
            self.centres[rows] = w - lr * (ahead if o.nesterov else self.momentum[rows])
            return
        self.updates[rows] += 1
        self.momentum[rows] = o.beta1 * self.momentum[rows] + (1 - o.beta1) * gradient
        self.variance[rows] = o.beta2 * self.variance[rows] + (1 - o.beta2) * gradient**2
        m = self.momentum[rows] / (1 - o.beta1 ** self.updates[rows])
        v = self.variance[rows] / (1 - o.beta2 ** self.updates[rows])
        self.centres[rows] = w * (1 - lr * o.weight_decay) - lr * m / (v.sqrt() + o.eps)


def near_their_centres(centres: Tensor, rows: int, step: int = 0) -> tuple[Tensor, Tensor]:
    """Return (rows, D) embeddings near their centres, some far, and labels with repeats."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(len(centres), (rows,), generator=generator)
    noise = F.normalize(torch.randn(rows, centres.shape[1], generator=generator))
    return 5 * (F.normalize(centres[labels]) + torch.linspace(0, 2, rows)[:, None] * noise), labels


def active_classes(head: PartialFC) -> Tensor:
    """Return (C,) bool, which of this rank's classes are in the softmax of the step begun."""
    active = torch.zeros(head.num_classes, dtype=torch.bool)
    for chunk in head._step().plan.chunks:
        rows = torch.arange(head.centre_store.num_rows)[chunk.select if isinstance(chunk.select, slice) else chunk.select.cpu()]
        active[torch.from_numpy(head.shard_classes())[rows // head.config.sub_centers]] = True
    return active


def whole_active(head: PartialFC) -> Tensor:
    """Return which classes (C,) are in the loss, over all ranks."""
    active = active_classes(head).to(torch.int32)
    if head.world_size > 1:
        dist.all_reduce(active)
    return active > 0


def take_step(
    head: PartialFC, x: Tensor, labels: Tensor, lr: float, micro_batches: int = 1, step: int = 0
) -> tuple[float, Tensor, Tensor]:
    """Take a step on this rank's embeddings; return the mean loss, its gradient for them on the CPU, and `whole_active`."""
    head.begin_step(labels.view(micro_batches, -1), step)
    active = whole_active(head)
    parts = [part.clone().requires_grad_() for part in x.detach().to(head.centres.device).chunk(micro_batches)]
    losses = [head(part, micro) for micro, part in enumerate(parts)]
    for loss in losses:
        (loss / micro_batches).backward()
    head.step(lr)
    gradient = torch.cat([part.grad.cpu() for part in parts])  # type: ignore[union-attr]
    return sum(loss.item() for loss in losses) / micro_batches, gradient, active


def bytes_of_workspace(head: PartialFC) -> int:
    """Return the bytes of the head's buffers and of its cache of exponentials."""
    return sum(buffer.nbytes for buffer in head.workspace._buffers.values()) + head.workspace._cache.nbytes


def relative(value: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of the expected, in float64."""
    return float((value.double() - expected.double()).norm() / expected.double().norm())


def stored_numbers(rows: dict[str, Tensor], name: str) -> Tensor:
    """Return what stored rows (n, D) of centres or a moment stand for, in float64; see partial_fc/centres/store.py."""
    values, scale = rows[name].double(), rows.get(f"{name}_scale")
    if rows["centres"].dtype == torch.int8 and name in ("centres", "momentum"):
        low = (rows["momentum"].int() + 4) % 8 - 4
        values += low / 8 if name == "centres" else -low
    return values if scale is None else values * scale.double()[:, None]
