"""Reads measures of quality from .csv files, joined by the names of pictures; among them the table of BSI's OFIQ."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from utils.files import read_csv, shown
from utils.text import one_line

_NAMES = ("name", "Filename")  # of the column that has the picture; the second is OFIQ's
_SCALAR = ".scalar"  # OFIQ has each component twice: as it was measured, and from 0 to 100, where -1 says that it failed


def read_measures(path: Path, wanted: Sequence[str], names: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return those of the wanted columns that a file has, (n,) float64 with NaN = not known, and the names of all columns.

    A row is of the picture whose name it has, or whose name is left without its first folders: /data/set/anna/1.jpg is
    anna/1.jpg.

    Args:
        names: (n) of the pictures; several faces of one picture have its value.

    Raises:
        ValueError: the file cannot be read, has no row of a picture or two of one, or a text where a number must be.
    """
    rows = read_csv(path)
    head = [word.strip() for word in rows[0]] if rows else []
    own = next((head.index(name) for name in _NAMES if name in head), None)
    if own is None:
        raise ValueError(f"{shown(path)}: needs a column {' or '.join(_NAMES)}; it has {one_line(', '.join(head))[:200]}")
    ofiq = head[own] != _NAMES[0]
    places = {name: head.index(name) for name in dict.fromkeys(wanted) if name in head}
    failed = {name: name.removesuffix(_SCALAR) + _SCALAR for name in places}
    found = {name: np.full(len(names), np.nan) for name in places}
    rows_of: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        rows_of.setdefault(name, []).append(number)
    line_of: dict[str, int] = {}
    for line, row in enumerate(rows[1:], 2):
        if not row:
            continue
        if ofiq:
            row += [""] * (len(head) - len(row))  # OFIQ leaves out the values of a picture that it could not read
        if len(row) < len(head):
            raise ValueError(f"{shown(path)}: row {line} has {len(row)} columns, the first line {len(head)}")
        parts = row[own].replace("\\", "/").split("/")
        picture = next((end for at in range(len(parts)) if (end := "/".join(parts[at:])) in rows_of), None)
        if picture is None:
            continue
        if line_of.setdefault(picture, line) != line:
            raise ValueError(f"{shown(path)}: rows {line_of[picture]} and {line} are both of {one_line(picture)}; keep one")
        for name, place in places.items():
            lost = ofiq and failed[name] in head and row[head.index(failed[name])].strip() == "-1"
            try:
                found[name][rows_of[picture]] = float(row[place]) if row[place].strip() and not lost else math.nan
            except ValueError:
                raise ValueError(f"{shown(path)}: row {line}: {name} must be a number, got {row[place]!r:.80}") from None
    if not line_of:
        raise ValueError(f"{shown(path)}: has no picture of the table, whose names are such as {one_line(names[0])!r:.80}")
    return found, head
