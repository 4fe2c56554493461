"""Reads and finds a user's files: regular files of a bounded size, one rule for links, and names shown in plain text.
Also writes files that appear complete, and gives the hidden folder in which a program makes what it writes.

A pipe in a list would be waited for without end, and /dev/zero read until memory is full. So whatever a user names is looked
at before it is opened. Errors are OSError with words for a person in `strerror`, like those of the system; `read_lines`,
`read_csv` and `read_numbers` raise ValueError of one line.
"""

import contextlib
import csv
import errno
import hashlib
import heapq
import io
import itertools
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from .cli import Advance, progress
from .text import printable

MAX_PICTURE = 1 << 28  # bytes of an image file; the largest photograph that is decoded has fewer
MAX_TEXT = 1 << 32  # bytes of a list; 42 million lines of 60 bytes are 2.5 GB
MAX_SMALL_TEXT = 1 << 24  # bytes of a configuration, or of another file that people write by hand
HASH = "xxh3_128"  # detects damage, at 10 GB/s, but not deliberate changes
MAX_DEPTH = 32  # folders below the one that is searched
_PART = 1 << 18  # bytes of a long text, and some more up to the end of a line
_ROWS = 1 << 12  # of a table that are written at once

_KINDS = (
    (stat.S_ISDIR, "is a folder"),
    (stat.S_ISFIFO, "is a pipe"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
    (stat.S_ISSOCK, "is a socket"),
)


def check_file(path: str | os.PathLike[str], max_bytes: int | None = None) -> int:
    """Return a file's size in bytes, without opening it; OSError if it is no regular file, or has more than max_bytes."""
    try:
        return _check(os.stat(path), path, max_bytes)
    except ValueError:  # a zero byte
        raise OSError(errno.EINVAL, "a path must not contain a zero byte", shown(path)) from None


def read_bytes(path: str | os.PathLike[str], max_bytes: int = MAX_PICTURE) -> bytes:
    """Return the contents of a file; OSError, which names it, as for `check_file`, or if it cannot be read."""
    check_file(path, max_bytes)
    # the file may have become a pipe meanwhile, so opening must never block
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with open(handle, "rb", buffering=0) as file:
        size = _check(os.fstat(handle), path, max_bytes)
        try:
            data = file.read(size + 1) or b""
            if 0 < size == len(data):
                return data
            parts, total = [data], len(data)  # the file grows, exceeds the 2 GB of one call, or is in /proc, where sizes are 0
            while data and total <= max_bytes:
                data = file.read(1 << 24) or b""
                parts.append(data)
                total += len(data)
        except OSError as error:  # for example on a broken disk
            raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    if total > max_bytes:
        raise _too_large(path, total, max_bytes)
    return b"".join(parts)


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_TEXT, encoding: str = "utf-8-sig") -> str:
    """Return the text of a file, with newlines as line ends; OSError as for `read_bytes`, or UnicodeDecodeError."""
    return read_bytes(path, max_bytes).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an error of the system, or of a text in another encoding, into a ValueError of one line that names the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{shown(path)}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{shown(path)}: cannot be read: no UTF-8 text") from None


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """Return the lines of a UTF-8 text, without their ends and without the mark that editors of Windows begin a file with."""
    with reading(path):
        text = read_text(path)
    return text.removesuffix("\n").split("\n") if text else []  # splitlines also cuts names at U+2028 and its like


def lines_of(text: bytes) -> Iterator[bytes]:
    """Yield the lines of a text with their ends. Those of a long one are never in memory at once."""
    begin = 0
    while begin < len(text):
        stop = text.find(b"\n", begin + _PART) + 1 or len(text)
        yield from text[begin:stop].splitlines(keepends=True)
        begin = stop


def read_csv(path: str | os.PathLike[str]) -> Iterator[list[str]]:
    """Yield the rows of a UTF-8 table, whose cells are apart by commas, or by semicolons if the first line has no comma."""
    with reading(path):
        text = read_text(path)
    head = text.partition("\n")[0]
    lines = io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8", newline="")  # StringIO takes four bytes for each character
    try:
        yield from csv.reader(lines, delimiter=";" if ";" in head and "," not in head else ",")
    except csv.Error as error:
        raise ValueError(f"{shown(path)}: is no table: {error}") from None


def read_numbers(path: str | os.PathLike[str], columns: str) -> Iterator[tuple[int, list[int]]]:
    """Yield (line number, whole numbers) of each line of a table; # begins a comment, and empty lines count for nothing.

    Args:
        columns: their names, for example "source label class".
    """
    count = len(columns.split())
    row = re.compile(r"\s+".join(["([0-9]{1,18})"] * count))  # once for a line: there are millions
    for number, line in enumerate(read_lines(path), 1):
        if text := line.partition("#")[0].strip():
            if not (found := row.fullmatch(text)):
                raise ValueError(f"{path}: line {number} must be '{columns}', {count} whole numbers, got {line.strip()[:80]!r}")
            yield number, [*map(int, found.groups())]


def shown(path: str | bytes | os.PathLike[str]) -> str:
    r"""Return a path for messages, logs and reports, with invalid UTF-8 and control characters as \xff."""
    return printable(os.fsencode(path).decode("utf-8", "backslashreplace"))


class Found(NamedTuple):
    """The files below a folder."""

    folders: list[str]  # names of the sub-folders, sorted; hidden ones are left out
    files: list[str]  # relative to the folder, sorted, each below one of `folders`, or at the top if requested
    passed: list[str]  # folders that were not entered, with the reason
    others: Counter[str]  # of the other files, by ending in small letters
    loose: int  # of those at the top that would have counted below, 0 if requested

    def by_folder(self) -> dict[str, list[str]]:
        """Return for each of `folders` the files below it, as in `files`; for "" those at the top, if there are any."""
        below: dict[str, list[str]] = {name: [] for name in self.folders}
        for file in self.files:
            below.setdefault(file.split(os.sep, 1)[0] if os.sep in file else "", []).append(file)
        return {name: sorted(files) for name, files in below.items()}


def find_files(folder: str | os.PathLike[str], suffixes: tuple[str, ...], top: bool = False) -> Found:
    """Return the files below a folder, with `top` also those in it, whose names end in `suffixes`, in any case.

    Hidden folders at the top are left out.
    The rule for links: a link to a file counts as that file. A link to a folder is followed if that folder was not searched
    yet. Real folders are searched first, then links in the order of their paths. So no file is found twice, a link to a folder
    above or to another identity adds nothing, and the search always ends.

    Raises:
        ValueError: folders are nested more than MAX_DEPTH deep.
        OSError: the folder cannot be read.
    """
    with progress([], None, f"listing {shown(folder)}", "entry", 5, shown=os.environ.get("LOCAL_RANK", "0") == "0") as bar:
        search = _Search(os.path.realpath(folder), suffixes, top, bar.update)
        search.enter("")
        search.follow_links()
    folders = {path for path in search.entered if path and os.sep not in path} | search.unreadable
    return Found(sorted(folders), sorted(search.files), search.passed, search.others, search.loose)


class _Search:
    """The state of `find_files` while it searches below `root`; all paths are relative to it."""

    def __init__(self, root: str, suffixes: tuple[str, ...], top: bool, advance: Advance) -> None:
        self.root, self.suffixes, self.top, self.advance = root, suffixes, top, advance
        self.files: list[str] = []
        self.passed: list[str] = []
        self.others: Counter[str] = Counter()
        self.loose = 0
        self.entered: list[str] = []
        self.unreadable: set[str] = set()  # at the top
        self.links: list[str] = []  # to folders, not yet followed; a heap
        self.seen: set[tuple[int, int]] | None = None  # (device, inode) of the folders entered; None until there is a link

    def enter(self, inside: str) -> None:
        """Search a folder and the real folders below it."""
        waiting = [inside]
        while waiting:
            inside = waiting.pop()
            path = os.path.join(self.root, inside)
            if inside.count(os.sep) >= MAX_DEPTH:
                raise ValueError(f"{shown(path)}: lies more than {MAX_DEPTH} folders deep; move it up, or remove it")
            try:
                if self.seen is not None:
                    if (inode := _inode(path)) in self.seen:
                        continue
                    self.seen.add(inode)
                with os.scandir(path) as entries:
                    listed = list(entries)
            except OSError as error:
                if not inside:
                    raise
                self.passed.append(f"{shown(inside)}: {error.strerror}")
                if os.sep not in inside:
                    self.unreadable.add(inside)
                continue
            self.entered.append(inside)
            self.advance(len(listed))
            for entry in listed:
                if self.is_folder(entry, inside):
                    if inside or entry.name[0] != ".":
                        below = os.path.join(inside, entry.name)
                        heapq.heappush(self.links, below) if entry.is_symlink() else waiting.append(below)
                elif inside or self.top:
                    if entry.name.lower().endswith(self.suffixes):
                        self.files.append(os.path.join(inside, entry.name))
                    else:
                        self.others[os.path.splitext(entry.name)[1].lower()] += 1
                else:
                    self.loose += entry.name[0] != "." and entry.name.lower().endswith(self.suffixes)

    def is_folder(self, entry: os.DirEntry[str], inside: str) -> bool:
        """Return whether an entry is a folder; say of a link that cannot be followed why, unless it is named like a file."""
        try:
            return entry.is_dir()
        except OSError as error:  # it leads to itself, or to where this user may not look
            if not entry.name.lower().endswith(self.suffixes):
                self.passed.append(f"{shown(os.path.join(inside, entry.name))}: {error.strerror}")
            return False

    def follow_links(self) -> None:
        """Enter the folders that links lead to, unless they were searched before or contain the root."""
        if not self.links:
            return  # without reading any inode, which on a network file system costs as much as the search
        above = [self.root, *map(str, Path(self.root).parents)]
        self.seen = {_inode(path) for path in above} | {_inode(os.path.join(self.root, path)) for path in self.entered}
        while self.links:
            link = heapq.heappop(self.links)
            path = os.path.join(self.root, link)
            if _inode(path) in self.seen:
                self.passed.append(f"{shown(link)}: a link to {shown(os.path.realpath(path))}, which is searched already")
            else:
                self.enter(link)


def _inode(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _check(status: os.stat_result, path: str | os.PathLike[str], max_bytes: int | None) -> int:
    if not stat.S_ISREG(status.st_mode):
        kind = next((words for test, words in _KINDS if test(status.st_mode)), "is no file")
        raise OSError(errno.EINVAL, f"it {kind}, and must be a regular file", os.fspath(path))
    if max_bytes is not None and status.st_size > max_bytes:
        raise _too_large(path, status.st_size, max_bytes)
    return status.st_size


def _too_large(path: str | os.PathLike[str], size: int, max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it has {size:,} bytes, and may have {max_bytes:,} at most", os.fspath(path))


def check_own(folder: Path) -> None:
    """Raise OSError if anything below a folder, which may be from somebody else, is a link out of it, a pipe or a device.

    The folder itself may be a link. A folder below it that this process may not enter is left out.
    """
    waiting, inside = [os.path.realpath(folder)], os.path.join(os.path.realpath(folder), "")
    while waiting:
        with contextlib.suppress(FileNotFoundError), os.scandir(waiting.pop()) as entries:  # another program may remove it
            for entry in entries:
                fault, target = "", os.path.realpath(entry.path) if entry.is_symlink() else ""
                if entry.is_dir(follow_symlinks=False):
                    waiting += [entry.path] if os.access(entry.path, os.R_OK | os.X_OK) else []
                elif target and not os.path.join(target, "").startswith(inside):
                    fault = f"is a link out of the folder, to {shown(target)}; move that here, or remove the link"
                elif not target and not entry.is_file():
                    fault = "is a pipe, a socket or a device; remove it"
                if fault:
                    raise OSError(errno.EINVAL, f"{shown(entry.path.removeprefix(inside))} in it {fault}", os.fspath(folder))


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file, or make it, as `os.open` does; also an opener for `open`. No link is followed, and no pipe waited for.

    Raises:
        OSError: it is not a regular file, or cannot be opened.
    """
    try:
        handle = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return handle
        os.close(handle)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link; a pipe that nobody reads
            raise
    raise OSError(errno.EINVAL, "it is a link, a pipe or a device, and must be a regular file", os.fspath(path))


def is_still(path: Path, handle: int) -> bool:
    """Return whether path is an open file or folder, and not one that another program put in its place.

    It must be open, because the next file may get the inode of one that is deleted and closed.
    """
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


class NewFile(contextlib.AbstractContextManager["NewFile"]):
    """A new file: write to it, then `close`, which returns when the data is on the disk.

    Raises:
        OSError: from any method; the unfinished file is not removed.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self.failure: OSError | None = None
        self._digest = xxhash.xxh3_128()
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # minus the umask, as usual

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def write(self, data: bytes | memoryview) -> int:
        """Append all of data; return its length in bytes. Partial writes are continued."""
        left = memoryview(data).cast("B")
        length = len(left)
        self._digest.update(left)
        try:
            while len(left):
                written = os.write(self._handle, left)
                if written == 0:
                    raise OSError(errno.EIO, "the disk takes no more bytes")
                left = left[written:]
        except OSError as error:
            self.failure = OSError(error.errno, error.strerror, str(self.path))
            raise self.failure from None
        self.size += length
        return length

    def fileno(self) -> int:
        """Return the open file's descriptor."""
        return self._handle

    def flush(self) -> None:
        """Do nothing, since nothing is buffered; torch.save calls this method."""

    def close(self) -> dict[str, Any]:
        """Flush to the disk; return the size in bytes and the hash."""
        os.fsync(self._handle)
        self.__exit__(None, None, None)
        return {"size": self.size, HASH: self._digest.hexdigest()}


@contextlib.contextmanager
def new_file(path: Path, durable: bool = True, hidden: bool = True) -> Iterator[NewFile]:
    """Give a file to write to; it appears at `path` when the block ends, and not if the block raises.

    Args:
        durable: flush it to the disk first. Of very many files a loss of power may cost the last ones, which are made again.
        hidden: until then; what a killed program leaves of a large file should be seen.

    Raises:
        OSError: it cannot be written; the error names `path`.
    """
    # short, because `path` may have as long a name as the file system allows; the same in the next run, which overwrites it
    name = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}" if hidden else path.name
    unfinished = path.with_name(f"{name}.unfinished")
    own = -1
    try:
        unfinished.unlink(missing_ok=True)
        with NewFile(unfinished) as file:
            own = os.dup(file.fileno())
            yield file
            if durable:
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


def write_file(path: Path, data: bytes | str, durable: bool = True) -> None:
    """Write a file in one go, a text as UTF-8, as `new_file` does."""
    with new_file(path, durable) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def check_folder_of(path: Path | None, option: str) -> None:
    """Raise ValueError if the folder of a file that is to be written at the end does not exist; None is no file."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"{option}: there is no folder {shown(path.absolute().parent)}; create it, or name another file")


def csv_bytes(rows: Iterable[Sequence[object]]) -> bytes:
    """Return rows as the bytes of a CSV file; names that are no UTF-8 keep their bytes."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table with a line of column names, as `new_file` does; of millions of rows, few are in memory at once."""
    left = itertools.chain([head], rows)
    with new_file(path) as file:
        while some := list(itertools.islice(left, _ROWS)):
            file.write(csv_bytes(some))


@contextlib.contextmanager
def unfinished_folder(out: Path) -> Iterator[Path]:
    """Create a hidden folder beside `out`, to write in and to move from; remove what is left of it, whatever happens.

    Raises:
        ValueError: another program writes there, or the disk does not take the files.
    """
    folder = out.absolute().with_name(f".{out.absolute().name}.unfinished")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        raise ValueError(f"{folder}: another program is writing there. If it was killed, delete that folder") from None
    own = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield folder
    except OSError as error:
        if error.filename is None or str(error.filename).startswith(str(folder)):
            raise ValueError(f"{out}: cannot be written: {error.strerror or error}") from None
        raise
    finally:
        if is_still(folder, own):  # it may be moved away, and another program may write there
            shutil.rmtree(folder, ignore_errors=True)
        os.close(own)
