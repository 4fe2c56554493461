"""The tables of scripts.deploy.embed: a row for each face, with its name, person and unit vector; .parquet, or .npy and .csv.

Shapes: n = faces, D = embedding size.
"""

import csv
import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.files import NewFile, check_file, csv_bytes, new_file, reading, shown, write_csv
from utils.text import one_line, pip_install

from .embedder import Embedder
from .parts import Part, Parts, Plan, Row

FORMS = (".parquet", ".npy")
_ROW_GROUP = 8192  # faces that a .parquet file stores together; readers skip or read whole groups
_COLUMNS = ("name", "face", "person", "norm", "padding", "score")


def check_form(out: Path) -> None:
    """Raise ValueError unless a table can be written to this file."""
    if out.suffix not in FORMS:
        raise ValueError(f"--out: must end in {' or '.join(FORMS)}, got {out}")
    if out.suffix == ".parquet":
        _pyarrow()


def files_of(out: Path) -> list[Path]:
    """Return the files of a table: those that a run replaces."""
    return [out, out.with_suffix(".csv")] if out.suffix == ".npy" else [out]


def write_table(out: Path, plan: Plan, parts: Parts, embedder: Embedder) -> tuple[int, int]:
    """Write the table and OUT.rejected.csv; return the number of faces and of pictures without one.

    Raises:
        ValueError: there is no face, or a part is damaged.
    """
    rejected_list, size = out.with_name(f"{out.name}.rejected.csv"), embedder.embedding_size
    people = dict(zip(plan.source.names, plan.source.people, strict=True))
    faces = pictures = 0
    rejected: list[tuple[str, str]] = []
    for part in _all(plan, parts):
        faces += len(part.rows)
        pictures += len({row.name for row in part.rows})
        rejected += [(name, reason) for name, reason in part.rejected]
    rejected_list.unlink(missing_ok=True)
    if rejected:
        write_csv(rejected_list, ("name", "reason"), rejected)
    if not faces:
        name, reason = rejected[0]
        raise ValueError(
            f"no face in any of {len(plan.source.names)} pictures; the first, {name}, {reason}; all: {rejected_list}"
        )
    if out.suffix == ".npy":
        with new_file(files_of(out)[1]) as file:
            file.write(csv_bytes([_COLUMNS]))
            for part in _all(plan, parts):
                file.write(csv_bytes(_cells(row, people[row.name]) for row in part.rows))
        with new_file(out) as file:  # last: it says that all is there
            header = io.BytesIO()
            shape = {"descr": "<f4", "fortran_order": False, "shape": (faces, size)}
            np.lib.format.write_array_header_1_0(header, shape)
            file.write(header.getvalue())
            for part in _all(plan, parts):
                file.write(part.vectors.tobytes())
    else:
        with new_file(out) as file:
            facts = {"network": embedder.title, "digest": embedder.digest, "image_size": str(embedder.image_size)}
            _write_parquet(file, _all(plan, parts), people, size, facts)
    return faces, len(plan.source.names) - pictures


def _all(plan: Plan, parts: Parts) -> Iterator[Part]:
    for number in range(plan.count):
        part = parts.read(number)
        if part is None:
            raise ValueError(f"part {number} is damaged; start the same command again with --again")
        yield part


def _cells(row: Row, person: str) -> tuple[object, ...]:
    score = "" if row.score is None else f"{row.score:.4f}"
    return row.name, row.face, person, f"{row.norm:.6g}", f"{row.padding:.4f}", score


def _write_parquet(
    file: NewFile, parts: Iterator[Part], people: dict[str, str], embedding_size: int, facts: dict[str, str]
) -> None:
    arrow = _pyarrow()
    kinds = (arrow.string(), arrow.int32(), arrow.string(), arrow.float32(), arrow.float32(), arrow.float32())
    fields = [arrow.field(name, kind) for name, kind in zip(_COLUMNS, kinds, strict=True)]
    fields.append(arrow.field("embedding", arrow.list_(arrow.float32(), embedding_size)))
    schema = arrow.schema(fields, metadata=facts)
    with _pyarrow(".parquet").ParquetWriter(_Sink(file), schema) as writer:
        for part in _joined(parts):
            rows = [(row.name, row.face, people[row.name], row.norm, row.padding, row.score) for row in part.rows]
            columns = [arrow.array(column, kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)]
            vectors = arrow.FixedSizeListArray.from_arrays(arrow.array(part.vectors.ravel()), embedding_size)
            writer.write_table(arrow.table([*columns, vectors], schema=schema))


def _joined(parts: Iterator[Part]) -> Iterator[Part]:
    """Yield the faces in parts of at least _ROW_GROUP but for the last, which is not empty either."""
    rows: list[Row] = []
    vectors: list[np.ndarray] = []
    for part in parts:
        rows += part.rows
        vectors.append(part.vectors)
        if len(rows) >= _ROW_GROUP:
            yield Part(rows, [], np.concatenate(vectors))
            rows, vectors = [], []
    if rows:
        yield Part(rows, [], np.concatenate(vectors))


class _Sink(io.RawIOBase):
    """The file as pyarrow writes to it; closing is left to its owner."""

    def __init__(self, file: NewFile) -> None:
        super().__init__()
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(memoryview(data))

    def tell(self) -> int:
        return self._file.size


def _pyarrow(part: str = "") -> Any:
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

    def labels(self) -> tuple[np.ndarray, list[str]]:
        """Return the number of each face's person, (n,) int64, and the names of the people, sorted.

        Raises:
            ValueError: a face has no person.
        """
        names = sorted(set(self.people))
        if names and not names[0]:
            first = self.names[self.people.index("")]
            raise ValueError(f"{first}: has no person: its picture lies in no sub-folder, whose name would be the person's")
        number = {name: place for place, name in enumerate(names)}
        return np.array([number[person] for person in self.people], dtype=np.int64), names


_LENGTH_ERROR = 1e-3  # of a vector of length 1, as float16 leaves it
_BLOCK = 65_536  # vectors that are checked at once


def read_table(path: Path) -> Faces:
    """Return the faces of a table. A .npy of another program will do, beside a .csv with the columns name and person.

    Raises:
        ValueError: the file cannot be read, or is no table of unit vectors.
    """
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
    for begin in range(0, len(faces.vectors), _BLOCK):
        lengths = np.linalg.norm(faces.vectors[begin : begin + _BLOCK].astype(np.float64), axis=1)
        wrong = ~(np.abs(lengths - 1) < _LENGTH_ERROR)  # NaN is wrong, too
        if wrong.any():
            row = begin + int(wrong.argmax())
            raise ValueError(
                f"{shown(path)}: vector {row} has the length {lengths[row - begin]:.4g}; divide each by its length"
            )
    return faces


def _read_npy(path: Path) -> Faces:
    vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    with open(files_of(path)[1], newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        head = next(rows)
        name, person = head.index("name"), head.index("person")
        number, norm = (head.index(key) if key in head else None for key in ("face", "norm"))
        names, people, numbers, norms = list[str](), list[str](), list[int](), list[float]()
        for row in rows:
            names.append(row[name])
            people.append(row[person])
            numbers.append(0 if number is None else int(row[number]))
            norms.append(float("nan") if norm is None else float(row[norm]))
    return Faces(names, np.array(numbers, dtype=np.int64), people, np.array(norms), vectors, {})


def _read_parquet(path: Path) -> Faces:
    table = _pyarrow(".parquet").read_table(path)
    facts = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    column = table["embedding"].combine_chunks()
    vectors = column.flatten().to_numpy().reshape(len(column), -1)
    names, people = table["name"].to_pylist(), table["person"].to_pylist()
    return Faces(
        names, table["face"].to_numpy().astype(np.int64), people, table["norm"].to_numpy().astype(float), vectors, facts
    )
