"""Launches the Triton kernels of triton.py and triton_negatives.py for the head."""

import math

import torch
import triton
from torch import Tensor

from ..centres.row_optimizer import RowOptimizer, RowSGD
from ..centres.store import CentreStore, Select
from ..margin_like import NegativesLike
from ..workspace import Workspace
from . import triton_negatives
from .plain import PlainKernels
from .triton import CLASSES, SAMPLES, TILES, adamw_kernel, exp_mask_sum_kernel, sgd_kernel
from .triton_negatives import negatives_kernel

_LARGEST_DIM = 4096  # one program holds a row in its registers


class TritonKernels(PlainKernels):
    """See PlainKernels for the arguments."""

    name = "triton"
    words = "Triton kernels"
    reads_flag = True

    def exponentials(
        self,
        products: Tensor,
        inverse_norms: Tensor | None,
        targets: tuple[Tensor, int],
        shift: float | Tensor,
        limit: float | None,
        z_sum: Tensor,
        workspace: Workspace,
    ) -> None:
        if isinstance(shift, Tensor):
            super().exponentials(products, inverse_norms, targets, shift, limit, z_sum, workspace)
            return
        exp_mask_sum(products, inverse_norms, targets, shift, limit, z_sum)

    def weights(
        self,
        products: Tensor,
        inverse_norms: Tensor | None,
        targets: tuple[Tensor, int],
        function: NegativesLike,
        link: str,
        row_weights: Tensor | None,
        shift: float | Tensor,
        limit: float | None,
        less: Tensor | None,
        sums: Tensor,
        workspace: Workspace,
    ) -> None:
        partial = sweep_negatives(link, products, (inverse_norms, row_weights), targets, function, shift, limit, less)
        sums += partial.sum(dim=0)

    def maxima(
        self,
        products: Tensor,
        inverse_norms: Tensor | None,
        targets: tuple[Tensor, int],
        function: NegativesLike,
        row_weights: Tensor | None,
        limit: float | None,
        maximum: Tensor,
        workspace: Workspace,
    ) -> None:
        by_class = (inverse_norms, None if row_weights is None else row_weights.log())
        partial = sweep_negatives("largest", products, by_class, targets, function, 0.0, limit, None)
        torch.maximum(maximum, partial.amax(dim=(0, 1)), out=maximum)

    def update_rows(
        self,
        optimizer: RowOptimizer,
        store: CentreStore,
        select: Select,
        gradient: Tensor,
        target: tuple[Tensor, Tensor, Tensor],
        lr: float,
        seed: int,
        apply: Tensor | None,
    ) -> None:
        where = select.start if isinstance(select, slice) else select
        flag = torch.ones(1, device=gradient.device) if apply is None else apply
        tensors, inverse = store.tensors, store.inverse_norms
        centres, momentum, scale = tensors["centres"], tensors["momentum"], tensors.get("momentum_scale")
        if isinstance(optimizer, RowSGD):
            settings = (lr, optimizer.momentum, optimizer.weight_decay)
            sgd_update(centres, momentum, scale, gradient, target, inverse, where, *settings, seed, flag, optimizer.nesterov)
            if "updates" in tensors:
                tensors["updates"][select] += 1
            return
        variance, updates = tensors["variance"], tensors["updates"]
        adamw_update(centres, momentum, scale, variance, updates, gradient, target, inverse, where, lr, *optimizer, seed, flag)


def try_kernel(device: torch.device) -> None:
    """Run a kernel on four numbers; raise what keeps Triton from it, or ArithmeticError if a sum is wrong."""
    products, places = torch.zeros(2, 2, device=device), torch.tensor([0, -1], device=device)
    z_sum = torch.zeros(2, device=device)
    exp_mask_sum(products, None, (places, 0), 0.0, None, z_sum)
    if z_sum.tolist() != [1.0, 2.0]:
        raise ArithmeticError(f"the sums of a kernel should be 1 and 2, they are {z_sum.tolist()}")


def exp_mask_sum(
    products: Tensor,
    inverse_norms: Tensor | None,
    targets: tuple[Tensor, int],
    shift: float,
    limit: float | None,
    z_sum: Tensor,
) -> None:
    """Replace products (c, B) by E v; see PlainKernels.exponentials for the arguments. Their arithmetic is fp32.

    Args:
        products: fp32 or bf16; each row is contiguous.
    """
    num_classes, num_samples = products.shape
    places, begin = targets
    assert products.stride(1) == 1 or num_samples == 1, "each row of products must be contiguous"
    assert places.dtype == torch.int64 and z_sum.dtype == torch.float32
    assert inverse_norms is None or (inverse_norms.is_contiguous() and len(inverse_norms) == num_classes)
    if not products.numel():
        return
    grid = (triton.cdiv(num_classes, CLASSES.value * TILES.value), triton.cdiv(num_samples, SAMPLES.value))
    # one row of partial sums per program, then a sum in a fixed order; atomics would add in a varying order
    partial = torch.empty(grid[0], num_samples, dtype=torch.float32, device=products.device)
    with torch.cuda.device_of(products):
        numbers = (
            num_classes,
            num_samples,
            products.stride(0),
            begin,
            float(shift),
            math.inf if limit is None else float(limit),
        )
        exp_mask_sum_kernel[grid](products, inverse_norms, places, partial, *numbers)
    z_sum += partial.sum(dim=0)


def sweep_negatives(
    sweep: str,
    products: Tensor,
    by_class: tuple[Tensor | None, Tensor | None],
    targets: tuple[Tensor, int],
    function: NegativesLike,
    shift: float | Tensor,
    limit: float | None,
    less: Tensor | None,
) -> Tensor:
    """Return the sums over groups of classes (groups, 3, B), or their largest logits (groups, 1, B); see PlainKernels.weights.

    Args:
        sweep: a link, whose weights take the place of products, or "largest", as PlainKernels.maxima wants them.
        products: (c, B) fp32 or bf16; each row is contiguous.
        by_class: inverse_norms, and row_weights or their logarithms for "largest"; each (c,) fp32 or None.
    """
    num_classes, num_samples = products.shape
    places, begin = targets
    per_sample = [tensor for tensor in (shift, less) if isinstance(tensor, Tensor)]
    assert products.stride(1) == 1 or num_samples == 1, "each row of products must be contiguous"
    assert places.dtype == torch.int64 and all(len(tensor) == num_samples for tensor in [places, *per_sample])
    vectors = [tensor for tensor in (*by_class, function.coefficients, *per_sample) if tensor is not None]
    assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in vectors)
    assert all(tensor is None or len(tensor) == num_classes for tensor in by_class)
    per_program = triton_negatives.CLASSES.value * triton_negatives.TILES.value
    grid = (triton.cdiv(num_classes, per_program), triton.cdiv(num_samples, triton_negatives.SAMPLES.value))
    rows = 1 if sweep == "largest" else triton_negatives.SUMS.value
    # partial sums and then a sum in a fixed order, as in exp_mask_sum
    partial = torch.empty(grid[0], rows, num_samples, dtype=torch.float32, device=products.device)
    shifts = (shift, 0.0) if isinstance(shift, Tensor) else (None, float(shift))
    with torch.cuda.device_of(products):
        negatives_kernel[grid](
            *(products, *by_class, places, function.coefficients, shifts[0], less, partial),
            *(num_classes, num_samples, products.stride(0), begin, shifts[1], math.inf if limit is None else float(limit)),
            *(function.kind, function.straight, sweep),
        )
    return partial


def sgd_update(
    centres: Tensor,
    momentum: Tensor,
    momentum_scale: Tensor | None,
    gradient: Tensor,
    target: tuple[Tensor, Tensor, Tensor],
    inverse_norms: Tensor,
    select: int | Tensor,
    lr: float,
    momentum_factor: float,
    weight_decay: float,
    seed: int,
    apply: Tensor,
    nesterov: bool = False,
) -> None:
    """Take one step of SGD with the selected centres, from both parts of the gradient of their unit vectors.

    Args:
        gradient, target: see PlainKernels.update_rows.
        centres: (n, D) fp32 or bf16.
        momentum: (n, D) fp32, bf16, or int8 in units of momentum_scale (n,) fp32, which is None otherwise.
        inverse_norms: (n,) fp32, 1 / max(|w|, 1e-12) of the centres as stored; read and rewritten.
        select: the first of c consecutive rows, or c distinct rows (int64).
        seed: of the stochastic rounding; only its low 63 bits are used.
        apply: device flag, one number: 0 skips the update without a host sync.
    """
    states = [centres, momentum] if momentum_scale is None else [centres, momentum, momentum_scale]
    block, warps = _check(states, gradient, target, inverse_norms, select)
    if not len(gradient):
        return
    index, start = (select, 0) if isinstance(select, Tensor) else (None, select)
    with torch.cuda.device_of(centres):
        sgd_kernel[(len(gradient),)](
            *(centres, momentum, momentum_scale, gradient, *target, len(target[0]), inverse_norms, index, apply),
            *(start, seed & (2**63 - 1)),
            *(float(lr), float(momentum_factor), float(weight_decay), centres.shape[1], block, nesterov),
            num_warps=warps,
        )


def adamw_update(
    centres: Tensor,
    momentum: Tensor,
    momentum_scale: Tensor | None,
    variance: Tensor,
    updates: Tensor,
    gradient: Tensor,
    target: tuple[Tensor, Tensor, Tensor],
    inverse_norms: Tensor,
    select: int | Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    seed: int,
    apply: Tensor,
) -> None:
    """Take one step of AdamW with the selected centres; see sgd_update.

    Args:
        variance: (n, D) fp32 or bf16.
        updates: (n,) int32, the number of updates of each row so far; k is one more. Incremented here.
    """
    states = [centres, momentum, variance, updates] + ([] if momentum_scale is None else [momentum_scale])
    block, warps = _check(states, gradient, target, inverse_norms, select)
    if not len(gradient):
        return
    index, start = (select, 0) if isinstance(select, Tensor) else (None, select)
    # in double precision: 1 - 0.999 and log(0.999) in fp32 would be wrong in the fifth digit
    logs = [math.log(beta) if beta > 0.0 else -math.inf for beta in (beta1, beta2)]
    with torch.cuda.device_of(centres):
        adamw_kernel[(len(gradient),)](
            *(
                centres,
                momentum,
                momentum_scale,
                variance,
                updates,
                gradient,
                *target,
                len(target[0]),
                inverse_norms,
                index,
                apply,
            ),
            *(start, seed & (2**63 - 1), float(lr), 1.0 - beta1, float(beta2), 1.0 - beta2, *logs, float(eps)),
            *(1.0 - lr * weight_decay, centres.shape[1], block),
            num_warps=warps,
        )


def _check(
    states: list[Tensor],
    gradient: Tensor,
    target: tuple[Tensor, Tensor, Tensor],
    inverse_norms: Tensor,
    select: int | Tensor,
) -> tuple[int, int]:
    """Return the columns (a power of two) and warps of a program, after checking what the kernels assume."""
    num_rows, dim = states[0].shape
    assert dim <= _LARGEST_DIM, f"rows of at most {_LARGEST_DIM} numbers, got {dim}"
    assert all(tensor.is_contiguous() and len(tensor) == num_rows for tensor in [*states, inverse_norms])
    assert gradient.is_contiguous() and gradient.shape[1] == dim
    class_index, sample_index, values = target
    assert class_index.dtype == sample_index.dtype == torch.int64 and class_index.shape == sample_index.shape
    assert values.dtype == torch.float32 and values.is_contiguous() and values.shape[1] == dim
    if isinstance(select, Tensor):
        assert select.dtype == torch.int64 and select.shape == gradient.shape[:1] and select.is_contiguous()
    else:
        assert 0 <= select <= num_rows - len(gradient)
    block = max(16, triton.next_power_of_2(dim))
    return block, min(max(block // 256, 1), 8)
