"""Image records: the header of each record, a record file with its index, and the writer of a set like insightface's tools.

Source: python/mxnet/recordio.py of mxnet 1.9.1 (IRHeader, pack, unpack, MXIndexedRecordIO).

    image record = flag u32, label f32, id u64, id2 u64, flag x f32, payload (an encoded image); little-endian
    flag 0: the label is the float. flag > 0: the label is the vector, and the float is ignored

deepinsight/insightface rec_builder.py (header form) and shuffle_rec.py (headerless form); record_dataset.py describes the two.

Shapes: n = records of the index, b = records of one chunk, N = images, C = classes.
"""

import numbers
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from utils.files import new_file
from utils.image import IMAGE_SIZE, image_size
from utils.text import prefix_errors

from .container import MAGIC, MAX_LENGTH, RecordFile, RecordWriter
from .index import distinct, read_index

_HEADER = struct.Struct("<IfQQ")
_CHUNK = 1 << 18  # headers read at once
_MAGIC_WORD = int.from_bytes(MAGIC, "little")
_PROTOBUF_FIELD = re.compile(rb"[\x0a\x12\x1a\x22]([\x80-\xff]{0,4}[\x00-\x7f])")  # its number and kind, and its length
_BESIDE = ("classes.csv", "skipped.txt", "left_out.csv", "padding.csv")  # what the programs say of a set they wrote
MAX_CLASSES = 1 << 24  # a label is a float32; from here on it may represent several integers


class Record(NamedTuple):
    """The fields of an image record."""

    label: float | np.ndarray  # a number, or (flag,) float32
    id: int
    id2: int
    payload: memoryview


class Headers(NamedTuple):
    """The headers of b records."""

    positions: np.ndarray  # (b,) int64, in the index
    flags: np.ndarray  # (b,) int64
    labels: np.ndarray  # (b,) float32: the number, or the first of the vector
    payload_sizes: np.ndarray  # (b,) int64, bytes


def unpack(record: bytes | memoryview) -> Record:
    """Return the fields of an image record; label vector and payload are views of it."""
    if len(record) < _HEADER.size:
        raise ValueError(f"an image record must have at least {_HEADER.size} bytes for its header, got {len(record)}")
    flag, label, record_id, id2 = _HEADER.unpack_from(record)
    start = _HEADER.size + 4 * flag
    if start > len(record):
        if is_protobuf(record):
            raise ValueError(
                "the record holds SageMaker's recordio-protobuf, which uses the same container. Export the images as files, "
                "and make a set with face data folder_to_rec"
            )
        raise ValueError(f"the record has {len(record)} bytes, but its header announces {flag} labels: not an image record")
    vector = np.frombuffer(record, dtype="<f4", count=flag, offset=_HEADER.size) if flag else label
    return Record(vector, record_id, id2, memoryview(record)[start:])


def is_protobuf(record: bytes | memoryview) -> bool:
    """Return whether a record is a protobuf message like SageMaker's Record: only fields 1 to 4, each with a length.

    Source: record.proto of aws/amazon-sagemaker-examples (features = 1, label = 2, uid = 3, metadata = 4).
    """
    data, place = bytes(record), 0
    while place < len(data):
        if not (field := _PROTOBUF_FIELD.match(data, place)):
            return False
        length = sum((byte & 0x7F) << 7 * number for number, byte in enumerate(field[1]))  # written in groups of 7 bits
        place = field.end() + length
    return len(data) > 0 and place == len(data)


def pack(label: float | ArrayLike, record_id: int, id2: int, payload: bytes) -> bytes:
    """Return an image record as mxnet packs it: a number is the label, anything else a vector of float32."""
    if isinstance(label, numbers.Number):
        return _HEADER.pack(0, label, record_id, id2) + payload
    vector = np.asarray(label, dtype="<f4")
    return _HEADER.pack(vector.size, 0.0, record_id, id2) + vector.tobytes() + payload


class IndexedRecordFile:
    """A record file and its index: keys (n,) and offsets (n,), both int64, in the order of the index.

    Without an index file, the index is rebuilt by a scan of the record file. The keys then count the records from 0, since a
    record does not contain its key. Opening checks the range of the offsets. Reading a record checks that it ends where the
    next one starts, which detects a wrong length or a wrong index.
    """

    def __init__(self, rec_path: str | os.PathLike[str], idx_path: str | os.PathLike[str]) -> None:
        self.file = RecordFile(rec_path)
        self.path = self.file.path
        self.rebuilt = not Path(idx_path).exists()
        if self.rebuilt:
            self.offsets = self.file.scan_offsets()
            self.keys = np.arange(len(self.offsets))
        else:
            self.keys, self.offsets = read_index(idx_path)
            self._check_offsets(os.fspath(idx_path))
        self._starts = self.offsets if is_ascending(self.offsets) else distinct(self.offsets)  # keys may share a record

    def _check_offsets(self, idx_path: str) -> None:
        for begin in range(0, len(self.offsets), _CHUNK):
            offsets = self.offsets[begin : begin + _CHUNK]
            wrong = (offsets < 0) | (offsets % 4 != 0) | (offsets > self.file.size - 8)
            if wrong.any():
                i = int(wrong.argmax())
                raise ValueError(
                    f"{idx_path}: the offset of record {self.keys[begin + i]} must be a multiple of 4 inside {self.path} "
                    f"({self.file.size} bytes), got {offsets[i]}: the index belongs to another file, or the file is cut off; "
                    "face data repair mends either"
                )

    def __len__(self) -> int:
        return len(self.keys)

    def read_position(self, position: int) -> bytes | memoryview:
        """Return the record at this line of the index."""
        offset = int(self.offsets[position])
        try:
            record, end = self.file.read_until(offset)
            following = int(np.searchsorted(self._starts, offset, side="right"))
            if following < len(self._starts) and end != self._starts[following]:  # where records without a key may be
                self.file.scan_offsets(end, int(self._starts[following]))
        except ValueError as error:
            raise ValueError(f"record {self.keys[position]} of {error}") from None
        return record

    def bytes_after_last(self) -> int:
        """Return the number of bytes after the last record of the index: damage, or an index that was cut."""
        return self.file.size - self.file.read_until(int(self._starts[-1]))[1]

    def headers(self) -> Iterator[Headers]:
        """Yield the headers of all records in file order, a few hundred thousand at a time, after checking them."""
        self.file.expect_random_reads(False)
        ascending = self._starts is self.offsets
        order = None if ascending else np.argsort(self.offsets, kind="stable")
        for begin in range(0, len(self), _CHUNK):
            stop = min(begin + _CHUNK, len(self))
            positions = np.arange(begin, stop) if order is None else order[begin:stop]
            yield self._headers_of(positions)
            self.file.release(int(self.offsets[positions[0]]), int(self.offsets[positions[-1]]))
        self.file.expect_random_reads(True)

    def _headers_of(self, positions: np.ndarray) -> Headers:
        words = np.frombuffer(self.file.view, dtype="<u4", count=self.file.size // 4)
        offsets = self.offsets[positions]
        places = offsets // 4 + np.array([[0], [1], [2], [3], [8]])
        magic, part, flags, label, vector = words[np.minimum(places, len(words) - 1)]
        lengths = (part & MAX_LENGTH).astype(np.int64)
        flags = flags.astype(np.int64)
        labels = np.where(flags > 0, vector, label).view("<f4")
        payload_sizes = lengths - _HEADER.size - 4 * flags
        ends = offsets + 8 + (lengths + 3 & ~3)
        ascending = self._starts is self.offsets
        following = positions + 1 if ascending else np.searchsorted(self._starts, offsets, side="right")
        last = following == len(self._starts)  # no next record tells where the last one must end
        whole = last | (ends == self._starts[np.minimum(following, len(self._starts) - 1)])
        plain = (magic == _MAGIC_WORD) & (part <= MAX_LENGTH) & (ends <= self.file.size) & whole & (payload_sizes >= 0)
        for i in np.flatnonzero(~plain).tolist():  # several parts, records without a key in between, or damage
            flags[i], labels[i], payload_sizes[i] = self._header_at(int(positions[i]))
        return Headers(positions, flags, labels, payload_sizes)

    def _header_at(self, position: int) -> tuple[int, float, int]:
        record = self.read_position(position)
        with prefix_errors(f"record {self.keys[position]} of {self.path}"):
            label, _, _, payload = unpack(record)
        if isinstance(label, np.ndarray):
            return len(label), float(label[0]), len(payload)
        return 0, label, len(payload)


def is_ascending(values: np.ndarray) -> bool:
    """Return whether each value (n,) is larger than the one before; needs little memory even for millions of values."""
    return all((np.diff(values[begin : begin + _CHUNK + 1]) > 0).all() for begin in range(0, len(values) - 1, _CHUNK))


def are_classes(labels: np.ndarray, count: int = MAX_CLASSES) -> np.ndarray:
    """Return whether each label (n,) float32 is a whole number in [0, count)."""
    with np.errstate(invalid="ignore"):
        return (labels >= 0) & (labels < count) & (labels == np.floor(labels))


class RecordSetWriter(RecordWriter):
    """Writes a set into a folder.

    Args:
        header: True writes the header form: images at keys 1..N grouped by class, then an identity record for each class,
            then the header at key 0. False writes only images, at keys 0..N-1 in any order of classes (a shuffled set).
        size: height and width of the images in pixels, for property; 0 = as the first square one has.
        overwrite: replace the set in the folder, if there is one.
        num_classes: the least number of classes in property; the last classes may have no image.

    Raises:
        ValueError: the folder holds a set and `overwrite` is false, or the folder cannot be written.
    """

    def __init__(
        self, folder: str | os.PathLike[str], header: bool = True, size: int = 0, overwrite: bool = False, num_classes: int = 0
    ) -> None:
        self.folder, self.header, self.size = Path(folder), header, size
        self.num_images = 0
        self._ends: list[int] = []  # header form: the key after the last image of each class so far
        self._largest = num_classes - 1
        if not overwrite and (self.folder / "train.rec").exists():
            raise ValueError(f"{self.folder} holds a train.rec; add --overwrite to replace it, or choose another folder")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            super().__init__(self.folder / "train.rec", self.folder / "train.idx")
        except OSError as error:
            raise ValueError(f"{self.folder}: cannot be written: {error.strerror}") from None

    def add(self, label: int, image: bytes | memoryview, path: str = "") -> int:
        """Append an encoded image; return its key.

        Args:
            label: the class. In header form labels start at 0 and never decrease, and no class may be skipped.
            path: the original path, for train.lst, which lists only images with a path.
        """
        previous = len(self._ends) - 1
        if not 0 <= label < MAX_CLASSES:
            raise ValueError(f"{self.folder}: a label must be in [0, 2^24), because it is stored as float32; got {label}")
        if self.header and label not in (previous, previous + 1):
            raise ValueError(f"{self.folder}: images must be grouped by class, 0, 1, 2 ...; got label {label} after {previous}")
        if not len(image):
            raise ValueError(f"{self.folder}: no image may be empty, image {self.num_images} ({path or label}) has no bytes")
        if not self.size and (found := image_size(image)) and found[0] == found[1]:
            self.size = found[0]
        key = self.num_images + self.header
        self.write(key, pack(float(label), key, 0, bytes(image)))
        self.num_images += 1
        if self.header:
            del self._ends[label:]
            self._ends.append(key + 1)
        self._largest = max(self._largest, label)
        if path:
            if len(self._files) == 2:
                self._paths.append(self.folder / "train.lst")
                self._files.append(self._unfinished.enter_context(new_file(self._paths[2], hidden=False)))
            self._files[2].write(f"1\t{path.replace(os.sep, '/')}\t{label}\n".encode("utf-8", "surrogateescape"))
        return key

    @property
    def num_classes(self) -> int:
        """The largest label so far, plus one."""
        return self._largest + 1

    def close(self) -> None:
        """Write the identity records and the header, flush everything to the disk, and give the files their final names."""
        with self._unfinished:
            if not self.num_images:
                raise ValueError(f"{self.folder}: no image was written")
            if self.header:
                first = self.num_images + 1
                begins = [1, *self._ends]
                for label, end in enumerate(self._ends):
                    self.write(first + label, pack([float(begins[label]), float(end)], first + label, 0, b""))
                self.write(0, pack([float(first), float(first + len(self._ends))], 0, 0, b""))
            size = self.size or IMAGE_SIZE
            text = f"{self.num_classes},{size},{size}".encode()
            self._paths.append(self.folder / "property")
            self._files.append(self._unfinished.enter_context(new_file(self._paths[-1])))
            self._files[-1].write(text)
            self._flush()
            # the replaced set goes first, and the new train.rec gets its name last, so whenever one is found, its set is whole
            replaced = any((self.folder / name).exists() for name in ("train.rec", "property"))
            for name in ("train.rec", "train.lst", *(_BESIDE if replaced else ())):
                (self.folder / name).unlink(missing_ok=True)
