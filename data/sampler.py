"""The order of the samples: a pure function of (seed, epoch, position), computed in O(1) memory.

Training reads one endless stream: epoch 0's permutation of the data, then epoch 1's, and so on, cut into global batches. The
step number alone says which samples come next, so a resumed run continues at the exact sample, and any number of ranks and
micro-batches shares the same global batch.
"""

from typing import NamedTuple

import numpy as np

from utils.randomness import derive, permute, uniform


class Samples(NamedTuple):
    """What to read for one rank and step, each (n,)."""

    indices: np.ndarray  # int64, into the dataset
    mirrored: np.ndarray  # bool


class SampleOrder:
    """The stream of samples of a dataset of num_images, for global batches of batch_size images."""

    def __init__(self, num_images: int, batch_size: int, seed: int, flip: bool) -> None:
        if num_images < 1:
            raise ValueError("data: the set has no images")
        self.num_images, self.batch_size, self.seed, self.flip = num_images, batch_size, seed, flip

    def samples(self, step: int, rank: int = 0, world_size: int = 1, accumulation: int = 1) -> Samples:
        """Return this rank's samples of one optimizer step, its micro-batches one after another.

        Global batch `step` is the stream from step * batch_size on. Micro-batch a takes the a-th of `accumulation` equal
        blocks of it, and rank r the r-th of world_size equal blocks of that.
        """
        share = self.batch_size // (accumulation * world_size)
        blocks = step * self.batch_size + (np.arange(accumulation) * world_size + rank) * share
        return self.at((blocks[:, None] + np.arange(share)).reshape(-1))

    def at(self, stream: np.ndarray) -> Samples:
        """Return the samples at these positions (int64) of the stream."""
        epochs, positions = np.divmod(stream, self.num_images)
        indices = np.empty_like(positions)
        mirrored = np.zeros(len(positions), dtype=bool)
        for epoch in np.unique(epochs).tolist():
            rows = epochs == epoch
            indices[rows] = permute(positions[rows], self.num_images, derive(self.seed, "order", epoch))
            if self.flip:
                mirrored[rows] = uniform(derive(self.seed, "flip", epoch), positions[rows]) < 0.5
        return Samples(indices, mirrored)
