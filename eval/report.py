"""Results as text: a table for the terminal and for markdown, and JSON."""

from dataclasses import asdict
from typing import Any

import numpy as np

from .figures import roc_curve
from .verification import VerificationResult

_HEADER = ("set", "pairs", "accuracy %", "threshold", "TAR@FAR=1e-2", "TAR@FAR=1e-3", "EER %", "AUC", "XNorm")


def format_table(results: dict[str, VerificationResult], markdown: bool = False) -> str:
    """Return one line per set; rates that too few impostor pairs cannot carry are shown as n/a."""
    rows = [_HEADER, *(_row(name, result) for name, result in results.items())]
    if markdown:
        rows.insert(1, tuple("---" for _ in _HEADER))
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def as_json(results: dict[str, VerificationResult]) -> dict[str, Any]:
    """Return the numbers as plain values, per set."""
    return {
        name: {
            "accuracy": result.accuracy,
            "accuracy_std": result.accuracy_std,
            "accuracy_per_fold": result.accuracy_per_fold.tolist(),
            "threshold_per_fold": result.threshold_per_fold.tolist(),
            "exact_accuracy": result.exact_accuracy,
            "plain_accuracy": result.plain_accuracy,
            "tar_at_far": result.tar_at_far,
            "operating_points": [{**asdict(point), "cosine": point.cosine} for point in result.points],
            "min_dcf": result.min_dcf,
            "eer": result.eer,
            "auc": result.auc,
            "xnorm": result.xnorm,
            "num_genuine": int(result.num_genuine),
            "num_impostor": int(result.num_impostor),
            "roc": _thinned_roc(result),
        }
        for name, result in results.items()
    }


def scalars(result: VerificationResult) -> dict[str, float | None]:
    """Return the numbers of a set that are one number each, for logs."""
    return {"accuracy": result.accuracy, "eer": result.eer, "auc": result.auc, "xnorm": result.xnorm}


def _thinned_roc(result: VerificationResult, points: int = 200) -> dict[str, list[float]]:
    """Return {"far": [...], "tar": [...]}: the ROC curve at so many values of FAR, spread on a logarithmic axis."""
    far, tar = roc_curve(result)
    if result.num_impostor == 0 or result.num_genuine == 0:
        return {"far": [], "tar": []}
    wanted = np.unique(np.append(0.0, np.geomspace(1 / result.num_impostor, 1.0, points)))
    places = np.searchsorted(far, wanted, side="right") - 1  # the largest FAR that is not above
    return {"far": far[places].tolist(), "tar": tar[places].tolist()}


def _row(name: str, result: VerificationResult) -> tuple[str, ...]:
    def percent(value: float | None) -> str:
        return "n/a" if value is None else f"{100 * value:.2f}"

    return (
        name,
        str(result.num_genuine + result.num_impostor),
        f"{100 * result.accuracy:.2f} +- {100 * result.accuracy_std:.2f}",
        f"{np.mean(result.threshold_per_fold):.2f}",
        percent(result.tar_at_far["1e-2"]),
        percent(result.tar_at_far["1e-3"]),
        percent(result.eer),
        "n/a" if result.auc is None else f"{result.auc:.4f}",
        f"{result.xnorm:.2f}",
    )
