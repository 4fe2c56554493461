"""Five landmarks of each face: reads them, finds the landmarks of a picture, and reports faces that are largely padding.

Landmarks: five points (5, 2) in pixels: left eye, right eye, nose, left and right corner of the mouth.
"""

from pathlib import Path

import numpy as np

from utils.files import read_lines, write_csv

MUCH_PADDING = 0.4  # an aligned face is reported if more than this share of it is outside its picture


def read_landmarks(path: Path) -> dict[str, np.ndarray]:
    """Return the points (5, 2) by picture name from a CSV file, one face per line: name, then x and y of the five points.

    A name may span several columns, which are joined by "_" (001,smiling is 001_smiling). A header that names the columns
    (..._x and ..._y, or x1 y1 x2 ...) gives their order; without it they are x1 y1 x2 y2 ... Further columns are ignored.
    """
    rows = [(number, _columns(line)) for number, line in enumerate(read_lines(path), 1) if line.strip()]
    order: list[int] | None = None
    if rows and sum(map(is_number, rows[0][1])) < 10:
        order = _header_order(rows[0][1])
        rows = rows[1:]
        if order is None:
            raise ValueError(f"{path}: line 1: a header must name five columns ending in x and five in y; or leave it out")
    found: dict[str, np.ndarray] = {}
    for number, columns in rows:
        places = order or _numbers_at_end(columns)
        try:
            values = [float(columns[place]) for place in places]
        except (IndexError, ValueError):
            values = []
        name = "_".join(columns[: min(places, default=0)])
        if len(values) != 10 or not name:
            raise ValueError(f"{path}: line {number} must be a name and ten numbers, x and y of five points")
        if name in found:
            raise ValueError(f"{path}: line {number}: {name} has landmarks already; keep one face per picture")
        found[name] = np.array(values).reshape(5, 2)
    return found


def _columns(line: str) -> list[str]:
    return [part.strip() for part in (line.split("\t") if "\t" in line else line.split(",") if "," in line else line.split())]


def is_number(text: str) -> bool:
    """Return whether float() accepts a text."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _header_order(columns: list[str]) -> list[int] | None:
    """Return the columns of x1 y1 x2 y2 ... in a header, or None if it does not name five of each."""
    lower = [column.lower() for column in columns]
    xs = [i for i, name in enumerate(lower) if name.endswith("_x") or (name[:1] == "x" and name[1:].isdigit())]
    ys = [i for i, name in enumerate(lower) if name.endswith("_y") or (name[:1] == "y" and name[1:].isdigit())]
    return [place for pair in zip(xs, ys, strict=True) for place in pair] if len(xs) == len(ys) == 5 else None


def _numbers_at_end(columns: list[str]) -> list[int]:
    """Return the columns of the first ten consecutive numbers; the first column is always a name."""
    for begin in range(1, len(columns) - 9):
        if all(map(is_number, columns[begin : begin + 10])):
            return list(range(begin, begin + 10))
    return []


def points_of(landmarks: dict[str, np.ndarray], names: list[str]) -> list[np.ndarray]:
    """Return the points of each picture, found by its relative path or by its file name, each with or without ending.

    Raises:
        ValueError: a picture has no line, or two pictures match the same line.
    """
    taken: dict[str, str] = {}  # line -> picture
    for name in names:
        path = Path(name)
        keys = (name, path.as_posix(), path.as_posix().removesuffix(path.suffix), path.name, path.stem)
        key = next((key for key in keys if key in landmarks), None)
        if key is None:
            raise ValueError(f"{name}: has no landmarks; add a line for it, or leave the picture out")
        other = taken.setdefault(key, name)
        if other != name:
            raise ValueError(
                f"{name}: the landmarks named '{key}' already belong to {other}; give each picture its own line, named by its "
                "path below the folder, with its ending"
            )
    return [landmarks[key] for key in taken]


def report_padding(folder: Path, shares: dict[str, float]) -> None:
    """Print how many aligned faces are largely padding, and list them in FOLDER/padding.csv; `shares` has all pictures."""
    path = folder / "padding.csv"
    path.unlink(missing_ok=True)  # of another run
    found = sorted(((share, name) for name, share in shares.items() if share > MUCH_PADDING), reverse=True)
    if not found:
        return
    write_csv(path, ("name", "share_outside"), ((name, f"{share:.3f}") for share, name in found))
    print(
        f"{len(found)} of {len(shares)} faces are largely padding: more than {MUCH_PADDING:.0%} of the crop is outside the "
        f"picture. The worst is {found[0][1]}, {found[0][0]:.0%}; all are in {path}. Check them before you train on them"
    )
