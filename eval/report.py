"""Reports results: a table for the terminal and for Markdown, results.json, pictures, and a page as a basis for decisions.

A threshold is shown as a cosine similarity, above which a pair is accepted. results.json also has the squared distances of the
protocol, under keys that say so. Each set has the same colour in all pictures; impostor pairs are gray.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.files import write_file
from utils.report import Facts, Page, make_figure, png_of, set_colours, sheet
from utils.text import label_text, markdown_table, markdown_text, plain_table

from .pair_sets.bin_file import PairSet
from .protocol import Protocol, Result
from .verification import VerificationResult, roc_curve, similarity_bins

PairResults = Mapping[str, VerificationResult]
_MARGINS = (0.75, 0.15, 0.55, 0.35)  # inches left, right, below and above axes, for their numbers, names and title


def draw_overview(results: PairResults, title: str) -> bytes:
    """Draw ROC curves and, per set, the histograms of similarities, side by side."""
    figure, axes = _figure(len(results) + 1, 4.0, in_a_row=4, above=0.35)
    _draw_roc(axes[0], results)
    _draw_similarities(axes[1:], results)
    figure.suptitle(label_text(title))
    return png_of(figure)


def draw_curves(results: PairResults) -> bytes:
    """Draw the ROC and the DET curves of all sets."""
    figure, axes = _figure(2, 5.5, 4.2)
    _draw_roc(axes[0], results)
    _draw_det(axes[1], results)
    return png_of(figure)


def draw_similarities(results: PairResults) -> bytes:
    """Draw the histograms of genuine and impostor pairs of each set, with its thresholds."""
    figure, axes = _figure(len(results), 4.6)
    _draw_similarities(axes, results)
    return png_of(figure)


def draw_folds(results: PairResults) -> bytes:
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


def draw_norms(results: PairResults) -> bytes:
    """Draw the norms of the raw embeddings: small ones are often bad pictures."""
    figure, axes = _figure(1, 6.0, 3.0)
    colours = set_colours(results)
    for name, result in results.items():
        label = f"{label_text(name)}: mean {result.xnorm:.1f}"
        axes[0].hist(result.norms, 60, histtype="step", color=colours[name], label=label)
    axes[0].set(xlabel="norm of the raw embedding", ylabel="images")
    axes[0].legend(fontsize=8)
    return png_of(figure)


def _draw_roc(axis: Any, results: PairResults) -> None:
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


def _draw_det(axis: Any, results: PairResults) -> None:
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


def _draw_similarities(axes: np.ndarray, results: PairResults) -> None:
    colours = set_colours(results)
    for axis, (name, result) in zip(axes, results.items(), strict=True):
        cosine, bins = 1.0 - result.distances / 2.0, similarity_bins(result)
        # a single outline, because drawing fifty bars takes a third of the time of the whole figure
        axis.hist(cosine[~result.same], bins, histtype="stepfilled", alpha=0.6, color="tab:gray", label="impostor pairs")
        axis.hist(cosine[result.same], bins, histtype="stepfilled", alpha=0.6, color=colours[name], label="genuine pairs")
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


def _measurable(axis: Any, results: PairResults) -> PairResults:
    """Return the results that have both kinds of pairs; if there are none, write that on the axis."""
    found = {name: result for name, result in results.items() if result.num_genuine and result.num_impostor}
    if not found:
        axis.text(0.5, 0.5, "needs genuine and impostor pairs", ha="center", va="center")
    return found


def _far_floor(results: PairResults) -> float:
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
    borders = left / wide, bottom / high, 1 - right / wide, 1 - (top + above) / high
    figure.subplots_adjust(*borders, (left + right) / (width - left - right), (bottom + top) / (height - bottom - top))
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes[:count]


Results = Mapping[str, Result]
Intervals = Mapping[str, tuple[float, float]]
_COLUMNS: dict[str, Callable[[VerificationResult], str]] = {  # of the table of sets of pairs
    "pairs": lambda result: str(result.num_genuine + result.num_impostor),
    "accuracy %": lambda result: f"{100 * result.accuracy:.2f} +- {100 * result.accuracy_std:.2f}",
    "cosine threshold": lambda result: f"{result.cosine_threshold:.4f}",
    "TAR@FAR=1e-2": lambda result: percent(result.tar_at_far["1e-2"]),
    "TAR@FAR=1e-3": lambda result: percent(result.tar_at_far["1e-3"]),
    "EER %": lambda result: percent(result.eer),
    "AUC": lambda result: "n/a" if result.auc is None else f"{result.auc:.4f}",
    "XNorm": lambda result: f"{result.xnorm:.2f}",
}
_RATES = ("set", "figure", "%")
_COLLAPSED = 0.1  # squared distance, a cosine of 0.95; impostor pairs of a trained network are between 1 and 3
_WORST = 8  # pairs that are shown of each kind of error


def pair_results(results: Results) -> dict[str, VerificationResult]:
    """Return the results of sets of pairs, which have curves and thresholds to choose from."""
    return {name: result for name, result in results.items() if isinstance(result, VerificationResult)}


def format_table(results: Results, markdown: bool = False) -> str:
    """Return a table with a line for each set of pairs, and one with a line for each figure of the other sets.

    Rates that cannot be measured with so few pairs are shown as n/a. A line below explains each accuracy that is misleadingly
    low.
    """
    pairs = pair_results(results)
    rows = [(name, *(text(result) for text in _COLUMNS.values())) for name, result in pairs.items()]
    tables: list[list[tuple[str, ...]]] = [[("set", *_COLUMNS), *rows]] if pairs else []
    if rates := _rate_rows(results):
        tables.append([_RATES, *rates])
    notes = explain(pairs)
    if markdown:
        return "\n".join(["\n\n".join(map(markdown_table, tables)), *(f"\n{markdown_text(note)}" for note in notes)])
    return "\n".join(["\n\n".join(map(plain_table, tables)), *notes])


def explain(results: Mapping[str, VerificationResult]) -> list[str]:
    """Return a line for each set whose accuracy is at chance, or far too low, while its AUC is not.

    The usual cause is that the distances are so close together that the protocol's thresholds, 0.01 apart, cannot separate
    them. Then the accuracy with exact thresholds is higher by more than chance explains (two standard errors of the difference
    of the two accuracies, each being a share of the pairs).
    """
    return [f"{name}: {text}" for name, result in results.items() if (text := _explain(result))]


def _explain(result: VerificationResult) -> str:
    genuine, impostor = result.num_genuine, result.num_impostor
    if not genuine or not impostor or result.auc is None:
        return ""
    accuracy, exact, auc = result.accuracy, result.exact_accuracy, result.auc
    num_pairs = genuine + impostor
    error = 2 * np.sqrt((accuracy * (1 - accuracy) + exact * (1 - exact)) / num_pairs)
    # for an AUC at chance: the variance of the Mann-Whitney statistic
    auc_error = 2 * np.sqrt((num_pairs + 1) / (12 * genuine * impostor))
    constant = max(genuine, impostor) / num_pairs  # the accuracy of the same answer for all pairs
    constant_error = 2 * np.sqrt(constant * (1 - constant) / num_pairs)
    numbers = f"accuracy is {100 * accuracy:.2f} % although AUC is {auc:.4f}"
    low, high = float(result.distances.min()), float(result.distances.max())
    where = (
        f"all squared distances lie between {low:.2g} and {high:.2g} (cosines from {1 - high / 2:.5f} to {1 - low / 2:.5f}), "
        "and the protocol's thresholds, 0, 0.01, ..., 3.99, cannot separate them"
    )
    if exact - accuracy > error and abs(auc - 0.5) > auc_error:
        close = "The embeddings have nearly collapsed into one direction" if high < _COLLAPSED else "They differ by too little"
        return f"{numbers}: {where}. {close}: train longer. With exact thresholds accuracy is {100 * exact:.2f} %"
    if accuracy > constant + constant_error or abs(auc - 0.5) <= auc_error:
        return ""
    if auc < 0.5:
        return f"{numbers}: impostor pairs are more alike than genuine ones; are the two swapped in the set?"
    return (
        f"{numbers}: genuine and impostor pairs overlap so much, or one kind is so rare, that no threshold is clearly better "
        f"than the same answer for all pairs, {100 * constant:.2f} %. With exact thresholds accuracy is {100 * exact:.2f} %"
    )


def _rate_rows(results: Results) -> list[tuple[str, str, str]]:
    """Return (set, figure, value in %) for each figure of the sets that are no sets of pairs."""
    others = {name: result for name, result in results.items() if not isinstance(result, VerificationResult)}
    return [(name, figure, percent(value)) for name, found in others.items() for figure, value in found.figures.items()]


def percent(value: float | None, unknown: str = "n/a") -> str:
    """Return a share in percent."""
    return unknown if value is None else f"{100 * value:.2f}"


def write_report(folder: Path, title: str, results: Results, protocols: Sequence[Protocol[Result]], facts: Facts = ()) -> None:
    """Write report.html, its pictures as PNG files, results.json and results.md into a folder.

    Args:
        results: by the name of the set.
        protocols: of the same names; those that are sets of pairs give the pictures of errors.
        facts: (name, value) pairs that describe the evaluation, for the top of the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    intervals = _write_numbers(folder, results)
    pairs = pair_results(results)
    page = Page(f"Evaluation of {title}")
    page.facts(facts)
    page.contents()
    drawn: dict[str, bytes] = {}
    if pairs:
        _fill_numbers(page, pairs, intervals)
        drawn["verification"] = draw_overview(pairs, title)
        for name, draw, heading, text in _SECTIONS:
            drawn[name] = draw(pairs)
            page.section(heading)
            page.picture(drawn[name], text)
    if rates := _rate_rows(results):
        page.section("Templates and searches")
        page.text(
            "tar@FAR: the share of genuine template pairs that are accepted, at a FAR not above the one named. "
            "published_tar@FAR: the same at the nearest FAR, as papers compute it. rank_k: the share of probes of known people "
            "with the right person among the first k. tpir_at_fpir_F: the share of them found first, at a threshold where a "
            "share F of the strangers raises an alarm."
        )
        page.table(_RATES, rates)
    for protocol in protocols:
        if not isinstance(protocol, PairSet):
            continue
        for same, heading in ((False, "different people, accepted"), (True, "the same person, rejected")):
            png = _worst_errors(protocol, pairs[protocol.name], same)
            if png:
                drawn[f"{protocol.name}_{'false_non_matches' if same else 'false_matches'}"] = png
                page.section(f"{protocol.name}: {heading}")
                page.picture(png, "the worst first; check for wrong labels before you blame the network")
    for name, png in drawn.items():
        write_file(folder / f"{name}.png", png)
    page.write(folder / "report.html")


def write_summary(folder: Path, picture: bytes, results: Results) -> None:
    """Write results.json, results.md and, unless it is empty, verification.png (`picture`): the summary at the end of a run."""
    _write_numbers(folder, results)
    if picture:
        write_file(folder / "verification.png", picture)


def _write_numbers(folder: Path, results: Results) -> dict[str, Intervals]:
    """Write results.json and results.md; return the 95 % intervals by the name of the set."""
    intervals: dict[str, Intervals] = {name: result.intervals() for name, result in results.items()}
    values = {name: result.as_json() | {"intervals_95": intervals[name]} for name, result in results.items()}
    write_file(folder / "results.json", json.dumps(values, indent=1) + "\n")
    write_file(folder / "results.md", format_table(results, markdown=True) + "\n")
    return intervals


def _fill_numbers(page: Page, results: Mapping[str, VerificationResult], intervals: Mapping[str, Intervals]) -> None:
    """Add the tables: the numbers of each set, and the thresholds to choose from."""
    page.section("Numbers")
    page.text(
        "Accuracy: mean over ten folds, with the threshold of each chosen on the other nine. TAR: the share of genuine pairs "
        "that are accepted. FAR: the share of impostor pairs that are accepted. EER: the rate at which FAR equals the share "
        "of rejected genuine pairs. A pair is accepted if its cosine similarity is above the threshold."
    )
    rows = [(name, *(cell(result, intervals[name]) for cell in _SUMMARY.values())) for name, result in results.items()]
    page.table(("set", *_SUMMARY), rows)
    for note in explain(results):
        page.text(note)
    one_kind = [name for name, result in results.items() if result.auc is None]
    if one_kind:
        page.text(f"- : not measurable; {', '.join(one_kind)} has pairs of one kind only.", note=True)
    page.section("Which threshold to use")
    page.text(
        "Choose the FAR that your application tolerates, and accept a pair if its cosine similarity is above the threshold in "
        "that row. A FAR that rests on few impostor pairs is a guess; P impostor pairs cannot measure a FAR below 1 / P."
    )
    points = [row for name, result in results.items() for row in point_rows(name, result.points, intervals[name])]
    page.table(POINT_COLUMNS, points)
    unmeasured = [
        f"{name} has {result.num_impostor:,} impostor and {result.num_genuine:,} genuine pairs"
        for name, result in results.items()
        if any(point.tar is None for point in result.points)
    ]
    if unmeasured:
        page.text(f"- : not measurable; {'; '.join(unmeasured)}.", note=True)


def _worst_errors(pair_set: PairSet, result: VerificationResult, same: bool) -> bytes:
    """Return a PNG of the pairs of a kind that are wrong at the mean threshold, the worst first; b"" where there are none."""
    wrong = np.flatnonzero((result.same == same) & ((result.distances < np.mean(result.threshold_per_fold)) != same))
    order = np.argsort(result.distances[wrong], kind="stable")
    shown = wrong[order[::-1] if same else order][:_WORST].tolist()
    pairs = [
        (
            f"pair {pair}: cosine {1 - result.distances[pair] / 2:.3f}",
            [pair_set.decode(int(index)) for index in (pair_set.first[pair], pair_set.second[pair])],
        )
        for pair in shown
    ]
    return sheet(pairs, 3, across=2) if pairs else b""


_SUMMARY: dict[str, Callable[[VerificationResult, Intervals], object]] = {  # columns of the page
    "pairs": lambda result, _: int(result.num_genuine + result.num_impostor),
    "accuracy %": lambda result, _: f"{100 * result.accuracy:.2f}",
    "95 % interval": lambda _, intervals: range_text(intervals["accuracy"]),
    "std": lambda result, _: f"{100 * result.accuracy_std:.2f}",
    "cosine threshold": lambda result, _: f"{result.cosine_threshold:.4f}",
    "exact thresholds %": lambda result, _: f"{100 * result.exact_accuracy:.2f}",
    "no mirror %": lambda result, _: percent(result.plain_accuracy, "-"),
    "EER %": lambda result, _: percent(result.eer, "-"),
    "AUC": lambda result, _: "-" if result.auc is None else f"{result.auc:.5f}",
    "min DCF": lambda result, _: "-" if result.min_dcf is None else f"{result.min_dcf:.3f}",
    "norm": lambda result, _: f"{result.xnorm:.2f}",
}
POINT_COLUMNS = ("set", "FAR at most", "cosine threshold", "TAR %", "95 % interval", "FAR measured", "impostor pairs accepted")
_OF_CURVES = "left: accepted genuine pairs against accepted impostor pairs; right: both errors, on logarithmic axes"
_OF_SIMILARITIES = "errors occur where the two histograms overlap; dashed: the strictest FAR that can be measured"
_OF_NORMS = "norms of the raw embeddings; small norms are often blurred, turned or hidden faces"
_SECTIONS = (
    ("curves", draw_curves, "ROC and DET", _OF_CURVES),
    ("similarities", draw_similarities, "Similarities", _OF_SIMILARITIES),
    ("folds", draw_folds, "Folds", "accuracy of each fold; the line is their mean"),
    ("norms", draw_norms, "Norms", _OF_NORMS),
)


def point_rows(name: str, points: Iterable[Any], intervals: Mapping[str, tuple[float, float] | None]) -> list[tuple]:
    """Return a row below POINT_COLUMNS for each FAR that can be measured, and one for the rest.

    Args:
        points: with target, cosine, tar, far and num_accepted.
        intervals: 95 %, of the TAR, by target.
    """
    rows: list[tuple[object, ...]] = []
    for point in points:
        if point.tar is None or point.far is None or point.cosine is None:
            rows.append((name, f"{point.target} and less", *["-"] * 5))
            break
        tar, interval = f"{100 * point.tar:.2f}", range_text(intervals.get(point.target))
        rows.append((name, point.target, f"{point.cosine:.4f}", tar, interval, f"{point.far:.2e}", point.num_accepted))
    return rows


def range_text(interval: tuple[float, float] | None) -> str:
    """Return an interval in percent, "-" for None."""
    return "-" if interval is None else f"{100 * interval[0]:.2f} to {100 * interval[1]:.2f}"
