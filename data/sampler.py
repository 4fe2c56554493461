"""The order of the samples: a pure function of (seed, epoch, position), computed in O(1) memory.

Training reads one endless stream: epoch 0's permutation of the data, then epoch 1's, and so on, cut into global batches. The
step number determines the samples, so a resumed run continues at the exact sample, and the global batch is the same for any
number of ranks and micro-batches.

full    a permutation of the whole set: the best mixing, but one small random read for each image
block   blocks of adjacent images in random order, with the images mixed within a window of some tens of blocks, so that a
        spinning disk or a network file system reads long runs. The order of the set is only partly mixed: images of an identity
        in one block come in one window. Shuffle the set once to avoid that (face data shuffle)
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from utils.randomness import derive, permute, uniform

_TOGETHER = 16  # steps computed at once, because numpy's call overhead dominates for a small batch


class Samples(NamedTuple):
    """The samples of one rank and step, each array (n,)."""

    indices: np.ndarray  # int64, into the dataset
    mirrored: np.ndarray  # bool
    positions: np.ndarray  # int64, in the stream; they seed the augmentation


class SampleOrder:
    """The stream of samples of a dataset of num_images, for global batches of batch_size images.

    Args:
        flip: mirror each image with probability 1/2.
        epoch_indices: FaceDataset.epoch_indices, for a mixture of sets; None = positions are indices.
        shuffle: the order, see above.
        block, window: for `block`: images per block, and blocks per window.
    """

    def __init__(
        self,
        num_images: int,
        batch_size: int,
        seed: int,
        flip: bool,
        shuffle: Literal["full", "block"] = "full",
        block: int = 1024,
        window: int = 64,
        epoch_indices: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
    ) -> None:
        if num_images < 1:
            raise ValueError("the set has no images")
        self.num_images, self.batch_size, self.seed, self.flip = num_images, batch_size, seed, flip
        self.block, self.window_size = min(block, num_images), min(block, num_images) * window
        self.epoch_indices = epoch_indices
        self.in_blocks = shuffle == "block"
        self._made_for: tuple[int, ...] | None = None  # the steps whose samples are in _made
        self._made = Samples(*(np.empty(0, dtype=np.int64) for _ in range(3)))

    def samples(self, step: int, rank: int = 0, world_size: int = 1, accumulation: int = 1) -> Samples:
        """Return this rank's samples of one optimizer step, one micro-batch after another.

        Global batch `step` begins at position step * batch_size of the stream. Micro-batch a is the a-th of `accumulation`
        equal blocks of it, and rank r takes the r-th of world_size equal blocks of that.
        """
        block, place = divmod(step, _TOGETHER)
        wanted = (block, rank, world_size, accumulation)
        if self._made_for != wanted:
            stream = self._stream(np.arange(block * _TOGETHER, (block + 1) * _TOGETHER), rank, world_size, accumulation)
            self._made_for, self._made = wanted, self.at(stream)
        share = len(self._made.indices) // _TOGETHER
        return Samples(*(column[place * share : (place + 1) * share] for column in self._made))

    def _stream(self, steps: np.ndarray, rank: int, world_size: int, accumulation: int) -> np.ndarray:
        """Return the positions of this rank's samples of some steps, one after another."""
        share = self.batch_size // (accumulation * world_size)
        blocks = (np.arange(accumulation) * world_size + rank) * share
        return (steps[:, None, None] * self.batch_size + blocks[:, None] + np.arange(share)).reshape(-1)

    def at(self, stream: np.ndarray) -> Samples:
        """Return the samples at these positions (int64) of the stream."""
        epochs, positions = np.divmod(stream, self.num_images)
        indices = np.empty_like(positions)
        mirrored = np.zeros(len(positions), dtype=bool)
        for epoch in np.unique(epochs).tolist():
            rows = epochs == epoch
            if self.in_blocks:
                indices[rows] = self._by_blocks(positions[rows], epoch)
            else:
                indices[rows] = permute(positions[rows], self.num_images, derive(self.seed, "order", epoch))
            if self.flip:
                mirrored[rows] = uniform(derive(self.seed, "flip", epoch), positions[rows]) < 0.5
        return Samples(indices if self.epoch_indices is None else self.epoch_indices(indices, epochs), mirrored, stream)

    def _by_blocks(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        """Return the images at these positions of an epoch: mixed within a window of blocks, with the blocks in random order.

        The set is treated as a ring, and each epoch cuts it into blocks from another start, so that the blocks differ between
        epochs. The images after the last whole block come at the end.
        """
        mixed = np.empty_like(positions)
        windows = positions // self.window_size
        for window in np.unique(windows).tolist():
            rows, begin = windows == window, window * self.window_size
            size = min(self.window_size, self.num_images - begin)
            mixed[rows] = begin + permute(positions[rows] - begin, size, derive(self.seed, "window", epoch, window))
        slots, inside = np.divmod(mixed, self.block)
        whole = self.num_images // self.block
        blocks = slots.copy()
        blocks[slots < whole] = permute(slots[slots < whole], whole, derive(self.seed, "blocks", epoch))
        start = derive(self.seed, "ring", epoch) % self.num_images
        return (start + blocks * self.block + inside) % self.num_images

    def read_ahead(self, step: int, first_step: int, rank: int = 0, world_size: int = 1, accumulation: int = 1) -> np.ndarray:
        """Return the images (n,) that storage should fetch when `step` is prepared, in file order.

        In block order, a step that enters a window fetches this rank's share of the next window. The first step also fetches
        this rank's share of its own window. Otherwise there are none.
        """
        if not self.in_blocks:
            return np.empty(0, dtype=np.int64)
        entered = self._window_of((step + 1) * self.batch_size - 1)
        begun = step * self.batch_size
        wanted = range(self._window_of(begun - 1) + 2 if step > first_step else self._window_of(begun), entered + 2)
        positions = [self._own(window, step, rank, world_size, accumulation) for window in wanted]
        return np.sort(self.at(np.concatenate(positions)).indices) if positions else np.empty(0, dtype=np.int64)

    def _window_of(self, position: int) -> int:
        """Return the number of the window that holds a position of the stream, counted over all epochs."""
        per_epoch = -(-self.num_images // self.window_size)
        epoch, inside = divmod(position, self.num_images)
        return epoch * per_epoch + inside // self.window_size

    def _own(self, window: int, step: int, rank: int, world_size: int, accumulation: int) -> np.ndarray:
        """Return the positions of a window that this rank reads from `step` on."""
        per_epoch = -(-self.num_images // self.window_size)
        epoch, inside = divmod(window, per_epoch)
        begin = epoch * self.num_images + inside * self.window_size
        end = min(begin + self.window_size, (epoch + 1) * self.num_images)
        steps = np.arange(max(step, begin // self.batch_size), -(-end // self.batch_size))
        stream = self._stream(steps, rank, world_size, accumulation)
        return stream[(stream >= begin) & (stream < end)]


def check_batch(batch_size: int, accumulation: int, world_size: int, key: str = "train.batch_size") -> None:
    """Raise ValueError, which names the `key`, unless each rank and micro-batch gets equally many images, 2 at least."""

    def fits(images: int, parts: int) -> bool:
        return images % parts == 0 and images // parts >= 2

    if fits(batch_size, accumulation * world_size):
        return
    processes = [n for n in range(1, 2 * world_size + 1) if fits(batch_size, accumulation * n)]
    divisors = {n for a in range(1, math.isqrt(batch_size) + 1) if batch_size % a == 0 for n in (a, batch_size // a)}
    accumulations = [a for a in sorted(divisors) if a <= 2 * accumulation and fits(batch_size, a * world_size)]
    share = max(batch_size // (accumulation * world_size), 2)
    choices = [
        f"processes: {_some(processes)}" if processes else "",
        f"train.accumulation: {_some(accumulations)}" if accumulations else "",
        f"in a new run, {key}: {share * accumulation * world_size}",
    ]
    raise ValueError(
        f"{key}, images per optimizer step, must be a multiple of {accumulation} train.accumulation x {world_size} "
        f"processes, with 2 images or more each, got {batch_size}. Valid choices: {'; '.join(filter(None, choices))}"
    )


def _some(numbers: list[int]) -> str:
    """Return the largest of these numbers, at most five, as text: 1, 2 or 4."""
    shown = [str(number) for number in numbers[-5:]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
