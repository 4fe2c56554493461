"""BatchNorm over the images of all processes (SyncBatchNorm), on the CPU and on CUDA; torch's own refuses the CPU.

A process normalises with mean and variance of the whole global micro-batch. It sends its mean and the sum of squared distances
from it in the forward pass, and two sums in the backward pass: x' = (x - mean) / sqrt(var + eps), y = w x' + b, so

    dL/dx = w / sqrt(var + eps) (dL/dy - mean(dL/dy) - x' mean(dL/dy x')), means over the images of all processes and pixels.

Source: Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, Section 3; the variances are joined as in Chan et al., 1979.
Shapes: b = images of this process, equal on all; C = channels; n = b times the pixels of an image.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from . import World, gather_blocks


def synchronise_norms(network: nn.Module, world: World) -> None:
    """Replace each BatchNorm1d and BatchNorm2d in a network by a SyncBatchNorm of the same name, parameters and buffers.

    With one process nothing is replaced.
    """
    if world.world_size == 1:
        return
    for path, part in list(network.named_modules()):
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
            parent, _, name = path.rpartition(".")
            setattr(network.get_submodule(parent), name, SyncBatchNorm(part))


class SyncBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm with the parameters and buffers of another one, whose statistics in training are those of all processes."""

    recomputing = False  # whether the backward pass computes a block again, so that the statistics have moved (checkpointing)

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked

    def _check_input_dim(self, x: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, C) from (b, C), or (b, C, h, w) from (b, C, h, w)."""
        if not self.training:
            return super().forward(x)
        assert self.num_batches_tracked is not None and self.momentum is not None
        assert self.running_mean is not None and self.running_var is not None
        out, mean, variance, count = _Normalise.apply(x, self.weight, self.bias, self.eps)
        if not self.recomputing:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        normalised: Tensor = out
        return normalised


class _Normalise(torch.autograd.Function):
    """Return (w x' + b, mean (C,), biased variance (C,), number of values per channel), over all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, int]:
        axes, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
        values = x.to(weight.dtype)  # of bf16 the sums are fp32
        own_mean = values.mean(axes)
        own_squares = (values - own_mean.view(shape)).square_().sum(axes)
        means, squares = _of_all_ranks(torch.stack([own_mean, own_squares])).unbind(1)  # (ranks, C) each
        count, ranks = x.numel() // x.shape[1], len(means)
        mean = means.mean(0)
        variance = (squares.sum(0) + count * (means - mean).square().sum(0)) / (count * ranks)
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        factor = weight * inverse
        out = (values * factor.view(shape) + (bias - mean * factor).view(shape)).to(x.dtype)
        ctx.mark_non_differentiable(mean, variance)
        return out, mean, variance, count * ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, inverse = ctx.saved_tensors
        axes, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
        given = grad.to(weight.dtype)
        normal = (x.to(weight.dtype) - mean.view(shape)) * inverse.view(shape)
        of_bias, of_weight = given.sum(axes), (given * normal).sum(axes)
        sums = _of_all_ranks(torch.stack([of_bias, of_weight]))
        count = x.numel() // x.shape[1] * len(sums)
        by_bias, by_weight = (sums.sum(0) / count).unbind()
        grad_x = (given - by_bias.view(shape) - normal * by_weight.view(shape)) * (weight * inverse).view(shape)
        return grad_x.to(x.dtype), of_weight, of_bias, None


def _of_all_ranks(numbers: Tensor) -> Tensor:
    """Return (ranks, ...) from each rank's numbers (...), the same on all, so that every rank adds them in the same order."""
    gathered = numbers.new_empty(dist.get_world_size() * len(numbers), *numbers.shape[1:])
    gather_blocks(gathered, numbers)
    return gathered.view(-1, *numbers.shape)
