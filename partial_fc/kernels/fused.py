"""The product of a chunk's logits with the exponentials in its epilogue, as one Triton kernel: no logits are written.

The same as multiply() and PlainKernels.exponentials of plain.py, in bf16, but that the logits are not rounded to bf16. A
program keeps the products of one tile, classes x samples, in its registers. Sums of a tile's exponentials are added in a
fixed order. Shapes: c = classes of one chunk, B = samples of the global (micro-)batch, D = embedding size.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .plain import FUSED, Tile

_LOG2_E = tl.constexpr(math.log2(math.e))


# what changes from call to call is not specialised: each new alignment would be compiled
@triton.jit(do_not_specialize=["inverse_norms", "num_classes", "begin"])
def product_exp_kernel(
    centres, unit, inverse_norms, places, products, partial, num_classes, num_samples, stride, begin, shift, limit,
    dim: tl.constexpr, class_block: tl.constexpr, sample_block: tl.constexpr, dim_block: tl.constexpr, widen: tl.constexpr
):  # fmt: skip
    """Write E v to products (c, B), and the sums of E over this program's classes to its row of partial.

    Programs with the same centres (c and more rows, D) follow one another, so that these are read from memory once.
    """
    groups = tl.cdiv(num_samples, sample_block)
    row = tl.program_id(0) // groups
    classes = row * class_block + tl.arange(0, class_block)
    samples = tl.program_id(0) % groups * sample_block + tl.arange(0, sample_block)
    here, inside = classes < num_classes, samples < num_samples
    columns = tl.arange(0, dim_block)
    centre_at = centres + classes[:, None].to(tl.int64) * dim + columns[None, :]
    sample_at = unit + tl.minimum(samples, num_samples - 1)[:, None] * dim + columns[None, :]  # the last one, beyond it
    logits = tl.zeros((class_block, sample_block), tl.float32)
    for first in range(0, dim, dim_block):
        if dim % dim_block == 0:
            w, x = tl.load(centre_at + first), tl.load(sample_at + first)
        else:
            part = (first + columns < dim)[None, :]
            w, x = tl.load(centre_at + first, mask=part, other=0.0), tl.load(sample_at + first, mask=part, other=0.0)
        if widen:
            w, x = w.to(tl.float32), x.to(tl.float32)
        logits = tl.dot(w, tl.trans(x), logits)
    v = tl.load(inverse_norms + classes, mask=here, other=0.0)[:, None]
    exponential = tl.exp2(logits * (v * _LOG2_E) - shift * _LOG2_E)
    # a condition on each number takes longer than its exponential; of many classes few tiles have any to leave out
    if limit is not None:
        exponential = tl.where(v * logits > limit, 0.0, exponential)
    if (row + 1) * class_block > num_classes:
        exponential = tl.where(here[:, None], exponential, 0.0)
    target = (tl.load(places + samples, mask=inside, other=-1) - begin).to(tl.int32) - row * class_block
    if tl.max(((target >= 0) & (target < class_block)).to(tl.int32), axis=0) > 0:
        exponential = tl.where(tl.arange(0, class_block)[:, None] == target[None, :], 0.0, exponential)
    at = products + classes[:, None].to(tl.int64) * stride + samples[None, :]
    tl.store(at, (v * exponential).to(products.dtype.element_ty), mask=here[:, None] & inside[None, :])
    tl.store(partial + row.to(tl.int64) * num_samples + samples, tl.sum(exponential, axis=0), mask=inside)


def exponentials_of_product(form: str, tile: Tile, shift: float, z_sum: Tensor) -> None:
    """Do the work of PlainKernels.exponentials for a tile with factors, in one of the forms of FUSED."""
    assert tile.factors is not None and tile.inverse_norms is not None
    centres, unit = tile.factors[0], tile.factors[1].t()
    products, (num_classes, num_samples) = tile.products, tile.products.shape
    class_block, sample_block, dim_block, warps, stages = FUSED[form]
    rows = triton.cdiv(num_classes, class_block)
    assert centres.dtype == unit.dtype == products.dtype == torch.bfloat16
    assert centres.is_contiguous() and unit.is_contiguous()
    assert len(centres) >= rows * class_block and unit.shape == (num_samples, centres.shape[1])  # see padded_rows
    if not products.numel():
        return
    partial = torch.empty(rows, num_samples, dtype=torch.float32, device=products.device)
    with torch.cuda.device_of(products):
        product_exp_kernel[(rows * triton.cdiv(num_samples, sample_block),)](
            *(centres, unit, tile.inverse_norms, tile.places, products, partial, num_classes, num_samples),
            *(products.stride(0), tile.begin, float(shift), tile.limit),
            *(centres.shape[1], class_block, sample_block, dim_block),
            products.device.type == "cpu",  # Triton's interpreter would multiply the bits of bf16 numbers
            num_warps=warps,
            num_stages=stages,
        )
    z_sum += partial.sum(dim=0)
