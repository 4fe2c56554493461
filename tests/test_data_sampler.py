import numpy as np
import pytest

from data.sampler import SampleOrder


def test_an_epoch_holds_every_image_once_and_epochs_differ():
    order = SampleOrder(103, batch_size=10, seed=1, flip=True)
    first, second = (order.at(np.arange(epoch * 103, (epoch + 1) * 103)) for epoch in (0, 1))
    assert sorted(first.indices) == sorted(second.indices) == list(range(103))
    assert not np.array_equal(first.indices, second.indices)
    assert not np.array_equal(first.mirrored, second.mirrored)


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_ranks_are_disjoint_and_their_union_is_the_global_batch_of_one_process(world_size: int, accumulation: int):
    order = SampleOrder(1000, batch_size=24, seed=1, flip=True)
    for step in (0, 7, 41, 42):  # steps 41 and 42 stand across the end of epoch 0
        alone = order.samples(step)
        parts = [order.samples(step, rank, world_size, accumulation) for rank in range(world_size)]
        assert all(len(part.indices) == 24 // world_size for part in parts)
        together = sorted((i, m) for part in parts for i, m in zip(part.indices, part.mirrored, strict=True))
        assert together == sorted(zip(alone.indices, alone.mirrored, strict=True))


def test_a_micro_batch_is_the_same_block_of_the_stream_on_any_number_of_ranks():
    order = SampleOrder(1000, batch_size=24, seed=1, flip=False)
    halves = order.samples(3).indices.reshape(2, 12)
    two_ranks = [order.samples(3, rank, 2, accumulation=2).indices.reshape(2, 6) for rank in (0, 1)]
    assert np.array_equal(np.concatenate(two_ranks, axis=1), halves)


def test_order_is_a_function_of_the_position_alone():
    order = SampleOrder(42_474_557, batch_size=4096, seed=9, flip=True)
    long, short = order.at(np.arange(10**9, 10**9 + 100)), order.at(np.array([10**9 + 37]))
    assert (long.indices[37], long.mirrored[37]) == (short.indices[0], short.mirrored[0])


def test_half_of_the_images_are_mirrored_and_none_without_flip():
    mirrored = SampleOrder(50_000, 10, seed=2, flip=True).at(np.arange(50_000)).mirrored
    assert abs(int(mirrored.sum()) - 25_000) < 4.5 * np.sqrt(12_500)
    assert not SampleOrder(500, 10, seed=2, flip=False).at(np.arange(500)).mirrored.any()


def test_a_set_smaller_than_the_batch_goes_round():
    indices = SampleOrder(3, batch_size=8, seed=0, flip=False).samples(0).indices
    assert sorted(np.bincount(indices)) == [2, 3, 3]
