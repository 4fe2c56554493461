"""Writes the files of a gallery anew: without the gaps of removed images, or with the vectors of another network.

The new files are a new generation beside the old ones, which serve until one commit names the new generation. A process that is
killed before leaves the gallery as it was.
Shapes: D = embedding size.
"""

import itertools
from collections.abc import Callable, Iterable

import numpy as np

from utils.files import shown
from utils.image import decode_rgb

from .files import FACES, VECTORS, DataFile, checksum, data_file
from .format import DATABASE, Facts, check_pages, database_errors
from .records import Image, face_bytes, read_images, unit_vector
from .store import Gallery

Embed = Callable[[np.ndarray], np.ndarray]  # crops (n, S, S, 3) uint8 -> raw embeddings (n, D)
Wrap = Callable[[Iterable[Image], int], Iterable[Image]]  # shows the progress over so many images
_BATCH = 64  # images embedded at once
_ROWS = 4096  # vectors copied at once


def compact(gallery: Gallery) -> int:
    """Write the files without gaps; return the bytes that this freed.

    Raises:
        ValueError: a vector or a face is damaged; nothing changes then.
    """
    path, folder = gallery.folder / DATABASE, gallery.folder
    with gallery.writing() as state:
        images = read_images(gallery.database, path)
        width = gallery.facts.embedding_size
        end = 0
        with (
            DataFile(data_file(folder, VECTORS, state.vectors)) as old,
            DataFile(data_file(folder, VECTORS, state.vectors + 1), new=True) as new,
        ):
            for begin in range(0, len(images), _ROWS):
                part = images[begin : begin + _ROWS]
                vectors = old.read_rows(np.array([image.vector for image in part]), width)
                for image, row in zip(part, vectors, strict=True):
                    if checksum(row.data) != image.vector_sum:
                        raise ValueError(f"{shown(old.path)}: the vector of image {image.number} is damaged; re-embed first")
                new.write(vectors.data, begin * width * 4)
            new.flush()
        with (
            DataFile(data_file(folder, FACES, state.faces)) as old,
            DataFile(data_file(folder, FACES, state.faces + 1), new=True) as new,
        ):
            for image in images:
                data = face_bytes(image, old) if image.face_size else b""
                new.write(data, end)
                gallery.database.execute("UPDATE images SET face_at = ? WHERE id = ?", (end, image.number))
                end += len(data)
            new.flush()
        _renumber(gallery, images)
        gallery.database.execute("UPDATE facts SET vectors = vectors + 1, faces = faces + 1, faces_end = ?", (end,))
    gallery.clean(vacuum=True)
    return (state.num_rows - len(images)) * width * 4 + state.faces_end - end


def reembed(gallery: Gallery, facts: Facts, embed: Embed, wrap: Wrap) -> int:
    """Embed all images again, from their faces in the gallery; return how many. Until the end the old vectors serve.

    Args:
        facts: of the new network; detector and which are those of the gallery.
        embed: its embeddings.
        wrap: for example a progress bar.

    Raises:
        ValueError: the gallery lacks faces, or one is damaged or has no embedding; nothing changes then.
    """
    path, folder = gallery.folder / DATABASE, gallery.folder
    with gallery.writing() as state:
        images = read_images(gallery.database, path)
        _require_faces(gallery, images, facts)
        found: list[tuple[float, bytes, int]] = []
        with (
            DataFile(data_file(folder, FACES, state.faces)) as faces,
            DataFile(data_file(folder, VECTORS, state.vectors + 1), new=True) as new,
        ):
            waiting = iter(wrap(images, len(images)))
            while part := list(itertools.islice(waiting, _BATCH)):
                raw = embed(np.stack([decode_rgb(face_bytes(image, faces)) for image in part]))
                for image, row in zip(part, raw, strict=True):
                    unit, norm = unit_vector(row, facts.embedding_size, image.picture)
                    new.write(unit.data, len(found) * facts.embedding_size * 4)
                    found.append((norm, checksum(unit.data), image.number))
            new.flush()
        # only now, because a large transaction may lock readers out
        gallery.database.executemany("UPDATE images SET norm = ?, vector_sum = ? WHERE id = ?", found)
        _renumber(gallery, images)
        gallery.database.execute(
            "UPDATE facts SET title = ?, digest = ?, embedding_size = ?, vectors = vectors + 1",
            (facts.title, facts.digest, facts.embedding_size),
        )
    gallery.clean()
    return len(images)


def _require_faces(gallery: Gallery, images: list[Image], facts: Facts) -> None:
    """Raise ValueError unless a network can embed the faces that the gallery has."""
    size, other = gallery.facts.image_size, facts.image_size
    if other != size:
        raise ValueError(
            f"{shown(gallery.folder)}: its faces have {size} x {size} pixels, and the network takes {other} x {other}; enrol "
            "the pictures into a new gallery"
        )
    without = next((image for image in images if not image.face_size), None)
    if without:
        raise ValueError(
            f"{shown(gallery.folder)}: has no face of image {without.number}, which was enrolled with --no-pictures; enrol the "
            "pictures into a new gallery"
        )


def _renumber(gallery: Gallery, images: list[Image]) -> None:
    """Give the images consecutive rows in the order of their numbers, inside a transaction."""
    database = gallery.database
    database.execute("UPDATE images SET vector = -1 - vector")  # so that no row is taken while the new ones are given
    database.executemany("UPDATE images SET vector = ? WHERE id = ?", [(row, one.number) for row, one in enumerate(images)])
    database.execute("UPDATE facts SET num_rows = ?", (len(images),))


def check(gallery: Gallery) -> int:
    """Read every byte of a gallery that counts; return the number of faces.

    Raises:
        ValueError: something is damaged.
    """
    path = gallery.folder / DATABASE
    gallery.searcher()  # reads and checks all vectors
    with database_errors(path), gallery.reading() as state:
        check_pages(gallery.database, path, "integrity_check")
        images = [image for image in read_images(gallery.database, path) if image.face_size]
        with DataFile(data_file(gallery.folder, FACES, state.faces)) as file:
            for image in images:
                decode_rgb(face_bytes(image, file))
    return len(images)
