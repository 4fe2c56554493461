"""Write down the batch behind a non-finite loss or gradient."""

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from utils.distributed import World, all_gather_objects
from utils.files import write_file
from utils.randomness import derive

from .base import FaceDataset
from .sampler import Samples


def write_bad_batch(
    path: Path, step: int, why: str, dataset: FaceDataset, samples: Samples, embeddings: Sequence[Tensor], world: World
) -> str:
    """Write the record keys of a global batch to the JSON file `path`; collective.

    Args:
        samples: this rank's samples of the step.
        embeddings: of each of its micro-batches, (b, D).

    Returns:
        A sentence that says where the keys are and which embeddings are bad. Only rank 0 writes, and knows whether that failed.
    """
    finite = torch.cat([rows.detach().float().isfinite().all(dim=1) for rows in embeddings]).tolist()
    mine = [
        {"rank": world.rank, "record": dataset.key(index), "label": dataset.label(index), "embedding_finite": good}
        for index, good in zip(samples.indices.tolist(), finite, strict=True)
    ]
    everyone = [entry for entries in all_gather_objects(mine, world) for entry in entries]
    bad = [entry["record"] for entry in everyone if not entry["embedding_finite"]]
    where = f"are in {path}"
    if world.rank == 0:
        try:
            write_file(path, json.dumps({"step": step, "why": why, "samples": everyone}, indent=1))
        except OSError as error:  # a full disk must not hide the original error
            where = f"could not be written to {path} ({error.strerror})"
    some = "its embeddings are finite"
    if bad:
        some = f"{len(bad)} of its {len(everyone)} embeddings are not finite, the first is that of {bad[0]}"
    return f"The records of its batch {where}: {some}"


_NAMED = 10  # bad records that are reported one by one
_ATTEMPTS = 20  # replacements tried for a sample; each may be bad too, with a probability of at most max_bad_fraction


class TolerantDataset(FaceDataset):
    """A dataset whose bad samples are replaced; an error if more than `max_bad_fraction` of its images are bad."""

    def __init__(self, dataset: FaceDataset, seed: int, max_bad_fraction: float) -> None:
        self.dataset, self.seed, self.max_bad_fraction = dataset, seed, max_bad_fraction
        self.num_images, self.num_classes = dataset.num_images, dataset.num_classes
        self.warnings = dataset.warnings
        self.bad: dict[int, str] = {}  # index -> error
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
        """Write the pixels of a sample, or of its replacement, into `out`; return the class of the sample that was written."""
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
            f"{self.bad[index]}. The {_ATTEMPTS} records drawn to replace it are bad too, so data.on_bad_record=skip does not "
            "help"
        )

    def _count(self, index: int, error: str) -> None:
        with self._lock:
            self.bad[index] = error
            found = len(self.bad)
        if found > self._budget():
            raise ValueError(
                f"data.max_bad_fraction: at most {self._budget()} bad images are allowed ({self.max_bad_fraction:g} of "
                f"{self.num_stored}), got {found}; the last one: {error}. Check the set with face data verify"
            ) from None

    def take_warnings(self) -> list[str]:
        with self._lock:
            errors = list(self.bad.values())
        told, self._told = self._told, len(errors)
        lines = [f"bad record replaced: {error}" for error in errors[told:_NAMED]]
        if len(errors) > max(told, _NAMED):
            lines.append(f"{len(errors)} bad records so far, each replaced by another image")
        return lines + super().take_warnings() + self.dataset.take_warnings()
