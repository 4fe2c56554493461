"""Draw the learning-rate schedules over 20 epochs: the picture of docs/optimisation.md.

The rates are those of the class that train.py uses, as shares of optimizer.lr.

Example: python -m scripts.plot_schedules schedules.png
"""

from collections.abc import Sequence
from pathlib import Path

from utils.cli import make_parser
from utils.program import run_main
from utils.report.figure import make_figure
from utils.schedule import Schedule

_EPOCHS, _STEPS, _WARMUP = 20, 100, 2  # epochs, optimizer steps in one, epochs of warm-up
_COLOURS = ("black", "tab:gray", "tab:blue", "tab:green", "tab:red", "tab:orange")


def drawn_schedules() -> dict[str, Schedule]:
    """Return the schedules of the picture by their settings, each with a peak of 1."""
    total, warmup = _EPOCHS * _STEPS, _WARMUP * _STEPS
    return {
        "poly, power 2": Schedule("poly", 1.0, total, warmup),
        "poly, power 1": Schedule("poly", 1.0, total, warmup, power=1.0),
        "cosine": Schedule("cosine", 1.0, total, warmup),
        "cosine, min_lr a tenth of lr": Schedule("cosine", 1.0, total, warmup, min_lr=0.1),
        "step, milestones [8, 14, 18]": Schedule("step", 1.0, total, warmup, milestones=(8 * _STEPS, 14 * _STEPS, 18 * _STEPS)),
        "constant": Schedule("constant", 1.0, total, warmup),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and draw; return the exit status."""
    parser = make_parser("python -m scripts.plot_schedules", __doc__)
    parser.add_argument("out", type=Path, help="PNG file to write")
    options = parser.parse_args(arguments)
    return run_main(lambda: draw(options.out))


def draw(out: Path) -> None:
    """Write the picture."""
    figure = make_figure(8, 3.6, layout="constrained")
    axis = figure.subplots()
    epochs = [step / _STEPS for step in range(_EPOCHS * _STEPS)]
    for (label, schedule), colour in zip(drawn_schedules().items(), _COLOURS, strict=True):
        axis.plot(epochs, [schedule.rate(step) for step in range(len(epochs))], color=colour, label=label)
    axis.set(xlabel="epoch", ylabel="share of optimizer.lr", title="learning rate, with 2 epochs of warm-up", xlim=(0, _EPOCHS))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper right", bbox_to_anchor=(0.99, 0.93))
    figure.savefig(out)
    print(f"written: {out}")


if __name__ == "__main__":
    raise SystemExit(main())
