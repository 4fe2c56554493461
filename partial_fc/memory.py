"""How many bytes a head takes, how many identities fit, and what to say when they do not.

The model is checked against what heads really hold in tests/test_partial_fc_memory.py.
Shapes: B = rows of the global micro-batch, D = embedding size, n = classes of one shard, c = classes of one chunk.
"""

import math
from typing import NamedTuple

import torch

from .head import MEBI
from .row_optimizer import RowAdamW, RowOptimizer
from .softmax import auto_chunk, padded_rows
from .state import FORMATS

_ROWS_KEPT = 8  # fp32 matrices of (B, D) that live at once in one forward and the update


class HeadShape(NamedTuple):
    """What the size of a head depends on, beside the number of classes."""

    dim: int
    rows: int  # B
    state: str = "exact"
    optimizer: RowOptimizer | None = None  # None = RowSGD
    sample_rate: float = 1.0
    matmul_dtype: torch.dtype = torch.float32
    accumulation: int = 1
    cache_mb: int = 128
    chunk: int = 0
    num_neighbours: int = 0  # 0 = head.sampling=uniform
    inactive_rows: str = "keep"
    kernels: str = "c"  # see kernels.choose_kernels

    @property
    def _decays(self) -> bool:
        return self.inactive_rows == "decay" and self.sample_rate < 1

    @property
    def bytes_per_class(self) -> int:
        """Bytes that every class of a shard takes, whether it is sampled or not."""
        centre, momentum, variance = (dtype.itemsize for dtype in FORMATS[self.state])
        adamw = isinstance(self.optimizer, RowAdamW)
        size = self.dim * (centre + momentum + (variance if adamw else 0)) + 4  # 4: 1 / norm
        size += 4 if self.state == "tiny" else 0
        size += 4 if adamw or self._decays else 0
        return size + 4 * self.num_neighbours

    def shared_bytes(self, num_local: int) -> int:
        """Bytes of buffers and cache of a shard of num_local classes: bounded, whatever their number."""
        device = "cuda" if self.kernels == "triton" else "cpu"
        size = self.matmul_dtype.itemsize
        c = min(self.chunk or auto_chunk(device, self.matmul_dtype), num_local)
        padded, fp32 = padded_rows(c, self.matmul_dtype), c * self.dim * 4
        total = padded * (2 * self.dim + self.rows) * size  # unit centres, gradient, logits
        total += 0 if size == 4 else self.rows * self.dim * size + (fp32 if self.kernels != "c" else 0)
        total += padded * self.dim * 4 if self.accumulation > 1 else 0
        if self.kernels == "plain" and size < 4:
            total += c * self.rows * 4  # exponentials in fp32
        if self.kernels == "plain" or self._decays:  # rows are changed by torch, in fp32 buffers
            total += fp32
            if self.state != "exact":
                total += (3 if isinstance(self.optimizer, RowAdamW) else 2) * fp32
                total += (2 if self.state == "tiny" else 1) * (fp32 + 2 * 65536 * 4)  # tables of noise
                total += c * (self.dim + 4) if self.state == "tiny" else 0
        active = max(min(num_local, round(self.sample_rate * num_local)), min(num_local, self.rows))
        total += min(self.cache_mb * MEBI, self.accumulation * padded_rows(active, self.matmul_dtype) * self.rows * size)
        return total + self.accumulation * _ROWS_KEPT * self.rows * self.dim * 4

    def bytes_for(self, num_local: int) -> int:
        """Bytes of a shard of num_local classes."""
        return num_local * self.bytes_per_class + self.shared_bytes(num_local)

    def classes_in(self, budget: int) -> int:
        """Return the most classes of one shard that fit into budget bytes, 0 if none do."""
        low, high = 0, max(0, budget // self.bytes_per_class) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes_for(middle) <= budget else (low, middle)
        return low


def check_fits(shape: HeadShape, num_classes: int, world_size: int, budget: int, others: int) -> None:
    """Raise ValueError if a head of num_classes over world_size processes takes more than what others leave of the budget.

    Args:
        budget: bytes of memory of one process that are free.
        others: bytes of it that the backbone needs.
    """
    local = -(-num_classes // world_size)
    if shape.bytes_for(local) + others <= budget:
        return
    room = budget - others
    fixes = []
    for state in FORMATS:
        other = shape._replace(state=state)
        if other.bytes_per_class < shape.bytes_per_class and other.bytes_for(local) <= room:
            fixes.append(f"head.state={state} ({_gib(other.bytes_for(local))})")
    most = shape.classes_in(room)
    if most:
        fixes.append(f"{math.ceil(num_classes / most)} processes instead of {world_size}")
    if not fixes:
        fixes.append("a smaller train.batch_size or backbone: they alone leave no room for class centres")
    raise ValueError(
        f"head: {num_classes} classes over {world_size} process(es) in head.state={shape.state} need "
        f"{_gib(shape.bytes_for(local))} each beside {_gib(others)} of the backbone, but {_gib(budget)} are free. "
        f"What would fit: {', or '.join(fixes)}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
