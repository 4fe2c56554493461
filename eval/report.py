"""Formats results: a table for the terminal and for Markdown, an explanation of misleadingly low accuracies, and JSON.

A threshold is shown as a cosine similarity, above which a pair is accepted. JSON also has the squared distances of the
protocol, under keys that say so.
"""

from typing import Any

import numpy as np

from utils.text import markdown_table, markdown_text

from .figures import roc_curve, similarity_bins
from .verification import VerificationResult

_HEADER = ("set", "pairs", "accuracy %", "cosine threshold", "TAR@FAR=1e-2", "TAR@FAR=1e-3", "EER %", "AUC", "XNorm")
_COLLAPSED = 0.1  # squared distance, a cosine of 0.95; impostor pairs of a trained network are between 1 and 3


def format_table(results: dict[str, VerificationResult], markdown: bool = False) -> str:
    """Return one line per set; rates that cannot be measured with so few impostor pairs are shown as n/a.

    A line below the table explains each accuracy that is misleadingly low.
    """
    rows = [_HEADER, *(_row(name, result) for name, result in results.items())]
    notes = explain(results)
    if markdown:
        return "\n".join([markdown_table(rows), *(f"\n{markdown_text(note)}" for note in notes)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *notes])


def explain(results: dict[str, VerificationResult]) -> list[str]:
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


def scalars(result: VerificationResult) -> dict[str, float | None]:
    """Return every scalar result of a set by its name, for metrics.jsonl, TensorBoard and results.json.

    TAR at FAR 1e-3 is called tar@1e-3, as in eval.metric. None means too few pairs of a kind to measure it.
    """
    return {
        "accuracy": result.accuracy,
        "accuracy_std": result.accuracy_std,
        "cosine_threshold": result.cosine_threshold,
        "exact_accuracy": result.exact_accuracy,
        "plain_accuracy": result.plain_accuracy,
        **{f"tar@{far}": tar for far, tar in result.tar_at_far.items()},
        "min_dcf": result.min_dcf,
        "eer": result.eer,
        "auc": result.auc,
        "xnorm": result.xnorm,
    }


def as_json(results: dict[str, VerificationResult]) -> dict[str, Any]:
    """Return the numbers as plain values, per set."""
    return {
        name: {
            **{key: value for key, value in scalars(result).items() if "@" not in key},
            "accuracy_per_fold": result.accuracy_per_fold.tolist(),
            "squared_distance_threshold_per_fold": result.threshold_per_fold.tolist(),
            "tar_at_far": result.tar_at_far,
            "operating_points": [point.as_json() for point in result.points],
            "num_genuine": int(result.num_genuine),
            "num_impostor": int(result.num_impostor),
            "roc": _thinned_roc(result),
            "similarities": _similarities(result),
        }
        for name, result in results.items()
    }


def _thinned_roc(result: VerificationResult, points: int = 200) -> dict[str, list[float]]:
    """Return {"far": [...], "tar": [...]}: the ROC curve at `points` values of FAR, evenly spaced on a logarithmic axis."""
    far, tar = roc_curve(result)
    if result.num_impostor == 0 or result.num_genuine == 0:
        return {"far": [], "tar": []}
    wanted = np.unique(np.append(0.0, np.geomspace(1 / result.num_impostor, 1.0, points)))
    places = np.searchsorted(far, wanted, side="right") - 1  # the largest FAR that is not above
    return {"far": far[places].tolist(), "tar": tar[places].tolist()}


def _similarities(result: VerificationResult) -> dict[str, list]:
    """Return {"cosine": edges, "genuine": counts, "impostor": counts}: how many pairs of each kind lie between two edges."""
    cosine, edges = 1.0 - result.distances / 2.0, similarity_bins(result)
    counts = {
        kind: np.histogram(cosine[mask], edges)[0] for kind, mask in (("genuine", result.same), ("impostor", ~result.same))
    }
    return {"cosine": edges.tolist(), **{kind: values.tolist() for kind, values in counts.items()}}


def _row(name: str, result: VerificationResult) -> tuple[str, ...]:
    def percent(value: float | None) -> str:
        return "n/a" if value is None else f"{100 * value:.2f}"

    return (
        name,
        str(result.num_genuine + result.num_impostor),
        f"{100 * result.accuracy:.2f} +- {100 * result.accuracy_std:.2f}",
        f"{result.cosine_threshold:.4f}",
        percent(result.tar_at_far["1e-2"]),
        percent(result.tar_at_far["1e-3"]),
        percent(result.eer),
        "n/a" if result.auc is None else f"{result.auc:.4f}",
        f"{result.xnorm:.2f}",
    )
