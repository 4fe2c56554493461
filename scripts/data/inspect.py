"""Inspect a set: face data inspect SET --out DIR --bins lfw.bin cfp_fp.bin

Reads every image once and reports faults and statistics: pictures that are also in a test set, copies (the same file, or the
same picture compressed or resized again), images of one colour, images that do not decode, counts, sizes. DIR then holds

report.html          one page with pictures             report.json    the same numbers
bad.csv              images that do not decode, or have one colour
duplicates.csv       copies                 overlap.csv     pictures of the test sets
drop.csv             input of face data filter --drop: bad images, copies, pictures of the test sets

Example: face data inspect set --out report --bins lfw.bin cfp_fp.bin
"""

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.base import FaceDataset
from data.scan import MIN_CORRELATION, Scan, SetNames, candidates, correlation, dhash, equal_groups, open_set_of, scan
from eval.pair_sets.bin_file import PairSet, read_pairs
from utils.cli import add_threads, int_in_range, make_parser, progress
from utils.files import shown, write_csv, write_file
from utils.image import decode_rgb
from utils.parallel import map_in_order
from utils.program import run_main
from utils.report import Page, histograms, sheet
from utils.text import prefix_errors

_ROWS, _COLUMNS = 12, 8  # of the contact sheet
_MAX_SHOWN = 12  # pairs of pictures per sheet
_COMPARED = 100_000  # most candidates for near copies whose pixels are compared: a minute of a core


class Copy(NamedTuple):
    """Two pictures that are the same."""

    first: int  # index into the set
    second: int  # index into the set, or into the images of the test set
    kind: str  # "equal" bytes, or "near": the same picture encoded again
    likeness: float  # correlation of the pixels


@dataclass(eq=False)
class Findings:
    """What was found."""

    dataset: FaceDataset
    names: SetNames
    scanned: Scan
    labels: np.ndarray  # (num_stored,)
    copies: list[Copy]
    overlaps: dict[str, list[Copy]]  # by test set
    tests: dict[str, PairSet]
    not_compared: int  # candidates for near copies

    def across(self) -> list[Copy]:
        """Return the copies whose two pictures have different identities."""
        return [copy for copy in self.copies if self.labels[copy.first] != self.labels[copy.second]]

    def plain(self) -> list[int]:
        """Return the images of one colour."""
        return self.scanned.indices[self.scanned.plain].tolist()

    @functools.cached_property
    def report(self) -> dict[str, Any]:
        """The numbers of the report."""
        labels, scanned, copies = self.labels, self.scanned, self.copies
        shared = {name: {copy.first for copy in found} for name, found in self.overlaps.items()}
        counts = np.bincount(labels, minlength=self.dataset.num_classes)
        filled = counts[counts > 0]
        good = scanned.good
        sizes = scanned.num_bytes[good]
        return {
            "images": self.dataset.num_images,
            "identities": self.dataset.num_classes,
            "identities_without_images": int(np.count_nonzero(counts == 0)),
            "identities_with_one_image": int(np.count_nonzero(counts == 1)),
            "images_per_identity_mean": round(float(filled.mean()), 2),
            "images_per_identity_median": float(np.median(filled)),
            "images_per_identity_max": int(filled.max()),
            "images_read": len(scanned.indices),
            "images_bad": len(scanned.bad),
            "images_of_one_colour": int(np.count_nonzero(scanned.plain)),
            f"images_not_{scanned.size}_x_{scanned.size}": int(np.count_nonzero(scanned.odd)),
            "mean_kilobytes": round(float(sizes.mean()) / 1000, 2) if len(sizes) else 0.0,
            "copies_of_a_file": sum(copy.kind == "equal" for copy in copies),
            "copies_of_a_picture": sum(copy.kind == "near" for copy in copies),
            "copies_across_identities": len(self.across()),
            "candidates_not_compared": self.not_compared,
            "overlap": {
                name: {"pictures": len(images), "identities": len({int(labels[image]) for image in images})}
                for name, images in shared.items()
            },
        }

    def faults(self) -> list[tuple[str, str, str]]:
        """Return (fault, how many, why it matters), the worst first."""
        found, why = [], "A test on training pictures measures memorisation."
        for name, values in self.report["overlap"].items():
            if values["pictures"]:
                how_many = f"{values['pictures']:,}, of {values['identities']:,} identities"
                found.append((f"pictures that are also in the test set {name}", how_many, why))
        within = len(self.copies) - len(self.across())
        odd, size = int(np.count_nonzero(self.scanned.odd)), self.scanned.size
        counted = (
            ("copies across identities", len(self.across()), "One person has two labels, or one of the labels is wrong."),
            ("images of one colour", len(self.plain()), "No face: landmarks of another picture, or a failed download."),
            ("images that do not decode", len(self.scanned.bad), "Training stops at the first one."),
            (f"images of another size than {size} x {size}", odd, "Training stops or resizes them; align the faces first."),
            ("copies within an identity", within, "The same picture counts twice."),
        )
        return found + [(what, f"{count:,}", why) for what, count, why in counted if count]


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face data inspect", __doc__)
    parser.add_argument("set", type=Path, help="folder with train.rec, *.tar or a folder per person; or a list of 'path label'")
    parser.add_argument("--out", type=Path, help="folder of the report (default: report_NAME here)")
    parser.add_argument("--bins", type=Path, nargs="*", default=[], help="test sets: .bin, .safetensors or .csv files of pairs")
    parser.add_argument("--images", type=int_in_range(0), default=0, help="check only N images, drawn at random; 0 = all")
    parser.add_argument("--seed", type=int_in_range(0), default=0, help="random seed")
    add_threads(parser)
    return run_main(inspect, parser.parse_args(arguments))


def inspect(options: argparse.Namespace) -> None:
    """Read the set, find its faults, and write the report."""
    out = options.out or Path(f"report_{options.set.resolve().name}")
    dataset = open_set_of(options.set)
    out.mkdir(parents=True, exist_ok=True)  # before hours of reading
    tests = [read_pairs(path) for path in options.bins]
    print(dataset.describe())
    rng = np.random.default_rng(options.seed)
    count = dataset.num_images
    some = 0 < options.images < count
    indices = np.sort(rng.choice(count, options.images, replace=False)) if some else np.arange(count)
    scanned = scan(dataset, indices, options.threads)
    found = Findings(dataset, SetNames(dataset), scanned, dataset.labels(), [], {}, {test.name: test for test in tests}, 0)
    found.copies, found.not_compared = find_copies(dataset, scanned, options)
    for test in tests:
        found.overlaps[test.name], left = find_overlap(dataset, scanned, test, options)
        found.not_compared += left
    _write_tables(out, found)
    write_page(out / "report.html", f"Set {options.set}", found, rng)
    write_file(out / "report.json", json.dumps(found.report, indent=1) + "\n")
    for what, how_many, _ in found.faults():
        print(f"  BAD  {what}: {how_many}")
    for name, value in found.report.items():
        if not isinstance(value, dict):
            print(f"  {name.replace('_', ' '):<44}{f'{value:,}' if isinstance(value, int) else value}")
    print(f"report: {shown(out / 'report.html')}")


def find_copies(dataset: FaceDataset, scanned: Scan, options: argparse.Namespace) -> tuple[list[Copy], int]:
    """Return the copies within the set, and the number of candidates for near copies that were not compared."""
    copies = [Copy(int(group[0]), int(other), "equal", 1.0) for group in equal_groups(scanned) for other in group[1:]]
    seconds = np.searchsorted(scanned.indices, [copy.second for copy in copies])
    distinct = np.setdiff1d(np.flatnonzero(scanned.faces), seconds, assume_unique=True)
    pairs = distinct[candidates(scanned.dhash[distinct])]
    apart = np.bitwise_count(scanned.dhash[pairs[:, 0]] ^ scanned.dhash[pairs[:, 1]])

    def compare(pair: np.ndarray) -> Copy:
        first, second = scanned.indices[pair].tolist()
        return Copy(first, second, "near", correlation(*(decode_rgb(dataset.sample(index)[0]) for index in (first, second))))

    near, left = _compared(pairs, apart, compare, "comparing", options.threads)
    return copies + near, left


def _compared(
    pairs: np.ndarray, apart: np.ndarray, compare: Callable[[np.ndarray], Copy], what: str, threads: int
) -> tuple[list[Copy], int]:
    """Return those of the candidates (n, 2) that are copies, and the number of those that were not compared.

    If there are too many, those whose hashes differ in the fewest bits, `apart` (n,), are compared.
    """
    some = pairs[np.sort(np.argsort(apart, kind="stable")[:_COMPARED])]
    found = progress(map_in_order(compare, some, threads), len(some), what, "pair")
    return [copy for copy in found if copy.likeness >= MIN_CORRELATION], len(pairs) - len(some)


def find_overlap(dataset: FaceDataset, scanned: Scan, test: PairSet, options: argparse.Namespace) -> tuple[list[Copy], int]:
    """Return the pictures of the set that are also in a test set, and the number of candidates that were not compared."""
    size = range(len(test.images))

    def read(index: int) -> int:
        with prefix_errors(f"{test.path or test.name}: image {index}"):
            return dhash(decode_rgb(test.images[index]))

    hashes = progress(map_in_order(read, size, options.threads), len(size), f"reading {test.name}", "image")
    good = np.flatnonzero(scanned.faces)
    theirs = np.array(list(hashes), dtype=np.uint64)
    pairs = candidates(scanned.dhash[good], theirs)
    apart = np.bitwise_count(scanned.dhash[good[pairs[:, 0]]] ^ theirs[pairs[:, 1]])

    def compare(pair: np.ndarray) -> Copy:
        index, other = int(scanned.indices[good[pair[0]]]), int(pair[1])
        data = bytes(dataset.sample(index)[0])
        likeness = correlation(decode_rgb(data), decode_rgb(test.images[other]))
        return Copy(index, other, "equal" if data == test.images[other] else "near", likeness)

    return _compared(pairs, apart, compare, f"comparing with {test.name}", options.threads)


def _write_tables(out: Path, found: Findings) -> None:
    names, labels = found.names, found.labels
    bad = [*found.scanned.bad, *((i, "is of one colour, or nearly") for i in found.plain())]
    write_csv(out / "bad.csv", ("index", "key", "reason"), ((i, names.file(i), why) for i, why in sorted(bad)))
    write_csv(
        out / "duplicates.csv",
        ("index", "other_index", "kind", "likeness", "identity", "other_identity", "key", "other_key"),
        (
            (a, b, kind, f"{r:.4f}", labels[a], labels[b], names.file(a), names.file(b))
            for a, b, kind, r in sorted(found.copies, key=lambda copy: (labels[copy.first] == labels[copy.second], copy))
        ),
    )
    write_csv(
        out / "overlap.csv",
        ("index", "identity", "test_set", "test_image", "kind", "likeness", "key"),
        (
            (a, labels[a], name, b, kind, f"{r:.4f}", names.file(a))
            for name, copies in found.overlaps.items()
            for a, b, kind, r in copies
        ),
    )
    write_csv(out / "drop.csv", ("index", "why"), sorted(what_to_drop(found).items()))


def what_to_drop(found: Findings) -> dict[int, str]:
    """Return index -> reason: bad images; copies: all but the first within an identity, both across identities; overlaps."""
    drop, labels = {index: "bad" for index, _ in found.scanned.bad}, found.labels
    drop |= dict.fromkeys(found.plain(), "one colour")
    for copy in found.copies:
        if labels[copy.first] == labels[copy.second]:
            drop.setdefault(copy.second, f"copy of {copy.first}")
        else:
            drop.setdefault(copy.first, f"also identity {labels[copy.second]}")
            drop.setdefault(copy.second, f"also identity {labels[copy.first]}")
    for name, copies in found.overlaps.items():
        for copy in copies:
            drop.setdefault(copy.first, f"in {name}")
    return drop


def write_page(path: Path, title: str, found: Findings, rng: np.random.Generator) -> None:
    """Write the page; `rng` draws the identities of the contact sheet."""
    page = Page(title)
    page.text(found.dataset.describe(), note=True)
    page.section("What is wrong")
    if found.faults():
        page.table(("found", "how many", "why it matters"), found.faults())
        page.text("drop.csv lists the images to drop; face data filter --drop drop.csv makes a set without them.", note=True)
    else:
        tested = " and with the test sets" if found.tests else "; no test set was given with --bins"
        left = f"; {found.not_compared:,} pairs of similar pictures were not compared" if found.not_compared else ""
        page.text(f"No faults: every image decodes, and none is a copy within the set{tested}{left}.")
    for name, copies in found.overlaps.items():
        where = "Left: this set, right: the test set."
        _copies(page, found, copies, f"Shared with the test set {name}", where, found.tests[name])
    across = found.across()
    _copies(page, found, across, "Copies across identities", "One person has two labels, or a label is wrong.")
    _unusable(page, found)
    known = set(across)
    within = [copy for copy in found.copies if copy not in known]
    _copies(page, found, within, "Copies within an identity", "drop.csv keeps the first of each.")
    page.section("Some identities, drawn at random")
    page.picture(_contact_sheet(found, rng), "one row per identity. Other people in a row mean wrong labels")
    page.section("Images per identity, and their size")
    counts = np.bincount(found.labels, minlength=found.dataset.num_classes)
    page.picture(histograms(counts[counts > 0], found.scanned.num_bytes[found.scanned.good]), "histograms")
    page.section("All numbers")
    page.table(("", "value"), [(k.replace("_", " "), v) for k, v in found.report.items() if not isinstance(v, dict)])
    page.write(path)


def _copies(page: Page, found: Findings, copies: Sequence[Copy], heading: str, text: str, test: PairSet | None = None) -> None:
    """Show some copies; `test`: the second picture of each is of this test set."""
    if not copies:
        return
    page.section(heading)
    page.text(text)
    rows = []
    for copy in sorted(copies)[:_MAX_SHOWN]:
        other = f"image {copy.second} of {test.name}" if test else _called(found, copy.second)
        second = decode_rgb(test.images[copy.second]) if test else _pixels(found, copy.second)
        rows.append((f"{copy.kind}: {_called(found, copy.first)}, and {other}", [_pixels(found, copy.first), second]))
    listed = "overlap.csv" if test else "duplicates.csv"
    page.picture(sheet(rows, 4, min(2, len(rows))), f"{len(rows)} of {len(copies)} pairs; all are in {listed}")


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


def _contact_sheet(found: Findings, rng: np.random.Generator) -> bytes:
    usable = found.scanned.indices[found.scanned.good]
    order = usable[np.argsort(found.labels[usable], kind="stable")]
    identities, begins = np.unique(found.labels[order], return_index=True)
    ends = np.append(begins[1:], len(order))
    rows = []
    for place in np.sort(rng.permutation(len(identities))[:_ROWS]).tolist():
        members = order[begins[place] : ends[place]]
        chosen = np.sort(rng.permutation(members)[:_COLUMNS])
        number = f", identity {identities[place]}" if found.names.folders else ""
        name = found.names.person(int(identities[place]))
        caption = f"{name}{number}: {len(members)} image{'s' if len(members) > 1 else ''}"
        rows.append((caption, [_pixels(found, index) for index in chosen.tolist()]))
    return sheet(rows, min(_COLUMNS, max([4, *(len(pictures) for _, pictures in rows)])))


if __name__ == "__main__":
    raise SystemExit(main())
