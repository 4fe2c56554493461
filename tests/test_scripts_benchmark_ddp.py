"""The benchmark of DDP's settings: every setting runs, and its ratios are those of its times."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.benchmark import ddp


def test_every_setting_is_measured_against_gradients_that_are_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    forked = functools.partial(ddp.mp.start_processes, start_method="forkserver")
    monkeypatch.setattr(ddp, "mp", SimpleNamespace(spawn=forked))  # processes that need not import torch
    file = tmp_path / "ddp.json"
    arguments = ["--width", "0.125", "--batch", "2", "--rounds", "1", "--json", str(file)]
    assert ddp.main(arguments) == 0
    rows = {row["setting"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == list(ddp.SETTINGS)
    alone = rows["not shared"]
    for row in rows.values():
        assert row["clock_ratio"] == pytest.approx(row["clock"] / alone["clock"])  # of the only round
        assert row["processor_ratio"] == pytest.approx(row["processor"] / alone["processor"])
