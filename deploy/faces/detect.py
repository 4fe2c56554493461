"""Finds the faces of a folder of photographs: writes aligned crops, what is done, lists, a sheet; a killed run goes on."""

import argparse
import contextlib
import errno
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from eval.foreign_networks import onnx_hash
from utils.cli import progress
from utils.files import check_file, read_bytes, shown, write_csv, write_file
from utils.image import MAX_PHOTO_PIXELS, decode_rgb
from utils.parallel import map_in_order
from utils.report import sheet

from ..gallery.gate import Gate
from ..journal import Journal, open_journal
from .detector import Detector, Face, open_detector
from .landmarks import report_padding
from .pictures import UNREADABLE, Rejected, check_distinct, list_pictures, read_crops, stamp_of, to_jpeg


class Done(NamedTuple):
    """A picture that is done: its faces, or why there are none."""

    name: str
    stamp: tuple[int, int]  # see `stamp_of`
    faces: tuple[tuple[Face, float], ...]  # with the share of its crop that is outside the picture
    reason: str


def crop_name(name: str, which: str, number: int) -> str:
    """Return the relative name of a crop; `number` counts the crops of a picture from 0."""
    path = Path(name)
    return str(path.with_name(f"{path.stem}_{number + 1}.jpg" if which == "all" else f"{path.stem}.jpg"))


class Detections:
    """The pictures that are done, in OUT/detect.jsonl.

    Args:
        facts: what the crops depend on; a journal of others is an error.
        again: forget what it has, and remove those crops.

    Raises:
        ValueError: it is of another detector or of other settings, or the folder has files and no journal.
    """

    NAME = "detect.jsonl"

    def __init__(self, out: Path, journal: Journal, facts: Mapping[str, object], again: bool) -> None:
        self._out, self._journal = out, journal
        found = [done for entry in journal.entries if (done := _done(entry.record))]
        self.done = {done.name: done for done in found}
        # desktops leave hidden files anywhere
        if journal.facts is None and (other := min((n for n in os.listdir(out) if n != self.NAME and n[0] != "."), default="")):
            if not journal.path.stat().st_size:
                journal.path.unlink(missing_ok=True)  # the lock made it
            raise ValueError(
                f"{shown(out)}: holds {shown(other)} and no {self.NAME}, so it is no folder of crops, and its files might be "
                "overwritten; name a new or empty one"
            )
        if again:
            self.remove(list(self.done), str(journal.facts.get("which")) if isinstance(journal.facts, dict) else "")
        journal.begin(facts, again, str(out), "its crops were made with")

    def remove(self, names: Iterable[str], which: str) -> None:
        """Forget pictures, and remove their crops, so that none of others is left; names that lead elsewhere are skipped."""
        root = self._out.resolve()
        for name in names:
            for number in range(len(self.done.pop(name).faces)):
                with contextlib.suppress(OSError, ValueError):  # no name of a file
                    crop = self._out / crop_name(name, which, number)
                    if crop.parent.resolve().is_relative_to(root):
                        crop.unlink()

    def is_done(self, folder: Path, name: str, which: str) -> bool:
        """Return whether a picture is the one that was done, and its crops are there."""
        done = self.done.get(name)
        if done is None or done.stamp != stamp_of(folder / name) or done.reason.startswith(UNREADABLE):
            return False
        return all(_has_bytes(self._out / crop_name(name, which, number)) for number in range(len(done.faces)))

    def add(self, done: Done) -> None:
        """Record a picture."""
        faces = [
            {"box": face.box.tolist(), "points": face.points.tolist(), "score": face.score, "padding": padding}
            for face, padding in done.faces
        ]
        self._journal.add({"name": done.name, "stamp": done.stamp, "faces": faces, "reason": done.reason})
        self.done[done.name] = done


def _has_bytes(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return check_file(path) > 0
    return False


def _done(record: Any) -> Done | None:
    """Return what a line says; None if it is no line of this program, so that its picture is done again."""
    try:
        size, time = record["stamp"]
        faces = tuple(_found(face) for face in record["faces"])
        name, reason = record["name"], record["reason"]
    except (KeyError, TypeError, ValueError):
        return None
    if not (isinstance(name, str) and isinstance(reason, str) and (faces or reason)):
        return None
    return Done(name, (size, time), faces, reason)


def _found(record: Any) -> tuple[Face, float]:
    box, points = np.array(record["box"], dtype=np.float64), np.array(record["points"], dtype=np.float64)
    score, padding = float(record["score"]), float(record["padding"])
    if box.shape != (4,) or points.shape != (5, 2) or not math.isfinite(score + padding + float(box.sum() + points.sum())):
        raise ValueError("no face")
    return Face(box, points, score), padding


_FACES, _REJECTED = 36, 12  # at most, evenly spread over all
_ACROSS, _SIDE = 3, 168  # pictures side by side, each with its crop; pixels
_BOX, _POINT = (0, 200, 0), (255, 60, 60)


def write_sheet(path: Path, folder: Path, out: Path, pictures: Sequence[Done], which: str) -> None:
    """Write a PNG: pictures with their first face and its crop, then rejected ones with the reason."""
    found = _spread([done for done in pictures if done.faces], _FACES)
    rejected = _spread([done for done in pictures if done.reason], _REJECTED)
    pairs = []
    for done in [*found, *rejected]:
        picture = _thumbnail(folder, done)
        crop = _read(out / crop_name(done.name, which, 0), False) if done.faces else None
        what = f"{done.faces[0][0].score:.2f} {done.name}" if done.faces else f"{done.name}: {done.reason}"
        black = np.zeros((_SIDE, _SIDE, 3), dtype=np.uint8)
        pairs.append((what, [black if picture is None else picture, black if crop is None else crop]))
    write_file(path, sheet(pairs, 3, _ACROSS, _SIDE))
    print(f"{path}: {len(found)} pictures with their crops, {len(rejected)} rejected ones")


def _spread(items: list[Done], most: int) -> list[Done]:
    return [items[number * len(items) // min(most, len(items))] for number in range(min(most, len(items)))]


def _read(path: Path, upright: bool) -> np.ndarray | None:
    try:
        return decode_rgb(read_bytes(path), MAX_PHOTO_PIXELS, upright)
    except (OSError, ValueError):
        return None


def _thumbnail(folder: Path, done: Done) -> np.ndarray | None:
    """Return a picture in a square, with boxes and points drawn in the resolution of the sheet; None if it is unreadable."""
    pixels = _read(folder / done.name, True)
    if pixels is None:
        return None
    height, width = pixels.shape[:2]
    factor = _SIDE / max(height, width)
    inner = (max(1, round(width * factor)), max(1, round(height * factor)))
    square = np.zeros((_SIDE, _SIDE, 3), dtype=np.uint8)
    square[: inner[1], : inner[0]] = cv2.resize(pixels, inner, interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR)
    for face, _ in done.faces:
        places = (np.concatenate([face.box.reshape(2, 2), face.points]) + 0.5) * factor - 0.5
        places = np.clip(places.round(), -_SIDE, 2 * _SIDE).astype(int).tolist()
        cv2.rectangle(square, places[0], places[1], _BOX, 1)
        for place in places[2:]:
            cv2.circle(square, place, 2, _POINT, -1)
    return square


_POINTS = [f"{axis}{number}" for number in range(1, 6) for axis in "xy"]


def run(options: argparse.Namespace) -> None:
    """Detect, align and write the lists; a picture without a face is listed, and ends nothing."""
    names = list_pictures(options.folder)
    if options.out.resolve().is_relative_to(options.folder.resolve()):
        raise ValueError(
            f"{options.out}: the crops must not be below {options.folder}, or the next run would take them for photographs"
        )
    check_distinct(options.folder, names, [name.removesuffix(Path(name).suffix) for name in names])
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


def _check_sheet(options: argparse.Namespace) -> None:
    """Raise ValueError for a sheet that a later program would take for a photograph or a crop, or that has no folder."""
    for folder in (options.folder, options.out):
        if options.sheet.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"--sheet: must not be below {folder}, whose pictures are faces, got {options.sheet}; move it")
    if options.sheet.is_dir() or not options.sheet.absolute().parent.is_dir():
        raise ValueError(f"--sheet: must be a file in a folder that exists, got {options.sheet}")


def _facts(options: argparse.Namespace) -> dict[str, object]:
    """Return what the crops depend on, beside the pictures."""
    settings = ["min_score", "min_size", "overlap", "longest_side", "which", "size", "quality"]
    settings += ["max_padding"] if options.max_padding < 1 else []
    given = {name: getattr(options, name) for name in settings}
    # moved together they stay what they were
    folder = os.path.relpath(os.path.realpath(options.folder), os.path.realpath(options.out))
    return {"folder": folder, "detector": onnx_hash(options.detector), **given}


def _work(options: argparse.Namespace, names: Sequence[str], detector: Detector, journal: Detections) -> int:
    """Detect and align what the journal lacks; return the number of pictures."""

    def work(name: str) -> Done:
        before = stamp_of(options.folder / name)
        bad = _unusable(name)
        crops = Rejected(name, bad) if bad else read_crops(options.folder, name, detector, options.size, options.which)
        if isinstance(crops, Rejected):
            return Done(name, before, (), crops.reason)
        faces = []
        reasons = [Gate(max_padding=options.max_padding).reason(math.inf, crop.padding) for crop in crops]
        if all(reasons):
            return Done(name, before, (), reasons[0])
        for number, crop in enumerate(crop for crop, reason in zip(crops, reasons, strict=True) if not reason):
            target = options.out / crop_name(name, options.which, number)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                write_file(target, to_jpeg(crop.pixels, options.quality))
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                return Done(name, before, (), "its name is too long for its crop; rename it")
            assert crop.face is not None
            faces.append((crop.face, crop.padding))
        return Done(name, before, tuple(faces), "")

    missing = [name for name in names if not journal.is_done(options.folder, name, options.which)]
    if gone := sorted(journal.done.keys() - set(names)):
        print(f"warning: {len(gone)} pictures of before are gone, such as {shown(gone[0])}; their crops stay until --again")
    journal.remove(journal.done.keys() & set(missing), options.which)  # a picture may have fewer faces now
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
    write_file(options.out / "landmarks.csv", "".join(lines))
    rejected = [(name, journal.done[name].reason) for name in names if journal.done[name].reason]
    (options.out / "rejected.csv").unlink(missing_ok=True)
    if rejected:
        write_csv(options.out / "rejected.csv", ("picture", "reason"), rejected)
    report_padding(options.out, padding)
    return len(rows)
