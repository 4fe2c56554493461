"""The datasets that data.source can name, and build_dataset, which opens the dataset of a config.

Shapes: N = images, H = W = data.image_size, 112 unless said otherwise.
"""

import codecs
import itertools
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.distributed.agreement import digest
from utils.files import MAX_TEXT, Found, find_files, lines_of, read_bytes, reading, shown
from utils.image import IMAGE_SIZE, IMAGE_SUFFIXES
from utils.randomness import derive
from utils.text import prefix_errors

from .base import FaceDataset, Tolerance
from .landmarks import open_landmarks
from .mixture import MixedDataset, Source, class_maps
from .record_dataset import RecordDataset
from .tar_dataset import TarDataset

_UNREAD = (".heic", ".heif", ".avif", ".tif", ".tiff", ".gif", ".jxl", ".jp2", ".dng", ".cr2", ".nef", ".arw")  # of cameras
_CHUNK = 1 << 16  # paths or file names hashed at once


class ListDataset(FaceDataset):
    """The images of a list. A line has a path, absolute or relative to the list's folder, then white space and the label.

    A path may contain blanks; the label is the last word of the line. Empty lines are skipped.
    """

    def __init__(self, list_path: str | os.PathLike[str]) -> None:
        self.path = Path(list_path)
        with reading(list_path):
            self._text = read_bytes(self.path, MAX_TEXT).removeprefix(codecs.BOM_UTF8)
        begins, lengths, labels = array("q"), array("i"), array("i")  # of the paths in the text: strings take ten times as much
        begin = 0
        for number, line in enumerate(lines_of(self._text), 1):
            words = line.rsplit(None, 1)
            if words:
                if len(words) != 2 or not words[1].isdigit() or len(words[1]) > 8:
                    raise ValueError(f"{self.path}: line {number} must be 'path label', the label an integer in [0, 10^8)")
                begins.append(begin + len(line) - len(line.lstrip()))
                lengths.append(len(words[0].strip()))
                labels.append(int(words[1]))
            begin += len(line)
        if not labels:
            raise ValueError(f"{self.path}: lists no image; each line must be 'path label'")
        self._begins, self._lengths = np.frombuffer(begins, dtype=np.int64), np.frombuffer(lengths, dtype=np.int32)
        self._labels = np.frombuffer(labels, dtype=np.int32)
        self.num_images = len(labels)
        self.num_classes = int(self._labels.max()) + 1
        first = self._file(0)
        if not first.is_file():
            raise ValueError(f"{self.path}: its first image {shown(first)} does not exist; paths are relative to the list")

    def _file(self, index: int) -> Path:
        begin, length = int(self._begins[index]), int(self._lengths[index])
        return self.path.parent / os.fsdecode(self._text[begin : begin + length])

    def describe(self) -> str:
        filled = np.count_nonzero(np.bincount(self._labels, minlength=self.num_classes))
        return (
            f"{shown(self.path)}: a list of image files, {self.num_images} images, {self.num_classes} classes "
            f"(largest label + 1), {self.num_classes - filled} of them without images"
        )

    def key(self, index: int) -> str:
        return shown(self._file(index))

    def layout(self) -> Iterable[bytes]:
        """Yield the paths below the common folder of all images, which may differ between machines."""
        first, last = (os.fsdecode(path) for path in (min(self._paths(0)), max(self._paths(0))))
        same = os.path.commonprefix([first, last])  # noqa: RUF071, it is cut at a slash below; all paths begin with it
        common = len(os.fsencode(same[: same.rfind("/") + 1]))
        paths = self._paths(common)
        while chunk := list(itertools.islice(paths, _CHUNK)):
            yield b"\0".join(chunk)

    def _paths(self, begin: int) -> Iterator[bytes]:
        """Yield the path of each image without its first `begin` bytes."""
        for part in range(0, self.num_images, _CHUNK):
            places = (column[part : part + _CHUNK].tolist() for column in (self._begins, self._lengths))
            yield from (self._text[first + begin : first + length] for first, length in zip(*places, strict=True))

    def sample(self, index: int) -> tuple[bytes, int]:
        return _read(self._file(index)), self.label(index)


def _read(path: Path) -> bytes:
    with reading(path):
        return read_bytes(path)


_NAMED = 5  # folders or endings listed in a message


class FolderDataset(FaceDataset):
    """Image files, one sub-folder per class, in alphabetical order; `loose` ones, in the folder itself, are a last class."""

    def __init__(self, folder: str, loose: bool = False) -> None:
        self.root = Path(folder)
        if not self.root.is_dir():
            raise ValueError(f"no folder {folder}. Give a folder with one sub-folder of images per identity")
        with reading(folder):
            found = find_files(folder, IMAGE_SUFFIXES, loose)
        if not (found.folders or found.files or found.passed):
            raise ValueError(f"no sub-folder in {folder}. Put the images of each identity into a folder of its own")
        people = found.by_folder()
        self.classes = [name for name, files in people.items() if files]
        self.files = [file for files in people.values() for file in files]  # relative to the folder
        if not self.files:
            raise ValueError("; ".join(passed_over(self.root, found)) if found.loose else no_image_below(self.root))
        empty = [shown(name) for name, files in people.items() if not files]
        self.warnings = tuple(passed_over(self.root, found))
        if empty:
            self.warnings += (
                f"{self.root}: {len(empty)} of {len(people)} sub-folders hold no image and are not counted as identities: "
                f"{_first(empty)}",
            )
        counts = [len(files) for files in people.values() if files]
        self._labels = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self.num_images = len(self.files)
        self.num_classes = len(self.classes)

    def describe(self) -> str:
        return f"{shown(self.root)}: image files, {self.num_images} images, {self.num_classes} classes (one per folder)"

    def key(self, index: int) -> str:
        return shown(self.root / self.files[index])

    def people(self) -> np.ndarray:
        return np.array(self.classes)[self._labels]

    def layout(self) -> Iterable[bytes]:
        chunks = (self.files[begin : begin + _CHUNK] for begin in range(0, self.num_images, _CHUNK))
        return (os.fsencode("\0".join(files)) for files in chunks)

    def sample(self, index: int) -> tuple[bytes, int]:
        return _read(self.root / self.files[index]), self.label(index)


def passed_over(folder: Path, found: Found) -> list[str]:
    """Return warnings about folders that `find_files` did not enter, and pictures of nobody or that cannot be read, if any."""
    passed, lines = found.passed, []
    if passed:
        lines = [f"{shown(folder)}: {len(passed)} folder(s) below it were not entered: {_first(passed, '; ')}"]
    if found.loose:
        lines.append(
            f"{shown(folder)}: {found.loose} picture(s) in the folder itself belong to no identity and were passed over"
        )
    if unread := [f"{found.others[ending]} {ending}" for ending in _UNREAD if ending in found.others]:
        lines.append(f"{shown(folder)}: pictures that cannot be read were passed over: {', '.join(unread)}; convert them first")
    return lines


def _first(names: Sequence[str], between: str = ", ") -> str:
    return between.join([*names[:_NAMED], *(["..."] if len(names) > _NAMED else [])])


def no_image_below(folder: Path) -> str:
    """Return an error message for a folder without images, with the endings of its files and the known endings."""
    names = (os.path.basename(file) for file in find_files(folder, ("",), top=True).files)
    endings = Counter(os.path.splitext(name)[1].lower() or "none" for name in names if name[0] != ".")
    known = f"known endings are {' '.join(IMAGE_SUFFIXES)}"
    if not endings:
        return f"{folder}: no image in it or below it, and no other file ({known})"
    seen = ", ".join(f"{shown(ending)} ({count})" for ending, count in endings.most_common(_NAMED))
    return f"{folder}: no image in it or below it: its files have the endings {seen}; {known}. Convert them first"


class SyntheticDataset(FaceDataset):
    """Patterns generated from (seed, index): 8 x 8 tiles in colours of the class, plus noise of the image.

    Generating one costs less than decoding a JPEG and needs no storage. Labels repeat in turn, so classes have equal shares.
    """

    def __init__(self, num_classes: int, num_images: int, seed: int, image_size: int = IMAGE_SIZE) -> None:
        if not 1 <= num_classes <= num_images:
            raise ValueError(
                f"synthetic data need at least one class, and an image for each, got {num_classes} classes, {num_images} images"
            )
        self.num_classes, self.num_images, self.seed, self.image_size = num_classes, num_images, seed, image_size
        rng = np.random.default_rng(seed)
        self._colours = rng.integers(0, 128, 1 << 16, dtype=np.uint8)
        self._noise = rng.integers(0, 128, 1 << 20, dtype=np.uint8)

    def describe(self) -> str:
        return f"synthetic (seed {self.seed}): {self.num_images} images, {self.num_classes} classes, generated"

    def key(self, index: int) -> str:
        return f"synthetic image {index}"

    def label(self, index: int) -> int:
        return index % self.num_classes

    def labels(self) -> np.ndarray:
        return np.arange(self.num_images) % self.num_classes

    def label_digest(self) -> str:
        return digest([np.array([self.num_images, self.num_classes])])  # these determine all labels, without a list of them

    def layout(self) -> Iterable[np.ndarray]:
        return [np.array([self.seed])]

    def sample(self, index: int) -> tuple[np.ndarray, int]:
        label = self.label(index)
        side, tile = self.image_size, self.image_size // 8
        colours = self._draw(self._colours, 2 * label, 8 * 8 * 3).reshape(8, 1, 8, 1, 3)
        noise = self._draw(self._noise, 2 * index + 1, side * side * 3).reshape(8, tile, 8, tile, 3)
        return (colours + noise).reshape(side, side, 3), label

    def _draw(self, bank: np.ndarray, number: int, size: int) -> np.ndarray:
        """Return `size` bytes for a number: the XOR of two parts of the bank."""
        mixed = derive(self.seed, number)
        first, second = mixed % (len(bank) - size), (mixed >> 32) % (len(bank) - size)
        return bank[first : first + size] ^ bank[second : second + size]


# data.source -> function (path, folder for the index) that opens a set; build_dataset handles `synthetic`, which has no path
SOURCES: dict[str, Callable[[str, str | None], FaceDataset]] = {
    "recordio": RecordDataset,
    "folder": lambda path, cache: FolderDataset(path),
    "list": lambda path, cache: ListDataset(path),
    "tar": TarDataset,
}


def build_dataset(data: Mapping[str, Any], seed: int, cache: str | None) -> FaceDataset:
    """Return the dataset that the section `data` of a config describes.

    Args:
        data: source, path, image_size, num_classes, num_images, sources, labels, landmarks, on_bad_record and
            max_bad_fraction, as checked by configs/rules.py. If num_classes or num_images is not 0, the data must agree with
            it; `synthetic` generates as many.
        cache: folder for the indices of large sets; None = no cache.
    """
    dataset: FaceDataset
    if data["sources"]:
        parts = []
        for number, part in enumerate(data["sources"]):
            parts.append(_open_source(part["source"], part["path"], f"data.sources: source {number}", cache))
        with prefix_errors("data.labels"):
            maps = class_maps([part.num_classes for part in parts], data["labels"])
        repeats = [part["repeat"] for part in data["sources"]]
        with prefix_errors("data.sources"):
            dataset = MixedDataset([Source(*triple) for triple in zip(parts, repeats, maps, strict=True)], seed)
    elif data["source"] == "synthetic":
        with prefix_errors("data.num_classes, data.num_images"):
            dataset = SyntheticDataset(data["num_classes"], data["num_images"], seed, data["image_size"])
    else:
        dataset = _open_source(data["source"], data["path"], "data.path", cache)
    for name, found in [("num_classes", dataset.num_classes), ("num_images", dataset.num_images)]:
        given = data[name]
        if given and given != found:
            raise ValueError(f"data.{name} is {given}, but the data has {found} ({dataset.describe()}). Set it to 0 or {found}")
    if data["landmarks"]:
        with prefix_errors("data.landmarks"):
            dataset.landmarks = open_landmarks(data["landmarks"], dataset.num_stored)
    if data["on_bad_record"] == "skip":
        dataset.tolerance = Tolerance(dataset.num_stored, seed, data["max_bad_fraction"])
    return dataset


def open_set(path: str | os.PathLike[str], cache: str | None = None, loose: bool = False) -> FaceDataset:
    """Return the set at a path: with train.rec, *.tar or sub-folders of images, or a list file; `loose` is of FolderDataset."""
    place = Path(path)
    if place.is_dir():
        if (place / "train.rec").exists():
            return RecordDataset(place, cache)
        return TarDataset(place, cache) if any(place.glob("*.tar")) else FolderDataset(str(place), loose)
    if place.suffix == ".rec":
        raise ValueError(f"{place}: give the folder that holds it, with train.rec, train.idx and property")
    if not place.is_file():
        raise ValueError(f"{place}: no such set; give a folder with train.rec, *.tar or sub-folders of images, or a list file")
    return TarDataset(place, cache) if place.suffix == ".tar" else ListDataset(place)


def _open_source(source: str, path: str, key: str, cache: str | None) -> FaceDataset:
    with prefix_errors(key):
        return SOURCES[source](path, cache)
