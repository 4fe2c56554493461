"""Embeddings of the same pictures by two networks: from two tables of `face embed`, or from a folder of pictures."""

import argparse
import copy
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.files import check_file, reading, shown
from utils.text import one_line, pip_install

from ..embed.adapter import Pairs, Side, unit
from ..embed.embedder import open_embedder
from ..faces.detector import open_detector
from ..faces.pictures import Rejected
from .commands import embed_faces, find_pictures, print_rejected, read_faces, recorded_network, with_people


class Embedded(NamedTuple):
    """The faces of pictures by one network: (name, number) -> (person, embedding, its length before)."""

    network: Side
    faces: dict[tuple[str, int], tuple[str, np.ndarray, float]]


def read_pairs(options: argparse.Namespace) -> tuple[Pairs, Side, Side]:
    """Return the faces that both have, and the networks.

    Args:
        options: `old` and `new`, tables, or networks with `folder`, and then those of networks, detectors and people.

    Raises:
        ValueError: a table or network cannot be read, or they have no faces in common.
    """
    old, new = (_embed(options, path) if options.folder else _table(path) for path in (options.old, options.new))
    if old.network.digest == new.network.digest:
        raise ValueError(
            f"{shown(options.old)} and {shown(options.new)} are of the same network, whose galleries need no adapter"
        )
    common = sorted(old.faces.keys() & new.faces.keys())
    if not common:
        raise ValueError(f"{shown(options.old)} and {shown(options.new)} have no faces in common; embed the same folder twice")
    rows = [[side.faces[key] for key in common] for side in (old, new)]
    people = np.array([person for person, _, _ in rows[0]])
    if "" in people:
        raise ValueError(f"{common[int(np.argmax(people == ''))][0]}: lies in no sub-folder, whose name would be the person's")
    first, second = (unit(np.stack([vector for _, vector, _ in side])) for side in rows)
    norms, new_norms = (np.array([norm for _, _, norm in side], dtype=np.float64) for side in rows)
    return Pairs(first, second, people, norms, new_norms), old.network, new.network


def _embed(options: argparse.Namespace, path: Path) -> Embedded:
    options = copy.copy(options)
    options.run = path
    recorded = recorded_network(options)
    embedder, detector = open_embedder(options), open_detector(options)
    pictures, rejected = with_people(find_pictures(options.folder), options.person_from, None)
    faces = read_faces(pictures, detector, embedder.image_size, options.which, options.threads)
    found, bad = {}, list[Rejected](rejected)
    for batch in embed_faces(faces, len(pictures), "embedding", embedder, bad):
        for face in batch:
            norm = float(np.linalg.norm(face.embedding.astype(np.float64)))
            found[face.picture.name, face.crop.number] = (face.picture.person, face.embedding, norm)
    print_rejected(bad)
    title = one_line(embedder.title)
    return Embedded(Side(title, embedder.digest, embedder.embedding_size, embedder.image_size, recorded), found)


def _table(path: Path) -> Embedded:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ValueError(f"a table is read with pyarrow ({error}): {pip_install('pyarrow')}") from None
    with reading(path):
        check_file(path)
    try:
        table = parquet.read_table(path)
        said = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
        names, numbers, people, norms = (table[key].to_pylist() for key in ("name", "face", "person", "norm"))
        vectors = np.array(table["embedding"].to_pylist(), dtype=np.float32)
        side = Side(said["network"], said["digest"], vectors.shape[1], int(said["image_size"]))
        rows = zip(people, vectors, norms, strict=True)
        return Embedded(side, dict(zip(zip(names, numbers, strict=True), rows, strict=True)))
    except Exception as error:  # of many kinds, for a damaged or an older table
        raise ValueError(f"{shown(path)}: is no .parquet of this version's `face embed` ({one_line(error)[:200]})") from None
