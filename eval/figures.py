"""Draws verification results as PNG bytes: ROC, DET, similarities of genuine and impostor pairs, folds, norms.

Each set has the same colour in all figures (utils.report.contact_sheet.set_colours); impostor pairs are gray.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from utils.report.contact_sheet import set_colours
from utils.report.figure import make_figure, png_of
from utils.text import label_text

from .verification import VerificationResult, roc_curve, similarity_bins

Results = Mapping[str, VerificationResult]
_MARGINS = (0.75, 0.15, 0.55, 0.35)  # inches left, right, below and above axes, for their numbers, names and title


def overview(results: Results, title: str) -> bytes:
    """Draw ROC curves and, per set, the histograms of similarities, side by side."""
    figure, axes = _figure(len(results) + 1, 4.0, in_a_row=4, above=0.35)
    _draw_roc(axes[0], results)
    _draw_all_similarities(axes[1:], results)
    figure.suptitle(label_text(title))
    return png_of(figure)


def curves(results: Results) -> bytes:
    """Draw the ROC and the DET curves of all sets."""
    figure, axes = _figure(2, 5.5, 4.2)
    _draw_roc(axes[0], results)
    _draw_det(axes[1], results)
    return png_of(figure)


def similarities(results: Results) -> bytes:
    """Draw the histograms of genuine and impostor pairs of each set, with its thresholds."""
    figure, axes = _figure(len(results), 4.6)
    _draw_all_similarities(axes, results)
    return png_of(figure)


def folds(results: Results) -> bytes:
    """Draw the accuracy of each fold and the mean of the set, on one axis range for all sets that fits all folds."""
    figure, axes = _figure(len(results), 4.6, 2.8)
    colours = set_colours(results)
    values = 100 * np.concatenate([result.accuracy_per_fold for result in results.values()])
    margin = max(1.0, 0.15 * float(values.max() - values.min()))  # percentage points
    for axis, (name, result) in zip(axes, results.items(), strict=True):
        accuracy = 100 * result.accuracy_per_fold
        axis.axhline(100 * result.accuracy, color="black", linewidth=1)
        axis.plot(np.arange(1, len(accuracy) + 1), accuracy, "o", color=colours[name])
        axis.set(xlabel="fold", ylabel="accuracy, %", title=f"{label_text(name)}: mean {100 * result.accuracy:.2f} %")
        axis.set_ylim(max(-0.5, values.min() - margin), min(100.5, values.max() + margin))
        axis.set_xticks(np.arange(1, len(accuracy) + 1))
        axis.grid(alpha=0.3)
    return png_of(figure)


def norms(results: Results) -> bytes:
    """Draw the norms of the raw embeddings: small ones are often bad pictures."""
    figure, axes = _figure(1, 6.0, 3.0)
    colours = set_colours(results)
    for name, result in results.items():
        label = f"{label_text(name)}: mean {result.xnorm:.1f}"
        axes[0].hist(result.norms, 60, histtype="step", color=colours[name], label=label)
    axes[0].set(xlabel="norm of the raw embedding", ylabel="images")
    axes[0].legend(fontsize=8)
    return png_of(figure)


def _draw_roc(axis: Any, results: Results) -> None:
    axis.set_title("ROC (accuracy in the legend)")
    measurable = _measurable(axis, results)
    if not measurable:
        return
    floor, lowest, colours = _far_floor(measurable), 1.0, set_colours(results)
    for name, result in measurable.items():
        far, tar = roc_curve(result)
        lowest = min(lowest, float(tar[np.searchsorted(far, floor, side="right") - 1]))
        axis.step(far, tar, where="post", color=colours[name], label=f"{label_text(name)}: {100 * result.accuracy:.2f} %")
    chance = np.geomspace(floor, 1.0, 100)
    axis.plot(chance, chance, color="gray", linewidth=0.8, linestyle=":", label="chance")
    # the axis begins at the lowest point of the curves: between 0.9 and 1 for good networks, down to 0 for bad ones
    bottom = max(0.0, min(0.9, np.floor(10 * (lowest - 0.02)) / 10))
    axis.set(xscale="log", xlim=(floor, 1), ylim=(bottom, 1 + 0.02 * (1 - bottom)), xlabel="FAR", ylabel="TAR")
    axis.grid(alpha=0.3, which="both")
    axis.legend(loc="lower right", fontsize=8)


def _draw_det(axis: Any, results: Results) -> None:
    axis.set_title("DET")
    measurable = _measurable(axis, results)
    if not measurable:
        return
    floor, colours = _far_floor(measurable), set_colours(results)
    frr_floor = min(0.1, *(1.0 / result.num_genuine for result in measurable.values()))
    for name, result in measurable.items():
        far, tar = roc_curve(result)
        frr = np.maximum(1 - tar, frr_floor / 2)  # zero is drawn below the smallest possible value
        axis.step(np.maximum(far, floor / 2), frr, where="post", color=colours[name], label=label_text(name))
    line = max(floor, frr_floor)
    axis.plot([line, 1], [line, 1], color="gray", linewidth=0.8, linestyle=":", label="FAR = FRR")
    axis.axhspan(frr_floor / 2.5, frr_floor * 0.99, color="gray", alpha=0.15, label="no genuine pair refused")
    axis.set(xscale="log", yscale="log", xlim=(floor, 1), ylim=(frr_floor / 2.5, 1), xlabel="FAR", ylabel="FRR = 1 - TAR")
    axis.grid(alpha=0.3, which="both")
    axis.legend(loc="upper right", fontsize=8)


def _draw_all_similarities(axes: np.ndarray, results: Results) -> None:
    colours = set_colours(results)
    for axis, (name, result) in zip(axes, results.items(), strict=True):
        _draw_similarities(axis, name, result, colours[name])


def _draw_similarities(axis: Any, name: str, result: VerificationResult, colour: str) -> None:
    cosine, bins = 1.0 - result.distances / 2.0, similarity_bins(result)
    # a single outline, because drawing fifty bars takes a third of the time of the whole figure
    axis.hist(cosine[~result.same], bins, histtype="stepfilled", alpha=0.6, color="tab:gray", label="impostor pairs")
    axis.hist(cosine[result.same], bins, histtype="stepfilled", alpha=0.6, color=colour, label="genuine pairs")
    threshold = result.cosine_threshold
    axis.axvline(threshold, color="black", linewidth=1, label=f"best accuracy: cosine {threshold:.3f}")
    measured = [point for point in result.points if point.cosine is not None]
    if measured:
        strictest = measured[-1]
        label = f"FAR {strictest.target}: cosine {strictest.cosine:.3f}"
        axis.axvline(strictest.cosine, color="black", linestyle="--", linewidth=1, label=label)
    axis.set(xlabel="cosine similarity", ylabel="pairs", title=label_text(name))
    axis.set_ylim(top=1.45 * axis.get_ylim()[1])  # room for the legend above the bars
    axis.legend(loc="upper left", fontsize=8)


def _measurable(axis: Any, results: Results) -> Results:
    """Return the results that have both kinds of pairs; if there are none, write that on the axis."""
    found = {name: result for name, result in results.items() if result.num_genuine and result.num_impostor}
    if not found:
        axis.text(0.5, 0.5, "needs genuine and impostor pairs", ha="center", va="center")
    return found


def _far_floor(results: Results) -> float:
    """Return the smallest FAR that any of the sets can show."""
    return min(0.1, *(1.0 / result.num_impostor for result in results.values()))


def _figure(count: int, width: float, height: float = 3.6, in_a_row: int = 3, above: float = 0.0) -> tuple[Any, np.ndarray]:
    """Return a figure and its (count,) axes, `width` x `height` inches each, with `above` inches for a title over all.

    The margins are fixed: a layout that measures all texts takes half of the drawing time, while all ranks wait.
    """
    columns = min(count, in_a_row)
    rows = -(-count // columns)
    wide, high = width * columns, height * rows + above
    figure = make_figure(wide, high)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    left, right, bottom, top = _MARGINS
    figure.subplots_adjust(
        left / wide,
        bottom / high,
        1 - right / wide,
        1 - (top + above) / high,
        (left + right) / (width - left - right),
        (bottom + top) / (height - bottom - top),
    )
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes[:count]
