"""Sub-centers: K centres for each class, of which a sample sees the nearest one.

Source: Deng et al., "Sub-center ArcFace: Boosting Face Recognition by Large-Scale Noisy Web Faces", ECCV 2020,
https://doi.org/10.1007/978-3-030-58621-8_43. The cosine of a class is the largest of the cosines of its K centres, and only
that centre gets a gradient. So images with a wrong label gather at a centre of their own, instead of pulling at the class's.

The K centres of the class in slot s are the rows s K to s K + K - 1, so they lie in the same shard. Between the two products of
a chunk, `nearest` reduces the products (c K, B) to those of the nearest centres (c, B), on which all kernels work as they do
for K = 1, and `spread` writes their results back to the rows of those centres, 0 to all others.
Shapes: B = samples of the global micro-batch, D = embedding size, c = classes of one chunk, n = samples with a class in it.
"""

import numpy as np
import torch
from torch import Tensor

from .centre_store import CentreStore
from .workspace import Workspace


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


class SubCenters:
    """The steps between the products of a chunk and the kernels.

    Args:
        count: K, at least 2.
        workspace: owner of the buffers, which the next call reuses.
    """

    def __init__(self, count: int, workspace: Workspace) -> None:
        self.count, self.workspace = count, workspace

    def nearest(self, products: Tensor, inverse_norms: Tensor) -> Tensor:
        """Return the products (c, B) of unit centres that are the largest of each class, fp32; `spread` knows which they are.

        They are not rounded to the dtype of products, which holds what the second product takes.

        Args:
            products: (c K, B) of the centres as they are stored; may be overwritten.
            inverse_norms: (c K,) fp32.
        """
        values, index, mask = self._buffers(len(products), products.shape[1])
        for k in range(self.count):
            of_k, inverse = products[k :: self.count], inverse_norms[k :: self.count, None]
            if k == 0:
                torch.mul(of_k, inverse, out=values)
                index.zero_()
                continue
            other = self._scratch(products)
            torch.mul(of_k, inverse, out=other)
            index.masked_fill_(torch.gt(other, values, out=mask), k)
            torch.maximum(values, other, out=values)
        return values

    def spread(self, weights: Tensor, inverse_norms: Tensor, products: Tensor) -> None:
        """Write weights (c, B) times the inverse norm of each sample's nearest centre to its row of products, 0 to the others.

        Args:
            weights: what a kernel made of the result of the last call of `nearest`.
            inverse_norms, products: as for that call.
        """
        _, index, mask = self._buffers(len(products), products.shape[1])
        for k in range(self.count):
            of_k = torch.mul(weights, inverse_norms[k :: self.count, None], out=self._scratch(products))
            products[k :: self.count] = of_k.masked_fill_(torch.ne(index, k, out=mask), 0.0)

    def targets(self, targets: tuple[Tensor, Tensor], nearest: Tensor) -> tuple[Tensor, Tensor]:
        """Return (row_index, sample_index) in place of (class_index, sample_index), row_index ascending, see planning.py.

        Args:
            nearest: which centre each sample sees of its class, (A * B,) int64, of all micro-batches.
        """
        class_index, sample_index = targets
        rows, order = torch.sort(class_index * self.count + nearest[sample_index], stable=True)
        return rows, sample_index[order]

    def _buffers(self, rows: int, samples: int) -> tuple[Tensor, Tensor, Tensor]:
        shape, buffer = (rows // self.count, samples), self.workspace.buffer
        values, index, mask = (buffer("nearest", shape, dtype) for dtype in (torch.float32, torch.uint8, torch.bool))
        return values, index, mask

    def _scratch(self, products: Tensor) -> Tensor:
        return self.workspace.buffer("of one", (len(products) // self.count, products.shape[1]), torch.float32)
