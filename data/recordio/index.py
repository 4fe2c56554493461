"""The index of a RecordIO file: text lines `key TAB offset LF`, one per record, in the order of writing.

Source: MXIndexedRecordIO of mxnet 1.9.1, which allows CRLF, extra columns and a missing last LF, and uses the last of two equal
keys; and its C++ reader, which also splits at blanks. A line that neither of them can read is an error here.
Shapes: n = records.
"""

import os

import numpy as np

from utils.files import MAX_TEXT, check_file, reading

_BLOCK = 1 << 19  # bytes parsed at once, so that all intermediate arrays stay in the processor's cache
_DIGITS = b"0123456789\t\n"  # a block with only these bytes can be parsed without a loop over its lines
_MAX_DIGITS = 18  # always fits int64


def read_index(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys (n,) and the byte offsets (n,), both int64, in the order of the lines.

    Raises:
        ValueError: the file does not exist or is empty, or a line is not `key TAB offset`; the message names the line.
    """
    with reading(path):
        size = check_file(path, MAX_TEXT)
        keys, offsets = (np.empty(0, dtype=np.int64) for _ in range(2))
        done = read = 0
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                block += file.readline()
                read += len(block)
                parsed = _parse_plain(block) or _parse_lines(block, os.fspath(path), done + 1)
                stop = done + len(parsed[0])
                if stop > len(keys):  # the first lines are the shortest, so this guess usually suffices
                    room = stop + int(1.05 * (stop / read) * max(0, size - read))
                    keys, offsets = _with_room(keys, room, done), _with_room(offsets, room, done)
                keys[done:stop], offsets[done:stop] = parsed
                done = stop
    for column in (keys, offsets):
        column.resize(done, refcheck=False)
    if not done:
        raise ValueError(f"{path}: the index is empty. face data repair rebuilds it")
    return _keep_last(keys, offsets)


def _with_room(values: np.ndarray, room: int, used: int) -> np.ndarray:
    """Return a larger array with the first `used` values; pages that are never written take no memory."""
    larger = np.empty(room, dtype=values.dtype)
    larger[:used] = values[:used]
    return larger


def _parse_plain(block: bytes) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (keys, offsets) of a block in which every line is digits TAB digits, otherwise None."""
    if b"\r" in block:  # searching one byte is many times faster than two
        block = block.replace(b"\r\n", b"\n")
    if block.translate(None, _DIGITS):
        return None
    if block[-1:] != b"\n":
        block += b"\n"
    data = np.frombuffer(block, dtype=np.uint8)
    tabs, ends = np.flatnonzero(data == ord("\t")), np.flatnonzero(data == ord("\n"))
    if len(tabs) != len(ends):
        return None
    starts = np.concatenate(([0], ends[:-1] + 1))
    widths = np.stack([tabs - starts, ends - tabs - 1])  # digits before and after each TAB
    if widths.min() < 1 or widths.max() > _MAX_DIGITS:
        return None
    numbers = np.fromstring(block, dtype=np.int64, sep=" ")  # any white space separates
    return numbers[0::2], numbers[1::2]


def _parse_lines(block: bytes, path: str, first_line: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (keys, offsets) of a block, parsed line by line; a ValueError names a line that is wrong."""
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    table = np.empty((2, len(lines)), dtype=np.int64)
    for i, line in enumerate(lines):
        text = line.strip()
        columns = text.split(b"\t") if b"\t" in text else text.split()
        where = f"{path}: line {first_line + i}"
        try:
            key, offset = int(columns[0]), int(columns[1])
        except (ValueError, IndexError):
            raise ValueError(f"{where} must be 'key TAB offset', two integers. face data repair rebuilds the index") from None
        if not -(1 << 63) <= key < 1 << 63:
            raise ValueError(f"{where}: the key must fit a signed 64-bit integer, got {len(columns[0])} characters")
        if not 0 <= offset < 1 << 63:
            raise ValueError(f"{where}: the offset of record {key} must be in [0, 2^63). face data repair makes a new index")
        table[:, i] = key, offset
    return table[0], table[1]


def _keep_last(keys: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (keys, offsets) with only the last line of each key."""
    if not _repeats(keys):
        return keys, offsets
    _, from_end = np.unique(keys[::-1], return_index=True)
    last = np.sort(len(keys) - 1 - from_end)
    return keys[last], offsets[last]


def distinct(values: np.ndarray) -> np.ndarray:
    """Return the different ones of some integers, ascending. Without the counts numpy hashes: minutes for 42 million keys."""
    return np.unique(values, return_counts=True)[0]


def _repeats(keys: np.ndarray) -> bool:
    """Return whether a key occurs twice. Dense keys, as in a set of millions, are checked without sorting."""
    low, high = int(keys.min()), int(keys.max())
    if high - low >= 8 * len(keys) + 1024:
        return len(distinct(keys)) < len(keys)
    seen = np.zeros(high - low + 1, dtype=bool)
    for begin in range(0, len(keys), _BLOCK):
        seen[keys[begin : begin + _BLOCK] - low] = True
    return int(np.count_nonzero(seen)) < len(keys)
