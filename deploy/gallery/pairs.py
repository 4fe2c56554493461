"""Embeddings of the same pictures by two networks: from two tables of `face embed`, or from a folder of pictures."""

import argparse
import copy
from pathlib import Path

import numpy as np

from eval.embedding_table import read_table
from eval.verification import unit_rows
from utils.files import shown
from utils.text import one_line

from ..embed.adapter import Pairs, Side
from ..embed.embedder import open_embedder
from ..faces.detector import open_detector
from ..faces.pictures import Rejected
from .commands import embed_faces, find_pictures, print_rejected, read_faces, recorded_network, with_people

_Faces = dict[tuple[str, int], tuple[str, np.ndarray, float]]  # (name, number) -> (person, embedding, its length before)


def read_pairs(options: argparse.Namespace) -> tuple[Pairs, Side, Side]:
    """Return the faces that both have, and the networks.

    Args:
        options: `old` and `new`, tables, or networks with `folder`, and then those of networks, detectors and people.

    Raises:
        ValueError: a table or network cannot be read, or they have no faces in common.
    """
    sides = [_embed(options, path) if options.folder else _table(path) for path in (options.old, options.new)]
    (old, old_faces), (new, new_faces) = sides
    if old.digest == new.digest:
        raise ValueError(
            f"{shown(options.old)} and {shown(options.new)} are of the same network, whose galleries need no adapter"
        )
    common = sorted(old_faces.keys() & new_faces.keys())
    if options.folder and not (old_faces and new_faces):
        raise ValueError(f"{shown(options.folder)}: no picture has a face to embed; the reasons are above")
    if not common:
        raise ValueError(f"{shown(options.old)} and {shown(options.new)} have no faces in common; embed the same folder twice")
    rows = [[faces[key] for key in common] for faces in (old_faces, new_faces)]
    people = np.array([person for person, _, _ in rows[0]])
    if "" in people:
        raise ValueError(f"{common[int(np.argmax(people == ''))][0]}: lies in no sub-folder, whose name would be the person's")
    first, second = (unit_rows(np.stack([vector for _, vector, _ in side])) for side in rows)
    norms, new_norms = (np.array([norm for _, _, norm in side], dtype=np.float64) for side in rows)
    return Pairs(first, second, people, norms, new_norms), old, new


def _embed(options: argparse.Namespace, path: Path) -> tuple[Side, _Faces]:
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
    return Side(title, embedder.digest, embedder.embedding_size, embedder.image_size, recorded), found


def _table(path: Path) -> tuple[Side, _Faces]:
    if path.suffix != ".parquet":
        raise ValueError(f"{shown(path)}: is no .parquet of `face embed`, which says what network it is of")
    table = read_table(path)
    try:
        said = table.facts
        side = Side(said["network"], said["digest"], table.vectors.shape[1], int(said["image_size"]))
    except (KeyError, ValueError) as error:
        raise ValueError(f"{shown(path)}: is no .parquet of this version's `face embed` ({one_line(error)[:200]})") from None
    rows = zip(table.people, table.vectors, table.norms.tolist(), strict=True)
    return side, dict(zip(zip(table.names, table.numbers.tolist(), strict=True), rows, strict=True))
