"""Training through damaged records: data.on_bad_record=skip.

A sample that cannot be read is replaced by another one, a function of (seed, index) alone: so the batch is the same for any
number of threads and after a resume. Nothing is hidden: every bad record is counted and the first are named.
"""

import threading
from collections.abc import Iterable

import numpy as np

from utils.randomness import derive

from .base import FaceDataset

_NAMED = 10  # bad records that are told one by one
_ATTEMPTS = 20  # replacements tried for a sample, each with the chance of max_bad_fraction to be bad as well


class TolerantDataset(FaceDataset):
    """A dataset whose bad samples are replaced, until more than `max_bad_fraction` of its images were found bad."""

    def __init__(self, dataset: FaceDataset, seed: int, max_bad_fraction: float) -> None:
        self.dataset, self.seed, self.max_bad_fraction = dataset, seed, max_bad_fraction
        self.num_images, self.num_classes = dataset.num_images, dataset.num_classes
        self.warnings = dataset.warnings
        self.bad: dict[int, str] = {}  # by index: the error
        self._told = 0
        self._lock = threading.Lock()

    @property
    def num_stored(self) -> int:
        return self.dataset.num_stored

    def describe(self) -> str:
        return f"{self.dataset.describe()}; up to {self._budget()} bad records are skipped"

    def _budget(self) -> int:
        return int(self.max_bad_fraction * self.num_stored)

    def key(self, index: int) -> str:
        return self.dataset.key(index)

    def label(self, index: int) -> int:
        return self.dataset.label(index)

    def labels(self) -> np.ndarray:
        return self.dataset.labels()

    def label_digest(self) -> str:
        return self.dataset.label_digest()

    def layout(self) -> Iterable[np.ndarray | bytes]:
        return self.dataset.layout()

    def sample(self, index: int) -> tuple[bytes | memoryview | np.ndarray, int]:
        return self.dataset.sample(index)

    def epoch_indices(self, positions: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        return self.dataset.epoch_indices(positions, epochs)

    def prefetch(self, index: int) -> None:
        self.dataset.prefetch(index)

    def read_ahead(self, indices: np.ndarray) -> None:
        self.dataset.read_ahead(indices)

    def decode_into(self, index: int, out: np.ndarray) -> int:
        """Write the pixels of a sample, or of the one that replaces it, into `out`; return the class of what was written."""
        try:
            return self.dataset.decode_into(index, out)
        except ValueError as error:
            self._count(index, str(error))
        for attempt in range(_ATTEMPTS):
            other = derive(self.seed, "replacement", index, attempt) % self.num_stored
            try:
                return self.dataset.decode_into(other, out)
            except ValueError as error:
                self._count(other, str(error))
        raise ValueError(
            f"{self.bad[index]}. And so were {_ATTEMPTS} records drawn in its place: this is no single bad record, so "
            "data.on_bad_record=skip does not help"
        )

    def _count(self, index: int, error: str) -> None:
        with self._lock:
            self.bad[index] = error
            found = len(self.bad)
        if found > self._budget():
            raise ValueError(
                f"data.max_bad_fraction: {found} of {self.num_stored} images are bad, {self.max_bad_fraction:g} or "
                f"{self._budget()} are allowed; the last one: {error}. Check the set with scripts.data.verify"
            ) from None

    def take_warnings(self) -> list[str]:
        with self._lock:
            errors = list(self.bad.values())
        told, self._told = self._told, len(errors)
        lines = [f"bad record replaced: {error}" for error in errors[told:_NAMED]]
        if len(errors) > max(told, _NAMED):
            lines.append(f"{len(errors)} bad records so far, each replaced by another image")
        return lines + self.dataset.take_warnings()
