import threading
import time

import numpy as np
import pytest
import torch
from tiny_runs import wait_for

from data.augment import prepare
from data.loader import Loader
from data.sampler import SampleOrder

CPU = torch.device("cpu")


class Numbered:
    """Image i is all i % 256, its label i; `broken` images raise."""

    def __init__(self, broken: int = -1, slow: float = 0.0) -> None:
        self.broken, self.slow = broken, slow
        self.prefetched: list[int] = []  # announced, when their batch is begun
        self.decoded = 0

    def prefetch(self, index: int) -> None:
        self.prefetched.append(index)

    def read_ahead(self, indices: np.ndarray) -> None:
        self.prefetched += indices.tolist()

    def decode_into(self, index: int, out: np.ndarray) -> int:
        if index == self.broken:
            raise ValueError(f"record {index} of numbered.rec: cannot be decoded")
        time.sleep(self.slow)
        out[...] = index % 256
        self.decoded += 1
        return index

    def settle(self) -> None:
        """Wait until every image that was begun is decoded; for one decoder thread."""
        wait_for(lambda: self.decoded >= len(self.prefetched), 30)


def _loader(dataset: Numbered, threads: int, first: int = 0, last: int = 6, prefetch: int = 3) -> Loader:
    order = SampleOrder(100, batch_size=7, seed=4, flip=True)
    return Loader(dataset, order.samples, first, last, threads, prefetch, CPU)


@pytest.mark.parametrize(("held", "prefetch"), [(1, 1), (2, 1), (2, 3), (3, 2)])
def test_a_batch_stays_as_it_is_while_so_many_are_held(held: int, prefetch: int):
    dataset, order = Numbered(), SampleOrder(100, batch_size=7, seed=4, flip=True)
    in_use = []
    for step, batch in enumerate(Loader(dataset, order.samples, 0, 9, 1, prefetch, CPU, held=held)):
        dataset.settle()  # everything that was begun is written
        in_use = [*in_use[-(held - 1) :], (step, batch)] if held > 1 else [(step, batch)]
        for number, kept in in_use:
            expected = torch.from_numpy(order.samples(number).indices % 256)
            assert (kept.images == expected[:, None, None, None]).all(), (step, number)
    assert len(in_use) == held


@pytest.mark.parametrize("threads", [1, 2, 5, 9])
def test_batches_are_those_of_the_order_for_any_number_of_threads(threads: int):
    order = SampleOrder(100, batch_size=7, seed=4, flip=True)
    steps = 0
    for step, batch in enumerate(_loader(Numbered(slow=0.0005), threads)):
        expected = order.samples(step)
        assert batch.labels.tolist() == expected.indices.tolist()
        assert batch.mirrored.tolist() == expected.mirrored.tolist()
        assert (batch.images == torch.from_numpy(expected.indices % 256)[:, None, None, None]).all()
        steps += 1
    assert steps == 6


def test_every_record_is_announced_to_the_storage_before_it_is_decoded():
    dataset = Numbered()
    announced = [set(batch.labels.tolist()) <= set(dataset.prefetched) for batch in _loader(dataset, 2)]
    assert announced == [True] * 6
    assert len(dataset.prefetched) == 6 * 7


def test_starting_in_the_middle_continues_the_order():
    whole = [batch.labels.tolist() for batch in _loader(Numbered(), 2)]
    assert [batch.labels.tolist() for batch in _loader(Numbered(), 2, first=4)] == whole[4:]


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_batch_in_use_is_not_overwritten_by_those_decoded_ahead(prefetch: int):
    dataset, order = Numbered(), SampleOrder(100, batch_size=7, seed=4, flip=True)
    for step, batch in enumerate(_loader(dataset, 1, last=12, prefetch=prefetch)):
        dataset.settle()
        assert dataset.decoded == 7 * min(step + prefetch, 12)  # so many batches ahead
        expected = torch.from_numpy(order.samples(step).indices % 256)[:, None, None, None]
        assert (batch.images == expected).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_broken_record_ends_the_loop_with_its_key_and_leaves_no_thread(threads: int):
    broken = int(SampleOrder(100, 7, seed=4, flip=True).samples(3).indices[5])
    seen = 0
    with pytest.raises(ValueError, match=f"record {broken} of numbered.rec"):
        for _ in _loader(Numbered(broken), threads):
            seen += 1
    assert seen == 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("decoder", "reader"))]


def test_a_broken_read_ahead_ends_the_loop():
    class Broken(Numbered):
        def read_ahead(self, indices: np.ndarray) -> None:
            raise ValueError("the disk is gone")

    order = SampleOrder(100, batch_size=7, seed=4, flip=True)
    loader = Loader(Broken(slow=0.001), order.samples, 0, 50, 2, 2, CPU, lambda step: np.arange(3))
    with pytest.raises(ValueError, match="the disk is gone"):
        list(loader)


@pytest.mark.numeric
def test_prepare_mirrors_and_normalises_to_the_published_contract():
    images = torch.randint(0, 256, (3, 112, 112, 3), dtype=torch.uint8)
    prepared = prepare(images, torch.tensor([False, True, False]))
    assert prepared.shape == (3, 3, 112, 112)
    assert prepared.is_contiguous(memory_format=torch.channels_last)
    for row, column, channel in [(0, 0, 0), (5, 100, 2), (111, 111, 1)]:
        for image, source_column in [(0, column), (1, 111 - column)]:
            expected = (int(images[image, row, source_column, channel]) - 127.5) / 127.5
            assert prepared[image, channel, row, column].item() == pytest.approx(
                expected, abs=2**-23
            )  # two roundings of up to 1
