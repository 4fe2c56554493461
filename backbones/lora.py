"""LoRA: trains a low-rank change of the linear layers of a transformer's blocks, whose own weights stay as they are.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, https://arxiv.org/abs/2106.09685, Eq. 3
and Section 4.1: W x + (alpha / r) B A x, with a Gaussian A and B = 0, so that the first output is that of the network.
`utils.checkpoint.reading.merged` gives the plain weights W + (alpha / r) B A.
Shapes: r = rank, I and O = numbers into and out of a layer.
"""

import contextlib
import re
from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from utils.optim import layer_numbers

_LAYERS = ("qkv", "proj", "fc1", "fc2")  # of attention and MLP, in timm and here


class LoraLinear(nn.Module):
    """A linear layer with a change of low rank. Its weight and bias are those of the layer, under the same names."""

    lora_scale: Tensor  # alpha / r, (), a buffer, so that weights alone say what they are merged to

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        size = linear.weight.shape
        self.lora_a = nn.Parameter(linear.weight.new_empty(rank, size[1]))  # A (r, I)
        self.lora_b = nn.Parameter(linear.weight.new_zeros(size[0], rank))  # B (O, r)
        self.register_buffer("lora_scale", linear.weight.new_tensor(alpha / rank))
        nn.init.normal_(self.lora_a, std=size[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., O) from (..., I)."""
        change = F.linear(F.linear(x, self.lora_a) * self.lora_scale, self.lora_b)
        return F.linear(x, self.weight, self.bias) + change


def add_lora(network: nn.Module, rank: int, alpha: float) -> None:
    """Give the linear layers of all blocks a change of that rank, and freeze all else up to the last block.

    What follows the blocks trains as a whole: the last normalisation and the embedding layer.

    Raises:
        ValueError: the network has no such layers.
    """
    numbers, last = layer_numbers([name for name, _ in network.named_parameters()])
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and numbers[name] == last)
    found = [
        (path, module)
        for path, module in network.named_modules()
        if re.search(r"(^|\.)blocks\.\d+\.", path) and path.rpartition(".")[2] in _LAYERS and type(module) is nn.Linear
    ]
    if not found:
        raise ValueError(f"this backbone has no linear layers called {', '.join(_LAYERS)} in blocks.N; set it to 0")
    for path, module in found:
        network.set_submodule(path, LoraLinear(module, rank, alpha))


@contextlib.contextmanager
def all_called(network: nn.Module) -> Iterator[None]:
    """Raise ValueError if a layer with a change is not called by the forward passes inside, which may read its weight alone."""
    idle = {path: module for path, module in network.named_modules() if isinstance(module, LoraLinear)}
    hooks = [module.register_forward_hook(lambda *_, path=path: idle.pop(path, None) and None) for path, module in idle.items()]
    yield
    for hook in hooks:
        hook.remove()
    if idle:
        raise ValueError(f"this backbone reads the weight of {next(iter(idle))} without calling it; set it to 0")
