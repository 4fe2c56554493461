"""Counts the cosines of all pairs of faces in a fine histogram, in blocks of matrix products; rates at thresholds from it.

A matrix product of two blocks of rows gives the cosines of their pairs. Rows are sorted by group and person, so a product has a
rectangle for each two groups, which is counted by itself, and the genuine pairs of a rectangle are short runs of each row. They
are read from the same product, and counted apart, so that no pair is lost or counted twice. A cosine is scaled by a power of
two, which is exact, and its floor is its bin. So each pair is in the bin of its cosine as float32 computes it; the rounding of
that, about 1e-7, may depend on the block, and move a pair to the next bin.
Shapes: n = faces, D = embedding size, G = groups, B = bins, T = thresholds.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from deploy.journal import Journal
from eval.embedding_table import Faces
from eval.report import POINT_COLUMNS, point_rows
from eval.verification import OperatingPoint, equal_rate
from utils.cli import Advance, progress
from utils.files import write_file
from utils.parallel import map_in_order, torch_threads
from utils.report import Facts, Page, ReadPixels, make_figure, png_of, sheet
from utils.text import one_line

from .intervals import Spread, make_rate

# a bin is 3e-5 wide. Where a small share f of impostor pairs is above a cosine, this share changes by a factor e within about
# 0.01 (a normal distribution of 512 dimensions at f = 1e-8), so that an edge is within 1 % of any f
NUM_BINS = 1 << 16
_MOST_BINS = 1 << 22  # whose numbers are exact in float32
_LARGEST = 1 << 28  # counts of all groups together: 2 GiB
ROWS = {"cpu": 1024, "cuda": 8192}  # of a block; on a processor the bins of a product stay near its cache
_PERSON_ROWS = 512  # of a person, that are compared with as many at once, where genuine pairs alone are
_STRIPE = 8  # blocks that are multiplied with all later ones before the counts are saved
_BELOW = 2.0**-40  # a threshold is so much below an edge: a pair is accepted above a threshold, and a bin holds its lower edge


class Extremes(NamedTuple):
    """Pairs of one kind, the most wrong first; of equal ones that with the lower rows."""

    cosines: np.ndarray  # (k,) float64
    first: np.ndarray  # (k,) int64, the lower row
    second: np.ndarray  # (k,) int64


class PairCounts(NamedTuple):
    """How many pairs have a cosine in each bin."""

    edges: np.ndarray  # (B + 1,) float64, ascending; bin b holds edges[b] <= cosine < edges[b + 1], the last one also its end
    genuine: np.ndarray  # (G, B) int64, pairs of one person in group g; one person in two groups is counted nowhere
    impostor: np.ndarray  # (G, G, B) int64, pairs of two people of groups g <= h; the rest is 0
    lookalikes: Extremes  # impostor pairs of the highest cosines
    strangers: Extremes  # genuine pairs of the lowest cosines


class _Part(NamedTuple):
    """Rows of a block that are of one group."""

    begin: int  # of the sorted rows
    end: int
    group: int


_Block = list[_Part]  # consecutive parts


class _Counter:
    """Counts the pairs of two blocks at a time, and keeps the `worst` of each kind; `count` may run in several threads."""

    def __init__(self, vectors: np.ndarray, labels: np.ndarray, groups: np.ndarray, num_bins: int, worst: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._vectors, self._num_bins, self._worst = vectors, num_bins, worst
        self._order = np.lexsort((labels, groups))
        self._labels, groups = labels[self._order], groups[self._order]
        rows = ROWS[self.device.type]
        cuts = np.union1d(np.flatnonzero(np.diff(groups)) + 1, np.arange(0, len(groups), rows)).tolist()
        self.blocks: list[_Block] = [[] for _ in range(0, len(groups), rows)]
        for begin, end in zip(cuts, [*cuts[1:], len(groups)], strict=True):
            self.blocks[begin // rows].append(_Part(begin, end, int(groups[begin])))
        num_groups = int(groups[-1]) + 1
        self.genuine = np.zeros((num_groups, num_bins), dtype=np.int64)
        self.impostor = np.zeros((num_groups, num_groups, num_bins), dtype=np.int64)
        self.extremes = [np.zeros((0, 3))] * 2  # of impostor and genuine pairs: cosine or its negative, and the two rows

    def load(self, block: _Block, scale: float = 1.0) -> torch.Tensor:
        """Return the vectors of a block, times a scale."""
        rows = np.ascontiguousarray(self._vectors[self._order[block[0].begin : block[-1].end]], dtype=np.float32)
        return torch.from_numpy(rows).to(self.device).mul_(scale)

    def count(self, stripe: Sequence[tuple[_Block, torch.Tensor]], second: _Block) -> list[tuple]:
        """Return what `add` takes, for the pairs of a block and of those of a stripe (times B / 2) that are not after it."""
        right, found = self.load(second), []
        for first, left in stripe:
            if first[0].begin <= second[0].begin:
                cosines = left @ right.T
                for one in first:
                    rows = cosines[one.begin - first[0].begin : one.end - first[0].begin]
                    for other in second:
                        if one.begin <= other.begin:
                            part = rows[:, other.begin - second[0].begin : other.end - second[0].begin].contiguous()
                            found.append(self._count(part, one, other))
        return found

    def _count(self, cosines: torch.Tensor, first: _Part, second: _Part) -> tuple:
        num_bins = self._num_bins
        table = cosines.floor().add_(num_bins // 2 + 1).clamp_(1, num_bins).to(torch.int32)
        if first == second:
            table.triu_(1)  # bin 0 is for what does not count here
        cosines, bins = cosines.view(-1), table.view(-1)
        same = self._genuine_cells(first, second)
        own, own_bins = cosines[same], bins[same]
        bins[same] = 0
        found = torch.bincount(bins, minlength=num_bins + 1)[1:].cpu().numpy()
        extremes = [np.zeros((0, 3))] * 2
        if self._worst:
            limit = self._limit(0)
            # the bin above which the most similar pairs of this block are, and those that others have found so far
            enough = num_bins - 1 - int(np.searchsorted(found[::-1].cumsum()[:-1], self._worst))
            lowest = max(enough, int(np.clip(limit * num_bins / 2 + num_bins // 2, 0, num_bins - 1)))
            if found[lowest:].any():
                cells = torch.nonzero(bins > lowest).view(-1)
                extremes[0] = self._rows(cosines[cells], cells, first, second, limit)
            if first.group == second.group:
                extremes[1] = self._rows(-own, same, first, second, self._limit(1))
        genuine = None
        if len(same) and first.group == second.group:
            genuine = torch.bincount(own_bins, minlength=num_bins + 1)[1:].cpu().numpy()
        filled = np.flatnonzero(found)  # of many small groups, most bins are empty
        return first.group, second.group, filled, found[filled], genuine, extremes

    def _genuine_cells(self, first: _Part, second: _Part) -> torch.Tensor:
        """Return the places, in the flattened product of two parts, of pairs of one person."""
        rows, columns = self._labels[first.begin : first.end], self._labels[second.begin : second.end]
        if rows[-1] < columns[0] or columns[-1] < rows[0]:
            return torch.zeros(0, dtype=torch.int64, device=self.device)
        begins, ends = np.searchsorted(columns, rows, "left"), np.searchsorted(columns, rows, "right")
        if first == second:
            begins = np.arange(1, len(rows) + 1)
        lengths = ends - begins
        starts = np.cumsum(lengths) - lengths  # of each row's run in the list of all cells
        cells = np.repeat(np.arange(len(rows)) * len(columns) + begins - starts, lengths) + np.arange(lengths.sum())
        return torch.from_numpy(cells).to(self.device)

    def _limit(self, kind: int) -> float:
        """Return what the value of a pair must reach to be among the extreme ones."""
        known = self.extremes[kind]
        return float(known[-1, 0]) if len(known) == self._worst else -np.inf

    def _rows(self, values: torch.Tensor, cells: torch.Tensor, first: _Part, second: _Part, limit: float) -> np.ndarray:
        """Return the most extreme of some cells of a product, as `extremes` has them."""
        found = values.double().cpu().numpy() * (2 / self._num_bins)
        kept = found >= limit
        places = np.divmod(cells.cpu().numpy()[kept], second.end - second.begin)
        pair = np.stack([self._order[first.begin + places[0]], self._order[second.begin + places[1]]])
        return self._most(np.stack([found[kept], pair.min(axis=0), pair.max(axis=0)], axis=1))

    def _most(self, rows: np.ndarray) -> np.ndarray:
        return rows[np.lexsort((rows[:, 2], rows[:, 1], -rows[:, 0]))[: self._worst]]

    def add(self, tile: tuple) -> int:
        """Add what `count` found of two parts of groups first <= second; return the number of pairs."""
        first, second, bins, found, genuine, extremes = tile
        self.impostor[first, second, bins] += found
        if genuine is not None:
            self.genuine[first] += genuine
        for kind, rows in enumerate(extremes):
            if len(rows):
                self.extremes[kind] = self._most(np.concatenate([self.extremes[kind], rows]))
        return int(found.sum()) + (0 if genuine is None else int(genuine.sum()))


def count_pairs(
    vectors: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray | None = None,
    num_bins: int = NUM_BINS,
    worst: int = 0,
    journal: Journal | None = None,
    advance: Advance = int,
) -> PairCounts:
    """Count every unordered pair of different rows once. Memory: the counts, and some blocks of rows for each thread.

    Args:
        vectors: (n, D) float32 of length 1, also a memory map.
        labels: (n,) int64, the people.
        groups: (n,) int64 from 0; None = one group.
        num_bins: between the cosines -1 and 1, a power of two.
        worst: number of pairs of each kind to keep as `lookalikes` and `strangers`.
        journal: begun; what it has is not counted again.
        advance: is called with the number of pairs that were counted, such as `update` of a bar.

    Raises:
        ValueError: of shapes, groups or bins that do not fit.
    """
    groups = np.zeros(len(labels), dtype=np.int64) if groups is None else groups
    if vectors.ndim != 2 or not len(vectors) or not vectors.shape[:1] == labels.shape == groups.shape or groups.min() < 0:
        raise ValueError(
            "all pairs are counted of vectors (n, D), labels (n,) and groups (n,) from 0, "
            f"got {vectors.shape}, {labels.shape} and {groups.shape}"
        )
    if not 2 <= num_bins <= _MOST_BINS or num_bins & (num_bins - 1):
        raise ValueError(f"the number of bins must be a power of two from 2 to {_MOST_BINS}, got {num_bins}")
    num_groups = int(groups.max()) + 1
    if num_groups**2 * num_bins > _LARGEST:
        most = int((_LARGEST / num_bins) ** 0.5)
        raise ValueError(f"{num_groups} groups are too many for {num_bins} bins, which {most} may have; join small groups")
    counter = _Counter(vectors, labels, groups, num_bins, worst)
    threads = 1 if counter.device.type == "cuda" else torch.get_num_threads()
    begin = _restore(counter, journal)
    advance(int(counter.genuine.sum() + counter.impostor.sum()))
    with torch_threads(1):  # each thread has a product of its own: a histogram takes one thread, and all are to have work
        for start in range(begin, len(counter.blocks), _STRIPE):
            stripe = [(block, counter.load(block, num_bins / 2)) for block in counter.blocks[start : start + _STRIPE]]
            for tiles in map_in_order(partial(counter.count, stripe), counter.blocks[start:], threads, ahead=2):
                for tile in tiles:
                    advance(counter.add(tile))
            if journal is not None:
                _save(counter, journal, start, start + _STRIPE)
    nearest, farthest = counter.extremes
    return PairCounts(
        np.linspace(-1.0, 1.0, num_bins + 1),
        counter.genuine,
        counter.impostor,
        Extremes(nearest[:, 0], *nearest[:, 1:].T.astype(np.int64)),
        Extremes(-farthest[:, 0], *farthest[:, 1:].T.astype(np.int64)),
    )


def _save(counter: _Counter, journal: Journal, start: int, end: int) -> None:
    """Append the counts of the groups of the blocks from `start` to `end`, which are in the first group of their pairs."""
    first, last = counter.blocks[start][0].group, counter.blocks[start:end][-1][-1].group
    data = counter.genuine[first : last + 1].tobytes() + counter.impostor[first : last + 1].tobytes()
    extremes = [rows.tolist() for rows in counter.extremes]
    journal.add({"blocks": end, "groups": [first, last + 1], "extremes": extremes}, zlib.compress(data, 1))


def _restore(counter: _Counter, journal: Journal | None) -> int:
    """Take the counts that a journal has; return the number of blocks that are done."""
    done = 0
    for entry in journal.entries if journal else ():
        if "groups" not in entry.record:
            continue
        data = journal.data(entry) if journal else None
        if data is None:
            break
        part = slice(*entry.record["groups"])
        genuine, impostor = counter.genuine[part], counter.impostor[part]  # views
        counts = np.frombuffer(zlib.decompress(data), dtype=np.int64)
        genuine[:] = counts[: genuine.size].reshape(genuine.shape)
        impostor[:] = counts[genuine.size :].reshape(impostor.shape)
        counter.extremes = [np.array(rows).reshape(-1, 3) for rows in entry.record["extremes"]]
        done = int(entry.record["blocks"])
    return done


def genuine_pairs(vectors: np.ndarray, labels: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield blocks of the genuine pairs of one person: rows of the two pictures (k,) int64, and their cosines (k,) float32."""
    order = np.argsort(labels, kind="stable")
    people = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    with progress([], sum(len(rows) * (len(rows) - 1) // 2 for rows in people), "genuine pairs", "pair") as bar:
        for rows in people:
            for begin in range(0, len(rows) if len(rows) > 1 else 0, _PERSON_ROWS):
                left = rows[begin : begin + _PERSON_ROWS]
                for other in range(begin, len(rows), _PERSON_ROWS):
                    right = rows[other : other + _PERSON_ROWS]
                    first, second = np.triu_indices(len(left), 1 + begin - other, len(right))  # later rows alone
                    if len(first):
                        yield left[first], right[second], (vectors[left] @ vectors[right].T)[first, second]
                        bar.update(len(first))


def accepted_at(counts: np.ndarray, edges: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return how many pairs are above each cosine, (..., T) int64, from counts (..., B) and edges (B + 1,).

    A threshold counts as the next edge that is not below it, so as one that is higher by less than a bin's width.
    """
    above = np.append(counts[..., ::-1].cumsum(axis=-1)[..., ::-1], np.zeros((*counts.shape[:-1], 1), dtype=np.int64), axis=-1)
    return above[..., np.minimum(np.searchsorted(edges, thresholds), len(edges) - 1)]


def points_at(genuine: np.ndarray, impostor: np.ndarray, edges: np.ndarray, targets: Sequence[str]) -> list[OperatingPoint]:
    """Return a point for each FAR, from counts (B,): the lowest edge at which the FAR is not above it.

    So the FAR at the threshold is exact, and lower than the target by at most what one bin holds.
    """
    points = []
    above = accepted_at(np.stack([impostor, genuine]), edges, edges)
    for target in targets:
        allowed = int(above[0, 0] * float(target) + 1e-9)  # 1e-9: 10 * 0.1 must not fall below 1
        if not allowed or not above[1, 0]:
            points.append(OperatingPoint(target, None, None, None, 0))
            continue
        place = int(np.argmax(above[0] <= allowed))
        far, tar = above[:, place] / above[:, 0]
        points.append(OperatingPoint(target, float(tar), float(far), 2 - 2 * (edges[place] - _BELOW), int(above[0, place])))
    return points


# ---- what all pairs of a table say: results.json, pictures, and a page

FAR_TARGETS = tuple(f"1e-{power}" for power in range(1, 9))
_SHOWN_BINS = 64  # of the histogram in results.json
_INTERVALS = (
    "The intervals are of the TAR at this threshold, by the variance over people, because pairs share people. The error of the "
    "threshold itself is not in them: a FAR of a few accepted pairs, or of few people, is a guess."
)
EXTREMES = {
    "lookalikes": "The most similar pictures of two people. Wrong labels come first here: look before you believe a low FAR.",
    "strangers": "The least similar pictures of one person. Wrong labels and pictures without a face come first here.",
}


class Rates(NamedTuple):
    """Rates over all pairs; None where there is no pair of a kind."""

    num_genuine: int
    num_impostor: int
    points: list[OperatingPoint]
    eer: float | None
    auc: float | None  # equal cosines, here those of one bin, count half
    intervals: dict[str, tuple[float, float] | None]  # 95 %, of the TAR by its target


def rates_of(counts: PairCounts, vectors: np.ndarray, labels: np.ndarray) -> Rates:
    """Return the rates of all groups together, from the counts of vectors (n, D) with labels (n,)."""
    genuine, impostor = counts.genuine.sum(axis=0), counts.impostor.sum(axis=(0, 1))
    totals = int(genuine.sum()), int(impostor.sum())
    points = points_at(genuine, impostor, counts.edges, FAR_TARGETS)
    intervals: dict[str, tuple[float, float] | None] = dict.fromkeys(FAR_TARGETS)
    if not all(totals):
        return Rates(*totals, points, None, None, intervals)
    above = accepted_at(np.stack([genuine, impostor]), counts.edges, counts.edges)
    rejected, accepted = 1 - above[0] / totals[0], above[1] / totals[1]
    auc = (genuine / totals[0] * (1 - above[1, 1:] / totals[1] - impostor / totals[1] / 2)).sum()
    measured = [(point.target, point.cosine, point.tar) for point in points if point.cosine is not None]
    spreads = genuine_spreads(vectors, labels, [cosine for _, cosine, _ in measured])
    for (target, _, tar), spread in zip(measured, spreads, strict=True):
        wrong = round(totals[0] * (1 - (tar or 0.0)))
        fnmr = make_rate(wrong, totals[0], 0.0, spread, spread.people)
        intervals[target] = 1 - fnmr.high, 1 - fnmr.low
    return Rates(*totals, points, equal_rate(accepted[::-1], rejected[::-1]), float(auc), intervals)


def genuine_spreads(vectors: np.ndarray, labels: np.ndarray, edges: Sequence[float]) -> list[Spread]:
    """Return what each person contributes to FNMR at each edge: the pairs of one person whose cosine is below it, and all."""
    counts = np.bincount(labels)
    several = counts > 1
    errors = np.zeros((len(edges), len(counts)), dtype=np.int64)
    for first, _, cosines in genuine_pairs(vectors, labels):
        errors[:, labels[first[0]]] += [np.count_nonzero(cosines < edge) for edge in edges]
    pairs = counts * (counts - 1) // 2
    return [Spread(wrong[several], pairs[several], int(several.sum())) for wrong in errors]


def as_json(name: str, counts: PairCounts, rates: Rates) -> dict[str, Any]:
    """Return the rates in the form of an evaluation's results.json, so that galleries find thresholds in it."""
    width = len(counts.edges[1:]) // _SHOWN_BINS or 1
    kinds = {"genuine": counts.genuine.sum(axis=0), "impostor": counts.impostor.sum(axis=(0, 1))}
    histogram = {kind: values.reshape(-1, width).sum(axis=1).tolist() for kind, values in kinds.items()}
    return {
        name: {
            "eer": rates.eer,
            "auc": rates.auc,
            "num_genuine": rates.num_genuine,
            "num_impostor": rates.num_impostor,
            "intervals_95": rates.intervals,
            "operating_points": [point.as_json() for point in rates.points],
            "similarities": {"cosine": counts.edges[::width].tolist(), **histogram},
        }
    }


def draw(counts: PairCounts, rates: Rates) -> bytes:
    """Draw the ROC curve down to one accepted impostor pair, and how many pairs have which cosine."""
    figure = make_figure(11, 4.2, layout="constrained")
    roc, shares = figure.subplots(1, 2)
    kinds = {"genuine pairs": counts.genuine.sum(axis=0), "impostor pairs": counts.impostor.sum(axis=(0, 1))}
    above = [accepted_at(values, counts.edges, counts.edges) / max(1, values.sum()) for values in kinds.values()]
    shown = above[1] > 0
    roc.step(above[1][shown], above[0][shown], where="pre", color="tab:blue")
    roc.set(xscale="log", xlabel="FAR", ylabel="TAR", title="ROC over all pairs", ylim=(None, 1.005))
    roc.grid(alpha=0.3, which="both")
    width = max(1, len(counts.edges[1:]) // 256)
    centres = (counts.edges[:-1:width] + counts.edges[width::width]) / 2
    for (kind, values), colour in zip(kinds.items(), ("tab:blue", "tab:gray"), strict=True):
        share = values.reshape(-1, width).sum(axis=1) / max(1, values.sum())
        shares.fill_between(centres, share, step="mid", alpha=0.5, color=colour, label=kind)
    for point in (point for point in rates.points if point.cosine is not None):
        shares.axvline(point.cosine, color="black", linewidth=0.7, linestyle=":")
    filled = np.flatnonzero(counts.genuine.sum(axis=0) + counts.impostor.sum(axis=(0, 1)))
    limits = tuple(counts.edges[filled[[0, -1]]] + [-0.02, 0.02])
    shares.set(xlabel="cosine; dotted: the thresholds", ylabel="share of the pairs", xlim=limits, title="Cosines")
    shares.set_yscale("log")
    shares.legend(loc="upper right", fontsize=8)
    return png_of(figure)


def write_pairs(
    out: Path, title: str, name: str, counts: PairCounts, faces: Faces, labels: np.ndarray, facts: Facts, read: ReadPixels
) -> Rates:
    """Write results.json, pairs.png and report.html into a folder; return the rates.

    Args:
        name: of the set in results.json.
        labels: (n,) int64, the people of the faces.
        facts: for the top of the page.
        read: the pixels of a picture by its name, for the pairs that are most wrong; None = name them only.
    """
    rates = rates_of(counts, faces.vectors, labels)
    write_file(out / "results.json", json.dumps(as_json(name, counts, rates), indent=1) + "\n")
    page = Page(title)
    page.facts([*facts, ("EER", "-" if rates.eer is None else f"{100 * rates.eer:.3f} %")])
    page.section("TAR at FAR")
    page.table(POINT_COLUMNS, point_rows(name, rates.points, rates.intervals))
    page.text(_INTERVALS, note=True)
    if rates.num_genuine or rates.num_impostor:
        png = draw(counts, rates)
        write_file(out / "pairs.png", png)
        page.picture(png, "ROC curve, and the cosines of genuine and impostor pairs")
    for kind, meaning in EXTREMES.items():
        show_extremes(page, kind, meaning, getattr(counts, kind), faces.names, read)
    page.write(out / "report.html")
    return rates


def show_extremes(page: Page, kind: str, meaning: str, found: Extremes, names: Sequence[str], read: ReadPixels) -> None:
    """Add a section with the pairs of pictures; `read` returns the pixels of a picture by its name, None = names alone."""
    page.section(kind.capitalize())
    page.text(meaning)
    pairs = zip(*(part.tolist() for part in found), strict=True)
    rows = [(f"{cosine:.4f}", *(names[row] for row in pair)) for cosine, *pair in pairs]
    if read is not None and rows:
        cells = [("  ".join(map(one_line, row)), [read(name) for name in row[1:]]) for row in rows]
        page.picture(sheet(cells, 3, across=min(4, len(cells))), f"{kind}: cosine, and names")
    page.table(("cosine", "picture", "other picture"), [tuple(map(one_line, row)) for row in rows])
