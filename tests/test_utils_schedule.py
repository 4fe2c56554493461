"""The learning rate against torch's schedulers, which keep a state, and against logs and closed forms."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import read_metrics, small_run
from torch.optim import lr_scheduler

import train
from configs import load_config
from scripts.eval import compare_runs
from training.setup import build_schedules
from utils.schedule import Schedule, steps_of

PEAK, TOTAL = 0.4, 30


def _by_torch(kind: str, warmup: int, **settings: Any) -> list[float]:
    """Return the rates of the optimizer steps by torch.optim.lr_scheduler: a warm-up, then the curve from its own step 0."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, rest = torch.optim.SGD([weight], lr=PEAK), TOTAL - warmup
    if kind == "poly":
        after: Any = lr_scheduler.PolynomialLR(optimizer, rest, settings.get("power", 2.0))
    elif kind == "cosine":
        after = lr_scheduler.CosineAnnealingLR(optimizer, rest, settings.get("min_lr", 0.0))
    elif kind == "step":
        milestones = [milestone - warmup for milestone in settings["milestones"]]
        after = lr_scheduler.MultiStepLR(optimizer, milestones, settings["factor"])
    else:
        after = lr_scheduler.ConstantLR(optimizer, 1.0)
    if warmup:
        rising = lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, max(1, warmup - 1))
        after = lr_scheduler.SequentialLR(optimizer, [rising, after], [warmup])
    rates = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        with warnings.catch_warnings():  # SequentialLR calls its second scheduler in a way that torch warns of
            warnings.simplefilter("ignore")
            after.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("poly", {"power": 2.0}), ("poly", {"power": 1.0}), ("cosine", {}), ("cosine", {"min_lr": 0.01}),
        ("step", {"milestones": (9, 20), "factor": 0.3}), ("constant", {}),
    ],
)  # fmt: skip
def test_each_schedule_is_that_of_torch_after_the_same_warm_up(kind: str, settings: dict[str, Any], warmup: int):
    schedule = Schedule(kind, PEAK, TOTAL, warmup, **settings)
    assert [schedule.rate(step) for step in range(TOTAL)] == pytest.approx(_by_torch(kind, warmup, **settings), rel=1e-9)


def test_warm_up_rises_to_the_peak_and_the_curves_end_at_their_last_rate():
    for kind, last in (("poly", 0.0), ("poly", 0.1), ("cosine", 0.0), ("cosine", 0.1)):
        rates = [Schedule(kind, PEAK, 20, 4, min_lr=last).rate(step) for step in range(22)]
        assert rates[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4]) and rates[4] == pytest.approx(0.4)
        share = 0.5**2 if kind == "poly" else 0.5
        assert rates[12] == pytest.approx(last + (0.4 - last) * share)
        assert rates[20:] == pytest.approx([last, last])  # beyond the end it stays
        assert all(a > b for a, b in itertools.pairwise(rates[4:21]))


def test_poly_of_default_runs_has_the_bits_of_the_formula_that_it_always_had():
    schedule = Schedule("poly", 0.1, 1000, 90)
    for step in range(90, 1000, 7):
        assert schedule.rate(step) == 0.1 * max(0.0, 1.0 - (step - 90) / 910) ** 2.0


def test_published_log_of_ms1mv2_r50_has_a_quarter_of_the_peak_half_way():
    assert Schedule("poly", 0.1, 113720).rate(56860) == pytest.approx(0.0250)


def _config(tmp_path: Path, *overrides: str) -> Any:
    (tmp_path / "run.yaml").write_text("")
    return load_config(tmp_path / "run.yaml", overrides)


def test_epochs_and_steps_name_the_same_warm_up_and_milestones(tmp_path: Path):
    in_epochs = ["schedule.kind=step", "schedule.milestones=[1.5, 2]", "schedule.warmup_epochs=0.5"]
    in_steps = ["schedule.kind=step", "schedule.milestone_steps=[15, 20]", "schedule.warmup_steps=5"]
    expected = Schedule("step", 0.1, 40, 5, milestones=(15, 20))
    for overrides in (in_epochs, in_steps):
        config = _config(tmp_path, *overrides)
        assert build_schedules(config, 40, 10.0) == (expected, expected)
    own = build_schedules(_config(tmp_path, "head.schedule=constant", "schedule.kind=cosine"), 40, 10.0)
    assert own == (Schedule("cosine", 0.1, 40), Schedule("constant", 0.1, 40))


def test_epochs_are_whole_batches_also_where_their_product_is_rounded():
    assert [steps_of(epochs / 100, 1600, 16) for epochs in range(1, 300)] == list(range(1, 300))
    assert [steps_of(epochs, 30, 4) for epochs in (0.1, 1, 2.5, 4)] == [1, 7, 18, 30]


def test_milestones_of_one_step_are_refused(tmp_path: Path):
    config = _config(tmp_path, "schedule.kind=step", "schedule.milestones=[1.01, 1.02]")
    with pytest.raises(ValueError, match=r"milestones \[1.01, 1.02\] are at the steps \[10, 10\]; move them apart"):
        build_schedules(config, 40, 10.0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["schedule.kind=step"], "schedule.milestones must name the epochs after which"),
        (["head.schedule=step"], "schedule.milestones must name the epochs after which"),
        (["schedule.milestones=[3]"], r"schedule.milestones is for schedule.kind=step, got \[3.0\] with poly; take it out"),
        (["schedule.kind=step", "schedule.milestones=[3, 3]"], "schedule.milestones must ascend and be above 0"),
        (["schedule.kind=step", "schedule.milestones=[x]"], "schedule.milestones must be a number, got 'x'"),
        (["schedule.kind=step", "schedule.milestones=8"], "must be a list of numbers, got 8; write"),
        (["schedule.kind=step", "schedule.milestone_steps=[1.5]"], "schedule.milestone_steps must be whole numbers"),
        (["schedule.warmup_steps=3", "schedule.warmup_epochs=1"], "say the same in two units"),
        (["schedule.kind=constant", "schedule.min_lr=0.01"], "schedule.min_lr is for poly and cosine"),
        (["schedule.min_lr=0.2"], "schedule.min_lr must be at most optimizer.lr, got 0.2 and 0.1"),
        (["schedule.kind=cosin"], r"schedule.kind must be one of .*, got 'cosin'. Did you mean cosine\?"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_in_a_line(tmp_path: Path, overrides: list[str], words: str):
    with pytest.raises(ValueError, match=words) as found:
        _config(tmp_path, *overrides)
    assert "\n" not in str(found.value)


def test_a_warm_up_as_long_as_the_run_and_a_milestone_in_it_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"schedule.warmup_steps must be below the 40 steps, got 40"):
        build_schedules(_config(tmp_path, "schedule.warmup_steps=40"), 40, 10.0)
    inside = _config(tmp_path, "schedule.kind=step", "schedule.milestones=[1]", "schedule.warmup_epochs=1.5")
    with pytest.raises(ValueError, match="the first milestone is step 10, before the end of the warm-up, 15 steps"):
        build_schedules(inside, 40, 10.0)


def test_a_run_follows_its_schedules_and_its_log_and_picture_say_which(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    overrides = ["train.max_steps=4", "eval.targets=[]", "schedule.kind=cosine", "schedule.min_lr=0.01", "head.schedule=step"]
    assert train.main(small_run(dataset, tmp_path, *overrides, "schedule.milestone_steps=[2, 9]", "head.lr_factor=0.5")) == 0
    said = capsys.readouterr().out
    assert "learning rate: cosine, from 0.05 to 0.01" in said
    centres = "step, 0.05, x 0.1 after the steps 2; 1 milestone(s) are beyond the last step, 4"
    assert f"learning rate of the class centres, before head.lr_factor: {centres}" in said
    metrics = read_metrics(tmp_path / "tiny")
    half = 0.01 + 0.04 * 0.5
    assert metrics[3]["lr"] == pytest.approx(half) and metrics[1]["lr"] == 0.05
    assert [metrics[step]["lr_centres"] for step in range(1, 5)] == pytest.approx([0.05, 0.05, 0.005, 0.005])
    figures, make = [], compare_runs.make_figure
    monkeypatch.setattr(compare_runs, "make_figure", lambda *size, **more: figures.append(make(*size, **more)) or figures[-1])
    assert compare_runs.main([str(tmp_path / "tiny"), "--out", str(tmp_path / "out")]) == 0
    (axis,) = (axis for axis in figures[0].axes if axis.get_title() == "learning rate")
    drawn = [(line.get_linestyle(), list(line.get_ydata())) for line in axis.lines]
    assert drawn == [
        (style, [metrics[step][key] for step in range(1, 5)]) for style, key in (("-", "lr"), ("--", "lr_centres"))
    ]


def test_the_rate_of_the_class_centres_reaches_them(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[float] = []
    inner = train.train_step

    def watched(config: Any, tasks: Any, model: Any, *more: Any) -> Any:
        head = model.heads["softmax"]
        settle = head.settle
        monkeypatch.setattr(head, "settle", lambda lr, good: (seen.append(lr), settle(lr, good))[1])
        result = inner(config, tasks, model, *more)
        monkeypatch.setattr(head, "settle", settle)
        return result

    monkeypatch.setattr(train, "train_step", watched)
    overrides = ["train.max_steps=3", "eval.targets=[]", "head.schedule=constant", "head.lr_factor=0.5", "checkpoint.every=0"]
    assert train.main(small_run(dataset, tmp_path, *overrides)) == 0
    assert seen == [0.025] * 3
    assert read_metrics(tmp_path / "tiny")[3]["lr"] < 0.01  # that of the backbone falls


def test_a_warm_up_beyond_the_last_step_is_said(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train.main(small_run(dataset, tmp_path, "train.max_steps=2", "eval.targets=[]", "schedule.warmup_steps=8")) == 0
    words = "learning rate: poly with power 2, rises to 0.0125 of 0.05: the warm-up has 8 steps, the run 2\n"
    assert words in capsys.readouterr().out and read_metrics(tmp_path / "tiny")[2]["lr"] == 0.0125
