"""The elementwise work of the two passes, in three forms that do the same: plain torch, C on the CPU, Triton on CUDA.

Plain torch runs anywhere and is the reference of the other two (tests/test_partial_fc_kernels.py, test_partial_fc_triton.py);
they do in one sweep over memory what torch does in many.
Shapes: c = classes of one chunk, B = rows of the global (micro-)batch, D = embedding size.
"""

import functools
import importlib
import re

import torch
from torch import Tensor

from partial_fc.row_optimizer import RowOptimizer, RowSGD
from partial_fc.state import CentreState, Select
from partial_fc.workspace import Workspace

from . import cpu as cpu_kernels

KERNELS = ("auto", "plain")
_OLDEST_TRITON = (3, 5)  # the interpreter of 3.2 gives wrong numbers where the kernels round by chance


def choose_kernels(wanted: str, device: torch.device, dim: int) -> str:
    """Return "c", "triton" or "plain": the fastest there is for the device if wanted is "auto", otherwise "plain"."""
    if wanted == "auto" and device.type == "cuda" and not _why_no_triton():
        return "triton"
    if wanted == "auto" and device.type == "cpu" and cpu_kernels.suits(dim):
        return "c"
    return "plain"


def why_plain(wanted: str, device: torch.device, dim: int) -> str:
    """Return why plain torch has to do what faster kernels were wanted for, "" where it has not."""
    if wanted != "auto" or choose_kernels(wanted, device, dim) != "plain":
        return ""
    if device.type == "cuda":
        return _why_no_triton()
    return cpu_kernels.why_unsuited(dim) if device.type == "cpu" else ""


@functools.cache
def _why_no_triton() -> str:
    """Return why Triton cannot be used, "" where it can; it comes with every CUDA build of torch."""
    try:
        found = str(importlib.import_module("triton").__version__)
    except ImportError:
        return "Triton is not installed"
    if tuple(int(number) for number in re.findall(r"\d+", found)[:2]) < _OLDEST_TRITON:
        return f"Triton {found} is older than {'.'.join(map(str, _OLDEST_TRITON))}; a newer torch brings a newer one"
    return ""


def exponentials(
    logits: Tensor,
    own: tuple[Tensor, Tensor],
    shift: float | Tensor,
    limit: float | None,
    z_sum: Tensor,
    workspace: Workspace,
) -> None:
    """Replace logits (c, B) by E = exp(logits - shift), 0 for own classes and above the limit; add E's sums to z_sum (B,).

    Args:
        own: (columns, rows), int64: where row i of the batch has its own class in this chunk, logits[column, row] = 0.
        shift: K, one number or (B,).
        limit: logits above it are left out of the softmax (the interclass filter); None = none.
        z_sum: fp32; takes the sums of the fp32 values, before E is rounded to the dtype of logits.
    """
    if workspace.kernels == "c" and not isinstance(shift, Tensor):
        partial = workspace.buffer("partial", (torch.get_num_threads(), logits.shape[1]), torch.float32)
        cpu_kernels.exponentials(logits, own, shift, limit, z_sum, partial)
        return
    if workspace.kernels == "triton" and not isinstance(shift, Tensor):
        from .triton import exp_mask_sum

        position = torch.full((logits.shape[1],), -1, dtype=torch.int32, device=logits.device)
        position[own[1]] = own[0].to(torch.int32)
        exp_mask_sum(logits, position, shift, limit, z_sum)
        return
    exp = logits
    if logits.dtype != torch.float32:  # exp and sum in fp32 through a buffer are faster than in bf16, and more exact
        exp = workspace.buffer("exp", tuple(logits.shape), torch.float32).copy_(logits)
    left_out = None if limit is None else exp > limit
    if isinstance(shift, Tensor) or shift:
        exp.sub_(shift)
    exp.exp_()
    if left_out is not None:
        exp.masked_fill_(left_out, 0.0)
    exp[own] = 0.0
    z_sum += exp.sum(dim=0)
    if exp is not logits:
        logits.copy_(exp)


def update_rows(
    optimizer: RowOptimizer,
    state: CentreState,
    select: Select,
    gradient: Tensor,
    own: tuple[Tensor, Tensor, Tensor],
    lr: float,
    seed: int,
    apply: Tensor | None,
) -> None:
    """Update the selected centres from the gradient (c, D) of their unit vectors, fp32 or bf16, which is overwritten.

    Args:
        own: (columns, rows, values (B, D) fp32), the part of the own classes: values[rows[n]] belongs to gradient[columns[n]];
            columns ascend.
        seed: of the stochastic rounding in C and Triton.
        apply: for Triton one number; where it is 0 nothing changes, and the host need not wait to know it. None = apply.
    """
    kernels, tensors = state.workspace.kernels, state.tensors
    sgd = isinstance(optimizer, RowSGD)
    if kernels == "c":
        tail = (optimizer.momentum, 0.0, 0.0, optimizer.weight_decay) if isinstance(optimizer, RowSGD) else optimizer
        cpu_kernels.update_rows(tensors, state.inverse_norms, select, gradient, own, not sgd, (lr, *tail), seed)
        return
    if gradient.dtype != torch.float32:
        gradient = state.workspace.buffer("gradient", tuple(gradient.shape), torch.float32).copy_(gradient)
    columns, rows, values = own
    if len(rows):
        gradient.index_add_(0, columns, values[rows])
    if kernels == "triton":
        from . import triton as triton_kernels

        where = select.start if isinstance(select, slice) else select
        flag = torch.ones(1, device=gradient.device) if apply is None else apply
        centres, momentum, scale = tensors["centres"], tensors["momentum"], tensors.get("momentum_scale")
        inverse = state.inverse_norms
        if not isinstance(optimizer, RowSGD):
            variance, updates = tensors["variance"], tensors["updates"]
            triton_kernels.adamw_update(
                centres, momentum, scale, variance, updates, gradient, inverse, where, lr, *optimizer, seed, flag
            )
            return
        triton_kernels.sgd_update(
            centres, momentum, scale, gradient, inverse, where, lr, optimizer.momentum, optimizer.weight_decay, seed, flag
        )
    else:
        optimizer.update(state, select, gradient, lr)
    if "updates" in tensors:
        tensors["updates"][select] += 1
