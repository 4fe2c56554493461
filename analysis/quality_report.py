"""Writes what measures of quality can do: results.json, results.csv, curves, and a page."""

import json
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.files import write_csv, write_file
from utils.report.contact_sheet import captioned_sheet, make_figure, png_of, set_colours
from utils.report.page import Page
from utils.text import one_line

from .quality import WITHIN, Discard, ideal

COLUMNS = ("measure", "pictures", "missing", "FNMR", f"mean to {WITHIN:.0%}", "random", "ideal", "gain")
GATE_COLUMNS = ("measure", "gate", "pictures discarded", "comparisons discarded", "FNMR before", "FNMR after")
# of face enrol; the last two of face detect too
_FLAGS = {("norm", False): "--min-norm", ("padding", True): "--max-padding", ("score", False): "--min-score"}
_SHOWN = 8  # pictures of each end of a measure
_DRAWN = 0.5  # largest share
_MEANING = (
    "Comparisons of the lowest quality are discarded. A useful measure lets FNMR fall soon. Random discards without looking; "
    "ideal discards false non-matches first, and no measure is below it. Gain is 0 for random and 1 for ideal, by the mean "
    f"FNMR from 0 to {WITHIN:.0%} of comparisons. Pictures without a measure are left out of its row."
)
_GATES = "Each discards as many pictures as it may. In a gallery it looks at one of the two pictures of a comparison alone."


def rows_of(found: Mapping[str, Discard], num_pictures: int) -> list[tuple[str, ...]]:
    """Return a row of COLUMNS for each measure, the best first."""
    rows = []
    for name, one in sorted(found.items(), key=lambda pair: (-(pair[1].gain() or 0.0), pair[0])):
        gain, start = one.gain(), one.at(0)
        rates = _percent(start, one.area(), start, one.ideal_area())
        rows.append((name, str(one.known), str(num_pictures - one.known), *rates, "-" if gain is None else f"{gain:.3f}"))
    return rows


def gate_rows(found: Mapping[str, Discard], lower: Container[str], share: float) -> list[tuple[str, ...]]:
    """Return a row of GATE_COLUMNS for each measure, with its flag of _FLAGS, if any; a gate may discard that share of all."""
    rows = []
    for name, one in found.items():
        flag = _FLAGS.get((name, name in lower), "at most" if name in lower else "at least")
        gate = one.gate(share)
        text = f"none up to {share:.1%}" if gate is None else f"{flag} {np.format_float_positional(gate.limit, trim='-')}"
        rows.append((name, text, *(_percent(*gate[1:]) if gate else ("",) * 4)))
    return rows


def _percent(*rates: float) -> tuple[str, ...]:
    return tuple(f"{100 * rate:.2f} %" for rate in rates)


def draw(found: Mapping[str, Discard]) -> bytes:
    """Draw the curves of all measures, over random and ideal discard for the first of them."""
    figure = make_figure(8, 4.6, layout="constrained")
    axes = figure.subplots()
    for (name, one), colour in zip(found.items(), set_colours(found).values(), strict=True):
        end = np.searchsorted(one.shares, _DRAWN, side="right")
        shares, fnmr = np.append(one.shares[:end], _DRAWN), one.fnmr[:end]
        axes.step(100 * shares, 100 * np.append(fnmr, fnmr[-1]), where="post", color=colour, label=one_line(name)[:40])
    start, grid = next(iter(found.values())).at(0), np.linspace(0, _DRAWN, 501)
    axes.axhline(100 * start, color="gray", linestyle=":", label="random")
    axes.plot(100 * grid, 100 * ideal(start, grid), color="black", linestyle="--", linewidth=0.8, label="ideal")
    axes.axvline(100 * WITHIN, color="gray", linewidth=0.5)
    axes.set(xlabel="discarded comparisons, %", ylabel="FNMR, %", xlim=(0, 100 * _DRAWN), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return png_of(figure)


def write_quality(
    out: Path,
    title: str,
    shape: str,
    found: Mapping[str, Discard],
    share: float,
    measures: Mapping[str, np.ndarray],
    lower: Container[str],
    names: Sequence[str],
    read: Callable[[str], np.ndarray] | None,
) -> None:
    """Write results.json, results.csv, quality.png and report.html into a folder.

    Args:
        shape: what was compared, for the page.
        share, lower: as for `gate_rows`.
        measures: (n,) float64 of each.
        names: (n), of the pictures.
        read: the pixels of a picture by its name; None = show none.
    """
    write_file(out / "results.json", json.dumps({name: _as_json(one, share) for name, one in found.items()}, indent=1) + "\n")
    steps = [(f"{step / 100:.2f}", *(f"{one.at(step / 100):.6g}" for one in found.values())) for step in range(100)]
    write_csv(out / "results.csv", ("discarded", *found), steps)
    png = draw(found)
    write_file(out / "quality.png", png)
    page = Page(title)
    page.text(shape)
    page.section("Error versus discard")
    page.text(_MEANING)
    page.table(COLUMNS, rows_of(found, len(names)))
    page.picture(png, "FNMR over the share of discarded comparisons")
    page.section("Gates")
    page.text(_GATES)
    page.table(GATE_COLUMNS, gate_rows(found, lower, share))
    if read is not None:
        for name, values in measures.items():
            known = np.flatnonzero(np.isfinite(values))
            order = known[np.argsort(values[known] * (-1 if name in lower else 1), kind="stable")]
            ends = [end.tolist() for end in (order[:_SHOWN], order[: -_SHOWN - 1 : -1])]
            page.section(f"Pictures: {name}")
            rows = [[(read(names[row]), (names[row], f"{values[row]:.4g}")) for row in end] for end in ends]
            page.picture(captioned_sheet(rows), f"{name}: the lowest quality above, the highest below")
    page.write(out / "report.html")


def _as_json(one: Discard, share: float) -> dict[str, Any]:
    gate = one.gate(share)
    rates = {"fnmr": one.at(0), "mean_fnmr": one.area(), "ideal_mean_fnmr": one.ideal_area(), "gain": one.gain()}
    return {"pictures": one.known, "comparisons": int(one.comparisons[0]), **rates, "gate": gate and gate._asdict()}
