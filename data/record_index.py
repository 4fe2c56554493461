"""The index of a RecordIO file: text lines `key TAB offset LF`, one per record, in the order of writing.

Source: MXIndexedRecordIO of mxnet 1.9.1 (CRLF, extra columns and a missing last LF are fine; the last of two equal keys
wins) and its C++ reader, which also splits at blanks. A line that neither of them reads is an error here.
Shapes: n = records.
"""

import os

import numpy as np

_BLOCK = 1 << 20  # bytes parsed at once; the index of 42 million images has 900 MB
_PLAIN = b"0123456789\t\n"  # a block of these alone can be parsed without looking at its lines one by one
_MAX_DIGITS = 18  # always fits int64


def read_index(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys (n,) and the byte offsets (n,), both int64, in the order of the lines.

    Raises:
        ValueError: no such file, no line in it, or a line that is not `key TAB offset`; the message names the line.
    """
    keys: list[np.ndarray] = []
    offsets: list[np.ndarray] = []
    line = 1
    try:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                block += file.readline()
                block_keys, block_offsets = _parse_plain(block) or _parse_lines(block, os.fspath(path), line)
                keys.append(block_keys)
                offsets.append(block_offsets)
                line += len(block_keys)
    except OSError as error:
        raise ValueError(f"{path}: the index cannot be read: {error.strerror}") from None
    if not keys:
        raise ValueError(f"{path}: the index is empty. Delete it to have it rebuilt from the .rec file")
    return _keep_last(np.concatenate(keys), np.concatenate(offsets))


def _parse_plain(block: bytes) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (keys, offsets) of a block in which every line is digits TAB digits, otherwise None."""
    if b"\r\n" in block:
        block = block.replace(b"\r\n", b"\n")
    if block.translate(None, _PLAIN):
        return None
    data = np.frombuffer(block, dtype=np.uint8)
    tabs = np.flatnonzero(data == ord("\t"))
    ends = np.flatnonzero(data == ord("\n"))
    if data[-1] != ord("\n"):
        ends = np.append(ends, data.size)
    if len(tabs) != len(ends):
        return None
    starts = np.concatenate(([0], ends[:-1] + 1))
    widths = np.stack([tabs - starts, ends - tabs - 1])  # digits before and after each TAB
    if widths.min() < 1 or widths.max() > _MAX_DIGITS:
        return None
    numbers = np.fromstring(block, dtype=np.int64, sep=" ")  # any white space separates
    return numbers[0::2], numbers[1::2]


def _parse_lines(block: bytes, path: str, first_line: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (keys, offsets) of a block, line by line, or name the line that is wrong."""
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
            raise ValueError(f"{where} must be 'key TAB offset', two integers. Delete the index to have it rebuilt") from None
        if not -(1 << 63) <= key < 1 << 63:
            raise ValueError(f"{where}: the key has {len(columns[0])} characters, it must fit a signed 64-bit integer")
        if not 0 <= offset < 1 << 63:
            raise ValueError(f"{where}: the offset of record {key} must be in [0, 2^63). Delete the index to have it rebuilt")
        table[:, i] = key, offset
    return table[0], table[1]


def _keep_last(keys: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (keys, offsets) without all but the last line of each key."""
    if (np.diff(keys) > 0).all():
        return keys, offsets
    unique, from_end = np.unique(keys[::-1], return_index=True)
    if len(unique) == len(keys):
        return keys, offsets
    last = np.sort(len(keys) - 1 - from_end)
    return keys[last], offsets[last]
