"""Skips bad samples: another one is trained in the place of each, as long as they are few."""

import threading
from collections.abc import Callable

import numpy as np

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
