"""The inputs that the fuzzer attacks: their class, and the readers that are not programs themselves.

An input has valid files, makers of cases, and a memory bound. A maker takes the valid files and a random number generator, and
returns a case, which names the program that reads it.
"""

import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.base import FaceDataset
from data.datasets import open_set
from data.index_cache import cache_path
from data.record_dataset import RecordDataset
from data.recordio.image_record import IndexedRecordFile, unpack
from data.tar_dataset import TarDataset
from eval.pair_sets.bin_file import read_pairs as read_pair_set
from utils.image import IMAGE_SIZE, decode_rgb, decode_rgb_into
from utils.program import run_main

from .fuzz_files import Case, Entry
from .fuzz_grammar import Rng

Sound = dict[str, Entry]
Maker = Callable[[Sound, Rng], Case]
HERE = "tests.attack.fuzz_inputs"


class Input(NamedTuple):
    """One input of the project."""

    sound: Sound  # valid files of each case, unless the case replaces them
    makers: Sequence[Maker]  # drawn with equal probability
    memory: float = 256  # MiB of resident memory that a case may take
    batch: int = 50  # cases per process


def make_case(name: str, entry: Input, seed: int, number: int) -> Case:
    """Return the case with this number, which is always the same."""
    rng = np.random.default_rng([seed, number, zlib.crc32(name.encode())])
    return entry.makers[int(rng.integers(len(entry.makers)))](entry.sound, rng)


# ---- readers: a case's command names one as tests.attack.fuzz_inputs:NAME


def records(words: list[str]) -> int:
    """Read the record file train.rec in every way."""
    return run_main(lambda: read_records(Path(words[0])))


def pairs(words: list[str]) -> int:
    """Read a verification set and decode its images."""
    return run_main(lambda: read_pairs(Path(words[0])))


def image(words: list[str]) -> int:
    """Decode an image like training, and like the tools."""

    def run() -> None:
        data = Path(words[0]).read_bytes()
        pixels = np.empty((IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
        decode_rgb_into(data, pixels)
        decode_rgb(data)

    return run_main(run)


def images_of_set(words: list[str]) -> int:
    """Open a set of any kind and decode all its images."""
    return run_main(lambda: _decode_all(open_set(words[0])))


def cached_set(words: list[str]) -> int:
    """Open a set of tar shards with a cached index: cache.index, copied to the place of the cache."""

    def run() -> None:
        path = cache_path(Path("cache"), Path("tar/0.tar"))
        path.parent.mkdir()
        shutil.copyfile("cache.index", path)
        _decode_all(TarDataset("tar", "cache"))

    return run_main(run)


def _decode_all(dataset: FaceDataset) -> None:
    """Decode all images; raise the first error at the end."""
    first: ValueError | None = None
    dataset.describe()
    dataset.label_digest()
    pixels = np.empty((IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    for index in range(dataset.num_images):
        try:
            dataset.decode_into(index, pixels)
        except ValueError as error:
            first = first or error
    if first is not None:
        raise first


def read_records(folder: Path) -> None:
    """Read a record file in every way: record by record, and as a face set."""
    first: ValueError | None = None
    try:
        file = IndexedRecordFile(folder / "train.rec", folder / "train.idx")
        for position in range(len(file)):
            try:
                record = unpack(file.read_position(position))
                if len(record.payload):
                    decode_rgb(record.payload)
            except ValueError as error:
                first = first or error
    except ValueError as error:
        first = error
    _decode_all(RecordDataset(folder))
    if first is not None:
        raise first


def read_pairs(path: Path) -> None:
    """Read a verification set and decode its images."""
    found = read_pair_set(path)
    for index in range(len(found.images)):
        found.decode(index)
