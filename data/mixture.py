"""Trains on several sets as one: data.sources.

An epoch takes each image of a source `repeat` times. If repeat is a fraction, for example 0.5, each epoch takes another half of
the source: the epochs go through a permutation of its images, and each continues where the previous one stopped.
Shapes: n = samples, S = sources.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from utils.files import read_numbers
from utils.randomness import derive, permute

from .base import FaceDataset
from .recordio.index import distinct


class Source(NamedTuple):
    """A set, the number of times that an epoch takes each of its images, and the class of each of its labels."""

    dataset: FaceDataset
    repeat: float
    classes: np.ndarray  # (dataset.num_classes,) int64


class MixedDataset(FaceDataset):
    """The images of all sources, one source after another; `epoch_indices` selects the images of an epoch."""

    def __init__(self, sources: Sequence[Source], seed: int) -> None:
        self.sources, self.seed = sources, seed
        self._begins = np.cumsum([0, *(source.dataset.num_images for source in sources)])
        shares = [round(source.repeat * source.dataset.num_images) for source in sources]
        for number, (source, share) in enumerate(zip(sources, shares, strict=True)):
            if share < 1:
                raise ValueError(
                    f"each source must have at least one image per epoch, but {source.repeat} times the "
                    f"{source.dataset.num_images} images of source {number} is none; raise its repeat"
                )
        self._draws = np.cumsum([0, *shares])
        self.num_images = int(self._draws[-1])
        self.num_classes = 1 + max(int(source.classes.max()) for source in sources)
        self.warnings = tuple(line for source in sources for line in source.dataset.warnings)

    @property
    def num_stored(self) -> int:
        return int(self._begins[-1])

    def describe(self) -> str:
        lines = [f"{len(self.sources)} sources, {self.num_images} images per epoch, {self.num_classes} classes"]
        lines += [
            f"  {share} per epoch, classes {source.classes.min()} to {source.classes.max()}: {source.dataset.describe()}"
            for source, share in zip(self.sources, np.diff(self._draws), strict=True)
        ]
        return "\n".join(lines)

    def epoch_indices(self, positions: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        images = np.empty_like(positions)
        which = np.searchsorted(self._draws, positions, side="right") - 1
        for number, source in enumerate(self.sources):
            rows = which == number
            share, size = int(self._draws[number + 1] - self._draws[number]), source.dataset.num_images
            inside = positions[rows] - self._draws[number]
            if share % size:
                inside = permute((epochs[rows] * share + inside) % size, size, derive(self.seed, "source", number))
            images[rows] = self._begins[number] + inside % size
        return images

    def _find(self, index: int) -> tuple[Source, int]:
        number = int(np.searchsorted(self._begins, index, side="right")) - 1
        return self.sources[number], index - int(self._begins[number])

    def key(self, index: int) -> str:
        source, inside = self._find(index)
        return source.dataset.key(inside)

    def label(self, index: int) -> int:
        source, inside = self._find(index)
        return int(source.classes[source.dataset.label(inside)])

    def labels(self) -> np.ndarray:
        return np.concatenate([source.classes[source.dataset.labels()] for source in self.sources])

    def layout(self) -> Iterable[np.ndarray | bytes]:
        yield self._draws
        for source in self.sources:
            yield from source.dataset.layout()

    def sample(self, index: int) -> tuple[bytes | memoryview | np.ndarray, int]:
        source, inside = self._find(index)
        image, label = source.dataset.sample(inside)
        return image, int(source.classes[label])

    def prefetch(self, index: int) -> None:
        source, inside = self._find(index)
        source.dataset.prefetch(inside)

    def read_ahead(self, indices: np.ndarray) -> None:
        cuts = np.searchsorted(indices, self._begins)
        for number, source in enumerate(self.sources):
            inside = indices[cuts[number] : cuts[number + 1]] - self._begins[number]
            if len(inside):
                source.dataset.read_ahead(inside)


def class_maps(counts: Sequence[int], rule: str) -> list[np.ndarray]:
    """Return for each source the class of each of its labels, (counts[s],) int64.

    Args:
        counts: the number of classes of each source.
        rule: `offset` if labels of different sources are different people; `same` if equal labels are the same person; or the
            path of a text file with lines `source label class`, which must list every label of every source.
    """
    if rule == "offset":
        begins = np.cumsum([0, *counts])
        return [np.arange(count) + begin for count, begin in zip(counts, begins, strict=False)]
    if rule == "same":
        return [np.arange(count) for count in counts]
    return _read_class_maps(Path(rule), counts)


def _read_class_maps(path: Path, counts: Sequence[int]) -> list[np.ndarray]:
    if not path.is_file():
        raise ValueError(f"labels must be offset, same, or a file of lines 'source label class'; there is no file {path}")
    maps = [np.full(count, -1, dtype=np.int64) for count in counts]
    for number, (source, label, target) in read_numbers(path, "source label class"):
        if source >= len(counts) or label >= counts[source]:
            raise ValueError(f"{path}: line {number}: there is no label {label} in a source {source} (sources count from 0)")
        if maps[source][label] not in (-1, target):
            raise ValueError(f"{path}: line {number}: label {label} of source {source} has class {maps[source][label]} already")
        maps[source][label] = target
    for source, classes in enumerate(maps):
        if (classes < 0).any():
            raise ValueError(f"{path}: label {int((classes < 0).argmax())} of source {source} has no class; list every label")
    used = distinct(np.concatenate(maps))
    if int(used[-1]) + 1 != len(used):
        gap = int(np.flatnonzero(used != np.arange(len(used)))[0])
        raise ValueError(f"{path}: classes must be 0 to {len(used) - 1} without gaps, but {gap} is missing")
    return maps
