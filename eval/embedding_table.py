"""Reads the tables of `face embed`, a row for each face: .parquet, or .npy and .csv. `deploy.embed.table` writes them.

Shapes: n = faces, D = embedding size.
"""

import csv
import importlib
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.cli import progress
from utils.files import check_file, reading, shown
from utils.text import one_line, pip_install

FORMS = (".parquet", ".npy")
_LENGTH_ERROR = 1e-3  # of a vector of length 1, as float16 leaves it
_QUALITIES = ("padding", "score", "ser_fiq")
_BLOCK = 1 << 22  # numbers of vectors that are checked at once
_EXPANSION, _SPARE = 10, 1 << 26  # a .parquet may take so many times its size in memory, and bytes more


def files_of(table: Path) -> list[Path]:
    """Return the files of a table."""
    return [table, table.with_suffix(".csv")] if table.suffix == ".npy" else [table]


def stamps_of(table: Path) -> list[str]:
    """Return a text for each file of a table, which changes when the file does."""
    return [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files_of(table)]


def pyarrow(part: str = "") -> Any:
    """Return the package, or a part of it such as ".parquet"; ValueError if it is not installed."""
    try:
        return importlib.import_module(f"pyarrow{part}")
    except ImportError:
        raise ValueError(f"a .parquet file needs pyarrow: {pip_install('pyarrow')}; or choose a .npy file") from None


class Faces(NamedTuple):
    """What a table holds."""

    names: list[str]  # of the pictures: paths, or indices into a training set
    numbers: np.ndarray  # (n,) int64, of the faces in their pictures
    people: list[str]  # "" = not known
    norms: np.ndarray  # (n,) float64, of the embeddings before they were scaled to length 1; NaN = not known
    vectors: np.ndarray  # (n, D) float32, of length 1, read-only; of a .npy it is a memory map
    facts: dict[str, str]  # of a .parquet: network, digest, image_size
    qualities: dict[str, np.ndarray]  # (n,) float64: padding, score, ser_fiq, if there; NaN = not known

    def labels(self) -> tuple[np.ndarray, list[str]]:
        """Return the number of each face's person, (n,) int64, and the names of the people, sorted; each face needs one."""
        names = sorted(set(self.people))
        if names and not names[0]:
            first = self.names[self.people.index("")]
            raise ValueError(f"{first}: has no person: its picture lies in no sub-folder, whose name would be the person's")
        number = {name: place for place, name in enumerate(names)}
        return np.array([number[person] for person in self.people], dtype=np.int64), names

    def check_network(self, other: "Faces") -> None:
        """Raise ValueError if the other table is of another network, as far as both say."""
        sizes, digests = ({one.vectors.shape[1] for one in (self, other)}, {one.facts.get("digest") for one in (self, other)})
        if len(sizes) > 1 or len(digests - {None}) > 1:
            raise ValueError("must come from the network of TABLE, but its vectors are of another; embed it again")


def read_table(path: Path) -> Faces:
    """Return the faces of a table. A .npy of another program will do, beside a .csv with the columns name and person."""
    if path.suffix not in FORMS:
        raise ValueError(f"{shown(path)}: a table of `face embed` ends in {' or '.join(FORMS)}")
    for file in files_of(path):
        with reading(file):
            check_file(file)
    read = _read_parquet if path.suffix == ".parquet" else _read_npy
    try:
        faces = read(path)
        if faces.vectors.ndim != 2 or faces.vectors.dtype != np.float32 or not len(faces.vectors):
            raise ValueError(f"its vectors must be (faces, D) float32, got {faces.vectors.shape} {faces.vectors.dtype}")
        if not len(faces.names) == len(faces.people) == len(faces.vectors):
            raise ValueError(f"{len(faces.vectors)} vectors, but {len(faces.names)} rows in the .csv")
    except Exception as error:  # of many kinds, for a damaged table
        raise ValueError(f"{shown(path)}: is no table of `face embed` ({one_line(error)[:200]})") from None
    step = max(1, _BLOCK // max(1, faces.vectors.shape[1]))
    parts = range(0, len(faces.vectors), step)
    for begin in progress(parts, None, f"checking {shown(path.name)}", "block", delay=5):
        norms = np.linalg.norm(faces.vectors[begin : begin + step].astype(np.float64), axis=1)
        wrong = ~(np.abs(norms - 1) < _LENGTH_ERROR)  # NaN is wrong, too
        if wrong.any():
            row = begin + int(wrong.argmax())
            raise ValueError(f"{shown(path)}: vector {row} has the length {norms[row - begin]:.4g}; divide each by its length")
    return faces


def _read_npy(path: Path) -> Faces:
    vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    with open(files_of(path)[1], newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        head = next(rows)
        name, person = head.index("name"), head.index("person")
        number, norm = (head.index(key) if key in head else None for key in ("face", "norm"))
        names, people, numbers, norms = list[str](), list[str](), array("q"), array("d")
        qualities = {key: (head.index(key), array("d")) for key in _QUALITIES if key in head}
        same: dict[str, str] = {}  # a repeated text is kept once
        for row in progress(rows, len(vectors), f"reading {shown(path.name)}", "face", delay=5):
            if len(names) == len(vectors):
                raise ValueError(f"{len(vectors)} vectors, but more rows in the .csv")
            names.append(row[name])
            people.append(same.setdefault(row[person], row[person]))
            numbers.append(0 if number is None else int(row[number]))
            norms.append(float("nan") if norm is None else float(row[norm]))
            for place, values in qualities.values():
                values.append(float(row[place] or "nan"))
    known = {key: np.array(values) for key, (_, values) in qualities.items()}
    return Faces(names, np.array(numbers), people, np.array(norms), vectors, {}, known)


def _read_parquet(path: Path) -> Faces:
    file = pyarrow(".parquet").ParquetFile(path, read_dictionary=["name", "person"])  # a repeated text is kept once
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    needed = sum(max(column.total_uncompressed_size, 4 * column.num_values) for column in columns)
    if needed > _SPARE + _EXPANSION * path.stat().st_size:
        raise ValueError(f"it takes {needed:,} bytes in memory, over {_EXPANSION} times its size")
    there = set(file.schema_arrow.names)
    table = file.read(columns=["name", "face", "person", "norm", *(key for key in _QUALITIES if key in there)])
    facts = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    vectors, begin = np.empty((0, 0), dtype=np.float32), 0
    lacking = any(table[name].null_count for name in ("name", "face", "person"))
    filled = [number for number, group in enumerate(groups) if group.num_rows]
    for number in progress(filled, None, f"reading {shown(path.name)}", "group", delay=5):
        # all groups at once would take four times the memory of the vectors
        column = file.read_row_group(number, columns=["embedding"])["embedding"].combine_chunks()
        if lacking or column.null_count:
            raise ValueError("a row lacks its name, face, person or embedding")
        part = column.flatten().to_numpy().reshape(len(column), vectors.shape[1] if begin else -1)
        if not begin and 4 * len(table) * part.shape[1] <= needed:
            vectors = np.empty((len(table), part.shape[1]), dtype=part.dtype)
        vectors[begin : begin + len(part)] = part
        begin += len(part)
    vectors.flags.writeable = False
    known = {key: table[key].to_numpy().astype(float) for key in ("norm", *_QUALITIES) if key in table.column_names}
    norms, numbers = known.pop("norm"), table["face"].to_numpy().astype(np.int64)
    return Faces(_texts(table["name"]), numbers, _texts(table["person"]), norms, vectors, facts, known)


def _texts(column: Any) -> list[str]:
    """Return the texts of a column with a dictionary, equal ones as one object."""
    whole = column.unify_dictionaries().combine_chunks()
    values = whole.dictionary.to_pylist()
    if not all(isinstance(value, str) for value in values):
        raise ValueError("a name or person is no text")
    return [values[index] for index in whole.indices.to_numpy()]
