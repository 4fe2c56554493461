"""Draw a run, or compare several: face compare work_dirs/A work_dirs/B

Lists the differences between the configurations of the runs, shows their numbers side by side, and overlays their curves: loss,
learning rate, cosine, gradient norm, speed, verification accuracy (of several runs the mean of the sets) and ROC.
work_dirs/comparison then has comparison.html, comparison.png and comparison.md. A folder that `face eval` wrote can stand
for a run: it has results, but neither a configuration nor training curves.

Examples:
  face compare work_dirs/demo_cpu
  face compare work_dirs/one work_dirs/two
"""

import argparse
import json
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from configs.values import read_yaml
from utils.checkpoint.format import sections
from utils.cli import make_parser, progress
from utils.files import MAX_SMALL_TEXT, MAX_TEXT, lines_of, read_bytes, read_text, reading, shown, write_file
from utils.program import run_main
from utils.report import Page, make_figure, png_of, set_colours
from utils.text import label_text, markdown_table, markdown_text, plain_table

# of runs; different from the colours of the first sets, which colour the headings of the ROC curves
_COLOURS = ("black", "red", "deepskyblue", "limegreen", "magenta", "goldenrod", "navy", "gray")
_LEGEND = (
    "A number with * is better than that of each run without a star in the same row: their 95 % intervals do not overlap. "
    "In a row without *, no difference is certain, or results.json lacks the intervals."
)
Row = tuple[str, ...]
Points = tuple["array[int]", "array[float]"]  # steps, ascending, and the value at each
Series = dict[str, dict[str, Points]]  # kind -> name -> points
_PANELS = (
    ("loss", "loss"),
    ("lr", "learning rate"),
    ("positive_cosine", "cosine of an image to its class centre"),
    ("grad_norm", "gradient norm, before clipping"),
    ("images_per_second", "images/s"),
)
_NONE: Points = (array("q"), array("d"))
_NOT_COMPARED = ("run.name", "run.output")


class Run(NamedTuple):
    """The outputs of a run."""

    name: str
    series: Series  # {} for a folder of results alone
    results: dict[str, dict[str, Any]]  # set -> numbers
    config: dict[str, str]  # section.key -> value; {} for a folder of results alone


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face compare", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, or folders of face eval --report")
    parser.add_argument("--out", type=Path, default=Path("work_dirs/comparison"), help="folder of the comparison")
    return run_main(compare, parser.parse_args(arguments))


def compare(options: argparse.Namespace) -> None:
    """Read the runs, draw, and write."""
    runs = [read_run(path) for path in options.runs]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):  # two folders of one name
        runs = [run._replace(name=str(path)) for run, path in zip(runs, options.runs, strict=True)]
    options.out.mkdir(parents=True, exist_ok=True)
    head, rows = table(runs)
    differing, note = differences(runs)
    png = draw(runs)
    page = Page(f"Comparison of {', '.join(run.name for run in runs)}")
    page.contents()
    if differing or note:
        page.section("What differs in the configurations")
    if differing:
        page.table(head, differing)
    if note:
        page.text(note)
    page.section("Numbers")
    page.table(head, rows)
    page.text(_LEGEND)
    page.section("Curves")
    page.picture(png, "curves of the training, and the ROC curve of each set")
    page.write(options.out / "comparison.html")
    write_file(options.out / "comparison.png", png)
    parts = [markdown_table([head, *differing])] if differing else []
    parts += [markdown_text(note)] if note else []
    text = "\n\n".join([*parts, markdown_table([head, *rows]), markdown_text(_LEGEND)])
    write_file(options.out / "comparison.md", text + "\n")
    print(plain_table([head, *differing, *rows]), *([note] if note else []), _LEGEND, sep="\n\n")
    print(f"\nwritten: {shown(options.out / 'comparison.html')}")


def read_run(folder: Path) -> Run:
    """Return the contents of a folder: metrics.jsonl, results.json, or both; and config.yaml."""
    metrics, results = folder / "metrics.jsonl", folder / "results.json"
    if not metrics.is_file() and not results.is_file():
        raise ValueError(f"{folder}: neither metrics.jsonl nor results.json in it; give a run folder or a folder of a report")
    return Run(
        folder.resolve().name,
        read_series(metrics) if metrics.is_file() else {},
        read_results(results) if results.is_file() else {},
        read_config(folder / "config.yaml"),
    )


def read_series(path: Path) -> Series:
    """Return kind -> name -> points, kinds in the order of the file.

    A resumed run goes back to the step of its checkpoint; values that had been written for later steps are dropped.
    """
    series: Series = defaultdict(lambda: defaultdict(lambda: (array("q"), array("d"))))
    reached = 0
    with reading(path):
        lines = lines_of(read_bytes(path, MAX_TEXT))
    for number, line in enumerate(progress(lines, None, f"reading {shown(path)}", "line", delay=5), 1):
        try:
            record: dict[str, Any] = json.loads(line)
            step, kind = int(record.pop("step")), str(record.pop("kind"))
            numbers = {name: float(value) for name, value in record.items() if isinstance(value, (int, float))}
            array("q", [step])  # an integer may have any number of digits
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise ValueError(f"{path}, line {number}: not a line of metrics") from None
        if step < reached:
            for steps, values in (points for known in series.values() for points in known.values()):
                place = bisect_left(steps, step)
                del steps[place:], values[place:]
        reached, known = step, series[kind]
        for name, value in numbers.items():
            steps, values = known[name]
            if steps and steps[-1] == step:
                values[-1] = value
            else:
                steps.append(step)
                values.append(value)
    return series


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return set -> numbers of a results.json; ValueError if it was not written by this project."""
    try:
        found = json.loads(read_text(path, encoding="utf-8"))
        for numbers in found.values():
            single = [numbers.get(key) for key in ("accuracy", "eer", "auc", "xnorm")]
            single += numbers.get("tar_at_far", {}).values()
            both = [(numbers["num_genuine"], numbers["num_impostor"])] if "num_genuine" in numbers else []
            ranges = [pair for pair in numbers.get("intervals_95", {}).values() if pair is not None]
            curve = numbers.get("roc") or {"far": [], "tar": []}
            for values in (single, *both, *ranges, curve["far"], curve["tar"]):
                for value in values:
                    float(0 if value is None else value)
            if any(len(pair) != 2 for pair in ranges) or len(curve["far"]) != len(curve["tar"]):
                raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise ValueError(f"{path}: is not the results of an evaluation; rewrite it with face eval --report") from None
    return dict(found)


def read_config(path: Path) -> dict[str, str]:
    """Return section.key -> value as text of a run's saved configuration, {} if there is none."""
    if not path.is_file():
        return {}
    try:
        tree = read_yaml(read_text(path, MAX_SMALL_TEXT, "utf-8"))
        return {f"{section}.{key}": str(value) for section, keys in sections(tree).items() for key, value in keys.items()}
    except (yaml.YAMLError, ValueError, AttributeError, KeyError, TypeError):
        raise ValueError(f"{path}: is not the configuration of a run") from None


def differences(runs: Sequence[Run]) -> tuple[list[Row], str]:
    """Return a row for each key whose value differs between configurations, and a remark, "" if none is needed."""
    known = [run for run in runs if run.config]
    missing = [run.name for run in runs if not run.config]
    keys = [key for key in dict.fromkeys(key for run in known for key in run.config) if key not in _NOT_COMPARED]
    differing = [key for key in keys if len({run.config.get(key) for run in known}) > 1]
    rows = [(key, *(run.config.get(key, "-") for run in runs)) for key in differing]
    remarks = []
    if len(known) > 1 and not differing:
        remarks.append("The configurations agree in every key except the name and the folder of the run.")
    if missing:
        remarks.append(f"No config.yaml in {', '.join(missing)}: differences there are unknown.")
    return rows, " ".join(remarks)


def table(runs: Sequence[Run]) -> tuple[Row, list[Row]]:
    """Return the header, and a row for each set and number with a column per run; certain improvements are marked."""
    rows = []
    sets = list(dict.fromkeys(name for run in runs for name in run.results))
    numbers = (
        ("accuracy", "accuracy %", 100, 1),
        ("eer", "EER %", 100, -1),
        ("auc", "AUC", 1, 1),
        ("xnorm", "norm", 1, 0),
        ("rank_1", "rank-1 %", 100, 1),
        *((far, f"TAR % at FAR {far}", 100, 1) for far in ("1e-2", "1e-3", "1e-4")),
    )
    for name in sets:
        found = [run.results.get(name, {}) for run in runs]
        values_of = [{**result.get("tar_at_far", {}), **result} for result in found]
        pairs = [numbers["num_genuine"] + numbers["num_impostor"] if "num_genuine" in numbers else "" for numbers in found]
        if any(pairs):
            rows.append((f"{name}: pairs", *map(str, pairs)))
        for key, title, factor, better in numbers:
            values = [known.get(key) for known in values_of]
            if any(value is not None for value in values):
                ranges = [result.get("intervals_95", {}).get(key) for result in found]
                rows.append((f"{name}: {title}", *_shown(values, factor, stars(values, ranges, better))))
    losses = [run.series.get("train", {}).get("loss", _NONE) for run in runs]
    last = [values[-1] if values else None for _, values in losses]
    rows.append(("last loss", *_shown(last, 1, [False] * len(last))))
    rows.append(("optimizer steps", *(str(steps[-1]) if steps else "" for steps, _ in losses)))
    return ("", *(run.name for run in runs)), rows


def stars(values: Sequence[float | None], ranges: Sequence[Sequence[float] | None], better: int) -> list[bool]:
    """Return for each run whether it is better than every run without a star, that is, their intervals do not overlap.

    Args:
        values: of one number; None for a run that does not have it, which is then ignored.
        ranges: (low, high) of each value. If one is unknown, nothing is marked.
        better: 1 if a larger value is better, -1 if a smaller one is, 0 if neither.
    """
    marks = [False] * len(values)
    known = [place for place, value in enumerate(values) if value is not None]
    if not better or any(ranges[place] is None for place in known):
        return marks
    spans = {place: sorted(better * end for end in ranges[place] or ()) for place in known}
    ranked = sorted(known, key=lambda place: -better * (values[place] or 0.0))
    for count in range(1, len(ranked)):
        if min(spans[place][0] for place in ranked[:count]) > max(spans[place][1] for place in ranked[count:]):
            for place in ranked[:count]:
                marks[place] = True
            break
    return marks


def _shown(values: Sequence[float | None], factor: float, marks: Sequence[bool]) -> list[str]:
    """Return the values as text, with a star if they are marked."""
    digits = 2 if factor == 100 else 4
    return [
        "" if value is None else f"{factor * value:.{digits}f}{' *' if mark else ''}"
        for value, mark in zip(values, marks, strict=True)
    ]


def draw(runs: Sequence[Run]) -> bytes:
    """Return the PNG of the overlaid curves."""
    drawn = (name for run in runs for name, found in run.results.items() if found.get("roc", {}).get("far"))
    sets = list(dict.fromkeys(drawn))
    colours = set_colours(sets)
    count = len(_PANELS) + 1 + len(sets)
    figure = make_figure(13.2, 3.8 * -(-count // 3), layout="constrained")
    panels = figure.subplots(-(-count // 3), 3, squeeze=False).ravel()
    for axis in panels[count:]:
        axis.set_visible(False)
    axes, accuracy, rocs = panels[: len(_PANELS)], panels[len(_PANELS)], panels[len(_PANELS) + 1 : count]
    for number, run in enumerate(runs):
        label = label_text(run.name)
        colour = _COLOURS[number % len(_COLOURS)]
        train = run.series.get("train", {})
        for axis, (key, title) in zip(axes, _PANELS, strict=True):
            axis.plot(*train.get(key, _NONE), color=colour, linewidth=1, label=label)
            axis.set(title=title, xlabel="optimizer step")
        if "lr_centres" in train:
            axes[1].plot(*train["lr_centres"], color=colour, linewidth=1, linestyle="--", label=f"{label}: class centres")
        evaluated = {name: kind["accuracy"] for name, kind in run.series.items() if "accuracy" in kind}
        accuracies = {name: dict(zip(*points, strict=True)) for name, points in evaluated.items()}
        own = set_colours(accuracies)
        if len(runs) > 1 and accuracies:
            steps = set.intersection(*(set(points) for points in accuracies.values()))
            means = {step: float(np.mean([points[step] for points in accuracies.values()])) for step in steps}
            accuracies, own = {run.name: means}, {run.name: colour}
        for name, points in accuracies.items():
            style = {"color": own[name], "marker": "o", "markersize": 3, "label": label_text(name)}
            accuracy.plot(sorted(points), [100 * points[step] for step in sorted(points)], **style)
        for axis, name in zip(rocs, sets, strict=True):
            curve = run.results.get(name, {}).get("roc", {"far": []})
            if curve["far"]:
                axis.step(curve["far"], curve["tar"], where="post", color=colour, label=label)
    accuracy.set(
        title=f"{'mean accuracy of the sets' if len(runs) > 1 else 'verification accuracy'}, %", xlabel="optimizer step"
    )
    for axis, name in zip(rocs, sets, strict=True):
        axis.set(xlabel="FAR", ylabel="TAR", xscale="log", ylim=(0, 1.01))
        axis.set_title(f"{label_text(name)}: ROC", color=colours[name])
    for axis in panels[:count]:
        axis.grid(alpha=0.3, which="both")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(loc="best", fontsize=8)
    return png_of(figure)


if __name__ == "__main__":
    raise SystemExit(main())
