"""The matrix products of a chunk of classes with a batch: their shapes, their dtypes, and their sum in fp32.

A CPU without units for bf16 multiplies bf16 matrices many times more slowly than fp32 ones. There the products are computed in
fp32, block by block, from the bf16 numbers: a product of two bf16 numbers is exact in fp32, so the result is what such a unit
gives, up to the order of the fp32 sum.

Shapes: B = samples of the global (micro-)batch, D = embedding size, c = classes of one chunk.
"""

import functools

import torch
from torch import Tensor

from utils.precision import is_fast_in_bf16

from ..workspace import Workspace

_GRANULE = 256  # bf16 products have a multiple of this many rows
_BLOCK = 1024  # rows that are converted to fp32 at once, so that they stay in cache


@functools.cache
def has_fp32_output(device: torch.device) -> bool:
    """Return whether bf16 matrices have a product in fp32, so that U is not rounded for each chunk: on CUDA, torch 2.8."""
    tiny = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        return bool(torch.mm(tiny, tiny, out_dtype=torch.float32).dtype == torch.float32)
    except (TypeError, RuntimeError):
        return False


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


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which matrices of dtype are multiplied: float32 for bf16 on a CPU without units for it."""
    emulated = dtype == torch.bfloat16 and device.type == "cpu" and not is_fast_in_bf16(device)
    return torch.float32 if emulated else dtype


def converted_bytes(count: int, dim: int, rows: int) -> int:
    """Return the bytes in which products of `count` classes are computed in fp32: blocks of both factors and of the result."""
    return 4 * (min(_BLOCK, count) * (2 * max(dim, rows) + dim) + rows * dim)


def multiply(left: Tensor, right: Tensor, out: Tensor, workspace: Workspace) -> Tensor:
    """Write left (n, k) times right (k, m) to out (n, m), all of one dtype, and return it."""
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
