"""Writes the rates of groups: results.json, results.csv, pictures, and a page."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from utils.files import write_csv, write_file
from utils.report.contact_sheet import make_figure, png_of, set_colours
from utils.report.page import Page
from utils.text import label_text, one_line, plain_table

from .groups import Outcome
from .intervals import MIN_ERRORS, MIN_PEOPLE, differences
from .pairs_report import EXTREMES, show_extremes

_COLUMNS = ("group", "other_group", "kind", "people", "pairs", "errors", "rate", "low", "high", "over_geometric_mean")
_HEAD = ("group", "other group", "kind", "people", "pairs", "errors", "rate", "95 %", "/ mean")
RULE = (
    f"A rate is given where {MIN_PEOPLE} people or more of each group take part, and {MIN_ERRORS} errors or more were seen, or "
    "would be expected at the rate of all groups together. Otherwise it is called too few."
)
_TERMS = (
    "FMR: the share of pairs of two people that are accepted. FNMR: the share of pairs of one person that are rejected. Both "
    "pictures are of the group. / mean: the rate over the geometric mean of the groups' rates. Intervals count people, not "
    "pairs, as independent; below some thirty people they are too narrow. They do not correct for looking at many groups."
)
_MEASURES = (
    "Of the groups with a rate. Max / min and max / geometric mean: 1 = equal. Gini: 0 = equal, 1 = one group has all errors. "
    "GARBE is the mean of both Gini coefficients, FDR is 1 - the mean of both max - min."
)


def rates_of(outcome: Outcome) -> list[tuple]:
    """Return a row of _COLUMNS for each kind of rate, of each group and of each two groups with pairs."""
    rows: list[tuple] = []
    found = zip(("fmr", "fnmr"), (outcome.fmr, outcome.fnmr), differences(*outcome.within())[:2], strict=True)
    for kind, cells, measures in found:
        mean = measures["geometric_mean"]
        for (one, other), rate in cells.items():
            names, value = (outcome.names[one], outcome.names[other], kind), rate.value
            stated = (None,) * 4 if value is None else (value, rate.low, rate.high, value / mean if mean else None)
            rows.append((*names, rate.people, rate.pairs, rate.errors, *stated))
    return rows


def table_of(rows: Sequence[tuple], within: bool) -> list[tuple[str, ...]]:
    """Return the rates within groups, or of two groups, as texts below _HEAD."""
    texts = []
    for one, other, kind, *numbers, rate, low, high, mean in rows:
        if (one == other) is within:
            shown = ("too few", "-") if rate is None else (f"{rate:.3g}", f"{low:.2g} to {high:.2g}")
            over = "-" if mean is None else f"{mean:.2f}"
            texts.append((one_line(one), one_line(other), kind.upper(), *(f"{number:,}" for number in numbers), *shown, over))
    return sorted(texts)


def measure_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """Return the measures of FMR, of FNMR, and of both, as texts."""
    fmr, fnmr, both = differences(*outcome.within())
    rows = [(key.replace("_", " "), value, fnmr[key]) for key, value in fmr.items()]
    return [
        (name, *("-" if value is None else f"{value:.3g}" for value in values))
        for name, *values in [*rows, *((key.upper(), value, value) for key, value in both.items())]
    ]


def summary(outcome: Outcome) -> str:
    """Return the tables for a terminal."""
    tables = [_HEAD, *table_of(rates_of(outcome), True)], [("", "FMR", "FNMR"), *measure_rows(outcome)]
    return "\n".join((*map(plain_table, tables), RULE))


def draw_rates(outcome: Outcome) -> bytes:
    """Draw the rates of the groups with their intervals; groups with too few pairs have none."""
    figure = make_figure(11, 1.4 + 0.3 * len(outcome.names), layout="constrained")
    drawn = zip(figure.subplots(1, 2, sharey=True), outcome.within(), ("FMR", "FNMR"), outcome.pooled, strict=True)
    for axis, rates, name, pooled in drawn:
        for place, rate in enumerate(rates):
            if rate.value is None:
                axis.text(0.02, place, "too few", transform=axis.get_yaxis_transform(), va="center", color="gray")
            else:
                axis.plot([rate.low, rate.high], [place, place], color="tab:blue")
                axis.plot(rate.value, place, "o", color="tab:blue")
        axis.axvline(pooled, color="gray", linestyle=":", label="all groups")
        axis.set(xlabel=f"{name} at cosine {outcome.threshold:.4f}", ylim=(len(rates) - 0.5, -0.5))
        axis.set_yticks(range(len(rates)), [label_text(name) for name in outcome.names])
        axis.set_xlim(left=0)
        axis.legend(loc="best")
    return png_of(figure)


def draw_curves(outcome: Outcome) -> bytes:
    """Draw FMR and FNMR of each group over the threshold, down to the rate that its pairs can show."""
    figure = make_figure(11, 4.2, layout="constrained")
    colours = set_colours(outcome.names)
    kinds = np.einsum("ggb->gb", outcome.counts.impostor), outcome.counts.genuine
    for axis, counts, name in zip(figure.subplots(1, 2), kinds, ("FMR", "FNMR"), strict=True):
        for place, (group, row) in enumerate(zip(outcome.names, counts, strict=True)):
            if row.sum() >= MIN_ERRORS:
                errors = row[::-1].cumsum()[::-1] if name == "FMR" else row.cumsum() - row
                shown = (errors >= 1) & (errors < row.sum())
                style = {"color": colours[group], "linestyle": "-" if place < 9 else "--", "label": label_text(group)}
                if shown.any():
                    axis.plot(outcome.counts.edges[:-1][shown], errors[shown] / row.sum(), **style)
        axis.axvline(outcome.threshold, color="gray", linestyle=":")
        axis.set(xlabel="threshold (cosine)", ylabel=name)
        if axis.get_legend_handles_labels()[0]:
            axis.set_yscale("log")
            axis.legend(fontsize=7)
    return png_of(figure)


def draw_across(outcome: Outcome) -> bytes:
    """Draw the FMR between all groups as a heat map."""
    count = len(outcome.names)
    figure = make_figure(2.5 + 0.75 * count, 1.8 + 0.6 * count, layout="constrained")
    axis, logs = figure.subplots(), np.full((count, count), np.nan)
    for (one, other), rate in outcome.fmr.items():
        for row, column in {(one, other), (other, one)}:
            if rate.value:
                logs[row, column] = np.log10(rate.value)
            text = "too few" if rate.value is None else f"{rate.value:.1e}"
            axis.text(column, row, text, ha="center", va="center", fontsize=7)
    image = axis.imshow(logs, cmap="YlOrRd", alpha=0.6)
    names = [label_text(name) for name in outcome.names]
    axis.set_xticks(range(count), names, rotation=45, ha="right")
    axis.set_yticks(range(count), names)
    if np.isfinite(logs).any():
        figure.colorbar(image, label="log10 FMR")
    return png_of(figure)


def write_groups(
    out: Path,
    title: str,
    outcome: Outcome,
    pictures: Sequence[str],
    facts: Sequence[tuple[str, str]],
    read: Callable[[str], np.ndarray] | None,
) -> None:
    """Write results.json, results.csv, rates.png, curves.png, across.png and report.html into a folder.

    Args:
        pictures: names of the rows.
        facts: for the top of the page.
        read: of `show_extremes`.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows, found = rates_of(outcome), differences(*outcome.within())
    results = {
        "threshold": outcome.threshold,
        "pooled": dict(zip(("fmr", "fnmr"), outcome.pooled, strict=True)),
        "rates": [dict(zip(_COLUMNS, row, strict=True)) for row in rows],
        "differences": {"fmr": found[0], "fnmr": found[1], **found[2]},
    }
    write_file(out / "results.json", json.dumps(results, indent=1) + "\n")
    write_csv(out / "results.csv", _COLUMNS, rows)
    drawn = {"rates": draw_rates(outcome), "across": draw_across(outcome), "curves": draw_curves(outcome)}
    for name, png in drawn.items():
        write_file(out / f"{name}.png", png)
    page = Page(title)
    page.facts(facts)
    page.section("Rates of each group")
    page.text(f"{_TERMS} {RULE}")
    page.table(_HEAD, table_of(rows, True))
    page.picture(drawn["rates"], "rates and 95 % intervals at one threshold for all; dotted: all groups together")
    page.section("Differences")
    page.text(_MEASURES)
    page.table(("", "FMR", "FNMR"), measure_rows(outcome))
    page.section("Between groups")
    page.picture(drawn["across"], "FMR of pairs of two people, one of each group")
    page.text("FNMR: people with pictures in two groups. These pairs count in no group's FNMR.")
    page.table(_HEAD, table_of(rows, False))
    page.section("Over the threshold")
    page.picture(drawn["curves"], "FMR and FNMR of each group; dotted: the threshold of this page")
    show_extremes(page, "lookalikes", EXTREMES["lookalikes"], outcome.counts.lookalikes, pictures, read)
    page.write(out / "report.html")
