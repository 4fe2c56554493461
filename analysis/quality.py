"""Reads measures of quality; their error versus discard characteristics (EDC, ISO/IEC 29794-1), and the gates that follow.

FNMR at a fixed threshold, over the share of genuine comparisons that are discarded because their quality is lowest. The quality
of a comparison is the smaller of its two pictures' (Grother and Tabassi, Performance of Biometric Quality Measures, IEEE TPAMI
29(4), 2007). Equal qualities are discarded together, so a curve is a step function, and the order of pictures changes nothing.
Shapes: n = pictures, D = embedding size, K = steps of a curve.
"""

import json
import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.files import read_csv, shown, write_csv, write_file
from utils.report import Page, ReadPixels, captioned_sheet, make_figure, png_of, set_colours
from utils.text import one_line, prefix_errors

from .all_pairs import genuine_pairs

WITHIN = 0.2  # share of discarded comparisons up to which measures are compared
_NAMES = ("name", "Filename")  # of the column that has the picture; the second is OFIQ's
_SCALAR = ".scalar"  # OFIQ has each component twice: as it was measured, and from 0 to 100, where -1 says that it failed


class Gate(NamedTuple):
    """A limit of a measure; a picture of this value is kept."""

    limit: float
    pictures: float  # share that is discarded
    comparisons: float  # share that is discarded
    before: float  # FNMR
    after: float


class Discard(NamedTuple):
    """The curve of a measure. Step k discards the pictures of the k lowest qualities, and ends before no comparison is left."""

    limits: np.ndarray  # (K,) float64, of the measure: the lowest quality that is kept
    pictures: np.ndarray  # (K,) int64, discarded
    comparisons: np.ndarray  # (K,) int64, genuine ones that are left
    errors: np.ndarray  # (K,) int64, false non-matches among those
    known: int  # pictures that have the measure; comparisons of others are not counted

    @property
    def fnmr(self) -> np.ndarray:
        """Return (K,) float64."""
        return self.errors / self.comparisons

    @property
    def shares(self) -> np.ndarray:
        """Return the shares of comparisons that are discarded, (K,) float64, ascending from 0."""
        return (self.comparisons[0] - self.comparisons) / self.comparisons[0]

    def at(self, share: float) -> float:
        """Return the FNMR where at most this share of comparisons is discarded."""
        return float(self.fnmr[np.searchsorted(self.shares, share, side="right") - 1])

    def area(self) -> float:
        """Return the mean FNMR from 0 to WITHIN, the partial area under the curve over its width; the last step holds on."""
        edges = np.append(np.minimum(self.shares, WITHIN), WITHIN)
        return float((np.diff(edges) * self.fnmr).sum() / WITHIN)

    def ideal_area(self) -> float:
        """Return the integral of `ideal` from 0 to WITHIN, over WITHIN."""
        start = self.at(0)
        end = min(start, WITHIN)
        return (end + (1 - start) * math.log1p(-end)) / WITHIN if start < 1 else 1.0

    def gain(self) -> float | None:
        """Return 0 if the area is that of discarding at random, 1 if it is the ideal one; None without an error to avoid."""
        start, ideal = self.at(0), self.ideal_area()
        return (start - self.area()) / (start - ideal) if start > ideal else None

    def gate(self, share: float) -> Gate | None:
        """Return the gate that discards most pictures, but at most this share; None if it would discard none."""
        step = int(np.searchsorted(self.pictures / self.known, share, side="right")) - 1
        gone, after = float(self.pictures[step] / self.known), float(self.fnmr[step])
        return Gate(float(self.limits[step]), gone, float(self.shares[step]), self.at(0), after) if step else None


def ideal(fnmr: float, shares: np.ndarray) -> np.ndarray:
    """Return the FNMR if each discarded comparison were a false non-match while there is one, from the FNMR of all."""
    return np.maximum(0, (fnmr - shares) / (1 - shares))


def error_versus_discard(
    vectors: np.ndarray, labels: np.ndarray, threshold: float, measures: Mapping[str, np.ndarray], lower: Container[str]
) -> dict[str, Discard]:
    """Return the curve of each measure. Memory: a block of comparisons, and some numbers for each picture and measure.

    Args:
        vectors: (n, D) float32 of length 1, also a memory map.
        labels: (n,) int64, the people.
        threshold: cosine above which a comparison is a match.
        measures: (n,) float64 of each, NaN = not known.
        lower: measures of which a lower value is better.

    Raises:
        ValueError: a measure is not known for two pictures of one person.
    """
    levels, ranks, counts = dict[str, np.ndarray](), dict[str, np.ndarray](), dict[str, np.ndarray]()
    for name, values in measures.items():
        known = np.isfinite(values)
        signed = -values[known] if name in lower else values[known]
        levels[name], places = np.unique(signed, return_inverse=True)
        ranks[name] = np.zeros(len(values), dtype=np.int64)  # 0 = not known
        ranks[name][known] = places.reshape(-1) + 1
        counts[name] = np.zeros((2, len(levels[name]) + 1), dtype=np.int64)
    for first, second, cosines in genuine_pairs(vectors, labels):
        wrong = cosines <= threshold
        for name, rank in ranks.items():
            quality = np.minimum(rank[first], rank[second])
            np.add.at(counts[name][0], quality, 1)
            np.add.at(counts[name][1], quality[wrong], 1)
    found = {}
    for name, (comparisons, errors) in counts.items():
        with prefix_errors(name):
            limits = -levels[name] if name in lower else levels[name]
            found[name] = _curve(limits, np.bincount(ranks[name])[1:], comparisons[1:], errors[1:])
    return found


def _curve(limits: np.ndarray, pictures: np.ndarray, comparisons: np.ndarray, errors: np.ndarray) -> Discard:
    """Return the curve from the numbers of pictures, comparisons and errors of each level of quality, (levels,)."""
    left = comparisons[::-1].cumsum()[::-1]
    steps = int((left > 0).sum())
    if not steps:
        raise ValueError("no two pictures of one person have it")
    gone = pictures.cumsum() - pictures
    return Discard(limits[:steps], gone[:steps], left[:steps], errors[::-1].cumsum()[::-1][:steps], int(pictures.sum()))


def read_measures(path: Path, wanted: Sequence[str], names: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return those of the wanted columns that a file has, (n,) float64 with NaN = not known, and the names of all columns.

    A row is of the picture whose name it has, or whose name is left without its first folders: /data/set/anna/1.jpg is
    anna/1.jpg.

    Args:
        names: (n) of the pictures; several faces of one picture have its value.

    Raises:
        ValueError: the file cannot be read, has no row of a picture or two of one, or a text where a number must be.
    """
    rows = read_csv(path)
    head = [word.strip() for word in next(rows, [])]
    own = next((head.index(name) for name in _NAMES if name in head), None)
    if own is None:
        raise ValueError(f"{shown(path)}: needs a column {' or '.join(_NAMES)}; it has {one_line(', '.join(head))[:200]}")
    ofiq = head[own] != _NAMES[0]
    places = {name: head.index(name) for name in dict.fromkeys(wanted) if name in head}
    failed = {name: name.removesuffix(_SCALAR) + _SCALAR for name in places}
    found = {name: np.full(len(names), np.nan) for name in places}
    rows_of: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        rows_of.setdefault(name, []).append(number)
    line_of: dict[str, int] = {}
    for line, row in enumerate(rows, 2):
        if not row:
            continue
        if ofiq:
            row += [""] * (len(head) - len(row))  # OFIQ leaves out the values of a picture that it could not read
        if len(row) < len(head):
            raise ValueError(f"{shown(path)}: row {line} has {len(row)} columns, the first line {len(head)}")
        parts = row[own].replace("\\", "/").split("/")
        picture = next((end for at in range(len(parts)) if (end := "/".join(parts[at:])) in rows_of), None)
        if picture is None:
            continue
        if line_of.setdefault(picture, line) != line:
            raise ValueError(f"{shown(path)}: rows {line_of[picture]} and {line} are both of {one_line(picture)}; keep one")
        for name, place in places.items():
            lost = ofiq and failed[name] in head and row[head.index(failed[name])].strip() == "-1"
            try:
                found[name][rows_of[picture]] = float(row[place]) if row[place].strip() and not lost else math.nan
            except ValueError:
                raise ValueError(f"{shown(path)}: row {line}: {name} must be a number, got {row[place]!r:.80}") from None
    if not line_of:
        raise ValueError(f"{shown(path)}: has no picture of the table, whose names are such as {one_line(names[0])!r:.80}")
    return found, head


# ---- what measures can do: results.json, results.csv, curves, and a page

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
    read: ReadPixels,
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
