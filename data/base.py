"""The interface of all datasets, and what trains another sample in the place of each bad one, as long as they are few.

Shapes: H = W = data.image_size, 112 unless said otherwise.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from utils.distributed.agreement import digest
from utils.image import IMAGE_SIZE, decode_rgb, decode_rgb_into, resize_square
from utils.randomness import derive

_NAMED = 10  # bad records that are reported one by one
_ATTEMPTS = 20  # replacements tried for a sample; each may be bad too, with a probability of at most max_bad_fraction


class Tolerance:
    """Replaces the bad samples of a set of `num_stored`; an error if more than `max_bad_fraction` of them are bad."""

    def __init__(self, num_stored: int, seed: int, max_bad_fraction: float) -> None:
        self.num_stored, self.seed, self.max_bad_fraction = num_stored, seed, max_bad_fraction
        self.budget = int(max_bad_fraction * num_stored)
        self.bad: dict[int, str] = {}  # index -> error
        self._told = 0
        self._lock = threading.Lock()

    def decode(self, decode_into: Callable[[int, np.ndarray], int], index: int, out: np.ndarray) -> int:
        """Write the pixels of a sample, or of its replacement, into `out`; return the class of the sample that was written."""
        try:
            return decode_into(index, out)
        except ValueError as error:
            self._count(index, str(error))
        for attempt in range(_ATTEMPTS):
            other = derive(self.seed, "replacement", index, attempt) % self.num_stored
            try:
                return decode_into(other, out)
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
        if found > self.budget:
            raise ValueError(
                f"data.max_bad_fraction: at most {self.budget} bad images are allowed ({self.max_bad_fraction:g} of "
                f"{self.num_stored}), got {found}; the last one: {error}. Check the set with face data verify"
            ) from None

    def take_warnings(self) -> list[str]:
        """Return what is new for the user since the last call."""
        with self._lock:
            errors = list(self.bad.values())
        told, self._told = self._told, len(errors)
        lines = [f"bad record replaced: {error}" for error in errors[told:_NAMED]]
        if len(errors) > max(told, _NAMED):
            lines.append(f"{len(errors)} bad records so far, each replaced by another image")
        return lines


class FaceDataset(ABC):
    """Images by index in [0, num_stored), each with an integer label in [0, num_classes)."""

    num_images: int  # per epoch
    num_classes: int
    warnings: tuple[str, ...] = ()  # for the user, from opening the set
    _labels: np.ndarray  # of a set that has them in memory
    landmarks: np.ndarray | None = None  # of the stored images, if they were asked for: see data/landmarks.py
    tolerance: Tolerance | None = None  # of bad samples; None = each is an error

    @property
    def num_stored(self) -> int:
        """The number of stored samples; it differs from num_images only for a mixture of sets."""
        return self.num_images

    @abstractmethod
    def describe(self) -> str:
        """Return one line for the log: the place of the images, their form, and their number."""

    def in_words(self) -> str:
        """Return `describe`, and how many bad samples are allowed."""
        return self.describe() + (f"; up to {self.tolerance.budget} bad records are skipped" if self.tolerance else "")

    @abstractmethod
    def key(self, index: int) -> str:
        """Return the user's name for a sample, such as its path, for error messages."""

    def label(self, index: int) -> int:
        """Return the class of a sample."""
        return int(self.labels()[index])

    def labels(self) -> np.ndarray:
        """Return the classes of all samples, (num_stored,) of an integer type."""
        return self._labels

    @abstractmethod
    def layout(self) -> Iterable[np.ndarray | bytes]:
        """Yield integer arrays (n,) and byte strings that identify the place of each image; equal for all copies of a set."""

    def people(self) -> np.ndarray:
        """Return the name of the person on each stored image, (n,) texts: here the label."""
        return np.asarray(self.labels()).astype(str)

    def label_digest(self) -> str:
        """Return a hash of the classes of all samples, in their order."""
        return digest([self.labels()])

    def fingerprint(self) -> dict[str, int | str]:
        """Return counts and hashes by name. They are equal if two processes see the same samples in the same order."""
        points, found = self.landmarks, {}
        if points is not None:
            found["hash of the landmarks"] = digest([points.view(f"u{points.itemsize}")])  # which takes integers
        return {
            **found,
            "number of images": self.num_images,
            "number of classes": self.num_classes,
            "hash of the labels": self.label_digest(),
            "hash of the places of the images": digest(self.layout()),
        }

    @abstractmethod
    def sample(self, index: int) -> tuple[bytes | memoryview | np.ndarray, int]:
        """Return an encoded image, or its (H, W, 3) uint8 RGB pixels, and its class."""

    def epoch_indices(self, positions: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Return the samples (n,) int64 at these positions (n,) of these epochs (n,), before any shuffling."""
        return positions

    def prefetch(self, index: int) -> None:  # noqa: B027 - most datasets have nothing to do
        """Start to fetch a sample from storage, so that it is in memory when it is needed."""

    def read_ahead(self, indices: np.ndarray) -> None:  # noqa: B027
        """Start to fetch many samples (n,) int64, in ascending order, by long sequential reads."""

    _heard: tuple[str, ...] = ()

    def hear(self, warnings: Sequence[str]) -> None:
        """Take warnings that a process had which decodes images of this set."""
        new = tuple(warnings)  # first: take_warnings of another thread must not come between two reads
        self._heard += new

    def take_warnings(self) -> list[str]:
        """Return the new warnings for the user since the last call."""
        own = self.tolerance.take_warnings() if self.tolerance else []
        heard, self._heard = self._heard, ()
        return [*own, *heard]

    def picture(self, index: int) -> np.ndarray | None:
        """Return the pixels of a sample in its own size (H, W, 3) uint8, RGB, to be shown; None if it is damaged."""
        try:
            image, _ = self.sample(index)
            return image if isinstance(image, np.ndarray) else decode_rgb(image)
        except ValueError:
            return None

    def pixels_and_label(self, index: int, size: int = IMAGE_SIZE) -> tuple[np.ndarray, int]:
        """Return the pixels of a sample, (size, size, 3) uint8, RGB, and the class that `decode_into` returns."""
        out = np.empty((size, size, 3), np.uint8)
        label = self.decode_into(index, out)
        return out, label

    def decode_into(self, index: int, out: np.ndarray) -> int:
        """Write the pixels of a sample into `out` (H, W, 3) uint8, RGB, and return its class.

        Square images of another size are resized, except to 112 x 112: where that is asked for, all sets have it, and an
        image of another size is most likely a photograph that was not aligned. With a tolerance, a sample that cannot be read
        is replaced by another one.
        """
        return self.tolerance.decode(self._decode_into, index, out) if self.tolerance else self._decode_into(index, out)

    def _decode_into(self, index: int, out: np.ndarray) -> int:
        image, label = self.sample(index)
        if isinstance(image, np.ndarray):
            pixels = image
        else:
            try:
                pixels = decode_rgb_into(image, out)
            except ValueError as error:
                raise ValueError(f"{self.key(index)}: {error}. Remove it from the dataset, or replace it") from None
            if pixels is out:
                return label
        if pixels.shape != out.shape and len(out) != IMAGE_SIZE and pixels.shape == (len(pixels), len(pixels), 3):
            pixels = resize_square(pixels, len(out))
        if pixels.shape != out.shape:
            height, width = pixels.shape[:2]
            other = f", or set data.image_size={height} if all have that" if height == width else ""
            raise ValueError(
                f"{self.key(index)}: an image must be {out.shape[0]} x {out.shape[1]} pixels (height x width), "
                f"got {height} x {width}. Align the faces to that size first{other}"
            )
        out[...] = pixels
        return label
