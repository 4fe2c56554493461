"""What sets of millions of images take, by bytes for each image of small ones."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.datasets import ListDataset
from data.record_dataset import RecordDataset
from data.recordio.image_record import RecordSetWriter
from data.scan import Scan, SetNames, equal_groups
from deploy.faces.pictures import list_identities
from eval.embedding_table import read_table


def _set(folder: Path, names: list[str]) -> Path:
    with RecordSetWriter(folder) as writer:
        for number, name in enumerate(names):
            writer.add(number // 2, b"\xff\xd8\xff\xd9", name)
    return folder


@pytest.mark.parametrize(("what", "most"), [("list", 140), ("train.lst", 250), ("table", 200), ("equal", 90), ("people", 280)])
def test_an_image_takes_few_bytes(tmp_path: Path, what: str, most: int):
    """Lists of strings or of small arrays take hundreds: with 42 million images, tens of gigabytes."""
    count = 20_000
    numbers, sides, no = np.arange(count), np.full(count, 112), np.zeros(count, dtype=bool)
    names = [f"some_folder_{number // 50:07d}/picture_{number:08d}.jpg" for number in range(count)]
    if what == "train.lst":
        dataset = RecordDataset(_set(tmp_path, names))
    for name in names if what == "people" else names[:1]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "list.txt").write_text("".join(f"{name} {number // 50}\n" for number, name in enumerate(names)))
    np.save(tmp_path / "table.npy", np.ones((count, 1), dtype=np.float32))
    rows = "".join(f"{number},0,somebody_{number // 50},{number}.5,0.0,0.5\n" for number in range(count))
    (tmp_path / "table.csv").write_text(f"name,face,person,norm,padding,score\n{rows}")
    read: dict[str, Callable[[], object]] = {
        "list": lambda: ListDataset(tmp_path / "list.txt"),
        "train.lst": lambda: SetNames(dataset),
        "table": lambda: read_table(tmp_path / "table.npy"),
        "equal": lambda: equal_groups(Scan(numbers, numbers, sides, sides, numbers, numbers, no)),
        "people": lambda: list_identities(tmp_path),
    }
    tracemalloc.start()
    found = read[what]()
    peak = tracemalloc.get_traced_memory()[1] / count
    tracemalloc.stop()
    assert found is not None and peak < most, peak
