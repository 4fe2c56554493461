"""Searches for the nearest classes by the cosine of their centres: exactly, or approximately by inverted lists.

Exact: each rank looks for the neighbours of its own classes among those of all ranks, block by block. On CUDA the host waits
for nothing: sizes are known on the host, and what is left out is found by index arithmetic. The centres of a block come from
the ranks that hold them, so its columns do not depend on the number of ranks, and neither does a row's order of equal cosines.

Approximate: Sivic and Zisserman, "Video Google", ICCV 2003, and the inverted file of Jegou et al., "Product Quantization for
Nearest Neighbor Search", TPAMI 2011, here with whole vectors. Every centre is in the list whose direction is nearest. A query
is compared with the centres in the `probes` lists that are nearest to it. The directions are those of a spherical k-means
(Dhillon and Modha, Machine Learning 42, 2001) over a sample of the centres. It takes

    n (2 L + probes C / L) D multiply-adds per rank if lists are equally long, instead of n C D.

Nothing depends on the number of ranks: the sample is drawn by slot, rank 0 computes the directions, and the centres of a list
are compared in the order of their slots. Products may round differently if they have other numbers of rows; that matters only
where two cosines are as good as equal.
Shapes: n = classes of this shard, C = all classes, D = embedding size, k = neighbours per class, m = queries, q = centres of
one block, L = lists, S = sampled centres.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from utils.randomness import permute

from ..centres.shard import shard_range
from ..centres.store import CentreStore, Select
from ..collectives import Collectives
from ..kernels.plain import has_fp32_output, padded_rows, product_dtype
from ..workspace import Workspace

COLUMNS = 16384  # centres of one block, q
_COSINE_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}  # of one block of cosines in fp32: as many rows as it holds
_UNIT_BLOCK = 1024  # rows normalised at once, so that they stay in cache
_GROUP = 8  # columns whose maximum is taken before the top-k
_GROUPS_PER_NEIGHBOUR = 4  # with fewer groups than that, all columns are candidates
# bytes that the search holds at once
_CANDIDATE_BYTES = 20  # of each candidate of a query: value and column, and both again in the top-k
_NEIGHBOUR_BYTES = 80  # of each neighbour of a query: those known and found, joined, their order and slots
_COLUMN_BYTES = 24  # of each centre of a block: its slot, and indices
_UNIT_BLOCKS = 3  # blocks of unit centres: of all ranks, of this one, and their sum


class UnitCentres:
    """The unit centres of all classes in dtype: rows of this rank, and those of all ranks by a collective call.

    Args:
        store: this rank's shard of num_classes classes.
        dtype: float32 or bfloat16, of the products.
    """

    def __init__(self, store: CentreStore, num_classes: int, rank: int, dtype: torch.dtype, collectives: Collectives) -> None:
        self.store, self.num_classes, self.rank, self.dtype, self.collectives = store, num_classes, rank, dtype, collectives
        self.first_slot, self.end_slot = shard_range(num_classes, rank, collectives.world_size)
        self.device = store.workspace.device
        # buffers of its own, which are freed after the search
        self._workspace = Workspace(self.device, 0)

    @property
    def rows_at_once(self) -> int:
        """The number of queries that are compared with a block at once."""
        return _rows_at_once(self.device.type)

    def padded(self, count: int) -> int:
        """Return the number of rows or columns to which `count` are filled up for a product, a multiple of 8."""
        return -(-padded_rows(count, self.dtype) // _GROUP) * _GROUP

    def own(self, rows: Select, filled_up: int = 0) -> Tensor:
        """Return the unit centres (m, D) of rows of this shard, in a buffer that is valid until the next call.

        Args:
            filled_up: if larger than m, the number of rows to return; those beyond m are zero.
        """
        stored, inverse = self.store.tensors["centres"][rows], self.store.inverse_norms[rows, None]
        unit = self._workspace.buffer("unit", (max(len(stored), filled_up), self.store.dim), self.dtype)
        unit[len(stored) :].zero_()
        for low in range(0, len(stored), _UNIT_BLOCK):  # torch converts bf16 in temporaries
            block = slice(low, min(low + _UNIT_BLOCK, len(stored)))
            torch.mul(stored[block], inverse[block], out=unit[block])
        return unit

    def share(self, rows: Select, places: Select, count: int) -> Tensor:
        """Return (count, D), on all ranks, to which each rank gives rows of its shard at places that no other rank fills.

        A collective call. Places that no rank fills are zero. In a buffer that is valid until the next call.
        """
        block = self._workspace.buffer("block", (count, self.store.dim), self.dtype).zero_()
        block[places] = self.own(rows)
        return self.collectives.sum(block)  # exact, since all but one rank add zeros

    def own_cosines(self, rows: Tensor, others: Tensor) -> Tensor:
        """Return the cosines (m, q) of rows of this shard with unit centres (q, D), in a buffer as `cosines` does."""
        return self.cosines(self.own(rows, self.padded(len(rows))), others)[: len(rows)]

    def cosines(self, unit: Tensor, others: Tensor) -> Tensor:
        """Return the cosines (m, q) of unit centres (m, D) and (q, D), in a buffer that is valid until the next call."""
        dtype = product_dtype(self.device, self.dtype)
        if dtype == torch.bfloat16 and has_fp32_output(self.device):
            return torch.mm(unit, others.t(), out_dtype=torch.float32)
        out = self._workspace.buffer("cosine", (len(unit), len(others)), dtype)
        return torch.mm(unit.to(dtype), others.to(dtype).t(), out=out)


class Nearest:
    """The nearest classes of m queries so far: cosines (m, k) fp32, and slots (m, k) int32, nearest first.

    Where fewer than k are known, the cosine is -inf and the slot -1.
    """

    def __init__(self, num_queries: int, k: int, device: torch.device) -> None:
        self.k = k
        self.cosine = torch.full((num_queries, k), -torch.inf, device=device)
        self.slots = torch.full((num_queries, k), -1, dtype=torch.int32, device=device)

    def compare(self, centres: UnitCentres, queries: Select, rows: Tensor, others: Tensor, slots: Tensor, count: int) -> None:
        """Compare queries with a block of classes, and keep the k nearest of both. A class is no neighbour of itself.

        Args:
            queries: which of the m; distinct.
            rows: their rows in this shard, int64.
            others: (q, D) unit centres, with zeros or other centres beyond `count`.
            slots: (q,) int32, those of `others`; the first `count` ascend.
            count: how many of `others` to compare with; the rest only fills up the block.
        """
        cosine = centres.own_cosines(rows, others)
        cosine[:, count:] = -torch.inf
        mine = (rows + centres.first_slot).to(torch.int32)
        column = torch.searchsorted(slots[:count], mine).clamp_(max=count - 1)
        itself, column = (slots[column] == mine)[:, None], column[:, None]
        cosine.scatter_(1, column, cosine.gather(1, column).masked_fill_(itself, -torch.inf))
        values, columns = candidates(cosine, self.k)
        known = self.cosine[queries]
        joined, order = torch.cat([known, values.float()], dim=1).topk(self.k, dim=1)
        old, new = order.clamp(max=self.k - 1), order.sub(self.k).clamp_(min=0)
        found = torch.where(order < self.k, self.slots[queries].gather(1, old), slots[columns.gather(1, new)])
        self.cosine[queries] = joined
        self.slots[queries] = found.masked_fill_(joined == -torch.inf, -1)


def search_exact(centres: UnitCentres, rows: Tensor, k: int) -> Nearest:
    """Return the k nearest classes of rows (m,) int64 of this shard, among all C: m C D multiply-adds. A collective call."""
    nearest = Nearest(len(rows), k, centres.device)
    for low in range(0, centres.num_classes, COLUMNS):
        count = min(COLUMNS, centres.num_classes - low)
        start = min(max(centres.first_slot, low), low + count)
        stop = max(min(centres.end_slot, low + count), start)
        own = slice(start - centres.first_slot, stop - centres.first_slot) if stop > start else slice(0, 0)
        others = centres.share(own, slice(start - low, stop - low), centres.padded(count))
        slots = torch.arange(low, low + len(others), dtype=torch.int32, device=centres.device)
        for first in range(0, len(rows), centres.rows_at_once):
            queries = slice(first, min(first + centres.rows_at_once, len(rows)))
            nearest.compare(centres, queries, rows[queries], others, slots, count)
    return nearest


def candidates(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the entries of each row of values (m, q) among which its k largest are, and their columns: (m, c) each.

    The k largest are in the k groups of columns with the largest maxima. To look for these first takes a third of the time of
    a top-k over many columns.
    """
    width = values.shape[1]
    if width % _GROUP or width < _GROUPS_PER_NEIGHBOUR * _GROUP * k:
        return values, torch.arange(width, device=values.device).expand_as(values)
    groups = width // _GROUP
    best = values.view(-1, _GROUP, groups).amax(dim=1).topk(k, dim=1)[1]
    columns = (best[:, :, None] + groups * torch.arange(_GROUP, device=values.device)).flatten(1)
    return values.gather(1, columns), columns


def hits(found: Nearest, truth: Nearest) -> Tensor:
    """Return which of the found neighbours are right, (m, k) bool: among the k nearest, or as near as the k-th of them."""
    same = (found.slots[:, :, None] == truth.slots[:, None, :]).any(dim=2)
    return same | (found.cosine >= truth.cosine[:, -1:])


def block_bytes(device: str, dim: int, dtype: torch.dtype, k: int) -> int:
    """Return the bytes of the buffers that compare queries with a block, for any number of queries and classes."""
    rows, size, fp32 = _rows_at_once(device), dtype.itemsize, torch.float32.itemsize
    computed = product_dtype(torch.device(device), dtype).itemsize
    # on the CPU torch takes maxima of bf16 from a copy in fp32
    cosines = rows * COLUMNS * (fp32 if size == fp32 else size + fp32)
    maxima = cosines // _GROUP
    chosen = min(_GROUPS_PER_NEIGHBOUR * _GROUP * k, COLUMNS)
    found = rows * (_CANDIDATE_BYTES * chosen + _NEIGHBOUR_BYTES * k)
    queries = rows * dim * (size + 2 * fp32)  # unit centres, and the stored rows with their fp32 values
    blocks = COLUMNS * (dim * size * _UNIT_BLOCKS + _COLUMN_BYTES)
    factors = (rows + COLUMNS) * dim * computed if computed != size else 0  # of a product, in fp32
    return cosines + maxima + found + queries + blocks + factors


def _rows_at_once(device: str) -> int:
    return _COSINE_BYTES[device] // (torch.float32.itemsize * COLUMNS)


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
    """The lists of all centres, and this shard's rows in their order. Building and searching are collective calls."""

    def __init__(self, centres: UnitCentres, seed: int) -> None:
        self.centres = centres
        self.num_lists = num_lists(centres.num_classes)
        self.compared = 0  # pairs of a query and a centre, so far
        self._directions = self._k_means(self._sample(seed))  # the seed is equal on all ranks
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
