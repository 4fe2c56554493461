"""The matrix products of a chunk of classes with a batch: their shapes, and their sum in fp32.

Shapes: B = samples of the global (micro-)batch, D = embedding size, c = classes of one chunk.
"""

import functools

import torch
from torch import Tensor

from .workspace import Workspace

_GRANULE = 256  # bf16 products have a multiple of this many rows


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


def add_product(total: Tensor, weights: Tensor, centres: Tensor, workspace: Workspace) -> None:
    """Add weights.t() times centres, (c, B) and (c, D) of one dtype, to total (B, D), fp32."""
    if centres.dtype == torch.float32:
        total.addmm_(weights.t(), centres)
    elif has_fp32_output(total.device):
        total += torch.mm(weights.t(), centres, out_dtype=torch.float32)
    else:
        total += torch.mm(weights.t(), centres, out=workspace.buffer("u", tuple(total.shape), centres.dtype))
