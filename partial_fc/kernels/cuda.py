"""Launches the Triton kernels of triton.py for the head."""

import math

import torch
import triton
from torch import Tensor

from ..centres.row_optimizer import RowOptimizer, RowSGD
from ..centres.store import CentreStore
from ..workspace import Workspace
from .fused import exponentials_of_product
from .plain import LONGEST_ROW, CentreGradient, PlainKernels, Tile
from .triton import CLASSES, SAMPLES, SUMS, TILES, exp_mask_sum_kernel, negatives_kernel, update_kernel


class TritonKernels(PlainKernels):
    """See PlainKernels for the arguments."""

    name = "triton"
    words = "Triton kernels"
    reads_flag = True

    def exponentials(self, tile: Tile, shift: float, z_sum: Tensor) -> None:
        products, inverse_norms, places, begin, limit = tile[:5]
        num_classes, num_samples = products.shape
        _check_tile(tile)
        assert z_sum.dtype == torch.float32
        if tile.factors is not None:
            exponentials_of_product(self.fused, tile, shift, z_sum)
            return
        if not products.numel():
            return
        grid = _grid(products)
        partial = torch.empty(grid[0], num_samples, dtype=torch.float32, device=products.device)
        with torch.cuda.device_of(products):
            exp_mask_sum_kernel[grid](
                *(products, inverse_norms, places, partial, num_classes, num_samples, products.stride(0), begin),
                *(float(shift), math.inf if limit is None else float(limit)),
            )
        z_sum += partial.sum(dim=0)

    def weights(self, tile: Tile, link: str, shift: float | Tensor, less: Tensor | None, sums: Tensor) -> None:
        sums += _sweep(link, tile, shift, less).sum(dim=0)

    def maxima(self, tile: Tile, maximum: Tensor) -> None:
        largest = _sweep("largest", tile.with_log_weights(), 0.0, None).amax(dim=(0, 1))
        torch.maximum(maximum, largest, out=maximum)

    def update_rows(
        self, optimizer: RowOptimizer, store: CentreStore, gradient: CentreGradient, lr: float, seed: int, apply: Tensor | None
    ) -> None:
        select, rows, class_index, sample_index, values = gradient
        tensors, inverse_norms = store.tensors, store.inverse_norms
        block, warps = _check_update(store, gradient)
        if not len(rows):
            return
        index, start = (select, 0) if isinstance(select, Tensor) else (None, select.start)
        flag = torch.ones(1, device=rows.device) if apply is None else apply
        centres, nesterov = tensors["centres"], isinstance(optimizer, RowSGD) and optimizer.nesterov
        factors: tuple[float, ...]
        if isinstance(optimizer, RowSGD):
            factors = (optimizer.momentum, optimizer.weight_decay, *[0.0] * 5)
        else:
            beta1, beta2, eps, weight_decay = optimizer
            # in double precision: 1 - 0.999 and log(0.999) in fp32 would be wrong in the fifth digit
            logs = [math.log(beta) if beta > 0.0 else -math.inf for beta in (beta1, beta2)]
            factors = (1.0 - beta1, 1.0 - lr * weight_decay, beta2, 1.0 - beta2, *logs, eps)
        stored = ("centres", "momentum", "centres_scale", "momentum_scale", "variance", "updates")
        with torch.cuda.device_of(centres):
            update_kernel[(len(rows),)](
                *map(tensors.get, stored),
                *(rows, class_index, sample_index, values, len(class_index), inverse_norms, index, flag),
                *(start, seed & (2**63 - 1), float(lr), *map(float, factors), centres.shape[1], block, nesterov),
                num_warps=warps,
            )


def try_kernel(device: torch.device) -> None:
    """Run a kernel on four numbers; raise what keeps Triton from it, or ArithmeticError if a sum is wrong."""
    z_sum = torch.zeros(2, device=device)
    tile = Tile(torch.zeros(2, 2, device=device), None, torch.tensor([0, -1], device=device), 0)
    TritonKernels(Workspace(device, 0)).exponentials(tile, 0.0, z_sum)
    if z_sum.tolist() != [1.0, 2.0]:
        raise ArithmeticError(f"the sums of a kernel should be 1 and 2, they are {z_sum.tolist()}")


def _sweep(sweep: str, tile: Tile, shift: float | Tensor, less: Tensor | None) -> Tensor:
    """Return the sums over groups of classes (groups, 3, B), or their largest logits (groups, 1, B).

    Args:
        sweep: a link, whose weights take the place of products, or "largest", as PlainKernels.maxima wants them; then
            row_weights are logarithms.
    """
    products, inverse_norms, places, begin, limit, function, row_weights, _ = tile
    assert function is not None
    num_classes, num_samples = products.shape
    _check_tile(tile)
    per_sample = [tensor for tensor in (shift, less) if isinstance(tensor, Tensor)]
    assert all(len(tensor) == num_samples for tensor in per_sample)
    assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in (function.coefficients, *per_sample))
    rows = 1 if sweep == "largest" else SUMS.value
    grid = _grid(products)
    partial = torch.empty(grid[0], rows, num_samples, dtype=torch.float32, device=products.device)
    shifts, constant = (shift, 0.0) if isinstance(shift, Tensor) else (None, float(shift))
    with torch.cuda.device_of(products):
        negatives_kernel[grid](
            *(products, inverse_norms, row_weights, places, function.coefficients, shifts, less, partial),
            *(num_classes, num_samples, products.stride(0), begin, constant, math.inf if limit is None else float(limit)),
            *(function.kind, function.straight, sweep),
        )
    return partial


def _grid(products: Tensor) -> tuple[int, int]:
    """Return the programs over classes and samples.

    Each writes partial sums, which are then added in a fixed order; atomics would add in a varying order.
    """
    num_classes, num_samples = products.shape
    return triton.cdiv(num_classes, CLASSES.value * TILES.value), triton.cdiv(num_samples, SAMPLES.value)


def _check_tile(tile: Tile) -> None:
    """Assert what the kernels assume."""
    num_classes, num_samples = tile.products.shape
    assert tile.products.stride(1) == 1 or num_samples == 1, "each row of products must be contiguous"
    assert tile.places.dtype == torch.int64 and len(tile.places) == num_samples
    for by_class in (tile.inverse_norms, tile.row_weights):
        if by_class is not None:
            assert by_class.is_contiguous() and by_class.dtype == torch.float32 and len(by_class) == num_classes


def _check_update(store: CentreStore, gradient: CentreGradient) -> tuple[int, int]:
    """Return the columns (a power of two) and warps of a program, after checking what the kernels assume."""
    select, rows, class_index, sample_index, values = gradient
    num_rows, dim = store.tensors["centres"].shape
    assert dim <= LONGEST_ROW
    assert all(tensor.is_contiguous() and len(tensor) == num_rows for tensor in (*store.tensors.values(), store.inverse_norms))
    assert rows.is_contiguous() and rows.shape[1] == dim
    assert class_index.dtype == sample_index.dtype == torch.int64 and class_index.shape == sample_index.shape
    assert values.dtype == torch.float32 and values.is_contiguous() and values.shape[1] == dim
    if isinstance(select, Tensor):
        assert select.dtype == torch.int64 and select.shape == rows.shape[:1] and select.is_contiguous()
    else:
        assert 0 <= select.start <= num_rows - len(rows)
    block = max(16, triton.next_power_of_2(dim))
    return block, min(max(block // 512, 1), 8)  # two warps at D = 512 issue a third more instructions for a row than one
