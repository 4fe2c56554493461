"""Image files listed in a text file with one `path label` per line, a common format.

Shapes: N = images.
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from utils.files import MAX_TEXT, read_bytes, shown

from .base import FaceDataset

_CHUNK = 1 << 16  # paths hashed at once


class ListDataset(FaceDataset):
    """The images of a list. A line has a path, absolute or relative to the list's folder, then white space and the label.

    A path may contain blanks; the label is the last word of the line. Empty lines are skipped.
    """

    def __init__(self, list_path: str | os.PathLike[str]) -> None:
        self.path = Path(list_path)
        try:
            self._text = read_bytes(self.path, MAX_TEXT)
        except OSError as error:
            raise ValueError(f"the list {list_path} cannot be read: {error.strerror}") from None
        begins, lengths, labels = (
            [],
            [],
            [],
        )  # of the paths in the text: strings would take ten times the memory
        begin = 0
        for number, line in enumerate(self._text.splitlines(keepends=True), 1):
            words = line.rsplit(None, 1)
            if words:
                if len(words) != 2 or not words[1].isdigit() or len(words[1]) > 8:
                    raise ValueError(f"{self.path}: line {number} must be 'path label', the label an integer in [0, 10^8)")
                begins.append(begin + len(line) - len(line.lstrip()))
                lengths.append(len(words[0].strip()))
                labels.append(int(words[1]))
            begin += len(line)
        if not labels:
            raise ValueError(f"{self.path}: lists no image; each line must be 'path label'")
        self._begins, self._lengths = np.array(begins, dtype=np.int64), np.array(lengths, dtype=np.int32)
        self._labels = np.array(labels, dtype=np.int32)
        self.num_images = len(labels)
        self.num_classes = int(self._labels.max()) + 1
        first = self._file(0)
        if not first.is_file():
            raise ValueError(
                f"{self.path}: its first image {shown(first)} does not exist; paths are relative to the folder of the list"
            )

    def _file(self, index: int) -> Path:
        begin, length = int(self._begins[index]), int(self._lengths[index])
        return self.path.parent / os.fsdecode(self._text[begin : begin + length])

    def describe(self) -> str:
        filled = np.count_nonzero(np.bincount(self._labels, minlength=self.num_classes))
        return (
            f"{shown(self.path)}: a list of image files, {self.num_images} images, {self.num_classes} classes "
            f"(largest label + 1), {self.num_classes - filled} of them without images"
        )

    def key(self, index: int) -> str:
        return shown(self._file(index))

    def label(self, index: int) -> int:
        return int(self._labels[index])

    def labels(self) -> np.ndarray:
        return self._labels

    def layout(self) -> Iterable[bytes]:
        """Yield the paths below the common folder of all images, which may differ between machines."""
        first, last = (os.fsdecode(path) for path in (min(self._paths(0)), max(self._paths(0))))
        same = os.path.commonprefix([first, last])  # noqa: RUF071, it is cut at a slash below; all paths begin with it
        common = len(os.fsencode(same[: same.rfind("/") + 1]))
        paths = self._paths(common)
        while chunk := list(itertools.islice(paths, _CHUNK)):
            yield b"\0".join(chunk)

    def _paths(self, begin: int) -> Iterator[bytes]:
        """Yield the path of each image without its first `begin` bytes."""
        for first, length in zip(self._begins, self._lengths, strict=True):
            yield self._text[first + begin : first + length]

    def sample(self, index: int) -> tuple[bytes, int]:
        try:
            return read_bytes(self._file(index)), int(self._labels[index])
        except OSError as error:
            raise ValueError(f"{self.key(index)}: the file cannot be read: {error.strerror}") from None
