"""Compare runs: python -m scripts.compare_runs work_dirs/A work_dirs/B --out DIR

Overlays the loss and the mean verification accuracy over the optimizer steps, and the ROC curves of the results at the end, and
sets the numbers beside each other. DIR then holds comparison.html, comparison.png and comparison.md. A folder that
`python -m eval --report` wrote can stand in place of a run: it has results, and no curves of training.

Example: python -m scripts.compare_runs work_dirs/one work_dirs/two --out comparison
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m scripts.compare_runs")

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.cli import make_parser
from utils.page import Page
from utils.program import guarded

from .plot_run import columns, read_series

_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive")


class Run(NamedTuple):
    """What a run left behind."""

    name: str
    series: dict[str, dict[str, dict[int, float]]]  # kind -> name -> step -> value; {} for a folder of results alone
    results: dict[str, dict[str, Any]]  # set -> numbers


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and compare; return the exit status."""
    parser = make_parser("python -m scripts.compare_runs", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, or folders of python -m eval --report")
    parser.add_argument("--out", type=Path, default=Path("comparison"), help="folder of the comparison (default ./comparison)")
    options = parser.parse_args(arguments)
    return guarded(lambda: compare(options))


def compare(options: argparse.Namespace) -> None:
    """Read the runs, draw, and write."""
    runs = [read_run(path) for path in options.runs]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):  # two folders of one name
        runs = [run._replace(name=str(path)) for run, path in zip(runs, options.runs, strict=True)]
    options.out.mkdir(parents=True, exist_ok=True)
    head, rows = table(runs)
    png = draw(runs)
    page = Page(f"{len(runs)} runs")
    page.table(head, rows)
    page.picture(png, "loss, mean accuracy of the sets, and the ROC curve of each set")
    page.write(options.out / "comparison.html")
    (options.out / "comparison.png").write_bytes(png)
    lines = [head, tuple("---" for _ in head), *rows]
    text = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
    (options.out / "comparison.md").write_text(text + "\n")
    print(f"{text}\n\nwritten: {options.out / 'comparison.html'}")


def read_run(folder: Path) -> Run:
    """Return what a folder has: metrics.jsonl, results.json, or both."""
    metrics, results = folder / "metrics.jsonl", folder / "results.json"
    if not metrics.is_file() and not results.is_file():
        raise ValueError(f"{folder}: neither metrics.jsonl nor results.json in it; give a run folder or a folder of a report")
    try:
        found = json.loads(results.read_text()) if results.is_file() else {}
    except json.JSONDecodeError as error:
        raise ValueError(f"{results}: is not JSON: {error}") from None
    return Run(folder.resolve().name, read_series(metrics) if metrics.is_file() else {}, found)


def table(runs: Sequence[Run]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and a row for each set and number, a column for each run; the best of a row is marked."""
    rows = []
    sets = list(dict.fromkeys(name for run in runs for name in run.results))
    numbers = (("accuracy", "accuracy %", 100, 1), ("eer", "EER %", 100, -1), ("auc", "AUC", 1, 1), ("xnorm", "norm", 1, 0))
    for name in sets:
        for key, title, factor, better in numbers:
            values = [run.results.get(name, {}).get(key) for run in runs]
            rows.append((f"{name}: {title}", *_shown(values, factor, better)))
        targets = [run.results.get(name, {}).get("tar_at_far", {}) for run in runs]
        for far in ("1e-2", "1e-3", "1e-4"):
            values = [target.get(far) for target in targets]
            if any(value is not None for value in values):
                rows.append((f"{name}: TAR % at FAR {far}", *_shown(values, 100, 1)))
    losses = [run.series.get("train", {}).get("loss", {}) for run in runs]
    last = [loss[max(loss)] if loss else None for loss in losses]
    rows.append(("last loss", *_shown(last, 1, 0)))
    rows.append(("optimizer steps", *(str(max(loss)) if loss else "" for loss in losses)))
    return ("", *(run.name for run in runs)), rows


def _shown(values: Sequence[float | None], factor: float, better: int) -> list[str]:
    """Return the values as text; the best has a star where one direction is better (1 up, -1 down)."""
    known = [value * better for value in values if value is not None]
    digits = 2 if factor == 100 else 4
    return [
        ""
        if value is None
        else f"{factor * value:.{digits}f}{' *' if better and len(known) > 1 and value * better == max(known) else ''}"
        for value in values
    ]


def draw(runs: Sequence[Run]) -> bytes:
    """Return the PNG of the overlaid curves."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import; no window, no global state
    from matplotlib.figure import Figure

    drawn = (name for run in runs for name, found in run.results.items() if found.get("roc", {}).get("far"))
    sets = list(dict.fromkeys(drawn))
    figure = Figure(figsize=(4.4 * (2 + len(sets)), 3.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 + len(sets), squeeze=False)[0]
    axes[0].set(title="loss", xlabel="optimizer step")
    axes[1].set(title="mean accuracy of the sets, %", xlabel="optimizer step")
    for number, run in enumerate(runs):
        colour = _COLOURS[number % len(_COLOURS)]
        axes[0].plot(*columns(run.series.get("train", {}).get("loss", {})), color=colour, linewidth=1, label=run.name)
        accuracies = [kind["accuracy"] for kind in run.series.values() if "accuracy" in kind]
        if accuracies:
            steps = sorted(set.intersection(*(set(points) for points in accuracies)))
            means = [100 * float(np.mean([points[step] for points in accuracies])) for step in steps]
            axes[1].plot(steps, means, color=colour, marker="o", markersize=3, label=run.name)
        for axis, name in zip(axes[2:], sets, strict=True):
            curve = run.results.get(name, {}).get("roc", {"far": []})
            if curve["far"]:
                axis.step(curve["far"], curve["tar"], where="post", color=colour, label=run.name)
    for axis, name in zip(axes[2:], sets, strict=True):
        axis.set(title=f"{name}: ROC", xlabel="FAR", ylabel="TAR", xscale="log", ylim=(0, 1.01))
    for axis in axes:
        axis.grid(alpha=0.3, which="both")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


if __name__ == "__main__":
    raise SystemExit(main())
