"""Sub-centers: K centres for each class, of which a sample sees the nearest one.

Source: Deng et al., "Sub-center ArcFace: Boosting Face Recognition by Large-Scale Noisy Web Faces", ECCV 2020,
https://doi.org/10.1007/978-3-030-58621-8_43. The cosine of a class is the largest of the cosines of its K centres, and only
that centre gets a gradient. So images with a wrong label gather at a centre of their own, instead of pulling at the class's.

The K centres of the class in slot s are the rows s K to s K + K - 1, so they lie in the same shard. Between the two products of
a chunk, `nearest` reduces the products (c K, B) to those of the nearest centres (c, B), on which all kernels work as they do
for K = 1, and `spread` writes their results back to the rows of those centres, 0 to all others.
Shapes: B = samples of the global micro-batch, D = embedding size, c = classes of one chunk, n = samples with a class in it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..workspace import Workspace
from .store import CentreStore

_IN_CACHE = 1 << 15  # products that are handled at once on the CPU, so that the sweeps over them stay in its cache


def rows_of_slots(slots: np.ndarray, count: int) -> np.ndarray:
    """Return the rows (n * count,) of the centres of these slots (n,), in their order."""
    return slots if count == 1 else (slots[:, None] * count + np.arange(count)).reshape(-1)


def by_slot(rows: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return views (slots, count, ...) of tensors by row (slots * count, ...), as checkpoints hold them; the same for 1."""
    return rows if count == 1 else {name: tensor.view(-1, count, *tensor.shape[1:]) for name, tensor in rows.items()}


def target_centres(store: CentreStore, slots: Tensor, unit: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
    """Return the unit centres (n, D) that the samples see of their own classes, and which of the K they are, (n,) int64.

    Args:
        slots: (n,) int64, local, of the samples' classes.
        unit: (n, D) fp32, the samples' unit embeddings.
    """
    if count == 1:
        return store.tensors["centres"][slots].float() * store.inverse_norms[slots, None], None
    rows = slots[:, None] * count + torch.arange(count, device=slots.device)
    centres = store.tensors["centres"][rows].float() * store.inverse_norms[rows][..., None]  # (n, K, D)
    which = (centres * unit[:, None]).sum(dim=2).argmax(dim=1)
    return centres[torch.arange(len(slots), device=slots.device), which], which


def buffer_bytes(classes: int, samples: int, on_cuda: bool) -> int:
    """Return the bytes of the buffers of SubCenters for a chunk of so many classes."""
    whole = classes * samples
    return 5 * whole + 9 * (whole if on_cuda else min(whole, max(_IN_CACHE, samples)))


@dataclass(eq=False)
class SubCenters:
    """The steps between the products of a chunk and the kernels."""

    count: int  # K, at least 2
    workspace: Workspace  # owner of the buffers, which the next call reuses

    def nearest(self, products: Tensor, inverse_norms: Tensor) -> Tensor:
        """Return the products (c, B) of unit centres that are the largest of each class, fp32; `spread` knows which they are.

        They are not rounded to the dtype of products, which holds what the second product takes.

        Args:
            products: (c K, B) of the centres as they are stored.
            inverse_norms: (c K,) fp32.
        """
        values, index = self._results(products)
        for classes, number, other, larger in self._blocks(products):
            best, which = values[classes], index[classes].zero_()
            for k in range(self.count):
                product, inverse = products[k :: self.count][classes], inverse_norms[k :: self.count, None][classes]
                if k == 0:
                    torch.mul(product, inverse, out=best)
                    continue
                torch.mul(product, inverse, out=other)
                torch.gt(other, best, out=larger)  # as 0.0 and 1.0: on the CPU masks take ten times as long
                torch.maximum(which, number.copy_(larger.mul_(k)), out=which)
                torch.maximum(best, other, out=best)
        return values

    def spread(self, weights: Tensor, inverse_norms: Tensor, products: Tensor) -> None:
        """Write weights (c, B) times the inverse norm of each sample's nearest centre to its row of products, 0 to the others.

        Args:
            weights: what a kernel made of the result of the last call of `nearest`.
            inverse_norms, products: as for that call.
        """
        _, index = self._results(products)
        for classes, _, other, is_k in self._blocks(products):
            for k in range(self.count):
                torch.mul(weights[classes], inverse_norms[k :: self.count, None][classes], out=other)
                products[k :: self.count][classes].copy_(other.mul_(torch.eq(index[classes], k, out=is_k)))

    def targets(self, targets: tuple[Tensor, Tensor], nearest: Tensor) -> tuple[Tensor, Tensor]:
        """Return (row_index, sample_index) in place of (class_index, sample_index), row_index ascending, see planning.py.

        Args:
            nearest: which centre each sample sees of its class, (A * B,) int64, of all micro-batches.
        """
        class_index, sample_index = targets
        rows, order = torch.sort(class_index * self.count + nearest[sample_index], stable=True)
        return rows, sample_index[order]

    def _results(self, products: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffers (c, B) of the nearest centres' products, fp32, and of their numbers, uint8."""
        shape, buffer = (len(products) // self.count, products.shape[1]), self.workspace.buffer
        return buffer("nearest", shape, torch.float32), buffer("nearest", shape, torch.uint8)

    def _blocks(self, products: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield classes that are handled at once, with scratch (block, B), uint8 and twice fp32."""
        count, samples = len(products) // self.count, products.shape[1]
        size = count if products.is_cuda else max(1, _IN_CACHE // max(1, samples))
        for low in range(0, count, size):
            shape, buffer = (min(size, count - low), samples), self.workspace.buffer
            scratch = buffer("of one centre", shape, torch.uint8), buffer("of one centre", shape, torch.float32)
            yield slice(low, low + shape[0]), *scratch, buffer("is that centre", shape, torch.float32)
