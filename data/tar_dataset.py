"""Image files in tar shards in the form of WebDataset: members NAME.jpg and NAME.cls, which holds the class as text.

Source: the conventions of https://github.com/webdataset/webdataset. That library reads shards from front to back. Here the
headers are read once, and images are then read by offset in any order.
Shapes: N = images, T = shards.
"""

import os
import tarfile
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utils.cli import progress
from utils.files import check_file, reading, shown
from utils.image import IMAGE_SUFFIXES

from .base import FaceDataset
from .index_cache import Arrays, Facts, open_index

_MAX_EXTENSION = 1 << 20  # bytes of a long name or extended attributes
_MAX_CLASSES = 10**8
_MAX_CHAIN = 8  # headers that belong to one member
_ARRAYS = ("shards", "offsets", "sizes", "labels", "name_ends", "names")


class TarDataset(FaceDataset):
    """The images of all *.tar files of a folder, or of one file; the files are in alphabetical order.

    The first opening reads all headers. The folder `cache`, if given, keeps the result.
    """

    def __init__(self, path: str | os.PathLike[str], cache: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path)
        self.files = [self.path] if self.path.is_file() else sorted(self.path.glob("*.tar"))
        if not self.files:
            raise ValueError(f"no *.tar in {path}. Give the folder that holds the shards, or one shard")
        _, arrays, self.warnings = open_index(
            cache, self.files, _ARRAYS, self._is_sound, lambda: ({}, _index_shards(self.files))
        )
        self._shards, self._offsets, self._sizes = arrays["shards"], arrays["offsets"], arrays["sizes"]
        self._labels, self._name_ends, self._names = arrays["labels"], arrays["name_ends"], arrays["names"]
        self.num_images = len(self._labels)
        self.num_classes = int(self._labels.max()) + 1

    def _is_sound(self, facts: Facts, arrays: Arrays) -> bool:
        """Return whether the arrays of a cache are a plausible index of these shards."""
        shards, offsets, sizes, labels, ends, names = (arrays[name] for name in _ARRAYS)
        room = np.array([file.stat().st_size for file in self.files], dtype=np.int64)
        return bool(
            0 < len(shards) == len(offsets) == len(sizes) == len(labels) == len(ends)
            and np.all((shards >= 0) & (shards < len(room)) & (labels >= 0) & (labels < _MAX_CLASSES))
            and np.all((offsets >= 0) & (sizes >= 0) & (sizes <= room[shards] - offsets))
            and ends[0] >= 0
            and np.all(ends[1:] >= ends[:-1])
            and ends[-1] == len(names)
            and names.dtype == np.uint8
        )

    def describe(self) -> str:
        counts = f"{self.num_images} images, {self.num_classes} classes (largest label + 1)"
        return f"{shown(self.path)}: {len(self.files)} tar shard(s), {counts}"

    def key(self, index: int) -> str:
        begin = int(self._name_ends[index - 1]) if index else 0
        name = os.fsdecode(self._names[begin : int(self._name_ends[index])].tobytes())
        return f"{shown(name)} in {self.files[int(self._shards[index])]}"

    def layout(self) -> Iterable[np.ndarray | bytes]:
        return [*(os.fsencode(file.name) for file in self.files), self._shards, self._offsets, self._sizes]

    def sample(self, index: int) -> tuple[bytes, int]:
        size = int(self._sizes[index])
        with reading(self.key(index)), open(self.files[int(self._shards[index])], "rb", buffering=0) as file:
            data = os.pread(file.fileno(), size, int(self._offsets[index]))
        if len(data) < size:
            raise ValueError(f"{self.key(index)}: has {size} bytes, but the shard ends after {len(data)} of them")
        return data, int(self._labels[index])


def _index_shards(files: Sequence[Path]) -> Arrays:
    """Return shards (N,) int32, offsets (N,), sizes (N,) and name_ends (N,) int64, labels (N,) int32, names uint8."""
    columns, names = tuple(array(kind) for kind in "iqqiq"), bytearray()  # tuples would take 200 bytes for each image
    for number, file in enumerate(progress(files, len(files), "reading the headers of the shards", "shard", delay=5)):
        for name, offset, size, label in _samples_of(file):
            names += os.fsencode(name)
            for column, value in zip(columns, (number, offset, size, label, len(names)), strict=True):
                column.append(value)
    if not columns[0]:
        raise ValueError(f"{files[0].parent}: the shards hold no image ({' '.join(IMAGE_SUFFIXES)}) with a .cls member")
    return dict(zip(_ARRAYS, (*map(np.array, columns), np.frombuffer(names, dtype=np.uint8)), strict=True))


class _DamagedHeaderError(Exception):
    """A shard has a header that no writer of shards produces."""


class _Member(tarfile.TarInfo):
    """Checks each header before tarfile uses it.

    tarfile treats a damaged header as the end of the archive, reads long names and extended attributes of any size, follows
    chains of headers until Python's stack overflows, and searches endlessly for the map of a sparse file.
    """

    @classmethod
    def fromtarfile(cls, tar: Any) -> "_Member":
        """Return the next member; after an extended header, tarfile calls this again for the header that it extends."""
        file = tar.fileobj
        begin = file.tell()  # not tar.offset, which after an extended header is still the offset of that
        tar.chain = getattr(tar, "chain", 0) + 1
        try:
            if tar.chain > _MAX_CHAIN:
                raise _DamagedHeaderError(f"byte {begin}: more than {_MAX_CHAIN} headers for one member")
            file.seek(begin)
            header = file.read(tarfile.BLOCKSIZE)
            kind = header[156:157]
            if kind == tarfile.GNUTYPE_SPARSE:
                raise _DamagedHeaderError(f"byte {begin}: a sparse file, which no image is")
            if kind and kind in b"LKxgX":
                extends = cls.frombuf(header, tar.encoding, tar.errors)
                if not 0 <= extends.size <= _MAX_EXTENSION:
                    raise _DamagedHeaderError(
                        f"byte {begin}: an extended header of {extends.size} bytes; {_MAX_EXTENSION} are allowed"
                    )
                if b"GNU.sparse" in file.read(extends.size):
                    raise _DamagedHeaderError(f"byte {begin}: a sparse file, which no image is")
            file.seek(begin)
            return super().fromtarfile(tar)
        except (tarfile.HeaderError, ValueError) as error:  # ValueError: a number that tarfile cannot parse
            ends = isinstance(error, (tarfile.EOFHeaderError, tarfile.EmptyHeaderError))  # type: ignore[attr-defined]
            if ends or (begin == 0 and isinstance(error, tarfile.HeaderError)):  # the zeros at the end, or no tar file
                raise
            raise _DamagedHeaderError(f"byte {begin}: a damaged header: {error}") from None
        finally:
            tar.chain -= 1


def _samples_of(path: Path) -> list[tuple[str, int, int, int]]:
    """Return (name, offset, size, label) of the images of a shard, in its own order."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    try:
        size = check_file(path)
        with tarfile.open(path, "r:", tarinfo=_Member) as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # it would keep all
                if member.size < 0:
                    raise ValueError(f"{path}: the header of {shown(member.name)} is damaged: a size of {member.size} bytes")
                if tar.offset > size:  # the place of the next header, after the padding
                    raise ValueError(f"{path}: the shard is cut off in {shown(member.name)}; copy it again")
                folder, _, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                if not member.isreg() or not stem:
                    continue
                sample = f"{folder}/{stem}"
                if f".{suffix.lower()}" in IMAGE_SUFFIXES:
                    if sample in images:
                        raise ValueError(f"{path}: {shown(member.name)}: a second image of this name; give each its own")
                    images[sample] = (member.name, member.offset_data, member.size)
                elif suffix == "cls":
                    extracted = tar.extractfile(member) if member.size <= 32 else None
                    text = extracted.read().strip() if extracted else b""
                    if not text.isdigit() or len(text) > 8:
                        raise ValueError(f"{path}: {shown(member.name)} must hold the class as an integer in [0, 10^8)")
                    labels[sample] = int(text)
    except OSError as error:
        raise ValueError(f"{path}: the shard cannot be read: {error.strerror}") from None
    except tarfile.TarError as error:
        raise ValueError(f"{path}: not an uncompressed tar file: {error}") from None
    except _DamagedHeaderError as error:
        raise ValueError(f"{path}: {error}; copy the shard again, or rewrite it") from None
    except (OverflowError, RecursionError, EOFError, LookupError, TypeError, UnicodeError) as error:
        raise ValueError(f"{path}: a header is damaged: {error}; copy the shard again, or rewrite it") from None
    missing = [sample for sample in images if sample not in labels]
    if missing:
        name = images[missing[0]][0]
        raise ValueError(
            f"{path}: {shown(name)} has no {missing[0].rpartition('/')[2]}.cls with its class ({len(missing)} such images)"
        )
    return [(*images[sample], labels[sample]) for sample in images]
