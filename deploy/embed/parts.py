"""The parts of a run of scripts.deploy.embed: what they are, how one is embedded, and how they are stored.

A part is a file: a line of JSON with its faces and rejected pictures, then the vectors, float32, little endian.
Shapes: n = faces of a part, D = embedding size.
"""

import argparse
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from eval.foreign_networks import onnx_hash
from utils.files import check_file, read_bytes
from utils.parallel import map_in_order

from ..faces.crops import Crop, Rejected, read_crops
from ..faces.detector import Detector
from ..output import write_file
from .embedder import Embedder

# of a part: few on a CPU, where a kill shall lose seconds and all processes shall have work; several batches on a GPU
PICTURES = {"cpu": 64, "cuda": 1024}
_DETECTION = ("min_score", "min_size", "overlap", "longest_side", "which")
_BATCH = 64  # crops at most that are embedded at once; on a GPU --batch-size
LOCK, _FACTS = "lock", "run.json"  # files in the folder of the parts
_MAX_PART = 1 << 32  # bytes


class Stamped(NamedTuple):
    """A picture, and what changes with its file."""

    name: str
    size: int  # bytes
    time: int  # of the last change, ns

    @classmethod
    def of(cls, folder: Path, name: str) -> "Stamped":
        """Return a picture below a folder; one that cannot be asked has zeros, and is rejected when it is read."""
        try:
            status = os.stat(folder / name)
        except OSError:
            return cls(name, 0, 0)
        return cls(name, status.st_size, status.st_mtime_ns)


class Row(NamedTuple):
    """An embedded face, beside its vector."""

    name: str
    face: int  # its number in the picture
    norm: float  # of the raw embedding
    padding: float
    score: float | None  # of the detector


class Part(NamedTuple):
    """The faces of some pictures."""

    rows: list[Row]
    rejected: list[Rejected]
    vectors: np.ndarray  # (n, D) float32, of length 1


class Job(NamedTuple):
    """What a process needs to embed parts."""

    options: argparse.Namespace
    parts: Path  # their folder
    signature: str  # of the run; a part of another is no part


class Plan:
    """The parts of a run and all that they depend on.

    Args:
        embedder: the network.
        files: all pictures, in order.
        parts: folder of the parts.
    """

    def __init__(self, options: argparse.Namespace, embedder: Embedder, files: Sequence[Stamped], parts: Path) -> None:
        self.files, self.parts = files, parts
        self._pictures = PICTURES[embedder.device.type]
        detection = {name: getattr(options, name) for name in _DETECTION} if options.detector else {}
        pictures = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        self.facts: dict[str, Any] = {
            "network": embedder.digest,
            "precision": options.precision,
            "device": embedder.device.type,
            "detector": onnx_hash(options.detector) if options.detector else None,
            **{name.replace("_", " "): value for name, value in detection.items()},
            "list of pictures": pictures,
            "number of pictures in a part": self._pictures,
        }
        signature = hashlib.sha256(json.dumps(self.facts).encode()).hexdigest()
        self.job = Job(options, parts, signature)
        self.count = -(-len(files) // self._pictures)

    def names_of(self, number: int) -> list[str]:
        """Return the pictures of a part."""
        return [file.name for file in self.files[number * self._pictures : (number + 1) * self._pictures]]


def embed_part(
    job: Job, embedder: Embedder, detector: Detector | None, names: Sequence[str], advance: Callable[[int], object]
) -> Part:
    """Read and embed some pictures.

    Args:
        advance: called with the number of pictures read since the last call.

    Raises:
        ValueError: the network fails.
    """
    rows: list[Row] = []
    rejected: list[Rejected] = []
    vectors = [np.zeros((0, embedder.embedding_size), dtype=np.float32)]
    waiting: list[Crop] = []
    options = job.options
    batch = max(1, options.batch_size) if embedder.device.type == "cuda" else _BATCH

    def read(name: str) -> list[Crop] | Rejected:
        try:
            name.encode()
        except UnicodeEncodeError:
            return Rejected(name, "its name is no UTF-8; rename it")
        return read_crops(options.folder, name, detector, embedder.image_size, options.which)

    def embed(crops: list[Crop]) -> None:
        sums = embedder.embed(np.stack([crop.pixels for crop in crops])).astype(np.float64)
        norms = np.sqrt((sums**2).sum(axis=1))
        good = np.isfinite(norms) & (norms > 0)
        for crop, norm, is_good in zip(crops, norms.tolist(), good, strict=True):
            if is_good:
                score = None if crop.face is None else crop.face.score
                rows.append(Row(crop.name, crop.number, float(np.float32(norm)), crop.padding, score))
            else:
                rejected.append(Rejected(crop.name, f"the network has no finite embedding of face {crop.number}"))
        vectors.append((sums[good] / norms[good, None]).astype(np.float32))

    for found in map_in_order(read, names, options.threads):
        if isinstance(found, Rejected):
            rejected.append(found)
        else:
            waiting += found
        while len(waiting) >= batch:
            embed(waiting[:batch])
            waiting = waiting[batch:]
        advance(1)
    if waiting:
        embed(waiting)
    return Part(rows, rejected, np.concatenate(vectors))


def write_part(job: Job, number: int, part: Part) -> None:
    """Store a part; it appears complete."""
    data = np.ascontiguousarray(part.vectors, dtype="<f4").tobytes()
    head = {
        "signature": job.signature,
        "rows": part.rows,
        "rejected": part.rejected,
        "dim": part.vectors.shape[1],
        "hash": xxhash.xxh3_128_hexdigest(data),
    }
    write_file(_path(job.parts, number), json.dumps(head).encode() + b"\n" + data)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06}.part"


def check_folder(folder: Path) -> None:
    """Raise ValueError if a folder holds what is not of this program, because parts are removed at the end."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    others = [name for name in names if name not in (LOCK, _FACTS) and not name.endswith((".part", ".unfinished"))]
    if others:
        raise ValueError(f"{folder}: holds {others[0]!r}, which is not of this program; choose another --out")


def has_begun(folder: Path) -> bool:
    """Return whether a folder has the parts of a run."""
    return (folder / _FACTS).exists()


class Parts:
    """The stored parts of a run. The caller holds the lock.

    Raises:
        ValueError: the folder is that of another run.
    """

    def __init__(self, plan: Plan, again: bool) -> None:
        self._plan, self._folder = plan, plan.parts
        if again:
            self._clear()
        before = self._before()
        if before is None:
            self._clear()
            write_file(self._folder / _FACTS, json.dumps(plan.facts).encode())
        elif before != plan.facts:
            different = [name for name in plan.facts if before.get(name) != plan.facts[name]]
            what = different[0] if different else "version of this program"
            raise ValueError(
                f"{self._folder}: was begun with another {what}; go on with that one, or add --again to embed all anew"
            )

    def missing(self) -> list[int]:
        """Return the numbers of the parts that are still to be embedded."""
        return [number for number in range(self._plan.count) if self.read(number, False) is None]

    def read(self, number: int, whole: bool = True) -> Part | None:
        """Return a part, or None if it is not there or damaged.

        Args:
            whole: False = without its vectors, which are then not checked either.
        """
        path = _path(self._folder, number)
        try:
            with open(path, "rb") as file:
                check_file(path, _MAX_PART)
                head = json.loads(file.readline())
                rows = [Row(*row) for row in head["rows"]]
                size = len(rows) * head["dim"] * 4
                if head["signature"] != self._plan.job.signature or os.fstat(file.fileno()).st_size != file.tell() + size:
                    return None
                data = file.read() if whole else b""
            if whole and xxhash.xxh3_128_hexdigest(data) != head["hash"]:
                return None
            vectors = np.frombuffer(data, dtype="<f4").reshape(-1, head["dim"])
            return Part(rows, [Rejected(*pair) for pair in head["rejected"]], vectors)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def remove(self) -> None:
        """Remove the folder of the parts."""
        self._clear()
        (self._folder / LOCK).unlink(missing_ok=True)
        self._folder.rmdir()

    def _clear(self) -> None:
        names = [name for name in os.listdir(self._folder) if name != LOCK]
        for name in sorted(names, key=lambda name: name == _FACTS):  # last, so that a killed run can be finished
            (self._folder / name).unlink(missing_ok=True)

    def _before(self) -> dict[str, Any] | None:
        """Return the facts of the run whose parts these are; None if there are none."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            before = json.loads(read_bytes(self._folder / _FACTS))
            return before if isinstance(before, dict) else None
        return None
