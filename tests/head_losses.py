"""The real head with every loss of loss_cases beside the slow references: the comparison of optimizer steps.

The references know nothing of shards, chunks, kernels or sums; loss_references.py says what they are.
"""

import math
from typing import Any, NamedTuple

import loss_cases
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dense_reference import all_centres, whole_active
from loss_cases import STATES, Case, first_known
from loss_references import State
from rounding import FP32_UNIT, bf16_half_step, head_bounds, rounding_bound
from torch import Tensor

from losses import build_margin
from losses.adaptiveface import AdaptiveFace
from losses.margin import Margin
from partial_fc import HeadConfig, PartialFC, RowSGD
from partial_fc.centres.shard import shard_range, slots_of_classes
from utils.randomness import derive

C, D, B, SEED = 31, 16, 12, 3
CASES = {name: case for name, case in loss_cases.CASES.items() if "," not in name or name == "cosface, wide"}


class Setting(NamedTuple):
    """How the head computes; see HeadConfig."""

    rate: float = 1.0
    limit: float | None = None
    correction: str = "none"
    focal: float = 0.0
    smoothing: float = 0.0
    accumulation: int = 1
    storage: str = "exact"
    dtype: torch.dtype = torch.float32
    kernels: str = "auto"
    cache_mb: int = 1
    chunk: int = 5
    sub_centers: int = 1
    entropy: bool = False

    def config(self) -> HeadConfig:
        """Return the configuration of a head whose centres move by minus the gradient at rate 1."""
        return HeadConfig(
            self.rate,
            RowSGD(0.0, 0.0),
            self.storage,
            logit_correction=self.correction,
            focal=self.focal,
            label_smoothing=self.smoothing,
            interclass_filtering_threshold=self.limit or 0.0,
            matmul_dtype=self.dtype,
            chunk=self.chunk,
            cache_mb=self.cache_mb,
            kernels=self.kernels,
            sub_centers=self.sub_centers,
            entropy_weights=self.entropy,
        )


def make_batch(centres: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return (B, D) embeddings of norms from 4 to 60, from near their centres to beyond them, and labels with repeats.

    Of sub-centers (C, K, D), the embeddings take one after the other.
    """
    generator = torch.Generator().manual_seed(100 + step)
    labels = torch.randint(len(centres), (B,), generator=generator)
    noise = F.normalize(torch.randn(B, centres.shape[-1], generator=generator))
    near = centres[labels] if centres.ndim == 2 else centres[labels, torch.arange(B) % centres.shape[1]]
    unit = F.normalize(F.normalize(near) * torch.linspace(1.5, -0.4, B)[:, None] + noise)
    return unit * torch.linspace(4.0, 60.0, B)[torch.randperm(B, generator=generator)][:, None], labels


def train_steps(head: PartialFC, steps: range, centres: Tensor, lr: float) -> list[Tensor]:
    """Return the losses of some steps on batches that depend on the step and the centres of make_batch alone."""
    share, losses = B // head.world_size, []
    mine = slice(head.rank * share, (head.rank + 1) * share)
    for step in steps:
        x, labels = make_batch(centres, step)
        head.begin_step(labels[mine][None], step)
        losses.append(head(x[mine]))
        head.step(lr)
    return losses


def whole_rows(head: PartialFC, rows: Tensor) -> Tensor:
    """Return rows (n, ...) of a shard from all ranks in the order of the classes, (C, ...) fp32."""
    parts: list[Any] = [None] * head.world_size
    mine = (head.shard_classes(), rows.float())
    if head.world_size > 1:
        dist.all_gather_object(parts, mine)
    else:
        parts = [mine]
    whole = torch.empty(head.num_classes, *rows.shape[1:])
    for classes, part in parts:
        whole[torch.from_numpy(classes)] = part
    return whole


def saved(head: PartialFC) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the rows of all ranks in slot order, and the state of the margin, as checkpoints hold them."""
    mine = {name: tensor.clone() for name, tensor in head.shard_state().items()}
    parts: list[Any] = [mine]
    if head.world_size > 1:
        parts = [None] * head.world_size
        dist.all_gather_object(parts, mine)
    rows = {name: torch.cat([part[name] for part in parts]) for name in mine}
    return rows, {name: value.clone() for name, value in head.margin.state_dict().items()}


def load_saved(head: PartialFC, found: tuple[dict[str, Tensor], dict[str, Any]]) -> PartialFC:
    rows, state = found
    head.load_rows(lambda low, high: {name: tensor[low:high] for name, tensor in rows.items()})
    head.margin.load_state_dict(state)
    return head


def inclusion_weights(head: PartialFC, labels: Tensor, active: Tensor) -> Tensor:
    """Return log(1 / inclusion probability) of each class (C,): of those drawn, (others) / (others drawn) in their shard."""
    slots = torch.from_numpy(slots_of_classes(np.arange(head.num_classes), head.num_classes, head.seed))
    is_label = torch.zeros(head.num_classes, dtype=torch.bool)
    is_label[labels] = True
    weights = torch.zeros(head.num_classes, dtype=torch.float64)
    for rank in range(head.world_size):
        start, stop = shard_range(head.num_classes, rank, head.world_size)
        drawable = (slots >= start) & (slots < stop) & ~is_label
        drawn = drawable & active
        if drawn.any():
            weights[drawn] = math.log(int(drawable.sum()) / int(drawn.sum()))
    return weights


def reference_losses(
    case: str, known: dict[str, Any], head: PartialFC, batch: tuple[Tensor, Tensor, Tensor], micro: int, setting: Setting
) -> tuple[Tensor, State]:
    """Return the reference's mean loss of a micro-batch of (embeddings, centres, labels) in float64, and its state."""
    name = case.partition(",")[0]
    composition: dict[str, Any] = {"limit": setting.limit}
    if setting.rate < 1:
        composition["active"] = whole_active(head)
    if setting.correction == "log_r":
        composition["log_weights"] = inclusion_weights(head, known["labels"], whole_active(head))
    if setting.focal or setting.smoothing:
        composition |= {"focal": setting.focal, "label_smoothing": setting.smoothing}
    if setting.entropy:
        composition["entropy"] = True
    arguments = {key: value for key, value in known.items() if key != "labels"}
    if name == "elasticface":
        seed = derive(head.seed, "margin", head._number, micro)
        ones = torch.ones(len(batch[2]))
        arguments["draws"] = build_margin("elasticface").observe(ones, ones, seed)["margin"].double()
    return CASES[case].reference(*batch, **arguments, **composition)


def trained_numbers(head: PartialFC) -> list[Tensor]:
    """Return what a step trains beside the centres: a parameter (), or the margins (C,) of all ranks."""
    if isinstance(head.margin, AdaptiveFace):
        return [whole_rows(head, head.shard_state()["margin_margin"].clone())]
    return [parameter.detach().clone() for parameter in head.margin.parameters()]


def compare_steps(rank: int, world_size: int, case: str, setting: Setting, steps: int = 2) -> None:
    """Compare loss, gradients, state and, in the last step, the update of the centres and the trained numbers."""
    name, entry = case.partition(",")[0], CASES[case]
    margin = build_margin(name, **entry.arguments)
    head = PartialFC(margin, C, D, rank, world_size, SEED, setting.config())
    known = first_known(case, margin, C, D)
    start = all_centres(C, D, SEED, setting.sub_centers)
    accumulation = setting.accumulation
    share = B // (accumulation * world_size)
    for step in range(steps):
        embeddings, labels = make_batch(start, step)
        blocks = [slice((a * world_size + rank) * share, (a * world_size + rank + 1) * share) for a in range(accumulation)]
        micros = [slice(a * B // accumulation, (a + 1) * B // accumulation) for a in range(accumulation)]
        x = embeddings.clone().requires_grad_()
        head.begin_step(torch.stack([labels[block] for block in blocks]), step)
        known["labels"] = labels
        centres, before = whole_rows(head, head.centres).double().requires_grad_(), head.centres.float().clone()
        numbers = trained_numbers(head)
        exact = embeddings.double().requires_grad_()
        results = [
            reference_losses(case, known, head, (exact[rows], centres, labels[rows]), micro, setting)
            for micro, rows in enumerate(micros)
        ]
        expected = torch.stack([loss for loss, _ in results]).mean()
        trained = [known[key] for key in ("bias", "margins") if key in known]
        by_x, by_w, *by_trained = torch.autograd.grad(expected, [exact, centres, *trained])
        losses = [head(x[block], micro) for micro, block in enumerate(blocks)]
        (torch.stack(losses).mean() * 1.0).backward()
        last = step == steps - 1
        head.step(1.0 if last else 0.0)
        loss_bound, bound = _bounds(margin, entry, setting, start, embeddings, labels)
        assert abs(torch.stack(losses).mean().item() - expected.item()) <= loss_bound + 8 * FP32_UNIT * abs(expected.item())
        mine = torch.cat([torch.arange(B)[block] for block in blocks])
        assert x.grad is not None
        assert (x.grad[mine] - by_x[mine]).norm() <= bound * by_x.norm()
        classes = torch.from_numpy(head.shard_classes())
        moved, should = before - head.centres.float(), by_w[classes] if last else torch.zeros_like(by_w[classes])
        rounding = 0.0 if setting.storage == "exact" else 2.0**-7 * float(head.centres.float().norm())
        assert (moved - should).norm() <= bound * by_w.norm() + rounding
        for value, was, gradient in zip(trained_numbers(head), numbers, by_trained, strict=True):
            should = (was.double() - gradient).clamp(0.0, 1.0) if case == "adaptiveface" else was.double() - gradient
            error = value - should if last else value - was
            assert error.norm() <= bound * gradient.norm() + 4 * FP32_UNIT * was.norm()
        state = results[0][1]
        if case == "kappaface":
            for key in ("sums", "counts"):
                state[key] = known[key] + sum(part[key] - known[key] for _, part in results)
                found = whole_rows(head, head.shard_state()[f"margin_{key}"])
                assert (found - state[key]).norm() <= rounding_bound(torch.float32, B, state[key].norm())
        state.pop("margins", None)
        for key in state.keys() & STATES.keys():
            value = getattr(margin, STATES[key]).item()
            assert accumulation > 1 or value == pytest.approx(state[key], rel=bound, abs=bound)
            state[key] = value
        known.update(state)


def _bounds(
    margin: Margin, entry: Case, setting: Setting, centres: Tensor, embeddings: Tensor, labels: Tensor
) -> tuple[float, float]:
    """Return the bounds of the loss, absolute, and of the gradients, relative to their norms."""
    steep = entry.steep * margin.scale
    if setting.dtype == torch.float32:
        loss, gradient = head_bounds(steep, D, B)
        # an entropy has the relative error of exp(logit), a weight up to 8 times that: EM of perturbed entropies in float64
        weight = 8 * rounding_bound(torch.float32, D, steep) if setting.entropy else 0.0
        return loss + weight * steep, gradient + weight
    half = bf16_half_step(steep)
    return half, half
