"""The head's collectives, in the group of all processes: DDP's are over when a backward pass returns, so none waits for them.

Labels have one of their own, over the CPU, because a thread shares those of the next step while the main thread communicates.
Flags of the host travel with them, such as whether a process was told to stop.

Shapes: b = samples of this rank, B = b * world_size samples of all ranks in rank order, D = embedding size, A = micro-batches.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from utils.distributed import gather_blocks, gloo_group, scatter_sum


class Collectives:
    """All-gather, all-reduce and reduce-scatter over the ranks of the head. With one rank none of them communicates."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        # alone, --check builds and fills a head; torch refuses more
        self.label_group = gloo_group("labels") if world_size > 1 and dist.is_initialized() else None

    def all_gather(self, rows: Tensor) -> Tensor:
        """Return (B, ...) from every rank's (b, ...), rank 0's samples first; b is the same on all ranks."""
        return self._gather(rows.contiguous()) if self.world_size > 1 else rows

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks, written into tensor."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks, written into tensor."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """Return this rank's (b, D) block of the sum over the ranks of (B, D)."""
        if self.world_size == 1:
            return rows
        block = rows.new_empty(rows.shape[0] // self.world_size, *rows.shape[1:])
        scatter_sum(block, rows)
        return block

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return rank source's tensor, written into tensor on the others."""
        if self.world_size > 1:
            dist.broadcast(tensor, src=source)
        return tensor

    def gather_labels(self, labels: Tensor, flags: Sequence[bool] = ()) -> tuple[Tensor, list[bool]]:
        """Return the labels (A, B) of all ranks from (A, b), and whether any rank has each flag. Another thread may call it."""
        bits = sum(flag << place for place, flag in enumerate(flags))
        sent = torch.cat([labels.t(), labels.new_full((1, len(labels)), bits)])  # (b + 1, A)
        shared = self._gather(sent, self.label_group) if self.world_size > 1 else sent.cpu()
        ranks = shared.view(self.world_size, -1, len(labels))
        held = [bool((ranks[:, -1, 0] >> place & 1).any()) for place in range(len(flags))]
        return ranks[:, :-1].flatten(0, 1).t(), held

    def _gather(self, rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        gathered = rows.new_empty(self.world_size * rows.shape[0], *rows.shape[1:])
        gather_blocks(gathered, rows, group)
        return gathered
