"""The sharded, chunked, sampled head against a dense softmax over the joined batch in float64."""

import copy
from collections.abc import Callable

import pytest
import torch
from dense_reference import all_centres, dense_loss, near_their_centres, relative
from rounding import head_bounds, rounding_bound
from torch import Tensor, nn

from losses import build_margin
from losses.margin import Margin
from partial_fc import HeadConfig, PartialFC, RowSGD
from partial_fc.centres.shard import initial_centres, shard_range
from utils.randomness import derive

pytestmark = pytest.mark.numeric

D = 16
THREE_STEPS = 3**0.5 * head_bounds(64.0, D, 12)[1]  # of the centres, relative; the errors of the steps are independent


def _margin(name: str) -> Margin:
    return build_margin(name, margin=0.4)


def _take_steps(head: PartialFC, rank: int, world_size: int, accumulation: int, steps: int) -> None:
    share = 12 // (world_size * accumulation)
    for step in range(steps):
        embeddings, labels = near_their_centres(all_centres(29, D, 3), 12, step)
        blocks = [slice((a * world_size + rank) * share, (a * world_size + rank + 1) * share) for a in range(accumulation)]
        head.begin_step(torch.stack([labels[block] for block in blocks]), step)
        for micro, block in enumerate(blocks):
            before = copy.deepcopy(head.margin.state_dict())
            head(embeddings[block], micro)
            # every micro-batch sees what the last step left
            assert all(torch.equal(value, before[name]) for name, value in head.margin.state_dict().items())
        head.step(lr=1e-3)


def _train_head(rank: int, world_size: int, sample_rate: float, accumulation: int, steps: int = 3) -> PartialFC:
    head = PartialFC(_margin("arcface"), 29, D, rank, world_size, seed=3, config=HeadConfig(sample_rate=sample_rate, chunk=4))
    _take_steps(head, rank, world_size, accumulation, steps)
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
    """Return the two running means of AdaFace after some steps, and the centres in class order as far as this rank has them."""
    margin = build_margin("adaface", alpha=0.3)
    config = HeadConfig(optimizer=RowSGD(0.0, 0.0), chunk=4, cache_mb=cache_mb)
    head = PartialFC(margin, 29, D, rank, world_size, 3, config)
    _take_steps(head, rank, world_size, accumulation, steps)
    return margin.mean.clone(), margin.std.clone(), head.centres


def _compare_statistics(rank: int, world_size: int) -> None:
    start, stop = shard_range(29, rank, world_size)
    first = build_margin("adaface")
    bound = rounding_bound(torch.float32, 12 + D)  # of a mean of 12 norms, each a root of a sum of D terms
    # after a step with accumulation the centres differ: each micro-batch has a mean of its own
    for accumulation, steps in ((1, 2), (2, 1)):
        mean, std, centres = _statistics(0, 1, 1, 128, steps)
        assert float(mean) != pytest.approx(float(first.mean)) and float(std) != pytest.approx(float(first.std))
        for cache_mb in (0, 128):  # 0: every chunk is computed again for the update
            mine = _statistics(rank, world_size, accumulation, cache_mb, steps)
            assert abs(float(mine[0] / mean) - 1) < 4 * bound
            if accumulation == 1:
                assert abs(float(mine[1] / std) - 1) < 4 * bound and relative(mine[2], centres[start:stop]) < THREE_STEPS


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_statistics_of_a_margin_are_of_the_global_batch_counted_once_a_step(run_ranks: Callable[..., None], world_size: int):
    run_ranks(_compare_statistics, world_size)


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
    for number in (1, 3):
        torch.set_num_threads(number)
        assert torch.equal(initial_centres(0, 3000, 4, seed=1), serial)
    assert whole.std().item() == pytest.approx(0.01, rel=0.05)
    assert len(torch.unique(whole, dim=0)) == 3000  # no two blocks share their numbers


def test_fewer_classes_than_ranks_is_an_error():
    with pytest.raises(ValueError, match="2 classes cannot be shared by 3"):
        PartialFC(_margin("cosface"), 2, D, rank=0, world_size=3)
    with pytest.raises(ValueError, match="CosFace needs two classes or more"):
        PartialFC(_margin("cosface"), 1, D)


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
