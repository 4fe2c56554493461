"""The images of a gallery: what is enrolled, what the database has of it, and how vectors and faces are stored.

Shapes: D = embedding size, S = size of a face.
"""

import sqlite3
from array import array
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from utils.files import shown

from .files import VECTORS, DataFile, checksum, data_file
from .format import DATABASE, MAX_FACE, Facts, State, most_rows
from .search import Entries

_IMAGES = (
    "SELECT images.id, people.name, picture, hash, face, norm, quality, added, vector, vector_sum, face_at, face_size, "
    "face_sum FROM images JOIN people ON people.id = images.person"
)

_HEAVIEST = 1e30  # length of an embedding times score; float32 ends at 3e38, and a person has several images


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
    """An enrolled image, as the database has it."""

    number: int
    person: str
    picture: str
    hash: bytes
    face: int
    norm: float
    quality: float
    added: int  # seconds since 1970
    vector: int  # row
    vector_sum: bytes
    face_at: int
    face_size: int  # bytes, 0 without a picture
    face_sum: bytes


def read_images(database: sqlite3.Connection, path: Path, where: str = "", values: tuple[object, ...] = ()) -> list[Image]:
    """Return the images in the order of their numbers.

    Args:
        path: of the database, for errors.
        where: a condition of this program's, with its values.
    """
    rows = database.execute(f"{_IMAGES} {where} ORDER BY images.id LIMIT ?", (*values, most_rows(path))).fetchall()
    kinds = (int, str, str, bytes, int, float, float, int, int, bytes, int, int, bytes)
    for row in rows:
        if tuple(map(type, row)) != kinds:
            raise ValueError(f"{shown(path)}: the row of image {row[0]!r:.20} has values of a wrong kind")
    return [Image(*row) for row in rows]


def face_bytes(image: Image, file: DataFile) -> bytes:
    """Return the encoded face of an image from the open file of faces; ValueError if it is damaged."""
    data = file.read(image.face_at, image.face_size) if 0 < image.face_size <= MAX_FACE and image.face_at >= 0 else b""
    if checksum(data) != image.face_sum:
        raise ValueError(f"{shown(file.path)}: the face of image {image.number} is damaged; remove and enrol it again")
    return data


def read_entries(database: sqlite3.Connection, folder: Path, facts: Facts, state: State) -> Entries:
    """Return all images and their vectors, checked; inside a read transaction.

    Raises:
        ValueError: a vector is missing or damaged.
    """
    path, width = folder / DATABASE, facts.embedding_size
    numbers, rows, norms, qualities = array("q"), array("q"), array("d"), array("d")
    people: list[str] = []
    sums: list[bytes] = []
    names: dict[str, str] = {}  # one object a person
    query = (
        "SELECT images.id, people.name, norm, quality, vector, vector_sum FROM images JOIN people ON people.id = images.person "
        "ORDER BY images.id LIMIT ?"
    )
    for row in database.execute(query, (most_rows(path),)):
        if tuple(map(type, row)) != (int, str, float, float, int, bytes):
            raise ValueError(f"{shown(path)}: the row of image {row[0]!r:.20} has values of a wrong kind")
        numbers.append(row[0])
        norms.append(row[2])
        qualities.append(row[3])
        rows.append(row[4])
        people.append(names.setdefault(row[1], row[1]))
        sums.append(row[5])
    lengths, scores = np.array(norms), np.array(qualities)
    with np.errstate(over="ignore", invalid="ignore"):
        sound = (lengths > 0) & (scores >= 0) & (lengths * scores < _HEAVIEST)
    for place in np.flatnonzero(~sound)[:1]:
        check_weight(norms[place], qualities[place], f"{shown(path)}: image {numbers[place]}")
    places = np.array(rows, dtype=np.int64)
    path = data_file(folder, VECTORS, state.vectors)
    fix = f"python -m scripts.deploy.gallery reembed {shown(folder)} NETWORK makes new ones from the faces"
    if len(places) and (places.min() < 0 or places.max() >= state.num_rows or len(np.unique(places)) < len(places)):
        raise ValueError(f"{shown(folder / DATABASE)}: row numbers of vectors are wrong; {fix}")
    with DataFile(path) as file:
        if file.size < state.num_rows * width * 4:
            raise ValueError(
                f"{shown(path)}: is cut short: {file.size:,} bytes for {state.num_rows:,} vectors of {4 * width}; {fix}"
            )
        vectors = file.read_rows(places, width)
    bad = [number for number, row, known in zip(numbers, vectors, sums, strict=True) if checksum(row.data) != known]
    squares = np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
    bad += [numbers[place] for place in np.flatnonzero(~(np.abs(squares - 1) < 1e-3))]  # also NaN
    if bad:
        raise ValueError(f"{shown(path)}: {len(set(bad))} vector(s) are damaged, such as that of image {bad[0]}; {fix}")
    return Entries(people, np.array(numbers, dtype=np.int64), vectors, lengths, scores)


def check_weight(norm: float, quality: float, image: str) -> None:
    """Raise ValueError unless norm times quality can be the weight of an image in a template, which would be NaN."""
    if not (norm > 0 and quality >= 0 and norm * quality < _HEAVIEST):
        raise ValueError(
            f"{image}: its embedding has length {norm:g} and its face the score {quality:g}, which cannot be; remove it"
        )


def unit_vector(embedding: np.ndarray, size: int, picture: str) -> tuple[np.ndarray, float]:
    """Return the unit vector (D,) float32 of an embedding and its norm."""
    if embedding.shape != (size,):
        raise ValueError(f"{shown(picture)}: an embedding must be ({size},), got {embedding.shape}")
    wide = embedding.astype(np.float64)
    norm = float(np.linalg.norm(wide))
    if not np.isfinite(norm) or norm < 1e-12:
        raise ValueError(
            f"{shown(picture)}: its embedding is {'zero' if norm == 0 else f'of length {norm:g}'}, so it has no direction"
        )
    return (wide / norm).astype("<f4"), norm


def to_png(pixels: np.ndarray) -> bytes:
    """Return (S, S, 3) uint8 RGB as a PNG: lossless, so that embedding it again gives what the picture gave."""
    return cv2.imencode(".png", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))[1].tobytes()
