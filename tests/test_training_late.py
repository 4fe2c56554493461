"""Numbers of a step are read a step late: what is not finite still changes nothing, and no step waits for the device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import run_program, small_run
from waiting import Syncs

import train
from partial_fc.kernels import cpu
from training import step as step_module
from training.step import LateValues, StepResult
from utils.checkpoint.format import list_checkpoints, step_of

NAN_IN = 5  # this step


def _result(number: float) -> StepResult:
    value = torch.tensor(number)
    return StepResult(value, {"softmax": value}, [[torch.full((2, 3), number)]], 2 * value, torch.tensor(1.0), value < 3)


def test_values_come_in_order_each_once_and_with_their_embeddings():
    late = LateValues()
    for number in range(4):
        late.post(number, _result(number))
        taken = late.take(before=number)
        assert [values.step for values in taken] == ([number - 1] if number else [])
        for values in taken:
            assert (values.loss, values.grad_norm, values.loss_scale) == (number - 1, 2 * (number - 1), 1.0)
            assert values.losses == {"softmax": number - 1} and values.good == (number - 1 < 3)
            assert values.embeddings[0][0].unique().tolist() == [number - 1]
    assert [values.step for values in late.take(before=4)] == [3] and late.take(before=9) == []


def _nan_in_one_step(arguments: list[str]) -> int:
    """Train with a loss that is not a number in one step; print whether weights and centres changed in the steps."""
    whole_pass, whole_step, before = step_module.forward_backward, train.train_step, []

    def forward_backward(model: Any, parallel: Any, tasks: Any, prepared: Any, *more: Any) -> Any:
        loss, losses, embeddings = whole_pass(model, parallel, tasks, prepared, *more)
        return (loss * torch.nan if prepared.number == NAN_IN else loss), losses, embeddings

    def train_step(config: Any, tasks: Any, model: Any, parallel: Any, prepared: Any, *more: Any) -> StepResult:
        result = whole_step(config, tasks, model, parallel, prepared, *more)
        rows = [*model.backbone.parameters(), *model.heads["softmax"].shard_state().values()]
        before.append([value.detach().clone() for value in rows])
        if len(before) > 1:
            same = all(torch.equal(a, b) for a, b in zip(*before[-2:], strict=True))
            print(f"step {prepared.number} {'changed nothing' if same else 'changed the weights'}", flush=True)
        return result

    step_module.forward_backward, train.train_step = forward_backward, train_step
    return train.main(arguments)


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_a_loss_that_is_not_finite_stops_the_run_before_it_reaches_weights_or_disk(
    dataset: Path, tmp_path: Path, num_processes: int, kernels: str
):
    overrides = ["eval.targets=[]", "log.every=50", "checkpoint.every=3", "train.max_steps=12", f"head.kernels={kernels}"]
    ended = run_program(_nan_in_one_step, [small_run(dataset, tmp_path, *overrides)] * num_processes)
    # step 5 is the last before a checkpoint, so its numbers are read at once; those of step 4 a step late
    assert ended.returncode == 1 and f"the loss is nan in step {NAN_IN}; stopped before it reached the weights" in ended.stderr
    assert f"bad_batch_step_{NAN_IN:08d}.json" in ended.stderr
    assert f"step {NAN_IN} changed nothing" in ended.stdout and f"step {NAN_IN - 1} changed the weights" in ended.stdout
    assert [step_of(path) for path in list_checkpoints(tmp_path / "tiny")] == [3]


def test_a_loss_between_two_checkpoints_is_seen_one_step_later(dataset: Path, tmp_path: Path):
    overrides = ["eval.targets=[]", "log.every=50", "checkpoint.every=0", "train.max_steps=12"]
    ended = run_program(_nan_in_one_step, [small_run(dataset, tmp_path, *overrides)])
    assert ended.returncode == 1 and f"the loss is nan in step {NAN_IN};" in ended.stderr
    assert f"step {NAN_IN} changed nothing" in ended.stdout and f"step {NAN_IN + 1} changed" in ended.stdout
    assert f"step {NAN_IN + 2}" not in ended.stdout and list_checkpoints(tmp_path / "tiny") == []


def _count_syncs(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    whole: Callable[..., StepResult] = train.train_step

    def counted(config: Any, tasks: Any, model: Any, parallel: Any, prepared: Any, *more: Any) -> StepResult:
        with Syncs() as syncs:
            result = whole(config, tasks, model, parallel, prepared, *more)
        found[prepared.number] = syncs.found
        return result

    monkeypatch.setattr(train, "train_step", counted)
    arguments = small_run(dataset, tmp_path, "eval.targets=[]", "log.every=50", "checkpoint.every=0", "train.max_steps=3")
    assert train.main([*arguments, *overrides]) == 0
    assert len(found) == 3
    return found


@pytest.mark.skipif(bool(cpu.why_unsuited(16)), reason="plain torch reads on the host whether to update")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("more", [[], ["head.sample_rate=0.5"], ["head.sampling=neighbours", "head.sample_rate=0.5"]])
def test_a_warm_step_never_waits_for_the_device(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, more: list[str]
):
    found = _count_syncs(dataset, tmp_path, monkeypatch, f"train.precision={precision}", "train.accumulation=2", *more)
    assert {step: names for step, names in found.items() if names} == {}


def test_the_counter_counts(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = _count_syncs(dataset, tmp_path, monkeypatch, "head.kernels=plain")
    assert all(names == ["_local_scalar_dense"] for names in found.values()), found
    with Syncs() as syncs:
        numbers = torch.arange(4.0)
        numbers[numbers > 2] = 0.0
        bool(numbers.isfinite().all())
    assert syncs.found == ["index_put_", "_local_scalar_dense"]
