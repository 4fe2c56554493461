import re

import numpy as np
import pytest

from data.sampler import SampleOrder, check_batch


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


BLOCKS = [(103, 10, 4, 7), (1000, 64, 3, 24), (64, 64, 2, 8), (50, 1000, 3, 12), (1, 1, 1, 2), (129, 16, 1, 30)]


@pytest.mark.parametrize(("num_images", "block", "window", "batch_size"), BLOCKS)
def test_block_order_holds_every_image_once_in_each_epoch(num_images: int, block: int, window: int, batch_size: int):
    order = SampleOrder(num_images, batch_size, 3, False, "block", block, window)
    epochs = [order.at(np.arange(e * num_images, (e + 1) * num_images)).indices.tolist() for e in range(4)]
    assert all(sorted(epoch) == list(range(num_images)) for epoch in epochs)
    assert num_images < 50 or len({tuple(epoch) for epoch in epochs}) == 4


def test_a_window_of_block_order_is_that_many_long_runs_of_the_file():
    order = SampleOrder(10_000, 100, 3, False, "block", block=200, window=5)
    for window in range(10):
        indices = np.sort(order.at(np.arange(window * 1000, (window + 1) * 1000)).indices)
        starts = indices[np.flatnonzero(np.diff(indices, prepend=-2) != 1)]
        assert len(starts) <= 6  # five blocks; one of them may lie across the end of the file
        assert (np.diff(order.at(np.arange(window * 1000, window * 1000 + 100)).indices) != 1).mean() > 0.9  # mixed inside


def test_blocks_are_cut_elsewhere_in_each_epoch():
    order = SampleOrder(10_000, 100, 3, False, "block", block=200, window=5)
    cuts = []
    for epoch in range(3):
        indices = np.sort(order.at(epoch * 10_000 + np.arange(1000)).indices)
        cuts.append(set((indices[np.flatnonzero(np.diff(indices) != 1)] % 200).tolist()))
    assert not cuts[0] & cuts[1] and not cuts[1] & cuts[2]


@pytest.mark.parametrize(("num_images", "block", "window", "batch_size"), BLOCKS)
@pytest.mark.parametrize(("world_size", "accumulation", "first_step"), [(1, 1, 0), (2, 1, 5), (1, 2, 3)])
def test_storage_hears_of_every_image_before_its_step_and_of_no_other(
    num_images: int, block: int, window: int, batch_size: int, world_size: int, accumulation: int, first_step: int
):
    batch_size *= 2
    order = SampleOrder(num_images, batch_size, 3, False, "block", block, window)
    share = {"world_size": world_size, "accumulation": accumulation}
    for rank in range(world_size):
        announced: list[int] = []
        read: list[int] = []
        for step in range(first_step, first_step + 3 * num_images // batch_size + 2):
            images = order.read_ahead(step, first_step, rank, **share)
            assert (np.diff(images) >= 0).all()
            announced += images.tolist()
            read += order.samples(step, rank, **share).indices.tolist()
            missing = np.bincount(read, minlength=num_images) - np.bincount(announced, minlength=num_images)
            assert (missing <= 0).all()
        assert len(announced) <= len(read) + 2 * order.window_size + 2 * batch_size


def test_full_order_announces_nothing_in_bulk():
    assert not len(SampleOrder(1000, 10, 0, False).read_ahead(0, 0))


@pytest.mark.parametrize(
    "wrong", [(8, 1, 3), (90, 1, 4), (1024, 1, 6), (7, 7, 1), (1, 1, 1), (12, 4, 2), (1000, 8, 64), (512, 1, 512)]
)
def test_a_batch_that_cannot_be_shared_is_an_error_with_all_choices_that_work(wrong: tuple[int, int, int]):
    batch_size, accumulation, world_size = wrong
    with pytest.raises(ValueError, match=r"train\.batch_size") as caught:
        check_batch(*wrong)
    said = str(caught.value).split("Valid choices: ")[1]
    offered = {name: [int(n) for n in re.findall(r"\d+", text)] for name, text in (c.rsplit(": ", 1) for c in said.split("; "))}
    # micro-batches of equal size, of two images or more: the five largest numbers of them up to twice of what was asked for
    sizes = {parts: batch_size // parts for parts in range(1, batch_size // 2 + 1) if batch_size % parts == 0}
    processes = [n for n in range(1, 2 * world_size + 1) if n * accumulation in sizes]
    accumulations = [n for n in range(1, 2 * accumulation + 1) if n * world_size in sizes]
    assert offered.get("processes", []) == processes[-5:] and offered.get("train.accumulation", []) == accumulations[-5:]
    (size,) = offered["in a new run, train.batch_size"]
    parts = accumulation * world_size
    assert size == max(batch_size // parts, 2) * parts
    check_batch(size, accumulation, world_size)
    for count in processes:
        check_batch(batch_size, accumulation, count)
    for count in accumulations:
        check_batch(batch_size, count, world_size)
