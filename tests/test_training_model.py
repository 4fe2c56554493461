"""A checkpoint has the files that the model names: a further one is saved, resumed, and missed where it is not there."""

import shutil
from pathlib import Path

import pytest
import torch
from tiny_runs import ended_well, run_program, small_run
from torch import nn

import train
from training.model import Model
from utils.checkpoint.format import list_checkpoints
from utils.checkpoint.reading import read_backbone, read_file
from utils.checkpoint.resume import SavedState

NAME, FIRST = "average.safetensors", "conv_sep.layers.0.weight"
_original = Model.saved_states


class _Average(nn.Module):
    """Counts how often it was saved, and keeps the mean of one weight at that time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("saves", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(()))


def _with_an_average(model: Model) -> dict[str, SavedState]:
    average = vars(model.backbone).setdefault("kept_average", _Average())  # one for the whole run

    def state() -> dict[str, torch.Tensor]:
        average.saves += 1
        average.mean.copy_(model.backbone.state_dict()[FIRST].mean())
        return average.state_dict()

    return {**_original(model), NAME: SavedState(state, average.load_state_dict)}


def train_with_an_average(arguments: list[str]) -> int:
    """Run train.py with a further file in its checkpoints."""
    Model.saved_states = _with_an_average  # type: ignore[method-assign]
    return train.main(arguments)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_further_file_of_a_checkpoint_is_saved_and_loaded(dataset: Path, tmp_path: Path, num_processes: int):
    arguments = small_run(dataset, tmp_path, "eval.targets=[]", "checkpoint.every=2", "train.max_steps=4")
    ended_well(run_program(train_with_an_average, [arguments] * num_processes))
    first, newest = list_checkpoints(tmp_path / "tiny")
    assert [int(read_file(path, NAME)["saves"]) for path in (first, newest)] == [1, 2]
    assert read_file(newest, NAME)["mean"] == read_backbone(newest)[FIRST].mean()
    shutil.rmtree(newest)
    ended_well(run_program(train_with_an_average, [arguments] * num_processes))
    assert int(read_file(list_checkpoints(tmp_path / "tiny")[-1], NAME)["saves"]) == 2  # it went on from 1


def test_a_file_that_a_checkpoint_does_not_have_is_named(dataset: Path, tmp_path: Path):
    arguments = small_run(dataset, tmp_path, "eval.targets=[]", "train.max_steps=1")
    assert run_program(train.main, [arguments]).returncode == 0
    ended = run_program(train_with_an_average, [[*arguments, "train.max_steps=2"]])
    assert ended.returncode == 1 and f"its manifest does not list {NAME}" in ended.stderr
