"""Writes a face set in RecordIO: train.rec, train.idx, property and train.lst, like insightface's tools.

Source: deepinsight/insightface rec_builder.py (header form) and shuffle_rec.py (headerless form); record_dataset.py describes
the two forms. Shapes: N = images, C = classes.
"""

import os
from pathlib import Path
from types import TracebackType

from utils.image import IMAGE_SIZE

from .image_record import RecordWriter, pack

MAX_CLASSES = 1 << 24  # a label is a float32, which holds integers exactly up to here
_FILES = ("train.rec", "train.idx", "property", "train.lst")  # in the order in which they get their names


class RecordSetWriter:
    """Writes a set into a folder. The files get their final names when `close` has flushed all bytes to the disk.

    As a context manager it calls `close`, or `discard` after an exception.

    Args:
        header: True writes the header form: images at keys 1..N grouped by class, then an identity record for each class,
            then the header at key 0. False writes only images, at keys 0..N-1 in any order of classes (a shuffled set).
        size: height and width of the images in pixels, for property.
        overwrite: replace the set in the folder, if there is one.
        num_classes: the least number of classes in property; the last classes may have no image.

    Raises:
        ValueError: the folder holds a set and `overwrite` is false, or the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        header: bool = True,
        size: int = IMAGE_SIZE,
        overwrite: bool = False,
        num_classes: int = 0,
    ) -> None:
        self.folder, self.header, self.size = Path(folder), header, size
        self.num_images = 0
        self._ends: list[int] = []  # header form: the key after the last image of each class so far
        self._largest = num_classes - 1
        if not overwrite and (self.folder / "train.rec").exists():
            raise ValueError(
                f"{self.folder} holds a train.rec already; add --overwrite to replace it, or choose another folder"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter(self.folder / "train.rec", self.folder / "train.idx")
            self._list = open(  # noqa: SIM115
                self.folder / "train.lst.unfinished", "w", encoding="utf-8", errors="surrogateescape", newline="\n"
            )
        except OSError as error:
            raise ValueError(f"{self.folder}: cannot be written: {error.strerror}") from None

    def add(self, label: int, image: bytes | memoryview, path: str = "") -> int:
        """Append an encoded image; return its key.

        Args:
            label: the class. In header form labels start at 0 and never decrease, and no class may be skipped.
            path: the original path, for train.lst, which lists only images with a path.
        """
        previous = len(self._ends) - 1
        if not 0 <= label < MAX_CLASSES:
            raise ValueError(f"{self.folder}: a label must be in [0, 2^24), because it is stored as float32; got {label}")
        if self.header and label not in (previous, previous + 1):
            raise ValueError(f"{self.folder}: images must be grouped by class, 0, 1, 2 ...; got label {label} after {previous}")
        if not len(image):
            raise ValueError(
                f"{self.folder}: an image must not be empty, image {self.num_images} ({path or label}) has no bytes"
            )
        key = self.num_images + self.header
        self._records.write(key, pack(float(label), key, 0, bytes(image)))
        self.num_images += 1
        if self.header:
            del self._ends[label:]
            self._ends.append(key + 1)
        self._largest = max(self._largest, label)
        if path:
            self._list.write(f"1\t{path.replace(os.sep, '/')}\t{label}\n")
        return key

    @property
    def num_classes(self) -> int:
        """The largest label so far, plus one."""
        return self._largest + 1

    def close(self) -> None:
        """Write the identity records and the header, flush everything to the disk, and give the files their final names."""
        if not self.num_images:
            self.discard()
            raise ValueError(f"{self.folder}: no image was written")
        if self.header:
            first = self.num_images + 1
            begins = [1, *self._ends]
            for label, end in enumerate(self._ends):
                self._records.write(first + label, pack([float(begins[label]), float(end)], first + label, 0, b""))
            self._records.write(0, pack([float(first), float(first + len(self._ends))], 0, 0, b""))
        listed = self._list.tell() > 0
        for name in _FILES[2:]:
            (self.folder / name).unlink(missing_ok=True)  # of the replaced set
        self._records.close()
        (self.folder / "property.unfinished").write_text(f"{self.num_classes},{self.size},{self.size}")
        (self.folder / "property.unfinished").replace(self.folder / "property")
        self._list.flush()
        os.fsync(self._list.fileno())
        self._list.close()
        unfinished = self.folder / "train.lst.unfinished"
        if listed:
            unfinished.replace(self.folder / "train.lst")
        else:
            unfinished.unlink()

    def discard(self) -> None:
        """Delete the unfinished files."""
        self._records.discard()
        self._list.close()
        (self.folder / "train.lst.unfinished").unlink(missing_ok=True)

    def __enter__(self) -> "RecordSetWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()
