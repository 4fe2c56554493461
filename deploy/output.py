"""Files that appear complete and stay after a loss of power, and a lock that only one run holds."""

import contextlib
import csv
import errno
import fcntl
import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from utils.checkpoint.tensor_file import NewFile
from utils.files import is_still


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[NewFile]:
    """Give a file to write to; it appears at `path`, flushed to the disk, when the block ends, and not if the block raises.

    Raises:
        OSError: it cannot be written; the error names `path`.
    """
    # short, because `path` may have as long a name as the file system allows; the same in the next run, which overwrites it
    unfinished = path.with_name(f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}.unfinished")
    own = -1
    try:
        unfinished.unlink(missing_ok=True)
        with NewFile(unfinished) as file:
            own = os.dup(file.fileno())
            yield file
            file.close()
        if not is_still(unfinished, own):
            raise OSError(errno.EBUSY, "another program is writing it", str(path))
        unfinished.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            if own >= 0 and is_still(unfinished, own):
                unfinished.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(unfinished)):  # fsync names no file
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    finally:
        if own >= 0:
            os.close(own)


def write_file(path: Path, data: bytes) -> None:
    """Write a file in one go, as `new_file` does."""
    with new_file(path) as file:
        file.write(data)


def csv_bytes(rows: Iterable[Sequence[object]]) -> bytes:
    """Return rows as the bytes of a CSV file; names that are no UTF-8 keep their bytes."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")


@contextlib.contextmanager
def locked(path: Path, meaning: str) -> Iterator[int]:
    """Hold the lock of a file, which is created; give its handle, open for reading and appending.

    Args:
        meaning: what is locked, for the error.

    Raises:
        ValueError: another run holds it.
        OSError: the file cannot be opened.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.path.samestat(os.fstat(handle), os.stat(path))  # the other run may have ended and removed it
        except (BlockingIOError, FileNotFoundError):
            same = False
        except OSError:
            same = True  # a file system without locks
        if not same:
            raise ValueError(f"{meaning} is in use by another run; wait for its end, or choose another name")
        yield handle
    finally:
        os.close(handle)
