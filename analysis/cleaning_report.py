"""Decisions and a page with pictures from the findings of cleaning.py.

Shapes: n = rows of the table, h = people of a table of test pictures.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from data.base import FaceDataset
from data.decisions import Decision
from utils.report import Page, captioned_sheet, make_figure, png_of

from .cleaning import Found
from .mixture import BINS, histogram

_WORST, _DOUBTFUL = 24, 12  # rows of a sheet
_EACH = 3  # pictures of an identity
_Cell = tuple[np.ndarray | None, Sequence[str]]
Made = dict[str, list[Decision]]  # of each of HEADINGS
HEADINGS = {
    "overlap": ("Identities that are in a test set", "A test on people of the training set measures memorisation."),
    "merge": ("Identities that are one person", "Left and right: the pictures nearest to the centre of each."),
    "split": ("Labels that hold two people", "Left: the second person, or another age of the first, then the identity."),
    "move": ("Images of another identity", "Left: the image, its identity, then the identity that it moves to."),
    "drop": ("Images of nobody here", "Left: the image, its identity, then the identity with the nearest centre."),
}


def decide(found: Found, indices: np.ndarray, labels: np.ndarray, overlaps: list[Decision], least: float) -> Made:
    """Return the decisions, the surest first.

    Args:
        indices: (n,) int64, of the images in the set.
        labels: (n,) int64, their labels in the set.
        overlaps: of `find_overlap`, with all test sets.
        least: images that are of another identity with this probability move; other wrong images are dropped.
    """
    made: Made = {kind: [] for kind in HEADINGS} | {"overlap": overlaps}
    made["merge"] = [
        Decision("merge", None, b, str(a), sure, f"cosine of the centres {cosine:.3f}") for a, b, cosine, sure in found.merges
    ]
    split: set[int] = set()
    for number, (identity, rows, sure) in enumerate(found.splits, 1):
        split |= set(rows.tolist())
        why = f"{len(rows)} images of another person"
        made["split"] += [
            Decision("split", int(indices[row]), int(labels[row]), f"{identity}+{number}", sure, why) for row in rows
        ]
    wrong_sure = found.border.sure(found.lead[found.wrong])
    parts = (found.wrong, wrong_sure, found.other, found.other_cosine, found.other_sure)
    worst = np.lexsort((indices[found.wrong], found.lead[found.wrong]))
    for row, wrong, other, cosine, sure in zip(*(part[worst].tolist() for part in parts), strict=True):
        if row in split:
            continue
        own = float(found.centres.own[row])
        why = f"cosine {own:.3f}" if found.centres.size[found.labels[row]] else "no two of its images agree"
        why += f"; nearest other identity {other}, cosine {cosine:.3f}"
        image = int(indices[row]), int(labels[row])
        if sure >= least:
            made["move"].append(Decision("move", *image, str(other), sure, why))
        else:
            made["drop"].append(Decision("drop", *image, "", wrong, why))
    return {kind: sorted(some, key=lambda one: -one.sure) for kind, some in made.items()}


def write_page(path: Path, title: str, dataset: FaceDataset, found: Found, indices: np.ndarray, made: Made) -> None:
    """Write the page."""
    page = Page(title)
    facts = [("images", f"{len(indices):,}, of {np.count_nonzero(np.bincount(found.labels)):,} people")]
    border, unclear = found.border, (found.lead < 1).any()
    if unclear:
        facts += [
            ("estimated share of wrong labels", f"{100 * border.share:.1f} %"),
            ("an image is wrong", f"if its own centre is less than {2 * border.cosine:.3f} nearer than any other, as a cosine"),
        ]
    page.facts(facts)
    counts = [(heading, len(made[kind])) for kind, (heading, _) in HEADINGS.items()]
    page.table(("found", "lines of decisions.csv"), counts)
    page.text(
        "decisions.csv has a line for each image or identity: change or delete those that you disagree with. "
        "face data filter SET OUT --decisions decisions.csv then makes a set without these errors.",
        note=True,
    )
    if unclear:
        page.picture(_figure(found), "how much nearer the own centre of an image is than the nearest other")
    pictures = _Pictures(dataset, found, indices)
    for kind, (heading, text) in HEADINGS.items():
        # of a person who is split off, one decision
        some = made[kind] if kind != "split" else list({one.to: one for one in reversed(made[kind])}.values())[::-1]
        if not some:
            continue
        page.section(f"{heading}: {len(some):,}")
        page.text(text)
        page.picture(captioned_sheet([pictures.row(kind, one) for one in some[:_WORST]]), "the surest")
        if doubtful := some[_WORST:][-_DOUBTFUL:]:
            page.picture(captioned_sheet([pictures.row(kind, one) for one in doubtful]), "the most doubtful")
    page.write(path)


def _figure(found: Found) -> bytes:
    figure = make_figure(8.0, 3.4, layout="constrained")
    axis, at = figure.subplots(), 2 * ((np.arange(BINS).reshape(-1, 10).mean(axis=1) + 0.5) * 2 / BINS - 1)
    counted = found.lead < 1
    leads, impostors = (part.reshape(-1, 10).sum(axis=1) for part in (histogram(found.lead[counted]), found.impostors))
    share = found.border.share * len(found.lead) / max(1, impostors.sum())
    axis.plot(at, leads, label=f"images, without {np.count_nonzero(~counted):,} that are clearly right")
    axis.plot(at, impostors * share, color="gray", label="the wrong ones among them, estimated")
    axis.axvline(2 * found.border.cosine, color="black", linewidth=1, label=f"border {2 * found.border.cosine:.3f}")
    axis.set(xlabel="cosine with the own centre minus that with the nearest other", ylabel="images", xlim=(-1, 1))
    axis.legend(fontsize=8)
    return png_of(figure)


class _Pictures:
    """Rows of sheets."""

    def __init__(self, dataset: FaceDataset, found: Found, indices: np.ndarray) -> None:
        self._dataset, self._found, self._indices = dataset, found, indices
        self._labels = np.asarray(dataset.labels())[indices]
        self._order = np.lexsort((indices, -found.centres.own, self._labels))  # of each label, the nearest to its centre first
        self._begins = np.searchsorted(self._labels[self._order], np.arange(int(self._labels.max()) + 2))

    def row(self, kind: str, one: Decision) -> list[_Cell]:
        """Return the cells of a decision."""
        own = f"identity {one.identity}"
        if kind == "overlap":
            return self._some(self._best(one.identity, 2 * _EACH), own, *one.why.split(", "))
        if kind == "merge":
            pair = (self._best(one.identity, _EACH), own), (self._best(int(one.to), _EACH), f"identity {one.to}")
            return [cell for rows, name in pair for cell in self._some(rows, name, one.why.rpartition("s ")[2])]
        if kind == "split":
            number = int(one.to.rpartition("+")[2]) - 1
            rows = self._found.splits[number][1]
            return self._some(rows[:_EACH], f"{len(rows)} images", own) + self._some(self._best(one.identity, _EACH), own)
        row = int(np.flatnonzero(self._indices == one.image)[0])
        place = int(np.searchsorted(self._found.wrong, row))
        other, cosine = int(self._found.other[place]), self._found.other_cosine[place]
        first = self._some([row], f"image {one.image}", f"sure {one.sure:.3f}")
        agree = self._found.centres.size[self._found.labels[row]]
        near_own = f"cosine {self._found.centres.own[row]:.3f}" if agree else "no two agree"
        near = self._some(self._best(one.identity, _EACH), own, near_own)
        return first + near + self._some(self._best(other, _EACH), f"identity {other}", f"cosine {cosine:.3f}")

    def _best(self, identity: int, count: int) -> np.ndarray:
        begin, end = self._begins[identity : identity + 2]
        return self._order[begin : min(begin + count, end)]

    def _some(self, rows: Iterable[int], *texts: str) -> list[_Cell]:
        return [(self._dataset.picture(int(self._indices[row])), texts) for row in rows]
