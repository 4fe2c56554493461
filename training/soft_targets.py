"""Distillation of logits: the divergence between the classes that teacher and student see, over all ranks' class centres.

Logits are z_k = s cos(e, w_k) / T over all classes k, without a margin: of the student with the run's centres, of the teacher
with those that it was trained with. The loss is T^2 sum_k p_k (log p_k - log q_k), p and q the softmax of teacher and student
(Hinton, Vinyals and Dean, 2015), a mean over the images. Its gradient reaches the backbone, not the centres.

Shapes: b = images of this rank, B = images of all ranks, n = classes of this rank, D = embedding size of either network.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from partial_fc import PartialFC
from partial_fc.init import CentreSource
from partial_fc.softmax.loss import ReadyGradient

_TILES = 6  # matrices of logits, and what they are made of, that exist at once
_BLOCK = 65536  # centres read at once


def bytes_of(classes: int, rows: int, source: CentreSource, student: int, chunk: int) -> int:
    """Return the bytes for a rank's classes, B = rows images and chunks of so many classes; `student` is the student's D."""
    chunk = min(chunk, classes)
    return 4 * (classes * source.embedding_size + chunk * (_TILES * rows + 2 * student) + 4 * rows * student)


class SoftTargets:
    """The teacher's class centres, of `source`, beside those of the run's head, whose classes are the same; n of each here."""

    def __init__(self, head: PartialFC, source: CentreSource, temperature: float) -> None:
        self._head, self._temperature = head, temperature  # T
        labels = head.shard_classes()
        self._centres = torch.empty(len(labels), source.embedding_size, device=head.positive_cosine.device)
        for start in range(0, len(labels), _BLOCK):
            rows = slice(start, start + _BLOCK)
            self._centres[rows] = functional.normalize(source.read(labels[rows]), dim=1, eps=1e-12)

    def loss(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the loss () of embeddings (b, D) of the same images. A collective call."""
        taught = functional.normalize(teacher, dim=1, eps=1e-12)
        unit = functional.normalize(student, dim=1, eps=1e-12)
        value: Tensor = ReadyGradient.apply(unit, lambda rows: self._compute(rows, taught))
        return value

    def _compute(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and its gradient (b, D) with respect to unit embeddings."""
        ranks = self._head.collectives
        self._head.catch_up("soft targets")
        rows, taught = ranks.all_gather(student), ranks.all_gather(teacher)
        factor = self._head.margin.scale / self._temperature
        own, others = self._log_sum(rows, self._own), self._log_sum(taught, self._taught)
        value, gradient = rows.new_zeros(len(rows)), torch.zeros_like(rows)
        for here in self._chunks():
            centres = self._own(here)
            log_q = (rows @ centres.t()).mul_(factor).sub_(own[:, None])
            log_p = (taught @ self._taught(here).t()).mul_(factor).sub_(others[:, None])
            p = log_p.exp()
            value += (p * log_p.sub_(log_q)).sum(dim=1)
            gradient += log_q.exp_().sub_(p) @ centres
        share = self._temperature**2 / len(rows)
        return ranks.sum(value.sum() * share), ranks.reduce_scatter(gradient.mul_(share * factor))

    def _log_sum(self, rows: Tensor, centres: Callable[[slice], Tensor]) -> Tensor:
        """Return the logarithm (B,) of the sum of the exponentials over all classes in one pass (Milakov, Gimelshein)."""
        ranks, factor = self._head.collectives, self._head.margin.scale / self._temperature
        top, total = rows.new_full((len(rows),), -torch.inf), rows.new_zeros(len(rows))
        for here in self._chunks():
            logits = (rows @ centres(here).t()).mul_(factor)
            higher = torch.maximum(top, logits.amax(dim=1))
            total = total * (top - higher).exp() + logits.sub_(higher[:, None]).exp_().sum(dim=1)
            top = higher
        highest = ranks.max(top.clone())
        return highest + ranks.sum(total * (top - highest).exp()).log()

    def _chunks(self) -> Iterator[slice]:
        step = self._head.chunk
        return (slice(start, min(start + step, len(self._centres))) for start in range(0, len(self._centres), step))

    def _own(self, here: slice) -> Tensor:
        return functional.normalize(self._head.centre_store.load("centres", here), dim=1, eps=1e-12)

    def _taught(self, here: slice) -> Tensor:
        return self._centres[here]
