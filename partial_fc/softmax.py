"""The two passes of a margin softmax over a shard's active classes, chunk by chunk.

Neither the logits nor the gradient of the centres is ever whole: memory is O(B x chunk + chunk x D), whatever C is.

    forward   z = margin.negatives(x . w), E = exp(z - K), Z_i = sum_j E_ij, U_i = sum_j E_ij dz_ij/dcos w_j
              over every class but the row's own; then, with the own logit t_i, lse_i = log(exp(log Z_i + K) + exp(t_i)),
              loss_i = lse_i - t_i and dL/dx_i = exp(K - lse_i) U_i / B + (own class)
    update    dL/dw_j = sum_i exp(K - lse_i) E_ij dz_ij/dcos x_i / B + (own class), chained through the normalisation of w_j

The own class is masked out of the chunks and computed apart, so 1 - p_i = exp(log Z_i + K - lse_i) does not cancel.
Shapes: B = rows of the global (micro-)batch, D = embedding size, c = classes of one chunk. x and w are unit rows.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from .sampling import ActiveSet

_LARGEST_EXPONENT = 80.0  # exp(80) = 5.5e34; fp32 and bf16 end at 3.4e38


class MarginLike(Protocol):
    """What the head needs of a margin; see losses/margin.py."""

    @property
    def scale(self) -> float: ...
    @property
    def logit_bound(self) -> float: ...
    @property
    def linear_negatives(self) -> bool: ...
    def target(self, cosine: Tensor, norm: Tensor) -> Tensor: ...
    def negatives(self, cosine: Tensor, target_cosine: Tensor) -> Tensor: ...


class Chunk(NamedTuple):
    """Active local slots that are handled at once, and where the rows of each micro-batch have their own class among them."""

    select: slice | Tensor  # a run of slots (a view of the centres) or single slots (a copy)
    own: list[tuple[Tensor, Tensor]]  # per micro-batch: (rows, columns), int64


class Batch(NamedTuple):
    """One global micro-batch, as the two passes see it."""

    unit: Tensor  # (B, D) fp32
    target_cosine: Tensor  # (B, 1) fp32
    shift: Tensor | None  # K, (B, 1) fp32; None = 0


def plan_chunks(active: ActiveSet, own: list[tuple[np.ndarray, np.ndarray]], size: int, device: torch.device) -> list[Chunk]:
    """Return the active slots in chunks of at most `size`.

    Args:
        own: per micro-batch (rows, slots): the rows whose class this shard holds and its local slot.
    """
    pieces: list[tuple[int, int] | np.ndarray] = []
    for start, stop in active.runs:
        pieces += [(low, min(low + size, stop)) for low in range(start, stop, size)]
    pieces += [active.extra[low : low + size] for low in range(0, len(active.extra), size)]
    chunks = []
    for piece in pieces:
        pairs = []
        for rows, slots in own:
            if isinstance(piece, tuple):
                inside, columns = (slots >= piece[0]) & (slots < piece[1]), slots - piece[0]
            else:
                columns = np.searchsorted(piece, slots)
                inside = piece[np.minimum(columns, len(piece) - 1)] == slots
            pairs.append((_to(rows[inside], device), _to(columns[inside], device)))
        chunks.append(Chunk(slice(*piece) if isinstance(piece, tuple) else _to(piece, device), pairs))
    return chunks


def unit_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (unit rows, norms (n, 1)) of (n, D) fp32; a zero row stays zero."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-12)
    return rows / norms, norms


def needs_row_maximum(margin: MarginLike, num_classes: int) -> bool:
    """Return whether exp(logit) may leave fp32's range; otherwise K = 0 serves and no maximum is ever computed."""
    return margin.logit_bound + float(np.log(num_classes)) > _LARGEST_EXPONENT


def row_maximum(
    margin: MarginLike, batch: Batch, centres: Tensor, chunks: list[Chunk], micro: int, dtype: torch.dtype
) -> Tensor:
    """Return the (B, 1) largest negative logit over this shard's active classes, -inf where there is none."""
    maximum = batch.unit.new_full((len(batch.unit), 1), -torch.inf)
    for chunk, unit, _, _ in _walk(centres, chunks, dtype):
        logits, _, _ = _logits(margin, batch, unit, grad=False)
        logits[chunk.own[micro]] = -torch.inf
        maximum = torch.maximum(maximum, logits.amax(dim=1, keepdim=True))
    return maximum


def forward_pass(
    margin: MarginLike, batch: Batch, centres: Tensor, chunks: list[Chunk], micro: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this shard's Z (B,), U (B, D) and sum_j E_ij dz_ij/dt_i (B,), all fp32, over the negatives of each row."""
    z_sum = batch.unit.new_zeros(len(batch.unit))
    u_sum = torch.zeros_like(batch.unit)
    by_target = torch.zeros_like(z_sum)
    for chunk, unit, _, _ in _walk(centres, chunks, dtype):
        exp, weighted, target_part = _exponentials(margin, batch, unit, chunk.own[micro])
        z_sum += exp.sum(dim=1, dtype=torch.float32)
        u_sum += weighted @ unit
        if target_part is not None:
            by_target += target_part
    return z_sum, u_sum, by_target


def centre_gradients(
    margin: MarginLike,
    batches: list[Batch],
    factors: list[Tensor],
    targets: list[Tensor],
    centres: Tensor,
    chunks: list[Chunk],
    dtype: torch.dtype,
) -> Iterator[tuple[slice | Tensor, Tensor, Tensor]]:
    """Yield (slots, their centres (c, D), the loss's gradient for them (c, D)) chunk by chunk, fp32.

    Args:
        batches, factors, targets: per micro-batch the batch, exp(K - lse_i) / B (B,), and dL/d(target cosine) (B,).
    """
    scaled = [(batch.unit * factor[:, None]).to(dtype) for batch, factor in zip(batches, factors, strict=True)]
    for chunk, unit, rows, inverse_norm in _walk(centres, chunks, dtype):
        gradient = torch.zeros_like(rows)
        for micro, batch in enumerate(batches):
            _, weighted, _ = _exponentials(margin, batch, unit, chunk.own[micro])
            gradient += weighted.t() @ scaled[micro]
            own_rows, own_columns = chunk.own[micro]
            gradient.index_add_(0, own_columns, batch.unit[own_rows] * targets[micro][own_rows, None])
        direction = rows * inverse_norm
        # the gradient of w / |w|: what points along w does nothing
        gradient -= direction * (gradient * direction).sum(dim=1, keepdim=True)
        yield chunk.select, rows, gradient.mul_(inverse_norm)


def _walk(centres: Tensor, chunks: list[Chunk], dtype: torch.dtype) -> Iterator[tuple[Chunk, Tensor, Tensor, Tensor]]:
    """Yield (chunk, unit centres (c, D) in dtype, centres (c, D) fp32, 1 / norm (c, 1)) for each chunk."""
    for chunk in chunks:
        rows = centres[chunk.select]
        inverse_norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min_(1e-12).reciprocal_()
        yield chunk, (rows * inverse_norm).to(dtype), rows, inverse_norm


def _logits(margin: MarginLike, batch: Batch, unit: Tensor, grad: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return negative logits (B, c); for a margin that bends them also the (cosine, target cosine) leaves of their graph."""
    if margin.linear_negatives:
        return (batch.unit * margin.scale).to(unit.dtype) @ unit.t(), None, None
    with torch.set_grad_enabled(grad):
        cosine = (batch.unit.to(unit.dtype) @ unit.t()).float().requires_grad_(grad)
        target_cosine = batch.target_cosine.detach().clone().requires_grad_(grad)
        return margin.negatives(cosine, target_cosine), cosine, target_cosine


def _exponentials(
    margin: MarginLike, batch: Batch, unit: Tensor, own: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return E (B, c), E dz/dcos (B, c) in unit's dtype, and sum_j E dz/dt (B,) or None; own classes are 0 in all of them."""
    logits, cosine, target_cosine = _logits(margin, batch, unit, grad=True)
    exp = logits.detach()
    if batch.shift is not None:
        exp = exp.float() - batch.shift  # in fp32: a subtraction in bf16 would cost 5 % of exp
    exp = torch.exp(exp)
    exp[own] = 0
    if cosine is None or target_cosine is None:
        return exp, (exp * margin.scale).to(unit.dtype), None
    with torch.enable_grad():
        weighted, by_target = torch.autograd.grad(logits, (cosine, target_cosine), exp.to(logits.dtype), allow_unused=True)
    if weighted is None:
        weighted = torch.zeros_like(exp)
    return exp, weighted.to(unit.dtype), None if by_target is None else by_target.squeeze(1)


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
