"""Verification sets in other formats than .bin: lists of pairs, folders of people, and a container without pickles.

NAME.csv            lines "path1,path2,same", paths relative to the folder of the file
NAME/               a sub-folder of pictures for each person: up to 6,000 pairs are drawn, the same ones every time
NAME.safetensors    bytes (B,) uint8, all distinct images one after another; ends (N,) int64, the end of each image in bytes;
                    first and second (P,) int64, the images of each pair; same (P,) bool
Shapes: N = distinct images, P = pairs, B = bytes of all images.
"""

import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from utils.files import check_file, find_files, read_bytes, read_lines, shown
from utils.image import IMAGE_SUFFIXES

from ..verification import FOLDS
from .bin_file import PairSet, read_bin
from .sample import most_pairs, sample_pairs

SUFFIXES = (".bin", ".safetensors", ".csv", "")  # the last: a folder of people
_SAMPLED = 6000  # pairs, as LFW has
_TYPES = {"bytes": np.uint8, "ends": np.int64, "first": np.int64, "second": np.int64, "same": np.bool_}


def read_pairs(path: str | os.PathLike[str], name: str | None = None) -> PairSet:
    """Return the pairs of a .bin, .safetensors or .csv file; nothing in it is executed.

    Raises:
        ValueError: one line that names the file and what is wrong with it.
    """
    suffix = Path(path).suffix
    if Path(path).is_dir():
        return read_folder(path, name)
    if suffix == ".safetensors":
        return read_safetensors(path, name)
    return read_list(path, name) if suffix == ".csv" else read_bin(path, name)


def write_safetensors(path: str | os.PathLike[str], pairs: PairSet) -> None:
    """Write a set into the container without pickles; the file appears when it is complete."""
    lengths = np.array([len(image) for image in pairs.images], dtype=np.int64)
    tensors: dict[str, np.ndarray] = {
        "bytes": np.frombuffer(b"".join(pairs.images), dtype=np.uint8),
        "ends": np.cumsum(lengths),
        "first": np.ascontiguousarray(pairs.first, dtype=np.int64),
        "second": np.ascontiguousarray(pairs.second, dtype=np.int64),
        "same": np.ascontiguousarray(pairs.same, dtype=np.bool_),
    }
    unfinished = f"{os.fspath(path)}.unfinished"
    Path(unfinished).write_bytes(save(tensors))  # save_file would set mode 0600 and ignore the umask
    os.replace(unfinished, path)


def read_safetensors(path: str | os.PathLike[str], name: str | None = None) -> PairSet:
    """Return the pairs of a container that `write_safetensors` wrote, all of it checked."""
    try:
        check_file(path)
        found = load_file(path)
    except OSError as error:
        raise ValueError(f"{path}: the verification set cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ValueError(f"{path}: not a verification set: {str(error).splitlines()[0]}") from None
    for key, kind in _TYPES.items():
        if key not in found or found[key].dtype != kind or found[key].ndim != 1:
            raise ValueError(f"{path}: not a verification set: it must hold {key}, one axis of {np.dtype(kind)}")
    ends, first, second, same = (found[key] for key in ("ends", "first", "second", "same"))
    count = len(ends)
    begins = np.concatenate([[0], ends[:-1]])
    if not count or (ends <= begins).any() or int(ends[-1]) != len(found["bytes"]):
        raise ValueError(f"{path}: not a verification set: ends must rise to the number of bytes, {len(found['bytes'])}")
    if not len(same) or not len(first) == len(second) == len(same):
        raise ValueError(f"{path}: not a verification set: first, second and same must have one entry for each pair")
    if min(first.min(), second.min()) < 0 or max(first.max(), second.max()) >= count:
        raise ValueError(f"{path}: not a verification set: first and second must name images 0 to {count - 1}")
    data = found["bytes"].tobytes()
    images = [data[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    return PairSet(name or shown(Path(path).stem), images, first, second, same)


def read_list(path: str | os.PathLike[str], name: str | None = None) -> PairSet:
    """Return the pairs of a list of pictures; each picture is read once."""
    pairs = read_csv(Path(path).parent, Path(path))
    index_of: dict[bytes, int] = {}
    number_of: dict[Path, int] = {}
    for picture in dict.fromkeys([pair[0] for pair in pairs] + [pair[1] for pair in pairs]):
        try:
            number_of[picture] = index_of.setdefault(read_bytes(picture), len(index_of))
        except OSError as error:
            raise ValueError(f"{path}: {shown(picture)} cannot be read: {error.strerror}") from None
    first = np.array([number_of[pair[0]] for pair in pairs], dtype=np.int64)
    second = np.array([number_of[pair[1]] for pair in pairs], dtype=np.int64)
    same = np.array([pair[2] for pair in pairs], dtype=bool)
    return PairSet(name or shown(Path(path).stem), list(index_of), first, second, same)


def read_folder(path: str | os.PathLike[str], name: str | None = None) -> PairSet:
    """Return pairs drawn from a folder with a sub-folder of pictures for each person: balanced, in ten folds."""
    try:
        below = find_files(path, IMAGE_SUFFIXES).by_folder()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    people = list(below)
    files = [sorted(Path(path) / file for file in found) for found in below.values()]
    labels = np.repeat(np.arange(len(people)), [len(found) for found in files])
    pictures = [file for found in files for file in found]
    count = min(_SAMPLED, most_pairs(labels, FOLDS, 0)) if len(people) >= 2 * FOLDS else 0
    if not count:
        raise ValueError(
            f"{path}: pairs in {FOLDS} folds need {2 * FOLDS} people or more, some with several pictures in each fold; it has "
            f"{len(people)} sub-folders with {len(pictures)} pictures"
        )
    first, second, same = sample_pairs(labels, count, FOLDS, 0)
    used, places = np.unique(np.concatenate([first, second]), return_inverse=True)
    try:
        images = [read_bytes(pictures[index]) for index in used.tolist()]
    except OSError as error:
        raise ValueError(f"{path}: {shown(error.filename)} cannot be read: {error.strerror}") from None
    return PairSet(name or shown(Path(path).name), images, places[:count], places[count:], same)


def read_csv(folder: Path, path: Path) -> list[tuple[Path, Path, bool]]:
    """Return the pairs of a list "path1,path2,same"; the separator is a comma, a tab or spaces."""
    pairs: list[tuple[Path, Path, bool]] = []
    for number, line in enumerate(read_lines(path), 1):
        separator = "," if "," in line else "\t" if "\t" in line else None
        words = [word.strip() for word in line.split(separator)]
        if len(words) == 3 and words[2].lower() in ("0", "1", "true", "false"):
            pairs.append((folder / words[0], folder / words[1], words[2].lower() in ("1", "true")))
        elif line.strip() and (number > 1 or len(words) != 3 or any(letter.isdigit() for letter in words[2])):
            raise ValueError(f"{path}: line {number} must be 'path1,path2,same', same 0 or 1, got '{line.strip()}'")
    if not pairs:
        raise ValueError(f"{path}: has no pairs; each line must be 'path1,path2,same', same 0 or 1")
    return pairs
