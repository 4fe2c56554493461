"""The elementwise work of the two passes in plain torch: it runs anywhere, and the other kernels must agree with it.

And the matrix products of a chunk of classes with a batch: their shapes, their dtypes, and their sum in fp32.

A CPU without units for bf16 multiplies bf16 matrices many times more slowly than fp32 ones. There the products are computed in
fp32, block by block, from the bf16 numbers: a product of two bf16 numbers is exact in fp32, so the result is what such a unit
gives, up to the order of the fp32 sum.

Shapes: B = samples of the global (micro-)batch, D = embedding size, c = classes of one chunk.
"""

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from utils.precision import is_fast_in_bf16

from ..centres.row_optimizer import RowOptimizer
from ..centres.store import CentreStore, Select
from ..workspace import Workspace

LONGEST_ROW = 4096  # numbers of a centre, which one Triton program holds in its registers
_GRANULE = 256  # bf16 products have a multiple of this many rows
_BLOCK = 1024  # rows that are converted to fp32 at once, so that they stay in cache


@functools.cache
def has_fp32_output(device: torch.device) -> bool:
    """Return whether bf16 matrices have a product in fp32, so that U is not rounded for each chunk: on CUDA, torch 2.8."""
    tiny = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        return bool(torch.mm(tiny, tiny, out_dtype=torch.float32, out=tiny.float()).dtype == torch.float32)
    except (TypeError, RuntimeError):
        return False


def auto_chunk(device: str, dtype: torch.dtype) -> int:
    """Return the default number of classes that are processed at once.

    On the CPU products are fastest on large chunks, and the work between them on small chunks, which stay in cache. From 2048
    to 16384 classes the step time differs by a tenth. On CUDA there should be few launches, but the buffers grow with the
    global batch: with 1,000,000 classes and B = 512, an H200 is busy for 5.1 ms of a step in chunks of 65,536 classes, 4.8 in
    131,072 and 4.7 in 262,144. A chunk's logits and gradient take 256 MiB here at B = D = 512.
    """
    return (65536 if device == "cuda" else 8192) * 4 // dtype.itemsize


def padded_rows(count: int, dtype: torch.dtype) -> int:
    """Return the number of rows to which a chunk of `count` classes is padded for the products.

    oneDNN compiles a bf16 product again for each shape, which takes longer than most products. With sampling there would be new
    shapes in every step.
    """
    return -(-count // _GRANULE) * _GRANULE if dtype == torch.bfloat16 else count


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which matrices of dtype are multiplied: float32 for bf16 on a CPU without units for it."""
    emulated = dtype == torch.bfloat16 and device.type == "cpu" and not is_fast_in_bf16(device)
    return torch.float32 if emulated else dtype


def converted_bytes(count: int, dim: int, rows: int) -> int:
    """Return the bytes in which products of `count` classes are computed in fp32: blocks of both factors and of the result."""
    return 4 * (min(_BLOCK, count) * (2 * max(dim, rows) + dim) + rows * dim)


def multiply(left: Tensor, right: Tensor, out: Tensor, workspace: Workspace) -> Tensor:
    """Write left (n, k) times right (k, m), of one dtype, to out (n, m), of that or, if `has_fp32_output`, fp32; return it."""
    if out.dtype != left.dtype:
        return torch.mm(left, right, out_dtype=out.dtype, out=out)
    if product_dtype(out.device, out.dtype) == out.dtype:
        return torch.mm(left, right, out=out)
    right = right.float()
    for begin in range(0, len(left), _BLOCK):
        factor = _in_fp32(left[begin : begin + _BLOCK], "left", workspace)
        product = workspace.buffer("product of a block", (len(factor), out.shape[1]), torch.float32)
        out[begin : begin + _BLOCK] = torch.mm(factor, right, out=product)
    return out


def add_product(total: Tensor, weights: Tensor, centres: Tensor, workspace: Workspace) -> None:
    """Add weights.t() times centres, (c, B) and (c, D) of one dtype, to total (B, D), fp32."""
    if centres.dtype == torch.float32:
        total.addmm_(weights.t(), centres)
    elif product_dtype(total.device, centres.dtype) == torch.float32:
        for begin in range(0, len(centres), _BLOCK):
            rows = _in_fp32(weights[begin : begin + _BLOCK], "left", workspace)
            total.addmm_(rows.t(), _in_fp32(centres[begin : begin + _BLOCK], "right", workspace))
    elif has_fp32_output(total.device):
        total += torch.mm(weights.t(), centres, out_dtype=torch.float32)
    else:
        total += torch.mm(weights.t(), centres, out=workspace.buffer("u", tuple(total.shape), centres.dtype))


def _in_fp32(block: Tensor, side: str, workspace: Workspace) -> Tensor:
    return workspace.buffer(f"{side} of a block", tuple(block.shape), torch.float32).copy_(block)


if TYPE_CHECKING:  # parts do not import one another
    from losses.negatives import Negatives

FUSED = {  # forms of fused.py: classes, samples and columns of a program's tile; its warps, and the tiles it loads ahead
    "fused_64x128": (64, 128, 64, 4, 3),
    "fused_128x128": (128, 128, 64, 4, 3),
    "fused_128x256": (128, 256, 64, 8, 3),
}
THRESHOLD = 4  # the row of Negatives.coefficients above which a negative is hard
NO_NEGATIVE = -1e30  # the largest logit of a sample without negatives


class Tile(NamedTuple):
    """The products of a chunk of classes with a micro-batch, and what makes logits of them."""

    products: Tensor  # (c, B) fp32 or bf16, of centres as stored, with contiguous rows; a kernel's result takes their place
    inverse_norms: Tensor | None  # v, (c,) fp32; None = 1. v times a product is a cosine; without a function it is a logit
    places: Tensor  # (B,) int64: the target class of sample i is in row places[i] - begin, if that is in [0, c)
    begin: int
    limit: float | None = None  # classes whose product times v is larger are left out (the interclass filter); None = none
    function: "Negatives | None" = None  # of the negatives; None = one scale times the cosine, which is in the products
    row_weights: Tensor | None = None  # r, (c,) fp32, above 0; None = 1
    # the centres (padded c, D) and embeddings (D, B) whose products are not computed yet, for kernels that fuse
    factors: tuple[Tensor, Tensor] | None = None

    def with_log_weights(self) -> "Tile":
        """Return the tile with log r in place of r."""
        return self if self.row_weights is None else self._replace(row_weights=self.row_weights.log())


class CentreGradient(NamedTuple):
    """The gradient of some centres' unit vectors, in two parts."""

    select: Select  # rows of the centres
    negatives: Tensor  # (c, D) fp32 or bf16, times v = 1 / norm of each centre; may be overwritten
    class_index: Tensor  # (n,) int64, ascending
    sample_index: Tensor  # (n,) int64: values[sample_index[k]] is added to row class_index[k], in the order of k
    values: Tensor  # of the target classes, fp32, one row for each sample, not yet times v


class PlainKernels:
    """The sweeps over memory. Other kernels are subclasses and override some of the methods."""

    name = "plain"  # or "c" or "triton"
    words = "plain torch"  # the name in log lines
    reads_flag = False  # whether update_rows reads `apply` on the device, without a host sync
    fused = ""  # the form of FUSED in which `exponentials` also computes products; "" = it takes them. See softmax/choice.py

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace  # owner of the buffers

    def exponentials(self, tile: Tile, shift: float, z_sum: Tensor) -> None:
        """Replace products (c, B) by E v with E = exp(v product - K); add the sums of E to z_sum.

        E is 0 for target classes and above the limit.

        Args:
            tile: without a function and row_weights.
            shift: K.
            z_sum: (B,) fp32; the sums are of the fp32 values, before E is rounded to the dtype of products.
        """
        exp = products = tile.products
        if products.dtype != torch.float32:  # exp and sum in an fp32 buffer are faster than in bf16, and more exact
            exp = self.workspace.buffer("exp", tuple(products.shape), torch.float32).copy_(products)
        if tile.inverse_norms is not None:
            exp.mul_(tile.inverse_norms[:, None])
        left_out = None if tile.limit is None else exp > tile.limit
        if shift:
            exp.sub_(shift)
        _without(exp.exp_(), left_out, tile)
        z_sum += exp.sum(dim=0)
        if tile.inverse_norms is not None:
            exp.mul_(tile.inverse_norms[:, None])
        if exp is not products:
            products.copy_(exp)

    def weights(self, tile: Tile, link: str, shift: float | Tensor, less: Tensor | None, sums: Tensor) -> None:
        """Replace products (c, B) by W v, and add to the sums, for any function of the negatives.

        With the cosine c = v product, the logit z = function(c) and the weight r of a class:

            link softmax    E = r exp(z - K), W = (E - less) dz/dc   sums[0] += sum_j E
            link sum        W = r sigmoid(z) dz/dc   sums[0] += sum_j r softplus(z), sums[1] += sum_j r sigmoid(z)

        If function.kind is "hard" and the link is softmax, sums[1] and sums[2] get the number of classes whose cosine is above
        the threshold, and the sum of their cosines; r does not count. Target classes, and classes whose cosine is above the
        limit, have W = 0 and are in no sum. `exponentials` is the fast case: linear, one scale, softmax, r = 1, less = 0.

        Args:
            link: "softmax" or "sum".
            shift: K, one number or (B,); not used by the sum. The result is finite where z - K <= 80.
            less: (B,) fp32, for softmax only; None = 0.
            sums: (3, B) fp32, contiguous; they are of the fp32 values, before W is rounded to the dtype of products.
        """
        cosine, logit, weight, left_out = _logits(tile)
        factor = None if tile.row_weights is None else tile.row_weights[:, None]
        if link == "sum":
            value, each = F.softplus(logit), torch.sigmoid(logit)
            if factor is not None:
                value.mul_(factor)
                each.mul_(factor)
            terms = [_without(value, left_out, tile), _without(each, left_out, tile)]
            weight.mul_(each)
        else:
            each = logit.sub_(shift).exp_()
            if factor is not None:
                each.mul_(factor)
            terms = [_without(each, left_out, tile)]
            assert tile.function is not None
            if tile.function.kind == "hard":
                hard = _without((cosine > tile.function.coefficients[THRESHOLD]).float(), left_out, tile)
                terms += [hard, hard * cosine]
            if less is not None:
                weight = _without(weight.mul_(each - less), left_out, tile)
            else:
                weight.mul_(each)
        for row, term in zip(sums, terms, strict=False):
            row += term.sum(dim=0)
        _store(weight, tile)

    def maxima(self, tile: Tile, maximum: Tensor) -> None:
        """Set maximum (B,) to the larger of it and max_j z + log r, over the negatives of `weights`; change nothing else.

        A sample without negatives keeps its maximum if that is at least -1e30.
        """
        _, logit, _, left_out = _logits(tile.with_log_weights(), adds_weights=True)
        torch.maximum(maximum, _without(logit, left_out, tile, NO_NEGATIVE).amax(dim=0), out=maximum)

    def slopes(self, tile: Tile, sums: Tensor) -> None:
        """Replace products by v dz/dc, add to sums (2, B): how many negatives there are, and sum_j z + log r. As `weights`.

        Only label smoothing with negatives that are filtered or not linear needs it, so there is no other version.
        """
        cosine, logit, slope, left_out = _logits(tile.with_log_weights(), adds_weights=True)
        sums[0] += _without(torch.ones_like(cosine), left_out, tile).sum(dim=0)
        sums[1] += _without(logit, left_out, tile).sum(dim=0)
        _store(_without(slope, left_out, tile), tile)

    def update_rows(
        self, optimizer: RowOptimizer, store: CentreStore, gradient: CentreGradient, lr: float, seed: int, apply: Tensor | None
    ) -> None:
        """Update the selected centres from the gradient of their unit vectors.

        Args:
            seed: of the stochastic rounding in C and Triton.
            apply: device flag, one number: 0 skips the update without a host sync. Only if reads_flag; None = update.
        """
        optimizer.update(store, gradient.select, whole_gradient(store, gradient), lr)
        if "updates" in store.tensors:
            store.tensors["updates"][gradient.select] += 1


def _logits(tile: Tile, adds_weights: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return cosines, logits and their derivatives (c, B) in fp32, in memory of their own, and which are above the limit."""
    cosine = tile.products.to(torch.float32, copy=True)
    if tile.inverse_norms is not None:
        cosine.mul_(tile.inverse_norms[:, None])
    assert tile.function is not None
    logit, derivative = tile.function.logits(cosine)
    if adds_weights and tile.row_weights is not None:
        logit.add_(tile.row_weights[:, None])
    return cosine, logit, derivative, None if tile.limit is None else cosine > tile.limit


def _store(values: Tensor, tile: Tile) -> None:
    """Replace the products by values (c, B) times v."""
    tile.products.copy_(values if tile.inverse_norms is None else values.mul_(tile.inverse_norms[:, None]))


def _without(values: Tensor, left_out: Tensor | None, tile: Tile, value: float = 0.0) -> Tensor:
    """Set values (c, B) that are left out, and those of the target classes, and return them."""
    if left_out is not None:
        values.masked_fill_(left_out, value)
    rows = tile.places - tile.begin
    here = (rows >= 0) & (rows < len(values))
    index = rows.clamp(0, len(values) - 1)[None]  # no selection by `here`: on CUDA the host would wait for its size
    return values.scatter_(0, index, values.gather(0, index).masked_fill_(here, value))


def whole_gradient(store: CentreStore, gradient: CentreGradient) -> Tensor:
    """Return both parts of the gradient (c, D) in fp32, times 1 / norm of each centre."""
    rows = gradient.negatives
    if rows.dtype != torch.float32:
        rows = store.workspace.buffer("gradient", tuple(rows.shape), torch.float32).copy_(rows)
    if len(gradient.sample_index):
        inverse_norms = store.inverse_norms[gradient.select][gradient.class_index, None]
        rows.index_add_(0, gradient.class_index, gradient.values[gradient.sample_index] * inverse_norms)
    return rows
