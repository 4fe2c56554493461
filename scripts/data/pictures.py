"""What the tools share that turn pictures into sets: finding the files, their landmarks, and the bytes to store.

Landmarks: five points (5, 2) in pixels: left eye, right eye, nose, left and right corner of the mouth.
"""

if __name__ == "__main__":
    raise SystemExit("error: scripts/data/pictures.py is no program; python -m scripts lists them")

import argparse
import csv
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from tqdm import tqdm

from data.base import FaceDataset
from data.datasets import SUFFIXES, no_image_below, open_set, passed_over
from utils.alignment import align, check_points
from utils.files import find_files, read_bytes, read_text
from utils.image import MAX_PHOTO_PIXELS, decode_rgb
from utils.text import one_line

MUCH_PADDING = 0.4  # share of an aligned face that lies outside its picture, from which on it is reported
_KEPT = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")  # JPEG and PNG are stored as they are


class Picture(NamedTuple):
    """A picture to store, and how."""

    path: Path
    name: str  # relative, for train.lst and messages
    label: int
    points: np.ndarray | None = None  # (5, 2): align by them


class Rules(NamedTuple):
    """How pictures become the images of a set."""

    size: int  # pixels, height and width
    quality: int  # of a JPEG that has to be made
    resize: bool  # bring unaligned pictures of another size to `size`; False is an error
    smooth: bool  # of utils.alignment.align


class Encoded(NamedTuple):
    """What is stored of a picture."""

    data: bytes
    padding: float = 0.0  # share of the aligned face that lies outside the picture


class BadPicture(NamedTuple):
    """Why a picture cannot be stored."""

    name: str
    reason: str


def progress(items: Iterable, total: int | None, what: str, unit: str) -> tqdm:
    """Return the items under a progress bar, which writes some lines only where no one watches."""
    return tqdm(items, total=total, desc=what, unit=unit, mininterval=0.1 if os.isatty(2) else 5.0)


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers from `low` to `high`, for argparse's `type`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            rule = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"must be a whole number {rule}, got {text}")
        return value

    return parse


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=whole(1, 1024), default=os.cpu_count() or 1, help="that read and decode (default: one a core)"
    )


def list_identities(folder: Path, min_images: int = 1) -> tuple[list[Picture], list[str], int]:
    """Return the pictures of a folder with a sub-folder per identity, the names of these, and how many had too few images."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give one with a sub-folder of pictures for each identity")
    found = find_files(folder, SUFFIXES)
    for line in passed_over(folder, found.passed):
        print(f"warning: {one_line(line)}", file=sys.stderr)
    if not found.folders:
        raise ValueError(f"{folder}: holds no sub-folder; put the pictures of each identity into a folder of its own")
    pictures: list[Picture] = []
    kept: list[str] = []
    most = 0  # pictures of an identity
    for name, files in found.by_folder().items():
        most = max(most, len(files))
        if len(files) >= max(1, min_images):
            pictures += [Picture(folder / file, file, len(kept)) for file in files]
            kept.append(name)
    if not pictures:
        if not most:
            raise ValueError(no_image_below(folder))
        raise ValueError(f"{folder}: no identity has {min_images} pictures, the largest has {most}; lower --min-images")
    return pictures, kept, len(found.folders) - len(kept)


def read_landmarks(path: Path) -> dict[str, np.ndarray]:
    """Return the points (5, 2) by picture name from a CSV file, one face a line: name, then x and y of the five points.

    Names may stand in several columns, which are joined by "_" (001,smiling is 001_smiling). Where a header names the columns
    (..._x and ..._y, or x1 y1 x2 ...), it tells their order; without one they are x1 y1 x2 y2 ... Further columns are ignored.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: the landmarks cannot be read: {getattr(error, 'strerror', None) or 'no UTF-8 text'}"
        ) from None
    rows = [(number, _columns(line)) for number, line in enumerate(lines, 1) if line.strip()]
    order: list[int] | None = None
    if rows and sum(map(_is_number, rows[0][1])) < 10:
        order = _header_order(rows[0][1])
        rows = rows[1:]
        if order is None:
            raise ValueError(
                f"{path}: line 1: a header must name five columns ending in x and five in y, or leave the header out"
            )
    found: dict[str, np.ndarray] = {}
    for number, columns in rows:
        places = order or _numbers_at_end(columns)
        try:
            values = [float(columns[place]) for place in places]
        except (IndexError, ValueError):
            values = []
        name = "_".join(columns[: min(places, default=0)])
        if len(values) != 10 or not name:
            raise ValueError(f"{path}: line {number} must be a name and ten numbers, x and y of five points")
        if name in found:
            raise ValueError(f"{path}: line {number}: {name} has landmarks already; one face for each picture")
        found[name] = np.array(values).reshape(5, 2)
    return found


def _columns(line: str) -> list[str]:
    return [part.strip() for part in (line.split("\t") if "\t" in line else line.split(",") if "," in line else line.split())]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _header_order(columns: list[str]) -> list[int] | None:
    """Return the places of x1 y1 x2 y2 ... in a header, or None where it does not name five of each."""
    lower = [column.lower() for column in columns]
    xs = [i for i, name in enumerate(lower) if name.endswith("_x") or (name[:1] == "x" and name[1:].isdigit())]
    ys = [i for i, name in enumerate(lower) if name.endswith("_y") or (name[:1] == "y" and name[1:].isdigit())]
    return [place for pair in zip(xs, ys, strict=True) for place in pair] if len(xs) == len(ys) == 5 else None


def _numbers_at_end(columns: list[str]) -> list[int]:
    """Return the places of the first ten numbers that stand in a row; the first column is always a name."""
    for begin in range(1, len(columns) - 9):
        if all(map(_is_number, columns[begin : begin + 10])):
            return list(range(begin, begin + 10))
    return []


def points_of(landmarks: dict[str, np.ndarray], names: Iterable[str]) -> list[np.ndarray]:
    """Return the points of each picture: by its relative path, with or without ending, or by the bare file name.

    Raises:
        ValueError: a picture has no line, or two pictures would take the same one.
    """
    taken: dict[str, str] = {}  # line -> picture
    for name in names:
        path = Path(name)
        keys = (name, path.as_posix(), path.with_suffix("").as_posix(), path.name, path.stem)
        key = next((key for key in keys if key in landmarks), None)
        if key is None:
            raise ValueError(f"{name}: has no landmarks; add a line for it, or leave the picture out")
        other = taken.setdefault(key, name)
        if other != name:
            raise ValueError(
                f"{name}: the landmarks named '{key}' are those of {other} already; give each picture a line of its own, named "
                "by its path below the folder, with its ending"
            )
    return [landmarks[key] for key in taken]


def report_padding(folder: Path, shares: dict[str, float]) -> None:
    """Say how many aligned faces are largely padding, and list them in FOLDER/padding.csv; `shares` has all pictures."""
    path = folder / "padding.csv"
    path.unlink(missing_ok=True)  # of another run
    found = sorted(((share, name) for name, share in shares.items() if share > MUCH_PADDING), reverse=True)
    if not found:
        return
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("name", "share_outside"))
        writer.writerows((name, f"{share:.3f}") for share, name in found)
    print(
        f"{len(found)} of {len(shares)} faces are largely padding: more than {MUCH_PADDING:.0%} of the crop lies outside the "
        f"picture. The worst is {found[0][1]}, {found[0][0]:.0%}; all are in {path}. Look at them before you train on them"
    )


def open_set_of(path: str | os.PathLike[str]) -> FaceDataset:
    """Return the set at a path, as data.datasets.open_set does; what its opening noticed goes to stderr."""
    dataset = open_set(path)
    for line in dataset.warnings:
        print(f"warning: {one_line(line)}", file=sys.stderr)
    return dataset


def read_list(path: Path) -> Iterator[Picture]:
    """Yield the pictures of a .lst file, of insightface (aligned, path, label, ...) or of mxnet's im2rec (index, label, path).

    Paths are relative to the folder of the list. insightface's landmarks are five x, then five y.
    """
    try:
        lines = read_text(path, encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the list cannot be read: {getattr(error, 'strerror', None) or 'no UTF-8 text'}") from None
    for number, line in enumerate(lines, 1):
        columns = line.rstrip("\r").split("\t")
        if not line.strip():
            continue
        if len(columns) >= 3 and not _is_number(columns[1]) and columns[2].strip().isdigit():
            yield _insightface_line(path, number, columns)
        elif len(columns) >= 3 and _is_number(columns[1]) and float(columns[1]).is_integer() and float(columns[1]) >= 0:
            yield Picture(path.parent / columns[-1], columns[-1], int(float(columns[1])))
        else:
            raise ValueError(
                f"{path}: line {number} must be 'aligned TAB path TAB label ...' (insightface) "
                "or 'index TAB label TAB path' (im2rec)"
            )


def _insightface_line(path: Path, number: int, columns: list[str]) -> Picture:
    aligned, name, label = columns[0].strip(), columns[1], int(columns[2])
    if aligned == "1":
        return Picture(path.parent / name, name, label)
    try:
        points = np.array([float(column) for column in columns[7:17]]).reshape(2, 5).T
    except ValueError:
        raise ValueError(f"{path}: line {number}: {name} is not aligned, so ten landmark numbers must follow its box") from None
    return Picture(path.parent / name, name, label, points)


def encode(picture: Picture, rules: Rules) -> Encoded | BadPicture:
    """Return the bytes to store: the file's own where it is a JPEG or PNG of the right size, else a new JPEG."""
    try:
        data = read_bytes(picture.path)
    except OSError as error:
        return BadPicture(picture.name, f"cannot be read: {error.strerror}")
    try:
        pixels = decode_rgb(data, MAX_PHOTO_PIXELS)
        if picture.points is None:
            if pixels.shape[:2] == (rules.size, rules.size):
                return Encoded(data if data.startswith(_KEPT) else to_jpeg(pixels, rules.quality))
            if not rules.resize:
                height, width = pixels.shape[:2]
                return BadPicture(picture.name, f"is {width} x {height} pixels, not {rules.size} x {rules.size}")
            shrinks = min(pixels.shape[:2]) > rules.size
            how = cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC
            return Encoded(to_jpeg(cv2.resize(pixels, (rules.size, rules.size), interpolation=how), rules.quality))
        padding = check_points(picture.points, *pixels.shape[:2])
        return Encoded(to_jpeg(align(pixels, picture.points, rules.size, rules.smooth), rules.quality), padding)
    except ValueError as error:
        return BadPicture(picture.name, str(error))


def to_jpeg(pixels: np.ndarray, quality: int) -> bytes:
    """Return (H, W, 3) uint8 RGB as a JPEG file."""
    done, encoded = cv2.imencode(".jpg", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, quality])
    assert done
    return encoded.tobytes()
