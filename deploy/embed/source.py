"""The pictures that are embedded: those of a folder, or the images of a training set."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from data.base import FaceDataset
from data.datasets import open_set
from utils.files import read_bytes, shown
from utils.image import IMAGE_SIZE, MAX_PHOTO_PIXELS, MAX_PIXELS, decode_rgb

from ..faces.detector import Detector
from ..faces.pictures import UNREADABLE, Crop, Rejected, crops_of, list_pictures, read_crops, stamp_of

Reader = Callable[[str, Detector | None, int, str], list[Crop] | Rejected]  # (name, detector, image size, which)


class Source(NamedTuple):
    """Pictures by name, in a fixed order."""

    names: list[str]
    people: list[str]  # the person on each; "" = not known
    digest: str  # changes with the pictures or their order
    warnings: tuple[str, ...] = ()  # for the user, from opening a set


def open_source(path: Path, detector: Path | None) -> Source:
    """Return the pictures at a path.

    Those of a training set, a folder with train.rec or *.tar, or a list file, are named by their index in the set, and their
    person is the label. Those of other folders are named by their path below it, and their person is its first folder.

    Raises:
        ValueError: there is nothing to embed, or a detector is given for a training set.
    """
    if not _is_set(path):
        names = list_pictures(path)
        # one that cannot be asked for size and time has zeros, and is rejected when it is read
        stamps = [(name, *stamp_of(path / name)) for name in names]
        folders = [name.partition("/") for name in names]
        people = [folder if between else "" for folder, between, _ in folders]
        return Source(names, people, hashlib.sha256(json.dumps(stamps).encode()).hexdigest())
    if detector is not None:
        raise ValueError(f"--detector: {path} is a training set, whose faces are aligned already; leave it out")
    dataset = open_set(path)
    digest = hashlib.sha256(json.dumps(dataset.fingerprint()).encode()).hexdigest()
    people = [str(person) for person in dataset.people()]
    return Source([str(index) for index in range(dataset.num_stored)], people, digest, dataset.warnings)


def open_reader(path: Path) -> Reader:
    """Return what reads a picture of a source; each process has its own."""
    if not _is_set(path):
        return lambda name, detector, size, which: read_crops(path, name, detector, size, which)
    dataset = open_set(path)
    return lambda name, detector, size, which: _read(dataset, name, size)


def open_pixels(path: Path) -> Callable[[str], np.ndarray]:
    """Return what reads the pixels of a picture of a source by its name, for a page, small; white if it cannot be read."""
    if not path.exists():
        raise ValueError(f"--pictures: there is no {shown(path)}; give the folder or set that was embedded")
    dataset, most = (open_set(path), MAX_PIXELS) if _is_set(path) else (None, MAX_PHOTO_PIXELS)

    def pixels(name: str) -> np.ndarray:
        try:
            image = read_bytes(path / name) if dataset is None else dataset.sample(int(name))[0]
            found = image if isinstance(image, np.ndarray) else decode_rgb(image, most, upright=dataset is None)
        except (OSError, ValueError):
            return np.full((1, 1, 3), 255, dtype=np.uint8)
        scale = min(1.0, IMAGE_SIZE / max(found.shape[:2]))
        return cv2.resize(found, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)

    return pixels


def _is_set(path: Path) -> bool:
    return path.is_file() or (path / "train.rec").exists() or (path.is_dir() and any(path.glob("*.tar")))


def _read(dataset: FaceDataset, name: str, size: int) -> list[Crop] | Rejected:
    try:
        image, _ = dataset.sample(int(name))
    except OSError as error:
        return Rejected(name, f"{UNREADABLE}{error.strerror}")
    except ValueError as error:
        return Rejected(name, str(error))
    return crops_of(bytes(image), name, None, size, "only")
