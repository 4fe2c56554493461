"""The parts of a run of scripts.deploy.embed: what they are, how one is embedded, and how they are stored.

The bytes of a part in the journal are a line of JSON with its faces and rejected pictures, then the vectors, float32, little
endian.
Shapes: n = faces of a part, D = embedding size.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eval.foreign_networks import onnx_hash
from utils.parallel import map_in_order

from ..faces.crops import Crop, Rejected, read_crops
from ..faces.detector import Detector
from ..journal import Journal
from .embedder import Embedder

# of a part: few on a CPU, where a kill shall lose seconds and all processes shall have work; several batches on a GPU
PICTURES = {"cpu": 64, "cuda": 1024}
_DETECTION = ("min_score", "min_size", "overlap", "longest_side", "which")
_BATCH = 64  # crops at most that are embedded at once; on a GPU --batch-size


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


class Plan:
    """The parts of a run and all that they depend on.

    Args:
        embedder: the network.
        files: all pictures, in order.
    """

    def __init__(self, options: argparse.Namespace, embedder: Embedder, files: Sequence[Stamped]) -> None:
        self.files = files
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
        self.count = -(-len(files) // self._pictures)

    def names_of(self, number: int) -> list[str]:
        """Return the pictures of a part."""
        return [file.name for file in self.files[number * self._pictures : (number + 1) * self._pictures]]


def embed_part(options: argparse.Namespace, embedder: Embedder, detector: Detector | None, names: Sequence[str]) -> Part:
    """Read and embed some pictures.

    Raises:
        ValueError: the network fails.
    """
    rows: list[Row] = []
    rejected: list[Rejected] = []
    vectors = [np.zeros((0, embedder.embedding_size), dtype=np.float32)]
    waiting: list[Crop] = []
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
    if waiting:
        embed(waiting)
    return Part(rows, rejected, np.concatenate(vectors))


class Parts:
    """The parts that are done, in a journal that has begun with the facts of the plan."""

    def __init__(self, plan: Plan, journal: Journal) -> None:
        self._plan, self._journal = plan, journal
        self._entries = {entry.record.get("part"): entry for entry in journal.entries}  # the last one counts

    def add(self, number: int, part: Part) -> None:
        """Store a part."""
        vectors = np.ascontiguousarray(part.vectors, dtype="<f4")
        head = json.dumps({"rows": part.rows, "rejected": part.rejected, "dim": vectors.shape[1]}).encode() + b"\n"
        self._journal.add({"part": number}, head + vectors.tobytes())
        self._entries[number] = self._journal.entries[-1]

    def missing(self) -> list[int]:
        """Return the numbers of the parts that are still to be embedded."""
        return [number for number in range(self._plan.count) if self.read(number) is None]

    def read(self, number: int) -> Part | None:
        """Return a part, or None if it is not there or damaged."""
        entry = self._entries.get(number)
        data = None if entry is None else self._journal.data(entry)
        if not data:
            return None
        try:
            line, _, vectors = data.partition(b"\n")
            head = json.loads(line)
            rows, rejected = [Row(*row) for row in head["rows"]], [Rejected(*pair) for pair in head["rejected"]]
            return Part(rows, rejected, np.frombuffer(vectors, dtype="<f4").reshape(len(rows), head["dim"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
