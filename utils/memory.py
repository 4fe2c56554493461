"""Measures the available memory, and the memory and the operations that a backbone needs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .distributed import World
from .machine import left_to_container

# what libraries take: oneDNN and MKL; CUDA's context, cuDNN's workspaces, NCCL's buffers, fragmentation. The latter from data
# sheets and experience of others: not measured here
LIBRARY_BYTES = {"cpu": 64 << 20, "cuda": 3 << 30}


class Undrawn(TorchFunctionMode):
    """Inside it nothing is drawn, for networks on the device meta, where torch would import its compiler to draw."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws = func.__name__.endswith(("normal_", "uniform_"))
        return [*args, *(kwargs or {}).values()][0] if draws else func(*args, **(kwargs or {}))


class BackboneMemory(NamedTuple):
    """Bytes on one device."""

    parameters: int  # weights, gradients and the optimizer's moments
    per_image: int  # activations kept for the backward pass, and temporary gradients

    def total(self, images: int) -> int:
        """Return the bytes for a batch of `images` images."""
        return self.parameters + images * self.per_image


def backbone_memory(backbone: nn.Module, autocast: torch.dtype | None, moments: int, image_size: int) -> BackboneMemory:
    """Return the memory that training this backbone takes, from what autograd keeps in forward passes of one and two images.

    Args:
        moments: numbers kept per parameter beside weight and gradient: by the optimizer, 1 for SGD with momentum and 2 for
            AdamW, and one more for a moving average.
        image_size: height and width of the images in pixels.
    """
    modes = {module: module.training for module in backbone.modules()}
    backbone.eval()  # a probe must not move BatchNorm's statistics
    one, two = (_kept_bytes(backbone, count, image_size, autocast) for count in (1, 2))
    for module, training in modes.items():
        module.training = training
    per_image = two - one
    copies = 2 + moments  # weight, gradient, moments; of what is frozen: weight, and perhaps its moving average
    sizes = {True: 0, False: 0}  # of what trains, and of what is frozen
    for parameter in backbone.parameters():
        sizes[parameter.requires_grad] += parameter.numel() * parameter.element_size()
    # the part of `one` beyond per_image are casts of the weights; a tenth more is for gradients in the backward pass
    return BackboneMemory(copies * sizes[True] + 2 * sizes[False] + max(0, one - per_image), round(1.1 * per_image))


def forward_operations(network: nn.Module, image_size: int) -> int:
    """Return the operations of a forward pass of one image, two for each multiply-add; the network ends in evaluation mode."""
    with torch.no_grad():
        return _operations(network.eval(), image_size, 1, lambda embeddings: None)


def training_operations(network: nn.Module, image_size: int) -> tuple[float, float]:
    """Return the operations of a forward and of a backward pass, per image; the network ends in training mode."""
    images = 2  # BatchNorm over the embeddings cannot train on one
    forward = _operations(network.train(), image_size, images, lambda embeddings: None) / images
    both = _operations(network, image_size, images, lambda embeddings: embeddings.sum().backward()) / images
    return forward, both - forward


def _operations(network: nn.Module, image_size: int, images: int, after: Callable[[Tensor], object]) -> int:
    """Count the operations of a forward pass of some black images, and of what comes after it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel  # no training needs these
    from torch.utils.flop_counter import FlopCounterMode

    batch = torch.zeros(images, 3, image_size, image_size, device=next(network.parameters()).device)
    # attention written out as products, because the counter of torch 2.13 misses some of its kernels
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        after(network(batch))
    return int(counter.get_total_flops())


def bytes_beside_heads(backbone: BackboneMemory, images: int, device: str) -> int:
    """Return the bytes that one process needs beside its heads, for micro-batches of `images` images on cpu or cuda."""
    return backbone.total(images) + LIBRARY_BYTES[device]


def _kept_bytes(backbone: nn.Module, count: int, image_size: int, autocast: torch.dtype | None) -> int:
    """Return the bytes kept for the backward pass of `count` images.

    Of blocks that are checkpointed these are their inputs, and what the largest of them keeps when it is computed again.
    """
    first = next(backbone.parameters())
    images = torch.zeros(count, 3, image_size, image_size, device=first.device).to(memory_format=torch.channels_last)
    own = {p.untyped_storage().data_ptr() for p in backbone.parameters()}
    inside: dict[Any, dict[int, int]] = {m: {} for m in backbone.modules() if getattr(m, "checkpointing", False)}
    kept: dict[int, int] = {}
    current = kept

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            current[storage.data_ptr()] = storage.nbytes()
        return tensor

    def enter(block: nn.Module, given: tuple[Tensor]) -> None:
        nonlocal current
        note(given[0])
        current = inside[block]

    def leave(*_: Any) -> None:
        nonlocal current
        current = kept

    hooks = [hook for m in inside for hook in (m.register_forward_pre_hook(enter), m.register_forward_hook(leave))]
    for block in inside:
        block.checkpointing = False
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast(first.device.type, dtype=autocast, enabled=autocast is not None),
    ):
        output = backbone(images)  # kept alive until everything is counted: reused memory would count two tensors as one
    del output
    for hook in hooks:
        hook.remove()
    for block in inside:
        block.checkpointing = True
    again = (sum(size for place, size in of_block.items() if place not in kept) for of_block in inside.values())
    return sum(kept.values()) + max(again, default=0)


def available_bytes(world: World) -> int:
    """Return the memory that this process may still use: that of its GPU, or its share of the machine's free memory."""
    return free_bytes(world.device, world.local_world_size)


def free_bytes(device: torch.device, num_processes: int) -> int:
    """Return the free memory of a GPU, or the share of one of num_processes in the free memory of this machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return 1 << 62  # unknown, so there is no limit
    free = next(int(line.split()[1]) for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    return min(free * 1024, left_to_container()) // num_processes
