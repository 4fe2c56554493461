"""Runs with losses that keep something between steps: a resumed one ends with the bits of one that was never interrupted."""

import shutil
from pathlib import Path

import pytest
import torch
from tiny_runs import equal_weights, error_of, final_weights, run_train, small_run

import train
from scripts import checkpoint
from utils.checkpoint.format import list_checkpoints
from utils.checkpoint.reading import read_trainer

RUNS = {  # overrides by the name of the loss; scale and margin are those of all tiny runs
    "adaptiveface": ["optimizer.name=adamw", "optimizer.lr=0.01"],
    "kappaface": ["loss.every=3"],
    "uniface": ["head.logit_correction=log_r"],
    "adacos": ["loss.focal=1.5", "loss.label_smoothing=0.1"],
    "curricularface": ["loss.alpha=0.3", "loss.margin_start=0.2", "loss.margin_steps=10"],
    "elasticface": ["train.accumulation=2"],
}
SHOWN = {"adaptiveface": ("margin_margin F32", "margin_margin_variance"), "kappaface": ("margin_psi", "margin_sums")}


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_ends_with_the_same_bits(dataset: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]):
    overrides = [
        f"loss.name={name}", *RUNS[name], "head.sample_rate=0.5", "eval.targets=[]", "checkpoint.every=4", "train.epochs=1",
    ]  # fmt: skip
    assert train.main(small_run(dataset, tmp_path, *overrides, "run.name=whole")) == 0
    whole, again = tmp_path / "whole", tmp_path / "again"
    shutil.copytree(whole, again)
    first, *later = list_checkpoints(again)
    for path in later:
        shutil.rmtree(path)
    num_processes = 2 if name == "kappaface" else 1
    resumed = run_train(num_processes, small_run(dataset, tmp_path, *overrides, "run.name=again"))
    assert resumed.returncode == 0 and "resumed from" in resumed.stdout, resumed.stderr
    assert final_weights(whole).keys() == final_weights(again).keys()
    if num_processes == 1:
        equal_weights(whole, again)
        states = [read_trainer(list_checkpoints(run)[-1])["margins"]["softmax"] for run in (whole, again)]
        assert all(torch.equal(states[1][key], value) for key, value in states[0].items())
    capsys.readouterr()
    assert checkpoint.main(["show", str(first)]) == 0
    shown = capsys.readouterr().out
    assert all(key in shown for key in SHOWN.get(name, ()))


def test_a_checkpoint_of_a_loss_of_other_numbers_is_refused(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    overrides = ["eval.targets=[]", "run.name=run"]
    assert train.main(small_run(dataset, tmp_path, *overrides, "loss.name=uniface", "train.max_steps=1")) == 0
    adamw = "threshold, threshold_momentum, threshold_variance, updates"
    for change, numbers in (
        ("loss.name=sphereface2", "bias, bias_momentum"),
        ("loss.name=cosface", "nothing"),
        ("head.optimizer=adamw", adamw),
    ):
        capsys.readouterr()
        changed = ["loss.name=uniface", change, "train.max_steps=2"]
        error = error_of(train.main(small_run(dataset, tmp_path, *overrides, *changed)), capsys)
        assert f"the saved margin has threshold, threshold_momentum, that of this run's loss has {numbers}; set the" in error
        assert "set the section loss and the optimizer of the class centres to what they were, or start a new run" in error
