"""What sets of millions of images take, by counts and bytes for each image of small ones."""

import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import scan
from data.datasets import FolderDataset, ListDataset
from data.record_dataset import RecordDataset
from data.recordio.image_record import RecordSetWriter
from data.scan import Scan, SetNames, candidates, equal_groups
from data.tar_dataset import TarDataset
from eval import embedding_table
from eval.embedding_table import read_table
from scripts.data import filter as filter_data
from scripts.data import inspect, rec_to_folder, repair
from utils.cli import progress


def _set(folder: Path, names: list[str]) -> Path:
    with RecordSetWriter(folder) as writer:
        for number, name in enumerate(names):
            writer.add(number // 2, b"\xff\xd8\xff\xd9", name)
    return folder


def test_no_program_hashes_a_number_of_each_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """np.unique without counts does, and takes a hundred times as long as a sort: minutes for 44 million records."""
    numpy, hashed = pytest.importorskip("numpy.lib._arraysetops_impl"), [0]
    usual = getattr(numpy, "_unique_hash", None)  # which an older numpy does not have
    counting = lambda values, **how: hashed.append(values.size) or usual(values, **how)  # noqa: E731
    monkeypatch.setattr(numpy, "_unique_hash", counting, raising=False)
    path = _set(tmp_path / "set", [""] * 300) / "train.idx"
    index = path.read_text().splitlines(keepends=True)
    for lines in (index, index[::-1], index[1:]):  # in the order of the file, in another, and cut
        path.write_text("".join(lines))
        assert repair.main([str(path.parent)]) == 0
    for program in (filter_data, rec_to_folder):
        assert program.main([str(path.parent), str(tmp_path / program.__name__)]) == 0
    assert inspect.main([str(path.parent), "--out", str(tmp_path / "report")]) == 0
    assert max(hashed) < 150


MOST = {"list": 140, "train.lst": 250, "table": 200, "equal": 90, "people": 160, "tar": 700}  # bytes


@pytest.mark.parametrize("what", MOST)
def test_an_image_takes_few_bytes(tmp_path: Path, what: str):
    """Lists of strings or of small arrays take hundreds: with 42 million images, tens of gigabytes."""
    count = 1000 if what == "tar" else 20_000
    numbers, sides, no = np.arange(count), np.full(count, 112), np.zeros(count, dtype=bool)
    names = [f"some_folder_{number // 50:07d}/picture_{number:08d}.jpg" for number in range(count)]
    if what == "train.lst":
        dataset = RecordDataset(_set(tmp_path, names))
    for name in names if what == "people" else names[:1]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "one.txt").write_text("1")
    (tmp_path / "list.txt").write_text("".join(f"{name} {number // 50}\n" for number, name in enumerate(names)))
    np.save(tmp_path / "table.npy", np.ones((count, 1), dtype=np.float32))
    rows = "".join(f"{number},0,somebody_{number // 50},{number}.5,0.0,0.5\n" for number in range(count))
    (tmp_path / "table.csv").write_text(f"name,face,person,norm,padding,score\n{rows}")
    with tarfile.open(tmp_path / "0.tar", "w") as shard:
        for name in names if what == "tar" else ():
            shard.addfile(tarfile.TarInfo(name))
            shard.add(tmp_path / "one.txt", name.replace(".jpg", ".cls"))
    read: dict[str, Callable[[], object]] = {
        "list": lambda: ListDataset(tmp_path / "list.txt"),
        "train.lst": lambda: SetNames(dataset),
        "table": lambda: read_table(tmp_path / "table.npy"),
        "equal": lambda: equal_groups(Scan(numbers, numbers, sides, sides, numbers, numbers, no)),
        "tar": lambda: TarDataset(tmp_path),
        "people": lambda: FolderDataset(str(tmp_path)),
    }
    tracemalloc.start()
    found = read[what]()
    peak = tracemalloc.get_traced_memory()[1] / count
    tracemalloc.stop()
    assert found is not None and peak < MOST[what], peak


def test_a_table_that_takes_long_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(embedding_table, "progress", lambda *words, delay: progress(*words))
    np.save(tmp_path / "table.npy", np.ones((2, 1), dtype=np.float32))
    (tmp_path / "table.csv").write_text("name,person\na,b\nc,d\n")
    read_table(tmp_path / "table.npy")
    shown = capsys.readouterr().err
    assert "reading table.npy: 100%" in shown and "checking table.npy: 100%" in shown


def test_candidates_are_found_part_by_part_under_a_bar(monkeypatch: pytest.MonkeyPatch):
    """Of two million images they took 1.4 GB at once, and half a minute without a word."""
    shown: list[Any] = []
    monkeypatch.setattr(scan, "progress", lambda *given, **more: shown.append(progress(*given, **more)) or shown[-1])
    hashes = np.random.default_rng(0).integers(0, 30, 500).astype(np.uint64) * np.uint64(0x1000100010001)
    whole = candidates(hashes)
    monkeypatch.setattr(scan, "_HASHES", 7)
    assert np.array_equal(candidates(hashes), whole) and len(whole) > 500
    assert [bar.n for bar in shown] == [4 * 500] * 2
    rows = np.sort(whole, axis=1)
    assert np.array_equal(np.unique(rows, axis=0), whole) and (rows[:, 0] < rows[:, 1]).all()
