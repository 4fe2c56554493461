"""The pictures that a command line names, and who is on them: by sub-folder, by file name, or one person for all."""

import argparse
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from utils.files import read_bytes, shown
from utils.parallel import map_in_order

from ..faces.detector import Detector
from ..faces.pictures import Crop, Rejected, crops_of, list_pictures
from .store import check_person


class Picture(NamedTuple):
    """A picture file."""

    path: Path
    name: str  # relative to the folder that the command line names; the path if it names several
    person: str  # "" = not asked for


class Faces(NamedTuple):
    """The faces of a picture."""

    picture: Picture
    hash: bytes  # of the file's bytes; b"" if it cannot be read
    crops: list[Crop] | Rejected | None  # None = skipped


def add_person_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --person-from, who is on a picture."""
    parser.add_argument(
        "--person-from",
        type=_rule,
        default="folder",
        metavar="RULE",
        help="folder = the sub-folder is the person; name = the file name up to its last underscore; anything else is a "
        "regular expression for the picture's path below the folder, whose first group is the person (default folder)",
    )


def find_pictures(path: Path) -> list[tuple[Path, str]]:
    """Return (path, name) of a picture, or of all pictures below a folder in the order of their names.

    Raises:
        ValueError: there is none.
    """
    if path.is_dir():
        return [(path / name, name) for name in list_pictures(path)]
    if not path.exists():
        raise ValueError(f"{shown(path)}: no such picture or folder")
    return [(path, path.name)]


def with_people(
    pictures: Sequence[tuple[Path, str]], rule: str, person: str | None, whole_paths: bool = False
) -> tuple[list[Picture], list[Rejected]]:
    """Return the pictures with their people, and those whose person has no name, or none that is allowed.

    Args:
        rule: of --person-from.
        person: who is on all of them, None = by the rule.
        whole_paths: call the pictures by their paths, because those of several folders may have the same name.
    """
    named, rejected = [], []
    for path, name in pictures:
        called = str(path) if whole_paths else name
        try:
            named.append(Picture(path, called, check_person(person if person is not None else _person(name, rule))))
        except ValueError as error:
            rejected.append(Rejected(called, str(error)))
    return named, rejected


def _person(name: str, rule: str) -> str:
    if rule == "folder":
        folder, separator, _ = name.partition(os.sep)
        if not separator:
            raise ValueError("lies in no sub-folder, whose name would be the person's; see --person-from and --person")
        return folder
    if rule == "name":
        stem, separator, _ = Path(name).stem.rpartition("_")
        if not separator:
            raise ValueError("has no underscore in its name, before which the person would be; see --person-from")
        return stem
    found = re.search(rule, name)
    if not found or not found[1]:
        raise ValueError("does not match --person-from")
    return found[1]


def _rule(text: str) -> str:
    if text not in ("folder", "name"):
        try:
            groups = re.compile(text).groups
        except re.error as error:
            raise argparse.ArgumentTypeError(f"must be folder, name, or a regular expression: {error}") from None
        if not groups:
            raise argparse.ArgumentTypeError("must be folder, name, or a regular expression with a (group) for the person")
    return text


def read_faces(
    pictures: Sequence[Picture],
    detector: Detector | None,
    size: int,
    which: str,
    threads: int,
    skipped: frozenset[tuple[str, bytes]] | set[tuple[str, bytes]] = frozenset(),
) -> Iterator[Faces]:
    """Yield the faces of each picture, in order; a picture of a person in `skipped`, with this hash, is not decoded."""

    def work(picture: Picture) -> Faces:
        try:
            data = read_bytes(picture.path)
        except OSError as error:
            return Faces(picture, b"", Rejected(picture.name, f"cannot be read: {error.strerror}"))
        found = hashlib.sha256(data).digest()
        if (picture.person, found) in skipped:
            return Faces(picture, found, None)
        return Faces(picture, found, crops_of(data, picture.name, detector, size, which))

    return map_in_order(work, pictures, threads, ahead=4)
