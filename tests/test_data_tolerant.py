"""Skipping bad records: the same batch for any number of threads, nothing hidden, a limit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import jpeg

from data.base import FaceDataset, Tolerance
from data.loader import Loader
from data.record_dataset import RecordDataset
from data.recordio.image_record import RecordSetWriter
from data.sampler import SampleOrder

N = 200


class Damaged(FaceDataset):
    """Image i is all i, of class i % 10; those in `bad` cannot be read."""

    num_images, num_classes = N, 10

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def describe(self) -> str:
        return "damaged"

    def key(self, index: int) -> str:
        return f"record {index}"

    def label(self, index: int) -> int:
        return index % 10

    def labels(self) -> np.ndarray:
        return np.arange(N) % 10

    def layout(self) -> list[np.ndarray]:
        return []

    def sample(self, index: int) -> tuple[bytes | np.ndarray, int]:
        return b"no image" if index in self.bad else np.full((112, 112, 3), index, np.uint8), index % 10


def _tolerant(dataset: FaceDataset, share: float) -> FaceDataset:
    dataset.tolerance = Tolerance(dataset.num_stored, 7, share)
    return dataset


def _batches(dataset: FaceDataset, threads: int, first: int = 0, apart: bool = False) -> list[tuple[list[int], list[int]]]:
    order = SampleOrder(N, batch_size=10, seed=4, flip=False)
    loader = Loader(dataset, order.samples, first, 40, threads, 3, torch.device("cpu"), apart=apart)
    return [(batch.labels.tolist(), batch.images[:, 0, 0, 0].tolist()) for batch in loader]


def test_bad_samples_are_replaced_alike_for_any_threads_and_after_a_resume():
    bad = {3, 50, 51, 199}
    one, five = (_batches(_tolerant(Damaged(bad), 0.05), threads) for threads in (1, 5))
    assert one == five
    assert _batches(_tolerant(Damaged(bad), 0.05), 2, first=17) == one[17:]
    order = SampleOrder(N, batch_size=10, seed=4, flip=False)
    for step, (labels, pixels) in enumerate(one):
        assert labels == [value % 10 for value in pixels]  # the class is that of the image that was read
        assert not bad & set(pixels)
        wanted = order.samples(step).indices.tolist()
        assert all(got == want for got, want in zip(pixels, wanted, strict=True) if want not in bad)


def test_every_bad_record_is_counted_once_and_the_first_are_named():
    bad = set(range(30, 44))
    dataset = _tolerant(Damaged(bad), 0.2)
    _batches(dataset, 3)
    assert set(dataset.tolerance.bad) == bad
    news = dataset.take_warnings()
    assert len(news) == 11 and all("bad record replaced: record " in line for line in news[:10])
    assert news[10].startswith("14 bad records so far")
    assert dataset.take_warnings() == []
    elsewhere = _tolerant(Damaged(bad), 0.2)
    assert _batches(elsewhere, 3, apart=True) == _batches(dataset, 3)
    *named, last = elsewhere.take_warnings()
    assert sum(line.startswith("bad record replaced: record ") for line in named) == 10
    assert last.startswith("14 bad records so far") and elsewhere.take_warnings() == []


def test_too_many_bad_records_stop_the_loop_with_the_rule():
    with pytest.raises(
        ValueError, match=r"data\.max_bad_fraction: at most 2 bad images are allowed .0\.01 of 200., got 3; .*record"
    ):
        _batches(_tolerant(Damaged({1, 2, 3}), 0.01), 2)


def test_a_set_that_is_bad_throughout_is_no_case_for_skipping():
    dataset = _tolerant(Damaged(set(range(N))), 0.9)
    with pytest.raises(ValueError, match="drawn to replace it are bad too"):
        dataset.decode_into(0, np.empty((112, 112, 3), np.uint8))


def test_damage_of_a_record_file_is_skipped_as_well(tmp_path: Path):
    with RecordSetWriter(tmp_path) as writer:
        for label in range(4):
            writer.add(label, jpeg(np.full((112, 112, 3), 90, np.uint8)))
    dataset = RecordDataset(tmp_path)
    begin, _ = dataset.span(2)
    with open(tmp_path / "train.rec", "r+b") as file:
        file.seek(begin)
        file.write(b"torn")
    out = np.empty((112, 112, 3), np.uint8)
    with pytest.raises(ValueError, match=rf"record 3 of .*train\.rec: byte {begin}: a part must start with"):
        dataset.decode_into(2, out)
    assert _tolerant(dataset, 0.5).decode_into(2, out) in (0, 1, 3)
