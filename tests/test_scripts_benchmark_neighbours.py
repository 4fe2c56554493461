"""The program that measures the searches for neighbours: what it prints follows from the searches themselves."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from scripts.benchmark import neighbours


def test_the_benchmark_times_every_search_and_states_its_recall(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "neighbours.json"
    small = [
        "--classes", "500", "--dim", "32", "--matmul", "fp32", "--probes", "1", "500", "--cosine", "0.7", "--sample", "200",
    ]  # fmt: skip
    assert neighbours.main([*small, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["centres"], row["search"]) for row in rows] == [
        (kind, search) for kind in ("random", "clustered") for search in ("exact", "1 of 89 lists", "89 of 89 lists")
    ]
    for exact, few, every in (rows[:3], rows[3:]):
        assert exact["recall"] == every["recall"] == 1.0 and exact["share"] == every["share"] == 1.0
        assert 0 < few["recall"] < 1 and 0 < few["share"] < 0.2
        assert few["gmac_per_second"] == pytest.approx(few["share"] * 500**2 * 32 / few["seconds"] / 1e9)
    assert rows[4]["recall"] > rows[1]["recall"]  # random centres are the worst case
    assert "89 of 89 lists" in capsys.readouterr().out


@pytest.mark.numeric
def test_clustered_centres_have_the_cosine_that_is_asked_for():
    centres = F.normalize(neighbours.make_centres(2000, 256, 0.5).float())
    cosine = centres @ centres.t() - 2 * torch.eye(2000)
    mates, others = cosine.topk(20, dim=1)[0].split([19, 1], dim=1)  # groups have 20 members
    # the noise of two members has a cosine of spread 1/16 with one another and with the group: the mean of 38,000 is near 0.5
    assert mates.mean().item() == pytest.approx(0.5, abs=0.01)
    assert mates.min() > 0.5 - 5 / 16 and others.max() < 5 / 16
