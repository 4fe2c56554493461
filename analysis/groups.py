"""Error rates of groups of people at one threshold, within each group and between each two, with intervals.

Shapes: n = pictures, D = embedding size, G = groups, B = bins of cosines, P = pairs of a list, K = pictures of sampled people.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deploy.journal import Journal
from utils.cli import progress
from utils.files import write_csv, write_file
from utils.report import Facts, Page, ReadPixels, make_figure, png_of, set_colours
from utils.text import label_text, one_line, plain_table

from .all_pairs import EXTREMES, NUM_BINS, Extremes, PairCounts, accepted_at, count_pairs, genuine_pairs, show_extremes
from .intervals import MIN_ERRORS, MIN_PEOPLE, Rate, Spread, differences, make_rate, spread_of_list

MAX_GROUPS = 64
_SAMPLED, _LEAST = 4_000, 100  # people whose false matches tell the variance: of all groups together; of a group
_ROWS, _COLUMNS = 1024, 8192  # of a block of cosines
_COUNTS = 1 << 26  # of all bins of all pairs of groups: 0.5 GiB
Spreads = Callable[[int, int], Spread]  # of two groups g <= h


class Grouped(NamedTuple):
    """Pictures with groups."""

    vectors: np.ndarray  # (n, D) float32 of length 1
    labels: np.ndarray  # (n,) int64 from 0, the people
    groups: np.ndarray  # (n,) int64 from 0
    names: list[str]  # of the groups


class PairList(NamedTuple):
    """Pairs of pictures that a list names."""

    first: np.ndarray  # (P,) int64, rows of the table
    second: np.ndarray
    same: np.ndarray  # (P,) bool
    groups: np.ndarray  # (P, 2) int64, of the two pictures
    people: np.ndarray  # (P, 2) int64
    names: list[str]  # of the groups
    missing: int  # pairs that have a picture without a row


class Outcome(NamedTuple):
    """The rates of groups at one threshold."""

    names: list[str]
    counts: PairCounts
    threshold: float  # a cosine: a pair is accepted from it on
    pooled: tuple[float, float]  # FMR of all impostor pairs, FNMR of all genuine pairs of one group
    fmr: dict[tuple[int, int], Rate]  # of groups g <= h that have pairs, or are one
    fnmr: dict[tuple[int, int], Rate]  # g < h: pairs of a person's pictures in two groups

    def within(self) -> tuple[list[Rate], list[Rate]]:
        """Return FMR and FNMR of each group."""
        every = range(len(self.names))
        return [self.fmr[group, group] for group in every], [self.fnmr[group, group] for group in every]


def place_of(counts: PairCounts, far: float | None, threshold: float | None) -> int:
    """Return the number of the first bin that is accepted: the lowest with this FAR of all impostor pairs, or from a cosine on.

    Raises:
        ValueError: there are too few pairs.
    """
    above = accepted_at(counts.impostor.sum(axis=(0, 1)), counts.edges, counts.edges)
    if not above[0] or not counts.genuine.any():
        raise ValueError("the groups have no pairs of one person, or none of two people; are the people of the table right?")
    if threshold is not None:
        return int(np.searchsorted(counts.edges[:-1], threshold))
    allowed = int(above[0] * float(far or 0) + 1e-9)  # 1e-9: 10 * 0.1 must not fall below 1
    if not allowed:
        raise ValueError(f"--far {far:g} needs {int(np.ceil(1 / float(far or 1))):,} impostor pairs, there are {above[0]:,}")
    return int(np.argmax(above <= allowed))


def false_matches(faces: Grouped, rows: np.ndarray, edge: float, journal: Journal | None = None) -> np.ndarray:
    """Return how many pictures of other people in each group are accepted with each row (K,), (K, G) int64.

    Args:
        journal: begun; what it has is not compared again.
    """
    count, begin = len(faces.names), 0
    order, found = np.argsort(faces.groups, kind="stable"), np.zeros((len(rows), count), dtype=np.int64)
    for entry in journal.entries if journal else ():
        data = journal.data(entry) if journal and entry.record.get("matches") == [edge, begin] else None
        if data:
            part = np.frombuffer(data, dtype=np.int64).reshape(-1, count)
            found[begin : begin + len(part)] = part
            begin += len(part)
    for start in progress(range(begin, len(rows), _ROWS), None, "comparing people", "block"):
        left, block = rows[start : start + _ROWS], found[start : start + _ROWS]
        vectors, labels = faces.vectors[left], faces.labels[left][:, None]
        for at in range(0, len(order), _COLUMNS):
            right = order[at : at + _COLUMNS]
            wrong = (vectors @ faces.vectors[right].T >= edge) & (labels != faces.labels[right])
            firsts = np.flatnonzero(np.diff(faces.groups[right], prepend=-1))
            block[:, faces.groups[right[firsts]]] += np.add.reduceat(wrong, firsts, axis=1, dtype=np.int64)
        if journal is not None:
            journal.add({"matches": [edge, start]}, block.tobytes())
    return found


def impostor_spreads(faces: Grouped, edge: float, journal: Journal | None = None) -> Spreads:
    """Return what gives the spread of FMR, from the false matches of a sample of people.

    A person is sampled where a number that spreads evenly over people is below a probability: the largest of the groups that
    have the person.
    """
    count = len(faces.names)
    units, sizes = np.unique(faces.labels * count + faces.groups, return_counts=True)  # people in groups
    owners, places = np.divmod(units, count)
    people, pictures = np.bincount(places, minlength=count), np.bincount(faces.groups, minlength=count)
    chances = np.zeros(int(owners[-1]) + 1)
    np.maximum.at(chances, owners, np.minimum(1, max(_LEAST, _SAMPLED // count) / people[places]))
    chosen = np.flatnonzero(np.arange(1, len(chances) + 1) * 0.6180339887498949 % 1 < chances)  # the golden ratio
    rows = np.flatnonzero(np.isin(faces.labels, chosen))
    errors, groups = false_matches(faces, rows, edge, journal), faces.groups[rows]
    owner, kept = np.searchsorted(chosen, faces.labels[rows]), np.isin(owners, chosen)
    own = np.zeros((len(chosen), count), dtype=np.int64)  # pictures
    own[np.searchsorted(chosen, owners[kept]), places[kept]] = sizes[kept]

    def spread(first: int, second: int) -> Spread:
        wrong, pairs = np.zeros(len(chosen)), np.zeros(len(chosen), dtype=np.int64)
        for one, other in {(first, second), (second, first)}:
            mine = groups == one
            wrong += np.bincount(owner[mine], errors[mine, other], len(chosen))
            pairs += own[:, one] * (pictures[other] - own[:, other])
        return Spread(wrong, pairs, int(min(people[first], people[second])), 1 / chances[chosen])

    return spread


def genuine_cells(faces: Grouped, edge: float) -> np.ndarray:
    """Return a row for each person and two groups g <= h of the pictures: g, h, rejected and all pairs, (m, 4) int64."""
    count, parts = len(faces.names), [np.zeros((3, 0), dtype=np.int64)]
    for first, second, cosines in genuine_pairs(faces.vectors, faces.labels):  # some or all pairs of a person
        one, other = faces.groups[first], faces.groups[second]
        ordered = np.minimum(one, other) * count + np.maximum(one, other)
        cells = np.bincount(2 * ordered + (cosines < edge), minlength=2 * count**2).reshape(-1, 2)
        there = np.flatnonzero(cells.any(axis=1))
        parts.append(np.stack([faces.labels[first[0]] * count**2 + there, cells[there, 1], cells[there].sum(axis=1)]))
    keys, *numbers = np.concatenate(parts, axis=1)
    found, places = np.unique(keys, return_inverse=True)
    rejected, pairs = (np.bincount(places, part, len(found)).astype(np.int64) for part in numbers)
    return np.stack([*np.divmod(found % count**2, count), rejected, pairs], axis=1)


def measure_table(faces: Grouped, far: float | None, threshold: float | None, worst: int, journal: Journal | None) -> Outcome:
    """Return the rates of groups over all pairs of a table.

    Args:
        far, threshold: as of `place_of`.
        worst: most similar pictures of two people to return.
        journal: as of `count_pairs`.
    """
    num_bins, count = NUM_BINS, len(faces.names)
    while num_bins * count**2 > _COUNTS:
        num_bins //= 2
    total = len(faces.labels) * (len(faces.labels) - 1) // 2
    with progress([], total, "comparing", "pair") as bar:
        counts = count_pairs(faces.vectors, faces.labels, faces.groups, num_bins, worst, journal, bar.update)
    place = place_of(counts, far, threshold)
    edge = float(counts.edges[place])
    cells = genuine_cells(faces, edge)
    across = np.zeros((count, count, 2), dtype=np.int64)
    np.add.at(across, (cells[:, 0], cells[:, 1]), cells[:, 2:])

    def genuine_spread(first: int, second: int) -> Spread:
        here = cells[(cells[:, 0] == first) & (cells[:, 1] == second)]
        return Spread(here[:, 2], here[:, 3], len(here))

    spreads = impostor_spreads(faces, edge, journal), genuine_spread
    return _outcome(faces.names, counts, place, np.moveaxis(across, -1, 0), spreads)


def measure_list(vectors: np.ndarray, pairs: PairList, far: float | None, threshold: float | None, worst: int) -> Outcome:
    """Return the rates of groups over the pairs of a list, as `measure_table` does."""
    num_bins, count = NUM_BINS // 4, len(pairs.names)
    bins = np.zeros(len(pairs.first), dtype=np.int64)
    for begin in range(0, len(bins), _COLUMNS):
        part = slice(begin, begin + _COLUMNS)
        cosines = (vectors[pairs.first[part]].astype(np.float64) * vectors[pairs.second[part]]).sum(axis=1)
        bins[part] = np.clip((cosines + 1) * num_bins / 2, 0, num_bins - 1)
    swapped = pairs.groups[:, :1] > pairs.groups[:, 1:]
    low, high = np.sort(pairs.groups, axis=1).T
    people = np.where(swapped, pairs.people[:, ::-1], pairs.people)
    cells = np.zeros((2, count, count, num_bins), dtype=np.int32)
    np.add.at(cells, (pairs.same.astype(int), low, high, bins), 1)
    edges = np.linspace(-1.0, 1.0, num_bins + 1)
    top = np.array(sorted(np.flatnonzero(~pairs.same), key=lambda pair: -bins[pair])[:worst], dtype=np.int64)
    alike = Extremes(edges[bins[top]], pairs.first[top], pairs.second[top])
    counts = PairCounts(edges, np.einsum("ggb->gb", cells[1]), cells[0], alike, alike)
    place = place_of(counts, far, threshold)

    def spread_of(kind: np.ndarray, wrong: np.ndarray) -> Spreads:
        def spread(first: int, second: int) -> Spread:
            here = kind & (low == first) & (high == second)
            found = spread_of_list(people[here], wrong[here])
            sides = [found.people] if first == second else [len(np.unique(side)) for side in people[here].T]
            return found._replace(people=min(sides))

        return spread

    across = np.stack([cells[1][..., :place].sum(axis=-1), cells[1].sum(axis=-1)])
    spreads = spread_of(~pairs.same, bins >= place), spread_of(pairs.same, bins < place)
    return _outcome(pairs.names, counts, place, across, spreads)


def _outcome(names: list[str], counts: PairCounts, place: int, across: np.ndarray, spreads: Sequence[Spreads]) -> Outcome:
    """Return the rates.

    Args:
        place: the first bin that is accepted.
        across: (2, G, G) int64 of groups g < h: rejected and all pairs of a person's pictures in two groups.
        spreads: of FMR and FNMR.
    """
    impostor = counts.impostor[..., place:].sum(axis=-1), counts.impostor.sum(axis=-1)
    within = counts.genuine[:, :place].sum(axis=-1), counts.genuine.sum(axis=-1)
    pooled = float(impostor[0].sum() / impostor[1].sum()), float(within[0].sum() / within[1].sum())
    genuine = [np.triu(cells, 1) + np.diag(own) for cells, own in zip(across, within, strict=True)]
    rates: list[dict[tuple[int, int], Rate]] = [{}, {}]
    for kind, (errors, pairs) in enumerate((impostor, genuine)):
        for one, other in zip(*(side.tolist() for side in np.triu_indices(len(names))), strict=True):
            if one == other or pairs[one, other]:
                spread = spreads[kind](one, other)
                independent = spread.people // 2 if kind == 0 and one == other else spread.people  # two people make a pair
                cell = int(errors[one, other]), int(pairs[one, other])
                rates[kind][one, other] = make_rate(*cell, pooled[kind], spread, independent)
    return Outcome(names, counts, float(counts.edges[place]), pooled, *rates)


# ---- the rates in words: results.json, results.csv, pictures, and a page

_FIELDS = ("group", "other_group", "kind", "people", "pairs", "errors", "rate", "low", "high", "over_geometric_mean")
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
    """Return a row of _FIELDS for each kind of rate, of each group and of each two groups with pairs."""
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
    labels = [label_text(name) for name in outcome.names]
    columns = max(1, int(150 / (8 + max(map(len, labels)))))  # of the legend, below the curves
    figure = make_figure(11, 4.2 + 0.15 * -(-len(labels) // columns), layout="constrained")
    colours, lines = set_colours(outcome.names), dict[str, Any]()
    kinds = np.einsum("ggb->gb", outcome.counts.impostor), outcome.counts.genuine
    for axis, counts, name in zip(figure.subplots(1, 2), kinds, ("FMR", "FNMR"), strict=True):
        for place, (group, row) in enumerate(zip(outcome.names, counts, strict=True)):
            if row.sum() >= MIN_ERRORS:
                errors = row[::-1].cumsum()[::-1] if name == "FMR" else row.cumsum() - row
                shown = (errors >= 1) & (errors < row.sum())
                style = {"color": colours[group], "linestyle": ("-", "--", ":", "-.")[place // 9 % 4]}
                if shown.any():
                    (lines[labels[place]],) = axis.plot(outcome.counts.edges[:-1][shown], errors[shown] / row.sum(), **style)
        axis.axvline(outcome.threshold, color="gray", linestyle=":")
        axis.set(xlabel="threshold (cosine)", ylabel=name)
        if len(axis.lines) > 1:
            axis.set_yscale("log")
    if lines:
        figure.legend(lines.values(), lines, loc="outside lower center", ncols=columns, fontsize=7)
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


def write_groups(out: Path, title: str, outcome: Outcome, pictures: Sequence[str], facts: Facts, read: ReadPixels) -> None:
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
        "rates": [dict(zip(_FIELDS, row, strict=True)) for row in rows],
        "differences": {"fmr": found[0], "fnmr": found[1], **found[2]},
    }
    write_file(out / "results.json", json.dumps(results, indent=1) + "\n")
    write_csv(out / "results.csv", _FIELDS, rows)
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
