"""Draw a run's curves: loss, learning rate and verification accuracy over the optimizer steps.

python -m scripts.plot_run work_dirs/demo_cpu        writes work_dirs/demo_cpu/training.png

Example: python -m scripts.plot_run work_dirs/demo_cpu
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m scripts.plot_run")

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.cli import make_parser
from utils.program import guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and draw; return the exit status."""
    parser = make_parser("python -m scripts.plot_run", __doc__)
    parser.add_argument("run", type=Path, help="run folder, with metrics.jsonl")
    options = parser.parse_args(arguments)
    return guarded(lambda: plot(options.run))


def plot(run: Path) -> None:
    """Write run/training.png from run/metrics.jsonl."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import; no window, no global state
    from matplotlib.figure import Figure

    series = read_series(run / "metrics.jsonl")
    train = series.pop("train", {})
    sets = {name: numbers["accuracy"] for name, numbers in sorted(series.items()) if "accuracy" in numbers}
    figure = Figure(figsize=(11, 3.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    axes[0].plot(*columns(train.get("loss", {})), color="tab:blue")
    axes[0].set(title="loss", xlabel="optimizer step")
    axes[1].plot(*columns(train.get("lr", {})), color="tab:orange")
    axes[1].set(title="learning rate", xlabel="optimizer step")
    for name, points in sets.items():
        steps, values = columns(points)
        axes[2].plot(steps, [100 * value for value in values], marker="o", markersize=3, label=name)
    axes[2].set(title="verification accuracy, %", xlabel="optimizer step")
    if sets:
        axes[2].legend(loc="lower right", fontsize=8)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_xlim(left=0)
    figure.suptitle(run.name)
    figure.savefig(run / "training.png")
    print(f"written: {run / 'training.png'}")


def read_series(path: Path) -> dict[str, dict[str, dict[int, float]]]:
    """Return kind -> name -> step -> value; where a resumed run wrote a step again, the later line counts."""
    if not path.is_file():
        raise ValueError(f"no {path}: give the folder of a run that has begun")
    series: dict[str, dict[str, dict[int, float]]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record: dict[str, Any] = json.loads(line)
            step, kind = record.pop("step"), record.pop("kind")
        except (ValueError, KeyError):
            raise ValueError(f"{path}, line {number}: not a line of metrics") from None
        for name, value in record.items():
            if isinstance(value, (int, float)):
                series.setdefault(kind, {}).setdefault(name, {})[step] = float(value)
    return series


def columns(points: dict[int, float]) -> tuple[list[int], list[float]]:
    """Return the steps in order and their values."""
    steps = sorted(points)
    return steps, [points[step] for step in steps]


if __name__ == "__main__":
    raise SystemExit(main())
