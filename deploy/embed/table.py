"""The tables of face embed: a row for each face, with its name, person and unit vector; .parquet, or .npy and .csv.

Shapes: n = faces, D = embedding size.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from eval.embedding_table import FORMS, files_of, pyarrow
from utils.files import NewFile, csv_bytes, new_file, write_csv

from .embedder import Embedder
from .parts import Part, Parts, Row

_ROW_GROUP = 8192  # faces that a .parquet file stores together; readers skip or read whole groups
_COLUMNS = ("name", "face", "person", "norm", "padding", "score", "ser_fiq")


def check_form(out: Path) -> None:
    """Raise ValueError unless a table can be written to this file."""
    if out.suffix not in FORMS:
        raise ValueError(f"--out: must end in {' or '.join(FORMS)}, got {out}")
    if out.suffix == ".parquet":
        pyarrow()


def write_table(out: Path, parts: Parts, embedder: Embedder) -> tuple[int, int]:
    """Write the table and OUT.rejected.csv; return the number of faces and of pictures without one.

    Raises:
        ValueError: there is no face, or a part is damaged.
    """
    rejected_list, size = out.with_name(f"{out.name}.rejected.csv"), embedder.embedding_size
    names, people = parts.source.names, dict(zip(parts.source.names, parts.source.people, strict=True))
    faces = pictures = 0
    rejected: list[tuple[str, str]] = []
    for part in parts.all():
        faces += len(part.rows)
        pictures += len({row.name for row in part.rows})
        rejected += [(name, reason) for name, reason in part.rejected]
    rejected_list.unlink(missing_ok=True)
    if rejected:
        write_csv(rejected_list, ("name", "reason"), rejected)
    if not faces:
        out.with_name(f"{out.name}.unfinished").unlink(missing_ok=True)  # nothing to go on with
        name, reason = rejected[0]
        raise ValueError(f"no face in any of {len(names)} pictures; the first, {name}, {reason}; all: {rejected_list}")
    if out.suffix == ".npy":
        with new_file(files_of(out)[1]) as file:
            file.write(csv_bytes([_COLUMNS]))
            for part in parts.all():
                file.write(csv_bytes(_cells(row, people[row.name]) for row in part.rows))
        with new_file(out) as file:  # last: it says that all is there
            shape = {"descr": "<f4", "fortran_order": False, "shape": (faces, size)}
            np.lib.format.write_array_header_1_0(file, shape)
            for part in parts.all():
                file.write(part.vectors.tobytes())
    else:
        with new_file(out) as file:
            facts = {"network": embedder.title, "digest": embedder.digest, "image_size": str(embedder.image_size)}
            _write_parquet(file, parts.all(), people, size, facts)
    return faces, len(names) - pictures


def _cells(row: Row, person: str) -> tuple[object, ...]:
    score, ser_fiq = ("" if value is None else f"{value:.{digits}f}" for value, digits in ((row.score, 4), (row.ser_fiq, 6)))
    return row.name, row.face, person, f"{row.norm:.6g}", f"{row.padding:.4f}", score, ser_fiq


def _write_parquet(file: NewFile, parts: Iterator[Part], people: dict[str, str], size: int, facts: dict[str, str]) -> None:
    arrow = pyarrow()
    kinds = (arrow.string(), arrow.int32(), arrow.string(), *[arrow.float32()] * 4)
    fields = [arrow.field(name, kind) for name, kind in zip(_COLUMNS, kinds, strict=True)]
    fields.append(arrow.field("embedding", arrow.list_(arrow.float32(), size)))
    schema = arrow.schema(fields, metadata=facts)
    with open(file.fileno(), "wb", closefd=False) as sink, pyarrow(".parquet").ParquetWriter(sink, schema) as writer:
        for part in _joined(parts):
            rows = [(row.name, row.face, people[row.name], *row[2:]) for row in part.rows]
            columns = [arrow.array(column, kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)]
            vectors = arrow.FixedSizeListArray.from_arrays(arrow.array(part.vectors.ravel()), size)
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
