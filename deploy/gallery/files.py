"""The files beside a gallery's database: the lock of the process that writes, the vectors, and the aligned faces.

Both data files are append-only. The database says how many bytes of them count, and has a checksum of each vector and face.
What lies beyond is left from a killed process, and the next one writes over it. A new generation of the files is written when
the gallery is compacted or embedded again; the database names the generation that counts.
"""

import contextlib
import fcntl
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from utils.files import shown
from utils.text import one_line

from .format import LOCK, PATIENCE, require_plain, sync_folder

VECTORS, FACES = "vectors", "faces"  # kinds of data files, as in their names and in the table `erasures`
_NAME = re.compile(rf"({VECTORS}|{FACES})_([0-9]{{8}})\.bin")
_POLL, _SILENT = 0.05, 1.0  # seconds between two tries for the lock, and until a waiting process says so
_READ = 8 << 20  # bytes read at once


def data_file(folder: Path, kind: str, generation: int) -> Path:
    """Return the path of a data file."""
    return folder / f"{kind}_{generation:08d}.bin"


def checksum(data: bytes | memoryview) -> bytes:
    """Return the checksum of a vector or a face as the database keeps it; it finds damage, not deliberate changes."""
    return xxhash.xxh3_64_digest(data)


@contextlib.contextmanager
def writer_lock(folder: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Be the only process that writes to a gallery; the system ends this with the process, however it dies.

    Raises:
        ValueError: another process has not finished after `patience` seconds.
    """
    path = folder / LOCK
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ValueError(f"{shown(path)}: cannot be locked: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{shown(path)}: must be a regular file, as a gallery has no links, folders or devices")
        _lock(handle, folder, patience)
        with contextlib.suppress(OSError):  # a full disk: others then wait for "another process"
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(handle)


def _lock(handle: int, folder: Path, patience: float) -> None:
    begin, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        waited = time.monotonic() - begin
        holder = os.pread(handle, 20, 0).decode("ascii", "replace")
        who = f"process {holder}" if holder.isdigit() else "another process"
        if waited > patience:
            raise ValueError(f"{shown(folder)}: {who} has been writing to it for more than {patience:.0f} s; try again later")
        if waited > _SILENT and not said:
            print(one_line(f"waiting for {who}, which writes to {shown(folder)}"), file=sys.stderr, flush=True)
            said = True
        time.sleep(_POLL)


class DataFile:
    """A data file of a gallery, open for reading, or for writing too.

    Raises:
        ValueError: it is missing, or no regular file.
        OSError: from any method, with the file's name.
    """

    def __init__(self, path: Path, write: bool = False, new: bool = False) -> None:
        self.path = path
        if not new:
            require_plain(path)
        flags = (os.O_RDWR if write or new else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._handle = os.open(path, flags | (os.O_CREAT | os.O_TRUNC if new else 0), 0o666)
        if new:
            sync_folder(path.parent)

    def __enter__(self) -> "DataFile":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._handle)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._handle).st_size

    def write(self, data: bytes | memoryview, at: int) -> None:
        """Write bytes at a position; they are on the disk after `flush`."""
        left = memoryview(data).cast("B")
        with self._named():
            while len(left):
                done = os.pwrite(self._handle, left, at)
                left, at = left[done:], at + done

    def erase(self, at: int, size: int) -> None:
        """Overwrite bytes with zeros, as far as the file has them."""
        end = min(at + size, self.size)
        for begin in range(at, end, _READ):
            self.write(bytes(min(_READ, end - begin)), begin)

    def flush(self) -> None:
        """Return when all that was written is on the disk."""
        with self._named():
            os.fsync(self._handle)

    def read(self, at: int, size: int) -> bytes:
        """Return the bytes at a position, fewer at the end of the file."""
        parts = []
        with self._named():
            while size and (part := os.pread(self._handle, min(size, _READ), at)):
                parts.append(part)
                at, size = at + len(part), size - len(part)
        return b"".join(parts)

    def read_rows(self, rows: np.ndarray, width: int) -> np.ndarray:
        """Return vectors (n, width) float32 by their distinct row numbers (n,); rows beyond the end are NaN."""
        found = np.full((len(rows), width), np.nan, dtype=np.float32)
        order = np.argsort(rows, kind="stable")
        ranked, step = rows[order], max(1, _READ // (4 * width))
        begin = 0
        while begin < len(ranked):
            first = int(ranked[begin])
            end = begin + int(np.searchsorted(ranked[begin:], first + step))
            data = self.read(first * width * 4, (int(ranked[end - 1]) + 1 - first) * width * 4)
            block = np.frombuffer(data[: len(data) // (4 * width) * 4 * width], dtype="<f4").reshape(-1, width)
            places = ranked[begin:end] - first
            there = places < len(block)
            found[order[begin:end][there]] = block[places[there]]
            begin = end
        return found

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None


def delete_other_generations(folder: Path, vectors: int, faces: int) -> None:
    """Delete the data files that the database does not name: left from a killed process, or replaced. Needs the lock."""
    for path in folder.iterdir():
        found = _NAME.fullmatch(path.name)
        if found and int(found[2]) != (vectors if found[1] == VECTORS else faces):
            path.unlink(missing_ok=True)
