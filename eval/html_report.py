"""Writes an HTML page with a network's results on its verification sets, as a basis for decisions."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from utils.report.contact_sheet import pair_sheet
from utils.report.page import Page

from . import figures
from .intervals import Intervals, intervals_95
from .pair_sets.bin_file import PairSet
from .report import as_json, explain, format_table
from .verification import VerificationResult

_WORST = 8  # pairs that are shown of each kind of error


def write_report(
    folder: Path,
    title: str,
    results: Mapping[str, VerificationResult],
    sets: Sequence[PairSet],
    facts: Sequence[tuple[str, str]] = (),
) -> None:
    """Write report.html, its pictures as PNG files, results.json and results.md into a folder.

    Args:
        results: by the name of the set.
        sets: the same sets, for their pictures.
        facts: (name, value) pairs that describe the evaluation, for the top of the page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    intervals = _write_numbers(folder, results)
    page = Page(f"Evaluation of {title}")
    page.facts(facts)
    page.contents()
    _fill_numbers(page, results, intervals)
    drawn = {
        "verification": figures.overview(results, title),
        "curves": figures.curves(results),
        "similarities": figures.similarities(results),
        "folds": figures.folds(results),
        "norms": figures.norms(results),
    }
    for name, heading, text in _SECTIONS:
        page.section(heading)
        page.picture(drawn[name], text)
    for pair_set in sets:
        for kind, heading in ((False, "different people, accepted"), (True, "the same person, rejected")):
            png = _gallery(pair_set, results[pair_set.name], kind)
            if png:
                drawn[f"{pair_set.name}_{'false_non_matches' if kind else 'false_matches'}"] = png
                page.section(f"{pair_set.name}: {heading}")
                page.picture(png, "the worst first; check for wrong labels before you blame the network")
    for name, png in drawn.items():
        (folder / f"{name}.png").write_bytes(png)
    page.write(folder / "report.html")


def write_summary(folder: Path, picture: bytes, results: Mapping[str, VerificationResult]) -> None:
    """Write results.json, results.md and verification.png (`picture`, a PNG), the summary at the end of a run."""
    _write_numbers(folder, results)
    (folder / "verification.png").write_bytes(picture)


def _write_numbers(folder: Path, results: Mapping[str, VerificationResult]) -> dict[str, Intervals]:
    """Write results.json and results.md; return the 95 % intervals by the name of the set."""
    intervals = {name: intervals_95(result) for name, result in results.items()}
    values = as_json(dict(results))
    for name in values:
        values[name]["intervals_95"] = intervals[name]
    (folder / "results.json").write_text(json.dumps(values, indent=1) + "\n")
    (folder / "results.md").write_text(format_table(dict(results), markdown=True) + "\n")
    return intervals


def _fill_numbers(page: Page, results: Mapping[str, VerificationResult], intervals: Mapping[str, Intervals]) -> None:
    """Add the tables: the numbers of each set, and the thresholds to choose from."""
    page.section("Numbers")
    page.text(
        "Accuracy: mean over ten folds, with the threshold of each chosen on the other nine. TAR: the share of genuine pairs "
        "that are accepted. FAR: the share of impostor pairs that are accepted. EER: the rate at which FAR equals the share "
        "of rejected genuine pairs. A pair is accepted if its cosine similarity is above the threshold."
    )
    page.table(_SUMMARY, [_summary_row(name, result, intervals[name]) for name, result in results.items()])
    for note in explain(dict(results)):
        page.text(note)
    one_kind = [name for name, result in results.items() if result.auc is None]
    if one_kind:
        page.text(f"- : not measurable; {', '.join(one_kind)} has pairs of one kind only.", note=True)
    page.section("Which threshold to use")
    page.text(
        "Choose the FAR that your application tolerates, and accept a pair if its cosine similarity is above the threshold in "
        "that row. A FAR that rests on few impostor pairs is a guess; P impostor pairs cannot measure a FAR below 1 / P."
    )
    rows = [row for name, result in results.items() for row in _point_rows(name, result, intervals[name])]
    page.table(_POINTS, rows)
    unmeasured = [
        f"{name} has {result.num_impostor:,} impostor and {result.num_genuine:,} genuine pairs"
        for name, result in results.items()
        if any(point.tar is None for point in result.points)
    ]
    if unmeasured:
        page.text(f"- : not measurable; {'; '.join(unmeasured)}.", note=True)


def _gallery(pair_set: PairSet, result: VerificationResult, same: bool) -> bytes:
    """Return a PNG of the worst errors of a kind, b"" where there are none."""
    shown = _worst(result, same).tolist()
    pairs = [
        (
            f"pair {pair}: cosine {1 - result.distances[pair] / 2:.3f}",
            pair_set.decode(int(pair_set.first[pair])),
            pair_set.decode(int(pair_set.second[pair])),
        )
        for pair in shown
    ]
    return pair_sheet(pairs) if pairs else b""


_SUMMARY = (
    "set",
    "pairs",
    "accuracy %",
    "95 % interval",
    "std",
    "cosine threshold",
    "exact thresholds %",
    "no mirror %",
    "EER %",
    "AUC",
    "min DCF",
    "norm",
)
_POINTS = ("set", "FAR at most", "cosine threshold", "TAR %", "95 % interval", "FAR measured", "impostor pairs accepted")
_SECTIONS = (
    (
        "curves",
        "ROC and DET",
        "left: accepted genuine pairs against accepted impostor pairs; right: both errors, on logarithmic axes",
    ),
    (
        "similarities",
        "Similarities",
        "errors occur where the two histograms overlap; dashed: the strictest FAR that can be measured",
    ),
    ("folds", "Folds", "accuracy of each fold; the line is their mean"),
    ("norms", "Norms", "norms of the raw embeddings; small norms are often blurred, turned or hidden faces"),
)


def _summary_row(name: str, result: VerificationResult, intervals: Intervals) -> tuple[object, ...]:
    return (
        name,
        int(result.num_genuine + result.num_impostor),
        f"{100 * result.accuracy:.2f}",
        _range(intervals["accuracy"]),
        f"{100 * result.accuracy_std:.2f}",
        f"{result.cosine_threshold:.4f}",
        f"{100 * result.exact_accuracy:.2f}",
        "-" if result.plain_accuracy is None else f"{100 * result.plain_accuracy:.2f}",
        "-" if result.eer is None else f"{100 * result.eer:.2f}",
        "-" if result.auc is None else f"{result.auc:.5f}",
        "-" if result.min_dcf is None else f"{result.min_dcf:.3f}",
        f"{result.xnorm:.2f}",
    )


def _point_rows(name: str, result: VerificationResult, intervals: Intervals) -> list[tuple[object, ...]]:
    """Return a row for each FAR that can be measured, and one for the rest."""
    rows: list[tuple[object, ...]] = []
    for point in result.points:
        if point.tar is None or point.far is None or point.cosine is None:
            rows.append((name, f"{point.target} and less", *["-"] * 5))
            break
        tar, interval = f"{100 * point.tar:.2f}", _range(intervals[point.target])
        rows.append((name, point.target, f"{point.cosine:.4f}", tar, interval, f"{point.far:.2e}", point.num_accepted))
    return rows


def _range(interval: tuple[float, float]) -> str:
    return f"{100 * interval[0]:.2f} to {100 * interval[1]:.2f}"


def _worst(result: VerificationResult, same: bool) -> np.ndarray:
    """Return the indices of the pairs of a kind that are wrong at the mean threshold, the worst first."""
    threshold = float(np.mean(result.threshold_per_fold))
    wrong = np.flatnonzero((result.same == same) & ((result.distances < threshold) != same))
    order = np.argsort(result.distances[wrong], kind="stable")
    return wrong[order[::-1] if same else order][:_WORST]
