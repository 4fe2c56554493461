"""SGD and AdamW that update some rows of the class centres at a time, from the gradient of their unit vectors.

For each row, w is the centre, v = 1 / |w| and g = dL / d(w v). The gradient of w is G = v g - t w with t = v^2 (v g . w).

    SGD     m <- momentum m + G + weight_decay w,   w <- w - lr m                          as torch.optim.SGD
            with nesterov w <- w - lr (G + weight_decay w + momentum m), m being the new one
    AdamW   m <- beta1 m + (1 - beta1) G,  s <- beta2 s + (1 - beta2) G^2,
            w <- (1 - lr weight_decay) w - lr (m / (1 - beta1^k)) / (sqrt(s / (1 - beta2^k)) + eps)
            Loshchilov and Hutter, https://arxiv.org/abs/1711.05101, as torch.optim.AdamW; k counts the row's own updates

Only sampled rows are updated, as in the papers (head.inactive_rows=keep). A dense optimizer would also decay the other rows
and move them by their momentum; with head.inactive_rows=decay, LazyDecay does that when a row is next used.
Shapes: c = selected rows, D = embedding size.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .store import CentreStore, Select


class RowSGD(NamedTuple):
    """SGD with momentum, Nesterov's or the plain one, and weight decay, row by row."""

    momentum: float = 0.9
    weight_decay: float = 5e-4
    nesterov: bool = False

    def update(self, store: CentreStore, select: Select, gradient: Tensor, lr: float) -> None:
        """Update the selected centres from v g (c, D), fp32, which may be overwritten."""
        rows, inverse = _loaded(store, select, gradient)
        along = _dot(store, gradient, rows) * inverse.square()
        if self.nesterov:
            gradient.addcmul_(rows, (self.weight_decay - along)[:, None])
            momentum = store.load("momentum", select).mul_(self.momentum).add_(gradient)
            rows.add_(gradient.add_(momentum, alpha=self.momentum), alpha=-lr)
            store.save("momentum", select, momentum, rows, lr * self.momentum**2 / (1.0 - self.momentum))
            store.save_centres(select, rows)
            return
        momentum = store.load("momentum", select).mul_(self.momentum).add_(gradient)
        momentum.addcmul_(rows, (self.weight_decay - along)[:, None])
        rows.add_(momentum, alpha=-lr)
        store.save("momentum", select, momentum, rows, lr * self.momentum / (1.0 - self.momentum))
        store.save_centres(select, rows)


class RowAdamW(NamedTuple):
    """AdamW, row by row; each row counts its own updates."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.05

    def update(self, store: CentreStore, select: Select, gradient: Tensor, lr: float) -> None:
        """Update the selected centres from v g (c, D), fp32, which is overwritten."""
        rows, inverse = _loaded(store, select, gradient)
        along = _dot(store, gradient, rows) * inverse.square()
        gradient.addcmul_(rows, -along[:, None])
        momentum = store.load("momentum", select).lerp_(gradient, 1.0 - self.beta1)
        variance = store.load("variance", select).mul_(self.beta2).addcmul_(gradient, gradient, value=1.0 - self.beta2)
        count = store.tensors["updates"][select].double() + 1.0
        self._move(rows, momentum, variance, count, torch.full_like(inverse, lr), scratch=gradient)
        store.save("momentum", select, momentum)
        store.save("variance", select, variance)
        store.save_centres(select, rows)

    def _move(self, rows: Tensor, momentum: Tensor, variance: Tensor, count: Tensor, lr: Tensor, scratch: Tensor) -> None:
        """Apply the last formula above, with a learning rate (c,) and a number of updates (c,) per row."""
        first, second = ((1.0 - beta**count).float()[:, None] for beta in (self.beta1, self.beta2))
        rows.mul_((1.0 - lr * self.weight_decay)[:, None])
        torch.div(variance, second, out=scratch).sqrt_().add_(self.eps)
        scratch.reciprocal_().mul_(momentum)
        rows.addcmul_(scratch, -lr[:, None] / first)


RowOptimizer = RowSGD | RowAdamW


class LazyDecay:
    """The updates that a dense optimizer makes in steps that leave a row out, applied together when the row is next used.

    For SGD a step without a gradient is linear in (w, m), with the same 2 x 2 matrix for all rows. A row that missed the
    updates u, u + 1, ... needs the product of their matrices, looked up by u. For AdamW the updates are applied one by one.
    """

    _LONGEST = 1024  # the most updates that a row may miss; then all rows are brought up to date

    def __init__(self, optimizer: RowOptimizer) -> None:
        self.optimizer = optimizer
        self.restart(0)

    def restart(self, count: int) -> None:
        """Start again with `count` updates done and all rows up to date."""
        self._base = self.count = count
        self._rates: list[float] = []
        self._products = np.empty((0, 2, 2))  # [u - base]: the effect of updates u ... count - 1 on (w, m)

    def record(self, lr: float) -> bool:
        """Record one more update with this learning rate; return whether all rows should be brought up to date now."""
        self.count += 1
        self._rates.append(lr)
        if isinstance(self.optimizer, RowSGD):
            mu, decay = self.optimizer.momentum, self.optimizer.weight_decay
            matrix = np.array([[1.0 - lr * decay, -lr * mu], [decay, mu]])
            if self.optimizer.nesterov:
                matrix = np.array([[1.0 - lr * decay * (1.0 + mu), -lr * mu**2], [decay, mu]])
            self._products = np.concatenate([matrix @ self._products, matrix[None]])
        return len(self._rates) >= self._LONGEST

    def catch_up(self, store: CentreStore, select: Select) -> None:
        """Apply the missed updates to the selected rows. On CUDA the host waits for nothing, but for AdamW."""
        seen = store.tensors["updates"][select]
        if not self._rates or (seen.is_cpu and bool((seen == self.count).all())):
            return
        rows, momentum = store.load("centres", select), store.load("momentum", select)
        if isinstance(self.optimizer, RowSGD):
            table = torch.from_numpy(np.concatenate([self._products, np.eye(2)[None]]).reshape(-1, 4)).float()
            table = (table.pin_memory() if rows.is_cuda else table).to(rows.device, non_blocking=True)
            by_row = table[(seen - self._base).long()]
            ww, wm, mw, mm = by_row[:, :, None].unbind(dim=1)
            before = store.workspace.buffer("scratch", tuple(rows.shape), torch.float32).copy_(rows)
            rows.mul_(ww).addcmul_(momentum, wm)
            momentum.mul_(mm).addcmul_(before, mw)
        else:
            variance = store.load("variance", select)
            self._follow(self.optimizer, store, rows, momentum, variance, seen)
            store.save("variance", select, variance)
        store.save("momentum", select, momentum)
        store.save_centres(select, rows)
        store.tensors["updates"][select] = self.count

    def catch_up_all(self, store: CentreStore, block: int) -> None:
        """Bring every row up to date, `block` rows at a time, and clear the record."""
        for low in range(0, store.num_rows, block):
            self.catch_up(store, slice(low, min(low + block, store.num_rows)))
        self.restart(self.count)

    def resume(self, store: CentreStore) -> None:
        """Continue counting after loading rows that are all up to date.

        Raises:
            ValueError: the rows have different numbers of updates.
        """
        updates = store.tensors["updates"]
        if int(updates.min()) != int(updates.max()):
            raise ValueError(
                "head.inactive_rows=decay cannot continue a checkpoint of head.inactive_rows=keep with adamw: its rows have "
                "seen different numbers of updates. Set head.inactive_rows=keep"
            )
        self.restart(int(updates.max()))

    def _follow(
        self, adamw: RowAdamW, store: CentreStore, rows: Tensor, momentum: Tensor, variance: Tensor, seen: Tensor
    ) -> None:
        scratch = store.workspace.buffer("scratch", tuple(rows.shape), torch.float32)
        for number in range(int(seen.min()), self.count):
            missed = seen <= number
            momentum.mul_(torch.where(missed, adamw.beta1, 1.0)[:, None])
            variance.mul_(torch.where(missed, adamw.beta2, 1.0)[:, None])
            lr = torch.where(missed, self._rates[number - self._base], 0.0)
            adamw._move(rows, momentum, variance, torch.full_like(lr, number + 1.0, dtype=torch.float64), lr, scratch)


def _loaded(store: CentreStore, select: Select, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the selected centres and v; that of mini, in the gradient too, is stored without the centre's scale."""
    inverse, scale = store.inverse_norms[select], store.tensors.get("centres_scale")
    if scale is not None:
        inverse = inverse / scale[select]
        gradient.div_(scale[select][:, None])
    return store.load("centres", select), inverse


def _dot(store: CentreStore, first: Tensor, second: Tensor) -> Tensor:
    """Return the (c,) dot products of rows; on the CPU a product in a buffer and a sum cost half of torch.linalg.vecdot."""
    return torch.mul(first, second, out=store.workspace.buffer("scratch", tuple(first.shape), torch.float32)).sum(dim=1)
