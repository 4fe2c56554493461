"""The parts of a run of face embed: what they are, how one is embedded, and how they are stored.

The bytes of a part in the journal are a line of JSON with its faces and rejected pictures, then the vectors, float32, little
endian.
Shapes: n = faces of a part, D = embedding size.

They are embedded in this process, or in several, each with the network in memory and one thread for arithmetic.
"""

import argparse
import contextlib
import copy
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import numpy as np
import torch

from eval.foreign_networks import onnx_hash
from utils.allocator import keep_freed_memory, out_of_memory
from utils.cli import Advance
from utils.distributed import choose_device
from utils.machine import num_cores
from utils.parallel import forks_of_torch, map_in_order
from utils.text import first_line

from ..faces.detector import Detector, open_detector
from ..faces.pictures import Crop, Rejected
from ..journal import Journal
from .embedder import Embedder, open_embedder
from .source import Reader, Source, open_reader

# of a part: few on a CPU, where a kill shall lose seconds and all processes shall have work; several batches on a GPU
PICTURES = {"cpu": 64, "cuda": 1024}
_DETECTION = ("min_score", "min_size", "overlap", "longest_side", "which")


class Row(NamedTuple):
    """An embedded face, beside its vector."""

    name: str
    face: int  # its number in the picture
    norm: float  # of the raw embedding
    padding: float
    score: float | None  # of the detector
    ser_fiq: float | None


class Part(NamedTuple):
    """The faces of some pictures."""

    rows: list[Row]
    rejected: list[Rejected]
    vectors: np.ndarray  # (n, D) float32, of length 1


def embed_part(
    options: argparse.Namespace, reader: Reader, embedder: Embedder, detector: Detector | None, names: Sequence[str]
) -> Part:
    """Read and embed some pictures; ValueError if the network fails."""
    rows: list[Row] = []
    rejected: list[Rejected] = []
    vectors = [np.zeros((0, embedder.embedding_size), dtype=np.float32)]
    waiting: list[Crop] = []

    def read(name: str) -> list[Crop] | Rejected:
        try:
            name.encode()
        except UnicodeEncodeError:
            return Rejected(name, "its name is no UTF-8; rename it")
        return reader(name, detector, embedder.image_size, options.which)

    def embed(crops: list[Crop]) -> None:
        raw, qualities = embedder.rate(np.stack([crop.pixels for crop in crops]))
        sums = raw.astype(np.float64)
        norms = np.sqrt((sums**2).sum(axis=1))
        good = np.isfinite(norms) & (norms > 0)
        for crop, norm, quality, is_good in zip(crops, norms.tolist(), qualities, good, strict=True):
            if is_good:
                score = None if crop.face is None else crop.face.score
                rows.append(Row(crop.name, crop.number, float(np.float32(norm)), crop.padding, score, quality))
            else:
                rejected.append(Rejected(crop.name, f"the network has no finite embedding of face {crop.number}"))
        vectors.append((sums[good] / norms[good, None]).astype(np.float32))

    for found in map_in_order(read, names, options.threads):
        if isinstance(found, Rejected):
            rejected.append(found)
        else:
            waiting += found
        while len(waiting) >= embedder.step:
            embed(waiting[: embedder.step])
            waiting = waiting[embedder.step :]
    if waiting:
        embed(waiting)
    return Part(rows, rejected, np.concatenate(vectors))


class Parts:
    """The parts of a run, of which a journal has those that are done; it begins with all that they depend on.

    Raises:
        ValueError: the journal was begun with other pictures, or another network or setting.
    """

    def __init__(self, options: argparse.Namespace, embedder: Embedder, source: Source, journal: Journal) -> None:
        self.source, self._journal, self._pictures = source, journal, PICTURES[embedder.device.type]
        detection = {name: getattr(options, name) for name in _DETECTION} if options.detector else {}
        facts: dict[str, Any] = {
            "network": embedder.digest,
            "precision": options.precision,
            "device": embedder.device.type,
            "detector": onnx_hash(options.detector) if options.detector else None,
            **{name.replace("_", " "): value for name, value in detection.items()},
            **({"--ser-fiq": True} if options.ser_fiq else {}),
            "list of pictures": source.digest,
            "number of pictures in a part": self._pictures,
        }
        journal.begin(facts, options.again, str(journal.path), "was begun with")
        self._count = -(-len(source.names) // self._pictures)
        self._entries = {entry.record.get("part"): entry for entry in journal.entries}  # the last one counts

    def names_of(self, number: int) -> list[str]:
        """Return the pictures of a part."""
        return self.source.names[number * self._pictures : (number + 1) * self._pictures]

    def add(self, number: int, part: Part) -> None:
        """Store a part."""
        vectors = np.ascontiguousarray(part.vectors, dtype="<f4")
        head = json.dumps({"rows": part.rows, "rejected": part.rejected, "dim": vectors.shape[1]}).encode() + b"\n"
        self._journal.add({"part": number}, head + vectors.tobytes())
        self._entries[number] = self._journal.entries[-1]

    def missing(self) -> list[int]:
        """Return the numbers of the parts that are still to be embedded."""
        return [number for number in range(self._count) if self.read(number) is None]

    def all(self) -> Iterator[Part]:
        """Yield all parts in order; ValueError if one is missing or damaged."""
        for number in range(self._count):
            part = self.read(number)
            if part is None:
                raise ValueError(f"part {number} is damaged; start the same command again with --again")
            yield part

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


_KEPT = "what is done is kept: start the same command again to go on"


def default_processes(device: str) -> int:
    """Return the number of GPUs that are used, or of cores without a GPU."""
    if choose_device(device, 0).type == "cuda":
        return torch.cuda.device_count()
    return num_cores()


def open_network(options: argparse.Namespace, local_rank: int = 0) -> Embedder:
    """Return the network of the command line, for one thread of torch: --threads are for decoding here."""
    own = copy.copy(options)
    own.threads = 1
    return open_embedder(own, local_rank)


def embed_parts(
    options: argparse.Namespace, parts: Parts, embedder: Embedder, detector: Detector | None, count: int, advance: Advance
) -> None:
    """Embed and store the parts that are missing.

    Args:
        embedder, detector: those of this process, which embeds if it is the only one.
        count: of processes.
        advance: called with the number of pictures that are done since the last call.

    Raises:
        ValueError: the network fails, or a process ends.
    """
    names = {number: parts.names_of(number) for number in parts.missing()}
    reader = open_reader(options.folder)
    here = ((number, embed_part(options, reader, embedder, detector, part)) for number, part in names.items())
    try:
        with contextlib.closing(here if count == 1 else _in_processes(options, names, count)) as made:
            for number, part in made:
                parts.add(number, part)
                advance(len(names[number]))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_KEPT) from None
    except (RuntimeError, MemoryError) as error:
        raise in_words(error) from None


def _in_processes(
    options: argparse.Namespace, names: dict[int, list[str]], count: int
) -> Generator[tuple[int, Part], None, None]:
    """Yield the parts as they are done."""
    context = forks_of_torch()
    ranks = context.Value("i", 0)
    with ProcessPoolExecutor(count, context, _open, (options, ranks)) as pool:
        try:
            futures = {pool.submit(_embed, part): number for number, part in names.items()}
            for future in as_completed(futures):
                yield futures.pop(future), future.result()
        except BaseException as error:
            for child in multiprocessing.active_children():
                child.kill()
            if isinstance(error, BrokenProcessPool):
                raise ValueError(
                    f"one of the processes ended; {_KEPT}. If the machine has too little memory, give fewer --processes"
                ) from None
            raise


_options: argparse.Namespace
_network: tuple[Reader, Embedder, Detector | None]  # of a process of the pool


def _open(options: argparse.Namespace, ranks: Any) -> None:
    """Begin a process of the pool: Ctrl-C is for its parent, with which it ends."""
    global _options, _network
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with ranks.get_lock():
        rank, ranks.value = ranks.value, ranks.value + 1
    _options = options
    embedder = open_network(options, rank % max(1, torch.cuda.device_count()))
    _network = open_reader(options.folder), embedder, open_detector(options)


def _embed(names: list[str]) -> Part:
    return embed_part(_options, *_network, names)


def in_words(error: RuntimeError | MemoryError) -> ValueError:
    """Return an error of the arithmetic in one line; torch raises RuntimeError if the memory of the machine or GPU is full."""
    if out_of_memory(error):
        return ValueError(f"the memory is full; {_KEPT}, with fewer --processes, or on a GPU a smaller --batch-size")
    what = first_line(error)
    return ValueError(f"embedding fails: {what:.300}; {_KEPT}")


def _end_with_parent() -> None:
    """End this process with its parent, before another run begins in the same folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
