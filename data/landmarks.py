"""Landmarks of the images of a set: a file .npy (N, 5, 2) of floats beside it, which `face data landmarks` writes.

Row i has the points of image i, in the order of utils/alignment.py: x and y as shares of the image's side, the middle of the
first pixel at half a pixel; NaN where no face was found. N = stored images, n = images of this rank in one optimizer step.
"""

from pathlib import Path

import numpy as np

from utils.alignment import POINTS
from utils.files import check_file, new_file, reading, shown
from utils.text import one_line

_OTHER = [1, 0, 2, 4, 3]  # the point whose place each has in the mirror image
_LOW, _HIGH = -1.0, 2.0  # of a share: a point may be outside a crop of a face that was cut off


def open_landmarks(path: str, num_images: int) -> np.ndarray:
    """Return the landmarks (N, 5, 2) in a file, which stays on disk.

    Raises:
        ValueError: it cannot be read, or its numbers are no landmarks of so many images.
    """
    with reading(path):
        check_file(path)
    try:
        table = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # of many kinds, for a damaged file
        raise ValueError(f"{shown(path)}: is no .npy file of numbers ({one_line(error)[:200]})") from None
    if table.shape != (num_images, len(POINTS), 2) or table.dtype.kind != "f" or table.itemsize > 8:
        raise ValueError(
            f"{shown(path)}: must have the shape ({num_images}, 5, 2), five points of each image of the set, as floats, got "
            f"{table.shape} {table.dtype}; write it with face data landmarks"
        )
    known = False
    for begin in range(0, num_images, 1 << 16):
        part = table[begin : begin + (1 << 16)]
        known = known or bool(np.isfinite(part).any())
        wrong = ((part < _LOW) | (part > _HIGH) | np.isinf(part)).any(axis=(1, 2))
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(
                f"{shown(path)}: x and y must be shares of the image's side, from 0 to 1, got {part[row].flatten()[:2]} for "
                f"image {begin + row}; divide pixels by the side"
            )
    if not known:
        raise ValueError(f"{shown(path)}: has the landmarks of no image, got NaN for all; see face data landmarks --help")
    return table


def write_landmarks(path: Path, points: np.ndarray) -> None:
    """Write points (N, 5, 2), as float16: a twentieth of a pixel of 112."""
    with new_file(path) as file:
        np.save(file, points.astype(np.float16))


def mirrored_landmarks(points: np.ndarray, mirrored: np.ndarray) -> np.ndarray:
    """Return points (n, 5, 2) as float32, those of the mirror image where mirrored (n,) bool says so."""
    points = points.astype(np.float32)
    other = points[:, _OTHER]
    other[..., 0] = 1 - other[..., 0]
    return np.where(mirrored[:, None, None], other, points)
