"""Approximate search for the nearest classes: inverted lists over the class centres themselves.

Source: Sivic and Zisserman, "Video Google", ICCV 2003, and the inverted file of Jegou et al., "Product Quantization for Nearest
Neighbor Search", TPAMI 2011, here with whole vectors. Every centre is in the list whose direction is nearest. A query is
compared with the centres in the `probes` lists that are nearest to it. The directions are those of a spherical k-means
(Dhillon and Modha, Machine Learning 42, 2001) over a sample of the centres. It takes

    n (2 L + probes C / L) D multiply-adds per rank if lists are equally long, instead of n C D.

Nothing depends on the number of ranks: the sample is drawn by slot, rank 0 computes the directions, and the centres of a list
are compared in the order of their slots. Products may round differently if they have other numbers of rows; that matters only
where two cosines are as good as equal.
Shapes: n = classes of this shard, C = all classes, D = embedding size, k = neighbours per class, m = queries, L = lists,
S = sampled centres.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from utils.randomness import permute

from ..kernels.products import product_dtype
from .neighbour_search import COLUMNS, Nearest, UnitCentres, candidates

QUERIES = 1 << 17  # most queries of one search: bounds the memory for the pairs of queries and lists
_MOST_LISTS = 16384  # bounds the memory for directions and sample
_SAMPLES_PER_LIST = 8
_SAMPLES_AT_ONCE = 1024
_ROUNDS = 5  # of k-means
_ROW_BYTES = 40  # of each class of the shard: its list, its place in their order, and what sorting them takes
_PROBE_BYTES = 40  # of each list that a query is compared with: the same of the pairs of queries and lists


class _Part(NamedTuple):
    """Consecutive places in the order of all centres by list and slot, all of one list."""

    number: int  # of the list
    start: int
    stop: int


class InvertedLists:
    """The lists of all centres, and this shard's rows in their order. Building and searching are collective calls.

    Args:
        seed: of the sample; equal on all ranks.
    """

    def __init__(self, centres: UnitCentres, seed: int) -> None:
        self.centres = centres
        self.num_lists = num_lists(centres.num_classes)
        self.compared = 0  # pairs of a query and a centre, so far
        self._directions = self._k_means(self._sample(seed))
        rows = torch.arange(centres.end_slot - centres.first_slot, device=centres.device)
        self._list_of, self._order = self._nearest_lists(rows, 1).squeeze(1).sort(stable=True)  # rows by list, then slot
        ends = torch.searchsorted(self._list_of, torch.arange(1, self.num_lists + 1, device=centres.device, dtype=torch.int32))
        world_size = centres.collectives.world_size
        counts = torch.zeros(world_size, self.num_lists, dtype=torch.int64, device=centres.device)
        counts[centres.rank] = ends.diff(prepend=ends.new_zeros(1))
        total = centres.collectives.sum(counts).sum(dim=0)
        starts = total.cumsum(0) - total  # places of the lists in the order of all centres
        first = starts + counts[: centres.rank].sum(dim=0)  # places of this rank's first centre in each list
        own = ends - counts[centres.rank]  # its number in self._order
        self._to_place = first - own
        # the only wait for the device: sizes of lists, as numbers for slices
        self._starts, self._total, self._first, self._own, self._count = (
            torch.stack([starts, total, first, own, counts[centres.rank]]).cpu().numpy()
        )

    def search(self, rows: Tensor, k: int, probes: int) -> Nearest:
        """Return the k nearest classes of rows (m,) int64 of this shard in the `probes` lists nearest to each.

        On CUDA the host waits once, for the numbers of queries of the lists.
        """
        probes, device = min(probes, self.num_lists), self.centres.device
        nearest = Nearest(len(rows), k, device)
        probed, pairs = self._nearest_lists(rows, probes).flatten().sort(stable=True)
        queries = pairs.div_(probes, rounding_mode="floor")
        bounds = torch.searchsorted(probed, torch.arange(self.num_lists + 1, device=device, dtype=torch.int32)).tolist()
        step = self.centres.rows_at_once
        for group in self._groups():
            others, slots = self._members(group)
            for number, start, stop in group:
                low, count = start - group[0].start, stop - start
                block = slice(low, low + self.centres.padded(count))
                for first in range(bounds[number], bounds[number + 1], step):
                    which = queries[first : min(first + step, bounds[number + 1])]
                    nearest.compare(self.centres, which, rows[which], others[block], slots[block], count)
                    self.compared += len(which) * count
        return nearest

    def _groups(self) -> Iterator[list[_Part]]:
        """Yield all lists in turn, as many at once as make a block of COLUMNS centres; longer ones in parts."""
        group: list[_Part] = []
        for number, (begin, total) in enumerate(zip(self._starts.tolist(), self._total.tolist(), strict=True)):
            for start in range(begin, begin + total, COLUMNS):
                part = _Part(number, start, min(start + COLUMNS, begin + total))
                if group and part.stop - group[0].start > COLUMNS:
                    yield group
                    group = []
                group.append(part)
        yield group

    def _members(self, group: list[_Part]) -> tuple[Tensor, Tensor]:
        """Return the unit centres (c, D) of a group and their slots (c,) int32; the last of them only fill up a product."""
        start = group[0].start
        count = group[-1].stop - start + self.centres.padded(1)
        low, high = self._own_before(group[0].number, start), self._own_before(group[-1].number, group[-1].stop)
        rows = self._order[low:high]
        places = self._to_place[self._list_of[low:high]] + torch.arange(low - start, high - start, device=rows.device)
        slots = torch.zeros(count, dtype=torch.int32, device=rows.device)
        slots[places] = (rows + self.centres.first_slot).to(torch.int32)
        return self.centres.share(rows, places, count), self.centres.collectives.sum(slots)

    def _own_before(self, number: int, place: int) -> int:
        """Return how many of this rank's centres come before a place in the order of all, within a list or at its end."""
        inside = min(max(place - int(self._first[number]), 0), int(self._count[number]))
        return int(self._own[number]) + inside

    def _nearest_lists(self, rows: Tensor, count: int) -> Tensor:
        """Return the numbers of the lists nearest to rows (m,) of this shard, (m, count) int32, nearest first."""
        found = torch.empty(len(rows), count, dtype=torch.int32, device=rows.device)
        for part, out in zip(rows.split(self.centres.rows_at_once), found.split(self.centres.rows_at_once), strict=True):
            values, columns = candidates(self.centres.own_cosines(part, self._directions), count)
            out.copy_(columns.gather(1, values.topk(count, dim=1)[1]))
        return found

    def _sample(self, seed: int) -> Tensor:
        """Return the unit centres (S, D) of classes in a random order, the same on all ranks."""
        centres = self.centres
        count = min(centres.num_classes, _SAMPLES_PER_LIST * self.num_lists)
        slots = permute(np.arange(count), centres.num_classes, seed)
        places = np.flatnonzero((slots >= centres.first_slot) & (slots < centres.end_slot))
        rows = torch.from_numpy(slots[places] - centres.first_slot).to(centres.device)
        return centres.share(rows, torch.from_numpy(places).to(centres.device), count)

    def _k_means(self, sample: Tensor) -> Tensor:
        """Return the directions (L, D) of the lists; a direction that is nearest to no centre of the sample stays.

        Sums are products with a matrix of zeros and ones: unlike atomic additions, they have a fixed order on CUDA.
        """
        directions, dtype = sample[: self.num_lists].clone(), product_dtype(sample.device, sample.dtype)
        if self.centres.rank == 0:
            for _ in range(_ROUNDS):
                sums = torch.zeros_like(directions, dtype=torch.float32)
                for rows in sample.split(_SAMPLES_AT_ONCE):
                    number = self.centres.cosines(rows, directions).argmax(dim=1)
                    members = torch.zeros(self.num_lists, len(rows), dtype=dtype, device=rows.device)
                    sums += (members.scatter_(0, number[None], 1.0) @ rows.to(dtype)).float()
                used = torch.linalg.vector_norm(sums, dim=1, keepdim=True) > 0
                directions = torch.where(used, F.normalize(sums).to(directions.dtype), directions)
        return self.centres.collectives.broadcast(directions, source=0)


def num_lists(num_classes: int) -> int:
    """Return L: four times the root of the number of classes, so that to look for lists costs about as much as to search 32."""
    return min(num_classes, _MOST_LISTS, round(4 * num_classes**0.5))


def list_bytes(num_classes: int, num_local: int, dim: int, dtype: torch.dtype, device: str, probes: int) -> int:
    """Return the bytes that the lists take beside what neighbour_search.block_bytes counts."""
    lists = num_lists(num_classes)
    sample = min(num_classes, _SAMPLES_PER_LIST * lists) * dim * dtype.itemsize
    computed = product_dtype(torch.device(device), dtype).itemsize
    # of each list: its direction in four places and three times in fp32, cosines and members of a block of samples, and counts
    directions = lists * (dim * (4 * dtype.itemsize + 12) + 2 * _SAMPLES_AT_ONCE * computed + 96)
    return sample + directions + _ROW_BYTES * num_local + _PROBE_BYTES * min(probes, lists) * min(QUERIES, num_local)
