"""Finds the faces of a folder of photographs and writes their aligned crops; an interrupted run goes on."""

import argparse
import errno
from collections.abc import Sequence
from pathlib import Path

from eval.foreign_networks import onnx_hash
from utils.cli import progress
from utils.parallel import map_in_order

from ..journal import open_journal
from ..output import csv_bytes, write_file
from .crops import Rejected, read_crops
from .detector import Detector, open_detector
from .journal import Detections, Done, Found, crop_name
from .landmarks import report_padding
from .pictures import list_pictures, to_jpeg
from .sheet import write_sheet

_POINTS = [f"{axis}{number}" for number in range(1, 6) for axis in "xy"]


def run(options: argparse.Namespace) -> None:
    """Detect, align and write the lists; a picture without a face is listed, and ends nothing."""
    names = _pictures(options.folder, options.out)
    if options.sheet is not None:
        _check_sheet(options)
    detector = open_detector(options)
    assert detector is not None
    options.out.mkdir(parents=True, exist_ok=True)
    with open_journal(options.out / Detections.NAME, str(options.out)) as opened:
        journal = Detections(options.out, opened, _facts(options), options.again)
        new = _work(options, names, detector, journal)
        faces = _write_lists(options, names, journal)
        if options.sheet:
            write_sheet(options.sheet, options.folder, options.out, [journal.done[name] for name in names], options.which)
    rejected = [journal.done[name] for name in names if journal.done[name].reason]
    if not faces:
        raise ValueError(
            f"{options.folder}: no face in any of {len(names)} pictures; the first, {rejected[0].name}, {rejected[0].reason}; "
            f"all are in {options.out / 'rejected.csv'}"
        )
    listed = f", {len(rejected)} rejected, listed in {options.out / 'rejected.csv'}" if rejected else ""
    print(
        f"{options.out}: {faces} faces of {len(names) - len(rejected)} pictures, {options.size} x {options.size}{listed}; "
        f"{len(names) - new} pictures were done already"
    )


def _pictures(folder: Path, out: Path) -> list[str]:
    """Return the pictures below a folder; an error for names whose crops would be the same file, before any work is done."""
    names = list_pictures(folder)
    if out.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{out}: the crops must not be below {folder}, or the next run would take them for photographs")
    first: dict[Path, str] = {}
    for name in names:
        if first.setdefault(Path(name).with_suffix(""), name) != name:
            other = first[Path(name).with_suffix("")]
            raise ValueError(f"{folder / name}: its face and the face of {other} would be the same file; rename one of them")
    return names


def _check_sheet(options: argparse.Namespace) -> None:
    """Raise ValueError for a sheet that a later program would take for a photograph or a crop, or that has no folder."""
    for folder in (options.folder, options.out):
        if options.sheet.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"--sheet: must not be below {folder}, whose pictures are faces, got {options.sheet}; move it")
    if options.sheet.is_dir() or not options.sheet.absolute().parent.is_dir():
        raise ValueError(f"--sheet: must be a file in a folder that exists, got {options.sheet}")


def _facts(options: argparse.Namespace) -> dict[str, object]:
    """Return what the crops depend on, beside the pictures."""
    settings = ("min_score", "min_size", "overlap", "longest_side", "which", "size", "quality")
    return {"detector": onnx_hash(options.detector), **{name: getattr(options, name) for name in settings}}


def _work(options: argparse.Namespace, names: Sequence[str], detector: Detector, journal: Detections) -> int:
    """Detect and align what the journal lacks; return the number of pictures."""

    def work(name: str) -> Done:
        before = journal.stamp(options.folder / name)
        bad = _unusable(name)
        crops = Rejected(name, bad) if bad else read_crops(options.folder, name, detector, options.size, options.which)
        if isinstance(crops, Rejected):
            return Done(name, before, (), crops.reason)
        faces = []
        for number, crop in enumerate(crops):
            target = options.out / crop_name(name, options.which, number)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                write_file(target, to_jpeg(crop.pixels, options.quality))
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                return Done(name, before, (), "its name is too long for its crop; rename it")
            assert crop.face is not None
            faces.append(Found(crop.face, crop.padding))
        return Done(name, before, tuple(faces), "")

    missing = [name for name in names if not journal.is_done(options.folder, name, options.which)]
    for name in missing:
        journal.forget(name, options.which)
    for done in progress(map_in_order(work, missing, options.threads), len(missing), "detecting", "picture"):
        journal.add(done)
    return len(missing)


def _unusable(name: str) -> str:
    """Return why a name cannot stand in landmarks.csv, or ""."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return "its name is no UTF-8; rename it"
    if "\t" in name or name.splitlines() != [name] or name != name.strip():
        return "its name begins or ends with a space, or has a tab or a line end; rename it"
    return ""


def _write_lists(options: argparse.Namespace, names: Sequence[str], journal: Detections) -> int:
    """Write landmarks.csv, rejected.csv and padding.csv; return the number of faces."""
    rows: list[Sequence[object]] = []
    padding: dict[str, float] = {}
    for name in names:
        for number, (face, share) in enumerate(journal.done[name].faces):
            crop = crop_name(name, options.which, number)
            points = [f"{value:.3f}" for value in face.points.ravel()]
            box = [f"{value:.3f}" for value in face.box]
            rows.append((crop if options.which == "all" else name, *points, *box, f"{face.score:.4f}"))
            padding[crop] = share
    header = ("name", *_POINTS, "left", "top", "right", "bottom", "score")
    # its reader knows no quotation marks, but takes a tab for the delimiter of a line that has one
    between = "\t" if any("," in str(row[0]) for row in rows) else ","
    lines = (between.join(map(str, row)) + "\n" for row in [header, *rows])
    write_file(options.out / "landmarks.csv", "".join(lines).encode())
    rejected = [(name, journal.done[name].reason) for name in names if journal.done[name].reason]
    (options.out / "rejected.csv").unlink(missing_ok=True)
    if rejected:
        write_file(options.out / "rejected.csv", csv_bytes([("picture", "reason"), *rejected]))
    report_padding(options.out, padding)
    return len(rows)
