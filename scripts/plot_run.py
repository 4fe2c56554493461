"""Draw a run's curves over the optimizer steps: loss, learning rate, cosine, gradient norm, speed, verification accuracy.

python -m scripts.plot_run work_dirs/demo_cpu        writes work_dirs/demo_cpu/training.png

Example: python -m scripts.plot_run work_dirs/demo_cpu
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.cli import make_parser
from utils.files import read_lines
from utils.program import run_main
from utils.report.contact_sheet import make_figure, set_colours
from utils.text import label_text

Series = dict[str, dict[str, dict[int, float]]]  # kind -> name -> step -> value
_PANELS = (
    ("loss", "loss"),
    ("lr", "learning rate"),
    ("positive_cosine", "cosine of an image to its class centre"),
    ("grad_norm", "gradient norm, before clipping"),
    ("images_per_second", "images/s"),
)
_CHANCE_ACCURACY, _SKILLED_AUC = 0.52, 0.6  # for two normal distributions, this AUC corresponds to an accuracy of 0.57


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and draw; return the exit status."""
    parser = make_parser("python -m scripts.plot_run", __doc__)
    parser.add_argument("run", type=Path, help="run folder, with metrics.jsonl")
    options = parser.parse_args(arguments)
    return run_main(lambda: plot(options.run))


def plot(run: Path) -> None:
    """Write run/training.png from run/metrics.jsonl."""
    series = read_series(run / "metrics.jsonl")
    train = series.pop("train", {})
    figure = make_figure(12, 6.4, layout="constrained")
    axes = figure.subplots(2, 3).ravel()
    for axis, (key, title) in zip(axes, _PANELS, strict=False):
        axis.plot(*columns(train.get(key, {})), color="black", linewidth=1)
        if key == "lr" and "lr_centres" in train:
            axis.plot(*columns(train["lr_centres"]), color="black", linewidth=1, linestyle="--", label="of the class centres")
            axis.legend(fontsize=8)
        axis.set(title=title)
    _draw_accuracy(axes[-1], series)
    for axis in axes:
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
        axis.set_xlim(left=0)
    figure.suptitle(label_text(run.resolve().name))
    figure.savefig(run / "training.png")
    print(f"written: {run / 'training.png'}")


def _draw_accuracy(axis: Any, series: Series) -> None:
    """Draw the accuracy of each set, and its AUC if accuracy is at chance while AUC is not."""
    sets = {name: numbers for name, numbers in series.items() if "accuracy" in numbers}
    colours = set_colours(sets)
    hidden = False
    for name, numbers in sets.items():
        steps, values = columns(numbers["accuracy"])
        label = label_text(name)
        axis.plot(steps, [100 * value for value in values], color=colours[name], marker="o", markersize=3, label=label)
        auc = numbers.get("auc", {})
        if any(value < _CHANCE_ACCURACY and auc.get(step, 0) > _SKILLED_AUC for step, value in numbers["accuracy"].items()):
            hidden = True
            steps, values = columns(auc)
            scaled = [100 * value for value in values]
            axis.plot(steps, scaled, color=colours[name], linestyle="--", marker="x", markersize=4, label=f"{label}: 100 AUC")
    axis.set(title=f"verification accuracy, %{' (dashed: 100 AUC)' if hidden else ''}")
    if sets:
        axis.legend(loc="center right" if hidden else "lower right", fontsize=8)


def read_series(path: Path) -> Series:
    """Return kind -> name -> step -> value, kinds in the order of the file.

    A resumed run goes back to the step of its checkpoint; values that had been written for later steps are dropped.
    """
    if not path.exists():
        raise ValueError(f"no {path}: give the folder of a run that has begun")
    series: Series = {}
    reached = 0
    for number, line in enumerate(read_lines(path), 1):
        try:
            record: dict[str, Any] = json.loads(line)
            step, kind = int(record.pop("step")), str(record.pop("kind"))
            numbers = {name: float(value) for name, value in record.items() if isinstance(value, (int, float))}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise ValueError(f"{path}, line {number}: not a line of metrics") from None
        if step < reached:
            for points in (points for kinds in series.values() for points in kinds.values()):
                for stale in [known for known in points if known >= step]:
                    del points[stale]
        reached = step
        for name, value in numbers.items():
            series.setdefault(kind, {}).setdefault(name, {})[step] = value
    return series


def columns(points: dict[int, float]) -> tuple[list[int], list[float]]:
    """Return the steps in order and their values."""
    steps = sorted(points)
    return steps, [points[step] for step in steps]


if __name__ == "__main__":
    raise SystemExit(main())
