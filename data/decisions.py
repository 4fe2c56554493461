"""Decisions about the labels of a set: what face clean proposes, a person edits, and face data filter applies.

A CSV file with the columns action, image, identity, to, sure, why. Identities are labels of the set, images indices into it:

    drop    an image; without one, all images of an identity
    move    an image to the identity `to`
    merge   an identity and the identity `to` are one person; merges are transitive
    split   an image belongs to a person of its own; images with the same word in `to` are one person

Shapes: n = images of the set, C = identities.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.files import read_csv, shown, write_csv

ACTIONS = ("drop", "move", "merge", "split")


class Decision(NamedTuple):
    """One line of the file."""

    action: str  # one of ACTIONS
    image: int | None  # its index; None for a decision about an identity
    identity: int  # the label of the image, or the identity itself
    to: str = ""
    sure: float = 1.0  # probability that the decision is right
    why: str = ""


def write_decisions(path: Path, decisions: Iterable[Decision]) -> None:
    """Write the file."""
    rows = ((d.action, "" if d.image is None else d.image, d.identity, d.to, f"{d.sure:.4f}", d.why) for d in decisions)
    write_csv(path, Decision._fields, rows)


def read_decisions(path: Path, labels: np.ndarray, num_classes: int) -> list[Decision]:
    """Return the decisions of a file about a set with these labels (n,).

    Raises:
        ValueError: a line cannot be read or does not fit the set, or two lines are about one image.
    """
    found: list[Decision] = []
    seen: set[int] = set()
    for number, row in enumerate(read_csv(path), 1):
        if not row or (number == 1 and row[:1] == ["action"]):
            continue
        try:
            action, image, identity, to = (cell.strip() for cell in row[:4])
            decision = Decision(action, int(image) if image else None, int(identity), to)
            fault = _fault(decision, labels, num_classes, seen)
        except ValueError:
            fault = "must be action,image,identity,to with whole numbers as image and identity"
        if fault:
            raise ValueError(f"{shown(path)}: line {number} {fault}, got '{','.join(row[:4])[:80]}'")
        found.append(decision)
        if decision.image is not None:
            seen.add(decision.image)
    return found


def _fault(one: Decision, labels: np.ndarray, num_classes: int, seen: set[int]) -> str:
    if one.action not in ACTIONS:
        return f"must begin with {', '.join(ACTIONS)}"
    if not 0 <= one.identity < num_classes:
        return f"must name an identity from 0 to {num_classes - 1}"
    if one.action in ("move", "merge") and not (one.to.isdigit() and int(one.to) < num_classes):
        return f"must have an identity from 0 to {num_classes - 1} in the column to"
    if one.action == "split" and (not one.to or one.to.isdigit()):
        return "must have a word that is no number in the column to"
    if one.action == "merge" and one.image is not None:
        return "must leave image empty"
    if one.image is None:
        return "must have an image" if one.action in ("move", "split") else ""
    if not 0 <= one.image < len(labels):
        return f"must have an image from 0 to {len(labels) - 1}"
    if labels[one.image] != one.identity:
        return f"is of another set: image {one.image} has the label {labels[one.image]} here"
    return f"is the second about image {one.image}; keep one" if one.image in seen else ""


def apply_decisions(decisions: Sequence[Decision], labels: np.ndarray, num_classes: int) -> tuple[np.ndarray, list[str]]:
    """Return the new labels (n,) int64, -1 for images that are dropped, and the names of the identities from C on.

    An identity that is dropped takes those with it that are merged with it, and the images that move to it.
    """
    new = np.array(labels, dtype=np.int64)
    names = sorted({one.to for one in decisions if one.action == "split"})
    number = {name: num_classes + place for place, name in enumerate(names)}
    for one in decisions:
        if one.action in ("move", "split"):
            new[one.image] = number[one.to] if one.action == "split" else int(one.to)
    root = join(num_classes + len(names), ((one.identity, int(one.to)) for one in decisions if one.action == "merge"))
    gone = np.zeros(len(root), dtype=bool)
    gone[[root[one.identity] for one in decisions if one.action == "drop" and one.image is None]] = True
    new = np.where(gone[root[new]], -1, root[new])
    new[[one.image for one in decisions if one.action == "drop" and one.image is not None]] = -1
    return new, names


def join(count: int, pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    """Return (count,) int64: the lowest of the numbers that are connected with each number by the pairs."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    table = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
    graph = coo_matrix((np.ones(len(table)), table.T), shape=(count, count))
    _, first, group = np.unique(connected_components(graph, directed=False)[1], return_index=True, return_inverse=True)
    return first[group]
