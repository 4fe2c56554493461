"""Makes aligned crops of pictures: of photographs by a detector, or of pictures that are aligned already.

A photograph is turned as its EXIF orientation says, as viewers show it. An aligned crop is read as in training and evaluation,
which ignore that orientation.
"""

import argparse
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.alignment import align, check_points
from utils.files import read_bytes
from utils.image import MAX_PHOTO_PIXELS, decode_rgb, image_size
from utils.text import one_line

from .detector import Detector, Face

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


class Rejected(NamedTuple):
    """A picture of which there is no crop."""

    name: str
    reason: str


def add_which_argument(parser: argparse.ArgumentParser, one: bool = False, otherwise: str = "rejected") -> None:
    """Add --which, the faces of a picture that count.

    Args:
        one: a picture has one face at most, so all is no choice.
        otherwise: what only makes of a picture with several faces, in words.
    """
    parser.add_argument(
        "--which",
        choices=[which for which in WHICH if not (one and which == "all")],
        default="largest",
        help=f"of several faces in a picture: the largest, the one nearest to the centre, {'' if one else 'all, '}or only = "
        f"such a picture is {otherwise} (default largest)",
    )


def read_crops(folder: Path, name: str, detector: Detector | None, size: int, which: str) -> list[Crop] | Rejected:
    """Return the aligned faces of a picture below a folder, (size, size) pixels each, or why there are none.

    Args:
        detector: None = the picture must be an aligned crop already.
        which: one of WHICH.
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
        if (height, width) != (size, size):  # before it takes memory
            raise ValueError(
                f"is {width} x {height} pixels, no aligned crop of {size} x {size}: name a --detector for photographs, or "
                "align it with scripts.data.align"
            )
        return [Crop(name, decode_rgb(data), None, 0)]
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
