"""Reads every image of a set once: sizes, damage, hashes that find equal and nearly equal pictures; and copies a part of a set.

The difference hash (dHash, 64 bits) has a bit for each of 9 x 8 area averages and its right neighbour: does brightness rise? A
copy that was compressed again or resized keeps most bits; another photograph of the person does not.
Shapes: n = images read.
"""

import codecs
import functools
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np

from utils.cli import progress, warn
from utils.files import MAX_TEXT, lines_of, read_bytes, write_csv
from utils.image import IMAGE_SIZE, decode_rgb
from utils.parallel import map_in_order

from .base import FaceDataset
from .datasets import FolderDataset, ListDataset, open_set
from .record_dataset import RecordDataset
from .recordio.image_record import RecordSetWriter
from .recordio.index import distinct

_AHEAD = 4096  # images that are prefetched at once


def open_set_of(path: str | os.PathLike[str], loose: bool = False) -> FaceDataset:
    """Return the set at a path, like data.datasets.open_set; print its warnings to stderr."""
    dataset = open_set(path, loose=loose)
    warn(*dataset.warnings)
    return dataset


class SetNames:
    """Names of pictures and identities. For a record set they come from train.lst, which face data folder_to_rec writes."""

    def __init__(self, dataset: FaceDataset) -> None:
        self.dataset = dataset
        self._listed = _read_list(dataset) if isinstance(dataset, RecordDataset) else []
        # the names of the identities; empty if they have none
        self.folders = dataset.classes if isinstance(dataset, FolderDataset) else _folders(self._listed, dataset)

    def file(self, index: int) -> str:
        """Return the path of a picture, relative if the set is a folder or a list; or the key of its record."""
        if self._listed:
            return self._listed[index]
        key = self.dataset.key(index)
        if isinstance(self.dataset, FolderDataset):
            return os.path.relpath(key, self.dataset.root)
        if isinstance(self.dataset, ListDataset):
            return os.path.relpath(key, self.dataset.path.parent)
        return key.partition(" of ")[0] if isinstance(self.dataset, RecordDataset) else key

    def person(self, label: int) -> str:
        """Return the folder of an identity, or "identity" and its number."""
        return self.folders[label] if self.folders else f"identity {label}"


def indices_of(names: Sequence[str], dataset: FaceDataset) -> np.ndarray:
    """Return the index in a set of each name that `face embed` gave its images, (n,) int64; -1 = there is no such image."""
    if isinstance(dataset, FolderDataset):
        files = SetNames(dataset)
        number = {files.file(index): index for index in range(dataset.num_stored)}
        return np.array([number.get(name, -1) for name in names], dtype=np.int64)
    whole = re.compile("0|[1-9][0-9]{0,17}").fullmatch
    numbers = [int(name) if whole(name) else -1 for name in progress(names, None, "finding images", "name", delay=5)]
    found = np.array(numbers, dtype=np.int64)
    return np.where(found < dataset.num_stored, found, -1)


def _read_list(dataset: RecordDataset) -> list[str]:
    """Return the paths in train.lst if its lines and labels fit the set, otherwise nothing."""
    names = []
    try:
        text = read_bytes(dataset.folder / "train.lst", MAX_TEXT).removeprefix(codecs.BOM_UTF8)
        for line, label in zip(lines_of(text), map(int, dataset.labels()), strict=True):
            columns = line.rstrip(b"\r\n").split(b"\t")
            if columns[2] != b"%d" % label:
                return []
            names.append(columns[1].decode())
    except (OSError, ValueError, IndexError):  # no file, no UTF-8, or another number of lines or columns
        return []
    return names


def _folders(files: list[str], dataset: FaceDataset) -> list[str]:
    """Return the folder of each class if every class has exactly one folder, otherwise nothing."""
    found: dict[int, str] = {}
    for file, label in zip(files, np.asarray(dataset.labels()).tolist() if files else [], strict=True):
        if found.setdefault(label, file.split("/")[0]) != file.split("/")[0] or "/" not in file:
            return []
    named = len(found) == dataset.num_classes == len(set(found.values()))
    return [found[label] for label in range(dataset.num_classes)] if named else []


def copy_set(
    dataset: FaceDataset,
    indices: np.ndarray,
    out: Path,
    overwrite: bool,
    source: Path | None = None,
    labels: np.ndarray | None = None,
    names: Sequence[str] = (),
) -> None:
    """Write the images `indices` (n,) as a RecordIO set in header form, with the old number of each new identity beside it.

    Args:
        labels: (num_stored,) those to write instead of the set's.
        names: of the identities from num_classes on, which stand for their old numbers.
    """
    if source is not None and out.resolve() == source.resolve():
        raise ValueError(f"{out}: the new set must not be written over the old one; choose another folder")
    labels = np.asarray(dataset.labels() if labels is None else labels)
    order = indices[np.argsort(labels[indices], kind="stable")]
    old = np.flatnonzero(np.bincount(labels[indices]))
    new = np.full(dataset.num_classes + len(names), -1, dtype=np.int64)
    new[old] = np.arange(len(old))
    with RecordSetWriter(out, overwrite=overwrite) as writer, progress([], len(order), f"writing {out.name}", "image") as bar:
        for begin in range(0, len(order), _AHEAD):
            some = order[begin : begin + _AHEAD]
            dataset.read_ahead(np.sort(some))
            for index in some.tolist():
                writer.add(int(new[labels[index]]), bytes(dataset.sample(index)[0]))
            bar.update(len(some))
    known = [*map(str, range(dataset.num_classes)), *names]
    write_csv(out / "classes.csv", ("identity", "old_identity"), enumerate(known[label] for label in old))
    print(f"{out}: {len(order)} images of {len(old)} identities")


def parse_classes(text: str, num_classes: int) -> np.ndarray:
    """Return the labels that A:B or A,B,C selects; all labels for ""."""
    try:
        if ":" in text:
            begin, end = (int(part) if part else None for part in text.split(":"))
            chosen = np.arange(num_classes)[begin:end]
        else:
            chosen = np.array([int(part) for part in text.split(",")]) if text else np.arange(num_classes)
    except ValueError:
        raise ValueError(f"--classes must be A:B or A,B,C, got {text!r}") from None
    if not len(chosen) or chosen.min() < 0 or chosen.max() >= num_classes:
        raise ValueError(f"--classes must name labels from 0 to {num_classes - 1}, got {text!r}")
    return chosen


_CHUNK = 64  # images per task
_BANDS = 4  # overlapping parts of the hash, 32 bits each, that are searched for equal values
_HASHES = 1 << 18  # whose candidates are in memory at once: up to 1 GB
_RANGE = 64  # most candidates of one image in one band; otherwise a set of one flat colour would have all pairs
PLAIN_RANGE = 8  # levels of 256
MAX_DISTANCE = 6  # bits in which the hashes of near duplicates may differ
# of their pixels: two photographs of a person in the same light reach 0.977; JPEG of quality 30, half the size or a change of
# light leave at least 0.990 (measured on the London and Canadian photographs of face research, 244 aligned faces)
MIN_CORRELATION = 0.985


@dataclass
class Scan:
    """The results of reading a set; the arrays have an entry for each of `indices`, 0 if the image is bad."""

    indices: np.ndarray  # (n,) int64, into the set
    num_bytes: np.ndarray  # (n,) int64, of the encoded image
    height: np.ndarray  # (n,) int32
    width: np.ndarray  # (n,) int32
    digest: np.ndarray  # (n,) uint64, of the bytes
    dhash: np.ndarray  # (n,) uint64, of the pixels
    plain: np.ndarray  # (n,) bool, of one colour, or nearly
    bad: list[tuple[int, str]] = field(default_factory=list)  # (index, fault), in order

    @property
    def good(self) -> np.ndarray:
        """(n,) bool: the image decodes."""
        return self.height > 0

    @functools.cached_property
    def size(self) -> int:
        """The usual height of the square images in pixels; 112 if there is none."""
        heights = self.height[self.good & (self.height == self.width)]
        return int(np.bincount(heights).argmax()) if len(heights) else IMAGE_SIZE

    @property
    def odd(self) -> np.ndarray:
        """(n,) bool: the image decodes, and is not as high and as wide as the others."""
        return self.good & ((self.height != self.size) | (self.width != self.size))

    @property
    def faces(self) -> np.ndarray:
        """(n,) bool: the image decodes and is not of one colour."""
        return self.good & ~self.plain


def scan(dataset: FaceDataset, indices: np.ndarray, threads: int, hashes: bool = True) -> Scan:
    """Read and decode the images `indices` (n,) of a set in threads, with a progress bar; damage is recorded, never raised.

    Without `hashes`, digest and dhash stay 0.
    """
    count = len(indices)
    num_bytes, height, width = (np.zeros(count, dtype) for dtype in (np.int64, np.int32, np.int32))
    hashed = (np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.uint64))
    result = Scan(np.asarray(indices, dtype=np.int64), num_bytes, height, width, *hashed, np.zeros(count, dtype=bool))

    def read(begin: int) -> list[tuple[int, str]]:
        bad = []
        for place in range(begin, min(begin + _CHUNK, count)):
            index = int(result.indices[place])
            try:
                data = dataset.sample(index)[0]
                result.num_bytes[place] = len(data)
                pixels = decode_rgb(data)
            except ValueError as error:
                bad.append((index, str(error)))
                continue
            result.height[place], result.width[place] = pixels.shape[:2]
            result.plain[place] = is_plain(pixels)
            if hashes:
                result.digest[place], result.dhash[place] = digest(data), dhash(pixels)
        return bad

    with progress([], count, "reading", "image") as bar:
        for begin, bad in zip(range(0, count, _CHUNK), map_in_order(read, range(0, count, _CHUNK), threads), strict=True):
            result.bad += bad
            bar.update(min(_CHUNK, count - begin))
    return result


def is_plain(pixels: np.ndarray) -> bool:
    """Return whether (H, W, 3) uint8 pixels have nearly one colour: 98 of 100 within PLAIN_RANGE levels in each channel.

    Such images come from landmarks of another picture, or from failed downloads; they are never faces.
    """
    few = np.sort(pixels[8::24, 8::24, 1], axis=None).astype(np.int32)
    if len(few) > 9 and few[-3] - few[2] > PLAIN_RANGE:  # decides nearly every image in a few microseconds
        return False
    some = pixels[::4, ::4].reshape(-1, 3)
    low, high = len(some) // 100, len(some) - 1 - len(some) // 100
    levels = np.sort(some, axis=0).astype(np.int32)
    return bool((levels[high] - levels[low] <= PLAIN_RANGE).all())


def digest(data: bytes | memoryview | np.ndarray) -> int:
    """Return 64 bits of the BLAKE2 hash of some bytes."""
    return int.from_bytes(hashlib.blake2b(bytes(data), digest_size=8).digest(), "little")


def dhash(pixels: np.ndarray) -> int:
    """Return the difference hash of (H, W, 3) uint8 RGB pixels."""
    small = cv2.resize(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), (9, 8), interpolation=cv2.INTER_AREA)
    return int.from_bytes(np.packbits(small[:, 1:] > small[:, :-1]).tobytes(), "little")


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return the similarity of two pictures: the correlation of their fine structure, gray at 56 x 56, in [-1, 1]."""
    a, b = _structure(one), _structure(other)
    length = np.linalg.norm(a) * np.linalg.norm(b)
    return float(np.sum(a * b) / length) if length else float(np.array_equal(one, other))


def _structure(pixels: np.ndarray) -> np.ndarray:
    """Return (56, 56) float32: the gray picture minus its low frequencies, which all aligned faces have in common."""
    small = cv2.resize(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), (56, 56), interpolation=cv2.INTER_AREA).astype(np.float32)
    return small - cv2.GaussianBlur(small, (0, 0), 4.0)


def equal_groups(scanned: Scan) -> list[np.ndarray]:
    """Return the indices of images with equal bytes, in groups of two or more; images of one colour are left out."""
    places = np.flatnonzero(scanned.faces)
    places = places[np.lexsort((places, scanned.num_bytes[places], scanned.digest[places]))]
    one, other = places[:-1], places[1:]
    same = (scanned.digest[other] == scanned.digest[one]) & (scanned.num_bytes[other] == scanned.num_bytes[one])
    edges = np.diff(np.concatenate([[0], same, [0]]))  # an array for each image would take 200 bytes
    cuts = zip(np.flatnonzero(edges > 0), np.flatnonzero(edges < 0) + 1, strict=True)
    return [scanned.indices[np.sort(places[first:stop])] for first, stop in cuts]


def candidates(one: np.ndarray, other: np.ndarray | None = None) -> np.ndarray:
    """Return unique pairs (k, 2) int64 of positions in two arrays of hashes that differ in at most MAX_DISTANCE bits.

    It finds pairs that agree in one of four bands of 32 bits, which start 16 bits apart: all pairs that differ in one bit, and
    most pairs that differ in a few. Each image has at most 64 candidates per band, and 8 of the next hashes where more than 64
    images agree in one, which still leads from each of many copies to the others.

    Args:
        one: (n,) uint64.
        other: (m,) uint64; None pairs `one` with itself, each pair once, with the smaller position first.
    """
    right = one if other is None else other
    found = [np.empty(0, dtype=np.int64)]  # pairs, each as one number
    with progress([], _BANDS * len(one), "comparing the hashes", "hash", delay=5) as bar:
        for band in range(_BANDS):
            left_keys, right_keys = _band(one, band), _band(right, band)
            order = np.lexsort((right, right_keys))
            ranked, place = right_keys[order], np.argsort(order)
            for begin in range(0, len(one), _HASHES):
                keys = left_keys[begin : begin + _HASHES]
                starts, ends = np.searchsorted(ranked, keys, "left"), np.searchsorted(ranked, keys, "right")
                if other is None:  # those behind the image itself
                    most = np.where(ends - starts > _RANGE, _RANGE // 8, _RANGE)
                    starts = place[begin : begin + _HASHES] + 1
                lengths = np.minimum(ends - starts, most if other is None else _RANGE)
                rows = np.repeat(np.arange(len(keys)), lengths)
                inside = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
                first, second = rows + begin, order[starts[rows] + inside]
                first, second = (np.minimum(first, second), np.maximum(first, second)) if other is None else (first, second)
                near = np.bitwise_count(one[first] ^ right[second]) <= MAX_DISTANCE
                found.append(first[near] * len(right) + second[near])
                bar.update(len(keys))
    return np.stack(np.divmod(distinct(np.concatenate(found)), max(1, len(right))), axis=1)


def _band(hashes: np.ndarray, band: int) -> np.ndarray:
    """Return 32 bits of each hash from bit 16 * band on, cyclically."""
    shift = np.uint64(16 * band)
    turned = hashes if band == 0 else (hashes >> shift) | (hashes << np.uint64(64 - 16 * band))
    return turned.astype(np.uint32)
