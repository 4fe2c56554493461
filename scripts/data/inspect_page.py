"""The page of scripts.data.inspect: first the faults, the worst first; then the contents of the set."""

if __name__ == "__main__":
    raise SystemExit("error: scripts/data/inspect_page.py is no program; python -m scripts lists them")

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from data.base import FaceDataset
from data.scan import Scan
from eval.pair_sets.bin_file import PairSet
from utils.image import decode_rgb
from utils.report.contact_sheet import histograms, sheet
from utils.report.page import Page

from .sets import SetNames

_ROWS, _COLUMNS = 12, 8  # of the contact sheet
_MAX_SHOWN = 12  # pairs of pictures per sheet


class Copy(NamedTuple):
    """Two pictures that are the same."""

    first: int  # index into the set
    second: int  # index into the set, or into the images of the test set
    kind: str  # "equal" bytes, or "near": the same picture encoded again
    likeness: float  # correlation of the pixels


class Findings(NamedTuple):
    """The contents of the page."""

    dataset: FaceDataset
    names: SetNames
    scanned: Scan
    labels: np.ndarray  # (num_stored,)
    report: dict[str, Any]
    copies: list[Copy]
    overlaps: dict[str, list[Copy]]  # by test set
    tests: dict[str, PairSet]

    def across(self) -> list[Copy]:
        """Return the copies whose two pictures have different identities."""
        return [copy for copy in self.copies if self.labels[copy.first] != self.labels[copy.second]]

    def plain(self) -> list[int]:
        """Return the images of one colour."""
        return self.scanned.indices[self.scanned.plain].tolist()

    def faults(self) -> list[tuple[str, str, str]]:
        """Return (fault, how many, why it matters), the worst first."""
        found = [
            (
                f"pictures that are also in the test set {name}",
                f"{values['pictures']:,}, of {values['identities']:,} identities",
                "A test on training pictures measures memorisation.",
            )
            for name, values in self.report["overlap"].items()
            if values["pictures"]
        ]
        within = len(self.copies) - len(self.across())
        odd = next(value for key, value in self.report.items() if key.startswith("images_not_"))
        counted = (
            ("copies across identities", len(self.across()), "One person has two labels, or one of the labels is wrong."),
            ("images of one colour", len(self.plain()), "No face: landmarks of another picture, or a failed download."),
            ("images that do not decode", len(self.scanned.bad), "Training stops at the first one."),
            ("images of another size than 112 x 112", odd, "Training stops at the first one; align the faces first."),
            ("copies within an identity", within, "The same picture counts twice."),
        )
        return found + [(what, f"{count:,}", why) for what, count, why in counted if count]


def write_page(path: Path, title: str, found: Findings, rng: np.random.Generator) -> None:
    """Write the page; `rng` draws the identities of the contact sheet."""
    page = Page(title)
    page.text(found.dataset.describe(), note=True)
    page.section("What is wrong")
    if found.faults():
        page.table(("found", "how many", "why it matters"), found.faults())
        page.text("drop.csv lists the images to drop; scripts.data.filter --drop drop.csv makes a set without them.", note=True)
    else:
        tested = " and with the test sets" if found.tests else "; no test set was given with --bins"
        page.text(f"No faults: every image decodes, and none is a copy within the set{tested}.")
    _overlaps(page, found)
    _copies(page, found, found.across(), "Copies across identities", "One person has two labels, or a label is wrong.")
    _unusable(page, found)
    within = [copy for copy in found.copies if copy not in set(found.across())]
    _copies(page, found, within, "Copies within an identity", "drop.csv keeps the first of each.")
    page.section("Some identities, drawn at random")
    page.picture(_contact_sheet(found, rng), "one row per identity. Other people in a row mean wrong labels")
    page.section("Images per identity, and their size")
    counts = np.bincount(found.labels, minlength=found.dataset.num_classes)
    page.picture(histograms(counts[counts > 0], found.scanned.num_bytes[found.scanned.good]), "histograms")
    page.section("All numbers")
    page.table(("", "value"), [(k.replace("_", " "), v) for k, v in found.report.items() if not isinstance(v, dict)])
    page.write(path)


def _overlaps(page: Page, found: Findings) -> None:
    for name, copies in found.overlaps.items():
        if not copies:
            continue
        page.section(f"Shared with the test set {name}")
        rows = [
            (
                f"{copy.kind}: {_called(found, copy.first)}, and image {copy.second} of {name}",
                [_pixels(found, copy.first), decode_rgb(found.tests[name].images[copy.second])],
            )
            for copy in copies[:_MAX_SHOWN]
        ]
        shown = f"{len(rows)} of {len(copies)}; all are in overlap.csv"
        page.picture(_two_columns(rows), f"left: this set, right: the test set. {shown}")


def _copies(page: Page, found: Findings, copies: Sequence[Copy], heading: str, text: str) -> None:
    if not copies:
        return
    page.section(heading)
    page.text(text)
    rows = [
        (
            f"{copy.kind}: {_called(found, copy.first)}, and {_called(found, copy.second)}",
            [_pixels(found, index) for index in copy[:2]],
        )
        for copy in sorted(copies)[:_MAX_SHOWN]
    ]
    page.picture(_two_columns(rows), f"{len(rows)} of {len(copies)} pairs; all are in duplicates.csv")


def _unusable(page: Page, found: Findings) -> None:
    plain = found.plain()
    if plain:
        page.section("Images of one colour")
        rows = [
            ("", [_pixels(found, index) for index in plain[begin : begin + _COLUMNS]])
            for begin in range(0, min(len(plain), 2 * _COLUMNS), _COLUMNS)
        ]
        page.picture(sheet(rows, _COLUMNS), f"{min(len(plain), 2 * _COLUMNS)} of {len(plain)}")
        page.table(("index", "picture"), [(index, _called(found, index)) for index in plain[:20]])
        page.text(f"All {len(plain)} are in bad.csv.", note=True)
    if found.scanned.bad:
        page.section("Images that do not decode")
        rows_of_text = [(index, _called(found, index), reason) for index, reason in found.scanned.bad[:50]]
        page.table(("index", "picture", "what is wrong"), rows_of_text)
        page.text(f"All {len(found.scanned.bad)} are in bad.csv.", note=True)


def _called(found: Findings, index: int) -> str:
    """Return the user's name for a picture: a path with the person's folder, or its file or record and the identity."""
    file, label = found.names.file(index), int(found.labels[index])
    person = found.names.person(label)
    return file if file.startswith(f"{person}/") else f"{file} ({person})"


def _pixels(found: Findings, index: int) -> np.ndarray:
    return decode_rgb(found.dataset.sample(index)[0])


def _two_columns(rows: Sequence[tuple[str, Sequence[np.ndarray]]]) -> bytes:
    """Return a PNG of rows of two pictures, in order from left to right, with two rows side by side if there are several."""
    halves = [rows[0::2], [*rows[1::2], *[("", [])] * (len(rows) % 2)]] if len(rows) > 1 else [rows]
    sheets = [cv2.imdecode(np.frombuffer(sheet(half, 4), np.uint8), cv2.IMREAD_COLOR) for half in halves]
    return cv2.imencode(".png", np.hstack(sheets))[1].tobytes()  # type: ignore[arg-type]


def _contact_sheet(found: Findings, rng: np.random.Generator) -> bytes:
    usable = found.scanned.indices[found.scanned.good]
    order = usable[np.argsort(found.labels[usable], kind="stable")]
    identities, begins = np.unique(found.labels[order], return_index=True)
    ends = np.append(begins[1:], len(order))
    rows = []
    for place in np.sort(rng.permutation(len(identities))[:_ROWS]).tolist():
        members = order[begins[place] : ends[place]]
        chosen = np.sort(rng.permutation(members)[:_COLUMNS])
        number = f", identity {identities[place]}" if found.names.has_people() else ""
        name = found.names.person(int(identities[place]))
        caption = f"{name}{number}: {len(members)} image{'s' if len(members) > 1 else ''}"
        rows.append((caption, [_pixels(found, index) for index in chosen.tolist()]))
    return sheet(rows, min(_COLUMNS, max([4, *(len(pictures) for _, pictures in rows)])))
