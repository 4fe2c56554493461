"""The head of a run, from the sections of its configuration."""

from typing import Any

import torch

from utils.distributed import World
from utils.precision import all_are_fast_in_bf16

from .centres.row_optimizer import RowAdamW, RowOptimizer, RowSGD
from .config import HeadConfig
from .head import PartialFC
from .kernels import choose_kernels
from .margin_like import MarginLike
from .memory import HeadMemory, check_fits, loss_memory

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def head_config(head: Any, loss: Any, optimizer: Any, autocast: torch.dtype | None, world: World) -> HeadConfig:
    """Return what the sections `head`, `loss` and `optimizer` of the configuration say; see configs/base.yaml.

    A collective call.

    Args:
        autocast: what the backbone computes in, which head.matmul_dtype=auto follows.
    """
    return HeadConfig(
        sample_rate=head.sample_rate,
        optimizer=build_row_optimizer(head, optimizer),
        storage=head.storage,
        inactive_rows=head.inactive_rows,
        sampling=head.sampling,
        num_neighbours=head.neighbours,
        neighbours_every=head.neighbours_every,
        neighbours_search=head.neighbours_search,
        neighbours_probes=head.neighbours_probes,
        logit_correction=head.logit_correction,
        focal=loss.focal,
        label_smoothing=loss.label_smoothing,
        filter_above=head.interclass_filtering_threshold or None,
        matmul_dtype=matmul_dtype(head.matmul_dtype, autocast, world.device, all_are_fast_in_bf16(world)),
        wire_dtype=_DTYPES[head.wire_dtype],
        chunk=head.chunk,
        cache_mb=head.cache_mb,
        kernels=head.kernels,
        sub_centers=head.sub_centers,
    )


def build_head(
    margin: MarginLike, num_classes: int, embedding_size: int, world: World, seed: int, config: HeadConfig
) -> PartialFC:
    """Return the head of this rank."""
    return PartialFC(margin, num_classes, embedding_size, world.rank, world.world_size, seed, config, world.device)


def check_head_fits(
    margin: MarginLike,
    num_classes: int,
    embedding_size: int,
    world: World,
    config: HeadConfig,
    rows: int,
    accumulation: int,
    others: int,
    free: int,
) -> int:
    """Return the bytes that one process's share of the head takes, after checking that they are there.

    Args:
        margin: of this head.
        rows: of the global micro-batch.
        others: bytes that the backbone and other heads need.
        free: bytes that the process with the least free memory may still take (utils.memory.available_bytes).

    Raises:
        ValueError: it does not fit, with what would.
    """
    kernels = choose_kernels(config.kernels, world.device, embedding_size)
    of_loss = loss_memory(margin, num_classes, embedding_size, config)
    memory = HeadMemory(embedding_size, rows, config, accumulation, kernels, world.world_size, world.device.type, of_loss)
    check_fits(memory, num_classes, world.world_size, free, others)
    return memory.bytes_for(-(-num_classes // world.world_size))


def build_row_optimizer(head: Any, optimizer: Any) -> RowOptimizer:
    """Return the optimizer of the class centres."""
    weight_decay = optimizer.weight_decay if head.weight_decay < 0 else head.weight_decay
    if (optimizer.name if head.optimizer == "same" else head.optimizer) == "adamw":
        return RowAdamW(optimizer.momentum, optimizer.beta2, optimizer.eps, weight_decay)
    return RowSGD(optimizer.momentum, weight_decay, optimizer.nesterov)


def matmul_dtype(name: str, autocast: torch.dtype | None, device: torch.device, fast_in_bf16: bool) -> torch.dtype:
    """Return the dtype of the head's matrix products, equal on all ranks, which exchange numbers of it.

    auto takes bf16 where the devices of all ranks are fast at it, for a backbone in bf16, and on CUDA for one in fp16 as well,
    since fp16 does not hold the exponentials.
    """
    if name != "auto":
        return _DTYPES[name]
    half = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.bfloat16,)
    return torch.bfloat16 if autocast in half and fast_in_bf16 else torch.float32
