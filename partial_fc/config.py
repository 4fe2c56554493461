"""What a head is, beside its margin, its classes and its place among the ranks: one description for the head and its memory."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from utils.distributed import World
from utils.precision import all_are_fast_in_bf16

from .centres.row_optimizer import RowAdamW, RowOptimizer, RowSGD

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EXACT_UP_TO = 1 << 20  # classes whose neighbours are searched exactly; docs/head.md compares the cost with that of training


@dataclass(frozen=True)
class HeadConfig:
    """How a head stores, samples, computes and updates its class centres.

    Names and defaults are those of the keys of `head` and `loss` in configs/base.yaml, which says what each is. Their ranges
    are in configs/rules.py.
    """

    sample_rate: float = 1.0
    optimizer: RowOptimizer = field(default_factory=RowSGD)  # of the centres
    storage: str = "exact"
    placement: str = "device"
    inactive_rows: str = "keep"
    sampling: str = "uniform"
    neighbours: int = 10
    neighbours_every: int = 1000
    neighbours_search: str = "auto"
    neighbours_probes: int = 32
    logit_correction: str = "none"
    focal: float = 0.0
    label_smoothing: float = 0.0
    entropy_weights: bool = False
    interclass_filtering_threshold: float = 0.0
    matmul_dtype: torch.dtype = torch.float32  # or bfloat16, of the matrix products; sums are float32
    wire_dtype: torch.dtype = torch.float32  # or bfloat16, of the embeddings and their gradients on their way between ranks
    chunk: int = 0
    cache_mb: int = -1
    kernels: str = "auto"
    sub_centers: int = 1
    # the first optimizer step, from 0 on, and the sample rate of each stage, ascending; () = sample_rate in all steps
    rates: tuple[tuple[int, float], ...] = ()
    frozen: bool = False  # the centres never change, and have no moments

    def __post_init__(self) -> None:
        assert 1 <= self.sub_centers <= 255  # which of them a sample sees takes one byte
        assert self.sub_centers == 1 or self.sampling == "uniform"  # the graph of neighbours knows one centre for each class

    def rate_at(self, step: int) -> float:
        """Return the sample rate of an optimizer step, counted from 0."""
        return next((rate for first, rate in reversed(self.rates) if first <= step), self.sample_rate)

    @property
    def all_rates(self) -> list[float]:
        """The sample rates of all stages."""
        return [rate for _, rate in self.rates] or [self.sample_rate]

    @property
    def decays(self) -> bool:
        """Whether rows lag behind and are caught up; at rate 1 every row is updated in every step, so none does."""
        return self.inactive_rows == "decay" and min(self.all_rates) < 1 and not self.frozen

    @property
    def has_second_moment(self) -> bool:
        """Whether the optimizer keeps a second moment of each centre."""
        return isinstance(self.optimizer, RowAdamW) and not self.frozen

    @property
    def counts_updates(self) -> bool:
        """Whether each centre keeps the number of its updates."""
        return self.has_second_moment or self.decays

    def fetches_at(self, rate: float) -> bool:
        """Return whether the active centres of a step travel to the device before it: where they lie elsewhere, none lags."""
        return self.placement == "host" and rate < 1 and not self.decays

    def searches_lists(self, num_classes: int) -> bool:
        """Return whether the neighbours of so many classes, over all ranks, are searched by inverted lists."""
        return self.neighbours_search == "inverted_lists" or (self.neighbours_search == "auto" and num_classes > EXACT_UP_TO)

    def as_frozen(self) -> "HeadConfig":
        """Return what `PartialFC.frozen` gives a head: nothing is kept for an update, and the active classes come from outside.

        int8 needs a momentum (centres/store.py), so formats with fewer bits than fp32 become bf16.
        """
        storage = "exact" if self.storage == "exact" else "lean"
        return replace(self, frozen=True, storage=storage, cache_mb=0, sampling="uniform")


def head_config(head: Any, loss: Any, optimizer: Any, autocast: torch.dtype | None, world: World) -> HeadConfig:
    """Return what the sections `head`, `loss` and `optimizer` of the configuration say; see configs/base.yaml.

    A collective call.

    Args:
        autocast: what the backbone computes in, which head.matmul_dtype=auto follows, but for loss.entropy_weights.
    """
    autocast = None if loss.entropy_weights else autocast  # see check_loss
    bent = {key: loss[key] for key in ("focal", "label_smoothing", "entropy_weights")}
    computed = {
        "optimizer": _row_optimizer(head, optimizer),
        "matmul_dtype": matmul_dtype(head.matmul_dtype, autocast, world.device, all_are_fast_in_bf16(world)),
        "wire_dtype": _DTYPES[head.wire_dtype],
    }
    names = {setting.name for setting in fields(HeadConfig)}
    return HeadConfig(**{name: head[name] for name in names & set(head)} | bent | computed)


def _row_optimizer(head: Any, optimizer: Any) -> RowOptimizer:
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
