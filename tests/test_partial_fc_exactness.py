"""The head against a dense float64 softmax and textbook optimizers: one step and twenty, whole and sampled, odd cases."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from dense_reference import (
    DenseHead,
    active_classes,
    all_centres,
    bytes_of_workspace,
    dense_loss,
    near_their_centres,
    relative,
    take_step,
)
from rounding import bf16_half_step, head_bounds, rounding_bound
from torch import Tensor

from losses import build_margin
from losses.margin import Margin
from partial_fc import HeadConfig, PartialFC, RowAdamW, RowSGD
from partial_fc.kernels import KERNELS
from partial_fc.kernels import plain as products
from partial_fc.kernels.plain import auto_chunk

pytestmark = pytest.mark.numeric

# tests/test_partial_fc_softmax_loss.py has all losses, at a size that its references can do
FIXED = ("arcface", "cosface", "combined")
KINDS = ("arcface", "adaface", "curricularface", "npcface", "circle", "li_arcface")  # functions of negatives, of the norm
STEPS = [("sgd", 1.0, "cosface"), ("sgd", 0.3, "arcface"), ("adamw", 1.0, "combined"), ("adamw", 0.3, "cosface"),
         ("nesterov", 0.3, "arcface")]  # fmt: skip
OPTIMIZERS = {"sgd": RowSGD(0.9, 5e-4), "adamw": RowAdamW(0.9, 0.999, 1e-8, 0.05), "nesterov": RowSGD(0.9, 5e-4, nesterov=True)}
RATES = {"sgd": 1e-2, "adamw": 1e-4, "nesterov": 1e-2}


def _margin(name: str) -> Margin:
    return build_margin(name, **({"margin": 0.4} if name in ("arcface", "cosface") else {}))


@pytest.fixture(scope="module")
def real_centres() -> Tensor:
    """Return the first centres of more than one chunk of classes in their order."""
    return all_centres(auto_chunk("cpu", torch.float32) + 100, 512, seed=3)


@pytest.mark.parametrize(
    ("margin_name", "kernels"), [*((name, "auto") for name in KINDS), ("cosface", "plain"), ("npcface", "plain")]
)
def test_loss_and_gradients_at_real_size_are_exact(real_centres: Tensor, margin_name: str, kernels: str):
    (num_classes, dim), rows = real_centres.shape, 128
    margin, centres = _margin(margin_name), real_centres
    x, labels = near_their_centres(centres, rows)
    exact = x.double().requires_grad_(), centres.double().requires_grad_()
    expected = dense_loss(copy.deepcopy(margin).double(), *exact, labels)
    by_x, by_w = torch.autograd.grad(expected, exact)
    head = PartialFC(margin, num_classes, dim, seed=3, config=HeadConfig(optimizer=RowSGD(0.0, 0.0), kernels=kernels))
    before = head.centres.clone()
    loss, gradient, _ = take_step(head, x, labels, 1.0)
    loss_bound, gradient_bound = head_bounds(64.0 if margin_name in FIXED else 2 * margin.scale, dim, rows)
    assert loss == pytest.approx(expected.item(), abs=loss_bound)
    assert relative(gradient, by_x) < gradient_bound
    assert relative(before - head.centres, by_w[torch.from_numpy(head.shard_classes())]) < gradient_bound


def _train_beside_dense(
    rank: int, world_size: int, optimizer_name: str, sample_rate: float, margin_name: str, kernels: str = "auto"
) -> None:
    """Compare 20 steps, with the active classes of all ranks, 101 classes of which no two ranks hold as many."""
    num_classes, dim, rows = 101, 24, 12
    margin, optimizer, lr = _margin(margin_name), OPTIMIZERS[optimizer_name], RATES[optimizer_name]
    centres = all_centres(num_classes, dim, seed=5)
    dense = DenseHead(margin, centres, optimizer)
    head = PartialFC(
        margin, num_classes, dim, rank, world_size, 5, HeadConfig(sample_rate, optimizer, chunk=16, cache_mb=0, kernels=kernels)
    )
    share = slice(rank * rows // world_size, (rank + 1) * rows // world_size)
    loss_bound, gradient_bound = head_bounds(64.0, dim, rows)
    for step in range(20):
        x, labels = near_their_centres(centres, rows, step)
        loss, gradient, active = take_step(head, x[share], labels[share], lr, step=step)
        assert int(active.sum()) == head.num_active()
        expected, by_x, _ = dense.step(x, labels, lr, active)
        so_far = 1 + step / (1 - 0.9)  # every error goes on in the momentum, and turns the next gradients
        assert loss == pytest.approx(expected, abs=so_far * loss_bound), f"step {step}"
        assert relative(gradient, by_x[share]) < so_far * gradient_bound, f"step {step}"
    moved = head.centres - centres[torch.from_numpy(head.shard_classes())]
    should = (dense.centres - centres)[torch.from_numpy(head.shard_classes())]
    assert relative(moved, should) < 20**0.5 * gradient_bound  # the errors of the steps are independent


@pytest.mark.parametrize(("optimizer_name", "sample_rate", "margin_name"), STEPS)
def test_twenty_steps_follow_the_dense_head(margin_name: str, sample_rate: float, optimizer_name: str):
    for kernels in KERNELS:
        _train_beside_dense(0, 1, optimizer_name, sample_rate, margin_name, kernels)


def _several(rank: int, world_size: int) -> None:
    for optimizer_name, sample_rate, margin_name in STEPS[1:3] if world_size == 2 else STEPS[3:]:
        _train_beside_dense(rank, world_size, optimizer_name, sample_rate, margin_name)
    if world_size == 2:
        _train_beside_dense(rank, world_size, "sgd", 0.3, "combined", "plain")


@pytest.mark.parametrize("world_size", [2, 3])
def test_twenty_steps_on_uneven_shards_follow_the_dense_head(run_ranks: Callable[..., None], world_size: int):
    run_ranks(_several, world_size)


def _compare_odd_case(centres: Tensor, x: Tensor, labels: Tensor, kernels: str, scale: float = 64.0) -> None:
    """Put these centres into a head and compare a step with the dense one."""
    margin = build_margin("cosface", scale=scale, margin=0.4)
    head = PartialFC(
        margin, len(centres), centres.shape[1], config=HeadConfig(optimizer=RowSGD(0.0, 0.0), chunk=8, kernels=kernels)
    )
    order = torch.from_numpy(head.shard_classes())
    rows = {"centres": centres[order], "momentum": torch.zeros_like(centres)}
    head.load_rows(lambda low, high: {name: tensor[low:high] for name, tensor in rows.items()})
    loss, by_x, _ = take_step(head, x, labels, 1.0)
    dense = DenseHead(margin, centres, RowSGD(0.0, 0.0))
    expected, expected_by_x, by_w = dense.step(x, labels, 1.0)
    assert math.isfinite(loss) and bool(by_x.isfinite().all()) and bool(head.centres.isfinite().all())
    loss_bound, gradient_bound = head_bounds(scale, x.shape[1], len(x))
    smallest = rounding_bound(torch.float32, x.shape[1], scale)  # left over where the exact gradient cancels to zero
    assert loss == pytest.approx(expected, abs=loss_bound)
    assert (by_x - expected_by_x).norm() <= gradient_bound * expected_by_x.norm() + smallest
    moved = centres[order] - head.centres
    assert (moved - by_w[order]).norm() <= gradient_bound * by_w.norm() + smallest


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("scale", [64.0, 100.0, 300.0])  # a constant 0, a constant or the rows' maximum is subtracted
def test_cosines_of_one_and_minus_one_give_the_numbers_of_the_dense_head(sign: float, scale: float, kernels: str):
    direction = F.normalize(torch.randn(1, 16, generator=torch.Generator().manual_seed(1)))
    _compare_odd_case(direction.repeat(30, 1), sign * 3 * direction.repeat(6, 1), torch.arange(6), kernels, scale)


@pytest.mark.parametrize("kernels", KERNELS)
def test_duplicate_centres_and_a_batch_of_one_class_give_the_numbers_of_the_dense_head(kernels: str):
    centres = torch.randn(30, 16, generator=torch.Generator().manual_seed(2))
    centres[10:20] = centres[:10]
    x, labels = near_their_centres(centres, 8)
    _compare_odd_case(centres, x, labels, kernels)
    _compare_odd_case(centres, x, torch.full((8,), 13), kernels)


@pytest.mark.parametrize("kernels", KERNELS)
def test_zero_embeddings_and_zero_centres_give_finite_numbers_and_move_nothing_else(kernels: str):
    margin = build_margin("arcface", scale=64.0, margin=0.5)
    head = PartialFC(margin, 30, 16, config=HeadConfig(optimizer=RowSGD(0.0, 0.0), kernels=kernels))
    centres = head.centres.clone()
    centres[7] = 0.0
    rows = {"centres": centres, "momentum": torch.zeros_like(centres)}
    head.load_rows(lambda low, high: {name: tensor[low:high] for name, tensor in rows.items()})
    labels = torch.from_numpy(head.shard_classes())[[0, 1, 2, 3]]
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    x[2] = 0.0
    loss, by_x, _ = take_step(head, x, labels, 1.0)
    dense = dense_loss(margin, x.double(), centres.double()[torch.from_numpy(head.shard_classes()).argsort()], labels)
    assert loss == pytest.approx(dense.item(), abs=head_bounds(64.0, 16, 4)[0])
    assert bool(by_x.isfinite().all()) and bool(head.centres.isfinite().all())


def _shard_without_positives(rank: int, world_size: int) -> None:
    head = PartialFC(
        _margin("arcface"), 40, 16, rank, world_size, seed=1, config=HeadConfig(sample_rate=0.2, optimizer=RowSGD(0.0, 0.0))
    )
    slots = torch.arange(4)  # all in rank 0's shard
    centres = all_centres(40, 16, 1)
    everywhere = PartialFC(_margin("arcface"), 40, 16, seed=1)
    labels = torch.from_numpy(everywhere.shard_classes())[slots]
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mine = slice(2 * rank, 2 * rank + 2)
    loss, gradient, active = take_step(head, x[mine], labels[mine], 1.0)
    expected = dense_loss(_margin("arcface"), x.double(), centres.double(), labels, active)
    loss_bound, gradient_bound = head_bounds(64.0, 16, 4)
    assert loss == pytest.approx(expected.item(), abs=loss_bound)
    assert relative(gradient, torch.autograd.grad(expected, x)[0][mine]) < gradient_bound


def test_a_shard_without_any_positive_has_its_part_in_loss_and_gradient(run_ranks: Callable[..., None]):
    run_ranks(_shard_without_positives, 2)


def test_more_positives_than_the_budget_are_all_active():
    head = PartialFC(_margin("arcface"), 60, 16, config=HeadConfig(sample_rate=0.05))
    centres = all_centres(60, 16, 0)
    x, labels = near_their_centres(centres, 40)
    head.begin_step(labels[None], 0)
    active = active_classes(head)
    assert set(labels.tolist()) == set(active.nonzero().squeeze(1).tolist())
    loss = head(x)
    expected = dense_loss(_margin("arcface"), x.double(), centres.double(), labels, active)
    assert loss.item() == pytest.approx(expected.item(), abs=head_bounds(64.0, 16, 40)[0])


def test_fewer_classes_than_a_chunk_give_the_numbers_of_the_dense_head():
    assert auto_chunk("cpu", torch.float32) > 20
    _compare_odd_case(all_centres(20, 16, 0), *near_their_centres(all_centres(20, 16, 0), 6), kernels="auto")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("cache_mb", [0, 64])
def test_two_bf16_micro_batches_are_near_the_dense_softmax(cache_mb: int, kernels: str):
    margin, centres = _margin("cosface"), all_centres(3000, 128, seed=3)
    x, labels = near_their_centres(centres, 64)
    head = PartialFC(
        margin,
        3000,
        128,
        seed=3,
        config=HeadConfig(optimizer=RowSGD(0.0, 0.0), matmul_dtype=torch.bfloat16, cache_mb=cache_mb, kernels=kernels),
    )
    before = head.centres.clone()
    loss, gradient, _ = take_step(head, x, labels, 1.0, micro_batches=2)
    expected, by_x, by_w = DenseHead(margin, centres, RowSGD()).step(x, labels, 0.0)
    # bf16 rounds a negative's logit, and so exp(logit) relatively, by half a step of the largest at most; the own logit is fp32
    cosine = (F.normalize(x) @ F.normalize(centres).t()).scatter(1, labels[:, None], -1.0)
    bound = bf16_half_step(64.0 * cosine.max().item())
    assert loss == pytest.approx(expected, abs=bound / 64**0.5)  # a mean over 64 rows
    assert relative(gradient, by_x) < bound
    assert relative(before - head.centres, by_w[torch.from_numpy(head.shard_classes())]) < bound


def _not_finite(rank: int, world_size: int, kernels: str) -> None:
    head = PartialFC(_margin("arcface"), 20, 16, rank, world_size, config=HeadConfig(kernels=kernels))
    before = {name: tensor.clone() for name, tensor in head.shard_state().items()}
    head.begin_step(torch.tensor([[3, 4]]), 0)
    x = torch.randn(2, 16)
    if rank == 0:
        x[1, 5] = float("nan")
    head(x)
    head.step(0.1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.shard_state().items())
    for step, good in ((1, False), (2, True)):  # what the caller says counts as well
        head.begin_step(torch.tensor([[3, 4]]), step)
        head(torch.randn(2, 16))
        head.step(0.1, torch.tensor(good))
        assert all(torch.equal(tensor, before[name]) for name, tensor in head.shard_state().items()) != good


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_is_not_finite_or_not_good_updates_no_rank(run_ranks: Callable[..., None], world_size: int, kernels: str):
    run_ranks(_not_finite, world_size, kernels)


def _wire(rank: int, world_size: int) -> None:
    centres = all_centres(50, 32, 0)
    x, labels = near_their_centres(centres, 8)
    mine = slice(rank * 4, rank * 4 + 4)
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        head = PartialFC(_margin("cosface"), 50, 32, rank, world_size, config=HeadConfig(wire_dtype=dtype))
        part = x[mine].clone().requires_grad_()
        head.begin_step(labels[mine][None], 0)
        head(part).backward()
        assert part.grad is not None
        gradients.append(part.grad)
    # each of the 32 numbers of an embedding is rounded by 2^-8 of it at most, independently; 64 times that is the logit's error
    assert 1e-6 < relative(gradients[1], gradients[0]) < 64.0 * 2**-8 / 32**0.5


def test_bf16_on_the_wire_is_near_fp32(run_ranks: Callable[..., None]):
    run_ranks(_wire, 2)


def test_buffers_do_not_grow_after_the_first_step_nor_with_the_classes():
    held = []
    for num_classes in (5_000, 40_000):
        head = PartialFC(_margin("cosface"), num_classes, 32, config=HeadConfig(cache_mb=0, chunk=512))
        sizes = []
        for step in range(3):
            head.begin_step(torch.arange(16)[None], step)
            head(torch.randn(16, 32))
            head.step(0.1)
            sizes.append(bytes_of_workspace(head))
        assert sizes[0] == sizes[2]
        held.append(sizes[0])
    assert held[0] == held[1] > 0


def test_u_is_summed_in_fp32_where_products_can_return_it(monkeypatch: pytest.MonkeyPatch):
    """As on CUDA: U then has the error of fp32 sums over the rounded factors, not that of a rounding to bf16 in each chunk."""
    centres, whole = all_centres(4096, 64, 3), torch.mm
    x, labels = near_their_centres(centres, 32)
    exact = torch.zeros(32, 64, dtype=torch.float64)

    def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        if len(a) == 32:  # E (B, c) times the unit centres (c, D)
            exact.add_(whole(a.double(), b.double()))
        return whole(a, b, out=out) if out_dtype is None else whole(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(products, "is_fast_in_bf16", lambda device: True)
    for has in (False, True):
        monkeypatch.setattr(products, "has_fp32_output", lambda device, has=has: has)
        config = HeadConfig(optimizer=RowSGD(0.0, 0.0), matmul_dtype=torch.bfloat16, chunk=256, kernels="plain")
        head, sums = PartialFC(_margin("cosface"), 4096, 64, seed=3, config=config), []

        def forward(
            *given: object, whole: Callable[..., tuple[Tensor, ...]] = head._passes.forward, sums: list[Tensor] = sums
        ) -> tuple[Tensor, ...]:
            result = whole(*given)
            sums.append(result[1].clone())
            return result

        monkeypatch.setattr(head._passes, "forward", forward)
        exact.zero_()
        take_step(head, x, labels, 1.0)
        error = relative(sums[0], exact)
        assert error < (rounding_bound(torch.float32, 4096) if has else rounding_bound(torch.bfloat16, 16))
        assert has or error > 2.0**-11  # a rounding to 8 bits shows
