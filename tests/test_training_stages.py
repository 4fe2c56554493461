"""Stages: from a change on a run is the one that has had the new values all along, and goes on from any checkpoint near it."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from dense_reference import DenseHead, all_centres, bytes_of_workspace, near_their_centres, relative, whole_active
from loss_cases import CASES
from rounding import head_bounds, network_bound
from tiny_runs import ended_well, equal_weights, final_weights, read_metrics, reshard_and_back, run_train, same_bits, small_run

import train
from losses import build_margin, margin_arguments
from losses.margin import Margin
from partial_fc import HeadConfig, PartialFC, RowSGD
from partial_fc.memory import HeadMemory, loss_memory
from partial_fc.sampling.planning import NeighbourGraph, num_active
from partial_fc.softmax import choice
from partial_fc.softmax.passes import constant_shift
from training.stages import Stage, staged_margin

STAGES = "head.stages=[{scale: 8, margin: 0}, {steps: 4, sample_rate: 1}, {epochs: 0.8, scale: 16, margin: 0.3}]"
SHORT = ["head.sample_rate=0.4", "eval.targets=[]", "schedule.power=0", "checkpoint.keep_last=9", "train.max_steps=8"]
SECOND = ["head.sample_rate=1", "loss.scale=8", "loss.margin=0"]  # of 30 images, 4 in a step, 0.8 epochs are 6 steps
KINDS = {
    "weighted": ["head.logit_correction=log_r", "head.storage=lean", "loss.name=arcface"],
    "statistics": ["loss.name=curricularface", "optimizer.name=adamw", "optimizer.lr=0.001", "train.accumulation=2"],
    "lagging": ["head.inactive_rows=decay"],
    "neighbours": ["head.sampling=neighbours", "head.neighbours=2", "head.neighbours_every=1"],
}


def _train(dataset: Path, output: Path, name: str, *overrides: str) -> dict[str, torch.Tensor]:
    assert train.main(small_run(dataset, output, *SHORT, *overrides, f"run.name={name}")) == 0
    return final_weights(output / name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_to_the_same_bits_from_before_at_and_after_a_change(
    dataset: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    more, rebuild, rebuilt = [*KINDS[kind], STAGES, "checkpoint.every=1"], NeighbourGraph.rebuild, []
    monkeypatch.setattr(NeighbourGraph, "rebuild", lambda *given: rebuilt.append(given[-1]) or rebuild(*given))
    whole = _train(dataset, tmp_path, "whole", *more)
    assert rebuilt == ([1, 2, 3] if kind == "neighbours" else [])
    log = (tmp_path / "whole" / "train.log").read_text()
    for line in ("step 0: sample_rate 0.4, scale 8, margin 0", "step 4: sample_rate 1, scale 8, margin 0"):
        assert log.count(f"head after {line}") == 1
    assert "head after step 6: sample_rate 1, scale 16, margin 0.3" in log
    assert "first loss" in log and "check labels" not in log  # of the first stage, not of the sections head and loss
    for step in {"weighted": (3, 5), "lagging": (4, 6)}.get(kind, (4,)):
        begin = f"checkpoint.resume={tmp_path}/whole/checkpoints/step_{step:08d}"
        same_bits(whole, _train(dataset, tmp_path, f"from_{step}", *more, begin), step)
        first = 0 if step < 4 else 4 if step < 6 else 6
        assert f"head after step {first}:" in (tmp_path / f"from_{step}" / "train.log").read_text()


@pytest.mark.parametrize("kind", ["weighted", "statistics"])
def test_from_a_change_on_a_run_is_one_that_resumes_there_with_other_values(dataset: Path, tmp_path: Path, kind: str):
    more = [*KINDS[kind], "checkpoint.every=2"]
    whole = _train(dataset, tmp_path, "whole", *more, STAGES)
    _train(dataset, tmp_path, "first", *more, "loss.scale=8", "loss.margin=0", "train.max_steps=4")
    begin = "checkpoint.resume={}/checkpoints/step_{:08d}"
    _train(dataset, tmp_path, "second", *more, *SECOND, begin.format(tmp_path / "first", 4), "train.max_steps=6")
    last = ["head.sample_rate=1", "loss.scale=16", "loss.margin=0.3", begin.format(tmp_path / "second", 6)]
    same_bits(whole, _train(dataset, tmp_path, "third", *more, *last))


@pytest.mark.numeric
def test_any_number_of_processes_goes_on_through_a_change(dataset: Path, tmp_path: Path):
    """After it all classes are active, so the losses are the same but for rounding."""
    more = [*SHORT, "head.stages=[{steps: 2, sample_rate: 1, margin: 0.3}]", "train.batch_size=12", "checkpoint.every=2"]
    more = [*more, "train.max_steps=4", "backbone.sync_norm=true"]
    begin, losses = [], []
    for count in (2, 1, 3):
        done = ended_well(run_train(count, small_run(dataset, tmp_path, *more, *begin, f"run.name=of_{count}")))
        assert "head after step 2: sample_rate 1, margin 0.3" in done.stdout
        steps = read_metrics(tmp_path / f"of_{count}")
        losses.append([steps[3]["loss"], steps[3]["grad_norm"], steps[4]["loss"]])
        begin = [f"checkpoint.resume={tmp_path}/of_2/checkpoints/step_00000002"]
    assert all(found == pytest.approx(losses[0], rel=network_bound()) for found in losses[1:])
    reshard_and_back(tmp_path / "of_2" / "checkpoints" / "step_00000002", tmp_path / "broken")
    ended_well(run_train(2, small_run(dataset, tmp_path, *more, "run.name=broken")))
    equal_weights(tmp_path / "of_2", tmp_path / "broken")


def _beside_dense(rank: int, world_size: int) -> None:
    """Compare steps before and after two changes, each step prepared while the one before is computed, as in a training."""
    num_classes, dim, rows, lr = 101, 24, 12, 0.05
    stages = [Stage(0, 0.3, {"scale": 16.0, "margin": 0.0}), Stage(3, 1.0, {"scale": 90.0, "margin": 0.4})]
    stages.append(Stage(6, 0.5, {"scale": 48.0, "margin": 0.2}))  # 90 has no constant K, the others have
    margin = staged_margin({"name": "arcface"}, stages)
    rates = tuple((stage.first, stage.sample_rate) for stage in stages)
    config = HeadConfig(0.3, RowSGD(0.9, 5e-4), chunk=16, rates=rates)
    head = PartialFC(margin, num_classes, dim, rank, world_size, 5, config)
    centres = all_centres(num_classes, dim, seed=5)
    dense = DenseHead(build_margin("arcface"), centres, RowSGD(0.9, 5e-4))
    share = slice(rank * rows // world_size, (rank + 1) * rows // world_size)
    batches = [near_their_centres(centres, rows, step) for step in range(8)]
    batches[4] = (batches[4][0], batches[4][1].roll(1))  # a negative with cosine 1, for which K has to follow the scale
    prepared = head.prepare(batches[0][1][share].view(2, -1), 0)
    for step, (x, labels) in enumerate(batches):
        stage = [stage for stage in stages if stage.first <= step][-1]
        dense.margin = build_margin("arcface", **stage.loss).double()
        head.begin_step(prepared, step)
        if step + 1 < len(batches):
            prepared = head.prepare(batches[step + 1][1][share].view(2, -1), step + 1)
        active = whole_active(head)
        if rank == 0:
            here = sum(int((head.shard_classes() == label).sum()) for label in labels.unique())
            assert world_size > 1 or int(active.sum()) == num_active(head.num_slots, here, stage.sample_rate)
        assert int(active.sum()) == head.num_active()
        mine = x[share].clone().requires_grad_()
        loss = torch.stack([head(part, micro) for micro, part in enumerate(mine.chunk(2))]).mean()
        loss.backward()
        head.step(lr)
        expected, by_x, _ = dense.step(x, labels, lr, active)
        assert mine.grad is not None
        loss_bound, gradient_bound = (bound * (1 + step / (1 - 0.9)) for bound in head_bounds(90.0, dim, rows))
        assert loss.item() == pytest.approx(expected, abs=loss_bound), f"step {step}"
        assert relative(mine.grad, by_x[share]) < gradient_bound, f"step {step}"


@pytest.mark.numeric
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_step_around_a_change_is_that_of_a_dense_head(run_ranks, world_size: int):  # type: ignore[no-untyped-def]
    run_ranks(_beside_dense, world_size)


def _numbers(margin: Margin) -> Sequence[torch.Tensor]:
    """Return target logits, coefficients of the negatives, and bounds of a margin."""
    cosine, norm = torch.linspace(-0.9, 0.9, 7), torch.linspace(5.0, 40.0, 7)
    state = margin.complete(margin.observe(cosine, norm), torch.zeros(7), torch.ones(2, 7))
    bounds = torch.tensor([margin.logit_bound, margin.lowest_negative, constant_shift(margin, 1000) or -1.0])
    return margin.target(cosine, norm, state), margin.negatives(cosine, norm, state).coefficients, bounds


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("adaptiveface")])  # it trains its margins
def test_a_margin_in_a_stage_is_the_margin_with_its_arguments(case: str):
    loss = {"name": case.split(",")[0], **CASES[case].arguments}
    before = build_margin(**loss)
    given = {key: getattr(before, key) for key in ("scale", "margin") if key in margin_arguments(loss["name"])}
    changed = {key: value * (0.8 if 0 < value < 1 else 1.5) for key, value in given.items()}
    margin = staged_margin(loss, [Stage(0, 1.0, given), Stage(4, 1.0, changed)])
    after = build_margin(**{**loss, **changed})
    for step, like in ((5, after), (4, before), (9, after)):  # first_loss.py asks for the first step again
        for each in (margin, like):
            each.at_step(step)
        for one, other in zip(_numbers(margin), _numbers(like), strict=True):
            assert torch.equal(one, other), step


def test_memory_and_the_choice_of_a_form_are_those_of_the_largest_stage(monkeypatch: pytest.MonkeyPatch):
    num_classes, dim, rows = 20_000, 64, 32
    loss, config = {"name": "cosface", "scale": 64.0}, HeadConfig(0.1, chunk=4096, cache_mb=1, rates=((0, 0.1), (1, 1.0)))
    head = PartialFC(build_margin(**loss), num_classes, dim, config=config)
    held = []
    for step in range(2):
        head.begin_step(torch.randint(num_classes, (1, rows)), step)
        head(torch.randn(rows, dim))
        head.step(0.1)
        held.append(bytes_of_workspace(head))
    memory = functools.partial(HeadMemory, dim, rows, kernels=head.kernels.name)
    assert held[0] < held[1] <= memory(config).shared_bytes(num_classes)
    constant = [memory(dataclasses.replace(config, sample_rate=rate, rates=())) for rate in (0.1, 1.0)]
    assert memory(config).bytes_for(num_classes) >= max(one.bytes_for(num_classes) for one in constant)
    wide = staged_margin(loss, [Stage(0, 1.0, {"scale": 64.0}), Stage(9, 1.0, {"scale": 300.0})])  # which takes another way
    found = [loss_memory(margin, num_classes, dim, HeadConfig())[1] for margin in (build_margin(**loss), wide)]
    assert found == [False, True] and wide.scale == 64.0

    seen = []
    monkeypatch.setattr(choice, "_measured", lambda passes, classes, *more: seen.append(classes) or ({"x": ""}, [1.0]))
    head.kernels.name, head._passes.dtype = "triton", torch.bfloat16
    monkeypatch.setattr(choice, "FORMS", ("x",))
    head.choose_form(rows)
    assert seen == [4096]


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        ("head.stages: margin cannot change with loss.name=combined, which has no such argument", ["loss.name=combined"]),
        ("head.stages: margin cannot change with loss.name=adaptiveface, which trains it", ["loss.name=adaptiveface"]),
        (
            r"head.stages\[1\] must begin after the one before it, got step 4 and 6",
            ["head.stages=[{steps: 6, margin: 0}, {epochs: 0.6, margin: 0.1}]"],
        ),
        (r"head.stages: from step 4 on loss.margin must be in \[0, 1\)", ["head.stages=[{steps: 4, margin: 1.5}]"]),
        (r"head.stages\[0\] must begin after some epochs, or steps", ["head.stages=[{steps: 4, epochs: 1, margin: 0}]"]),
        (r"head.stages\[0\].sample_rate must be above 0", ["head.stages=[{steps: 4, sample_rate: 0}]"]),
        (r"head.stages\[0\] must set sample_rate, scale or margin", ["head.stages=[{steps: 4}]"]),
        ("head.sampling=neighbours needs", ["head.sampling=neighbours"]),
    ],
)
def test_what_cannot_change_is_refused(
    dataset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str, overrides: list[str]
):
    arguments = small_run(dataset, tmp_path, "head.stages=[{steps: 4, margin: 0.1}]", *overrides)
    assert train.main([*arguments, "--check"]) == 1
    assert re.search(words, capfd.readouterr().err)


def test_a_stage_after_the_last_step_is_told(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stages = "head.stages=[{steps: 3, sample_rate: 0.5}, {steps: 100, sample_rate: 1}]"
    assert train.main([*small_run(dataset, tmp_path, *SHORT, stages), "--check"]) == 0
    assert "head.stages: 1 of 3 stages begin after the last step, 8: at step 100" in capsys.readouterr().out
