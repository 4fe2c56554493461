"""The memory model of the head: its bytes, how many identities fit, and the error if they do not.

tests/test_partial_fc_memory.py checks the model against the memory of real heads.
Shapes: B = samples of the global micro-batch, D = embedding size, n = classes of one shard, c = classes of one chunk.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from utils.distributed import World
from utils.memory import available_bytes

from .centres.placement import is_elsewhere
from .centres.store import FORMATS
from .centres.sub_centers import buffer_bytes
from .config import HeadConfig
from .kernels import choose_kernels
from .kernels.plain import auto_chunk, converted_bytes, padded_rows, product_dtype
from .sampling.planning import num_active, search_bytes
from .softmax.passes import constant_shifts

if TYPE_CHECKING:  # parts do not import one another
    from losses.margin import Margin

_COPIES = 6  # fp32 matrices of (c, B) that live at once where plain torch computes logits that are not linear
_ROWS_KEPT = 8  # fp32 matrices of (B, D) that live at once in one forward and the update


class HeadMemory(NamedTuple):
    """Everything that determines the size of a head, except the number of classes."""

    dim: int
    rows: int  # B
    config: HeadConfig = HeadConfig()
    accumulation: int = 1
    kernels: str = "c"  # as kernels.choose_kernels returns it
    world_size: int = 1  # ranks with a shard each
    device: str = "cpu"  # or cuda: sizes of chunks and of a search differ
    class_bytes: int = 0  # of the numbers that the loss keeps of each class, and of their moments
    # whether the kernel `weights` computes its negatives, or label smoothing its slopes; with plain torch they make copies
    # of a chunk's logits
    general: bool = False

    @property
    def bytes_per_class(self) -> int:
        """Bytes that every class of a shard takes on the device, whether it is sampled or not."""
        return self._bytes_by_place[0]

    @property
    def bytes_elsewhere(self) -> int:
        """Bytes that every class takes in host memory or on the disk, where its centre and moments do not lie on the device."""
        return self._bytes_by_place[1]

    @property
    def _bytes_by_place(self) -> tuple[int, int]:
        config = self.config
        formats = FORMATS[config.storage]
        kept = 1 if config.frozen else 2 + config.has_second_moment
        placed = self.dim * sum(dtype.itemsize for dtype in formats[:kept]) * config.sub_centers
        size = 4 + 4 * formats.count(torch.int8) + (4 if config.counts_updates else 0)  # 4: 1 / norm
        size = size * config.sub_centers + self.class_bytes
        size += 4 * config.neighbours if config.sampling == "neighbours" else 0
        return (size, placed) if is_elsewhere(config.placement, self.device) else (size + placed, 0)

    def traffic(self, num_local: int) -> tuple[int, int]:
        """Return the bytes that one step reads from where the centres lie, and those that it writes there.

        A centre is read for the products, and with its moments for the update, which writes all of them. Where exponentials are
        not kept, it is read once more, and what the kernel keeps of a file in memory does not travel: neither is counted.
        """
        rows = num_active(num_local, min(num_local, self.accumulation * self.rows), max(self.config.all_rates))
        centre = self.dim * FORMATS[self.config.storage][0].itemsize * self.config.sub_centers
        return rows * (centre + self.bytes_elsewhere), rows * self.bytes_elsewhere

    def shared_bytes(self, num_local: int) -> int:
        """Bytes of buffers and cache of a shard of num_local classes: bounded, but for 40 per class of inverted lists."""
        config, size = self.config, self.config.matmul_dtype.itemsize
        several, shard = config.sub_centers, num_local * config.sub_centers  # rows of the centres
        c = max(1, min(config.chunk or auto_chunk(self.device, config.matmul_dtype), shard) // several) * several
        padded, fp32 = padded_rows(c, config.matmul_dtype), c * self.dim * 4
        total = padded * (self.dim + self.rows) * size + self._copied_rows(c) * self.dim * size  # gradient, logits, centres
        if size < 4 and self.device == "cuda" and config.storage == "exact":
            total += padded * self.dim * (4 - size)  # this gradient is fp32, see TwoPass.gradients
        if product_dtype(torch.device(self.device), config.matmul_dtype) != config.matmul_dtype:
            total += converted_bytes(padded, self.dim, self.rows)
        elif size < 4:
            total += self.rows * self.dim * size
        total += padded * self.dim * 4 if self.accumulation > 1 else 0
        if self.kernels == "plain" and size < 4:
            total += c * self.rows * 4 if several == 1 else 0  # exponentials in fp32
            total += fp32 if self.accumulation == 1 else 0  # gradient in fp32; that of several micro-batches is, anyway
        if several > 1:
            total += buffer_bytes(c // several, self.rows, self.device == "cuda")
            total += 2 * several * self.rows * self.dim * 4  # centres of the samples' classes
        if self.kernels == "plain" or config.decays:  # rows are changed by torch, in fp32 buffers
            total += fp32
            if config.storage != "exact":
                total += (3 if config.has_second_moment else 2) * fp32
                mini = config.storage == "mini"  # its noise is computed, but for the variance
                tables = int(config.has_second_moment) if mini else 2 if config.storage == "tiny" else 1
                total += tables * (fp32 + 2 * 65536 * 4) + mini * fp32
                total += c * (self.dim + 4) if torch.int8 in FORMATS[config.storage] else 0
        if self.general and (self.kernels == "plain" or config.label_smoothing):
            total += _COPIES * c // several * self.rows * 4
        if config.label_smoothing:
            total += fp32 if size < 4 else 0  # centres, to add them up
        active = num_active(num_local, min(num_local, self.rows), max(config.all_rates)) * several
        if config.cache_mb > 0:  # -1 takes only a part of what the rest leaves free
            total += min(config.cache_mb << 20, self.accumulation * padded_rows(active, config.matmul_dtype) * self.rows * size)
        if self.device != "cpu" and (fetched := [rate for rate in config.all_rates if config.fetches_at(rate)]):
            rows = num_active(num_local, min(num_local, self.rows), max(fetched)) * several
            total += padded_rows(rows, config.matmul_dtype) * self.dim * size
        if config.sampling == "neighbours":
            total += search_bytes(config, num_local * self.world_size, num_local, self.dim, self.device)
        return total + self.accumulation * _ROWS_KEPT * self.rows * self.dim * 4

    def _copied_rows(self, c: int) -> int:
        """Return how many centres are copied at most for the products of a chunk of c; see CentreStore.operand."""
        config = self.config
        if is_elsewhere(config.placement, self.device) and self.device != "cpu":
            return padded_rows(c, config.matmul_dtype)
        if config.matmul_dtype == torch.bfloat16 or FORMATS[config.storage][0] != config.matmul_dtype:
            return padded_rows(c, config.matmul_dtype)  # those stored in bf16 for padding only, at the end of the shard
        if min(config.all_rates) == 1:
            return 0
        positives = self.accumulation * self.rows * config.sub_centers  # single rows
        return c if config.sampling == "neighbours" else min(c, positives)

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


def loss_memory(margin: "Margin", num_classes: int, dim: int, config: HeadConfig) -> tuple[int, bool]:
    """Return class_bytes and general of HeadMemory for a margin of num_classes with embeddings of dim numbers."""
    moments = 2 if config.has_second_moment else 1
    numbers = margin.class_numbers(dim).values()
    per_class = sum(4 * math.prod(number.shape) * (1 + moments * number.trained) for number in numbers)
    fast = margin.linear_negatives and margin.constant_scale and None not in constant_shifts(margin, num_classes)
    filtered = config.label_smoothing > 0 and config.interclass_filtering_threshold > 0
    return per_class, not fast or filtered or config.logit_correction != "none"


def check_head_fits(
    margin: "Margin",
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
    loss = loss_memory(margin, num_classes, embedding_size, config)
    memory = HeadMemory(embedding_size, rows, config, accumulation, kernels, world.world_size, world.device.type, *loss)
    check_fits(memory, num_classes, world.world_size, free, others)
    local = -(-num_classes // world.world_size)
    here, needed = available_bytes(world._replace(device=torch.device("cpu"))), local * memory.bytes_elsewhere
    if config.placement == "host" and needed > here:
        raise ValueError(
            f"head.placement=host: {num_classes} classes over {world.world_size} process(es) need {_gib(needed)} of host "
            f"memory each, {_gib(here)} are free; take a smaller head.storage, or more machines"
        )
    return memory.bytes_for(local)


def check_fits(head: HeadMemory, num_classes: int, world_size: int, budget: int, others: int) -> None:
    """Raise ValueError if a head of num_classes over world_size processes takes more than what others leave of the budget.

    Args:
        budget: free memory of one process, bytes.
        others: bytes of the budget that the backbone needs.
    """
    local = -(-num_classes // world_size)
    if head.bytes_for(local) + others <= budget:
        return
    room = budget - others
    fixes = []
    for storage in FORMATS:
        other = head._replace(config=replace(head.config, storage=storage))
        if other.bytes_per_class < head.bytes_per_class and other.bytes_for(local) <= room:
            fixes.append(f"head.storage={storage} ({_gib(other.bytes_for(local))})")
    place, also = ("disk", " checkpoint.background=false") if head.device == "cpu" else ("host", "")
    other = head._replace(config=replace(head.config, placement=place))
    if other.bytes_per_class < head.bytes_per_class and other.bytes_for(local) <= room:
        fixes.append(f"head.placement={place}{also} ({_gib(local * other.bytes_elsewhere)} there)")
    most = head.classes_in(room)
    if most:
        fixes.append(f"{math.ceil(num_classes / most)} processes instead of {world_size}")
    if not fixes:
        fixes.append("a smaller train.batch_size or backbone: they alone leave no room for class centres")
    raise ValueError(
        f"head: {num_classes} classes over {world_size} process(es) in head.storage={head.config.storage} need "
        f"{_gib(head.bytes_for(local))} each beside {_gib(others)} of the backbone, but {_gib(budget)} are free. "
        f"What would fit: {', or '.join(fixes)}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
