"""Reads which group a picture or a person belongs to, and lists of pairs with groups.

Layouts: RFW has a folder of files such as African/African_pairs.txt, whose lines are `ID N M` or `ID N OTHER M`, as those of
LFW; the picture is GROUP/ID/ID_000N (source: bob.bio.face, rfw.py). BFW has a .csv with p1, p2, label, att1, att2, and more
columns of both pictures; the picture is ATT/ID/NAME (source: visionjo/facerec-bias-bfw, data/README.md).
"""

import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from eval.embedding_table import Faces
from utils.files import find_files, read_csv, read_lines, shown
from utils.text import did_you_mean, one_line

from .groups import MAX_GROUPS, PairList

_SUFFIX = "_pairs.txt"
_MOST_NUMBERS = 10  # values of a column of numbers that are groups themselves; more are grouped by tens
_SAME = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}


def read_groups(path: Path, column: str, faces: Faces) -> tuple[np.ndarray, list[str]]:
    """Return the group of each picture, (n,) int64, -1 = none, and the names of the groups, sorted.

    Args:
        path: a .csv with the column name (of pictures, as in the table) or person, and others.

    Raises:
        ValueError: of the file, or the groups are too many.
    """
    rows, head = _read_table(path)
    key = next((one for one in ("name", "person") if one in head), None)
    if key is None:
        raise ValueError(f"{shown(path)}: needs a column name (of a picture) or person; has {one_line(', '.join(head))[:200]}")
    place, own = _column(path, head, column), head.index(key)
    value_of: dict[str, str] = {}
    for row in rows:
        if value_of.setdefault(row[own], row[place].strip()) != row[place].strip():
            raise ValueError(f"{shown(path)}: {key} {one_line(row[own])[:80]!r} is in two groups of {column}; keep one of them")
    texts = [value_of.get(one, "") for one in (faces.names if key == "name" else faces.people)]
    if not any(texts):
        raise ValueError(f"{shown(path)}: has no {column} for any {key} of the table, such as {_example(faces, key)}")
    return _numbered(path, column, _by_tens(texts))


def read_pair_list(path: Path, column: str | None, faces: Faces) -> PairList:
    """Return the pairs of a .csv (p1,p2,label and COLUMN or COLUMN1,COLUMN2), or of a folder of GROUP_pairs.txt.

    The person of a picture is its folder.

    Raises:
        ValueError: of the files, or no pair has both pictures in the table.
    """
    if path.is_dir() == (column is not None):
        raise ValueError("--by names the column of groups of a .csv, so give it; groups of a folder have their files' names")
    found = _read_folder(path) if column is None else _read_bfw(path, column)
    row_of: dict[str, int] = {}
    for texts in (faces.names, [posixpath.splitext(name)[0] for name in faces.names]):
        for row, text in enumerate(texts):
            row_of.setdefault(text, row)  # of several faces of a picture the first, which is the best
    first, second, same, groups = [], [], [], []
    people: list[str] = []
    for one, other, is_same, group, second_group in found:
        rows = [_row(row_of, name, part) for name, part in ((one, group), (other, second_group))]
        if None not in rows:
            first.append(rows[0])
            second.append(rows[1])
            same.append(is_same)
            groups += [group, second_group]
            people += [posixpath.dirname(one) or one, posixpath.dirname(other) or other]
    if not first:
        raise ValueError(f"{shown(path)}: no pair has both pictures in the table, with names such as {_example(faces, 'name')}")
    numbers, names = _numbered(path, column or "files", groups)
    number_of = {person: number for number, person in enumerate(sorted(set(people)))}
    owners = np.array([number_of[person] for person in people])
    left, right = np.array([first, second], dtype=np.int64)
    pairs = (left, right, np.array(same), numbers.reshape(-1, 2), owners.reshape(-1, 2))
    return PairList(*pairs, names, len(found) - len(first))


def _read_table(path: Path) -> tuple[Iterator[list[str]], list[str]]:
    rows = read_csv(path)
    head = [word.strip() for word in next(rows, [])]
    return _filled(path, rows, len(head)), head


def _filled(path: Path, rows: Iterable[list[str]], width: int) -> Iterator[list[str]]:
    for number, row in enumerate(rows, 2):
        if row and len(row) != width:
            raise ValueError(f"{shown(path)}: row {number} has {len(row)} columns, the first line {width}")
        if row:
            yield row


def _column(path: Path, head: Sequence[str], *names: str) -> int:
    for name in names:
        if name in head:
            return head.index(name)
    columns = one_line(", ".join(head))[:200]
    raise ValueError(f"{shown(path)}: has no column {names[0]!r}; it has {columns}.{did_you_mean(names[0], head)}")


def _read_bfw(path: Path, column: str) -> list[tuple[str, str, bool, str, str]]:
    rows, head = _read_table(path)
    first, second, label = (_column(path, head, name) for name in ("p1", "p2", "label"))
    own, other = (_column(path, head, f"{column}{number}", column) for number in (1, 2))
    pairs, same = list[tuple[str, str, bool, str, str]](), dict[str, str]()  # a repeated text is kept once
    for number, row in enumerate(rows, 2):
        if row[label].strip().lower() not in _SAME or not row[own].strip() or not row[other].strip():
            raise ValueError(
                f"{shown(path)}: row {number} needs a label 0 or 1, and groups; got {one_line(','.join(row))[:80]!r}"
            )
        texts = (row[first], row[second], row[own].strip(), row[other].strip())
        one, two, group, second_group = (same.setdefault(text, text) for text in texts)
        pairs.append((one, two, _SAME[row[label].strip().lower()], group, second_group))
    return pairs


def _read_folder(path: Path) -> list[tuple[str, str, bool, str, str]]:
    files = find_files(path, (_SUFFIX,), top=True).files
    if not files:
        raise ValueError(f"{shown(path)}: has no files such as African/African{_SUFFIX}")
    pairs = []
    for file in files:
        group = posixpath.basename(file)[: -len(_SUFFIX)]
        for number, line in enumerate(read_lines(path / file), 1):
            words = line.split()
            if not words or (number == 1 and len(words) <= 2):  # LFW's own list begins with the number of folds and pairs
                continue
            words = [words[0], words[1], words[0], words[2]] if len(words) == 3 else words
            if len(words) != 4 or not (words[1] + words[3]).isdecimal():
                raise ValueError(f"{shown(path / file)}: line {number} must be 'ID N M' or 'ID N OTHER M', got {line[:80]!r}")
            pictures = [f"{words[at]}/{words[at]}_{int(words[at + 1]):04d}" for at in (0, 2)]
            pairs.append((pictures[0], pictures[1], words[0] == words[2], group, group))
    return pairs


def _row(row_of: dict[str, int], name: str, group: str) -> int | None:
    """Return the row of a picture, whose name in the table may begin with the group, and end otherwise."""
    for one in (name, f"{group}/{name}"):
        for text in (one, posixpath.splitext(one)[0]):
            if text in row_of:
                return row_of[text]
    return None


def _by_tens(texts: list[str]) -> list[str]:
    ages = ["" if text.upper() == "NA" else re.sub(r"\.0+$", "", text) for text in texts]  # a table with gaps has them as 24.0
    values = {age for age in ages if age}
    if len(values) <= _MOST_NUMBERS or not all(age.isdecimal() for age in values):
        return texts
    return [f"{int(age) // 10 * 10} to {int(age) // 10 * 10 + 9}" if age else "" for age in ages]


def _numbered(path: Path, column: str, texts: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    names = sorted({text for text in texts if text})
    if len(names) > MAX_GROUPS:
        raise ValueError(f"{shown(path)}: {column} has {len(names)} groups, and may have {MAX_GROUPS}; join some of them")
    number_of = {"": -1} | {name: number for number, name in enumerate(names)}
    return np.array([number_of[text] for text in texts], dtype=np.int64), names


def _example(faces: Faces, key: str) -> str:
    return repr(one_line((faces.names if key == "name" else faces.people)[0])[:80])
