"""The two passes of a margin softmax over a shard's active classes, chunk by chunk.

Neither all logits nor the whole gradient of the centres is held at once. Memory is O(B x chunk + chunk x D) for any number of
classes, plus the cache of exponentials, which has a budget.

    forward   z = margin.negatives(x . w), E = exp(z - K), Z_i = sum_j E_ij, U_i = sum_j E_ij dz_ij/dcos w_j
              over every class but the target; then, with the target logit t_i, lse_i = log(exp(log Z_i + K) + exp(t_i)),
              loss_i = lse_i - t_i and dL/dx_i = exp(K - lse_i) U_i / B + (target class)
    update    dL/dw_j = sum_i exp(K - lse_i) E_ij dz_ij/dcos x_i / B + (target class), for unit w_j

The target class is masked out of the chunks and computed separately, so 1 - p_i = exp(log Z_i + K - lse_i) does not cancel. If
negatives are scale * cosine, dz/dcos is the scale, which multiplies the factors of the samples instead of E. exp(K - lse_i)
multiplies the small matrix of embeddings, not E. So the exponential is the only operation on the elements of E.

The products take the centres as they are stored, not unit centres, which saves a copy of all of them in each pass. With v_j
= 1 / length of a stored centre, the logit is v_j times the product. E_ij v_j takes the place of E_ij: times stored centres it
gives U, and in update the gradient of w_j times v_j, which the chain rule of normalisation asks for. Only Z needs E itself.
Shapes: B = samples of the global (micro-)batch, D = embedding size, c = classes of one chunk. x and w are unit vectors; E is
(c, B), so neither product needs a transpose.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .centre_store import CentreStore
from .kernels.plain import fill_targets
from .planning import Chunk
from .workspace import Workspace

# exp must stay in the range of fp32 (and bf16), whose normal numbers end at exp(88.7) and exp(-87.3)
_LARGEST, _SMALLEST = 80.0, -87.0
_GRANULE = 256  # bf16 products have a multiple of this many rows
_NO_NEGATIVE = -1e30  # the largest logit of a sample without negatives


class MarginLike(Protocol):
    """The interface of a margin that the head uses; see losses/margin.py."""

    @property
    def scale(self) -> float: ...
    @property
    def logit_bound(self) -> float: ...
    @property
    def linear_negatives(self) -> bool: ...
    @property
    def observes(self) -> bool: ...
    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor: ...
    def negatives(self, cosine: Tensor, target_cosine: Tensor, state: Any = None) -> Tensor: ...
    def observe(self, target_cosine: Tensor, norm: Tensor) -> Any: ...
    def commit(self, states: Sequence[Any]) -> None: ...


class Batch(NamedTuple):
    """One global micro-batch, as the two passes need it."""

    unit: Tensor  # (B, D) fp32
    target_cosine: Tensor  # (B,) fp32
    shift: float | Tensor  # K, a constant or (B,)
    places: Tensor  # (B,) int64, of the target classes; see planning.py
    state: Any = None  # what margin.observe returned; a recomputed chunk sees the same state


def unit_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (unit rows, norms (n, 1)) of (n, D) fp32; a zero row stays zero."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-12)
    return rows / norms, norms


@functools.cache
def has_fp32_output(device: torch.device) -> bool:
    """Return whether bf16 matrices have a product in fp32, so that U is not rounded for each chunk: on CUDA, torch 2.8."""
    tiny = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        return bool(torch.mm(tiny, tiny, out_dtype=torch.float32).dtype == torch.float32)
    except (TypeError, RuntimeError):
        return False


def constant_shift(margin: MarginLike, num_classes: int) -> float | None:
    """Return K such that exp(logit - K) and its sum over all classes stay in fp32's range, whatever the cosines are.

    None if there is no such constant because the logits are too far apart; then the samples' maxima must be found first.
    """
    bound = margin.logit_bound
    shift = max(0.0, bound + math.log(num_classes) - _LARGEST)
    return shift if -bound - shift > _SMALLEST else None


def auto_chunk(device: str, dtype: torch.dtype) -> int:
    """Return the default number of classes that are processed at once.

    On the CPU products are fastest on large chunks, and the work between them on small chunks, which stay in cache. From 2048
    to 16384 classes the step time differs by a tenth. On CUDA, where this was not measured, there should be few launches. A
    chunk's logits and gradient take 128 MiB there at B = D = 512.
    """
    return (32768 if device == "cuda" else 8192) * 4 // dtype.itemsize


def padded_rows(count: int, dtype: torch.dtype) -> int:
    """Return the number of rows to which a chunk of `count` classes is padded for the products.

    oneDNN compiles a bf16 product again for each shape, which takes longer than most products. With sampling there would be new
    shapes in every step.
    """
    return -(-count // _GRANULE) * _GRANULE if dtype == torch.bfloat16 else count


class TwoPass:
    """The two passes over one shard.

    Args:
        dtype: float32 or bfloat16, of the matrix products. Sums, states and all (B,) and (B, D) tensors are float32.
        limit: leave negatives with a larger cosine out of the softmax: they are likely the same person (interclass filter).
    """

    def __init__(self, margin: MarginLike, store: CentreStore, workspace: Workspace, dtype: torch.dtype, limit: float | None):
        self.margin, self.centre_store, self.workspace, self.dtype = margin, store, workspace, dtype
        self.logit_limit = None if limit is None else limit * margin.scale
        self.limit = limit
        self._cached: dict[tuple[int, int], Tensor] = {}

    def begin(self, chunks: list[Chunk], samples: int, num_micro: int) -> None:
        """Prepare the passes of one step with num_micro micro-batches of `samples` samples each."""
        self._cached.clear()
        self.workspace.begin_cache(
            num_micro * sum(padded_rows(chunk.size, self.dtype) * samples * self.dtype.itemsize + 64 for chunk in chunks)
        )

    def sample_maximum(self, batch: Batch, chunks: list[Chunk]) -> Tensor:
        """Return the (B,) largest negative logit over this shard's active classes, -1e30 if there is none."""
        maximum = batch.unit.new_full((len(batch.unit),), _NO_NEGATIVE)
        operand = self._operand(batch)
        for chunk in chunks:
            product = torch.mm(self.centre_store.operand(chunk.select, self.dtype, chunk.size), operand).float()
            logits = self._negatives(batch, product.mul_(self.centre_store.inverse_norms[chunk.select, None]))
            fill_targets(logits, (batch.places, chunk.begin), _NO_NEGATIVE)
            maximum = torch.maximum(maximum, logits.amax(dim=0))
        return maximum

    def forward(self, batch: Batch, chunks: list[Chunk], micro: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return this shard's Z (B,), U (B, D) and sum_j E_ij dz_ij/dt_i (B,), all fp32, over the negatives of each sample.

        For linear negatives U is not yet multiplied by the scale; see `gain`.
        """
        z_sum = batch.unit.new_zeros(len(batch.unit))
        u_sum = torch.zeros_like(batch.unit)
        by_target = torch.zeros_like(z_sum)
        operand = self._operand(batch)
        for number, chunk in enumerate(chunks):
            centres = self.centre_store.operand(chunk.select, self.dtype, padded_rows(chunk.size, self.dtype))
            cached = self.workspace.cache((len(centres), len(batch.unit)), self.dtype)
            if cached is not None:
                self._cached[micro, number] = cached
            weighted = self._weighted(batch, operand, centres, chunk, cached, z_sum, by_target)
            if self.dtype == torch.float32:
                u_sum.addmm_(weighted.t(), centres)
            elif has_fp32_output(u_sum.device):
                u_sum += torch.mm(weighted.t(), centres, out_dtype=torch.float32)
            else:
                u_sum += torch.mm(weighted.t(), centres, out=self.workspace.buffer("u", tuple(u_sum.shape), self.dtype))
        return z_sum, u_sum, by_target

    @property
    def gain(self) -> float:
        """The factor that turns the E of linear negatives into E dz/dcos."""
        return self.margin.scale if self.margin.linear_negatives else 1.0

    def gradients(
        self, batches: list[Batch], factors: list[Tensor], grad_targets: list[Tensor], chunks: list[Chunk]
    ) -> Iterator[tuple[Chunk, Tensor, tuple[Tensor, Tensor, Tensor]]]:
        """Yield (chunk, gradient (c, D), target part) for each chunk, as update_rows of the kernels takes them.

        The gradient is in a reused buffer. The caller may update the chunk's centres before it asks for the next chunk.

        Args:
            batches: the micro-batches.
            factors: gain exp(K - lse_i) / B of each micro-batch, (B,).
            grad_targets: dL/d(target cosine) of each micro-batch, (B,).
        """
        scaled = [(batch.unit * factor[:, None]).to(self.dtype) for batch, factor in zip(batches, factors, strict=True)]
        of_targets = torch.cat([batch.unit * grad[:, None] for batch, grad in zip(batches, grad_targets, strict=True)])
        operands = [self._operand(batch) for batch in batches]
        for number, chunk in enumerate(chunks):
            shape = (padded_rows(chunk.size, self.dtype), of_targets.shape[1])
            centres: Tensor | None = None
            for micro, batch in enumerate(batches):
                weighted = self._cached.get((micro, number))
                if weighted is None:
                    centres = self.centre_store.operand(chunk.select, self.dtype, shape[0]) if centres is None else centres
                    weighted = self._weighted(batch, operands[micro], centres, chunk, None, None, None)
                product = torch.mm(weighted, scaled[micro], out=self.workspace.buffer("product", shape, self.dtype))
                if len(batches) > 1:  # their sum, in fp32
                    total = self.workspace.buffer("total", shape, torch.float32)
                    product = total.copy_(product) if micro == 0 else total.add_(product)
            yield chunk, product[: chunk.size], (*chunk.targets, of_targets)

    def _operand(self, batch: Batch) -> Tensor:
        """Return the (D, B) operand whose products with unit centres are logits if those are linear, otherwise cosines."""
        return (batch.unit * self.gain).to(self.dtype).t()

    def _negatives(self, batch: Batch, product: Tensor) -> Tensor:
        """Return the negative logits (c, B) from the product of unit centres with _operand."""
        if self.margin.linear_negatives:
            return product
        return self.margin.negatives(product.t(), batch.target_cosine[:, None], batch.state).t()

    def _weighted(
        self,
        batch: Batch,
        operand: Tensor,
        centres: Tensor,
        chunk: Chunk,
        out: Tensor | None,
        z_sum: Tensor | None,
        by_target: Tensor | None,
    ) -> Tensor:
        """Return E v dz/dcos / gain (padded c, B) in dtype, 0 beyond the chunk's c classes, in `out` or a buffer.

        Also add to z_sum, Z (B,), and to by_target, sum_j E dz/dt (B,), if they are given.
        """
        if out is None:
            out = self.workspace.buffer("logits", (len(centres), operand.shape[1]), self.dtype)
        if z_sum is None:
            z_sum = self.workspace.buffer("unused", (operand.shape[1],), torch.float32)
        torch.mm(centres, operand, out=out)
        out[chunk.size :].zero_()
        real, kernels, targets = out[: chunk.size], self.workspace.kernels, (batch.places, chunk.begin)
        inverse_norms = self.centre_store.inverse_norms[chunk.select]
        if self.margin.linear_negatives:
            kernels.exponentials(real, inverse_norms, targets, batch.shift, self.logit_limit, z_sum, self.workspace)
            return out
        with torch.enable_grad():
            cosine = (real.float() * inverse_norms[:, None]).t().requires_grad_()  # (B, c)
            target = batch.target_cosine[:, None].clone().requires_grad_()
            logits = self.margin.negatives(cosine, target, batch.state)
        exp = logits.detach().float().t().clone(memory_format=torch.contiguous_format)
        unlimited = z_sum if self.limit is None else torch.zeros_like(z_sum)
        kernels.exponentials(exp, None, targets, batch.shift, None, unlimited, self.workspace)
        if self.limit is not None:
            exp.masked_fill_(cosine.detach().t() > self.limit, 0.0)
            z_sum += exp.sum(dim=0)
        grad_cosine, grad_target = torch.autograd.grad(logits, (cosine, target), exp.t().to(logits.dtype), allow_unused=True)
        if by_target is not None and grad_target is not None:
            by_target += grad_target.squeeze(1)
        if grad_cosine is None:
            return out.zero_()
        real.copy_(grad_cosine.t() * inverse_norms[:, None])
        return out
