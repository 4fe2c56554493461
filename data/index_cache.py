"""Caches the index of a large set in a file that all processes of a machine map, so that the set is parsed only once.

    file = "faceindex" and version, xxh3_128 of all that follows, length of the JSON u64, JSON, then each array at the next
           multiple of 64 bytes; little-endian

Each opening reads the file once and verifies the checksum, since a run would silently train on changed labels. The JSON holds
the size and modification time of each source file, so a changed set is parsed again. The arrays are memory maps: processes that
open the same cache share its pages, and only used pages take memory.
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

_MAGIC = b"faceindex 3\n"
_DIGEST = 16  # bytes
_BLOCK = 1 << 24  # bytes hashed at once
_ALIGN = 64
_MAX_JSON = 1 << 24
Facts = dict[str, Any]  # plain JSON values
Arrays = dict[str, np.ndarray]


def stamp(files: Sequence[Path]) -> Facts:
    """Return the size and modification time of each existing file; a cache with another stamp is out of date."""
    return {path.name: [(status := path.stat()).st_size, status.st_mtime_ns] for path in files if path.is_file()}


def cache_path(folder: Path, source: Path) -> Path:
    """Return the cache file of the set at `source`; its name has the set's name and a hash of its path."""
    place = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:16]
    return folder / f"{source.resolve().parent.name}-{place}.index"


class DamagedCacheError(ValueError):
    """A cache has the right stamp, but its contents are damaged."""


def open_index(
    cache: str | os.PathLike[str] | None,
    files: Sequence[Path],
    names: Sequence[str],
    is_sound: Callable[[Facts, Arrays], bool],
    parse: Callable[[], tuple[Facts, Arrays]],
) -> tuple[Facts, Arrays, tuple[str, ...]]:
    """Return (facts, arrays, warnings) of a set, from the folder `cache` if it has them; otherwise parse and cache them.

    Args:
        cache: None or "" = parse without caching.
        files: the files of the set; the first gives the cache its name.
        names: the names of the arrays.
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
        return *parsed, (*warnings, f"{path}: the index cannot be cached here: {error.strerror}; each start rebuilds it")
    found = None
    with contextlib.suppress(DamagedCacheError):  # another process may be writing it
        found = read_cache(path, wanted, names, is_sound)  # use the mapped arrays, whose pages other processes share
    return *(found or parsed), warnings


def read_cache(
    path: Path, wanted: Facts, names: Sequence[str], is_sound: Callable[[Facts, Arrays], bool] = lambda facts, arrays: True
) -> tuple[Facts, Arrays] | None:
    """Return (facts, arrays) of a cache with this stamp and these arrays, or None if there is none or it is out of date.

    Args:
        is_sound: tells whether the facts and integer arrays are plausible for the set; an exception counts as False. The
            checksum detects damage, but not forgery: whoever can write the file can also write its checksum.

    Raises:
        DamagedCacheError: the cache exists, but is damaged.
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
                raise ValueError
            header = json.loads(file.read(length))
            if header["stamp"] != wanted or list(header["arrays"]) != list(names):
                return None
            arrays, end = dict[str, np.ndarray](), file.tell()
            if _digest_from(file, len(_MAGIC) + _DIGEST) != digest:
                raise ValueError
            for name, (kind, count) in header["arrays"].items():
                if np.dtype(kind).kind not in "iu":
                    raise ValueError
                mapped = np.memmap(file, dtype=kind, mode="r", offset=_aligned(end), shape=(count,))
                arrays[name] = mapped.view(np.ndarray)  # np.memmap takes several times as long to read one entry
                end = _aligned(end) + mapped.nbytes
            if end != size or not is_sound(header["facts"], arrays):
                raise ValueError
            return header["facts"], arrays
    except OSError:
        return None
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError):
        raise DamagedCacheError(f"{path}: the cached index is damaged; it is rebuilt from the set") from None


def _digest_from(file: BinaryIO, begin: int) -> bytes:
    """Return the hash of a file from a byte on. Reads through a buffer, because a map would keep all pages in memory."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK))
    file.seek(begin)
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        digest.update(buffer[:count])
    return digest.digest()


def write_cache(path: Path, wanted: Facts, facts: Facts, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a cache under a temporary name, and rename it when it is complete. Raises OSError if the folder is not writable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {name: (values.dtype.str, len(values)) for name, values in arrays.items()}
    header = json.dumps({"stamp": wanted, "facts": facts, "arrays": table}).encode()
    # a random name, because several processes may write at once; mkstemp would set the mode 0600
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(unfinished, "x+b") as file:
            file.write(_MAGIC + bytes(_DIGEST) + len(header).to_bytes(8, "little") + header)
            for values in arrays.values():
                file.write(bytes(_aligned(file.tell()) - file.tell()))
                values.tofile(file)
            digest = _digest_from(file, len(_MAGIC) + _DIGEST)
            file.seek(len(_MAGIC))
            file.write(digest)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
