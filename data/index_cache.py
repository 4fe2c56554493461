"""What opening a large set found out, kept in a file that all processes of a machine map: a dataset is parsed once.

    file = "faceindex" and version, xxh3_128 of all that follows, length of the JSON u64, JSON, arrays at multiples of 64 bytes;
           little-endian

The checksum is verified at each opening, which reads the file once: labels that changed would be trained on in silence.
The JSON holds the size and the modification time of each source file, so a set that changed is parsed again. The arrays are
memory maps: processes that open the same cache share its pages, and only pages that are used take memory.
"""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

_MAGIC = b"faceindex 2\n"
_DIGEST = 16  # bytes
_BLOCK = 1 << 24  # bytes hashed at once
_ALIGN = 64
_MAX_JSON = 1 << 24

Facts = dict[str, Any]  # plain JSON values
Arrays = dict[str, np.ndarray]


def stamp(files: Sequence[Path]) -> Facts:
    """Return the size and modification time of each of the files that exist; a cache with another stamp is out of date."""
    return {
        path.name: [status.st_size, status.st_mtime_ns]
        for path, status in ((path, path.stat()) for path in files if path.is_file())
    }


def cache_path(folder: Path, source: Path) -> Path:
    """Return where in the cache folder the set at `source` is kept: its name, and a hash of its place."""
    place = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:16]
    return folder / f"{source.resolve().parent.name}-{place}.index"


class DamagedCacheError(ValueError):
    """A cache of this stamp whose bytes are not those that were written."""


def open_index(
    cache: str | os.PathLike[str] | None,
    files: Sequence[Path],
    names: Sequence[str],
    is_sound: Callable[[Facts, Arrays], bool],
    parse: Callable[[], tuple[Facts, Arrays]],
) -> tuple[Facts, Arrays, tuple[str, ...]]:
    """Return (facts, arrays) of a set, from the folder `cache` where it has them, else parsed and kept there; and warnings.

    Args:
        cache: None or "" = parse, and keep nothing.
        files: that the set is made of; the cache has its name from the first.
        names: of the arrays.
        is_sound: see `read_cache`.
        parse: reads the set itself.
    """
    if not cache:
        return *parse(), ()
    wanted, path = stamp(files), cache_path(Path(cache), files[0])
    warnings: tuple[str, ...] = ()
    try:
        found = read_cache(path, wanted, names, is_sound)
        if found is not None:
            return *found, ()
    except DamagedCacheError as error:
        warnings = (str(error),)
    parsed = parse()
    try:
        write_cache(path, wanted, *parsed)
    except OSError as error:
        return *parsed, (*warnings, f"{path}: the index cannot be kept here: {error.strerror}; it is made anew at each start")
    found = None
    with contextlib.suppress(DamagedCacheError):  # another process may write it at this moment
        found = read_cache(path, wanted, names, is_sound)  # from now on the pages are those that other processes map, too
    return *(found or parsed), warnings


def read_cache(
    path: Path, wanted: Facts, names: Sequence[str], is_sound: Callable[[Facts, Arrays], bool] = lambda facts, arrays: True
) -> tuple[Facts, Arrays] | None:
    """Return (facts, arrays) of a cache with this stamp and these arrays, or None: there is none, or it is out of date.

    Args:
        is_sound: whether facts and integer arrays can be those of the set. The checksum finds damage, not a lie: whoever can
            write here can write it too. An exception of it counts as False.

    Raises:
        DamagedCacheError: there is one, but it is damaged.
    """
    try:
        if not path.is_file():
            return None
        size = path.stat().st_size
        with open(path, "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return None
            digest = file.read(_DIGEST)
            length = int.from_bytes(file.read(8), "little")
            if length > min(_MAX_JSON, size):
                raise DamagedCacheError(_damaged(path))
            header = json.loads(file.read(length))
            if header["stamp"] != wanted or list(header["arrays"]) != list(names):
                return None
            if header["size"] != size or _digest_from(file, len(_MAGIC) + _DIGEST) != digest:
                raise DamagedCacheError(_damaged(path))
            arrays: Arrays = {}
            for name, (kind, count, begin) in header["arrays"].items():
                if np.dtype(kind).kind not in "iu":
                    raise DamagedCacheError(_damaged(path))
                mapped = np.memmap(file, dtype=kind, mode="r", offset=begin, shape=(count,))
                arrays[name] = mapped.view(np.ndarray)  # the subclass takes several times as long for one entry
            if not is_sound(header["facts"], arrays):
                raise DamagedCacheError(_damaged(path))
            return header["facts"], arrays
    except DamagedCacheError:
        raise
    except OSError:
        return None
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError):
        raise DamagedCacheError(_damaged(path)) from None


def _damaged(path: Path) -> str:
    return f"{path}: the index kept here is damaged; it is made anew from the set"


def _digest_from(file: BinaryIO, begin: int) -> bytes:
    """Return the hash of a file from a byte on, through a buffer: a map would leave all of it in the memory of the process."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK))
    file.seek(begin)
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        digest.update(buffer[:count])
    return digest.digest()


def write_cache(path: Path, wanted: Facts, facts: Facts, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a cache; it gets its name when it is complete. Raises OSError where the folder cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table: dict[str, tuple[str, int, int]] = {}
    begin = _first_array(wanted, facts, arrays)
    for name, values in arrays.items():
        table[name] = (values.dtype.str, len(values), begin)
        begin = _aligned(begin + values.nbytes)
    header = json.dumps({"stamp": wanted, "facts": facts, "arrays": table, "size": begin}).encode()
    unfinished = path.with_name(
        f".{path.name}.{secrets.token_hex(8)}"
    )  # processes may write at once; mkstemp would make it 0600
    try:
        with open(unfinished, "x+b") as file:
            file.write(_MAGIC + bytes(_DIGEST) + len(header).to_bytes(8, "little") + header)
            for name, values in arrays.items():
                file.seek(table[name][2])
                values.tofile(file)
            file.truncate(begin)
            digest = _digest_from(file, len(_MAGIC) + _DIGEST)
            file.seek(len(_MAGIC))
            file.write(digest)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _first_array(wanted: Facts, facts: Facts, arrays: Mapping[str, np.ndarray]) -> int:
    """Return where the arrays may begin: behind a header with the widest numbers that it can hold."""
    widest = {name: [values.dtype.str, 1 << 62, 1 << 62] for name, values in arrays.items()}
    header = json.dumps({"stamp": wanted, "facts": facts, "arrays": widest, "size": 1 << 62}).encode()
    return _aligned(len(_MAGIC) + _DIGEST + 8 + len(header))


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
