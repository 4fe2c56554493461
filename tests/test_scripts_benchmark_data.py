"""The data benchmark at tiny sizes: every part runs, and its plain rivals give the same answers as ours."""

import json
from pathlib import Path

import numpy as np
import pytest

from data.augment import OPERATIONS
from data.recordio.index import read_index
from scripts.benchmark import data as benchmark_data
from scripts.benchmark import open_set
from scripts.benchmark.baselines.data import FloatPerItem, decoders, index_as_dict, plain_loader
from utils.image import normalise

TINY = ["--records", "3000", "--images", "64", "--epoch", "600", "--rounds", "1"]


def test_every_part_reports_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        benchmark_data.main(
            [*TINY, "--folder", str(tmp_path), "--json", str(tmp_path / "out.json"), "--parts", "decode", "memory", "augment"]
        )
        == 0
    )
    found = json.loads((tmp_path / "out.json").read_text())
    assert {row["claim"] for row in found["decode"] if "claim" in row} >= {
        "two threads, of one",
        "two threads, of the DataLoader",
    }
    assert all(row["ratio"] > 0 for row in found["decode"] if "claim" in row)
    assert found["memory"]["records"] == 600
    assert {row["way"] for row in found["augment"]} >= {"decoding", *OPERATIONS}
    assert "images/s" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_the_rivals_open_the_same_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    benchmark_data.make_large_set(tmp_path / "set", 5000)
    keys, offsets = read_index(tmp_path / "set" / "train.idx")
    as_dict, listed = index_as_dict(tmp_path / "set" / "train.idx")
    assert listed == keys.tolist() and [as_dict[key] for key in listed] == offsets.tolist()
    for way in ("dict", "index", "first", "cached"):
        assert open_set.main([way, str(tmp_path / "set"), str(tmp_path / "cache")]) == 0
        assert json.loads(capsys.readouterr().out)["seconds"] > 0


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
