"""The journal of a long job, which one run holds at a time.

A journal is one file, to which an entry is appended when a piece of the work is done. An entry is a line of JSON, and as many
bytes as it says. The first line has the facts on which all pieces depend. An entry that a kill left incomplete is cut off, and
its piece is done again."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from utils.files import check_file, open_own, shown

_LARGEST = 1 << 42  # bytes of a journal
_LONGEST = 1 << 26  # bytes of a line


class Entry(NamedTuple):
    """A piece of the work: its line, and the place of its bytes."""

    record: dict[str, Any]
    begin: int
    size: int


class Journal:
    """The pieces that are done; see `open_journal`.

    Attributes:
        facts: the first line; None if the file is new, {} if it is no journal's.
        entries: the others, in the order in which they were appended.
    """

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self._handle = path, handle
        self.facts: Any = None
        self.entries: list[Entry] = []
        self._end = 0  # of the last complete entry
        length = check_file(path, _LARGEST)
        with open(path, "rb") as file:
            while (line := file.readline(_LONGEST)).endswith(b"\n"):
                record = _parsed(line)
                size = record.get("bytes", 0)
                end = file.tell() + (size if type(size) is int and size > 0 else 0)
                if end > length:
                    break
                if self.facts is None:
                    self.facts = record
                else:
                    self.entries.append(Entry(record, file.tell(), end - file.tell()))
                self._end = file.seek(end)

    def begin(self, facts: Mapping[str, object], again: bool, where: str, what: str) -> None:
        """Begin to append: go on if the facts are the same, or if there are none yet, or `again` is set, anew.

        Args:
            where, what: for the error, such as the folder and "its crops were made with".

        Raises:
            ValueError: it was begun with other facts, or is a file of somebody else.
        """
        if self.facts == {}:
            raise ValueError(f"{shown(self.path)}: is no file of this program, and would be overwritten; rename or remove it")
        if self.facts is not None and not again and self.facts != dict(facts):
            names = (name for name in [*facts, *self.facts] if self.facts.get(name) != facts.get(name))
            different = next(names, "version of this program")
            raise ValueError(
                f"{where}: {what} another {different.replace('_', ' ')}; go on with that one, choose another --out, or add "
                "--again to begin anew"
            )
        is_new = self.facts is None or again
        if is_new:
            self.entries, self._end = [], 0
        self._do(os.ftruncate, self._handle, self._end)
        if is_new:
            self._append(json.dumps(facts).encode() + b"\n")
            self._do(os.fsync, self._handle)  # without it the folder or file would be one of others
        self.facts = dict(facts)

    def add(self, record: Mapping[str, Any], data: bytes = b"") -> None:
        """Append an entry."""
        head = {**record, "bytes": len(data), "hash": xxhash.xxh3_128_hexdigest(data)} if data else dict(record)
        line = json.dumps(head).encode() + b"\n"  # names that are no UTF-8 become \udcff
        self._append(line + data)
        self.entries.append(Entry(head, self._end - len(data), len(data)))

    def data(self, entry: Entry) -> bytes | None:
        """Return the bytes of an entry, None if they are damaged."""
        with open(self.path, "rb") as file:
            file.seek(entry.begin)
            data = file.read(entry.size)
        return data if xxhash.xxh3_128_hexdigest(data) == entry.record.get("hash") else None

    def _append(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            done = self._do(os.write, self._handle, left)
            left, self._end = left[done:], self._end + done

    def _do(self, operation: Any, *arguments: Any) -> Any:
        try:
            return operation(*arguments)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None


@contextlib.contextmanager
def open_journal(path: Path, meaning: str) -> Iterator[Journal]:
    """Hold the lock of a journal, which is created, and give it; the error says by `meaning` what is locked.

    Raises:
        ValueError: another run holds it.
        OSError: it cannot be opened or read.
    """
    handle = open_own(path, os.O_RDWR | os.O_APPEND)
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
        yield Journal(path, handle)
    finally:
        os.close(handle)


def check_new(results: Path, unfinished: Path | None, again: bool) -> None:
    """Raise ValueError if there are results of --out already, unless the journal of new ones is there, or `again` is set."""
    if results.exists() and not (unfinished is not None and unfinished.exists()) and not again:
        raise ValueError(f"--out: {shown(results)} exists already; choose another name, or --again to replace it")


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
