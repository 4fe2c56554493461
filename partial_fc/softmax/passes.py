"""The two passes of a margin loss over a shard's active classes, chunk by chunk.

Neither all logits nor the whole gradient of the centres is held at once. Memory is O(B x chunk + chunk x D) for any number of
classes, plus the cache of weights, which has a budget.

    forward   z = margin.negatives(x . w), E = exp(z - K), Z_i = sum_j E_ij, U_i = sum_j E_ij dz_ij/dcos w_j
              over every class but the target; then, with the target logit t_i, lse_i = log(exp(log Z_i + K) + exp(t_i)),
              loss_i = lse_i - t_i and dL/dx_i = exp(K - lse_i) U_i / B + (target class)
    update    dL/dw_j = sum_i exp(K - lse_i) E_ij dz_ij/dcos x_i / B + (target class), for unit w_j

The target class is masked out of the chunks and computed separately, so 1 - p_i = exp(log Z_i + K - lse_i) does not cancel. If
negatives are one scale times the cosine, dz/dcos is the scale, which multiplies the factors of the samples instead of E. In all
other cases the kernels compute W = E dz/dcos from the margin's `Negatives`. exp(K - lse_i) multiplies the small matrix of
embeddings, not W. A margin whose link is "sum" has W = sigmoid(z) dz/dcos instead, and needs no K.

K is one constant if the margin's bounds allow it. Otherwise K is the largest logit so far, for each sample and in each shard:
Z and U are rescaled when it grows, and the update divides each chunk by the K that it was computed with, as in Milakov and
Gimelshein, "Online normalizer calculation for softmax", https://arxiv.org/abs/1805.02867, and FlashAttention,
https://arxiv.org/abs/2205.14135. So every chunk is multiplied once.

The products take the centres as they are stored, not unit centres, which saves a copy of all of them in each pass. With v_j
= 1 / length of a stored centre, the cosine is v_j times the product. W_ij v_j takes the place of W_ij: times stored centres it
gives U, and in update the gradient of w_j times v_j, which the chain rule of normalisation asks for. Only Z needs E itself.

Label smoothing also pulls every logit of a sample with the same strength S_i (loss.py). For linear negatives without filter or
sub-centers that is a vector for all classes together. Otherwise the forward pass takes two more products, and the update
subtracts S_i from E.

A class may have several centres (sub_centers.py). The products then have that many times c rows, which become those of the c
classes before a kernel takes them, and again rows of all centres after it.
Shapes: B = samples of the global (micro-)batch, D = embedding size, c = classes of one chunk. x and w are unit vectors; E is
(c, B), so neither product needs a transpose.
"""

import copy
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..centres.store import CentreStore
from ..centres.sub_centers import SubCenters
from ..config import HeadConfig
from ..kernels.plain import NO_NEGATIVE, CentreGradient, PlainKernels, Tile, add_product, has_fp32_output, multiply, padded_rows
from ..sampling.planning import Chunk

if TYPE_CHECKING:  # parts do not import one another
    from losses.margin import Margin
    from losses.negatives import Negatives

# exp must stay in the range of fp32 (and bf16), whose normal numbers end at exp(88.7) and exp(-87.3)
_LARGEST, _SMALLEST = 80.0, -87.0

State = dict[str, Tensor]  # what a margin knows of a micro-batch; see losses/margin.py


class Batch(NamedTuple):
    """One global micro-batch, as the two passes need it."""

    unit: Tensor  # (B, D) fp32
    norm: Tensor  # (B,) fp32, of the embeddings
    target_cosine: Tensor  # (B,) fp32
    places: Tensor  # (B,) int64, of the target classes; see planning.py
    state: State  # what margin.observe returned
    function: "Negatives | None" = None  # for the kernel `weights`; None = the fast path, the margin's scale times the cosine
    # which of its class's centres each sample sees, (B,) int64, 0 if the class lies in another shard; None if a class has one
    nearest: Tensor | None = None


class ShardSums(NamedTuple):
    """What the forward pass adds up over the active classes of a shard but the target, fp32."""

    sums: Tensor  # (3, B), as the kernel `weights` defines them; the first is Z, or the sum of a "sum" link's losses
    u: Tensor  # (B, D); on the fast path not yet multiplied by the scale, see TwoPass.gain
    shift: float | Tensor  # K of Z and U, one number, or (B,) of this shard
    spread: Tensor | None = None  # for label smoothing: (2, B) the number of negatives and the sum of their logits
    # for label smoothing: (B, D) sum_j dz/dcos w_j. If dz/dcos is the same for all classes, (D,) sum_j w_j instead, which
    # includes the target class
    slopes: Tensor | None = None


class Pull(NamedTuple):
    """What the update pass needs of a micro-batch: how strongly each sample pulls at the classes, all (B,) fp32."""

    batch: Batch
    negatives: Tensor  # factor of the sample in the gradients of negatives; it includes exp(K - lse) unless `lse` is given
    target: Tensor  # dL/d(target cosine)
    lse: Tensor | None = None  # where K differs between chunks
    less: Tensor | None = None  # S_i / negatives_i where label smoothing asks for weights of their own
    even: Tensor | None = None  # S_i dz/dcos for label smoothing of linear negatives

    def times(self, share: float) -> "Pull":
        """Return the pull of a loss that is multiplied by share."""
        if share == 1:
            return self
        even = None if self.even is None else self.even * share
        return self._replace(negatives=self.negatives * share, target=self.target * share, even=even)

    @property
    def whole_target(self) -> Tensor:
        """The pull at the target class (B,), where that at all classes together is taken back."""
        return self.target if self.even is None else self.target + self.even


def constant_shift(margin: "Margin", num_classes: int) -> float | None:
    """Return K such that exp(logit - K) and its sum over all classes stay in fp32's range, whatever the cosines are.

    None if there is no such constant because the logits are too far apart; then the samples' maxima must be found. Weights
    of sampled classes change nothing: in each shard they add up to the number of its classes.
    """
    if margin.link == "sum":
        return 0.0
    shift = max(0.0, margin.logit_bound + math.log(num_classes) - _LARGEST)
    return shift if margin.lowest_negative - shift > _SMALLEST else None


def constant_shifts(margin: "Margin", num_classes: int) -> list[float | None]:
    """Return what constant_shift returns in each stage of a margin, which stays as it is."""
    present, shifts = copy.copy(margin), []
    for first, _ in margin.stages or ((1, {}),):
        present.at_step(first)
        shifts.append(constant_shift(present, num_classes))
    return shifts


class TwoPass:
    """The two passes over one shard.

    Args:
        kernels: of the head's workspace.
        config: its matmul_dtype is that of the matrix products. Sums, states and all (B,) and (B, D) tensors are float32.
        shift: K, or None if the samples' maxima must be found; see constant_shift.
    """

    def __init__(
        self, margin: "Margin", store: CentreStore, kernels: PlainKernels, config: HeadConfig, shift: float | None
    ) -> None:
        self.margin, self.centre_store, self.kernels, self.shift = margin, store, kernels, shift
        self.workspace, self.dtype, self.sub_centers = kernels.workspace, config.matmul_dtype, config.sub_centers
        self.limit = config.interclass_filtering_threshold or None
        self.smooths = config.label_smoothing > 0  # needs ShardSums.spread and slopes
        self.weighs = config.entropy_weights
        self._several = SubCenters(self.sub_centers, self.workspace) if self.sub_centers > 1 else None
        self._cached: dict[tuple[int, int], Tensor] = {}
        self._shifts: dict[tuple[int, int], Tensor] = {}  # K of each chunk, where it is not constant

    def begin(self, chunks: list[Chunk], samples: int, num_micro: int) -> None:
        """Prepare the passes of one step with num_micro micro-batches of `samples` samples each."""
        self._cached.clear()
        self._shifts.clear()
        self.workspace.begin_cache(
            num_micro * sum(padded_rows(chunk.num_rows, self.dtype) * samples * self.dtype.itemsize + 64 for chunk in chunks)
        )

    def fetch(self, chunks: list[Chunk]) -> None:
        """Copy the centres of a step to the device, if they lie elsewhere."""
        wanted = [(chunk.select, padded_rows(chunk.num_rows, self.dtype)) for chunk in chunks]
        self.centre_store.fetch(wanted, self.dtype)

    def spreads_evenly(self, batch: Batch) -> bool:
        """Return whether dz/dcos is the same for all negatives of a sample, so that label smoothing is a vector."""
        linear = batch.function is None or batch.function.kind == "linear"
        return linear and self.limit is None and self._several is None

    def slope(self, batch: Batch) -> float | Tensor:
        """Return dz/dcos of linear negatives: one number, or (B,)."""
        return self.margin.scale if batch.function is None else batch.function.coefficients[0]

    def gain(self, batch: Batch) -> float:
        """The factor that turns the E of the fast path into E dz/dcos."""
        return self.margin.scale if batch.function is None else 1.0

    def forward(self, batch: Batch, chunks: list[Chunk], micro: int) -> ShardSums:
        """Return the sums over this shard, and keep the weights of as many chunks as the cache holds."""
        sums = batch.unit.new_zeros(3, len(batch.unit))
        u_sum = torch.zeros_like(batch.unit)
        running = sums.new_full((len(batch.unit),), NO_NEGATIVE) if self.shift is None else None
        spreads: tuple[Tensor, Tensor] | None = None
        if self.smooths and not self.spreads_evenly(batch):
            spreads = torch.zeros_like(sums[:2]), torch.zeros_like(u_sum)
        operand = self._operand(batch)
        for number, chunk in enumerate(chunks):
            centres = self.centre_store.operand(chunk.select, self.dtype, padded_rows(chunk.num_rows, self.dtype))
            if spreads is not None:
                self._add_slopes(batch, operand, centres, chunk, *spreads)
            cached = None if spreads is not None else self.workspace.cache((len(centres), len(batch.unit)), self.dtype)
            if cached is not None:
                self._cached[micro, number] = cached
            products, tile = self._tile(batch, operand, centres, chunk, cached)
            shift: float | Tensor = 0.0 if self.shift is None else self.shift
            if running is not None:
                before, shift = running, running.clone()
                self.kernels.maxima(tile, shift)
                rescale = torch.exp(before - shift)
                sums[0] *= rescale
                u_sum *= rescale[:, None]
                running = self._shifts[micro, number] = shift
            self._weigh(tile, shift, sums)
            self._spread(tile, products, chunk)
            add_product(u_sum, products, centres, self.workspace)
        if self.smooths and spreads is None:
            spreads = self._even_slopes(batch, chunks)
        return ShardSums(sums, u_sum, running if running is not None else self.shift or 0.0, *(spreads or ()))

    def gradients(self, pulls: list[Pull], chunks: list[Chunk]) -> Iterator[CentreGradient]:
        """Yield the gradient of each chunk's centres, in a reused buffer.

        The caller may update the chunk's centres before it asks for the next chunk.
        """
        scaled = [None if pull.lse is not None else self._scaled(pull, pull.negatives) for pull in pulls]
        parts = [pull.batch.unit * pull.whole_target[:, None] for pull in pulls]
        by_target = parts[0] if len(parts) == 1 else torch.cat(parts)
        operand_of = functools.cache(lambda micro: self._operand(pulls[micro].batch))  # where weights are not in the cache
        evens = [pull.even @ pull.batch.unit for pull in pulls if pull.even is not None]
        even = torch.stack(evens).sum(dim=0) if evens else None
        # the other formats round the centres to bf16, so for them the gradient may be rounded as well
        is_wide = self.centre_store.form == "exact" and has_fp32_output(self.workspace.device)
        dtype = torch.float32 if is_wide else self.dtype
        nearest = [pull.batch.nearest for pull in pulls if pull.batch.nearest is not None]
        seen = torch.cat(nearest) if nearest else None
        for number, chunk in enumerate(chunks):
            shape = (padded_rows(chunk.num_rows, self.dtype), by_target.shape[1])
            centres: Tensor | None = None
            for micro, pull in enumerate(pulls):
                weighted, shift = self._cached.get((micro, number)), self._shift_of(pull, micro, number)
                if weighted is None:
                    centres = self.centre_store.operand(chunk.select, self.dtype, shape[0]) if centres is None else centres
                    unused = self.workspace.buffer("unused", (3, len(pull.negatives)), torch.float32)
                    weighted, tile = self._tile(pull.batch, operand_of(micro), centres, chunk, None)
                    self._weigh(tile, shift, unused, pull.less)
                    self._spread(tile, weighted, chunk)
                rows = scaled[micro]
                if rows is None:
                    assert pull.lse is not None
                    rows = self._scaled(pull, pull.negatives * torch.exp(shift - pull.lse))
                product = multiply(weighted, rows, self.workspace.buffer("product", shape, dtype), self.workspace)
                if len(pulls) > 1:  # their sum, in fp32
                    total = self.workspace.buffer("total", shape, torch.float32)
                    product = total.copy_(product) if micro == 0 else total.add_(product)
            gradient = product[: chunk.num_rows]
            if even is not None:
                inverse = self.centre_store.inverse_norms[chunk.select]
                gradient.addr_(inverse.to(gradient.dtype), even.to(gradient.dtype), alpha=-1.0)
            targets = chunk.targets
            if seen is not None and self._several is not None:
                targets = self._several.targets(targets, seen)
            yield CentreGradient(chunk.select, gradient, *targets, by_target)

    def _operand(self, batch: Batch) -> Tensor:
        """Return the (D, B) operand whose products with unit centres are logits on the fast path, otherwise cosines."""
        return (batch.unit * self.gain(batch)).to(self.dtype).t()

    def _scaled(self, pull: Pull, factor: Tensor) -> Tensor:
        return (pull.batch.unit * factor[:, None]).to(self.dtype)

    def _shift_of(self, pull: Pull, micro: int, number: int) -> float | Tensor:
        """Return the K with which the weights of a chunk were, or are to be, computed."""
        if pull.less is not None:  # computed again, from a K that makes E the probability
            assert pull.lse is not None
            return pull.lse
        return self._shifts[micro, number] if self.shift is None else self.shift

    def _tile(self, batch: Batch, operand: Tensor, centres: Tensor, chunk: Chunk, out: Tensor | None) -> tuple[Tensor, Tile]:
        """Return centres times operand (padded c, B) in `out` or a buffer, 0 beyond the chunk's c rows, and the kernels' tile.

        With sub-centers that has the products of each class's nearest centre. Kernels that fuse compute the products.
        """
        if out is None:
            out = self.workspace.buffer("logits", (len(centres), operand.shape[1]), self.dtype)
        fused = self.kernels.fused and batch.function is None and self._several is None
        if not fused:
            multiply(centres, operand, out, self.workspace)
        out[chunk.num_rows :].zero_()
        real, inverse_norms = out[: chunk.num_rows], self.centre_store.inverse_norms[chunk.select]
        limit = self.limit
        if limit is not None and batch.function is None:  # the products are logits
            limit = limit * self.margin.scale
        factors = (centres, operand) if fused else None
        tile = Tile(real, inverse_norms, batch.places, chunk.begin, limit, batch.function, chunk.weights, factors)
        if self._several is not None:
            tile = tile._replace(products=self._several.nearest(real, inverse_norms), inverse_norms=None)
        return out, tile

    def _spread(self, tile: Tile, products: Tensor, chunk: Chunk) -> None:
        """Bring what a kernel wrote into the tile of products (padded c, B) back to them."""
        if self._several is not None:
            inverse_norms = self.centre_store.inverse_norms[chunk.select]
            self._several.spread(tile.products, inverse_norms, products[: chunk.num_rows])

    def _weigh(self, tile: Tile, shift: float | Tensor, sums: Tensor, less: Tensor | None = None) -> None:
        """Replace the products by W v, on the fast path E v, and add to sums (3, B)."""
        if tile.function is None:
            assert not isinstance(shift, Tensor), "where K differs, the negatives have a function"
            self.kernels.exponentials(tile, shift, sums[0])
        else:
            self.kernels.weights(tile, self.margin.link, shift, less, sums)

    def _add_slopes(self, batch: Batch, operand: Tensor, centres: Tensor, chunk: Chunk, spread: Tensor, slopes: Tensor) -> None:
        """Add a chunk's part to ShardSums.spread and slopes of any negatives."""
        products, tile = self._tile(batch, operand, centres, chunk, None)
        self.kernels.slopes(tile, spread)
        self._spread(tile, products, chunk)
        add_product(slopes, products, centres, self.workspace)

    def _even_slopes(self, batch: Batch, chunks: list[Chunk]) -> tuple[Tensor, Tensor]:
        """Return ShardSums.spread and slopes of linear negatives, from the sum of all unit centres."""
        total, logs = batch.unit.new_zeros(batch.unit.shape[1]), batch.unit.new_zeros(())
        for chunk in chunks:
            centres = self.centre_store.operand(chunk.select, self.dtype, chunk.size)
            total += torch.mv(centres.float().t(), self.centre_store.inverse_norms[chunk.select])
            if chunk.weights is not None:
                logs += chunk.weights.log().sum()
        here = batch.places >= 0
        cosines = batch.unit @ total - torch.where(here, batch.target_cosine, 0.0)
        counts = sum(chunk.size for chunk in chunks) - here.float()
        logits = self.slope(batch) * cosines + logs
        if batch.function is not None:
            logits += counts * batch.function.coefficients[-1]
        return torch.stack([counts, logits]), total
