"""Results for people: a table for the terminal and for markdown, JSON, and a figure of ROC curves and score histograms."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

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
        }
        for name, result in results.items()
    }


def save_figure(results: dict[str, VerificationResult], path: Path, title: str) -> None:
    """Draw ROC curves (FAR on a log axis) and, per set, the histograms of genuine and impostor similarities."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import; no window, no global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0 * (len(results) + 1), 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(results) + 1, squeeze=False)[0]
    for name, result in results.items():
        far, tar = roc_curve(result)
        axes[0].step(far, tar, where="post", label=f"{name}: {100 * result.accuracy:.1f} %")
    floor = min((1.0 / max(result.num_impostor, 1) for result in results.values()), default=1e-3)
    axes[0].set(xscale="log", xlim=(floor, 1), ylim=(0, 1.01), xlabel="FAR", ylabel="TAR", title="ROC (accuracy in the legend)")
    axes[0].grid(alpha=0.3, which="both")
    axes[0].legend(loc="lower right", fontsize=8)
    for axis, (name, result) in zip(axes[1:], results.items(), strict=True):
        cosine = 1.0 - result.distances / 2.0
        bins = np.linspace(min(-0.2, float(cosine.min())), 1.0, 50)
        axis.hist(cosine[~result.same], bins, alpha=0.6, color="tab:red", label="impostor pairs")
        axis.hist(cosine[result.same], bins, alpha=0.6, color="tab:green", label="genuine pairs")
        threshold = 1.0 - float(np.mean(result.threshold_per_fold)) / 2.0
        axis.axvline(threshold, color="black", linewidth=1, label=f"threshold {threshold:.2f}")
        axis.set(xlabel="cosine similarity", ylabel="pairs", title=name)
        axis.set_ylim(top=1.35 * axis.get_ylim()[1])  # room for the legend above the bars
        axis.legend(loc="upper left", fontsize=8)
    figure.suptitle(title)
    figure.savefig(path)


def roc_curve(result: VerificationResult) -> tuple[np.ndarray, np.ndarray]:
    """Return (FAR, TAR) at every threshold between two distances, both ascending; (P + 1,) at most."""
    order = np.argsort(result.distances, kind="stable")
    same, distances = result.same[order], result.distances[order]
    last_of_equals = np.append(distances[1:] != distances[:-1], True)
    tar = np.cumsum(same)[last_of_equals] / max(result.num_genuine, 1)
    far = np.cumsum(~same)[last_of_equals] / max(result.num_impostor, 1)
    return np.append(0.0, far), np.append(0.0, tar)


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
