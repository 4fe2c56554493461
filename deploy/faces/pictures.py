"""Finds picture files, encodes them, and makes aligned crops: by a detector, or of pictures that are aligned already.

A photograph is turned as its EXIF orientation says, as viewers show it. An aligned crop is read as in training and evaluation,
which ignore that orientation.
"""

import argparse
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from data.datasets import no_image_below, passed_over
from utils.alignment import align, check_points
from utils.cli import warn
from utils.files import find_files, read_bytes, read_lines, shown
from utils.image import IMAGE_SIZE, IMAGE_SUFFIXES, MAX_PHOTO_PIXELS, decode_rgb, image_size, resize_square
from utils.text import one_line

from .detector import Detector, Face
from .landmarks import is_number

_KEPT = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")  # JPEG and PNG are stored unchanged


class Picture(NamedTuple):
    """A picture to store."""

    folder: Path  # below which it is; a path for each would take most of the memory
    name: str  # relative, for train.lst and messages
    label: int
    points: np.ndarray | None = None  # (5, 2), landmarks to align by; None = no alignment


class Rules(NamedTuple):
    """How pictures become the images of a set."""

    size: int  # pixels, height and width
    quality: int  # of new JPEGs
    resize: bool  # resize unaligned pictures of another size to `size`; False: they are an error
    smooth: bool  # of utils.alignment.align
    upright: bool = False  # turn pictures with landmarks as their EXIF orientation says


class Encoded(NamedTuple):
    """The stored form of a picture."""

    data: bytes
    padding: float = 0.0  # share of the aligned face that is outside the picture
    turned: bool = False  # aligned as it is stored, and its EXIF orientation would turn it


class Rejected(NamedTuple):
    """A picture that cannot be used."""

    name: str
    reason: str


def stamp_of(path: Path) -> tuple[int, int]:
    """Return the size of a file in bytes and the time of its last change in ns; zeros if it cannot be asked."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def list_pictures(folder: Path) -> list[str]:
    """Return the pictures below a folder, as paths below it in their order; what is passed over is a warning."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    found = find_files(folder, IMAGE_SUFFIXES, top=True)
    warn(*passed_over(folder, found))
    if not found.files:
        raise ValueError(no_image_below(folder))
    return found.files


def check_distinct(folder: Path, names: Sequence[str], crops: Sequence[object]) -> None:
    """Raise ValueError for pictures below a folder whose crops would be one file."""
    first: dict[object, str] = {}
    for name, crop in zip(names, crops, strict=True):
        if (other := first.setdefault(crop, name)) != name:
            raise ValueError(f"{folder / name}: its face and the face of {other} would be the same file; rename one of them")


def read_list(path: Path) -> Iterator[Picture]:
    """Yield the pictures of a .lst file of insightface (aligned, path, label, ...) or mxnet's im2rec (index, label, path).

    Paths are relative to the folder of the list. insightface's landmarks are five x, then five y.
    """
    for number, line in enumerate(read_lines(path), 1):
        columns = line.rstrip("\r").split("\t")
        if not line.strip():
            continue
        if len(columns) >= 3 and not is_number(columns[1]) and columns[2].strip().isdigit():
            yield _insightface_line(path, number, columns)
        elif len(columns) >= 3 and is_number(columns[1]) and float(columns[1]).is_integer() and float(columns[1]) >= 0:
            yield Picture(path.parent, columns[-1], int(float(columns[1])))
        else:
            raise ValueError(
                f"{path}: line {number} must be 'aligned TAB path TAB label ...' (insightface) "
                "or 'index TAB label TAB path' (im2rec)"
            )


def _insightface_line(path: Path, number: int, columns: list[str]) -> Picture:
    aligned, name, label = columns[0].strip(), columns[1], int(columns[2])
    if aligned == "1":
        return Picture(path.parent, name, label)
    try:
        points = np.array([float(column) for column in columns[7:17]]).reshape(2, 5).T
    except ValueError:
        raise ValueError(f"{path}: line {number}: {name} is not aligned, so ten landmark numbers must follow its box") from None
    return Picture(path.parent, name, label, points)


def encode(picture: Picture, rules: Rules) -> Encoded | Rejected:
    """Return the bytes to store: the file's own bytes if it is a JPEG or PNG of the right size, otherwise a new JPEG."""
    try:
        data = read_bytes(picture.folder / picture.name)
    except OSError as error:
        return Rejected(picture.name, f"cannot be read: {error.strerror}")
    try:
        pixels = decode_rgb(data, MAX_PHOTO_PIXELS, rules.upright and picture.points is not None)
        if picture.points is None:
            if pixels.shape[:2] == (rules.size, rules.size):
                return Encoded(data if data.startswith(_KEPT) else to_jpeg(pixels, rules.quality))
            height, width = pixels.shape[:2]
            if not rules.resize or height != width:
                why = "and to resize it would distort it" if rules.resize else f"not {rules.size} x {rules.size}"
                return Rejected(picture.name, f"is {width} x {height} pixels, {why}")
            shrinks = min(pixels.shape[:2]) > rules.size
            how = cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC
            return Encoded(to_jpeg(cv2.resize(pixels, (rules.size, rules.size), interpolation=how), rules.quality))
        padding = check_points(picture.points, *pixels.shape[:2])
        turned = not rules.upright and is_turned(data)
        return Encoded(to_jpeg(align(pixels, picture.points, rules.size, rules.smooth), rules.quality), padding, turned)
    except ValueError as error:
        return Rejected(picture.name, str(error))


UPRIGHT = "turn pictures as their EXIF orientation says, if the landmarks are of upright ones. mxnet does not, nor do we"


def is_turned(data: bytes) -> bool:
    """Return whether the EXIF orientation of a picture that can be decoded would change its pixels."""
    if not any(mark in data for mark in (b"Exif", b"eXIf", b"EXIF")):
        return False
    flags = (cv2.IMREAD_REDUCED_COLOR_8, cv2.IMREAD_REDUCED_COLOR_8 | cv2.IMREAD_IGNORE_ORIENTATION)
    turned, stored = (np.asarray(cv2.imdecode(np.frombuffer(data, dtype=np.uint8), flag)) for flag in flags)
    return not np.array_equal(turned, stored)


def report_turned(names: Sequence[str]) -> None:
    """Print a warning about pictures that `is_turned` holds of."""
    if names:
        what = f"{len(names)} pictures, such as {shown(names[0])}, were aligned as they are stored"
        print(f"warning: {what}, and EXIF turns them; if the landmarks are of upright pictures, give --upright --overwrite")


def to_jpeg(pixels: np.ndarray, quality: int) -> bytes:
    """Return (H, W, 3) uint8 RGB as a JPEG file."""
    done, encoded = cv2.imencode(".jpg", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, quality])
    assert done
    return encoded.tobytes()


WHICH = ("largest", "central", "all", "only")
_LARGE = 30_000_000  # pixels; only one picture of more is in memory at a time, because it takes up to 9 bytes for each
_one_large = threading.Lock()
UNREADABLE = "cannot be read: "  # begins the reason if the disk failed, which may be better the next time


class Crop(NamedTuple):
    """An aligned face."""

    name: str  # of the picture, relative to the folder
    pixels: np.ndarray  # (S, S, 3) uint8 RGB
    face: Face | None  # None = the picture is an aligned crop
    number: int  # of the face in its picture, from 0, best score first
    padding: float = 0.0  # share of the crop that is outside the picture, and so is black

    @property
    def quality(self) -> float:
        """The detector's score, 1 for an aligned crop."""
        return 1.0 if self.face is None else float(self.face.score)


def add_which_argument(parser: argparse.ArgumentParser, one: bool = False, otherwise: str = "rejected") -> None:
    """Add --which, the faces of a picture that count: with `one` not all; `otherwise` says what only makes of several faces."""
    choices = [which for which in WHICH if not (one and which == "all")]
    text = f"of several faces in a picture: the largest, the one nearest to the centre, {'' if one else 'all, '}or only = "
    parser.add_argument("--which", choices=choices, default="largest", help=f"{text}such a picture is {otherwise}")


def read_crops(folder: Path, name: str, detector: Detector | None, size: int, which: str) -> list[Crop] | Rejected:
    """Return the faces of a picture below a folder that count (`which` of WHICH), (size, size) pixels, or why there are none.

    Without a detector the picture must be an aligned crop already.
    """
    try:
        return crops_of(read_bytes(folder / name), name, detector, size, which)
    except OSError as error:
        return Rejected(name, f"{UNREADABLE}{error.strerror}")


def crops_of(data: bytes, name: str, detector: Detector | None, size: int, which: str) -> list[Crop] | Rejected:
    """Return the aligned faces of an encoded picture, or why there are none; the arguments are those of `read_crops`."""
    stored = image_size(data)
    large = stored is not None and stored[0] * stored[1] > _LARGE
    try:
        if not large:
            return _crops(data, name, detector, size, which)
        with _one_large:
            return _crops(data, name, detector, size, which)
    except ValueError as error:
        return Rejected(name, one_line(error))
    except MemoryError:
        return Rejected(name, "cannot be decoded: it does not fit into memory")


def _crops(data: bytes, name: str, detector: Detector | None, size: int, which: str) -> list[Crop]:
    if detector is None:
        height, width = image_size(data) or (size, size)
        if height != width or height not in (size, IMAGE_SIZE):  # before it takes memory
            crop = " or ".join(f"{side} x {side}" for side in sorted({size, IMAGE_SIZE}))
            raise ValueError(
                f"is {width} x {height} pixels, no aligned crop of {crop}: name a detector for photographs, or align it with "
                "face data align"
            )
        pixels = decode_rgb(data)  # crops have 112 pixels in this field; training and evaluation resize them, too
        return [Crop(name, pixels if height == size else resize_square(pixels, size), None, 0)]
    pixels = decode_rgb(data, MAX_PHOTO_PIXELS, upright=True)
    height, width = pixels.shape[:2]
    faces = detector.detect(pixels)
    if not faces:
        raise ValueError("no face found")
    if which == "only" and len(faces) > 1:
        raise ValueError(f"{len(faces)} faces found, and with --which only there must be one")
    found: list[Crop] = []
    problem = ""
    for number in chosen(faces, which, height, width):
        points = faces[number].points
        try:
            padding = check_points(points, height, width)
            found.append(Crop(name, align(pixels, points, size, smooth=True), faces[number], number, padding))
        except ValueError as error:
            problem = problem or str(error)
    if not found:
        raise ValueError(f"the detector found no face that can be aligned: {problem}")
    return found


def chosen(faces: list[Face], which: str, height: int, width: int) -> list[int]:
    """Return the numbers of the faces that count; of equal ones the one with the better score, which comes first."""
    if which == "all":
        return list(range(len(faces)))
    boxes = np.stack([face.box for face in faces])
    if which == "central":
        centre = np.array([width - 1, height - 1]) / 2
        return [int(np.hypot(*((boxes[:, :2] + boxes[:, 2:]) / 2 - centre).T).argmin())]
    return [int((boxes[:, 2:] - boxes[:, :2]).prod(axis=1).argmax())]
