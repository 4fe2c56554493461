"""Groups unlabelled faces into people by average linkage, measures clusters against known people, and shows them on a page.

Two clusters are merged while the mean cosine between their faces reaches the threshold of their sizes, the one that is furthest
above it first. A mean of many cosines varies less than one, so that at one FAR its threshold is lower (`thresholds_at`). For
vectors of length 1 that mean is the product of the two sums over the product of the sizes, so it is exact at any size. It is at
most the highest single cosine, so only pairs of faces above the lowest threshold, found in blocks of matrix products, make
clusters neighbours.
A chain of similar faces between two people is no reason to merge them, unlike for connected components and single linkage.
`expand` averages each face with its neighbours beforehand, which removes a part of what differs from picture to picture.
Faces are put into the order of their bits first, so that the order in the table changes nothing.
Source of BCubed: Amigo et al., "A comparison of extrinsic clustering evaluation metrics", Information Retrieval 2009.
Shapes: n = faces, D = embedding size, E = pairs above the lowest threshold, S = classes of cluster sizes: 1, 2 to 3, from 4 on.
"""

import heapq
from collections.abc import Iterator
from itertools import pairwise, repeat
from math import isqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from data.base import FaceDataset
from deploy.journal import Journal
from utils.cli import Advance, progress
from utils.precision import is_fast_in_bf16
from utils.report import Facts, Page, captioned_sheet

from .all_pairs import count_pairs, points_at
from .cleaning import row_keys

SIZES = (1, 2, 4)  # where the classes of sizes begin; the threshold of 8 faces is hardly below that of 4
NEIGHBOURS = (0, 1, 2, 5, 10)  # of a face in `expand`, of which `calibrate` chooses
POWER = 5
_ROWS, _COLUMNS = 1024, 8192  # of a block of cosines
_BF16 = 3.1 * 2**-8  # the most by which a cosine is wrong in bf16: both vectors and the result are rounded, by 2^-8 each
_MANY = 100_000  # faces, of which few are similar to any in a block: in smaller tables products in bf16 save nothing
_ENTRIES = 16  # of a list of pairs, that are objects of Python at once
_PARTS = 64  # of all pairs, which are put into order one after the other, while the bar moves
_MOST_PAIRS = 1 << 26  # above the lowest threshold: some GiB


class Clusters(NamedTuple):
    """A partition of faces."""

    labels: np.ndarray  # (n,) int64, the largest cluster is 0; of equal ones the first by the bits of its faces
    own: np.ndarray  # (n,) mean cosine with the other faces of the cluster; -1 = alone
    other: np.ndarray  # (n,) highest mean cosine with another cluster that has a similar face; -1 = there is none
    sure: np.ndarray  # (n,) bool: both on the right side of their thresholds, so the face has company, and no other is as near


def expand(vectors: np.ndarray, count: int, journal: Journal | None = None, advance: Advance = int) -> np.ndarray:
    """Return the sums of faces and their `count` nearest others times cosine ** POWER, (n, D) float32 of length 1.

    This is alpha query expansion (Radenovic et al., "Fine-tuning CNN image retrieval with no human annotation", TPAMI 2019) of
    each face. Others of a cosine below 0 are left out. The neighbours are exact, from blocks of matrix products. The other
    arguments are those of `cluster`; what the journal has is not searched again.
    """
    order = _order(vectors)
    table = torch.from_numpy(np.ascontiguousarray(vectors[order]))
    return _averaged(table, order, _neighbours(table, count, journal, advance))


def _neighbours(
    table: torch.Tensor, count: int, journal: Journal | None, advance: Advance, stage: str = "neighbours"
) -> torch.Tensor:
    """Return cosines with, and places of, the nearest others of each row, the nearest first, (n, 2, count) float64."""
    parts = [torch.from_numpy(np.frombuffer(data, dtype="<f8").copy()) for data in _done(journal, stage)]
    advance(min(len(parts) * _ROWS, len(table)))
    rough = table.bfloat16() if len(table) > _MANY and is_fast_in_bf16(table.device) else table
    for begin in range(len(parts) * _ROWS, len(table), _ROWS):
        best = torch.zeros(min(_ROWS, len(table) - begin), 2, count, dtype=torch.float64)  # in which places are exact
        for start in range(0, len(table), _COLUMNS):
            rows, cosines = _reaching(table, rough, begin, start, best[:, 0, -1])
            own = begin + rows - start
            inside = (own >= 0) & (own < cosines.shape[1])
            cosines[inside, own[inside]] = -1.0
            near = cosines.topk(min(count, cosines.shape[1]))
            both = torch.cat([best[rows], torch.stack([near.values.double(), near.indices.double() + start], dim=1)], dim=2)
            chosen = both[:, 0].topk(count).indices
            best[rows] = both.gather(2, chosen[:, None].expand(-1, 2, -1))
        parts.append(best.view(-1))
        if journal is not None:
            journal.add({"stage": stage, "begin": begin}, best.numpy().tobytes() + b"\n")
        advance(len(best))
    return torch.cat(parts).view(-1, 2, count)


def _reaching(
    table: torch.Tensor, rough: torch.Tensor, begin: int, start: int, limits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows (h,), from `begin`, that reach a limit (r,), by `rough` perhaps more, and their cosines (h, columns)."""
    rows, columns = slice(begin, begin + len(limits)), slice(start, start + _COLUMNS)
    cosines, slack = rough[rows] @ rough[columns].T, 0.0 if rough is table else _BF16
    found = torch.nonzero(cosines.amax(dim=1).double() >= limits.double() - slack).squeeze(1)
    return found, cosines[found] if rough is table else table[rows][found] @ table[columns].T


def _averaged(table: torch.Tensor, order: np.ndarray, near: torch.Tensor) -> np.ndarray:
    """Return what `expand` does, from the vectors in an order and their neighbours (n, 2, count)."""
    found = np.empty(table.shape, dtype=np.float32)
    for begin in range(0, len(table), _ROWS):
        best = near[begin : begin + _ROWS]
        others = table[best[:, 1].long()] * (best[:, 0] ** POWER).float()[:, :, None]
        total = table[begin : begin + _ROWS] + others.sum(dim=1)
        found[order[begin : begin + _ROWS]] = torch.nn.functional.normalize(total).numpy()
    return found


def calibrate(
    vectors: np.ndarray, labels: np.ndarray, far: str, journal: Journal | None = None, advance: Advance = int
) -> tuple[int, np.ndarray]:
    """Return the number of neighbours to average, with the thresholds: those with which known people have the best BCubed F.

    Args:
        vectors, labels, far: of `thresholds_at`, which raises.
        journal: of `cluster`.
        advance: is called with numbers of faces, which are n for the neighbours and n for each number of NEIGHBOURS in all.
    """
    if done := _done(journal, "calibration"):
        values = np.frombuffer(done[0], dtype="<f8")
        return int(values[0]), values[1:].reshape(isqrt(len(values) - 1), -1)
    order = _order(vectors)
    table = torch.from_numpy(np.ascontiguousarray(vectors[order]))
    # the first of which are those of a smaller number
    near = _neighbours(table, max(NEIGHBOURS), journal, advance, "neighbours of known people")
    best = (-1.0, 0, np.empty(0))
    for count in NEIGHBOURS:
        averaged = _averaged(table, order, near[:, :, :count]) if count else vectors
        thresholds = thresholds_at(averaged, labels, far)
        quality = agreement(cluster(averaged, thresholds, advance=advance).labels, labels).bcubed_f
        if quality > best[0]:
            best = quality, count, thresholds
    if journal is not None:
        values = np.concatenate([[best[1]], best[2].ravel()]).astype("<f8")
        journal.add({"stage": "calibration", "begin": 0}, values.tobytes() + b"\n")
    return best[1:]


def _done(journal: Journal | None, stage: str) -> list[bytes]:
    """Return the results of the blocks of a stage that a journal has, in order."""
    found: list[bytes] = []
    for entry in journal.entries if journal else ():
        if entry.record.get("stage") == stage:
            data = journal.data(entry) if journal else None
            if data is None or entry.record.get("begin") != len(found) * _ROWS:
                break
            found.append(data[:-1])  # an entry without bytes would have no hash
    return found


def thresholds_at(vectors: np.ndarray, labels: np.ndarray, far: str) -> np.ndarray:
    """Return the thresholds of cluster sizes at one FAR of the pairs of two people, (S, S) float64.

    The faces of a person are cut into groups of one, two and four, and all pairs of groups are compared. Sizes from which the
    FAR cannot be measured are left out, so S is less than 3 for a small table. Vectors are (n, D) float32 of length 1, and
    labels (n,) int64, the people.

    Raises:
        ValueError: there are too few pairs of faces for the FAR.
    """
    order = np.lexsort((row_keys(vectors), labels))
    vectors, labels = vectors[order], labels[order]
    place = np.arange(len(labels)) - np.searchsorted(labels, labels)  # among the faces of the person
    parts, owners = [], []
    for size in SIZES:
        last = np.flatnonzero(place % size == size - 1)
        parts.append(sum(vectors[last - back] for back in range(size)) / np.float32(size))
        owners.append(labels[last])
    groups = np.repeat(np.arange(len(SIZES)), list(map(len, owners)))
    with progress([], len(groups) * (len(groups) - 1) // 2, "comparing groups", "pair", delay=5) as bar:
        counts = count_pairs(np.concatenate(parts), np.concatenate(owners), groups, advance=bar.update)
    found = np.full((len(SIZES), len(SIZES)), np.nan)
    for low, high in np.argwhere(np.triu(np.ones(found.shape))).tolist() if counts.genuine.any() else []:
        if high < len(counts.impostor):
            point = points_at(counts.genuine.sum(axis=0), counts.impostor[low, high], counts.edges, [far])[0]
            found[low, high] = found[high, low] = np.nan if point.cosine is None else point.cosine
    for count in range(len(SIZES), 0, -1):
        if not np.isnan(found[:count, :count]).any():
            return found[:count, :count]
    pairs = int(counts.impostor[0, 0].sum())
    raise ValueError(
        f"a FAR of {far} needs {1 / float(far):,.0f} pairs of two people, and pairs of one; there are {pairs:,} of two people"
    )


def _order(vectors: np.ndarray) -> np.ndarray:
    """Return the order of vectors by their bits, (n,) int64."""
    return np.argsort(row_keys(vectors), kind="stable")


def _classes(sizes: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return the class of each cluster size."""
    return np.searchsorted(SIZES[1 : len(thresholds)], sizes, side="right")


def cluster(vectors: np.ndarray, thresholds: np.ndarray, journal: Journal | None = None, advance: Advance = int) -> Clusters:
    """Return the people of faces.

    Args:
        vectors: (n, D) float32 of length 1, also a memory map.
        thresholds: (S, S) float64, the mean cosine from which clusters of two classes of sizes are one, symmetric.
        journal: begun; the pairs that it has are not searched again.
        advance: is called with the number of faces that were compared with all others.

    Raises:
        ValueError: too many pairs are above the threshold.
    """
    order = _order(vectors)
    vectors = np.ascontiguousarray(vectors[order])
    first, second, cosines = _similar(vectors, float(thresholds.min()), journal, advance)
    found = _average_linkage(vectors, first, second, cosines, thresholds)
    renumbered = np.argsort(np.lexsort((np.unique(found, return_index=True)[1], -np.bincount(found))))  # each one's rank
    own, other, sure = _means(vectors, found, first, second, thresholds)
    back = np.argsort(order)
    return Clusters(renumbered[found][back], own[back], other[back], sure[back])


def _similar(
    vectors: np.ndarray, threshold: float, journal: Journal | None, advance: Advance
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pairs of faces first < second (E,) int32 whose cosine (E,) float32 reaches the threshold."""
    blocks = _done(journal, "pairs")
    done = len(blocks) * _ROWS
    parts = [np.zeros((0, 3), dtype="<i4"), *(np.frombuffer(data, dtype="<i4").reshape(-1, 3) for data in blocks)]
    advance(min(done, len(vectors)))
    table, total = torch.from_numpy(vectors), sum(map(len, parts))
    rough = table.bfloat16() if len(table) > _MANY and is_fast_in_bf16(table.device) else table
    too_many = ValueError(
        f"more than {_MOST_PAIRS:,} pairs of faces are above the cosine {threshold:.4f}; give a lower --far, or "
        "a higher --threshold"
    )
    if not done and len(table) > _MANY:  # twice as many are foreseen, by the rows of some faces, not found hours later
        some = rough[np.random.default_rng(0).permutation(len(table))[:_ROWS]]
        near = torch.stack([(some @ block.T >= threshold).sum(dim=1) for block in rough.split(_COLUMNS)]).sum(dim=0).double()
        least = near.mean() - 3 * near.std() / len(near) ** 0.5 - 1  # a few faces of one huge cluster foresee nothing
        if least * len(table) / 2 > 2 * _MOST_PAIRS:
            raise too_many
    for begin in range(done, len(vectors), _ROWS):
        limits = torch.full((min(_ROWS, len(vectors) - begin),), threshold)
        found = []
        for start in range(begin, len(vectors), _COLUMNS):
            rows, cosines = _reaching(table, rough, begin, start, limits)
            row, column = torch.nonzero(cosines >= threshold).T
            pair = torch.stack([rows[row] + begin, column + start, cosines[row, column].view(torch.int32)], dim=1)
            found.append(pair[pair[:, 1] > pair[:, 0]].to(torch.int32).numpy())
            total += len(found[-1])
            if total > _MOST_PAIRS:
                raise too_many
        parts.append(np.concatenate(found))
        if journal is not None:
            journal.add({"stage": "pairs", "begin": begin}, parts[-1].tobytes() + b"\n")
        advance(len(limits))
    pairs = np.concatenate(parts)
    return pairs[:, 0], pairs[:, 1], np.ascontiguousarray(pairs[:, 2]).view(np.float32)


def _average_linkage(
    vectors: np.ndarray, first: np.ndarray, second: np.ndarray, cosines: np.ndarray, thresholds: np.ndarray
) -> np.ndarray:
    """Return the cluster of each face, (n,) int64 from 0."""
    from scipy.sparse import coo_matrix

    count = len(vectors)
    sums, sizes = vectors.copy(), np.ones(count)
    graph = coo_matrix((np.ones(len(first), dtype=np.int8), (first, second)), shape=(count, count)).tocsr()
    graph = graph + graph.T
    neighbours: dict[int, np.ndarray] = {}  # of clusters that have grown, when they last did
    grown = [0] * count  # the turn of a cluster's last growth, -1 = gone; it has the number of one of its faces
    into = np.arange(count)
    excess = cosines - thresholds[0, 0]  # float64
    heap: list[tuple[float, int, int, int]] = []  # of each list of pairs the next one, with the turn that made it

    def pairs_of_faces() -> Iterator[tuple[float, int, int, int]]:
        for high, low in pairwise([np.inf, *np.linspace(excess.max(initial=0.0), 0, _PARTS)]):
            part = np.flatnonzero((excess >= low) & (excess < high))
            alone = (sizes == 1) & (into == np.arange(count))
            part = part[alone[first[part]] & alone[second[part]]]
            part = part[np.lexsort((second[part], first[part], -excess[part]))]
            yield from _in_order(-excess[part], first[part], second[part], 0)

    lists = {0: pairs_of_faces()}

    def stands(one: int, other: int, turn: int) -> bool:
        return grown[one] >= 0 <= grown[other] and max(grown[one], grown[other]) == turn  # neither has grown or gone since

    def push_next(turn: int) -> None:
        if entry := next((entry for entry in lists.get(turn, ()) if stands(*entry[1:])), None):
            heapq.heappush(heap, entry)

    push_next(0)
    last = 0
    for _ in progress(iter(lambda: len(heap), 0), None, "joining", "pair"):
        _, one, other, turn = heapq.heappop(heap)
        push_next(turn)
        if not stands(one, other, turn):
            continue
        sums[one] += sums[other]
        sizes[one] += sizes[other]
        parts = (neighbours.pop(face, graph.indices[graph.indptr[face] : graph.indptr[face + 1]]) for face in (one, other))
        near = np.concatenate([*parts])
        for old in {grown[one], grown[other]} - {0}:
            del lists[old]
        last += 1
        grown[one], grown[other], into[other] = last, -1, one
        while (into[near] != near).any():
            near = into[near]
        near = np.unique(near)
        neighbours[one] = near = near[near != one]
        limits = thresholds[_classes(sizes[one], thresholds), _classes(sizes[near], thresholds)]
        above = sums[near] @ sums[one] / (sizes[near] * sizes[one]) - limits
        order = np.flatnonzero(above >= 0)
        order = order[np.argsort(-above[order], kind="stable")]
        lists[last] = _in_order(-above[order], np.minimum(one, near[order]), np.maximum(one, near[order]), last)
        push_next(last)
    while (into != into[into]).any():
        into = into[into]
    return np.unique(into, return_inverse=True)[1]


def _in_order(keys: np.ndarray, low: np.ndarray, high: np.ndarray, turn: int) -> Iterator[tuple[float, int, int, int]]:
    """Yield what is in the heap, from arrays, which take a tenth of the memory."""
    for begin in range(0, len(keys), _ENTRIES):
        part = slice(begin, begin + _ENTRIES)
        yield from zip(keys[part].tolist(), low[part].tolist(), high[part].tolist(), repeat(turn))


def _means(
    vectors: np.ndarray, found: np.ndarray, first: np.ndarray, second: np.ndarray, thresholds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `own`, `other` and `sure` of `Clusters`."""
    sizes = np.bincount(found)
    limits = thresholds[0, _classes(sizes, thresholds)]  # of a face and a cluster
    totals = torch.zeros(len(sizes), vectors.shape[1], dtype=torch.float64)  # np.add.at takes seven times as long
    for begin in range(0, len(found), _COLUMNS):
        part = slice(begin, begin + _COLUMNS)
        totals.index_add_(0, torch.from_numpy(found[part]), torch.from_numpy(vectors[part]).double())
    sums = totals.numpy()
    own, other = np.full(len(found), -1.0), np.full(len(found), -1.0)
    for begin in range(0, len(found), _COLUMNS):
        part = slice(begin, begin + _COLUMNS)
        wide = vectors[part].astype(np.float64)
        rest = (wide * (sums[found[part]] - wide)).sum(axis=1)
        own[part] = np.where(sizes[found[part]] > 1, rest / np.maximum(1, sizes[found[part]] - 1), -1.0)
    sure = own >= thresholds[0, _classes(sizes[found] - 1, thresholds)]
    across = found[first] != found[second]
    rows = np.concatenate([first[across], second[across]])
    theirs = np.concatenate([found[second[across]], found[first[across]]])
    for begin in range(0, len(rows), _COLUMNS):
        row, their = rows[begin : begin + _COLUMNS], theirs[begin : begin + _COLUMNS]
        means = (vectors[row] * sums[their]).sum(axis=1) / sizes[their]
        np.maximum.at(other, row, means)
        sure[row[means >= limits[their]]] = False
    return own, other, sure


class Agreement(NamedTuple):
    """How clusters agree with people; all are shares."""

    bcubed_precision: float  # of the faces in a face's cluster, those of its person, on average
    bcubed_recall: float  # of the faces of a face's person, those in its cluster, on average
    bcubed_f: float
    pairwise_f: float  # of pairs of faces
    merging: float  # of the clusters with several faces, those with several people


def agreement(labels: np.ndarray, people: np.ndarray) -> Agreement:
    """Return how a partition agrees with people, both (n,) int64 from 0, by the faces that clusters and people share."""
    in_cluster, of_person = np.bincount(labels), np.bincount(people)
    keys, shared = np.unique(labels * len(of_person) + people, return_counts=True)
    cells = np.divmod(keys, len(of_person))
    weights = shared.astype(np.float64) ** 2 / len(labels)
    precision, recall = float((weights / in_cluster[cells[0]]).sum()), float((weights / of_person[cells[1]]).sum())
    both, clustered, same = ((counts * (counts - 1.0)).sum() for counts in (shared, in_cluster, of_person))
    several = in_cluster[in_cluster > 1]
    merging = np.bincount(cells[0])[in_cluster > 1] > 1
    return Agreement(
        precision,
        recall,
        2 * precision * recall / (precision + recall),
        float(2 * both / (clustered + same)) if clustered + same else 1.0,
        float(merging.mean()) if len(several) else 0.0,
    )


_SHOWN, _EACH = 16, 8  # rows of a sheet, and pictures of a row
_SHEETS = {
    "Largest clusters": "The face that is most like the others of its cluster, and then those that are least like them.",
    "Least sure faces with company": "A face, and those of its cluster that are most like the others.",
}


def write_page(path: Path, title: str, found: Clusters, dataset: FaceDataset, indices: np.ndarray, facts: Facts) -> None:
    """Write the page, with facts at its top; `indices` (n,) are those of the faces in the set."""
    order = np.lexsort((indices, -found.own, found.labels))
    clusters = np.split(order, np.flatnonzero(np.diff(found.labels[order])) + 1)
    doubtful = np.flatnonzero(~found.sure & (found.own >= 0))
    doubtful = doubtful[np.lexsort((indices[doubtful], (found.own - found.other)[doubtful]))]
    rows = (
        [(rows[0], *rows[:0:-1][: _EACH - 1]) for rows in clusters[:_SHOWN]],
        [(row, *(one for one in clusters[found.labels[row]][:_EACH] if one != row)) for row in doubtful[:_SHOWN]],
    )
    page = Page(title)
    page.facts(facts)
    for (heading, meaning), sheet in zip(_SHEETS.items(), rows, strict=True):
        page.section(heading)
        page.text(meaning)
        if sheet:
            cells = [[_cell(found, dataset, indices, int(row)) for row in line] for line in sheet]
            page.picture(captioned_sheet(cells), "index in the set; cluster, and mean cosine with its other faces")
    page.write(path)


def _cell(found: Clusters, dataset: FaceDataset, indices: np.ndarray, row: int) -> tuple[np.ndarray | None, tuple[str, str]]:
    return dataset.picture(int(indices[row])), (str(indices[row]), f"{found.labels[row]}: {found.own[row]:.3f}")
