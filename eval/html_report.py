"""A page that shows how a network does on its verification sets, for somebody who has to decide something by it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from utils.page import Page
from utils.pictures import sheet

from . import figures
from .operating_points import bootstrap_intervals
from .pairs import PairSet
from .report import as_json, format_table
from .verification import VerificationResult

_WORST = 8  # pairs that are shown of each kind of error
Intervals = dict[str, tuple[float, float]]


def write_report(folder: Path, title: str, results: Mapping[str, VerificationResult], sets: Sequence[PairSet]) -> None:
    """Write report.html, its pictures as PNG files, results.json and results.md into a folder.

    Args:
        results: by the name of the set.
        sets: the same sets, for their pictures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    intervals = {name: _intervals(result) for name, result in results.items()}
    values = as_json(dict(results))
    for name in values:
        values[name]["intervals_95"] = intervals[name]
    (folder / "results.json").write_text(json.dumps(values, indent=1) + "\n")
    (folder / "results.md").write_text(format_table(dict(results), markdown=True) + "\n")
    page = Page(title)
    page.text(
        "Accuracy: ten folds, the threshold of each chosen on the other nine. TAR: the share of genuine pairs that are let in. "
        "FAR: that of impostor pairs. EER: where FAR equals the share of refused genuine pairs. In brackets: 95 % intervals."
    )
    page.table(_SUMMARY, [_summary_row(name, result, intervals[name]) for name, result in results.items()])
    page.section("Which threshold to use")
    page.text(
        "Choose the FAR that your use can bear, and accept a pair whose cosine similarity is above the threshold beside it. "
        "A FAR that rests on few impostor pairs is a guess; a set with P impostor pairs cannot measure less than 1 / P."
    )
    rows = [row for name, result in results.items() for row in _point_rows(name, result, intervals[name])]
    page.table(("set", "FAR at most", "TAR %", "FAR measured", "impostor pairs accepted", "cosine threshold"), rows)
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
        result = results[pair_set.name]
        for kind, heading in ((False, "different people, taken for one"), (True, "one person, taken for two")):
            shown = _worst(result, kind)
            if not len(shown):
                continue
            rows_of_pictures = [
                (
                    f"pair {pair}: cosine {1 - result.distances[pair] / 2:.3f}",
                    [pair_set.decode(int(pair_set.first[pair])), pair_set.decode(int(pair_set.second[pair]))],
                )
                for pair in shown.tolist()
            ]
            name = f"{pair_set.name}_{'false_non_matches' if kind else 'false_matches'}"
            drawn[name] = sheet(_two_columns(rows_of_pictures), 4)
            page.section(f"{pair_set.name}: {heading}")
            page.picture(drawn[name], "the worst first; look for wrong labels before you blame the network")
    for name, png in drawn.items():
        (folder / f"{name}.png").write_bytes(png)
    page.write(folder / "report.html")


def write_summary(folder: Path, title: str, results: Mapping[str, VerificationResult]) -> None:
    """Write results.json, results.md and verification.png into a folder: what a run leaves behind at its end."""
    (folder / "results.json").write_text(json.dumps(as_json(dict(results)), indent=1))
    (folder / "results.md").write_text(format_table(dict(results), markdown=True) + "\n")
    (folder / "verification.png").write_bytes(figures.overview(results, title))


_SUMMARY = ("set", "pairs", "accuracy %", "std", "exact thresholds %", "no mirror %", "EER %", "AUC", "min DCF", "norm")
_SECTIONS = (
    (
        "curves",
        "ROC and DET",
        "left: accepted genuine against accepted impostor pairs; right: both errors, on logarithmic axes",
    ),
    (
        "similarities",
        "Similarities",
        "where the two hills overlap, errors are made; dashed: the strictest FAR that can be measured",
    ),
    ("folds", "Folds", "accuracy of each fold"),
    ("norms", "Norms", "norms of the raw embeddings; small ones are often blurred, turned or hidden faces"),
)


def _intervals(result: VerificationResult) -> Intervals:
    genuine, impostor = np.sort(result.distances[result.same]), np.sort(result.distances[~result.same])
    targets = [point.target for point in result.points if point.tar is not None]
    return bootstrap_intervals(genuine, impostor, result.accuracy, targets)


def _summary_row(name: str, result: VerificationResult, intervals: Intervals) -> tuple[object, ...]:
    low, high = intervals["accuracy"]
    return (
        name,
        int(result.num_genuine + result.num_impostor),
        f"{100 * result.accuracy:.2f} [{100 * low:.2f}, {100 * high:.2f}]",
        f"{100 * result.accuracy_std:.2f}",
        f"{100 * result.exact_accuracy:.2f}",
        "not measured" if result.plain_accuracy is None else f"{100 * result.plain_accuracy:.2f}",
        "not measurable" if result.eer is None else f"{100 * result.eer:.2f}",
        "not measurable" if result.auc is None else f"{result.auc:.5f}",
        "not measurable" if result.min_dcf is None else f"{result.min_dcf:.3f}",
        f"{result.xnorm:.2f}",
    )


def _point_rows(name: str, result: VerificationResult, intervals: Intervals) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for point in result.points:
        if point.tar is None or point.far is None or point.cosine is None:
            reason = f"not measurable with {result.num_impostor} impostor and {result.num_genuine} genuine pairs"
            rows.append((name, f"{point.target} and less", reason, "", "", ""))
            break
        low, high = intervals[point.target]
        tar = f"{100 * point.tar:.2f} [{100 * low:.2f}, {100 * high:.2f}]"
        rows.append((name, point.target, tar, f"{point.far:.2e}", point.num_accepted, f"{point.cosine:.4f}"))
    return rows


def _worst(result: VerificationResult, same: bool) -> np.ndarray:
    """Return the numbers of the pairs of a kind that were decided wrongly at the mean threshold, the worst first."""
    threshold = float(np.mean(result.threshold_per_fold))
    wrong = np.flatnonzero((result.same == same) & ((result.distances < threshold) != same))
    order = np.argsort(result.distances[wrong], kind="stable")
    return wrong[order[::-1] if same else order][:_WORST]


def _two_columns(rows: list[tuple[str, list[np.ndarray]]]) -> list[tuple[str, list[np.ndarray]]]:
    """Put two pairs beside each other."""
    joined = []
    for left, right in zip(rows[0::2], [*rows[1::2], ("", [])], strict=False):
        joined.append((f"{left[0]:<38}{right[0]}", [*left[1], *right[1]]))
    return joined
