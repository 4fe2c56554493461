"""The RecordIO container: records in one file, read by byte offset, and written like mxnet.

Source: dmlc-core include/dmlc/recordio.h and src/recordio.cc, python/mxnet/recordio.py of mxnet 1.9.1. The writer's output is
equal byte for byte. mxnet's reader hides damage (a cut file, a wrong index); this one reports file and byte.

    file   = part part ...          nothing before, between or after
    part   = magic u32, cflag << 29 | length u32, data, padding to a multiple of 4; little-endian
    record = one part of cflag 0, or parts of cflag 1 2* 3, joined by the magic, because the writer cuts a record at each
             aligned magic inside it

Shapes: n = records.
"""

import contextlib
import errno
import functools
import mmap
import os
import struct
from array import array
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np

from utils.files import check_file, is_still, new_file, reading

MAGIC = b"\x0a\x23\xd7\xce"
MAX_LENGTH = (1 << 29) - 1  # bytes in a record

_PART = struct.Struct("<4sI")
_FIRST, _LATER = (0, 1), (2, 3)  # allowed cflags of the first part, and of later parts
_SCANNED = 1 << 28  # bytes after which a scan of the file releases its pages
_DAMAGE = "the file is damaged or cut, or the index belongs to another file; face data repair mends either"

Writer = TypeVar("Writer", bound="RecordWriter")


class RecordFile:
    """Reads records by byte offset: from a memory map without a copy, or with `read_span` into separate memory.

    Threads may share it. It may be pickled, or inherited by a fork, since each process maps the file at its first read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        with reading(path):
            self.size = check_file(path)
        self._handles: dict[str, FileIO] = {}
        start = bytes(self.view[:4]) if self.size >= _PART.size else b""
        if start != MAGIC:
            raise ValueError(f"{self.path}: a RecordIO file starts with 0a23d7ce, but this one ({self.size} bytes) does not")

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "size": self.size, "_handles": {}}

    @functools.cached_property
    def _map(self) -> mmap.mmap:
        with reading(self.path), open(self.path, "rb") as file:  # some network file systems cannot map files
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(mapped) != self.size:
            raise ValueError(f"{self.path}: had {self.size} bytes when opened, now {len(mapped)}; start again")
        mapped.madvise(mmap.MADV_RANDOM)
        return mapped

    @property
    def view(self) -> memoryview:
        """The bytes of the whole file, read-only."""
        return memoryview(self._map)

    def expect_random_reads(self, random: bool) -> None:
        """Tell the kernel to expect random reads (no read-ahead) or sequential reads (maximal read-ahead).

        With the kernel's default, random reads of a cold file fetch tens of times the bytes of the records.
        """
        self._map.madvise(mmap.MADV_RANDOM if random else mmap.MADV_SEQUENTIAL)

    def release(self, start: int, stop: int) -> None:
        """Unmap the pages of these bytes from the process; the kernel may keep them in its cache."""
        begin = start - start % mmap.PAGESIZE
        if stop > begin:
            self._map.madvise(mmap.MADV_DONTNEED, begin, stop - begin)

    def prefetch(self, offset: int, length: int) -> None:
        """Ask the kernel to fetch these bytes in the background, with one request to the disk."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._open().fileno(), offset, length, os.POSIX_FADV_WILLNEED)

    def read_until(self, offset: int) -> tuple[bytes | memoryview, int]:
        """Return the record that starts at byte `offset`, and the first byte after its padding."""
        return self._record(self.view, 0, offset)

    def read_span(self, offset: int, length: int) -> bytes | memoryview:
        """Return the record in the `length` bytes from `offset` on, read with one call into separate memory.

        Unlike a read from the map, this adds no pages of the file to the process, holds no lock while the disk works, and
        survives if the file is truncated in the meantime.
        """
        return self._record(memoryview(self._read(offset, length)), offset, offset)[0]

    def _read(self, offset: int, length: int) -> bytes:
        try:
            data = os.pread(self._open().fileno(), length, offset)
        except OSError as error:
            raise ValueError(f"{self.path}: byte {offset}: cannot be read: {error.strerror}") from None
        if len(data) < length:
            raise ValueError(f"{self.path}: byte {offset + len(data)}: the file ends; it had {self.size} bytes when opened")
        return data

    def read_parts(self, offset: int) -> bytes | memoryview:
        """Return the record of unknown length that starts at byte `offset`, read like `read_span`."""
        end, length = offset, 0
        while True:
            magic, word = _PART.unpack(self._read(end, _PART.size))
            size = _PART.size + ((word & MAX_LENGTH) + 3 & ~3)
            end, length = end + size, length + size
            if magic != MAGIC or word >> 29 not in (1, 2) or length > MAX_LENGTH or end >= self.size:
                return self.read_span(offset, min(length, self.size - offset))  # raises the error, if there is one

    def _open(self) -> FileIO:
        file = self._handles.get("file")
        if file is None:
            file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - closed when this object goes
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            # several threads may get here at once: one handle is kept, the others are closed unused
            file = self._handles.setdefault("file", file)
        return file

    def _record(self, view: memoryview, base: int, offset: int) -> tuple[bytes | memoryview, int]:
        """Return the record at byte `offset` of the file, and its end. `view` holds the file's bytes from `base` on."""
        cflag, start, stop, end = self._part(view, base, offset, _FIRST)
        if cflag == 0:
            return view[start - base : stop - base], end
        parts, length = [view[start - base : stop - base]], stop - start
        while cflag != 3:
            cflag, start, stop, end = self._part(view, base, end, _LATER)
            parts.append(view[start - base : stop - base])
            length += len(MAGIC) + stop - start
            if length > MAX_LENGTH:
                raise ValueError(f"{self.path}: byte {offset}: the parts of this record add up to 2^29 bytes or more")
        return MAGIC.join(parts), end

    def _part(self, view: memoryview, base: int, offset: int, cflags: tuple[int, int]) -> tuple[int, int, int, int]:
        """Return (cflag, start of data, end of data, end of padding) of the part at `offset`, all checked."""
        limit = base + len(view)
        if offset < base or offset % 4 or offset + _PART.size > limit:
            raise ValueError(f"{self.path}: byte {offset}: no part can start here ({self.size} bytes): {_DAMAGE}")
        magic, word = _PART.unpack_from(view, offset - base)
        if magic != MAGIC:
            raise ValueError(f"{self.path}: byte {offset}: a part must start with 0a23d7ce, got {magic.hex()}: {_DAMAGE}")
        cflag, length = word >> 29, word & MAX_LENGTH
        if cflag not in cflags:
            allowed = " or ".join(map(str, cflags))
            raise ValueError(f"{self.path}: byte {offset}: cflag must be {allowed} here, got {cflag}: {_DAMAGE}")
        start = offset + _PART.size
        end = start + (length + 3 & ~3)
        if end > limit or (cflag in (1, 2) and length % 4):
            raise ValueError(f"{self.path}: byte {offset}: a part of {length} bytes does not fit here: {_DAMAGE}")
        return cflag, start, start + length, end

    def scan_offsets(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Return the offsets (n,) int64 of the records from byte `start` to `stop`, by following the part headers.

        Raises:
            ValueError: a part is damaged, or no record ends exactly at `stop` (by default the end of the file).
        """
        view, stop = self.view, self.size if stop is None else stop
        offsets = array("q")
        whole, released = True, start
        while start < stop:
            if whole:
                offsets.append(start)
                if start - released > _SCANNED:
                    self.release(released, start)
                    released = start
            cflag, _, _, start = self._part(view, 0, start, _FIRST if whole else _LATER)
            whole = cflag in (0, 3)
        if start != stop or not whole:
            raise ValueError(f"{self.path}: byte {stop}: a record must end here, got {start}: {_DAMAGE}")
        return np.array(offsets, dtype=np.int64)


class RecordWriter:
    """Writes a record file, and if named its index. They get their final names when `close` has flushed all bytes to the disk.

    As a context manager it calls `close`, or deletes what is unfinished after an exception.

    Raises:
        OSError: from any method; nothing is left of the files, or another program writes them now.
    """

    def __init__(self, *paths: str | os.PathLike[str]) -> None:
        self._paths = list(map(Path, paths))
        with contextlib.ExitStack() as stack:
            self._files = [stack.enter_context(new_file(path, hidden=False)) for path in self._paths]
            self._unfinished = stack.pop_all()
        self._offset = 0

    def write(self, key: int, record: bytes) -> None:
        """Append a record, and the line `key TAB offset` to the index."""
        if len(record) > MAX_LENGTH:
            raise ValueError(f"{self._paths[0]}: a record must have fewer than 2^29 bytes, record {key} has {len(record)}")
        begin = self._offset
        cut, cflag = 0, 1
        magic = record.find(MAGIC)
        while magic >= 0:
            if magic % 4:
                magic = record.find(MAGIC, magic + 1)
                continue
            self._write_part(cflag, record[cut:magic])
            cut, cflag = magic + len(MAGIC), 2
            magic = record.find(MAGIC, cut)
        self._write_part(3 if cut else 0, record[cut:])
        if len(self._files) > 1:
            self._files[1].write(b"%d\t%d\n" % (key, begin))

    def _write_part(self, cflag: int, data: bytes) -> None:
        padding = -len(data) % 4
        self._files[0].write(_PART.pack(MAGIC, cflag << 29 | len(data)) + data + bytes(padding))
        self._offset += _PART.size + len(data) + padding

    def close(self) -> None:
        """Finish the files: flush them to the disk, then give them their final names."""
        with self._unfinished:
            self._flush()

    def _flush(self) -> None:
        """Flush the files to the disk, and see that they are still this writer's."""
        for file, path in zip(self._files, self._paths, strict=True):
            os.fsync(file.fileno())
            if not is_still(file.path, file.fileno()):
                raise OSError(errno.EBUSY, "another program is writing it", str(path))

    def __enter__(self: Writer) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._unfinished.__exit__(kind, error, trace)
