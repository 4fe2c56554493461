"""The benchmark of all pairs: what it states follows from its own times, and bare products are of every block."""

import json
from pathlib import Path

import pytest
import torch

import analysis.all_pairs
from scripts.benchmark import pairs


def test_the_benchmark_states_the_rate_and_its_ratio_to_bare_products(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert pairs.ROWS == analysis.all_pairs.ROWS
    monkeypatch.setitem(analysis.all_pairs.ROWS, "cpu", 64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    multiplied: list[int] = []
    original = torch.Tensor.__matmul__

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        multiplied.append(len(left) * right.shape[1])
        return original(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", multiply)
    before = torch.get_num_threads()
    words = ["--people", "30", "--rounds", "3", "--json", str(tmp_path / "found.json")]
    assert pairs.main(words) == 0 and torch.get_num_threads() == before
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["faces"] == 300 and found["pairs"] == 300 * 299 // 2
    here, bare = found["here_seconds"], found["bare_seconds"]
    assert found["ratio"] == sorted(one / other for one, other in zip(here, bare, strict=True))[1]
    assert found["pairs_per_second"] == 44_850 / sorted(here)[1] and "300 faces, 44,850 pairs" in capsys.readouterr().out
    products = [64 * 64] * 10 + [64 * 44] * 4 + [44 * 44]  # blocks of 64 and 44 rows, each with itself and later ones
    assert sorted(multiplied) == sorted(7 * products)  # three rounds of both, and one that is not timed
