"""The data benchmark at tiny sizes: every part runs, and its plain rivals give the same answers as ours."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data.augment import OPERATIONS
from data.recordio.index import read_index
from scripts.benchmark import data as benchmark_data
from scripts.benchmark import kit
from scripts.benchmark.plain_data import FloatPerItem, decoders, index_as_dict, plain_loader
from utils.image import normalise

TINY = ["--records", "3000", "--images", "64", "--epoch", "600", "--rounds", "1"]


def test_every_part_reports_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parts = ["--parts", "decode", "memory", "augment"]
    assert benchmark_data.main([*TINY, "--folder", str(tmp_path), "--json", str(tmp_path / "out.json"), *parts]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    rates = {row["way"]: row["images_per_second"] for row in found["decode"] if "way" in row}
    ratios = {row["claim"]: row["ratio"] for row in found["decode"] if "claim" in row}
    one, two, plain = (rates[way] for way in ("loader, 1 thread(s)", "loader, 2 thread(s)", "DataLoader, 2 workers, float"))
    assert ratios["two threads, of one"] == pytest.approx(two / one)  # of one round: the median is that of the rates
    assert ratios["two threads, of the DataLoader"] == pytest.approx(two / plain)
    assert found["memory"]["records"] == 600
    assert {row["way"] for row in found["augment"]} >= {"decoding", *OPERATIONS}
    assert "images/s" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_what_one_part_found_is_kept_whatever_the_next_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(benchmark_data, "PARTS", {"index": lambda *_: [3], "decode": lambda *_: int("killed")})
    assert benchmark_data.main(["--json", str(tmp_path / "out.json")]) == 1
    assert json.loads((tmp_path / "out.json").read_text())["index"] == [3]


def test_the_rivals_open_the_same_index_and_the_time_is_that_of_the_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    benchmark_data.make_large_set(tmp_path / "set", 5000)
    keys, offsets = read_index(tmp_path / "set" / "train.idx")
    as_dict, listed = index_as_dict(tmp_path / "set" / "train.idx")
    assert listed == keys.tolist() and [as_dict[key] for key in listed] == offsets.tolist()
    now = 0.0

    def taking(seconds: float, function: Callable[..., object]) -> Callable[..., object]:
        def slower(*arguments: object) -> object:
            nonlocal now
            now += seconds
            return function(*arguments)

        return slower

    monkeypatch.setattr(kit, "time", SimpleNamespace(perf_counter=lambda: now))
    for name, seconds in (("index_as_dict", 5.0), ("read_index", 4.0), ("RecordDataset", 3.0)):
        monkeypatch.setattr(benchmark_data, name, taking(seconds, getattr(benchmark_data, name)))
    for way, seconds in (("dict", 5.0), ("index", 4.0), ("first", 3.0), ("cached", 3.0)):
        assert benchmark_data.open_set(0, way, tmp_path / "set", tmp_path / "cache")["seconds"] == seconds


@pytest.mark.numeric
def test_the_rivals_decode_the_same_pixels(tmp_path: Path):
    import torch

    benchmark_data.make_faces(tmp_path / "faces", 8)
    records = FloatPerItem(tmp_path / "faces" / "train.rec")
    dataset = benchmark_data.RecordDataset(tmp_path / "faces")
    out = np.empty((112, 112, 3), np.uint8)
    for index in range(8):
        image, label = records[index]
        assert int(label) == dataset.decode_into(index, out)
        ours = normalise(torch.from_numpy(out)[None])[0]
        assert min((image - other).abs().max() for other in (ours, ours.flip(2))) <= 2**-22  # four roundings of up to 1
        data = bytes(dataset.sample(index)[0])
        for name, decode in decoders().items():
            np.testing.assert_array_equal(decode(data), out, err_msg=name)
    assert len(next(iter(plain_loader(tmp_path / "faces" / "train.rec", 4, 0)))[1]) == 4
