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

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from losses import MARGINS, Margin, Published, build_margin, margin_arguments
from utils.report.contact_sheet import make_figure
from utils.text import label_text, markdown_table

BEGIN = "<!-- begin: written by scripts.benchmark.losses -->"
NOTHING = "Not measured yet."
BINS = np.linspace(-1.0, 1.0, 101)  # of cosines
_COLUMNS = 5  # panels in a row of the picture of the cosines

Row = dict[str, Any]  # the numbers of a run
Rows = Sequence[Row]


# The numbers are those that a paper or its authors' program trains with, on millions of photographs of tens of thousands of
# people; no search was made for settings that suit the demo. Only three losses say themselves how a number follows from the
# number of identities, and have that here as well: the scale of AdaCos, and the first biases of SphereFace2 and UniFace.
# KappaFace refreshes its margins after each epoch, as published.
#
class Setting(NamedTuple):
    """A row of the benchmark: a loss and the settings that it is trained with."""

    loss: str
    row: Published

    @property
    def title(self) -> str:
        """For tables and pictures."""
        return self.row.title

    @property
    def is_variant(self) -> bool:
        """Whether another row of the same loss stands for it by default."""
        return bool(self.row.arguments)


SETTINGS: dict[str, Setting] = {
    "demo": Setting("cosface", Published("demo", "CosFace as in the demo", "1801.09414", {"scale": 32.0, "margin": 0.3})),
    **{row.name: Setting(loss, row) for loss, margin in MARGINS.items() for row in margin.published},
}


def loss_arguments(setting: Setting, epoch_steps: int) -> dict[str, Any]:
    """Return every argument of the loss, since one that is left out would keep the value of the configuration below.

    Args:
        epoch_steps: optimizer steps of an epoch, after which KappaFace refreshes its margins.
    """
    defaults = margin_arguments(setting.loss)
    return {**defaults, **({"every": epoch_steps} if "every" in defaults else {}), **setting.row.arguments}


def tables(rows: Rows) -> str:
    """Return the Markdown of all runs: a table for each set-up and share of sampled classes, a line for each loss."""
    parts = []
    for (setup, _, rate), chosen in _groups(rows).items():
        parts.append(f"**Sample rate {rate:g}**: {setup}. {_machines(chosen)}.\n\n{_table(chosen)}")
    return "\n\n".join(parts) or NOTHING


def accuracies(rows: Rows) -> str:
    """Return the Markdown for a page: accuracies alone, a table for each set-up, a column for each share and set."""
    parts = []
    for setup, common in dict.fromkeys(key[:2] for key in _groups(rows)):
        chosen = [row for row in rows if (row["setup"], row["common"]) == (setup, common)]
        sets = list(dict.fromkeys(name for row in chosen for name in row["accuracy"]))
        columns = [(rate, name) for rate in sorted({row["rate"] for row in chosen}, reverse=True) for name in sets]
        lines = [["loss", *(f"{name} at {rate:g}" for rate, name in columns)]]
        for name, steps in dict.fromkeys(key[:2] for key in _lines(chosen)):
            runs = [row for row in chosen if (row["setting"], row["steps"]) == (name, steps)]
            found = [
                [100 * run["accuracy"][key] for run in runs if run["rate"] == rate and key in run["accuracy"]]
                for rate, key in columns
            ]
            lines.append([SETTINGS[name].title, *(_mean(values).replace(" ", "") for values in found)])
        parts.append(f"{setup}. {_machines(chosen)}.\n\n{markdown_table(lines)}")
    return "\n\n".join(parts) or NOTHING


def _machines(rows: Rows) -> str:
    return "; ".join(sorted({row["machine"].split(", torch")[0] for row in rows}))


def _groups(rows: Rows) -> dict[tuple[str, str, float], list[Row]]:
    """Return the runs of each table by (set-up, hash of all it has in common, rate): few identities first, high rates first."""

    def place(row: Row) -> tuple[int, str, str, float]:
        identities = row["setup"].partition(" ")[0].replace(",", "")
        return int(identities) if identities.isdecimal() else 0, row["setup"], row["common"], -row["rate"]

    return _grouped(sorted(rows, key=place), ("setup", "common", "rate"))


def _lines(rows: Rows) -> dict[tuple[str, int, str], list[Row]]:
    """Return the runs of each line by (row of SETTINGS, steps, hash of all but the seed), in the order of SETTINGS."""
    order = list(SETTINGS)
    ranked = sorted(rows, key=lambda row: (order.index(row["setting"]), row["steps"]))
    return _grouped(ranked, ("setting", "steps", "recipe"))


def _grouped(rows: Rows, keys: Sequence[str]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def _table(rows: Rows) -> str:
    sets = list(dict.fromkeys(name for row in rows for name in row["accuracy"]))
    head = ["loss", "runs", "steps", *(f"{name} %" for name in sets)]
    lines: list[list[str]] = [[*head, "genuine", "impostor", "loss at the end", "ms/step", "GiB"]]
    for (name, steps, _), runs in _lines(rows).items():
        lines.append(
            [
                SETTINGS[name].title,
                str(len(runs)),
                str(steps),
                *(_mean([100 * run["accuracy"][key] for run in runs if key in run["accuracy"]]) for key in sets),
                *(_mean([run[kind]["mean"] for run in runs]) for kind in ("genuine", "impostor")),
                _mean([run["loss"] for run in runs]),
                f"{1000 * min(run['step_seconds'] for run in runs):.0f}",
                f"{max(run['memory_gib'] for run in runs):.2f}",
            ]
        )
    return markdown_table(lines)


def _mean(values: Sequence[float]) -> str:
    """Return the mean, and from two runs on the standard deviation of a run."""
    if not values:
        return "n/a"
    mean = f"{statistics.fmean(values):.2f}"
    return f"{mean} +- {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def draw_cosines(rows: Rows, folder: Path) -> list[Path]:
    """Draw the cosines of genuine and impostor pairs of each loss, in a picture for each table; return the files."""
    written = []
    for number, ((setup, _, rate), chosen) in enumerate(_groups(rows).items()):
        cases = _lines(chosen)
        in_a_row = min(_COLUMNS, len(cases))
        lines = math.ceil(len(cases) / in_a_row)
        figure = make_figure(max(6.0, 2.6 * in_a_row), 1.9 * lines + 0.9, layout="constrained")
        axes = figure.subplots(lines, in_a_row, squeeze=False, sharex=True).ravel()
        for panel, (axis, (key, runs)) in enumerate(zip(axes, cases.items(), strict=False)):
            for kind, colour in (("impostor", "tab:gray"), ("genuine", "tab:blue")):
                counts = [sum(column) for column in zip(*(run[kind]["histogram"] for run in runs), strict=True)]
                shares = [count / max(1, sum(counts)) for count in counts]
                axis.stairs(shares, BINS, fill=True, alpha=0.6, color=colour)
            axis.set(xlim=(-1.0, 1.0), xticks=(-0.5, 0.0, 0.5), yticks=[])
            axis.set_title(label_text(SETTINGS[key[0]].title), fontsize=9)
            axis.tick_params(labelsize=7, labelbottom=panel + in_a_row >= len(cases))  # the lowest of its column
        for axis in axes[len(cases) :]:
            axis.set_visible(False)
        figure.suptitle(f"cosines of genuine (blue) and impostor (gray) pairs, sample rate {rate:g}\n{setup}", fontsize=9)
        written.append(folder / f"losses_cosines_{number}_rate_{rate:g}.png")
        figure.savefig(written[-1])
    return written


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
