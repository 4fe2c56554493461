"""The file of a gallery: its tables, how it is opened, and what is refused.

A gallery is one SQLite database. It may come from somebody else, so nothing in it is trusted: it must be a regular file, its
tables must be exactly those of tables.sql, without a trigger or a view, and SQLite checks all pages where that takes no time.

The journal is SQLite's rollback journal, not its write-ahead log. A gallery that nobody writes to is then one file, which a
plain copy has completely, and it can lie on any file system with locks. synchronous=EXTRA flushes the folder too, so that a
commit survives a power cut.
"""

import os
import sqlite3
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.cli import progress
from utils.files import shown
from utils.text import printable

PATIENCE = 60.0  # seconds for which a process waits for another one
LONGEST_PERSON, LONGEST_PICTURE = 256, 1000  # characters of a name
MAX_FACE = 1 << 23  # bytes of a stored face
_APPLICATION, _FORMAT = 0x46616365, 2  # of the file's header
_CHECKED = 32 << 20  # bytes of a database that is checked whenever it is opened: 0.2 s
_SMALLEST = 512  # bytes of a database; SQLite takes a shorter file for an empty one
_LAST_NUMBER = 1 << 53  # of an image or a person; SQLite has no room for new ones after 2^63 - 1
_COPY = "; the file was left as it is: take a copy of the gallery, or enrol into a new one"
ADAPTED = " adapted "
# secure_delete: deleted rows are overwritten with zeros
_PRAGMAS = "trusted_schema=0 cell_size_check=1 mmap_size=0 temp_store=MEMORY synchronous=EXTRA secure_delete=1 foreign_keys=1"
_TABLES = Path(__file__).with_name("tables.sql")


class Facts(NamedTuple):
    """What embedded the faces of a gallery."""

    title: str  # of the network
    digest: str  # of the network; of an adapted gallery, ADAPTED and what adapted.py says follow
    embedding_size: int
    image_size: int  # height and width of a face, in pixels
    detector: str  # that found the faces, "" for aligned crops
    which: str  # of the faces in a picture
    network_path: str = ""  # where the network was; "" = not known
    detector_path: str = ""

    @property
    def network(self) -> str:
        """The digest of the network whose embeddings can be compared with the gallery's."""
        return self.digest.partition(ADAPTED)[0]


def create_database(path: Path, facts: Facts) -> None:
    """Make the tables in a file that is missing or empty, and leave any other as it is; several processes may try at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666))
    except FileExistsError:
        _check_file(path)
    size = path.stat().st_size
    if 0 < size < _SMALLEST or (size and not os.path.lexists(journal_of(path))):
        return
    with database_errors(path), closing(_connect(path)) as database:
        database.execute("BEGIN IMMEDIATE")
        if database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0:
            database.execute(f"PRAGMA application_id = {_APPLICATION}")
            database.execute(f"PRAGMA user_version = {_FORMAT}")
            _make_tables(database)
            database.execute("INSERT INTO facts VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?)", facts)
        database.execute("COMMIT")


def _make_tables(database: sqlite3.Connection) -> None:
    """Make the tables one by one: executescript would end the transaction."""
    for statement in _TABLES.read_text("utf-8").split(";"):
        database.execute(statement)


def open_database(path: Path) -> sqlite3.Connection:
    """Return a connection to a database that is exactly a gallery's, in its reading mode (PRAGMA query_only).

    Raises:
        ValueError: it is missing, a link, another kind of database, or damaged.
    """
    _check_file(path)
    with database_errors(path):
        database = _connect(path)
        try:
            database.execute("PRAGMA query_only = ON")
            _check(database, path)
        except BaseException:
            database.close()
            raise
    return database


@contextmanager
def database_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into a line that names the database and the fix."""
    try:
        yield
    except sqlite3.OperationalError as error:
        text = str(error)
        if text == "interrupted":  # by Ctrl-C while `showing` counted; SQLite keeps the exception itself
            raise KeyboardInterrupt from None
        if "locked" in text:
            fix = "another process uses it; try again later"
        elif "full" in text or "readonly" in text or "unable to open" in text or "disk I/O" in text:
            fix = f"{text}; make room, or get the right to write there. Everything confirmed is safe"
        else:
            fix = f"{text}{_COPY}"
        raise ValueError(f"{shown(path)}: {fix}") from None
    except (sqlite3.Error, OverflowError) as error:
        raise ValueError(f"{shown(path)}: {error}{_COPY}") from None


def journal_of(path: Path) -> Path:
    """Return the file in which SQLite keeps the old pages during a transaction."""
    return path.with_name(f"{path.name}-journal")


def overwrite_journal(path: Path) -> None:
    """Overwrite the journal of finished transactions with zeros: it has old contents. The caller holds the write lock."""
    try:
        handle = os.open(journal_of(path), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        size, block = os.fstat(handle).st_size, bytes(1 << 20)
        for at in range(0, size, len(block)):
            os.pwrite(handle, block[: size - at], at)
        os.fsync(handle)
    except OSError as error:  # which names no file
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(handle)


@contextmanager
def showing(database: sqlite3.Connection, what: str) -> Iterator[None]:
    """Show that SQLite is at work, as long as a statement takes more than some seconds."""
    with progress([], None, what, "step", delay=5) as bar:
        database.set_progress_handler(lambda: bar.update() and None, 1 << 17)
        try:
            yield
        finally:
            database.set_progress_handler(None, 0)


def check_pages(database: sqlite3.Connection, path: Path, how: str) -> None:
    """Raise ValueError if SQLite finds damage; `how` is quick_check or integrity_check."""
    with showing(database, "checking the pages"):
        found = str(database.execute(f"PRAGMA {how}(1)").fetchone()[0])
    if found != "ok":
        raise ValueError(f"{shown(path)}: is damaged: {found.splitlines()[0][:200]}{_COPY}")


def read_facts(database: sqlite3.Connection, path: Path) -> Facts:
    """Return the one row of the table `facts`, checked."""
    row = database.execute(f"SELECT {', '.join(Facts._fields)} FROM facts").fetchone()
    if row is None:
        raise ValueError(f"{shown(path)}: does not say which network embedded its faces{_COPY}")
    facts = Facts(*row)
    sound = tuple(map(type, row)) == (str, str, int, int, str, str, str, str)
    if not sound or not 1 <= facts.embedding_size <= 65536 or not 16 <= facts.image_size <= 1024:
        raise ValueError(f"{shown(path)}: its facts are not those of a gallery{_COPY}")
    return facts


def record_facts(database: sqlite3.Connection, facts: Facts) -> None:
    """Store what all images are embedded by from now on."""
    # SQLite's table of numbers has a row for each time, by which other processes see it; programs before this ignore the rows
    database.execute("INSERT INTO sqlite_sequence VALUES ('vectors', 0)")
    database.execute(f"UPDATE facts SET {', '.join(f'{name} = ?' for name in Facts._fields)}", facts)


def check_person(name: str) -> str:
    """Return a person's name in Unicode's composed form, so that it is the same from every file system.

    Raises:
        ValueError: the name is empty, too long, or has characters that cannot be printed.
    """
    name = unicodedata.normalize("NFC", name).strip()
    if not name or not name.isprintable():
        raise ValueError(f"a person's name must be printable text without line ends, got {printable(name)[:80]!r}; rename it")
    if len(name) > LONGEST_PERSON:
        raise ValueError(f"a person's name has up to {LONGEST_PERSON} letters, {name[:40]!r}... has {len(name):,}; shorten it")
    return name


def picture_name(name: str) -> str:
    """Return the name of a picture as a gallery keeps it, to be read by people only: printable, and of a bounded length."""
    text, half = shown(name), LONGEST_PICTURE // 2
    return text if len(text) <= LONGEST_PICTURE else f"{text[: half - 3]} ... {text[3 - half :]}"


def unit_vector(embedding: np.ndarray, size: int, picture: str) -> tuple[bytes, float]:
    """Return an embedding's (D,) unit vector, float32 little endian, and norm; ValueError for another size, or no direction."""
    if embedding.shape != (size,):
        raise ValueError(f"{shown(picture)}: an embedding must be ({size},), got {embedding.shape}")
    wide = embedding.astype(np.float64)
    norm = float(np.linalg.norm(wide))
    if not np.isfinite(norm) or norm < 1e-12:
        raise ValueError(f"{shown(picture)}: its embedding has length {norm:g}, and no direction")
    return (wide / norm).astype("<f4").tobytes(), norm


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        timeout=PATIENCE,
        isolation_level=None,
        check_same_thread=False,  # a Gallery has a lock of its own
    )
    if hasattr(database, "setlimit"):  # from Python 3.11 on
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_FACE + (1 << 16))
    for setting in _PRAGMAS.split():
        database.execute(f"PRAGMA {setting}")
    return database


def _check_file(path: Path) -> None:
    """Raise ValueError unless a path is a regular file, and its journal one that an interrupted transaction leaves behind.

    A journal that ends in SQLite's magic number names a "super-journal", which SQLite may delete after the rollback: any file
    of the user's. Only transactions over several databases have one, and a gallery is one database.
    """
    journal = journal_of(path)
    for file in (path, journal):
        try:
            kind = os.lstat(file).st_mode
        except OSError as error:
            if file is journal and isinstance(error, FileNotFoundError):
                return
            missing = "no such gallery; `face enrol` makes one" if isinstance(error, FileNotFoundError) else error.strerror
            raise ValueError(f"{shown(file)}: {missing}") from None
        if not stat.S_ISREG(kind):
            raise ValueError(f"{shown(file)}: must be a regular file, as a gallery is no link, folder or device")
    with open(journal, "rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - 8))
        if opened.read(8) == bytes.fromhex("d9d505f920a163d7"):
            raise ValueError(f"{shown(journal)}: names another file, which no gallery's journal does; it is not opened")


def _check(database: sqlite3.Connection, path: Path) -> None:
    """Raise ValueError unless the open database has the header, the tables and the sound pages of a gallery."""
    if database.execute("PRAGMA page_count").fetchone()[0] == 0:
        is_empty = path.stat().st_size == 0
        raise ValueError(f"{shown(path)}: {'is empty; `face enrol` makes a gallery of it' if is_empty else 'is no gallery'}")
    application, version = (database.execute(f"PRAGMA {key}").fetchone()[0] for key in ("application_id", "user_version"))
    if application != _APPLICATION:
        raise ValueError(f"{shown(path)}: a database of another program, not a gallery; name a file that `face enrol` made")
    if version != _FORMAT:
        raise ValueError(f"{shown(path)}: a gallery of format {version}, this program reads format {_FORMAT}; update it")
    if database.execute("PRAGMA journal_mode").fetchone()[0] != "delete":
        raise ValueError(f"{shown(path)}: has a write-ahead log, which a gallery never has; take a copy of the gallery")
    listing = "SELECT type, name, tbl_name, sql FROM sqlite_schema LIMIT 100"
    with closing(sqlite3.connect(":memory:")) as sample:
        _make_tables(sample)
        expected = sample.execute(listing).fetchall()
    if database.execute(listing).fetchall() != expected:
        raise ValueError(f"{shown(path)}: its tables are not those of a gallery{_COPY}")
    if path.stat().st_size <= _CHECKED:
        check_pages(database, path, "quick_check")
    largest = " ".join(f"UNION ALL SELECT coalesce(max(id), 0) FROM {table}" for table in ("images", "people"))
    wrong = f"typeof(n) <> 'integer' OR n NOT BETWEEN 0 AND {_LAST_NUMBER}"
    if database.execute(f"SELECT 1 FROM (SELECT seq AS n FROM sqlite_sequence {largest}) WHERE {wrong} LIMIT 1").fetchone():
        raise ValueError(f"{shown(path)}: its facts are not those of a gallery: no number is left for a new image{_COPY}")
