"""The tables and pictures of scripts.benchmark.losses: of the runs that have ended, and of the losses over the angle.

The curves come from the margins themselves, through the interface by which the head uses them. What depends on a batch or a
training is as at the first step; an embedding has the norm NORM.
Shapes: T = angles.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from losses import MARGINS, Margin, build_margin
from utils.report.figure import make_figure
from utils.text import label_text, markdown_table

from .losses_results import BINS, SETTINGS, loss_arguments

BEGIN = "<!-- begin: written by scripts.benchmark.losses -->"
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


NORM = 20.0  # of the embeddings: the mean with which AdaFace begins
NUM_CLASSES = 500  # of the demo
LATE = 1_000_000  # the optimizer step, in which every schedule has ended
NEGATIVE_AT = math.pi / 3  # the sample's own angle in the picture of the negatives
# each picture has the losses that are compared with one another; ArcFace is in all
GROUPS = {
    family: [name for name, margin in MARGINS.items() if margin.family == family or name == "arcface"]
    for family in ("added", "adaptive", "multiplied", "angles", "hard_and_sums")
}
IN_LOGITS = "angles"  # the picture whose logits are not divided by the scale: that of QAMFace multiplies the square of an angle
NEGATIVES = ("arcface", "curricularface", "mv_softmax", "arcnegface", "npcface", "circle", "li_arcface", "sphereface2")
_COLOURS = ("black", "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:cyan")


class Curve(NamedTuple):
    """A loss over the angles (T,), all of float64.

    Args:
        logit: of the target class.
        slope: minus its derivative with respect to the angle, so that it is positive where the loss pulls.
        loss: with NUM_CLASSES - 1 negatives at 90 degrees.
    """

    logit: Tensor
    slope: Tensor
    loss: Tensor


def first_step_margin(name: str) -> Margin:
    """Return the margin of a row of SETTINGS before its first step, with ended schedules; ElasticFace with its mean margin."""
    setting = SETTINGS[name]
    arguments = loss_arguments(setting, NUM_CLASSES)
    if setting.loss == "elasticface":
        arguments["std"] = 0.0
    margin = build_margin(setting.loss, **arguments)
    margin.prepare(NUM_CLASSES, NUM_CLASSES)
    margin.at_step(LATE)
    return margin


def curve(margin: Margin, theta: Tensor) -> Curve:
    """Return a margin's curve over the angles theta (T,) float64, in radians."""
    cosine = theta.cos().requires_grad_()
    norm = torch.full_like(theta, NORM)
    state = margin.observe(cosine.detach(), norm)
    of_negatives, _ = margin.negatives(cosine.detach(), norm, state).logits(torch.zeros(1, len(theta), dtype=torch.float64))
    log_z = of_negatives[0] + math.log(NUM_CLASSES - 1)
    state = margin.complete(state, log_z, torch.zeros(2, len(theta), dtype=torch.float64))
    logit = margin.target(cosine, norm, state)
    (by_cosine,) = torch.autograd.grad(logit.sum(), cosine)
    logit = logit.detach()
    if margin.link == "softmax":
        loss = F.softplus(log_z - logit)
    else:
        loss = margin.target_weight * F.softplus(-logit)
        loss = loss + margin.negative_weight * (NUM_CLASSES - 1) * F.softplus(of_negatives[0])
    return Curve(logit, by_cosine * theta.sin(), loss.detach())


def negative_curve(margin: Margin, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logit (T,) of a negative at the angles theta, of a sample at NEGATIVE_AT, and minus its derivative (T,)."""
    own, norm = torch.full((1,), math.cos(NEGATIVE_AT), dtype=torch.float64), torch.full((1,), NORM, dtype=torch.float64)
    state = margin.observe(own, norm)
    logit, by_cosine = margin.negatives(own, norm, state).logits(theta.cos()[:, None])
    return logit[:, 0], by_cosine[:, 0] * theta.sin()


def draw_curves(folder: Path) -> list[Path]:
    """Draw all pictures into a folder; return the files."""
    written = [_draw_group(folder, group, names) for group, names in GROUPS.items()]
    return [*written, _draw_negatives(folder)]


def _styles(names: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return (row of SETTINGS, style of its line). Where lines coincide, the later is thinner."""
    widths = [1.0 + 0.6 * (len(names) - 1 - number) for number in range(len(names))]
    return [(n, {"color": c, "linewidth": w}) for n, c, w in zip(names, _COLOURS, widths, strict=False)]


def _draw_group(folder: Path, group: str, names: Sequence[str]) -> Path:
    theta = torch.linspace(0.01, math.pi - 0.01, 721, dtype=torch.float64)
    degrees = theta.rad2deg()
    figure = make_figure(14, 4.4, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, style in _styles(names):
        margin = first_step_margin(name)
        found, scale = curve(margin, theta), unit_of(margin)
        unit = 1.0 if group == IN_LOGITS else scale
        left.plot(degrees, found.logit / unit, label=f"{SETTINGS[name].title}, s = {scale:.3g}", **style)
        middle.plot(degrees, found.slope / unit, **style)
        right.plot(degrees, found.loss, **style)
    by = "" if group == IN_LOGITS else " / s"
    left.set(title=f"target logit{by}", ylabel=f"logit{by}")
    middle.set(title="its derivative: how hard it pulls", ylabel=f"- d logit / d angle{by}")
    right.set(title=f"loss, with {NUM_CLASSES - 1} negatives at 90 degrees", yscale="log", ylim=(1e-3, None))
    _finish((left, middle, right))
    path = folder / f"losses_{group}.png"
    figure.savefig(path)
    return path


def _draw_negatives(folder: Path) -> Path:
    theta = torch.linspace(0.01, math.pi - 0.01, 1441, dtype=torch.float64)
    figure = make_figure(10, 4.4, layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, style in _styles(NEGATIVES):
        margin = first_step_margin(name)
        (logit, slope), scale = negative_curve(margin, theta), unit_of(margin)
        left.plot(theta.rad2deg(), logit / scale, label=f"{SETTINGS[name].title}, s = {scale:.3g}", **style)
        right.plot(theta.rad2deg(), slope / scale, **style)
    left.set(title=f"logit of a negative / s, own class at {math.degrees(NEGATIVE_AT):.0f} degrees", ylabel="logit / s")
    right.set(title="its derivative: how hard it is pushed away", ylabel="- d logit / d angle / s")
    _finish((left, right))
    path = folder / "losses_negatives.png"
    figure.savefig(path)
    return path


def unit_of(margin: Margin) -> float:
    """Return the scale by which a picture divides the logits: the norm where it takes the scale's place."""
    cosine, norm = torch.zeros(1), torch.full((1,), NORM)
    return float(torch.as_tensor(margin.negative_scale(norm, margin.observe(cosine, norm))).reshape(-1)[0])


def _finish(axes: Sequence[Any]) -> None:
    for axis in axes:
        axis.set(xlabel="angle to the class centre, degrees", xlim=(0, 180), xticks=range(0, 181, 30))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
