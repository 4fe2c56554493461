"""Verification sets: the .bin files of insightface, pickles of (encoded images, "same person?" for each pair).

Source: deepinsight/insightface lfw2pack.py, agedb2pack.py, build_eval_pack.py (writers), eval/verification.py (reader).
Images 2i and 2i+1 are pair i; further images are ignored. The folds follow the order of the pairs. An entry is the image
file as bytes, or as an array of uint8 (n,), (n, 1) or (1, n).

Other formats:

NAME.csv            lines "path1,path2,same", paths relative to the folder of the file
NAME/               a sub-folder of pictures for each person: up to 6,000 pairs are drawn, the same ones every time
NAME.safetensors    bytes (B,) uint8, all distinct images one after another; ends (N,) int64, the end of each image in bytes;
                    first and second (P,) int64, the images of each pair; same (P,) bool

Shapes: N = distinct images, P = pairs, B = bytes of all images, H = W = size.
"""

import csv
import mmap
import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from utils.distributed.agreement import digest
from utils.files import check_file, find_files, read_bytes, read_lines, reading, shown, write_file
from utils.image import IMAGE_SIZE, IMAGE_STARTS, IMAGE_SUFFIXES, MAX_PIXELS, check_size, decode_rgb, image_size, resize_square
from utils.text import prefix_errors

from ..protocol import Embed, Protocol, check_pair_counts
from ..verification import FOLDS, VerificationResult, fuse_views, pair_distances, row_norms, verify
from .safe_pickle import Array, UnsafePickleError, load
from .sample import USUAL, most_pairs, sample_pairs

_MAX_FILE_SIZE = 1 << 32  # bytes; the published sets have about 10^8
_IMAGE_STARTS = tuple(IMAGE_STARTS)
_KNOWN_STARTS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: fetch it with `git lfs pull`",
    b"<": "a web page, not the file: download it again",
    b"PK\x03\x04": "a zip archive or an .npz file",
    b"\xff\xd8\xff": "a JPEG image",
}


@dataclass(frozen=True, eq=False)
class PairSet(Protocol[VerificationResult]):
    """A verification set.

    `first` and `second` (P,) int64 index `images`; `same` (P,) bool marks the genuine pairs.
    """

    name: str
    images: list[bytes]  # encoded; each distinct image once
    first: np.ndarray
    second: np.ndarray
    same: np.ndarray
    path: str = ""  # of the file or folder, if it came from one

    def __post_init__(self) -> None:
        """Reject images with oversized headers here, so that training does not stop at its first evaluation."""
        for index, image in enumerate(self.images):
            size = image_size(image)
            with prefix_errors(f"{self.path or self.name}: image {index}"):
                if size is not None:
                    check_size(*size, MAX_PIXELS)

    def digest(self) -> str:
        """Return a hash of the pairs and the images."""
        return digest([self.first, self.second, self.same, *self.images])

    def fingerprint(self) -> dict[str, str]:
        return {f"hash of {self.name}": self.digest()}

    def describe(self) -> str:
        return f"{len(self.same):,} pairs, {int(self.same.sum()):,} genuine, of {len(self.images):,} images"

    def has_metric(self, metric: str) -> bool:
        if metric == "rank_1":
            return False
        check_pair_counts(self.name, metric, self.same)
        return True

    def score(self, embed: Embed) -> VerificationResult:
        return self.verify_views(*embed.views(self.decode, len(self.images)))

    def verify_views(self, plain: np.ndarray, mirrored: np.ndarray) -> VerificationResult:
        """Return the numbers from the raw embeddings (N, D) of the images and of their mirror images."""
        fused, alone = fuse_views(plain, mirrored), fuse_views(plain, np.zeros_like(plain))
        norms, pairs = [row_norms(plain), row_norms(mirrored)], (self.first, self.second)  # no copy of a row for each pair
        mean, apart = float(np.mean(norms)), pair_distances(alone, alone, pairs)
        return verify(fused, fused, self.same, FOLDS, xnorm=mean, pairs=pairs, plain_distances=apart, norms=norms[0])

    def decode(self, index: int, size: int = IMAGE_SIZE) -> np.ndarray:
        """Return image `index` as (size, size, 3) uint8 RGB.

        An image of another width is resized like mxnet's resize_short: bicubic, with the short side scaled to `size`. This is
        how the published numbers came about, all of them at 112. For another `size` it is resized as training images are.
        """
        with prefix_errors(f"{self.name}: image {index}"):
            image = decode_rgb(self.images[index])
        height, width = image.shape[:2]
        shape = (width, height)
        if width != size:
            short = min(height, width)
            shape = (max(size * width // short, size), max(size * height // short, size))
        if shape != (size, size):  # checked before the resize, which would make a flat image huge
            raise ValueError(
                f"{self.name}: image {index} must be square, it is {height} x {width} pixels (height x width). "
                f"Align the faces of this set to {size} x {size}"
            )
        if width != size:
            bicubic = size == IMAGE_SIZE
            image = cv2.resize(image, shape, interpolation=cv2.INTER_CUBIC) if bicubic else resize_square(image, size)
        return image


def read_bin(path: str | os.PathLike[str], name: str | None = None) -> PairSet:
    """Return the pairs of a .bin file; `name` is by default the file's name without the extension. Executes nothing.

    Raises:
        ValueError: one line that names the file and what is wrong with it.
    """
    with reading(path), prefix_errors(f"{path}: not a verification set"):
        images, same = _read_entries(path)
    index_of: dict[bytes, int] = {}
    indices = np.array([index_of.setdefault(image, len(index_of)) for image in images], dtype=np.int64)
    return PairSet(name or shown(Path(path).stem), list(index_of), indices[0::2], indices[1::2], np.array(same, dtype=bool))


def write_bin(path: str | os.PathLike[str], images: list[bytes], same: list[bool]) -> None:
    """Write encoded images, two for each entry of `same`, as insightface does; the file appears when it is complete."""
    if not same or len(images) != 2 * len(same):
        raise ValueError(f"{path}: a verification set needs two images for each pair, got {len(images)} for {len(same)}")
    for index, image in enumerate(images):
        if not isinstance(image, bytes) or not image.startswith(_IMAGE_STARTS):
            raise ValueError(f"{path}: image {index} must be the bytes of a JPEG, PNG, BMP or WebP file")
    write_file(Path(path), pickle.dumps((images, [bool(flag) for flag in same]), protocol=4))


def _read_entries(path: str | os.PathLike[str]) -> tuple[list[bytes], list[bool]]:
    """Return the encoded images, two for each pair, and for each pair whether it is genuine."""
    size = check_file(path)
    if not 0 < size <= _MAX_FILE_SIZE:
        raise ValueError(f"it has {size} bytes, a set has 1 to {_MAX_FILE_SIZE}")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            top = load(data)
        except UnsafePickleError as error:
            known = next((what for start, what in _KNOWN_STARTS.items() if data[: len(start)] == start), None)
            raise ValueError(f"it is {known}" if known else str(error)) from None
    if not isinstance(top, tuple | list) or len(top) != 2:
        raise ValueError("it must be the pair (images, issame)")
    images = _entries(top[0], "images")
    same = [_flag(entry, i) for i, entry in enumerate(_entries(top[1], "issame"))]
    if not same or len(images) < 2 * len(same):
        raise ValueError(f"it must have two images for each pair, it has {len(images)} for {len(same)} pairs")
    return [_encoded(entry, i) for i, entry in enumerate(images[: 2 * len(same)])], same


def _entries(container: object, what: str) -> list[object]:
    """Return the entries of a list, a tuple, or an array of one axis."""
    if isinstance(container, list | tuple):
        return list(container)
    if not isinstance(container, Array) or len(container.shape) != 1:
        raise ValueError(f"{what} must be a list, a tuple or an array of one axis")
    items, width = container.items, container.dtype.item_size
    if isinstance(items, list):
        return list(items)
    if container.dtype.kind == "S":  # numpy pads with zeros
        return [items[begin : begin + width].rstrip(b"\0") for begin in range(0, len(items), width)]
    return list(container.integers())


def _flag(entry: object, index: int) -> bool:
    if isinstance(entry, Array) and entry.shape == ():
        entry = entry.integers()[0]
    if not isinstance(entry, int) or entry not in (0, 1):
        raise ValueError(f"entry {index} of issame must be true or false, 0 or 1")
    return bool(entry)


def _encoded(entry: object, index: int) -> bytes:
    """Return the bytes of an image file."""
    data = entry
    if isinstance(entry, Array):
        if (entry.dtype.kind, entry.dtype.item_size) != ("u", 1) or sum(extent > 1 for extent in entry.shape) > 1:
            raise ValueError(f"image {index} must be an encoded image, not an array of pixels or other numbers")
        data = entry.items
    if not isinstance(data, bytes):
        raise ValueError(f"image {index} must be the bytes of an image file, its type is {type(data).__name__}")
    if not data.startswith(_IMAGE_STARTS):
        raise ValueError(f"image {index} ({len(data)} bytes) is not a JPEG, PNG, BMP or WebP file")
    return data


SUFFIXES = (".bin", ".safetensors", ".csv", "")  # the last: a folder of people
_TYPES = {"bytes": np.uint8, "ends": np.int64, "first": np.int64, "second": np.int64, "same": np.bool_}


def read_pairs(path: str | os.PathLike[str], name: str | None = None) -> PairSet:
    """Return the pairs of a .bin, .safetensors or .csv file; nothing in it is executed.

    Raises:
        ValueError: one line that names the file and what is wrong with it.
    """
    suffix = Path(path).suffix
    if Path(path).is_dir():
        return read_folder(path, name)
    if suffix == ".safetensors":
        return read_safetensors(path, name)
    return read_list(path, name) if suffix == ".csv" else read_bin(path, name)


def write_safetensors(path: str | os.PathLike[str], pairs: PairSet) -> None:
    """Write a set into the container without pickles; the file appears when it is complete."""
    lengths = np.array([len(image) for image in pairs.images], dtype=np.int64)
    tensors: dict[str, np.ndarray] = {
        "bytes": np.frombuffer(b"".join(pairs.images), dtype=np.uint8),
        "ends": np.cumsum(lengths),
        "first": np.ascontiguousarray(pairs.first, dtype=np.int64),
        "second": np.ascontiguousarray(pairs.second, dtype=np.int64),
        "same": np.ascontiguousarray(pairs.same, dtype=np.bool_),
    }
    write_file(Path(path), save(tensors))  # save_file would set mode 0600 and ignore the umask


def read_safetensors(path: str | os.PathLike[str], name: str | None = None) -> PairSet:
    """Return the pairs of a container that `write_safetensors` wrote, all of it checked."""
    try:
        with reading(path):
            check_file(path)
            found = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a verification set: {str(error).splitlines()[0]}") from None
    for key, kind in _TYPES.items():
        if key not in found or found[key].dtype != kind or found[key].ndim != 1:
            raise ValueError(f"{path}: not a verification set: it must hold {key}, one axis of {np.dtype(kind)}")
    ends, first, second, same = (found[key] for key in ("ends", "first", "second", "same"))
    count = len(ends)
    begins = np.concatenate([[0], ends[:-1]])
    if not count or (ends <= begins).any() or int(ends[-1]) != len(found["bytes"]):
        raise ValueError(f"{path}: not a verification set: ends must rise to the number of bytes, {len(found['bytes'])}")
    if not len(same) or not len(first) == len(second) == len(same):
        raise ValueError(f"{path}: not a verification set: first, second and same must have one entry for each pair")
    if min(first.min(), second.min()) < 0 or max(first.max(), second.max()) >= count:
        raise ValueError(f"{path}: not a verification set: first and second must name images 0 to {count - 1}")
    data = found["bytes"].tobytes()
    images = [data[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    return PairSet(name or shown(Path(path).stem), images, first, second, same)


def read_list(path: str | os.PathLike[str], name: str | None = None) -> PairSet:
    """Return the pairs of a list of pictures; each picture is read once."""
    pairs = read_csv(Path(path).parent, Path(path))
    index_of: dict[bytes, int] = {}
    number_of: dict[Path, int] = {}
    for picture in dict.fromkeys([pair[0] for pair in pairs] + [pair[1] for pair in pairs]):
        with prefix_errors(str(path)), reading(picture):
            number_of[picture] = index_of.setdefault(read_bytes(picture), len(index_of))
    first = np.array([number_of[pair[0]] for pair in pairs], dtype=np.int64)
    second = np.array([number_of[pair[1]] for pair in pairs], dtype=np.int64)
    same = np.array([pair[2] for pair in pairs], dtype=bool)
    return PairSet(name or shown(Path(path).stem), list(index_of), first, second, same)


def read_folder(path: str | os.PathLike[str], name: str | None = None) -> PairSet:
    """Return pairs drawn from a folder with a sub-folder of pictures for each person: balanced, in ten folds."""
    with reading(path):
        below = find_files(path, IMAGE_SUFFIXES).by_folder()
    people = list(below)
    files = [sorted(Path(path) / file for file in found) for found in below.values()]
    labels = np.repeat(np.arange(len(people)), [len(found) for found in files])
    pictures = [file for found in files for file in found]
    count = min(USUAL, most_pairs(labels, FOLDS, 0)) if len(people) >= 2 * FOLDS else 0
    if not count:
        raise ValueError(
            f"{path}: pairs in {FOLDS} folds need {2 * FOLDS} people or more, some with several pictures in each fold; it has "
            f"{len(people)} sub-folders with {len(pictures)} pictures"
        )
    first, second, same = sample_pairs(labels, count, FOLDS, 0)
    used, places = np.unique(np.concatenate([first, second]), return_inverse=True)
    images = []
    for index in used.tolist():
        with reading(pictures[index]):
            images.append(read_bytes(pictures[index]))
    return PairSet(name or shown(Path(path).name), images, places[:count], places[count:], same)


def read_csv(folder: Path, path: Path) -> list[tuple[Path, Path, bool]]:
    """Return the pairs of a list "path1,path2,same"; the separator is a comma, a tab or spaces; quotes keep a comma."""
    pairs: list[tuple[Path, Path, bool]] = []
    for number, line in enumerate(read_lines(path), 1):
        separator = "," if "," in line else "\t" if "\t" in line else None
        try:
            cells = next(csv.reader([line], skipinitialspace=True)) if separator == "," else line.split(separator)
        except csv.Error:  # a cell that is too long
            cells = []
        words = [word.strip() for word in cells]
        if len(words) == 3 and words[2].lower() in ("0", "1", "true", "false"):
            pairs.append((folder / words[0], folder / words[1], words[2].lower() in ("1", "true")))
        elif line.strip() and (number > 1 or len(words) != 3 or any(letter.isdigit() for letter in words[2])):
            raise ValueError(f"{path}: line {number} must be 'path1,path2,same', same 0 or 1, got '{line.strip()}'")
    if not pairs:
        raise ValueError(f"{path}: has no pairs; each line must be 'path1,path2,same', same 0 or 1")
    return pairs
