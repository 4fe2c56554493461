"""List files and tar shards, against the images they were made from."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from pictures import jpeg

from data.datasets import ListDataset
from data.tar_dataset import TarDataset


def _jpeg(value: int) -> bytes:
    return jpeg(np.full((112, 112, 3), value, np.uint8))


def _list(folder: Path, text: str) -> Path:
    for number in range(3):
        (folder / f"my face {number}.jpg").write_bytes(_jpeg(50 * number))
    (folder / "faces.txt").write_bytes(text.encode())
    return folder / "faces.txt"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_list_gives_its_files_and_labels(tmp_path: Path, newline: str):
    lines = ["my face 0.jpg 4", "", f"{tmp_path}/my face 1.jpg\t0", "  ./my face 2.jpg   1  "]
    dataset = ListDataset(_list(tmp_path, newline.join(lines)))
    assert (dataset.num_images, dataset.num_classes, dataset.labels().tolist()) == (3, 5, [4, 0, 1])
    out = np.empty((112, 112, 3), np.uint8)
    assert [(dataset.decode_into(i, out), int(out[0, 0, 0])) for i in range(3)] == [(4, 0), (0, 50), (1, 100)]
    assert "3 images, 5 classes (largest label + 1), 2 of them without" in dataset.describe()
    (tmp_path / "my face 2.jpg").unlink()
    with pytest.raises(ValueError, match=r"my face 2\.jpg: cannot be read"):
        dataset.decode_into(2, out)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("my face 0.jpg 1\nmy face 1.jpg\n", "line 2 must be 'path label'"),
        ("my face 0.jpg -1\n", "line 1 must be"),
        ("\n\n", "lists no image"),
        ("missing.jpg 0\n", r"first image .*missing\.jpg does not exist"),
    ],
)
def test_a_wrong_list_is_refused_with_its_line(tmp_path: Path, text: str, message: str):
    with pytest.raises(ValueError, match=message):
        ListDataset(_list(tmp_path, text))


def _tar(path: Path, members: list[tuple[str, bytes]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def _shards(folder: Path) -> Path:
    long_name = "a" * 150  # needs an extended header
    first = [("./", b""), ("0.cls", b"1"), ("0.jpg", _jpeg(0)), ("0.json", b"{}"), ("1.JPG", _jpeg(50)), ("1.cls", b"2")]
    last = [("x/2.jpg", _jpeg(100)), ("x/2.cls", b"0"), (f"{long_name}.cls", b"3\n"), (f"{long_name}.png", _jpeg(150))]
    _tar(folder / "000001.tar", last)
    _tar(folder / "000000.tar", first)
    return folder


def test_shards_give_their_images_in_the_order_of_the_files(tmp_path: Path):
    folder = _shards(tmp_path / "shards")
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        dataset = TarDataset(folder, cache)
        assert (dataset.num_images, dataset.num_classes, dataset.labels().tolist()) == (4, 4, [1, 2, 0, 3])
        out = np.empty((112, 112, 3), np.uint8)
        assert [(dataset.decode_into(i, out), int(out[0, 0, 0])) for i in range(4)] == [(1, 0), (2, 50), (0, 100), (3, 150)]
        assert dataset.key(2) == f"x/2.jpg in {folder / '000001.tar'}"
        assert dataset.key(3).startswith("a" * 150 + ".png in ")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert TarDataset(folder / "000000.tar").num_images == 2


def test_a_shard_that_changed_is_read_again(tmp_path: Path):
    folder, cache = _shards(tmp_path / "shards"), tmp_path / "cache"
    TarDataset(folder, cache)
    _tar(folder / "000002.tar", [("9.jpg", _jpeg(9)), ("9.cls", b"9")])
    assert TarDataset(folder, cache).num_images == 5


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("0.jpg", b"x")], r"0\.jpg has no 0\.cls"),
        ([("0.jpg", b"x"), ("0.cls", b"one")], r"0\.cls must hold the class"),
        ([("0.jpg", b"x"), ("0.png", b"x"), ("0.cls", b"1")], "a second image of this name"),
        ([("0.cls", b"1")], "hold no image"),
        (None, r"no \*\.tar in"),
    ],
)
def test_wrong_shards_are_refused_by_member(tmp_path: Path, members: list[tuple[str, bytes]] | None, message: str):
    if members is not None:
        _tar(tmp_path / "0.tar", members)
    with pytest.raises(ValueError, match=message):
        TarDataset(tmp_path)
