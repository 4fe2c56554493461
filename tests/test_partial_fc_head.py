"""The sharded, chunked, sampled head against a dense softmax over the joined batch in float64."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from dense_reference import all_centres, dense_loss, near_their_centres, relative
from rounding import bf16_half_step, head_bounds, rounding_bound
from torch import Tensor, nn

from losses import build_margin
from losses.margin import Margin, State
from losses.negatives import Negatives, negatives_of
from partial_fc import HeadConfig, PartialFC, RowSGD
from partial_fc.centres.shard import initial_centres, shard_range
from utils.randomness import derive

pytestmark = pytest.mark.numeric

D = 16
THREE_STEPS = 3**0.5 * head_bounds(64.0, D, 12)[1]  # of the centres, relative; the errors of the steps are independent


class HardNegatives(Margin):
    """MV-Softmax's rule: a negative that is nearer than the target minus 0.35 is pushed up; so negatives are not linear."""

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        return self.scale * (cosine - 0.35)

    def negatives(self, cosine: Tensor, norm: Tensor, state: State) -> Negatives:
        return negatives_of("hard", cosine, scale=self.scale, slope=1.2, constant=0.2, threshold=cosine - 0.35)

    @property
    def logit_bound(self) -> float:
        return 1.4 * self.scale


class NormScaled(Margin):
    """A target that depends on the embedding's norm, as AdaFace's and MagFace's do."""

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        return self.scale * (cosine - 0.1) * (1 + 0.01 * norm)


class Running(Margin):
    """Its target and its negatives depend on running means over the batches, as CurricularFace's and AdaFace's do."""

    cosine: Tensor
    norm: Tensor

    def __init__(self, scale: float = 32.0) -> None:
        super().__init__(scale)
        self.register_buffer("cosine", torch.tensor(0.1))
        self.register_buffer("norm", torch.tensor(4.0))

    def observe(self, cosine: Tensor, norm: Tensor, seed: int = 0, of_class: Mapping[str, Tensor] | None = None) -> State:
        return {
            "cosine": torch.lerp(self.cosine.to(cosine.dtype), cosine.mean(), 0.3),
            "norm": torch.lerp(self.norm.to(norm.dtype), norm.mean(), 0.3),
        }

    def commit(self, states: Sequence[State], good: Tensor | None = None) -> None:
        self.keep(good, **{name: torch.stack([state[name] for state in states]).mean() for name in ("cosine", "norm")})

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        return self.scale * (cosine - 0.02 * norm / state["norm"])

    def negatives(self, cosine: Tensor, norm: Tensor, state: State) -> Negatives:
        return negatives_of("hard", cosine, scale=self.scale, slope=state["cosine"] + 0.9, threshold=cosine)

    @property
    def logit_bound(self) -> float:
        return 1.9 * self.scale


class RunningTarget(Running):
    """Negatives are linear, so that the head sums Z and the target cosines at once."""

    negatives = Margin.negatives


def _margin(name: str) -> Margin:
    if name.startswith("running"):
        return RunningTarget() if name == "running_target" else Running()
    if name == "hard_negatives":
        return HardNegatives(32.0)
    if name == "norm":
        return NormScaled(32.0)
    if name == "wide":  # exp(300) is not finite in fp32: the row maximum must be used
        return build_margin("cosface", scale=300.0, margin=0.3)
    return build_margin(name, **({} if name == "combined" else {"margin": 0.4}))


def _compare_with_dense(rank: int, world_size: int, num_classes: int, margin_name: str) -> None:
    margin, rows = _margin(margin_name), 6
    as_before = copy.deepcopy(margin).double()  # a margin's statistics move with the head's step
    centres = all_centres(num_classes, D, 3)
    embeddings, labels = near_their_centres(centres, rows * world_size)
    mine = slice(rank * rows, (rank + 1) * rows)
    head = PartialFC(margin, num_classes, D, rank, world_size, seed=3, config=HeadConfig(optimizer=RowSGD(0.0, 0.0), chunk=3))
    before = head.centres.clone()
    x = embeddings[mine].clone().requires_grad_()
    head.begin_step(labels[mine][None], 0)
    loss = head(x)
    loss.backward()
    head.step(lr=1.0)

    dense_x, dense_w = embeddings.double().requires_grad_(), centres.double().requires_grad_()
    expected = dense_loss(as_before, dense_x, dense_w, labels)
    expected.backward()
    loss_bound, gradient_bound = head_bounds(margin.logit_bound, D, rows * world_size)
    assert loss.item() == pytest.approx(expected.item(), abs=loss_bound)
    assert x.grad is not None and dense_x.grad is not None and dense_w.grad is not None
    assert (x.grad - dense_x.grad[mine]).norm() <= gradient_bound * dense_x.grad.norm()
    own_classes = torch.from_numpy(head.shard_classes())
    assert ((before - head.centres) - dense_w.grad[own_classes]).norm() <= gradient_bound * dense_w.grad.norm()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_loss_and_both_gradients_equal_the_dense_softmax_with_seven_classes(run_ranks: Callable[..., None], world_size: int):
    run_ranks(_compare_with_dense, world_size, 7, "arcface")


@pytest.mark.parametrize("margin_name", ["cosface", "combined", "hard_negatives", "norm", "wide", "running", "running_target"])
def test_every_kind_of_margin_equals_the_dense_softmax(margin_name: str):
    _compare_with_dense(0, 1, 50, margin_name)


def _compare_two_kinds(rank: int, world_size: int) -> None:
    for margin_name in ("hard_negatives", "norm", "wide", "running", "running_target"):
        _compare_with_dense(rank, world_size, 11, margin_name)


def test_bent_negatives_norms_and_wide_scales_equal_the_dense_softmax_on_two_ranks(run_ranks: Callable[..., None]):
    run_ranks(_compare_two_kinds, 2)


def _train_head(rank: int, world_size: int, sample_rate: float, accumulation: int, steps: int = 3) -> PartialFC:
    centres = all_centres(29, D, 3)
    head = PartialFC(_margin("arcface"), 29, D, rank, world_size, seed=3, config=HeadConfig(sample_rate=sample_rate, chunk=4))
    share = 12 // (world_size * accumulation)
    for step in range(steps):
        embeddings, labels = near_their_centres(centres, 12, step)
        blocks = [slice((a * world_size + rank) * share, (a * world_size + rank + 1) * share) for a in range(accumulation)]
        head.begin_step(torch.stack([labels[block] for block in blocks]), step)
        for micro, block in enumerate(blocks):
            head(embeddings[block], micro)
        head.step(lr=1e-3)
    return head


def test_three_steps_equal_torch_sgd_on_the_dense_softmax():
    head = _train_head(0, 1, sample_rate=1.0, accumulation=1)
    weight = nn.Parameter(all_centres(29, D, 3).double())
    optimizer = torch.optim.SGD([weight], lr=1e-3, momentum=0.9, weight_decay=5e-4)
    for step in range(3):
        embeddings, labels = near_their_centres(all_centres(29, D, 3), 12, step)
        optimizer.zero_grad()
        dense_loss(_margin("arcface"), embeddings.double(), weight, labels).backward()
        optimizer.step()
    assert relative(head.centres, weight.detach()[torch.from_numpy(head.shard_classes())]) < THREE_STEPS


def _statistics(rank: int, world_size: int, accumulation: int, cache_mb: int, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the running means after some steps, and the centres in class order as far as this rank has them."""
    margin, centres = Running(), all_centres(29, D, 3)
    config = HeadConfig(optimizer=RowSGD(0.0, 0.0), chunk=4, cache_mb=cache_mb)
    head = PartialFC(margin, 29, D, rank, world_size, 3, config)
    share = 12 // (world_size * accumulation)
    for step in range(steps):
        embeddings, labels = near_their_centres(centres, 12, step)
        blocks = [slice((a * world_size + rank) * share, (a * world_size + rank + 1) * share) for a in range(accumulation)]
        head.begin_step(torch.stack([labels[block] for block in blocks]), step)
        for micro, block in enumerate(blocks):
            before = margin.cosine.clone()
            head(embeddings[block], micro)
            assert torch.equal(margin.cosine, before)  # every micro-batch sees what the last step left
        head.step(lr=1e-3)
    return margin.cosine.clone(), margin.norm.clone(), head.centres


def _compare_statistics(rank: int, world_size: int) -> None:
    start, stop = shard_range(29, rank, world_size)
    bound = rounding_bound(torch.float32, 12 + D)  # a mean of 12 cosines, each a sum of D terms, all of them below 1
    # after a step with accumulation the centres differ: each micro-batch has a mean of its own
    for accumulation, steps in ((1, 2), (2, 1)):
        cosine, norm, centres = _statistics(0, 1, 1, 128, steps)
        assert float(cosine) != pytest.approx(0.1) and float(norm) != pytest.approx(4.0)
        for cache_mb in (0, 128):  # 0: every chunk is computed again for the update
            mine = _statistics(rank, world_size, accumulation, cache_mb, steps)
            assert abs(float(mine[0] - cosine)) < 4 * bound and abs(float(mine[1] / norm) - 1) < 4 * bound
            if accumulation == 1:
                assert relative(mine[2], centres[start:stop]) < THREE_STEPS
    shared = [torch.empty_like(mine[0]) for _ in range(world_size)]
    if world_size > 1:
        torch.distributed.all_gather(shared, mine[0])
        assert all(torch.equal(one, mine[0]) for one in shared)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_statistics_of_a_margin_are_those_of_the_global_batch_and_counted_once_a_step(
    run_ranks: Callable[..., None], world_size: int
):
    run_ranks(_compare_statistics, world_size)


def test_statistics_of_a_step_that_is_not_finite_are_dropped():
    margin = Running()
    head = PartialFC(margin, 29, D)
    head.begin_step(torch.arange(4)[None], 0)
    embeddings = torch.randn(4, D)
    embeddings[0, 0] = torch.inf
    head(embeddings)
    head.step(0.1)
    assert float(margin.cosine) == pytest.approx(0.1) and float(margin.norm) == 4.0


@pytest.mark.parametrize("accumulation", [2, 3])
def test_accumulated_micro_batches_equal_one_large_batch(accumulation: int):
    assert relative(_train_head(0, 1, 1.0, accumulation).centres, _train_head(0, 1, 1.0, 1).centres) < THREE_STEPS


def _compare_world_sizes(rank: int, world_size: int) -> None:
    head, alone = _train_head(rank, world_size, 1.0, 2), _train_head(0, 1, 1.0, 1)
    assert relative(head.centres, alone.centres[head.first_slot : head.end_slot]) < THREE_STEPS
    with pytest.raises(ValueError, match=r"labels must be in \[0, 29\).*step 9 has 29, 400"):
        head.begin_step(torch.tensor([[400 if rank == 0 else 29]]), 9)


def test_world_size_changes_neither_training_nor_who_hears_of_a_wrong_label(run_ranks: Callable[..., None]):
    run_ranks(_compare_world_sizes, 3)


def test_only_active_rows_move_when_sampling():
    head = PartialFC(_margin("cosface"), 200, D, config=HeadConfig(sample_rate=0.1, chunk=8))
    before = head.centres.clone()
    labels = torch.tensor([[3, 77, 77, 150]])
    head.begin_step(labels, 0)
    head(torch.randn(4, D))
    assert head.num_active() == 20
    head.step(0.1)
    moved = (head.centres != before).any(dim=1)
    assert int(moved.sum()) == 20
    assert set(labels.flatten().tolist()) <= set(head.shard_classes()[moved.numpy()].tolist())
    assert torch.equal(head.centre_store.tensors["momentum"].ne(0).any(dim=1), moved)


def test_sampled_loss_is_the_dense_softmax_over_the_active_classes():
    head = PartialFC(_margin("cosface"), 200, D, config=HeadConfig(sample_rate=0.1, chunk=8, optimizer=RowSGD(0.0, 0.0)))
    labels = torch.tensor([3, 77, 77, 150])
    embeddings = torch.randn(4, D, generator=torch.Generator().manual_seed(0))
    centres = head.centres.clone()
    head.begin_step(labels[None], 5)
    loss = head(embeddings)
    head.step(1.0)
    active = np.flatnonzero((head.centres != centres).any(dim=1).numpy())
    renumbered = np.searchsorted(active, np.argsort(head.shard_classes())[labels.numpy()])
    expected = dense_loss(_margin("cosface"), embeddings.double(), centres[active].double(), torch.from_numpy(renumbered))
    assert loss.item() == pytest.approx(expected.item(), abs=head_bounds(64.0, D, 4)[0])


def test_bf16_products_stay_within_their_known_error():
    centres = all_centres(500, D, 3)
    embeddings, labels = near_their_centres(centres, 32)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        head = PartialFC(_margin("cosface"), 500, D, seed=3, config=HeadConfig(matmul_dtype=dtype))
        head.begin_step(labels[None], 0)
        losses.append(head(embeddings).item())
    # half a bf16 step of the largest negative's logit, less over the mean of 32 rows; no negative's cosine is above 0.999
    assert losses[1] == pytest.approx(losses[0], abs=bf16_half_step(64.0 * 0.999) / 32**0.5)


def test_shards_cover_every_slot_once_and_differ_by_at_most_one():
    for num_classes, world_size in [(7, 3), (8, 8), (1000, 7), (5, 5)]:
        ranges = [shard_range(num_classes, rank, world_size) for rank in range(world_size)]
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == num_classes
        sizes = [stop - start for start, stop in ranges]
        assert max(sizes) - min(sizes) <= 1


def test_initial_centre_depends_on_the_class_and_not_on_the_shard():
    whole = initial_centres(0, 3000, 4, seed=1)
    torch.testing.assert_close(whole[900:2100], initial_centres(900, 2100, 4, seed=1), rtol=0, atol=0)
    one_by_one = [torch.Generator().manual_seed(derive(1, "centres", block)) for block in range(3)]
    serial = torch.cat([torch.randn(1024, 4, generator=generator) for generator in one_by_one])[:3000] * 0.01
    threads = torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            assert torch.equal(initial_centres(0, 3000, 4, seed=1), serial)
    finally:
        torch.set_num_threads(threads)
    assert whole.std().item() == pytest.approx(0.01, rel=0.05)
    assert len(torch.unique(whole, dim=0)) == 3000  # no two blocks share their numbers


def test_fewer_classes_than_ranks_is_an_error():
    with pytest.raises(ValueError, match="2 classes cannot be shared by 3"):
        PartialFC(_margin("cosface"), 2, D, rank=0, world_size=3)


def test_calls_out_of_turn_are_errors():
    head = PartialFC(_margin("cosface"), 20, D)
    with pytest.raises(RuntimeError, match="begin_step"):
        head(torch.randn(2, D))
    head.begin_step(torch.tensor([[1, 2]]), 0)
    with pytest.raises(ValueError, match="3 embeddings over all ranks for 2 labels"):
        head(torch.randn(3, D))
    head(torch.randn(2, D))
    with pytest.raises(ValueError, match="out of turn"):
        head(torch.randn(2, D), 0)
