"""The writer of face sets, against the reader and against records packed one by one."""

from pathlib import Path

import pytest

from data.record_dataset import RecordDataset
from data.recordio.image_record import RecordSetWriter, RecordWriter, pack


def test_header_form_equals_records_packed_one_by_one(tmp_path: Path) -> None:
    labels = [0, 0, 1, 2, 2, 2]
    with RecordSetWriter(tmp_path / "set") as writer:
        assert [writer.add(label, b"image %d" % i) for i, label in enumerate(labels)] == [1, 2, 3, 4, 5, 6]
    with RecordWriter(tmp_path / "by_hand.rec", tmp_path / "by_hand.idx") as by_hand:
        for key, label in enumerate(labels, 1):
            by_hand.write(key, pack(float(label), key, 0, b"image %d" % (key - 1)))
        for key, span in ((7, (1, 3)), (8, (3, 4)), (9, (4, 7))):
            by_hand.write(key, pack([float(x) for x in span], key, 0, b""))
        by_hand.write(0, pack([7.0, 10.0], 0, 0, b""))
    assert (tmp_path / "set/train.rec").read_bytes() == (tmp_path / "by_hand.rec").read_bytes()
    assert (tmp_path / "set/train.idx").read_bytes() == (tmp_path / "by_hand.idx").read_bytes()
    assert (tmp_path / "set/property").read_text() == "3,112,112"
    assert not (tmp_path / "set/train.lst").exists()


@pytest.mark.parametrize(("header", "labels"), [(True, [0, 0, 1, 2]), (False, [2, 0, 2, 1])])
def test_the_reader_finds_what_was_written(tmp_path: Path, header: bool, labels: list[int]) -> None:
    with RecordSetWriter(tmp_path, header=header) as writer:
        for i, label in enumerate(labels):
            writer.add(label, b"image %d" % i, path=f"person{label}/{i}.jpg")
    dataset = RecordDataset(str(tmp_path))
    assert (dataset.num_images, dataset.num_classes) == (4, 3)
    assert [(bytes(dataset.sample(i)[0]), dataset.label(i)) for i in range(4)] == [
        (b"image %d" % i, label) for i, label in enumerate(labels)
    ]
    assert ("no header record" in dataset.describe()) != header
    lines = (tmp_path / "train.lst").read_text().splitlines()
    assert lines == [f"1\tperson{label}/{i}.jpg\t{label}" for i, label in enumerate(labels)]


def test_a_set_is_never_replaced_unasked(tmp_path: Path) -> None:
    with RecordSetWriter(tmp_path) as writer:
        writer.add(0, b"old", path="old.jpg")
    with pytest.raises(ValueError, match=r"holds a train\.rec; add --overwrite"):
        RecordSetWriter(tmp_path)
    before = (tmp_path / "train.rec").read_bytes()
    with pytest.raises(KeyboardInterrupt), RecordSetWriter(tmp_path, overwrite=True) as writer:
        writer.add(0, b"new")
        raise KeyboardInterrupt
    assert (tmp_path / "train.rec").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["property", "train.idx", "train.lst", "train.rec"]
    with RecordSetWriter(tmp_path, overwrite=True) as writer:
        writer.add(0, b"new")
    assert bytes(RecordDataset(str(tmp_path)).sample(0)[0]) == b"new"
    assert not (tmp_path / "train.lst").exists()  # of the old set


@pytest.mark.parametrize(
    ("labels", "message"),
    [([1], "got label 1 after -1"), ([0, 2], "got label 2 after 0"), ([0, 1, 0], "got label 0 after 1"), ([-1], r"2\^24")],
)
def test_header_form_refuses_classes_out_of_order(tmp_path: Path, labels: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message), RecordSetWriter(tmp_path) as writer:
        for label in labels:
            writer.add(label, b"image")
    assert not list(tmp_path.iterdir())


def test_a_set_without_an_image_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no image was written"), RecordSetWriter(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
