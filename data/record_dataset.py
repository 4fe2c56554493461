"""Face sets in RecordIO form: a folder with train.rec, train.idx and property (MS1MV2, MS1MV3, Glint360K, WebFace).

Source: deepinsight/insightface face2rec2.py, rec_builder.py, dataset_merge.py; mxnet tools/im2rec.py. Two forms exist:

    header form      key 0 holds [a, b] and no image; images have the keys 1..a-1, identities the keys a..b-1 (no image)
    headerless form  every record is an image, key 0 as well

Labels are float32, exact below 2^24, and so are a and b: in a larger set they are rounded. So images are told from the
rest by what the records hold; a small set's header must then agree. Shapes: n = records, N = images.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .base import FaceDataset
from .recordio import Headers, IndexedRecordFile, unpack

_FLOAT_LIMIT = 1 << 24  # from here on a float32 may stand for several integers


class RecordDataset(FaceDataset):
    """The images of a folder with train.rec. Opening reads all headers once, in bulk, and checks every label."""

    def __init__(self, folder: str) -> None:
        rec_path = Path(folder) / "train.rec"
        if not rec_path.is_file():
            raise ValueError(f"data.path: no file {rec_path}. Give the folder that holds train.rec, train.idx and property")
        records = IndexedRecordFile(rec_path, rec_path.with_suffix(".idx"))
        labels = _read_labels(records)
        images = np.flatnonzero(labels >= 0)
        if not len(images):
            raise ValueError(f"{rec_path}: none of the {len(records)} records holds an image")
        header = _read_header(records)
        if header is not None and header < _FLOAT_LIMIT:
            _check_image_keys(records, images, header)

        self._file = records.file
        self._offsets = records.offsets[images]
        self._keys = _compact(records.keys[images])
        self._labels = labels[images]
        self._ahead = 2 * (self._file.size // len(records))  # bytes that hold most records
        self.num_images = len(images)
        self.num_classes, source = self._count_classes(rec_path.with_name("property"))
        empty = self.num_classes - np.count_nonzero(np.bincount(self._labels, minlength=self.num_classes))
        form = "no header record" if header is None else "header record"
        index = "index rebuilt" if records.rebuilt else "train.idx"
        self._description = (
            f"{rec_path}: {form}, {index}, {self.num_images} images in {len(records)} records, "
            f"{self.num_classes} classes ({source}), {empty} of them without images"
        )
        unread = records.bytes_after_last()
        if unread:
            self._description += f"; the last {unread} bytes of the file are not in the index"

    def _count_classes(self, path: Path) -> tuple[int, str]:
        """Return the number of classes and where it comes from."""
        largest = int(self._labels.max())
        if not path.exists():
            return largest + 1, "largest label + 1"
        first_line = path.read_bytes().split(b"\n")[0]
        number = first_line.split(b",")[0].strip()
        if not number.isdigit() or len(number) > 8 or int(number) > _FLOAT_LIMIT:
            raise ValueError(
                f"{path}: the first line must be 'classes,height,width', at most 2^24 classes. Correct or delete it"
            )
        num_classes = int(number)
        if largest >= num_classes:
            key = self.key(int(self._labels.argmax()))
            raise ValueError(
                f"{key}: its label is {largest}, but {path} counts {num_classes} classes, so labels must be below. "
                "Correct or delete that file, or renumber the labels"
            )
        return num_classes, "property"

    def describe(self) -> str:
        return self._description

    def key(self, index: int) -> str:
        return f"record {self._keys[index]} of {self._file.path}"

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def prefetch(self, index: int) -> None:
        self._file.prefetch(int(self._offsets[index]), self._ahead)

    def sample(self, index: int) -> tuple[memoryview, int]:
        self.prefetch(index)
        record = self._file.read_at(int(self._offsets[index]))
        return unpack(record).payload, int(self._labels[index])


def _read_labels(records: IndexedRecordFile) -> np.ndarray:
    """Return the classes (n,) int32 of all records, -1 for those that hold no image but an index of others."""
    labels = np.full(len(records), -1, dtype=np.int32)
    for headers in records.headers():
        is_image = headers.payload_sizes > 0
        missing = ~is_image & (headers.flags != 2)
        if missing.any():
            key = records.keys[headers.positions[missing.argmax()]]
            raise ValueError(f"record {key} of {records.path}: has a label, but no image. Remove it from the dataset")
        _check_labels(records, headers, is_image)
        labels[headers.positions[is_image]] = headers.labels[is_image].astype(np.int32)
    return labels


def _check_labels(records: IndexedRecordFile, headers: Headers, is_image: np.ndarray) -> None:
    values = headers.labels
    with np.errstate(invalid="ignore"):
        right = (values >= 0) & (values < _FLOAT_LIMIT) & (values == np.floor(values))
    wrong = is_image & ~right
    if wrong.any():
        i = wrong.argmax()
        raise ValueError(
            f"record {records.keys[headers.positions[i]]} of {records.path}: a label must be an integer in [0, 2^24) "
            f"(it is stored as float32), got {values[i]}. Renumber the labels"
        )


def _read_header(records: IndexedRecordFile) -> int | None:
    """Return a of the header record, one more than the last image's key, or None for the headerless form."""
    if records.positions(0) < 0:
        return None
    label, _, _, payload = unpack(records.read(0))
    if not isinstance(label, np.ndarray) or len(label) != 2 or len(payload):
        return None
    a, b = label.tolist()
    if not (1 < a <= b < 2**63 and a.is_integer() and b.is_integer()):
        return None
    if b < _FLOAT_LIMIT and (b - a > len(records) or (records.positions(np.arange(a, b)) < 0).any()):
        return None
    return int(a)


def _check_image_keys(records: IndexedRecordFile, images: np.ndarray, end: int) -> None:
    """Check that the images have exactly the keys 1..end-1, as the header says."""
    keys = np.sort(records.keys[images])
    if len(keys) == end - 1 and keys[0] == 1 and keys[-1] == end - 1:
        return
    expected = np.arange(1, end)
    missing, surplus = np.setdiff1d(expected, keys), np.setdiff1d(keys, expected)
    which = f"{missing[0]} has none" if len(missing) else f"{surplus[0]} has one"
    raise ValueError(
        f"{records.path}: by its header record the images have the keys 1 to {end - 1}, but record {which} "
        f"({len(missing)} missing, {len(surplus)} too many). Get the index that belongs to this file"
    )


def _compact(keys: np.ndarray) -> Sequence[int] | np.ndarray:
    """Return the keys as a range if they are one: a large set has hundreds of megabytes of keys."""
    return range(int(keys[0]), int(keys[-1]) + 1) if (np.diff(keys) == 1).all() else keys
