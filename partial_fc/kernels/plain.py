"""The elementwise work of the two passes in plain torch: it runs anywhere, and the other kernels must agree with it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..centres.row_optimizer import RowOptimizer
from ..centres.store import CentreStore, Select
from ..margin_like import NegativesLike
from ..workspace import Workspace

THRESHOLD = 4  # the row of NegativesLike.coefficients above which a negative is hard
NO_NEGATIVE = -1e30  # the largest logit of a sample without negatives


class PlainKernels:
    """The sweeps over memory. Other kernels are subclasses and override some of the methods.

    Attributes:
        name: "plain", "c" or "triton".
        words: the name in log lines.
        reads_flag: whether update_rows reads `apply` on the device, without a host sync.
    """

    name = "plain"
    words = "plain torch"
    reads_flag = False

    def unit_rows(self, centres: Tensor, inverse_norms: Tensor, select: slice, unit: Tensor, workspace: Workspace) -> None:
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
        products: Tensor,
        inverse_norms: Tensor | None,
        targets: tuple[Tensor, int],
        shift: float | Tensor,
        limit: float | None,
        z_sum: Tensor,
        workspace: Workspace,
    ) -> None:
        """Replace products (c, B) by E v with E = exp(v product - K), v = inverse_norms; add the sums of E to z_sum.

        E is 0 for target classes and above the limit.

        Args:
            products: of centres with embeddings times the scale; v times a product is a logit.
            inverse_norms: (c,) fp32; None = 1.
            targets: (places, begin): the target class of sample i is in row places[i] - begin, int64, if that is in [0, c).
            shift: K, one number or (B,).
            limit: logits above it are left out of the softmax (the interclass filter); None = none.
            z_sum: (B,) fp32; the sums are of the fp32 values, before E is rounded to the dtype of products.
        """
        exp = products
        if products.dtype != torch.float32:  # exp and sum in an fp32 buffer are faster than in bf16, and more exact
            exp = workspace.buffer("exp", tuple(products.shape), torch.float32).copy_(products)
        if inverse_norms is not None:
            exp.mul_(inverse_norms[:, None])
        left_out = None if limit is None else exp > limit
        if isinstance(shift, Tensor) or shift:
            exp.sub_(shift)
        exp.exp_()
        if left_out is not None:
            exp.masked_fill_(left_out, 0.0)
        fill_targets(exp, targets, 0.0)
        z_sum += exp.sum(dim=0)
        if inverse_norms is not None:
            exp.mul_(inverse_norms[:, None])
        if exp is not products:
            products.copy_(exp)

    def weights(
        self,
        products: Tensor,
        inverse_norms: Tensor | None,
        targets: tuple[Tensor, int],
        function: NegativesLike,
        link: str,
        row_weights: Tensor | None,
        shift: float | Tensor,
        limit: float | None,
        less: Tensor | None,
        sums: Tensor,
        workspace: Workspace,
    ) -> None:
        """Replace products (c, B) by W v, v = inverse_norms, and add to the sums, for any function of the negatives.

        With the cosine c = v product, the logit z = function(c) and the weight r of a class (1 without row_weights):

            link softmax    E = r exp(z - K), W = (E - less) dz/dc   sums[0] += sum_j E
            link sum        W = r sigmoid(z) dz/dc   sums[0] += sum_j r softplus(z), sums[1] += sum_j r sigmoid(z)

        If function.kind is "hard" and the link is softmax, sums[1] and sums[2] get the number of classes whose cosine is above
        the threshold, and the sum of their cosines; r does not count. Target classes, and classes whose cosine is above the
        limit, have W = 0 and are in no sum. `exponentials` is the fast case: linear, one scale, softmax, r = 1, less = 0.

        Args:
            products: fp32 or bf16, of centres with unit embeddings; v times a product is a cosine.
            inverse_norms: (c,) fp32; None = 1.
            targets: as `exponentials` takes them.
            function: of the batch's samples.
            link: "softmax" or "sum".
            row_weights: r, (c,) fp32, above 0; None = 1.
            shift: K, one number or (B,); not used by the sum. The result is finite where z - K <= 80.
            limit: of the cosines; None = none.
            less: (B,) fp32, for softmax only; None = 0.
            sums: (3, B) fp32, contiguous; they are of the fp32 values, before W is rounded to the dtype of products.
        """
        cosine = _cosines(products, inverse_norms)
        logit, weight = function.logits(cosine)
        left_out = None if limit is None else cosine > limit
        if link == "sum":
            value, each = F.softplus(logit), torch.sigmoid(logit)
            if row_weights is not None:
                value.mul_(row_weights[:, None])
                each.mul_(row_weights[:, None])
            terms = [_without(value, left_out, targets), _without(each, left_out, targets)]
            weight.mul_(each)
        else:
            each = logit.sub_(shift).exp_()
            if row_weights is not None:
                each.mul_(row_weights[:, None])
            terms = [_without(each, left_out, targets)]
            if function.kind == "hard":
                hard = _without((cosine > function.coefficients[THRESHOLD]).float(), left_out, targets)
                terms += [hard, hard * cosine]
            if less is not None:
                weight = _without(weight.mul_(each - less), left_out, targets)
            else:
                weight.mul_(each)
        for row, term in zip(sums, terms, strict=False):
            row += term.sum(dim=0)
        if inverse_norms is not None:
            weight.mul_(inverse_norms[:, None])
        products.copy_(weight)

    def maxima(
        self,
        products: Tensor,
        inverse_norms: Tensor | None,
        targets: tuple[Tensor, int],
        function: NegativesLike,
        row_weights: Tensor | None,
        limit: float | None,
        maximum: Tensor,
        workspace: Workspace,
    ) -> None:
        """Set maximum (B,) to the larger of it and max_j z + log r, over the negatives of `weights`; change nothing else.

        The arguments are those of `weights`. A sample without negatives keeps its maximum if that is at least -1e30.
        """
        cosine = _cosines(products, inverse_norms)
        logit = function.logits(cosine)[0]
        if row_weights is not None:
            logit.add_(row_weights.log()[:, None])
        left_out = None if limit is None else cosine > limit
        torch.maximum(maximum, _without(logit, left_out, targets, NO_NEGATIVE).amax(dim=0), out=maximum)

    def slopes(
        self,
        products: Tensor,
        inverse_norms: Tensor | None,
        targets: tuple[Tensor, int],
        function: NegativesLike,
        row_weights: Tensor | None,
        limit: float | None,
        sums: Tensor,
        workspace: Workspace,
    ) -> None:
        """Replace products by v dz/dc, add to sums (2, B): how many negatives there are, and sum_j z + log r. As `weights`.

        Only label smoothing with negatives that are filtered or not linear needs it, so there is no other version.
        """
        cosine = _cosines(products, inverse_norms)
        logit, slope = function.logits(cosine)
        if row_weights is not None:
            logit.add_(row_weights.log()[:, None])
        left_out = None if limit is None else cosine > limit
        sums[0] += _without(torch.ones_like(cosine), left_out, targets).sum(dim=0)
        sums[1] += _without(logit, left_out, targets).sum(dim=0)
        slope = _without(slope, left_out, targets)
        products.copy_(slope if inverse_norms is None else slope.mul_(inverse_norms[:, None]))

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
        """Update the selected centres from the gradient of their unit vectors, which has two parts.

        Args:
            gradient: (c, D) fp32 or bf16, the part of the negatives, times v = 1 / norm of each centre; may be overwritten.
            target: (class_index, sample_index, values (n, D) fp32), the part of the target classes, not yet times v:
                values[sample_index[k]] is added to the gradient of row class_index[k], in the order of k; class_index ascends.
            seed: of the stochastic rounding in C and Triton.
            apply: device flag, one number: 0 skips the update without a host sync. Only if reads_flag; None = update.
        """
        optimizer.update(store, select, whole_gradient(store, select, gradient, target), lr)
        if "updates" in store.tensors:
            store.tensors["updates"][select] += 1


def _cosines(products: Tensor, inverse_norms: Tensor | None) -> Tensor:
    """Return the cosines (c, B) in fp32, in memory of their own."""
    cosine = products.to(torch.float32, copy=True)
    return cosine if inverse_norms is None else cosine.mul_(inverse_norms[:, None])


def _without(values: Tensor, left_out: Tensor | None, targets: tuple[Tensor, int], value: float = 0.0) -> Tensor:
    """Set values (c, B) that are left out, and those of the target classes, and return them."""
    if left_out is not None:
        values.masked_fill_(left_out, value)
    fill_targets(values, targets, value)
    return values


def whole_gradient(store: CentreStore, select: Select, gradient: Tensor, target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return both parts of the gradient (c, D) of unit centres in fp32, times 1 / norm of each."""
    if gradient.dtype != torch.float32:
        gradient = store.workspace.buffer("gradient", tuple(gradient.shape), torch.float32).copy_(gradient)
    class_index, sample_index, values = target
    if len(sample_index):
        inverse_norms = store.inverse_norms[select][class_index, None]
        gradient.index_add_(0, class_index, values[sample_index] * inverse_norms)
    return gradient


def fill_targets(matrix: Tensor, targets: tuple[Tensor, int], value: float) -> None:
    """Set the elements of a matrix (c, B) that belong to target classes; see PlainKernels.exponentials."""
    places, begin = targets
    rows = places - begin
    here = (rows >= 0) & (rows < len(matrix))
    index = rows.clamp(0, len(matrix) - 1)[None]  # no selection by `here`: on CUDA the host would wait for its size
    matrix.scatter_(0, index, matrix.gather(0, index).masked_fill_(here, value))
