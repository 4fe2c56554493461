"""A gallery on disk: people, their images, a unit vector and an aligned face of each image, in one SQLite file.

What is enrolled survives a kill or a power cut, because SQLite commits it. Readers see one state from first to last: a commit
waits until they have read what they need. What is removed is overwritten: SQLite zeroes deleted rows, and the journal with the
old contents is zeroed before the call returns. If a process is killed between the two, the next writer does it. Where SQLite
had moved rows, unused bytes of a page may keep pieces of them, until `compact` writes the file anew.

Shapes: N = images of the gallery, n = images of a call, D = embedding size, S = size of a face.
"""

import contextlib
import itertools
import os
import sqlite3
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from utils.cli import progress
from utils.files import shown
from utils.image import decode_rgb, to_png
from utils.text import did_you_mean, one_line, prefix_errors

from . import database as db
from .search import Entries, Match, Searcher

Embed = Callable[[np.ndarray], np.ndarray]  # crops (n, S, S, 3) uint8 -> raw embeddings (n, D)
Wrap = Callable[[Iterable[int], int], Iterable[int]]  # shows the progress over the numbers of so many images
_SILENT = 1.0  # seconds until a waiting process says so
_HEAVIEST = 1e30  # length of an embedding times score; float32 ends at 3e38, and a person has several images
_BATCH, _ADAPTED = 64, 4096  # images embedded, or adapted, at once
_ALIKE = 10_000  # people among whom one with a similar name is looked for, while others wait: 0.2 s
_SMALLEST_ROW = 16  # bytes; a damaged tree of pages may seem to have more rows than the file has room for
_IMAGES = (
    "SELECT images.id, people.name, picture, hash, face, norm, quality, added, vector_sum, ifnull(face_sum, x'') FROM images "
    "JOIN people ON people.id = images.person LEFT JOIN faces ON faces.image = images.id ORDER BY images.id LIMIT ?"
)
_ENTRIES = (
    "SELECT images.id, people.name, norm, quality FROM images "
    "JOIN people ON people.id = images.person WHERE images.id > ? ORDER BY images.id LIMIT ?"
)
_WITHOUT = "SELECT id FROM images WHERE NOT EXISTS (SELECT 1 FROM faces WHERE image = images.id) ORDER BY id LIMIT 1"
_UPDATE = "UPDATE images SET norm = {}, vector_sum = ?, vector = ? WHERE id = ?"
_FIRST = "SELECT min(images.id) FROM images JOIN people ON people.id = images.person WHERE name = ?"
_BEGIN = "BEGIN IMMEDIATE"
_VECTOR = "SELECT vector_sum, vector FROM images WHERE id = ?"


class NewImage(NamedTuple):
    """An image to enrol."""

    person: str
    picture: str  # its name, for people to read
    hash: bytes  # of the bytes of the picture
    face: int  # number of the face in its picture
    quality: float  # the detector's score, 1 for an aligned crop
    embedding: np.ndarray  # (D,) raw
    pixels: np.ndarray | None  # (S, S, 3) uint8 RGB; None = the gallery keeps no picture of it


class Image(NamedTuple):
    """An enrolled image."""

    number: int
    person: str
    picture: str
    hash: bytes
    face: int
    norm: float
    quality: float
    added: int  # seconds since 1970
    vector_sum: bytes
    face_sum: bytes  # b"" without a picture


class Gallery(contextlib.AbstractContextManager["Gallery"]):
    """A gallery on disk. Several threads may use one object, several processes one file.

    Attributes:
        path: of the file.
        facts: what embedded its faces, when the gallery was opened or last read by this object.
    """

    def __init__(self, path: str | Path, patience: float = db.PATIENCE) -> None:
        """Open an existing gallery; ValueError if there is none, or it is damaged or hostile."""
        self.path, self.patience = Path(path), patience
        self._thread = threading.RLock()
        self._searchers: dict[tuple[str, str], Searcher] = {}
        self._changes = 0  # transactions of this object; SQLite counts those of others
        self._state, self._embedded = (-1, -1), -1  # that the searches have: changes of both kinds, re-embeddings
        self._database = db.open_database(self.path)
        self._file = self.path.stat()
        with self.reading():
            self._digest = self.facts.digest

    @classmethod
    def create(cls, path: str | Path, facts: db.Facts, patience: float = db.PATIENCE) -> "Gallery":
        """Make an empty gallery, or open the one that is there; ValueError if another file is there, or a damaged gallery."""
        db.create_database(Path(path), facts)
        return cls(path, patience)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- reading

    def images(self) -> list[Image]:
        """Return the images in the order of their numbers."""
        with self.reading():
            return [*self._images()]

    def _images(self) -> Iterator[Image]:
        kinds = (int, str, str, bytes, int, float, float, int, bytes, bytes)
        return (Image(*row) for row in self._rows(_IMAGES, kinds))

    def hashes(self) -> list[tuple[str, bytes]]:
        """Return person and hash of each image, person by person."""
        query = "SELECT people.name, hash FROM images JOIN people ON people.id = images.person ORDER BY images.person LIMIT ?"
        with self.reading():
            return [*self._rows(query, (str, bytes))]

    def _numbers(self) -> list[int]:
        return [number for (number,) in self._rows("SELECT id FROM images ORDER BY id LIMIT ?", (int,))]

    def count(self, what: str) -> int:
        """Return the number of people, images or faces."""
        with self.reading():
            return self._database.execute(f"SELECT count(*) FROM {what}").fetchone()[0]

    def people(self) -> dict[str, int]:
        """Return the number of images of each person, in the order of their names."""
        query = "SELECT people.name, count(*) FROM images JOIN people ON people.id = images.person GROUP BY people.id LIMIT ?"
        with self.reading():
            return dict(sorted(self._rows(query, (str, int))))

    def picture(self, number: int) -> np.ndarray | None:
        """Return the aligned face of an image (S, S, 3) uint8 RGB, None if there is none any more; ValueError if damaged."""
        with self.reading():
            there = self._database.execute("SELECT 1 FROM faces WHERE image = ?", (number,)).fetchone()
            return self._face(number) if there else None

    def _face(self, number: int) -> np.ndarray:
        checked, data = self._database.execute("SELECT face_sum, png FROM faces WHERE image = ?", (number,)).fetchone()
        if type(data) is not bytes or len(data) > db.MAX_FACE or _checksum(data) != checked:
            raise ValueError(f"{shown(self.path)}: the face of image {number} is damaged; remove and enrol it again")
        with prefix_errors(f"{shown(self.path)}: the face of image {number}"):
            pixels, size = decode_rgb(data), self.facts.image_size
            if pixels.shape[:2] != (size, size):
                raise ValueError(f"has {pixels.shape[1]} x {pixels.shape[0]} pixels, must have {size} x {size}; enrol it again")
            return pixels

    def search(self, embeddings: np.ndarray, k: int = 5, by: str = "image", weights: str = "norm") -> list[list[Match]]:
        """Return the k most similar people for each embedding (n, D), best first.

        Args:
            embeddings: of any length; a zero vector is similar to nobody.
            by: "image" = a person's score is that of the person's best image; "template" = that of the person's template.
            weights: of the images in a template, "norm" or "equal".

        Raises:
            ValueError: a vector is damaged, or the embeddings have another size.
        """
        if embeddings.ndim != 2 or embeddings.shape[1] != self.facts.embedding_size:
            raise ValueError(f"embeddings must be (n, {self.facts.embedding_size}), got {embeddings.shape}")
        with self.reading():  # so that the vectors are still there when they are read
            return self.searcher(by, weights).search(embeddings, k)

    def searcher(self, by: str = "image", weights: str = "norm") -> Searcher:
        """Return the search over the gallery as it is now; one by image takes changes over, others are made again after them.

        It searches within the same `reading()` only.
        """
        key = (by, weights)
        with self.reading():
            self._require_same_network()
            self._follow()
            if key not in self._searchers:
                self._searchers[key] = Searcher(self._entries(), self._vectors, by, weights)
            return self._searchers[key]

    def _follow(self) -> None:
        """Let the searches by image take over what anybody has changed, and forget the others; called in a transaction.

        An image's number is never given again, and it keeps person and vector until all images are embedded anew.
        """
        state = self._changes, self._database.execute("PRAGMA data_version").fetchone()[0]
        if state == self._state:
            return
        embedded = self._database.execute("SELECT count(*) FROM sqlite_sequence WHERE name = 'vectors'").fetchone()[0]
        followers = {key: old for key, old in self._searchers.items() if old.by == "image" and embedded == self._embedded}
        self._searchers, self._state, self._embedded = {}, state, embedded  # the others go before new ones take their memory
        with contextlib.suppress(MemoryError, ValueError, OSError, sqlite3.Error):  # the next search says what is damaged
            for key, searcher in followers.items():
                new = self._entries(int(searcher.numbers.max(initial=0)))
                count = self._database.execute("SELECT count(*) FROM images").fetchone()[0]
                if count != len(searcher.numbers) + len(new.numbers):
                    left = np.fromiter((row[0] for row in self._database.execute("SELECT id FROM images")), np.int64, count)
                    searcher.remove(np.setdiff1d(searcher.numbers, left, assume_unique=True))
                if new.people:
                    searcher.append(new, [self._database.execute(_FIRST, (name,)).fetchone()[0] for name in new.people])
                self._searchers[key] = searcher

    def check(self) -> int:
        """Read every byte of the gallery and return the number of faces; ValueError if something is damaged."""
        self._searchers.clear()  # one that followed changes has not read what it holds from the file
        self.searcher()  # reads and checks all vectors
        with self.reading():
            db.check_pages(self._database, self.path, "integrity_check")
            rows = progress(self._images(), None, "reading the names", "image", delay=5)
            with_face = [image.number for image in rows if image.face_sum]
        for number in progress(with_face, None, "reading the faces", "face", delay=5):
            self.picture(number)  # None if it was removed meanwhile: others may write between two faces
        return len(with_face)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Be in a read transaction: nobody commits until its end.

        Raises:
            FileNotFoundError: the file was deleted since it was opened.
            ValueError: another file is in its place.
        """
        with self._thread, db.database_errors(self.path):
            if self._database.in_transaction:  # inside another one of this thread
                yield
                return
            # an open file that was deleted would go on answering
            if not os.path.samestat(self.path.stat(), self._file):
                raise ValueError(f"{shown(self.path)}: is another file than the one that was opened; start again")
            self._database.execute("BEGIN")
            try:
                self.facts = db.read_facts(self._database, self.path)
                yield
            finally:
                with contextlib.suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")

    def _rows(self, query: str, kinds: tuple[type, ...], *values: int) -> Iterator[tuple]:
        """Yield the rows of a query, as many as the file has room for; ValueError if one has values of a wrong kind."""
        for row in self._database.execute(query, (*values, self.path.stat().st_size // _SMALLEST_ROW)):
            if tuple(map(type, row)) != kinds:
                raise ValueError(f"{shown(self.path)}: the row that begins with {row[0]!r:.20} has values of a wrong kind")
            yield row

    def _entries(self, after: int = -1 << 63) -> Entries:
        """Return all images, or those of higher numbers, checked."""
        numbers, lengths, owner = array("q"), array("d"), array("i")
        people: dict[str, int] = {}
        rows = self._rows(_ENTRIES, (int, str, float, float), after)
        for number, name, norm, quality in progress(rows, None, "reading the names", "image", delay=5):
            _require_weight(norm, quality, self.path, f": image {number}")
            numbers.append(number)
            lengths.append(norm * quality)
            owner.append(people.setdefault(name, len(people)))
        size = self.facts.embedding_size
        if 4 * size * len(numbers) > self.path.stat().st_size:
            raise ValueError(f"{shown(self.path)}: is damaged: it has no room for the vectors of its images; take a copy of it")
        return Entries(list(people), np.array(owner), np.array(numbers), np.array(lengths), size)

    def _vectors(self, numbers: np.ndarray) -> np.ndarray:
        """Return the unit vectors (n, D) float32 of images, checked."""
        found, damaged = bytearray(), []
        size = self.facts.embedding_size
        for number in numbers.tolist():
            checked, vector = self._database.execute(_VECTOR, (number,)).fetchone()
            if type(vector) is not bytes or len(vector) != 4 * size or _checksum(vector) != checked:
                damaged.append(number)
                vector = bytes(4 * size)
            found += vector
        rows = np.frombuffer(found, dtype="<f4").reshape(len(numbers), size)
        squares = np.einsum("nd,nd->n", rows, rows, dtype=np.float64)
        damaged = sorted({*damaged, *numbers[~(np.abs(squares - 1) < 1e-3)].tolist()})  # also NaN
        if damaged:
            raise ValueError(
                f"{shown(self.path)}: {len(damaged)} vector(s) or more are damaged, such as that of image {damaged[0]}; `face "
                f"gallery reembed {shown(self.path)} NETWORK` makes new ones from the faces"
            )
        return rows

    def _require_same_network(self) -> None:
        if self.facts.digest != self._digest:
            raise ValueError(f"{shown(self.path)}: was embedded anew by {self.facts.title} since it was opened; start again")

    # ---- writing

    def add(self, images: Sequence[NewImage], facts: db.Facts | None = None) -> list[int]:
        """Enrol images; return their numbers, 0 for those that were there already. They are safe when this returns.

        Args:
            facts: what found and embedded them; an empty gallery records it. None = what the gallery records.

        Raises:
            ValueError: an embedding is not finite, or zero, or of another size; a name is not allowed; the gallery was embedded
                by another network since it was opened; the disk is full. Nothing is enrolled.
        """
        names = [db.check_person(image.person) for image in images]
        rows = [db.unit_vector(image.embedding, (facts or self.facts).embedding_size, image.picture) for image in images]
        for image, (_, norm) in zip(images, rows, strict=True):
            _require_weight(norm, image.quality, image.picture)
        faces = [None if image.pixels is None else to_png(image.pixels) for image in images]
        numbers = list[int]()
        with self._writing() as database:
            if facts and self.facts != facts and database.execute("SELECT 1 FROM images LIMIT 1").fetchone() is None:
                db.record_facts(database, facts)
                self.facts, self._digest = facts, facts.digest
            self._require_same_network()
            for image, name, (vector, norm), face in zip(images, names, rows, faces, strict=True):
                database.execute("INSERT OR IGNORE INTO people (name) VALUES (?)", (name,))
                person = database.execute("SELECT id FROM people WHERE name = ?", (name,)).fetchone()[0]
                values = (person, image.hash, image.face, db.picture_name(image.picture), norm, float(image.quality))
                done = database.execute(
                    "INSERT OR IGNORE INTO images (person, hash, face, picture, norm, quality, added, vector_sum, vector) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (*values, int(time.time()), _checksum(vector), vector),
                )
                is_new = done.rowcount == 1  # otherwise another process was faster
                numbers.append(int(done.lastrowid or 0) if is_new else 0)
                if is_new and face is not None:
                    database.execute("INSERT INTO faces VALUES (?, ?, ?)", (numbers[-1], _checksum(face), face))
        return numbers

    def remove(self, people: Sequence[str] = (), numbers: Sequence[int] = ()) -> int:
        """Forget people or single images; return how many images. When this returns their bytes are overwritten with zeros.

        Raises:
            ValueError: somebody or an image is not in the gallery; nothing is removed then.
        """
        gone: dict[int, int] = {}  # image: person
        with self._writing() as database:
            for name in people:
                query = "SELECT images.id, people.id FROM images JOIN people ON people.id = images.person WHERE name = ?"
                if not (found := database.execute(query, (name,)).fetchall()):
                    known = [row[0] for row in self._rows("SELECT name FROM people LIMIT min(?, ?)", (str,), _ALIKE)]
                    raise ValueError(f"{shown(self.path)}: nobody is called {name!r:.300}.{did_you_mean(name, known)}")
                gone.update(found)
            for number in numbers:
                query = "SELECT id, person FROM images WHERE id = ?"  # no image is number 0
                if not (found := database.execute(query, (0 if number >> 63 else number,)).fetchall()):
                    raise ValueError(f"{shown(self.path)}: has no image {number}")
                gone.update(found)
            database.executemany("DELETE FROM faces WHERE image = ?", zip(gone))
            database.executemany("DELETE FROM images WHERE id = ?", zip(gone))
            empty = "DELETE FROM people WHERE id = ? AND NOT EXISTS (SELECT 1 FROM images WHERE person = people.id)"
            database.executemany(empty, zip({*gone.values()}))
        with self._thread, contextlib.suppress(MemoryError):  # memory forgets them now, too
            before, self._searchers = self._searchers, {}
            for key, searcher in before.items():
                if searcher.by == "image":
                    searcher.remove([*gone])
                    self._searchers[key] = searcher
        return len(gone)

    def reembed(self, facts: db.Facts, embed: Embed, wrap: Wrap) -> int:
        """Embed all images again, from their faces in the gallery; return how many. Until the end the old vectors serve.

        Args:
            facts: of the new network; detector and which are those of the gallery.
            embed: its embeddings.
            wrap: for example a progress bar.

        Raises:
            ValueError: the gallery lacks faces, or one is damaged or has no embedding; nothing changes then.
        """
        with self._writing() as database:
            numbers = self._numbers()
            self._require_faces(facts)
            found, waiting = list[tuple[float, bytes, bytes, int]](), iter(wrap(numbers, len(numbers)))
            while part := list(itertools.islice(waiting, _BATCH)):
                raw = embed(np.stack([self._face(number) for number in part]))
                for number, row in zip(part, raw, strict=True):
                    vector, norm = db.unit_vector(row, facts.embedding_size, f"image {number}")
                    found.append((norm, _checksum(vector), vector, number))
            # only now, because a large transaction may lock readers out
            database.executemany(_UPDATE.format("?"), progress(found, None, "writing the vectors", "vector", delay=5))
            db.record_facts(database, facts)
        return len(numbers)

    def compact(self) -> None:
        """Write the file anew, with what is in the gallery and nothing else.

        Nobody can read it meanwhile. It needs the room of two copies, one in TMPDIR, and gives it back without overwriting it.
        """
        with self._writing() as database:
            self._patiently("COMMIT")  # VACUUM is a transaction of its own
            database.execute("PRAGMA temp_store = FILE")
            try:
                with db.showing(database, "writing the file anew"):
                    self._patiently("VACUUM")
            finally:
                database.execute("PRAGMA temp_store = MEMORY")
            self._patiently(_BEGIN)

    def copy_to(self, path: Path) -> None:
        """Copy the gallery, as it is at one moment, into an empty file."""
        with self._thread, db.database_errors(self.path), contextlib.closing(sqlite3.connect(path)) as target:
            self._database.backup(target)

    def adapt(self, facts: db.Facts, adapt: Embed, lengths: float) -> int:
        """Replace the vectors by what a map makes of them; return how many. Faces of another size than the facts' are erased.

        Args:
            adapt: unit vectors (n, D) float32 -> rows (n, E).
            lengths: factor on the lengths of the embeddings.

        Raises:
            ValueError: a vector is damaged, or the map gives no direction for one; nothing changes then.
        """
        with self._writing() as database:
            numbers = self._numbers()
            for low in progress(range(0, len(numbers), _ADAPTED), None, "adapting", "block", delay=5):
                part = numbers[low : low + _ADAPTED]
                rows = zip(part, adapt(self._vectors(np.array(part))), strict=True)
                vectors = ((number, db.unit_vector(row, facts.embedding_size, f"image {number}")[0]) for number, row in rows)
                found = ((lengths, _checksum(vector), vector, number) for number, vector in vectors)
                database.executemany(_UPDATE.format("norm * ?"), found)
            if facts.image_size != self.facts.image_size:
                database.execute("DELETE FROM faces")
            db.record_facts(database, facts)
        return len(numbers)

    def _require_faces(self, facts: db.Facts) -> None:
        """Raise ValueError unless a network can embed the faces that the gallery has."""
        size, other = self.facts.image_size, facts.image_size
        if other != size:
            raise ValueError(
                f"{shown(self.path)}: its faces have {size} x {size} pixels, and the network takes {other} x {other}; enrol "
                "the pictures into a new gallery"
            )
        if without := self._database.execute(_WITHOUT).fetchone():
            raise ValueError(
                f"{shown(self.path)}: has no face of image {without[0]}, which was enrolled with --no-pictures; enrol the "
                "pictures into a new gallery"
            )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Be the only writer, in a transaction that is committed at the end, or rolled back if there is an error.

        PERSIST keeps the journal after the transaction, so that it can be overwritten before it is deleted.
        """
        database = self._database
        with self._thread, db.database_errors(self.path):
            database.execute("PRAGMA query_only = OFF")
            database.execute("PRAGMA journal_mode = PERSIST")
            try:
                self._patiently(_BEGIN)
                try:
                    self.facts = db.read_facts(database, self.path)
                    yield database
                    self._changes += 1
                    self._patiently("COMMIT")  # for those who read
                finally:
                    if database.in_transaction:
                        database.execute("ROLLBACK")
                    self._patiently(_BEGIN)
                    db.overwrite_journal(self.path)
                    database.execute("ROLLBACK")
                    database.execute("PRAGMA journal_mode = DELETE")
            finally:
                with contextlib.suppress(sqlite3.Error):
                    if database.in_transaction:
                        database.execute("ROLLBACK")
                    database.execute("PRAGMA query_only = ON")

    def _patiently(self, statement: str) -> None:
        """Execute what waits for others; say so if that takes a while."""
        patience = max(0.0, self.patience - _SILENT)
        for seconds in (min(_SILENT, self.patience), patience):
            self._database.execute(f"PRAGMA busy_timeout = {int(1000 * seconds)}")
            try:
                self._database.execute(statement)
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or seconds is patience:
                    raise
                print(one_line(f"waiting for another process, which uses {shown(self.path)}"), file=sys.stderr, flush=True)


def _checksum(data: bytes) -> bytes:
    """Return the checksum of a vector or a face; it finds damage, not deliberate changes."""
    return xxhash.xxh3_64_digest(data)


def _require_weight(norm: float, quality: float, file: str | Path, image: str = "") -> None:
    """Raise ValueError unless norm times quality can be the weight of an image in a template, which would be NaN."""
    if not (norm > 0 and quality >= 0 and norm * quality < _HEAVIEST):
        place = f"{shown(file)}{image}"
        raise ValueError(f"{place}: its embedding has length {norm:g} and its face a score of {quality:g}; remove it")
