"""Maps classes to slots and slots to shards, and draws initial centres.

Classes are assigned to slots by a pseudo-random permutation that depends on the seed and the number of classes. So a run of
consecutive slots is a random set of classes, although labels may be sorted. A shard is a contiguous range of slots. Another
number of ranks only slices the same slots differently, and a centre's initial value does not depend on it.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from utils.distributed import SharedError
from utils.parallel import map_in_order
from utils.randomness import derive, permute, unpermute

_BLOCK = 1024  # slots that share one generator; changing it changes the initial centres of a seed
INITIAL_STD = 0.01  # of the numbers of a new centre


def shard_range(num_classes: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return [start, stop) of rank's slots: num_classes // world_size each, one more for the first num_classes % world_size."""
    share, rest = divmod(num_classes, world_size)
    start = share * rank + min(rank, rest)
    return start, start + share + (rank < rest)


def check_labels(labels: np.ndarray, num_classes: int, step: int) -> None:
    """Raise SharedError if a label is outside [0, num_classes); call it on all ranks with the labels of all ranks."""
    wrong = np.unique(labels[(labels < 0) | (labels >= num_classes)])
    if wrong.size:
        raise SharedError(
            f"labels must be in [0, {num_classes}), the number of classes; step {step} has {', '.join(map(str, wrong[:5]))}. "
            "Correct data.num_classes or the labels"
        )


def slots_of_classes(classes: np.ndarray, num_classes: int, seed: int) -> np.ndarray:
    """Return the slot of each class (int64)."""
    return permute(classes, num_classes, derive(seed, "slots"))


def classes_of_slots(slots: np.ndarray, num_classes: int, seed: int) -> np.ndarray:
    """Return the class in each slot (int64), the inverse of slots_of_classes."""
    return unpermute(slots, num_classes, derive(seed, "slots"))


def initial_blocks(start: int, stop: int, dim: int, seed: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows of the shard, their float32 initial values) block by block for the slots [start, stop), on the CPU.

    The values are normal with standard deviation INITIAL_STD. Blocks are drawn in as many threads as torch
    has, each in one thread.
    """

    def draw(block: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive(seed, "centres", block))
        rows = torch.randn(_BLOCK, dim, generator=generator)
        numbers = rows.numpy()
        np.multiply(numbers, np.float32(INITIAL_STD), out=numbers)  # torch would start threads of its own in each of these
        return rows

    blocks = range(start // _BLOCK, (stop + _BLOCK - 1) // _BLOCK)
    for block, rows in zip(blocks, map_in_order(draw, blocks, torch.get_num_threads(), ahead=2), strict=True):
        first, last = max(start, block * _BLOCK), min(stop, (block + 1) * _BLOCK)
        yield slice(first - start, last - start), rows[first - block * _BLOCK : last - block * _BLOCK]


def initial_centres(start: int, stop: int, dim: int, seed: int) -> Tensor:
    """Return the (stop - start, dim) float32 initial values of the slots [start, stop), on the CPU."""
    centres = torch.empty(stop - start, dim)
    for rows, values in initial_blocks(start, stop, dim, seed):
        centres[rows] = values
    return centres
