"""Writes the rates of groups: results.json, results.csv, pictures, and a page."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.embedding_table import Faces
from utils.files import write_csv, write_file
from utils.report.contact_sheet import make_figure, png_of, set_colours
from utils.report.page import Page
from utils.text import label_text, one_line, plain_table

from .groups import MIN_ERRORS, MIN_PEOPLE, Outcome, Rate, garbe, measures

HEAD = ("group", "people", "impostor pairs", "FMR", "95 %", "/ mean", "genuine pairs", "FNMR", "95 %", "/ mean")
_COLUMNS = ("people", "pairs", "errors", "rate", "low", "high", "over_geometric_mean")
RULE = (
    f"A rate is given where {MIN_PEOPLE} people or more take part, and {MIN_ERRORS} errors or more were seen, or would be "
    "expected at the rate of all groups together. Otherwise it is called too few, with the expected number of errors."
)
_TERMS = (
    "FMR: the share of pairs of two people that are accepted. FNMR: the share of pairs of one person that are rejected. Both "
    "pictures are of the group. / mean: the rate over the geometric mean of the groups' rates. Intervals count people, not "
    "pairs, as independent; below some thirty people they are too narrow. They do not correct for looking at many groups."
)


def table_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """Return a row below HEAD for each group."""
    rows = []
    means = [measures(rates)["geometric_mean"] for rates in (outcome.fmr, outcome.fnmr)]
    for name, *rates in zip(outcome.names, outcome.fmr, outcome.fnmr, strict=True):
        row = [one_line(name), f"{max(rate.people for rate in rates):,}"]
        for rate, mean in zip(rates, means, strict=True):
            row += [f"{rate.pairs:,}", *_cells(rate, mean)]
        rows.append(tuple(row))
    return rows


def _cells(rate: Rate, mean: float | None) -> tuple[str, str, str]:
    if rate.value is None:
        return f"too few ({rate.expected:.2g})", "-", "-"
    return f"{rate.value:.3g}", f"{rate.low:.2g} to {rate.high:.2g}", f"{rate.value / mean:.2f}" if mean else "-"


def summary(outcome: Outcome) -> str:
    """Return the table for a terminal, and the measures."""
    lines = [plain_table([HEAD, *table_rows(outcome)])]
    for name, rates in (("FMR", outcome.fmr), ("FNMR", outcome.fnmr)):
        found = measures(rates)
        shown = (f"{key.replace('_', ' ')} {'-' if value is None else f'{value:.3g}'}" for key, value in found.items())
        lines.append(f"{name}: {', '.join(shown)}")
    return "\n".join(lines)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return all numbers; a rate is null where there are too few people or pairs."""
    found = {"fmr": measures(outcome.fmr), "fnmr": measures(outcome.fnmr)}
    groups = {}
    for name, *rates in zip(outcome.names, outcome.fmr, outcome.fnmr, strict=True):
        groups[name] = {key: _values(rate, found[key]["geometric_mean"]) for key, rate in zip(found, rates, strict=True)}
    return {
        "threshold": outcome.threshold,
        "pooled_fmr": outcome.pooled[0],
        "pooled_fnmr": outcome.pooled[1],
        "groups": groups,
        "differential_performance": found | {"garbe": garbe(found["fmr"], found["fnmr"])},
        "across_groups": {
            "false_matches": outcome.false_matches.tolist(),
            "impostor_pairs": outcome.impostor_pairs.tolist(),
            "false_non_matches": outcome.false_non_matches.tolist(),
            "genuine_pairs": outcome.genuine_pairs.tolist(),
        },
    }


def _values(rate: Rate, mean: float | None) -> dict[str, Any]:
    stated = rate.value is not None
    return {
        "people": rate.people,
        "pairs": rate.pairs,
        "errors": rate.errors,
        "rate": rate.value,
        "low": rate.low if stated else None,
        "high": rate.high if stated else None,
        "over_geometric_mean": rate.value / mean if rate.value is not None and mean else None,
    }


def draw_rates(outcome: Outcome) -> bytes:
    """Draw the rates of the groups with their intervals; groups with too few pairs have none."""
    figure = make_figure(11, 1.4 + 0.3 * len(outcome.names), layout="constrained")
    for axis, rates, name in zip(figure.subplots(1, 2, sharey=True), (outcome.fmr, outcome.fnmr), ("FMR", "FNMR"), strict=True):
        for place, rate in enumerate(rates):
            if rate.value is None:
                axis.text(0.02, place, "too few", transform=axis.get_yaxis_transform(), va="center", color="gray")
            else:
                axis.plot([rate.low, rate.high], [place, place], color="tab:blue")
                axis.plot(rate.value, place, "o", color="tab:blue")
        axis.axvline(outcome.pooled[name == "FNMR"], color="gray", linestyle=":", label="all groups")
        axis.set(xlabel=f"{name} at cosine {outcome.threshold:.4f}", ylim=(len(rates) - 0.5, -0.5))
        axis.set_yticks(range(len(rates)), [label_text(name) for name in outcome.names])
        axis.set_xlim(left=0)
        axis.legend(loc="best")
    return png_of(figure)


def draw_curves(outcome: Outcome) -> bytes:
    """Draw FMR and FNMR of each group over the threshold, down to the rate that its pairs can show."""
    figure = make_figure(11, 4.2, layout="constrained")
    colours = set_colours(outcome.names)
    for axis, counts, name in zip(figure.subplots(1, 2), (outcome.impostor, outcome.genuine), ("FMR", "FNMR"), strict=True):
        for group, row in zip(outcome.names, counts, strict=True):
            if row.sum() < MIN_ERRORS:
                continue
            errors = row[::-1].cumsum()[::-1] if name == "FMR" else row.cumsum() - row
            shown = (errors >= 1) & (errors < row.sum())
            style = "-" if list(colours).index(group) < 9 else "--"
            axis.plot(
                outcome.edges[:-1][shown], errors[shown] / row.sum(), style, color=colours[group], label=label_text(group)
            )
        axis.axvline(outcome.threshold, color="gray", linestyle=":")
        axis.set(xlabel="threshold (cosine)", ylabel=name, yscale="log")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    return png_of(figure)


def draw_across(outcome: Outcome) -> bytes:
    """Draw the FMR between all groups as a heat map; cells with too few pairs are empty."""
    errors, pairs = outcome.false_matches.astype(float), outcome.impostor_pairs.astype(float)
    enough = np.maximum(errors, pairs * outcome.pooled[0]) >= MIN_ERRORS
    people = np.array([rate.people >= MIN_PEOPLE for rate in outcome.fmr])
    enough &= people[:, None] & people
    rates = np.divide(errors, pairs, out=np.full(errors.shape, np.nan), where=enough & (pairs > 0))
    rates = np.where(np.tri(len(rates), k=-1, dtype=bool), rates.T, rates)
    count = len(rates)
    figure = make_figure(2.5 + 0.75 * count, 1.8 + 0.6 * count, layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(np.where(rates > 0, np.log10(np.where(rates > 0, rates, 1)), np.nan), cmap="YlOrRd", alpha=0.6)
    for row, column in np.ndindex(count, count):
        value = rates[row, column]
        axis.text(column, row, "too few" if np.isnan(value) else f"{value:.1e}", ha="center", va="center", fontsize=7)
    names = [label_text(name) for name in outcome.names]
    axis.set_xticks(range(count), names, rotation=45, ha="right")
    axis.set_yticks(range(count), names)
    if (rates > 0).any():
        figure.colorbar(image, label="log10 FMR")
    return png_of(figure)


def write_groups(out: Path, title: str, outcome: Outcome, faces: Faces, facts: Sequence[tuple[str, str]]) -> None:
    """Write results.json, results.csv, rates.png, curves.png, across.png and report.html into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    found = as_json(outcome)
    write_file(out / "results.json", json.dumps(found, indent=1) + "\n")
    rows = [(name, kind, *values.values()) for name, kinds in found["groups"].items() for kind, values in kinds.items()]
    write_csv(out / "results.csv", ("group", "kind", *_COLUMNS), rows)
    page = Page(title)
    page.facts(facts)
    page.section("Rates of each group")
    page.text(_TERMS)
    page.text(RULE)
    page.table(HEAD, table_rows(outcome))
    drawn = {"rates": draw_rates(outcome), "across": draw_across(outcome), "curves": draw_curves(outcome)}
    page.picture(drawn["rates"], "rates and 95 % intervals at one threshold for all; dotted: all groups together")
    page.section("Differential performance")
    page.text(
        "Of the groups with a rate. Max / min and max / geometric mean: 1 = equal. Gini: 0 = equal, 1 = one group has all."
    )
    differences = found["differential_performance"]
    texts = [(key, *(_text(differences[kind][key]) for kind in ("fmr", "fnmr"))) for key in differences["fmr"]]
    page.table(
        ("", "FMR", "FNMR"),
        [*((key.replace("_", " "), *row) for key, *row in texts), ("GARBE", _text(differences["garbe"]), "")],
    )
    page.section("Between groups")
    page.picture(drawn["across"], "FMR of pairs of two people, one of each group")
    cells = [
        (*(one_line(outcome.names[group]) for group in cell), int(outcome.false_non_matches[cell]), int(total))
        for cell, total in np.ndenumerate(outcome.genuine_pairs)
        if cell[0] < cell[1] and total
    ]
    if cells:
        page.text("People with pictures in two groups; these pairs count in no group's FNMR.")
        page.table(("group", "other group", "rejected", "genuine pairs"), cells)
    page.section("Over the threshold")
    page.picture(drawn["curves"], "FMR and FNMR of each group; dotted: the threshold of this page")
    if outcome.alike:
        page.section("Lookalikes")
        page.text(
            "The most similar pictures of two people. Wrong labels come first here: look at them before you believe a rate."
        )
        lines = [(f"{cosine:.4f}", *(one_line(faces.names[row]) for row in rows)) for cosine, *rows in outcome.alike]
        page.table(("cosine", "picture", "other picture"), lines)
    for name, png in drawn.items():
        write_file(out / f"{name}.png", png)
    page.write(out / "report.html")


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
