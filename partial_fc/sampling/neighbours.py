"""The k nearest classes of each class by the cosine of their centres: the source of a batch's hard negatives.

Source: the k-nearest-neighbour softmax of Song et al., "Large-Scale Training System for 100-Million Classification at
Alibaba", KDD 2020, https://arxiv.org/abs/2102.06025. The graph is rebuilt every few hundred steps: each rank searches all
classes for the neighbours of its own, exactly (neighbour_search.py) or by inverted lists (inverted_lists.py).
Neighbours are slot numbers, so the neighbours of a class do not depend on the number of ranks.
Shapes: n = classes of this shard, C = all classes, k = neighbours per class.
"""

import time

import numpy as np
import torch

from utils.randomness import derive, permute

from ..centres.shard import shard_range
from ..centres.store import CentreStore
from ..collectives import Collectives
from ..config import HeadConfig
from .neighbour_search import QUERIES, InvertedLists, Nearest, UnitCentres, block_bytes, hits, list_bytes, search_exact

_FOUND_BYTES = 12  # of each neighbour of a query until all of them are searched: cosine, slot and its copy
_CHECKED = 256  # classes whose approximate neighbours are compared with the exact ones


class NeighbourGraph:
    """Slots of the k nearest classes of each class of this shard, (n, k) int32, nearest first; -1 before the first rebuild.

    The search by inverted lists also leaves -1 where it saw fewer than k classes.

    Args:
        config: k (fewer if there are fewer other classes), how to search, and the optimizer steps between rebuilds.
        seed: of the head; equal on all ranks.
    """

    def __init__(
        self, num_classes: int, rank: int, config: HeadConfig, seed: int, collectives: Collectives, device: torch.device
    ) -> None:
        self.num_classes, self.rank, self.config, self.seed, self.collectives = num_classes, rank, config, seed, collectives
        self.first_slot, self.end_slot = shard_range(num_classes, rank, collectives.world_size)
        self.k = min(config.neighbours, num_classes - 1)
        self.slots = torch.full((self.end_slot - self.first_slot, self.k), -1, dtype=torch.int32, device=device)
        self._on_host: np.ndarray | None = None  # a copy of the slots, so that no draw waits for the device

    def is_due(self, step: int) -> bool:
        """Return whether to rebuild the graph before this optimizer step; never before the first, as all centres are random."""
        return step > 0 and step % self.config.neighbours_every == 0

    def loaded(self) -> None:
        """Note that the slots were filled from a checkpoint."""
        self._on_host = None

    @torch.no_grad()
    def rebuild(self, store: CentreStore, dtype: torch.dtype, step: int) -> str:
        """Find all neighbours again from the current centres, with products in dtype. A collective call.

        Args:
            step: of the optimizer; with the seed it fixes the lists.

        Returns:
            A line for the log about an approximate search, otherwise "".
        """
        self._on_host = None
        begun = time.perf_counter()
        centres = UnitCentres(store, self.num_classes, self.rank, dtype, self.collectives)
        rows = torch.arange(len(self.slots), device=self.slots.device)
        lists = None
        if self.config.searches_lists(self.num_classes):
            lists = InvertedLists(centres, derive(self.seed, "neighbours", step))
        most = -(-self.num_classes // self.collectives.world_size)  # classes of the largest shard: all ranks search as often
        for low in range(0, most, QUERIES):
            found = self._search(centres, lists, rows[low : low + QUERIES])
            self.slots[low : low + QUERIES] = found.slots
        if lists is None:
            return ""
        compared, recall = self._check(centres, lists, step)
        return (
            f"neighbours of {self.num_classes} classes in {time.perf_counter() - begun:.1f} s: {lists.num_lists} lists, "
            f"{min(self.config.neighbours_probes, lists.num_lists)} searched for each, {100 * compared:.2g} % of all pairs; "
            f"recall {recall:.3f}, by {min(_CHECKED, self.num_classes)} classes"
        )

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

    def _search(self, centres: UnitCentres, lists: InvertedLists | None, rows: torch.Tensor) -> Nearest:
        if lists is None:
            return search_exact(centres, rows, self.k)
        return lists.search(rows, self.k, self.config.neighbours_probes)

    def _check(self, centres: UnitCentres, lists: InvertedLists, step: int) -> tuple[float, float]:
        """Return the share of all pairs of classes that were compared, and the recall for a sample of classes."""
        pairs = float(lists.compared)
        slots = permute(np.arange(min(_CHECKED, self.num_classes)), self.num_classes, derive(self.seed, "recall", step))
        rows = torch.from_numpy(slots[(slots >= self.first_slot) & (slots < self.end_slot)] - self.first_slot)
        rows = rows.to(self.slots.device)
        right = hits(self._search(centres, lists, rows), self._search(centres, None, rows))
        sums = torch.stack([right.sum().double(), right.new_tensor(pairs, dtype=torch.float64)])
        right_ones, compared = self.collectives.sum(sums).tolist()
        return compared / self.num_classes**2, right_ones / (len(slots) * self.k)


def search_bytes(config: HeadConfig, num_classes: int, num_local: int, dim: int, device: str) -> int:
    """Return the bytes that a rebuild takes beside the graph itself: bounded, but for 40 per class of the shard with lists."""
    k = min(config.neighbours, num_classes - 1)
    size = block_bytes(device, dim, config.matmul_dtype, k) + _FOUND_BYTES * k * min(QUERIES, num_local)
    if config.searches_lists(num_classes):
        size += list_bytes(num_classes, num_local, dim, config.matmul_dtype, device, config.neighbours_probes)
    return size
