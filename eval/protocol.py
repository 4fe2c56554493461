"""What every evaluation is: a protocol embeds its images with a network and returns figures.

A new protocol is a class with the methods of `Protocol` and a line in eval.monitor.PROTOCOLS. Then it runs offline and in
training, and the log, metrics.jsonl, TensorBoard, results.json, the table and the HTML report show its figures.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from torch import nn

from utils.cli import progress
from utils.distributed import World, all_gather_objects, raise_on_all_ranks

from .embed import EmbedSettings, embed_images

Figures = Mapping[str, float | None]  # None: too few pairs or probes to measure it
Decode = Callable[[int, int], np.ndarray]  # image number, size -> (size, size, 3) uint8 RGB; ValueError if it cannot
Computed = TypeVar("Computed")
STOPPED = "stopped before its end"  # in the error of an evaluation that was stopped, on every rank


class Embed(NamedTuple):
    """Embeds images on all ranks. Every method is a collective call and returns the same on every rank."""

    model: nn.Module
    world: World
    settings: EmbedSettings = EmbedSettings()
    shows_progress: bool = False  # of long work, as bars on stderr
    is_stopped: Callable[[], bool] = lambda: False  # asked after each batch; where it is true, every rank raises SharedError

    def views(self, decode: Decode, count: int, summed: bool = False) -> np.ndarray:
        """Return the raw embeddings of all images and of their mirror images (2, count, D) float32, or their sums (1, ...)."""
        arguments = (self.model, lambda index: decode(index, self.settings.image_size), count, self.world, self.settings)
        with progress([], -(-count // self.world.world_size), "embedding", "image", shown=self.shows_progress) as bar:
            return embed_images(*arguments, lambda images: self._check() or bar.update(images), summed)

    def sums(self, decode: Decode, count: int) -> np.ndarray:
        """Return plain + mirrored raw embeddings, (count, D) float32."""
        return self.views(decode, count, summed=True)[0]

    def on_first_rank(self, compute: Callable[[], Computed]) -> Computed:
        """Return on every rank the small result of `compute`, which runs on rank 0 alone.

        Raises:
            SharedError: on every rank, if it raises ValueError or OSError.
        """
        found = None
        with raise_on_all_ranks(self.world):
            if self.world.rank == 0:
                found = compute()
        return all_gather_objects(found, self.world)[0]

    def bar(self, chunks: Sequence[int]) -> Iterator[int]:
        """Yield the chunks of a long computation, under a progress bar if bars are shown."""
        for chunk in progress(chunks, len(chunks), "scoring", "chunk", shown=self.shows_progress):
            self._check()
            yield chunk

    def _check(self) -> None:
        if self.is_stopped():
            raise ValueError(STOPPED)


class Result(ABC):
    """What a protocol found."""

    @property
    @abstractmethod
    def figures(self) -> Figures:
        """Every scalar by its name, for the log, metrics.jsonl and tables. TAR at FAR 1e-3 is tar@1e-3, as in eval.metric."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return plain values for results.json."""

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Return 95 % intervals by the name of the figure; those that cannot be computed are left out."""
        return {}


@dataclass(frozen=True)
class Rates(Result):
    """A result without anything to draw: figures, and the values for results.json."""

    rates: Figures
    values: Mapping[str, Any]

    @property
    def figures(self) -> Figures:
        return self.rates

    def as_json(self) -> dict[str, Any]:
        return dict(self.values)


Found = TypeVar("Found", bound=Result, covariant=True)


class Protocol(ABC, Generic[Found]):
    """A set of faces and the rule by which a network is scored on it."""

    name: str  # of its figures in every output
    path: str  # of its file or folder

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Return hashes and counts by name, which must be equal for all processes."""

    @abstractmethod
    def describe(self) -> str:
        """Return its size in words, such as "6,000 pairs"."""

    @abstractmethod
    def has_metric(self, metric: str) -> bool:
        """Return whether its figures have this eval.metric; raise ValueError if it is too small to measure it."""

    @abstractmethod
    def score(self, embed: Embed) -> Found:
        """Embed and score. A collective call, with the same result on every rank; ValueError on every rank."""


def check_pair_counts(name: str, metric: str, same: np.ndarray) -> None:
    """Raise ValueError if pairs with the labels `same` (P,) bool are too few to measure an eval.metric."""
    genuine = int(np.count_nonzero(same))
    impostor = len(same) - genuine
    if metric == "accuracy":
        return
    needed = round(1 / float(metric.removeprefix("tar@"))) if metric.startswith("tar@") else 1
    if impostor < needed or not genuine:
        raise ValueError(
            f"eval.metric={metric} needs {needed} impostor pairs and a genuine one in each set; {name} has "
            f"{impostor} and {genuine}. Choose another metric, or leave the set out"
        )
