"""Draws what a detector found: pictures with box and points, each beside its crop."""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from utils.files import read_bytes
from utils.image import MAX_PHOTO_PIXELS, decode_rgb
from utils.report.contact_sheet import pair_sheet

from ..output import write_file
from .journal import Done, crop_name

_FACES, _REJECTED = 36, 12  # at most, evenly spread over all
_COLUMNS, _SIDE = 3, 168  # pairs in a row; pixels
_BOX, _POINT = (0, 200, 0), (255, 60, 60)


def write_sheet(sheet: Path, folder: Path, out: Path, pictures: Sequence[Done], which: str) -> None:
    """Write the file `sheet`: pictures with their first face and its crop, then rejected ones with the reason."""
    found = _spread([done for done in pictures if done.faces], _FACES)
    rejected = _spread([done for done in pictures if done.reason], _REJECTED)
    pairs = []
    for done in [*found, *rejected]:
        picture = _thumbnail(folder, done)
        crop = _read(out / crop_name(done.name, which, 0), False) if done.faces else None
        what = f"{done.faces[0].face.score:.2f} {done.name}" if done.faces else f"{done.name}: {done.reason}"
        black = np.zeros((_SIDE, _SIDE, 3), dtype=np.uint8)
        pairs.append((what, black if picture is None else picture, black if crop is None else crop))
    write_file(sheet, pair_sheet(pairs, _COLUMNS, _SIDE))
    print(f"{sheet}: {len(found)} pictures with their crops, {len(rejected)} rejected ones")


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
