"""Face sets in RecordIO: a folder with train.rec, train.idx and property (MS1MV2, MS1MV3, Glint360K, WebFace).

Source: deepinsight/insightface face2rec2.py, rec_builder.py, dataset_merge.py; mxnet tools/im2rec.py. Two forms exist:

    header form      key 0 holds [a, b] and no image; images have the keys 1..a-1, identities the keys a..b-1 (no image)
    headerless form  every record is an image, including key 0

Labels, a and b are float32, which is exact below 2^24; in a larger set they are rounded. So the contents of a record decide
whether it is an image; in a small set the header must agree. Shapes: n = records, N = images.
"""

import functools
import os
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np

from utils.cli import progress
from utils.files import MAX_SMALL_TEXT, read_bytes, shown

from .base import FaceDataset
from .index_cache import Arrays, Facts, open_index
from .recordio.container import RecordFile
from .recordio.image_record import MAX_CLASSES, IndexedRecordFile, are_classes, is_ascending, unpack

_MAX_SPAN = 1 << 20  # bytes up to the next image; if there are more, the record's length is read first
_CHUNK = 1 << 18  # images checked at once
_GAP = 1 << 18  # gaps of at most so many bytes are read too, because reading on is faster than a seek
_ARRAYS = ("offsets", "labels", "keys")


class RecordDataset(FaceDataset):
    """The images of a folder with train.rec, in the order of the file.

    The first opening reads all headers, in bulk, and checks every label. The folder `cache`, if given, keeps the result until
    the files change.
    """

    def __init__(self, folder: str | os.PathLike[str], cache: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(folder)
        rec_path = self.folder / "train.rec"
        if not rec_path.is_file():
            raise ValueError(f"no file {rec_path}. Give the folder that holds train.rec, train.idx and property")
        self._file = RecordFile(rec_path)
        files = [rec_path, rec_path.with_suffix(".idx"), rec_path.with_name("property")]
        facts, arrays, warnings = open_index(
            cache, files, _ARRAYS, functools.partial(_can_be_index, rec_path.stat().st_size), lambda: _index_set(rec_path)
        )
        self.warnings = (*facts.get("warnings", ()), *warnings)
        self._facts, self._offsets, self._labels = facts, arrays["offsets"], arrays["labels"]
        self.num_images = len(self._labels)
        self.num_classes = int(facts["num_classes"])
        first = facts["first_key"]
        self._keys = arrays["keys"] if len(arrays["keys"]) else range(first, first + self.num_images)
        self._ahead = 2 * (self._file.size // facts["num_records"])  # bytes; most records are smaller

    def describe(self) -> str:
        return str(self._facts["description"])

    def key(self, index: int) -> str:
        return f"record {self._keys[index]} of {self._file.path}"

    def record_key(self, index: int) -> int:
        """Return the key of a sample's record in train.idx."""
        return int(self._keys[index])

    def layout(self) -> list[np.ndarray]:
        return [self._offsets, np.array([self._file.size])]

    def prefetch(self, index: int) -> None:
        self._file.prefetch(int(self._offsets[index]), self._ahead)

    def read_ahead(self, indices: np.ndarray) -> None:
        offsets = self._offsets[indices]
        following = np.minimum(indices + 1, self.num_images - 1)
        ends = np.where(indices + 1 < self.num_images, self._offsets[following], self._file.size)
        cuts = np.flatnonzero(offsets[1:] > ends[:-1] + _GAP) + 1
        for first, stop in pairwise([0, *cuts.tolist(), len(indices)]):
            self._file.prefetch(int(offsets[first]), int(ends[stop - 1] - offsets[first]))

    def span(self, index: int) -> tuple[int, int]:
        """Return the first byte of a record, and the number of bytes up to the next image's record."""
        begin = int(self._offsets[index])
        following = int(self._offsets[index + 1]) if index + 1 < self.num_images else self._file.size
        return begin, following - begin

    def sample(self, index: int) -> tuple[memoryview, int]:
        begin, length = self.span(index)
        # otherwise: a large image, a gap of other records, or a record with two keys
        whole = 0 < length <= _MAX_SPAN
        try:
            record = self._file.read_span(begin, length) if whole else self._file.read_parts(begin)
        except ValueError as error:
            raise ValueError(f"record {self._keys[index]} of {error}") from None
        try:
            return unpack(record).payload, int(self._labels[index])
        except ValueError as error:
            raise ValueError(f"{self.key(index)}: {error}") from None


def _can_be_index(size: int, facts: Facts, arrays: Arrays) -> bool:
    """Return whether the facts and arrays of a cache are a plausible index of a record file of `size` bytes."""
    offsets, labels, keys = (arrays[name] for name in _ARRAYS)
    numbers = [facts[name] for name in ("first_key", "num_records", "num_classes")]
    return bool(
        all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        and isinstance(facts["description"], str)
        and all(isinstance(line, str) for line in facts.get("warnings", ()))
        and 0 < len(offsets) == len(labels) <= facts["num_records"]
        and len(keys) in (0, len(labels))
        and np.all((offsets >= 0) & (offsets < size) & (labels >= 0) & (labels < facts["num_classes"]))
    )


def _index_set(rec_path: Path) -> tuple[Facts, Arrays]:
    """Build the index of a set from its files: read all headers and check all labels.

    Facts: first_key, num_records, num_classes, description, warnings. Arrays, in the order of the file: offsets (N,) int64,
    labels (N,) int32, keys (N,) int64, or (0,) if they count up from first_key.
    """
    records = IndexedRecordFile(rec_path, rec_path.with_suffix(".idx"))
    labels = _read_labels(records)
    images = _select_images(labels, records.offsets)
    image_labels = labels[images]
    if not len(image_labels):
        raise ValueError(f"{rec_path}: none of the {len(records)} records holds an image")
    header = _read_header(records)
    image_keys = records.keys[images]
    if header is not None and header < MAX_CLASSES:
        _check_image_keys(rec_path, image_keys, header)
    num_classes, source = _count_classes(rec_path, image_labels, image_keys)
    filled = np.zeros(num_classes, dtype=bool)
    for begin in range(0, len(image_labels), _CHUNK):
        filled[image_labels[begin : begin + _CHUNK]] = True
    form = "no header record, train.idx" if header is None else "header record, train.idx"
    form = "index rebuilt" if records.rebuilt else form  # in which the header has another place
    description = (
        f"{shown(rec_path)}: {form}, {len(image_labels)} images in {len(records)} records, "
        f"{num_classes} classes ({source}), {num_classes - np.count_nonzero(filled)} of them without images"
    )
    unread = records.bytes_after_last()
    if unread:
        description += f"; the last {unread} bytes of the file are not in the index"
    warnings = []
    if records.rebuilt or unread:
        what = "there is no train.idx" if records.rebuilt else f"the last {unread} bytes of train.rec are not in train.idx"
        warnings.append(f"{rec_path.parent}: {what}; face data repair {shlex.quote(str(rec_path.parent))} rebuilds it")
    facts = {
        "first_key": int(image_keys[0]),
        "num_records": len(records),
        "num_classes": num_classes,
        "description": description,
        "warnings": warnings,
    }
    counted = all((np.diff(image_keys[i : i + _CHUNK + 1]) == 1).all() for i in range(0, len(image_keys) - 1, _CHUNK))
    keys = image_keys[:0] if counted else image_keys  # a large set would have hundreds of megabytes of keys
    return facts, {"offsets": records.offsets[images], "labels": image_labels, "keys": keys}


def _select_images(labels: np.ndarray, offsets: np.ndarray) -> slice | np.ndarray:
    """Return the records that hold images (label >= 0), in file order; a slice, which needs no copy, if they are adjacent."""
    count = int(np.count_nonzero(labels >= 0))
    first = int((labels >= 0).argmax())
    run = slice(first, first + count)
    if (labels[run] >= 0).all() and is_ascending(offsets[run]):
        return run
    images = np.flatnonzero(labels >= 0)
    return images[np.argsort(offsets[images], kind="stable")]


def _count_classes(rec_path: Path, labels: np.ndarray, keys: np.ndarray) -> tuple[int, str]:
    """Return the number of classes and where it comes from."""
    largest = int(labels.max())
    path = rec_path.with_name("property")
    num_classes = classes_of_property(path)
    if num_classes is None:
        return largest + 1, "largest label + 1"
    if largest >= num_classes:
        raise ValueError(
            f"record {keys[labels.argmax()]} of {rec_path}: its label is {largest}, but {path} says {num_classes} classes, "
            "so labels must be smaller. Correct or delete that file, or renumber the labels"
        )
    return num_classes, "property"


def classes_of_property(path: Path) -> int | None:
    """Return the number of classes in a property file, None if the file does not exist."""
    if not path.exists():
        return None
    try:
        text = read_bytes(path, MAX_SMALL_TEXT)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    number = text.split(b"\n")[0].split(b",")[0].strip()
    if not number.isdigit() or len(number) > 8 or int(number) > MAX_CLASSES:
        raise ValueError(f"{path}: the first line must be 'classes,height,width', at most 2^24 classes. Correct or delete it")
    return int(number)


def _read_labels(records: IndexedRecordFile) -> np.ndarray:
    """Return the classes (n,) int32 of all records, -1 for records without an image: headers and identity records."""
    labels = np.full(len(records), -1, dtype=np.int32)
    # the bar shows if it takes more than a few seconds (a cold disk, a network)
    with progress([], len(records), f"reading the headers of {records.path}", "record", delay=5) as bar:
        for headers in records.headers():
            is_image = headers.payload_sizes > 0
            missing = ~is_image & (headers.flags != 2)
            if missing.any():
                key = records.keys[headers.positions[missing.argmax()]]
                raise ValueError(f"record {key} of {records.path}: has a label, but no image. Remove it from the dataset")
            wrong = is_image & ~are_classes(headers.labels)
            if wrong.any():
                i = wrong.argmax()
                raise ValueError(
                    f"record {records.keys[headers.positions[i]]} of {records.path}: a label must be an integer in [0, 2^24) "
                    f"(it is stored as float32), got {headers.labels[i]}. Renumber the labels"
                )
            labels[headers.positions[is_image]] = headers.labels[is_image].astype(np.int32)
            bar.update(len(headers.positions))
    return labels


def _read_header(records: IndexedRecordFile) -> int | None:
    """Return `a` of the header record, which is the last image's key plus one, or None for the headerless form."""
    positions = np.flatnonzero(records.keys == 0)
    if not len(positions):
        return None
    label, _, _, payload = unpack(records.read_position(int(positions[0])))
    if not isinstance(label, np.ndarray) or len(label) != 2 or len(payload):
        return None
    a, b = label.tolist()
    if not (1 < a <= b < 2**63 and a.is_integer() and b.is_integer()):
        return None
    if b < MAX_CLASSES and np.count_nonzero((records.keys >= a) & (records.keys < b)) < b - a:
        return None
    return int(a)


def _check_image_keys(rec_path: Path, image_keys: np.ndarray, end: int) -> None:
    """Check that the images have exactly the keys 1..end-1, as the header says."""
    keys = np.sort(image_keys)
    if len(keys) == end - 1 and keys[0] == 1 and keys[-1] == end - 1:
        return
    expected = np.arange(1, end)
    missing, surplus = np.setdiff1d(expected, keys), np.setdiff1d(keys, expected)
    which = f"{missing[0]} has no image" if len(missing) else f"{surplus[0]} has one"
    raise ValueError(
        f"{rec_path}: according to its header record the images have the keys 1 to {end - 1}, but record {which} "
        f"({len(missing)} missing, {len(surplus)} too many). Get the index that belongs to this file"
    )
