"""Finds the sound records of a RecordIO file that may be damaged, without its index and without trusting any length.

The writer cuts a record at every aligned magic (recordio/container.py), so every aligned magic is the start of a part. A part
is sound if it ends at the next magic or before it. If it ends before it, there is damage in between, or the part's length is
wrong, which decoding the image reveals. So reading can continue after any damage.
Shapes: n = sound records, p = parts.
"""

import os
import struct
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from utils.cli import Advance
from utils.files import check_file, reading

from .recordio.container import MAGIC, MAX_LENGTH
from .recordio.image_record import MAX_CLASSES, are_classes
from .recordio.index import distinct

_BLOCK = 1 << 24  # words searched at once
_MAGIC_WORD = int.from_bytes(MAGIC, "little")
_HEADER = 24  # bytes of an image record before its labels
_HEADER_FIELDS = struct.Struct("<IfQ")  # flag, label, id


class Sound(NamedTuple):
    """The sound records of a file, in file order, and the damage between them."""

    offsets: np.ndarray  # (n,) int64, bytes
    whole: np.ndarray  # (n,) bool, False: the record has several parts
    damage: list[tuple[int, int]]  # (first byte, byte after the last) of each range that is in no sound record


class SalvagedHeaders(NamedTuple):
    """The headers of n records; -1 or nan if the record is too short."""

    flags: np.ndarray  # (n,) int64
    labels: np.ndarray  # (n, 2) float32: the number, or the first two of the vector
    ids: np.ndarray  # (n,) uint64
    payload_sizes: np.ndarray  # (n,) int64, bytes; negative: the record is shorter than its header says


def find_sound(path: str | os.PathLike[str], advance: Advance = int) -> Sound:
    """Return the sound records of a file, found in one pass over it; ValueError if there is no such file.

    `advance` is called with the number of bytes searched since its last call.
    """
    with reading(path):
        size = check_file(path)
        words = np.memmap(path, dtype="<u4", mode="r", shape=(size // 4,)) if size >= 4 else np.zeros(0, dtype="<u4")
    found = [np.empty(0, dtype=np.int64)]
    for begin in range(0, len(words), _BLOCK):
        block = words[begin : begin + _BLOCK]
        found.append(np.flatnonzero(block == _MAGIC_WORD) + begin)
        advance(4 * len(block))
    starts = 4 * np.concatenate(found)  # (p,)
    starts = starts[starts + 8 <= size]
    second = words[starts // 4 + 1] if len(starts) else np.zeros(0, dtype="<u4")
    flags, lengths = second >> 29, (second & MAX_LENGTH).astype(np.int64)
    ends = starts + 8 + (lengths + 3 & ~3)
    following = np.append(starts[1:], size)[: len(starts)]
    sound = (ends <= following) & (flags < 4) & ~(((flags == 1) | (flags == 2)) & (lengths % 4 != 0))
    return _join_parts(starts, ends, np.where(sound, flags, 9), size)


def _join_parts(starts: np.ndarray, ends: np.ndarray, flags: np.ndarray, size: int) -> Sound:
    """Join parts (p,) to records: a part of cflag 0, or parts of cflag 1 2* 3. Parts that are not sound have flag 9."""
    alone = np.flatnonzero(flags == 0)
    cut_first, cut_last = [], []
    for begin in np.flatnonzero(flags == 1).tolist():  # rare: an aligned magic inside an image
        stop = begin + 1
        while stop < len(flags) and flags[stop] == 2:
            stop += 1
        if stop < len(flags) and flags[stop] == 3 and (ends[begin:stop] == starts[begin + 1 : stop + 1]).all():
            cut_first.append(begin)
            cut_last.append(stop)
    first = np.concatenate([alone, np.array(cut_first, dtype=np.int64)])
    last = np.concatenate([alone, np.array(cut_last, dtype=np.int64)])
    order = np.argsort(first)
    first, last = first[order], last[order]
    begins, stops = starts[first], ends[last]
    gap = np.append(begins, size) != np.append(0, stops)  # before each record, and at the end
    edges = (np.append(0, stops)[gap], np.append(begins, size)[gap])
    return Sound(begins, first == last, list(zip(*(edge.tolist() for edge in edges), strict=True)))


def read_headers(path: str | os.PathLike[str], sound: Sound) -> SalvagedHeaders:
    """Return the headers of the sound records (n,)."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    words = data[: len(data) // 4 * 4].view("<u4")
    count = len(sound.offsets)
    flags, sizes = np.full(count, -1, dtype=np.int64), np.full(count, -1, dtype=np.int64)
    labels, ids = np.full((count, 2), np.nan, dtype=np.float32), np.zeros(count, dtype=np.uint64)
    for begin, stop in pairwise([*range(0, count, 1 << 18), count]):
        places = sound.offsets[begin:stop] // 4 + np.array([[1], [2], [3], [4], [5], [8], [9]])
        part, flag, label, low, high, first, second = words[np.minimum(places, len(words) - 1)]
        lengths, flag = (part & MAX_LENGTH).astype(np.int64), flag.astype(np.int64)
        enough = lengths >= _HEADER
        vector = np.stack([np.where(flag > 0, first, label), second], axis=1).astype("<u4").view("<f4")
        flags[begin:stop] = np.where(enough, flag, -1)
        labels[begin:stop] = np.where(enough[:, None], vector, np.nan)
        ids[begin:stop] = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        sizes[begin:stop] = np.where(enough, lengths - _HEADER - 4 * flag, -1)
    for i in np.flatnonzero(~sound.whole).tolist():
        record = read_sound(data, int(sound.offsets[i]))
        flags[i], sizes[i] = -1, -1
        if len(record) >= _HEADER:
            flags[i], label, ids[i] = _HEADER_FIELDS.unpack_from(record)
            sizes[i] = len(record) - _HEADER - 4 * flags[i]
            two = np.frombuffer(record[_HEADER : _HEADER + 8].ljust(8, b"\0"), "<f4")
            labels[i] = two if flags[i] else (label, np.nan)
    return SalvagedHeaders(flags, labels, ids, sizes)


def read_sound(data: np.ndarray, offset: int) -> bytes:
    """Return the sound record that starts at byte `offset` of a file, of which `data` (bytes,) uint8 is the memory map."""
    parts = []
    while True:
        word = int.from_bytes(data[offset + 4 : offset + 8].tobytes(), "little")
        length = word & MAX_LENGTH
        parts.append(data[offset + 8 : offset + 8 + length].tobytes())
        if word >> 29 in (0, 3):
            return MAGIC.join(parts)
        offset += 8 + (length + 3 & ~3)


def choose_keys(headers: SalvagedHeaders) -> np.ndarray:
    """Return the keys (n,) int64 of all records of a sound file, in file order, as its writer most likely chose them.

    In sets written by the tools of insightface and mxnet, the id in each record is its key, so ids are used if they all differ.
    Otherwise, in a set with a header record, the images are 1, 2, ..., the identity records follow, and the header is 0. Any
    other set counts from 0. The header record, the last one if there are several, holds [a, b] and no image: a is the number of
    images plus one, b is a plus the number of identity records. Both are compared as float32, since they are rounded in a large
    set.
    """
    count = len(headers.flags)
    images = headers.payload_sizes > 0
    empty, a = np.flatnonzero((headers.payload_sizes == 0) & (headers.flags == 2)), int(np.count_nonzero(images)) + 1
    wanted = np.array([a, a + len(empty) - 1], dtype=np.float32)
    matches = empty[(headers.labels[empty] == wanted).all(axis=1)]
    ids = headers.ids.astype(np.int64)
    differ = len(distinct(ids)) == count and bool((ids >= 0).all())
    if not len(matches):
        return ids if differ else np.arange(count)
    header, others = int(matches[-1]), ~images
    others[header] = False
    keys = np.zeros(count, dtype=np.int64)
    keys[images] = np.arange(1, a)
    keys[others] = np.arange(a, count)
    alike = differ and all(np.array_equal(np.sort(ids[kind]), keys[kind]) for kind in (images, others)) and not ids[header]
    return ids if alike else keys


def unusable(headers: SalvagedHeaders, num_classes: int | None) -> dict[int, str]:
    """Return record -> reason for the sound records that a set must not have: too short, without image, or with a bad label."""
    values, images = headers.labels[:, 0], headers.payload_sizes > 0
    right, within = are_classes(values), are_classes(values, num_classes or MAX_CLASSES)
    reasons = (
        (headers.payload_sizes < 0, lambda i: "the record is shorter than its own header says"),
        ((headers.payload_sizes == 0) & (headers.flags != 2), lambda i: "has a label, but no image"),
        (images & ~right, lambda i: f"its label is {values[i]}, not an integer in [0, 2^24)"),
        (images & right & ~within, lambda i: f"its label is {values[i]:.0f}, but property says {num_classes} classes"),
    )
    return {i: text(i) for wrong, text in reasons for i in np.flatnonzero(wrong).tolist()}
