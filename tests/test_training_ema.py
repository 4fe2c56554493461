"""The moving average of the backbone against a loop over the weights that training saved after every step."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from rounding import rounding_bound
from tiny_runs import ended_well, read_metrics, run_train, small_run, tiny_run
from torch import Tensor, nn

import train
from backbones import build_backbone
from eval import __main__ as eval_program
from eval import monitor
from training.model import WeightAverage, move
from utils.checkpoint.format import EMA, list_checkpoints, read_manifest
from utils.checkpoint.reading import read_backbone, read_file, read_trainer
from utils.randomness import derive

pytestmark = pytest.mark.numeric

DECAY = 0.25  # reached after two steps, so that both halves of the formula are tested
SMALL = ["train.batch_size=6", "checkpoint.every=1", "checkpoint.keep_last=99", f"train.ema={DECAY}"]


def _slow_average(first: dict[str, Tensor], weights: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the average of the weights after each step, in float64, from the first weights and the formula of the docs."""
    mean = {name: value.double() for name, value in first.items()}
    for t, values in enumerate(weights, 1):
        decay = min(DECAY, (1 + t) / (10 + t))
        mean = {name: decay * mean[name] + (1 - decay) * value.double() for name, value in values.items()}
    return mean


def _check_average(run: Path, steps: int) -> None:
    """Compare the last average with the loop over all checkpoints of a run from scratch."""
    found = list_checkpoints(run)
    assert len(found) == steps
    torch.manual_seed(derive(2048, "backbone"))
    first = build_backbone("shallow", 16, 0.125, image_size=48).state_dict()
    weights = [read_backbone(path) for path in found]
    expected, average = _slow_average(first, weights), read_file(found[-1], EMA)
    assert average.keys() == weights[-1].keys() and int(read_trainer(found[-1])["ema_updates"]) == steps
    for name, value in average.items():
        if not value.is_floating_point():
            assert torch.equal(value, weights[-1][name])  # a counter of batches is that of the weights
            continue
        largest = max(float(w[name].abs().max()) for w in [first, *weights])
        # each step rounds a difference, a product and a sum
        assert float((value.double() - expected[name]).abs().max()) <= rounding_bound(torch.float32, 3 * steps, largest), name
        moved = float((value - weights[-1][name]).abs().max())
        assert moved > 0 or float((weights[0][name] - weights[-1][name]).abs().max()) == 0, name


def _constant(dataset: Path, folder: Path, steps: int, name: str) -> list[str]:
    return small_run(
        dataset, folder, *SMALL, "eval.targets=[]", "schedule.kind=constant", f"train.max_steps={steps}", f"run.name={name}"
    )


def test_the_saved_average_is_that_of_a_loop_after_a_break_and_with_another_number_of_processes(dataset: Path, tmp_path: Path):
    assert train.main(_constant(dataset, tmp_path, 2, "broken")) == 0
    shutil.copytree(tmp_path / "broken", tmp_path / "moved")
    assert train.main(_constant(dataset, tmp_path, 4, "broken")) == 0
    _check_average(tmp_path / "broken", 4)
    assert train.main(_constant(dataset, tmp_path, 4, "whole")) == 0
    ends = [read_file(list_checkpoints(tmp_path / name)[-1], EMA) for name in ("broken", "whole")]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    ended = ended_well(run_train(3, _constant(dataset, tmp_path, 4, "moved")))
    assert f"moving average of the backbone: decay {DECAY}; it goes on after 2 steps" in ended.stdout
    _check_average(tmp_path / "moved", 4)


def test_a_step_that_is_skipped_is_in_no_average():
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    average, taken = WeightAverage(network, DECAY), []
    first = {name: value.clone() for name, value in network.state_dict().items()}
    for number, good in enumerate((False, True, True, False, True)):
        for value in (*network.parameters(), network[1].running_mean):
            value.data.add_(0.1 * number)
        before = [value.clone() for value in average.network.state_dict().values()]
        average.update(torch.tensor(good))
        if good:
            taken.append({name: value.clone() for name, value in network.state_dict().items()})
        else:
            assert all(torch.equal(a, b) for a, b in zip(average.network.state_dict().values(), before, strict=True))
    assert int(average.updates) == 3
    for name, value in _slow_average(first, taken).items():
        torch.testing.assert_close(average.network.state_dict()[name].double(), value, atol=1e-6, rtol=0)
    tensors = [[torch.full((3, 2), number, dtype=torch.float32) for number in numbers] for numbers in ((1, 2), (5, 4))]
    move(*tensors, torch.tensor(0.75))  # what CUDA does instead of lerp
    assert [tensor.unique().tolist() for tensor in tensors[0]] == [[4.0], [3.5]]
    average.begin()
    assert int(average.updates) == 0 and torch.equal(average.network[0].weight, network[0].weight)


def test_the_average_is_evaluated_beside_the_weights_and_ranks_the_checkpoints(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    score = mock.Mock(side_effect=monitor.selection_score)
    monkeypatch.setattr(monitor, "selection_score", score)
    assert train.main(tiny_run(dataset, tmp_path, *SMALL, "train.max_steps=3", "eval.every=0", "eval.metric=auc")) == 0
    assert [set(call.args[0]) for call in score.call_args_list] == [{"ema/tiny"}]
    run = tmp_path / "tiny"
    plain, averaged = read_metrics(run, "tiny")[3], read_metrics(run, "ema/tiny")[3]
    assert set(json.loads((run / "results.json").read_text())) == {"tiny", "ema/tiny"}
    assert abs(averaged["xnorm"] / plain["xnorm"] - 1) > 0.03  # so that it tells them apart below
    newest = list_checkpoints(run)[-1]
    assert read_manifest(newest)["score"] == averaged["auc"]
    capsys.readouterr()
    for flags, numbers in (([], plain), (["--ema"], averaged)):
        report = tmp_path / "report"
        assert eval_program.main([str(newest), *flags, "--targets", "tiny", "--report", str(report)]) == 0
        found = json.loads((report / "results.json").read_text())["tiny"]
        assert found["xnorm"] == pytest.approx(numbers["xnorm"], rel=0.01)
        said = capsys.readouterr().out
        assert ("(moving average, step 3" in said) == bool(flags) and "saved with a mean auc of the moving average of" in said
    of_file = [str(newest / EMA), "--backbone", "shallow", "--width", "0.125", "--embedding-size", "16", "--data", str(dataset)]
    assert eval_program.main([*of_file, "--targets", "tiny"]) == 0
    assert re.search(rf"^tiny .* {averaged['xnorm']:.2f}$", capsys.readouterr().out, re.M)


def test_a_run_may_begin_or_drop_an_average_where_it_resumes(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    steps = ["eval.targets=[]", *SMALL]
    assert train.main(small_run(dataset, tmp_path, *steps, "train.ema=0", "train.max_steps=2")) == 0
    run = tmp_path / "tiny"
    assert not (list_checkpoints(run)[-1] / EMA).exists() and "ema_updates" not in read_trainer(list_checkpoints(run)[-1])
    assert train.main(small_run(dataset, tmp_path, *steps, "train.max_steps=3")) == 0
    said = capsys.readouterr().out
    assert "it begins with the weights that training begins with" in said and "train.ema was 0.0, is 0.25" in said
    before, after = list_checkpoints(run)[-2:]
    old, new, average = read_backbone(before), read_backbone(after), read_file(after, EMA)
    name = "conv_sep.layers.0.weight"
    torch.testing.assert_close(average[name], old[name] * (2 / 11) + new[name] * (9 / 11))
    assert train.main(small_run(dataset, tmp_path, *steps, "train.ema=0", "train.max_steps=4")) == 0
    newest = list_checkpoints(run)[-1]
    assert not (newest / EMA).exists()
    capsys.readouterr()
    assert eval_program.main([str(newest), "--ema", "--targets", "tiny"]) == 1
    assert "has no moving average, because the run had train.ema=0; leave out --ema" in capsys.readouterr().err
    assert eval_program.main([str(before), "--ema", "--untrained", "--targets", "tiny"]) == 1
    assert "Leave one of them out" in capsys.readouterr().err
    shutil.rmtree(run)
    begun = ["init.backbone=" + str(tmp_path / "other.safetensors"), "train.max_steps=1", "optimizer.lr=0"]
    shutil.copyfile(_weights_of(dataset, tmp_path), tmp_path / "other.safetensors")
    assert train.main(small_run(dataset, tmp_path, *steps, *begun)) == 0
    average = read_file(list_checkpoints(run)[-1], EMA)
    torch.testing.assert_close(average[name], read_backbone(list_checkpoints(run)[-1])[name], rtol=1e-6, atol=0)


def _weights_of(dataset: Path, tmp_path: Path) -> Path:
    """Return a file with the weights of a short run of another seed."""
    assert train.main(small_run(dataset, tmp_path, "run.seed=7", "train.max_steps=1", "eval.targets=[]", "run.name=o")) == 0
    return list_checkpoints(tmp_path / "o")[-1] / "backbone.safetensors"
