"""The k nearest classes of each class by the cosine of their centres: the source of a batch's hard negatives.

Source: the k-nearest-neighbour softmax of Song et al., "Large-Scale Training System for 100-Million Classification at
Alibaba", KDD 2020, https://arxiv.org/abs/2102.06025. The graph is rebuilt every few hundred steps: each rank compares its own
centres with those of all ranks, block by block, and keeps the best k of each row; 2 C^2 D operations over all ranks.
Neighbours are slot numbers, so the neighbours of a class do not depend on the number of ranks.
Shapes: n = classes of this shard, C = all classes, k = neighbours per class, q = centres of one block.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .centre_store import CentreStore
from .collectives import Collectives
from .shard import shard_range

_BLOCK = 4096  # centres compared with as many others at once


class NeighbourGraph:
    """Slots of the k nearest classes of each class of this shard, (n, k) int32, nearest first; -1 before the first rebuild.

    Args:
        num_neighbours: k; fewer if there are fewer other classes.
        every: optimizer steps between rebuilds.
    """

    def __init__(
        self,
        num_classes: int,
        rank: int,
        num_neighbours: int,
        every: int,
        collectives: Collectives,
        device: torch.device,
    ) -> None:
        self.num_classes, self.rank, self.every, self.collectives = num_classes, rank, every, collectives
        self.first_slot, self.end_slot = shard_range(num_classes, rank, collectives.world_size)
        self.k = min(num_neighbours, num_classes - 1)
        self.slots = torch.full((self.end_slot - self.first_slot, self.k), -1, dtype=torch.int32, device=device)
        self._on_host: np.ndarray | None = None  # a copy of the slots, so that no draw waits for the device

    def is_due(self, step: int) -> bool:
        """Return whether to rebuild the graph before this optimizer step; never before the first, as all centres are random."""
        return step > 0 and step % self.every == 0

    def loaded(self) -> None:
        """Note that the slots were filled from a checkpoint."""
        self._on_host = None

    @torch.no_grad()
    def rebuild(self, store: CentreStore, dtype: torch.dtype) -> None:
        """Find all neighbours again from the current centres, with products in dtype. A collective call."""
        self._on_host = None
        device = self.slots.device
        best = torch.full((len(self.slots), self.k), -torch.inf, device=device)
        for first, others in self._blocks_of_all_ranks(store, dtype):
            numbers = torch.arange(first, first + len(others), device=device)
            for low in range(0, len(self.slots), _BLOCK):
                rows = slice(low, min(low + _BLOCK, len(self.slots)))
                cosine = (store.unit_rows(rows, dtype) @ others.t()).float()
                mine = torch.arange(self.first_slot + rows.start, self.first_slot + rows.stop, device=device)
                itself = (mine >= first) & (mine < first + len(others))
                cosine[itself, (mine - first)[itself]] = -torch.inf
                # most rows find nothing better in most blocks, and one maximum shows that much more cheaply than a top-k
                better = (cosine.amax(dim=1) > best[rows, -1]).nonzero().squeeze(1)
                if len(better) == 0:
                    continue
                at = better + low
                found, columns = cosine[better].topk(min(self.k, len(others)), dim=1)
                joined = torch.cat([best[at], found], dim=1)
                slots = torch.cat([self.slots[at], numbers[columns].to(torch.int32)], dim=1)
                best[at], order = joined.topk(self.k, dim=1)
                self.slots[at] = slots.gather(1, order)

    def near(self, slots: np.ndarray) -> np.ndarray:
        """Return the rows of this shard that are neighbours of these distinct slots of any rank, each slot's nearest first.

        A collective call, because each rank knows only the neighbours of its own classes. Repeats are possible. (m,) int64.
        """
        if self._on_host is None:
            self._on_host = self.slots.cpu().numpy()
        here = (slots >= self.first_slot) & (slots < self.end_slot)
        known = np.zeros((len(slots), self.k), dtype=np.int32)  # slot + 1, or 0, so that the sum over ranks is the slot + 1
        known[here] = self._on_host[slots[here] - self.first_slot] + 1
        shared = self.collectives.sum(torch.from_numpy(known)).numpy().T.reshape(-1)
        rows = shared.astype(np.int64) - 1 - self.first_slot
        return rows[(rows >= 0) & (rows < self.end_slot - self.first_slot)]

    def _blocks_of_all_ranks(self, store: CentreStore, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Yield (first slot, unit centres (q, D)) of every rank's shard in turn, the same on all ranks."""
        for source in range(self.collectives.world_size):
            start, stop = shard_range(self.num_classes, source, self.collectives.world_size)
            for low in range(start, stop, _BLOCK):
                high = min(low + _BLOCK, stop)
                if source == self.rank:
                    block = store.unit_rows(slice(low - start, high - start), dtype).clone()
                else:
                    block = torch.empty(high - low, store.dim, dtype=dtype, device=self.slots.device)
                yield low, self.collectives.broadcast(block, source)
