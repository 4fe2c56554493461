"""Writes what all pairs of a table say: results.json, pictures, and a page."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eval.embedding_table import Faces
from eval.report import POINT_COLUMNS, point_rows
from eval.verification import OperatingPoint, equal_rate
from utils.files import write_file
from utils.report.contact_sheet import make_figure, png_of, sheet
from utils.report.page import Page
from utils.text import one_line

from .all_pairs import Extremes, PairCounts, accepted_at, genuine_pairs, points_at
from .intervals import Spread, make_rate

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
    out: Path,
    title: str,
    name: str,
    counts: PairCounts,
    faces: Faces,
    labels: np.ndarray,
    facts: Sequence[tuple[str, str]],
    read: Callable[[str], np.ndarray] | None,
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


def show_extremes(
    page: Page, kind: str, meaning: str, found: Extremes, names: Sequence[str], read: Callable[[str], np.ndarray] | None
) -> None:
    """Add a section with the pairs of pictures; `read` returns the pixels of a picture by its name, None = names alone."""
    page.section(kind.capitalize())
    page.text(meaning)
    pairs = zip(*(part.tolist() for part in found), strict=True)
    rows = [(f"{cosine:.4f}", *(names[row] for row in pair)) for cosine, *pair in pairs]
    if read is not None and rows:
        cells = [("  ".join(map(one_line, row)), [read(name) for name in row[1:]]) for row in rows]
        page.picture(sheet(cells, 3, across=min(4, len(cells))), f"{kind}: cosine, and names")
    page.table(("cosine", "picture", "other picture"), [tuple(map(one_line, row)) for row in rows])
