"""The database of a gallery: its tables, how it is opened, and what is refused.

A gallery may come from somebody else. So nothing in it is trusted: no file in it may be a link, its tables must be exactly
those below, without a trigger or a view, and the whole file is checked where that takes no time.

The journal is SQLite's rollback journal, not its write-ahead log. A gallery that nobody writes to is then one database file,
which a plain copy of the folder has completely, and it can lie on any file system with locks. synchronous=EXTRA flushes the
folder too, so that a commit survives a power cut.
"""

import os
import sqlite3
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from utils.files import shown
from utils.text import printable

DATABASE, LOCK = "gallery.sqlite", "gallery.lock"
PATIENCE = 60.0  # seconds for which a process waits for another one
LONGEST_PERSON, LONGEST_PICTURE = 256, 1000  # characters of a name
MAX_FACE = 1 << 23  # bytes of a stored face
_APPLICATION, _FORMAT = 0x46616365, 1  # of the file's header
_CHECKED = 32 << 20  # bytes of a database that is checked whenever it is opened: 100,000 images, 0.2 s
_SMALLEST_ROW = 16  # bytes; a damaged tree of pages may seem to have more rows than the file has room for
_COPY = "; the file was left as it is: take a copy of the gallery, or enrol into a new folder"
_TABLES = (
    """CREATE TABLE facts (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    title TEXT NOT NULL,
    digest TEXT NOT NULL,
    embedding_size INTEGER NOT NULL,
    image_size INTEGER NOT NULL,
    detector TEXT NOT NULL,
    which TEXT NOT NULL,
    vectors INTEGER NOT NULL,
    faces INTEGER NOT NULL,
    num_rows INTEGER NOT NULL,
    faces_end INTEGER NOT NULL,
    changes INTEGER NOT NULL
)""",
    """CREATE TABLE people (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE
)""",
    """CREATE TABLE images (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    person INTEGER NOT NULL REFERENCES people (id),
    picture TEXT NOT NULL,
    hash BLOB NOT NULL,
    face INTEGER NOT NULL,
    norm REAL NOT NULL,
    quality REAL NOT NULL,
    added INTEGER NOT NULL,
    vector INTEGER NOT NULL UNIQUE,
    vector_sum BLOB NOT NULL,
    face_at INTEGER NOT NULL,
    face_size INTEGER NOT NULL,
    face_sum BLOB NOT NULL,
    UNIQUE (person, hash, face)
)""",
    """CREATE TABLE erasures (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    at INTEGER NOT NULL,
    size INTEGER NOT NULL
)""",
)


class Facts(NamedTuple):
    """What embedded the faces of a gallery."""

    title: str  # of the network
    digest: str  # of the network
    embedding_size: int
    image_size: int  # height and width of a face, in pixels
    detector: str  # that found the faces, "" for aligned crops
    which: str  # of the faces in a picture


class State(NamedTuple):
    """The row of the table `facts` without the `Facts`."""

    vectors: int  # generation of their file
    faces: int  # generation of their file
    num_rows: int  # vectors in their file, including erased ones
    faces_end: int  # bytes of the file of faces that belong to images, including erased ones
    changes: int  # transactions so far; whoever has read this state has read all


def check_person(name: str) -> str:
    """Return a person's name in Unicode's composed form, so that it is the same from every file system.

    Raises:
        ValueError: the name is empty, too long, or has characters that cannot be printed.
    """
    name = unicodedata.normalize("NFC", name).strip()
    if not name or not name.isprintable():
        raise ValueError(f"a person's name must be printable text without line ends, got {printable(name)[:80]!r}; rename it")
    if len(name) > LONGEST_PERSON:
        raise ValueError(
            f"a person's name may have {LONGEST_PERSON} characters, {name[:40]!r}... has {len(name):,}; shorten it"
        )
    return name


def picture_name(name: str) -> str:
    """Return the name of a picture as a gallery keeps it, to be read by people only: printable, and of a bounded length."""
    text = shown(name)
    if len(text) > LONGEST_PICTURE:
        text = f"{text[: LONGEST_PICTURE // 2 - 3]} ... {text[3 - LONGEST_PICTURE // 2 :]}"
    return text


def require_plain(path: Path) -> None:
    """Raise ValueError unless a path is a regular file, and no link."""
    try:
        kind = os.lstat(path).st_mode
    except OSError as error:
        raise ValueError(f"{shown(path)}: {error.strerror}") from None
    if not stat.S_ISREG(kind):
        raise ValueError(f"{shown(path)}: must be a regular file, as a gallery has no links, folders or devices")


@contextmanager
def database_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into a line that names the database and the fix."""
    try:
        yield
    except sqlite3.OperationalError as error:
        text = str(error)
        if "locked" in text:
            fix = f"another process has used it for more than {PATIENCE:.0f} s; try again later"
        elif "full" in text or "readonly" in text or "unable to open" in text or "disk I/O" in text:
            fix = f"{text}; make room, or get the right to write there. Everything confirmed is safe"
        else:
            fix = f"{text}{_COPY}"
        raise ValueError(f"{shown(path)}: {fix}") from None
    except (sqlite3.Error, OverflowError) as error:
        raise ValueError(f"{shown(path)}: {error}{_COPY}") from None


def create_database(path: Path, facts: Facts) -> None:
    """Write an empty database, which appears under its name when it is complete. The caller holds the gallery's lock."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    with database_errors(path):
        database = _connect(unfinished, "rwc")
        try:
            database.execute(f"PRAGMA application_id = {_APPLICATION}")
            database.execute(f"PRAGMA user_version = {_FORMAT}")
            database.execute("BEGIN")
            for table in _TABLES:
                database.execute(table)
            database.execute("INSERT INTO facts VALUES (1, ?, ?, ?, ?, ?, ?, 1, 1, 0, 0, 0)", facts)
            database.execute("COMMIT")
        finally:
            database.close()
    os.replace(unfinished, path)
    sync_folder(path.parent)


def open_database(path: Path) -> sqlite3.Connection:
    """Return a connection to a database that is exactly a gallery's, in its reading mode (PRAGMA query_only).

    Raises:
        ValueError: it is missing, a link, another kind of database, or damaged.
    """
    require_plain(path)
    _check_journal(path)
    if path.stat().st_size == 0:
        raise ValueError(f"{shown(path)}: is empty, so no gallery{_COPY}")
    with database_errors(path):
        database = _connect(path, "rw")
        try:
            database.execute("PRAGMA query_only = ON")
            _check(database, path)
        except BaseException:
            database.close()
            raise
    return database


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    database = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=PATIENCE,
        isolation_level=None,
        check_same_thread=False,  # a Gallery has a lock of its own
    )
    if hasattr(database, "setlimit"):  # from Python 3.11 on
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 20)
    for setting in (
        "trusted_schema = OFF",
        "cell_size_check = ON",
        "mmap_size = 0",
        "temp_store = MEMORY",  # VACUUM would leave a copy of all names in a file elsewhere
        "synchronous = EXTRA",
        "secure_delete = ON",  # deleted rows are overwritten with zeros
        "foreign_keys = ON",
    ):
        database.execute(f"PRAGMA {setting}")
    return database


def _check_journal(path: Path) -> None:
    """Raise ValueError if the journal of an interrupted transaction is not one that a gallery leaves behind.

    One that ends in SQLite's magic number names a "super-journal", which SQLite may delete after the rollback: any file of the
    user's. Only transactions over several databases have one, and a gallery is one database.
    """
    journal = path.with_name(f"{path.name}-journal")
    if not os.path.lexists(journal):
        return
    require_plain(journal)
    with open(journal, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        if file.read(8) == bytes.fromhex("d9d505f920a163d7"):
            raise ValueError(
                f"{shown(journal)}: names another file, which no gallery's journal does; this gallery is not opened"
            )


def _check(database: sqlite3.Connection, path: Path) -> None:
    """Raise ValueError unless the open database has the header, the tables and the sound pages of a gallery."""
    application, version = (database.execute(f"PRAGMA {key}").fetchone()[0] for key in ("application_id", "user_version"))
    if application != _APPLICATION:
        raise ValueError(f"{shown(path)}: a database of another program, not a gallery; name a folder that `enrol` made")
    if version != _FORMAT:
        raise ValueError(f"{shown(path)}: a gallery of format {version}, this program reads format {_FORMAT}; update it")
    if database.execute("PRAGMA journal_mode").fetchone()[0] != "delete":
        raise ValueError(f"{shown(path)}: has a write-ahead log, which a gallery never has; take a copy of the gallery")
    listing = "SELECT type, name, tbl_name, sql FROM sqlite_schema LIMIT 100"
    sample = sqlite3.connect(":memory:")
    for table in _TABLES:
        sample.execute(table)
    expected = sample.execute(listing).fetchall()
    sample.close()
    if database.execute(listing).fetchall() != expected:
        raise ValueError(f"{shown(path)}: its tables are not those of a gallery{_COPY}")
    if path.stat().st_size <= _CHECKED:
        check_pages(database, path, "quick_check")


def check_pages(database: sqlite3.Connection, path: Path, how: str) -> None:
    """Raise ValueError if SQLite finds damage; `how` is quick_check or integrity_check."""
    found = str(database.execute(f"PRAGMA {how}(1)").fetchone()[0])
    if found != "ok":
        raise ValueError(f"{shown(path)}: is damaged: {found.splitlines()[0][:200]}{_COPY}")


def read_facts(database: sqlite3.Connection, path: Path) -> tuple[Facts, State]:
    """Return the one row of the table `facts`, checked."""
    row = database.execute(
        "SELECT title, digest, embedding_size, image_size, detector, which, vectors, faces, num_rows, faces_end, changes "
        "FROM facts"
    ).fetchone()
    if row is None:
        raise ValueError(f"{shown(path)}: does not say which network embedded its faces{_COPY}")
    facts, state = Facts(*row[:6]), State(*row[6:])
    texts = (facts.title, facts.digest, facts.detector, facts.which)
    numbers = (facts.embedding_size, facts.image_size, *state)
    sound = all(type(text) is str for text in texts) and all(type(number) is int and number >= 0 for number in numbers)
    if not sound or not 1 <= facts.embedding_size <= 65536 or not 16 <= facts.image_size <= 1024 or min(state[:2]) < 1:
        raise ValueError(f"{shown(path)}: its facts are not those of a gallery{_COPY}")
    return facts, state


def most_rows(path: Path) -> int:
    """Return a number of rows that no table of the database can exceed."""
    return path.stat().st_size // _SMALLEST_ROW


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of files to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
