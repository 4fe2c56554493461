"""Calls the Triton kernels of triton.py for the head."""

import torch
from torch import Tensor

from partial_fc.centre_store import CentreStore, Select
from partial_fc.row_optimizer import RowOptimizer, RowSGD
from partial_fc.workspace import Workspace

from .plain import PlainKernels, whole_gradient
from .triton import adamw_update, exp_mask_sum, sgd_update


class TritonKernels(PlainKernels):
    """See PlainKernels for the arguments."""

    name = "triton"
    words = "Triton kernels"
    reads_flag = True

    def exponentials(
        self,
        logits: Tensor,
        target: tuple[Tensor, Tensor],
        shift: float | Tensor,
        limit: float | None,
        z_sum: Tensor,
        workspace: Workspace,
    ) -> None:
        if isinstance(shift, Tensor):
            super().exponentials(logits, target, shift, limit, z_sum, workspace)
            return
        position = torch.full((logits.shape[1],), -1, dtype=torch.int32, device=logits.device)
        position[target[1]] = target[0].to(torch.int32)
        exp_mask_sum(logits, position, shift, limit, z_sum)

    def update_rows(
        self,
        optimizer: RowOptimizer,
        store: CentreStore,
        select: Select,
        gradient: Tensor,
        target: tuple[Tensor, Tensor, Tensor],
        lr: float,
        seed: int,
        apply: Tensor | None,
    ) -> None:
        gradient = whole_gradient(store, gradient, target)
        where = select.start if isinstance(select, slice) else select
        flag = torch.ones(1, device=gradient.device) if apply is None else apply
        tensors, inverse = store.tensors, store.inverse_norms
        centres, momentum, scale = tensors["centres"], tensors["momentum"], tensors.get("momentum_scale")
        if isinstance(optimizer, RowSGD):
            settings = (lr, optimizer.momentum, optimizer.weight_decay)
            sgd_update(centres, momentum, scale, gradient, inverse, where, *settings, seed, flag)
            if "updates" in tensors:
                tensors["updates"][select] += 1
            return
        variance, updates = tensors["variance"], tensors["updates"]
        adamw_update(centres, momentum, scale, variance, updates, gradient, inverse, where, lr, *optimizer, seed, flag)
