"""Exact search for the nearest classes by the cosine of their centres, and what the search by inverted lists shares with it.

Each rank looks for the neighbours of its own classes among those of all ranks, block by block. On CUDA the host waits for
nothing: sizes are known on the host, and what is left out is found by index arithmetic. The centres of a block come from the
ranks that hold them, so its columns do not depend on the number of ranks, and neither does a row's order of equal cosines.
Shapes: n = classes of this shard, C = all classes, D = embedding size, k = neighbours per class, m = queries,
q = centres of one block.
"""

import torch
from torch import Tensor

from ..centres.shard import shard_range
from ..centres.store import CentreStore, Select
from ..collectives import Collectives
from ..kernels.products import has_fp32_output, padded_rows, product_dtype
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
