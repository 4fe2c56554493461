"""The tables and pictures of scripts.benchmark.losses, from whatever runs have ended."""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/losses_report.py is no program; python -m scripts lists them")

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.report.figure import make_figure
from utils.text import label_text, markdown_table

from .losses_results import BINS
from .losses_settings import SETTINGS

BEGIN, END = "<!-- begin: written by scripts.benchmark.losses -->", "<!-- end -->"
NOTHING = "Not measured yet."
_COLUMNS = 5  # panels in a row of the picture of the cosines

Rows = Sequence[dict[str, Any]]  # what losses_runs.measure writes, one for each run


def tables(rows: Rows) -> str:
    """Return the Markdown of all runs: a table for each set-up and share of sampled classes, a line for each loss."""
    parts = []
    for setup, rate in _groups(rows):
        chosen = [row for row in rows if (row["setup"], row["rate"]) == (setup, rate)]
        parts.append(f"**Sample rate {rate:g}**: {setup}. {_machines(chosen)}.\n\n{_table(chosen)}")
    return "\n\n".join(parts) or NOTHING


def accuracies(rows: Rows) -> str:
    """Return the Markdown for a page: accuracies alone, a table for each set-up, a column for each share and set."""
    parts = []
    for setup in dict.fromkeys(setup for setup, _ in _groups(rows)):
        chosen = [row for row in rows if row["setup"] == setup]
        sets = list(dict.fromkeys(name for row in chosen for name in row["accuracy"]))
        columns = [(rate, name) for rate in sorted({row["rate"] for row in chosen}, reverse=True) for name in sets]
        lines = [["loss", *(f"{name} at {rate:g}" for rate, name in columns)]]
        for name, steps in _cases(chosen):
            runs = [row for row in chosen if (row["setting"], row["steps"]) == (name, steps)]
            found = [
                [100 * run["accuracy"][key] for run in runs if run["rate"] == rate and key in run["accuracy"]]
                for rate, key in columns
            ]
            lines.append([SETTINGS[name].title, *(_mean(values, 2).replace(" ", "") for values in found)])
        parts.append(f"{setup}. {_machines(chosen)}.\n\n{markdown_table(lines)}")
    return "\n\n".join(parts) or NOTHING


def _machines(rows: Rows) -> str:
    return "; ".join(sorted({row["machine"].split(", torch")[0] for row in rows}))


def _groups(rows: Rows) -> list[tuple[str, float]]:
    """Return (set-up, rate) of each table: few identities first, and all classes before a share of them."""
    return sorted({(row["setup"], row["rate"]) for row in rows}, key=lambda group: (_identities(group[0]), group[0], -group[1]))


def _identities(setup: str) -> int:
    number = setup.partition(" ")[0].replace(",", "")
    return int(number) if number.isdecimal() else 0


def _table(rows: Rows) -> str:
    sets = list(dict.fromkeys(name for row in rows for name in row["accuracy"]))
    head = [
        "loss",
        "runs",
        "steps",
        *(f"{name} %" for name in sets),
        "genuine",
        "impostor",
        "loss at the end",
        "ms/step",
        "GiB",
    ]
    lines: list[list[str]] = [head]
    for name, steps in _cases(rows):
        runs = [row for row in rows if (row["setting"], row["steps"]) == (name, steps)]
        lines.append(
            [
                SETTINGS[name].title,
                str(len(runs)),
                str(steps),
                *(_mean([100 * run["accuracy"][key] for run in runs if key in run["accuracy"]], 2) for key in sets),
                *(_mean([run[kind]["mean"] for run in runs], 2) for kind in ("genuine", "impostor")),
                _mean([run["loss"] for run in runs], 2),
                f"{1000 * min(run['step_seconds'] for run in runs):.0f}",
                f"{max(run['memory_gib'] for run in runs):.2f}",
            ]
        )
    return markdown_table(lines)


def _cases(rows: Rows) -> list[tuple[str, int]]:
    """Return (row of SETTINGS, number of steps) of each line, the losses in the order of SETTINGS."""
    order = list(SETTINGS)
    known = {(row["setting"], row["steps"]) for row in rows if row["setting"] in SETTINGS}
    return sorted(known, key=lambda case: (order.index(case[0]), case[1]))


def _mean(values: Sequence[float], digits: int) -> str:
    """Return the mean, and from two runs on the standard deviation of a run."""
    if not values:
        return "n/a"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} +- {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def draw_cosines(rows: Rows, folder: Path) -> list[Path]:
    """Draw the cosines of genuine and impostor pairs of each loss, in a picture for each set-up and rate; return the files."""
    written = []
    for number, (setup, rate) in enumerate(_groups(rows)):
        chosen = [row for row in rows if (row["setup"], row["rate"]) == (setup, rate)]
        cases = _cases(chosen)
        in_a_row = min(_COLUMNS, len(cases))
        lines = math.ceil(len(cases) / in_a_row)
        figure = make_figure(max(6.0, 2.6 * in_a_row), 1.9 * lines + 0.9, layout="constrained")
        axes = figure.subplots(lines, in_a_row, squeeze=False, sharex=True).ravel()
        for panel, (axis, (name, steps)) in enumerate(zip(axes, cases, strict=False)):
            _draw_pairs(axis, [row for row in chosen if (row["setting"], row["steps"]) == (name, steps)])
            axis.set_title(label_text(SETTINGS[name].title), fontsize=9)
            axis.tick_params(labelbottom=panel + in_a_row >= len(cases))  # the lowest of its column
        for axis in axes[len(cases) :]:
            axis.set_visible(False)
        figure.suptitle(f"cosines of genuine (blue) and impostor (gray) pairs, sample rate {rate:g}\n{setup}", fontsize=9)
        path = folder / f"losses_cosines_{number}_rate_{rate:g}.png"
        figure.savefig(path)
        written.append(path)
    return written


def _draw_pairs(axis: Any, runs: Rows) -> None:
    for kind, colour in (("impostor", "tab:gray"), ("genuine", "tab:blue")):
        counts = [sum(column) for column in zip(*(run[kind]["histogram"] for run in runs), strict=True)]
        shares = [count / max(1, sum(counts)) for count in counts]
        axis.stairs(shares, BINS, fill=True, alpha=0.6, color=colour)
    axis.set(xlim=(-1.0, 1.0), xticks=(-0.5, 0.0, 0.5), yticks=[])
    axis.tick_params(labelsize=7)


def write_into_page(page: Path, text: str, start: str = BEGIN) -> None:
    """Replace what stands between the lines `start` and END on a page; errors as for `split_page`."""
    before, after = split_page(page, start)
    page.write_text(f"{before}{start}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def split_page(page: Path, start: str = BEGIN) -> tuple[str, str]:
    """Return what stands before the line `start` on a page, and after the line END.

    Raises:
        OSError: the page cannot be read.
        ValueError: the page does not have these two lines.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(start)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"--page: {page} must have the lines {start} and {END}; the tables go between them")
    return before, after
