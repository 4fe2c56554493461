"""A gallery on disk: people, their images, a unit vector and an aligned face of each image.

What survives a kill or a power cut: vectors and faces are written and flushed first, then the database commits. From then on
an image counts. Readers see one state from first to last: a commit waits until they have read what they need. Erasing is the
other way round: after the commit nobody refers to the bytes, which are then overwritten with zeros. The table `erasures` tells
the next process what a killed one has not overwritten.

Shapes: N = images of the gallery, n = images of a call, D = embedding size, S = size of a face.
"""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.files import shown
from utils.image import decode_rgb
from utils.suggest import did_you_mean

from .files import FACES, VECTORS, DataFile, checksum, data_file, delete_other_generations, writer_lock
from .format import (
    DATABASE,
    LOCK,
    PATIENCE,
    Facts,
    State,
    check_person,
    create_database,
    database_errors,
    most_rows,
    open_database,
    picture_name,
    read_facts,
)
from .records import Image, NewImage, check_weight, face_bytes, read_entries, read_images, to_png, unit_vector
from .search import Match, Searcher


class Gallery:
    """A gallery on disk. Several threads may use one object, several processes one folder.

    Attributes:
        folder: its path.
        facts: what embedded its faces, when the gallery was opened or last changed by this object.
    """

    def __init__(self, folder: Path, patience: float = PATIENCE) -> None:
        """Open an existing gallery.

        Raises:
            ValueError: there is none, or it is damaged or hostile.
        """
        self.folder, self.patience = folder, patience
        self._path = folder / DATABASE
        if not folder.is_dir():
            kind = "is a file, and a gallery is a folder" if folder.exists() else "no such gallery"
            raise ValueError(f"{shown(folder)}: {kind}; python -m scripts.deploy.enrol makes one")
        if not self._path.exists() and not self._path.is_symlink():
            raise ValueError(
                f"{shown(folder)}: holds no {DATABASE}, so it is no gallery; python -m scripts.deploy.enrol makes one"
            )
        self._database = open_database(self._path)
        self._thread = threading.RLock()
        self._searchers: dict[tuple[str, str], tuple[int, Searcher]] = {}
        with database_errors(self._path):
            self.facts, _ = read_facts(self._database, self._path)
        self._digest = self.facts.digest

    @classmethod
    def create(cls, folder: Path, facts: Facts, patience: float = PATIENCE) -> "Gallery":
        """Make an empty gallery in a new or empty folder, or open the one that is there.

        Raises:
            ValueError: the folder has other files, or a damaged gallery.
        """
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{shown(folder)}: is a file, and a gallery is a folder; name another one")
        if not (folder / DATABASE).exists():
            # asked again, because another process may be making the gallery
            if folder.exists() and (other := _files_of_others(folder)) and not (folder / DATABASE).exists():
                raise ValueError(
                    f"{shown(folder)}: holds {shown(other)} and no gallery; name a new or empty folder for the gallery"
                )
            folder.mkdir(parents=True, exist_ok=True)
            with writer_lock(folder, patience):
                if not (folder / DATABASE).exists():
                    for kind in (VECTORS, FACES):
                        with DataFile(data_file(folder, kind, 1), new=True) as file:
                            file.flush()
                    create_database(folder / DATABASE, facts)
        return cls(folder, patience)

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def __enter__(self) -> "Gallery":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- reading

    def images(self) -> list[Image]:
        """Return the images in the order of their numbers."""
        with self.reading():
            return read_images(self._database, self._path)

    def people(self) -> dict[str, int]:
        """Return the number of images of each person, in the order of their names."""
        with self.reading():
            query = (
                "SELECT people.name, count(*) FROM images JOIN people ON people.id = images.person GROUP BY people.id LIMIT ?"
            )
            return dict(sorted(self._database.execute(query, (most_rows(self._path),)).fetchall()))

    def picture(self, number: int) -> np.ndarray | None:
        """Return the aligned face of an image (S, S, 3) uint8 RGB, None if the gallery has none (any more).

        Raises:
            ValueError: it is damaged.
        """
        with self.reading() as state:
            found = read_images(self._database, self._path, "WHERE images.id = ?", (number,))
            if not found or not found[0].face_size:
                return None
            with DataFile(data_file(self.folder, FACES, state.faces)) as file:
                return decode_rgb(face_bytes(found[0], file))

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
        return self.searcher(by, weights).search(embeddings, k)

    def searcher(self, by: str = "image", weights: str = "norm") -> Searcher:
        """Return the search over the gallery as it is now; it is read again only if it has changed."""
        key = (by, weights)
        with self._thread:
            with self.reading() as state:
                known = self._searchers.get(key)
                self._require_same_network()
                if known is not None and known[0] == state.changes:
                    return known[1]
                entries = read_entries(self._database, self.folder, self.facts, state)
            if known is not None:
                del self._searchers[key]  # before the new one takes as much memory
            searcher = Searcher(entries, by, weights)
            self._searchers = {other: (at, old) for other, (at, old) in self._searchers.items() if at == state.changes}
            self._searchers[key] = state.changes, searcher
            return searcher

    def _require_same_network(self) -> None:
        if self.facts.digest != self._digest:
            raise ValueError(f"{shown(self.folder)}: was embedded anew by {self.facts.title} since it was opened; start again")

    @contextlib.contextmanager
    def reading(self) -> Iterator[State]:
        """Be in a read transaction: nobody commits until its end."""
        with self._thread, database_errors(self._path):
            if self._database.in_transaction:  # inside another one of this thread
                yield read_facts(self._database, self._path)[1]
                return
            self._database.execute("BEGIN")
            try:
                self.facts, state = read_facts(self._database, self._path)
                yield state
            finally:
                with contextlib.suppress(sqlite3.Error):
                    self._database.execute("ROLLBACK")

    # ---- writing

    def add(self, images: Sequence[NewImage]) -> list[int]:
        """Enrol images; return their numbers, 0 for those that were there already. They are safe when this returns.

        Raises:
            ValueError: an embedding is not finite, or zero, or of another size; a name is not allowed; the gallery was embedded
                by another network since it was opened. Nothing is enrolled.
            OSError: the disk is full, for example.
        """
        names = [check_person(image.person) for image in images]
        rows = [unit_vector(image.embedding, self.facts.embedding_size, image.picture) for image in images]
        for image, (_, norm) in zip(images, rows, strict=True):
            check_weight(norm, image.quality, shown(image.picture))
        faces = [b"" if image.pixels is None else to_png(image.pixels) for image in images]
        numbers = []
        with self.writing() as state, self._files(state) as (vectors, stored):
            self._require_same_network()
            num_rows, end, width = state.num_rows, state.faces_end, self.facts.embedding_size
            for image, name, (unit, norm), face in zip(images, names, rows, faces, strict=True):
                self._database.execute("INSERT OR IGNORE INTO people (name) VALUES (?)", (name,))
                person = self._database.execute("SELECT id FROM people WHERE name = ?", (name,)).fetchone()[0]
                key = (person, image.hash, image.face)
                query = "SELECT 1 FROM images WHERE person = ? AND hash = ? AND face = ?"
                if self._database.execute(query, key).fetchone():  # another process was faster
                    numbers.append(0)
                    continue
                stored_as = (num_rows, checksum(unit.data), end, len(face), checksum(face))
                done = self._database.execute(
                    "INSERT INTO images (person, hash, face, picture, norm, quality, added, vector, vector_sum, face_at, "
                    "face_size, face_sum) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (*key, picture_name(image.picture), norm, float(image.quality), int(time.time()), *stored_as),
                )
                numbers.append(int(done.lastrowid or 0))
                vectors.write(unit.data, num_rows * width * 4)
                stored.write(face, end)
                num_rows, end = num_rows + 1, end + len(face)
            vectors.flush()
            stored.flush()
            self._database.execute("UPDATE facts SET num_rows = ?, faces_end = ?", (num_rows, end))
        return numbers

    def remove(self, people: Sequence[str] = (), numbers: Sequence[int] = ()) -> int:
        """Forget people or single images; return how many images. When this returns their bytes are overwritten with zeros.

        Raises:
            ValueError: somebody or an image is not in the gallery; nothing is removed then.
        """
        with self.writing():
            images = read_images(self._database, self._path)
            names, there = {image.person for image in images}, {image.number for image in images}
            for name in people:
                if name not in names:
                    raise ValueError(f"{shown(self.folder)}: nobody is called {name!r:.300}.{did_you_mean(name, names)}")
            for number in numbers:
                if number not in there:
                    raise ValueError(f"{shown(self.folder)}: has no image {number}")
            all_of, single = set(people), set(numbers)
            gone = [image for image in images if image.person in all_of or image.number in single]
            size = 4 * self.facts.embedding_size
            for image in gone:
                self._database.execute("DELETE FROM images WHERE id = ?", (image.number,))
                for erasure in ((VECTORS, image.vector * size, size), (FACES, image.face_at, image.face_size)):
                    self._database.execute("INSERT INTO erasures (kind, at, size) VALUES (?, ?, ?)", erasure)
            self._database.execute("DELETE FROM people WHERE id NOT IN (SELECT person FROM images)")
        self.clean()
        return len(gone)

    def clean(self, vacuum: bool = False) -> None:
        """Overwrite what was removed, and delete files that no longer count; what a killed process left, too.

        Args:
            vacuum: also write the database anew, without free pages.
        """
        with self.writing(changes=False):
            pass  # it begins with that
        if vacuum:
            with self._thread, database_errors(self._path), writer_lock(self.folder, self.patience):
                self._database.execute("PRAGMA query_only = OFF")
                self._database.execute("VACUUM")
                self._database.execute("PRAGMA query_only = ON")

    @contextlib.contextmanager
    def writing(self, changes: bool = True) -> Iterator[State]:
        """Be the only writer, in a transaction that is committed at the end, or rolled back if there is an error."""
        with self._thread, database_errors(self._path), writer_lock(self.folder, self.patience):
            self._database.execute("PRAGMA query_only = OFF")
            try:
                self._clean()
                self._database.execute("BEGIN IMMEDIATE")
                self.facts, state = read_facts(self._database, self._path)
                yield state
                if changes:
                    self._database.execute("UPDATE facts SET changes = changes + 1")
                self._database.execute("COMMIT")
            finally:
                with contextlib.suppress(sqlite3.Error):
                    if self._database.in_transaction:
                        self._database.execute("ROLLBACK")
                    self._database.execute("PRAGMA query_only = ON")

    def _clean(self) -> None:
        _, state = read_facts(self._database, self._path)
        delete_other_generations(self.folder, state.vectors, state.faces)
        waiting = self._database.execute("SELECT id, kind, at, size FROM erasures LIMIT ?", (most_rows(self._path),)).fetchall()
        if not waiting:
            return
        with self._files(state) as files:
            for _, kind, at, size in waiting:
                if kind in (VECTORS, FACES) and type(at) is int and type(size) is int and at >= 0 and size > 0:
                    files[kind == FACES].erase(at, size)
            for file in files:
                file.flush()
        self._database.execute("BEGIN IMMEDIATE")
        self._database.executemany("DELETE FROM erasures WHERE id = ?", [row[:1] for row in waiting])
        self._database.execute("COMMIT")

    @contextlib.contextmanager
    def _files(self, state: State) -> Iterator[tuple[DataFile, DataFile]]:
        paths = data_file(self.folder, VECTORS, state.vectors), data_file(self.folder, FACES, state.faces)
        with DataFile(paths[0], write=True) as first, DataFile(paths[1], write=True) as second:
            yield first, second

    @property
    def database(self) -> Any:
        """The connection, for what happens inside `writing`."""
        return self._database


def _files_of_others(folder: Path) -> str:
    """Return a name in the folder that a killed creation of a gallery did not leave there, "" if there is none."""
    ours = {LOCK, f"{DATABASE}.unfinished", f"{DATABASE}.unfinished-journal"}
    empty = {data_file(folder, kind, 1).name for kind in (VECTORS, FACES)}
    names = (
        path.name for path in folder.iterdir() if path.name not in ours and not (path.name in empty and not path.stat().st_size)
    )
    return min(names, default="")
