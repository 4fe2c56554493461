"""The results on a model card: numbers with intervals, thresholds, curves, and where the errors can be looked at."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.report.contact_sheet import set_colours
from utils.report.figure import make_figure, png_of
from utils.text import label_text

from ..results_file import Interval, Point, SetResult
from .document import Document

Results = Mapping[str, SetResult]
_NUMBERS = ("set", "genuine pairs", "impostor pairs", "accuracy %", "95 % interval", "EER %", "95 % interval", "AUC")
_POINTS = ("set", "FAR at most", "cosine threshold", "TAR %", "95 % interval", "FAR measured", "impostor pairs accepted")
_MOST_PANELS = 12  # histograms that are drawn


def add_results(document: Document, results: Results, found_in: Path | str) -> None:
    """Add the sections of the results; without any, the reason.

    Args:
        found_in: the folder of their file; a sentence that says why there are no results.
    """
    document.section("Results")
    if isinstance(found_in, str):
        document.text(found_in)
        return
    document.text(
        "Verification: do two images show the same person? Accuracy is the mean over ten folds. EER is the rate at which FAR "
        "equals the share of rejected genuine pairs. The intervals take the pairs as independent; pairs that share a person "
        "are not, so the true intervals are somewhat wider."
    )
    document.table(_NUMBERS, [_numbers_row(result) for result in results.values()])
    _add_notes(document, results)
    document.section("Thresholds")
    document.text(
        "A pair is accepted if its cosine is above the threshold. TAR is the share of the genuine pairs that are accepted, FAR "
        "that of the impostor pairs. Choose the FAR that your use tolerates, and the set that resembles it most."
    )
    document.table(_POINTS, [row for result in results.values() for row in _point_rows(result)])
    few = [
        f"{result.name} has {result.num_impostor:,} impostor pairs"
        for result in results.values()
        if result.num_impostor is not None and any(point.cosine is None for point in result.points)
    ]
    if few:
        document.text(f"- : not measurable. A FAR of F needs 1 / F impostor pairs: {'; '.join(few)}.")
    if any(result.roc[0] for result in results.values()):
        document.picture("card_roc.png", draw_roc(results), "ROC: accepted genuine pairs against accepted impostor pairs")
    if any(result.histogram for result in results.values()):
        words = "cosines of genuine and impostor pairs; errors are where they overlap"
        document.picture("card_similarities.png", draw_similarities(results), words)
    _add_errors(document, results, found_in)


def _add_errors(document: Document, results: Results, folder: Path) -> None:
    """Say where the pictures of the worst errors are; they show people, and so are not on the card."""
    document.section("Errors")
    names = [f"{name}_{kind}.png" for name in results for kind in ("false_matches", "false_non_matches")]
    found = [name for name in names if Path(name).name == name and os.path.isfile(folder / name)]  # False for too long a name
    if not found:
        document.text("python -m eval --report draws the worst errors of each set, as pictures beside its results.json.")
        return
    document.text(
        f"The worst errors are drawn beside results.json: {', '.join(found)}. In false matches the network takes two people "
        "for one, in false non-matches one person for two. The pictures show people, so they are not on this card."
    )


def _numbers_row(result: SetResult) -> tuple[object, ...]:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.2f}"

    genuine, impostor = ("-" if count is None else count for count in (result.num_genuine, result.num_impostor))
    accuracy, eer = (_range(result.intervals.get(key)) for key in ("accuracy", "eer"))
    auc = "-" if result.auc is None else f"{result.auc:.4f}"
    return result.name, genuine, impostor, percent(result.accuracy), accuracy, percent(result.eer), eer, auc


def _add_notes(document: Document, results: Results) -> None:
    one_kind = [result.name for result in results.values() if 0 in (result.num_genuine, result.num_impostor)]
    if one_kind:
        document.text(f"- : not measurable; {', '.join(one_kind)} has pairs of one kind only.")
    bare = [result.name for result in results.values() if "accuracy" not in result.intervals]
    if bare:
        document.text(f"No intervals in the file: {', '.join(bare)}. python -m eval --report writes them.")


def _point_rows(result: SetResult) -> list[tuple[object, ...]]:
    """Return a row for each FAR that can be measured, and one for the rest."""
    rows: list[tuple[object, ...]] = []
    for point in result.points:
        if point.cosine is None or point.tar is None or point.far is None:
            rows.append((result.name, f"{point.target} and less", *["-"] * 5))
            break
        rows.append(_point_row(result.name, point, point.cosine, point.tar, point.far))
    return rows


def _point_row(name: str, point: Point, cosine: float, tar: float, far: float) -> tuple[object, ...]:
    return name, point.target, f"{cosine:.4f}", f"{100 * tar:.2f}", _range(point.interval), f"{far:.2e}", point.num_accepted


def _range(interval: Interval | None) -> str:
    return "-" if interval is None else f"{100 * interval[0]:.2f} to {100 * interval[1]:.2f}"


def draw_roc(results: Results) -> bytes:
    """Return a PNG of the ROC curves."""
    figure = make_figure(6.4, 4.2, layout="constrained")
    axis, colours = figure.subplots(), set_colours(results)
    for name, result in results.items():
        far, tar = result.roc
        if far:
            axis.step(far, tar, where="post", color=colours[name], label=label_text(name[:60]))
    axis.set(xscale="log", xlim=(_lowest_far(results), 1), xlabel="FAR", ylabel="TAR", ylim=(0, 1.02), title="ROC")
    axis.grid(alpha=0.3, which="both")
    axis.legend(loc="lower right", fontsize=8)
    return png_of(figure)


def _lowest_far(results: Results) -> float:
    """Return where the axis begins: the smallest FAR above 0 of all curves."""
    return min([0.1, *(value for result in results.values() for value in result.roc[0] if value > 1e-12)])


def draw_similarities(results: Results) -> bytes:
    """Return a PNG of the histograms of genuine and impostor pairs, with the strictest threshold that can be measured."""
    drawn = [result for result in results.values() if result.histogram][:_MOST_PANELS]
    colours, columns = set_colours(results), min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    figure = make_figure(4.2 * columns, 3.2 * rows, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, result in zip(axes, drawn, strict=False):
        _draw_histogram(axis, result, colours[result.name])
    for axis in axes[len(drawn) :]:
        axis.set_visible(False)
    return png_of(figure)


def _draw_histogram(axis: Any, result: SetResult, colour: str) -> None:
    assert result.histogram is not None
    edges, genuine, impostor = result.histogram
    for counts, name, tint in ((impostor, "impostor pairs", "tab:gray"), (genuine, "genuine pairs", colour)):
        axis.stairs(counts, edges, fill=True, alpha=0.6, color=tint, label=name)
    measured = [point for point in result.points if point.cosine is not None]
    if measured:
        label = f"FAR {label_text(measured[-1].target)}: cosine {measured[-1].cosine:.3f}"
        axis.axvline(measured[-1].cosine, color="black", linestyle="--", linewidth=1, label=label)
    axis.set(xlabel="cosine", ylabel="pairs", title=label_text(result.name[:40]))
    axis.set_ylim(top=1.4 * max(1, *genuine, *impostor))  # room for the legend
    axis.legend(loc="upper left", fontsize=8)
