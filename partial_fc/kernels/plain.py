"""The elementwise work of the two passes in plain torch: it runs anywhere, and the other kernels must agree with it."""

import torch
from torch import Tensor

from partial_fc.centre_store import CentreStore, Select
from partial_fc.row_optimizer import RowOptimizer
from partial_fc.workspace import Workspace


class PlainKernels:
    """Three sweeps over memory. Other kernels are subclasses and override some of the methods.

    Attributes:
        name: "plain", "c" or "triton".
        words: the name in log lines.
        reads_flag: whether update_rows reads `apply` on the device, without a host sync.
    """

    name = "plain"
    words = "plain torch"
    reads_flag = False

    def unit_rows(self, centres: Tensor, inverse_norms: Tensor, select: Select, unit: Tensor, workspace: Workspace) -> None:
        """Write the selected rows of centres (n, D) times their inverse_norms (n,) into unit (c, D)."""
        stored, inverse = centres[select], inverse_norms[select][:, None]
        if stored.dtype == unit.dtype == torch.float32 or stored.is_cuda:
            torch.mul(stored, inverse, out=unit)
            return
        # on the CPU torch handles mixed dtypes with temporaries, which cost more than these two passes
        scratch = workspace.buffer("scratch", tuple(stored.shape), torch.float32)
        if stored.dtype == torch.float32:
            unit.copy_(torch.mul(stored, inverse, out=scratch))
        else:
            unit.copy_(scratch.copy_(stored).mul_(inverse))

    def exponentials(
        self,
        logits: Tensor,
        target: tuple[Tensor, Tensor],
        shift: float | Tensor,
        limit: float | None,
        z_sum: Tensor,
        workspace: Workspace,
    ) -> None:
        """Replace logits (c, B) by E = exp(logits - shift), 0 for target classes and above the limit; add its sums to z_sum.

        Args:
            target: (class_index, sample_index), int64: E[class_index[n], sample_index[n]] is set to 0, because this is the
                target class of the sample.
            shift: K, one number or (B,).
            limit: logits above it are left out of the softmax (the interclass filter); None = none.
            z_sum: (B,) fp32; the sums are of the fp32 values, before E is rounded to the dtype of logits.
        """
        exp = logits
        if logits.dtype != torch.float32:  # exp and sum in an fp32 buffer are faster than in bf16, and more exact
            exp = workspace.buffer("exp", tuple(logits.shape), torch.float32).copy_(logits)
        left_out = None if limit is None else exp > limit
        if isinstance(shift, Tensor) or shift:
            exp.sub_(shift)
        exp.exp_()
        if left_out is not None:
            exp.masked_fill_(left_out, 0.0)
        exp[target] = 0.0
        z_sum += exp.sum(dim=0)
        if exp is not logits:
            logits.copy_(exp)

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
        """Update the selected centres from the gradient (c, D) of their unit vectors, fp32 or bf16, which is overwritten.

        Args:
            target: (class_index, sample_index, values (B, D) fp32), the part of the target classes: values[sample_index[n]]
                is added to gradient[class_index[n]]; class_index ascends.
            seed: of the stochastic rounding in C and Triton.
            apply: device flag, one number: 0 skips the update without a host sync. Only if reads_flag; None = update.
        """
        optimizer.update(store, select, whole_gradient(store, gradient, target), lr)
        if "updates" in store.tensors:
            store.tensors["updates"][select] += 1


def whole_gradient(store: CentreStore, gradient: Tensor, target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the gradient (c, D) in fp32, including the part of the target classes."""
    if gradient.dtype != torch.float32:
        gradient = store.workspace.buffer("gradient", tuple(gradient.shape), torch.float32).copy_(gradient)
    class_index, sample_index, values = target
    if len(sample_index):
        gradient.index_add_(0, class_index, values[sample_index])
    return gradient
