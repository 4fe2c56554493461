from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import equal_weights, face, small_run

import train
from eval import __main__ as evaluation
from scripts.deploy import embed
from utils import precision
from utils.distributed import World
from utils.precision import LossScaler, agreed_precision, set_tf32


def test_scaler_halves_at_an_overflow_and_doubles_after_its_interval():
    scaler = LossScaler(enabled=True, initial=1024.0, interval=3)
    scales = []
    for overflow in (False, False, True, False, False, False, False, False, False):
        scaler.update(torch.tensor(not overflow))
        scales.append(float(scaler.scale))
    assert scales == [1024, 1024, 512, 512, 512, 1024, 1024, 1024, 2048]  # each interval is counted from its beginning
    scaler.update(torch.tensor(True))
    again = LossScaler(enabled=True)
    again.load_state_dict(scaler.state_dict())
    assert again.state_dict() == scaler.state_dict()


def test_disabled_scaler_stays_at_one():
    scaler = LossScaler(enabled=False)
    scaler.update(torch.tensor(False))
    scaler.load_state_dict({"scale": 8.0, "good_steps": 3})
    assert scaler.scale == 1.0


def test_a_scaler_that_begins_after_fp32_training_begins_with_its_initial_scale():
    scaler = LossScaler(enabled=True, initial=64.0)
    scaler.load_state_dict(LossScaler(enabled=False).state_dict())
    assert scaler.scale == 64.0


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"scale": 0, "good_steps": 0}, "scale must be a number above 0 and below 1e38, got 0"),
        ({"scale": -1.0, "good_steps": 0}, "scale must be a number above 0"),
        ({"scale": 1e38, "good_steps": 0}, r"scale must be a number above 0 and below 1e38, got 1e\+38"),
        ({"scale": True, "good_steps": 0}, "scale must be a number above 0 and below 1e38, got True"),
        ({"scale": 8.0, "good_steps": -1}, "good_steps must be a whole number below 3, got -1"),
        ({"scale": 8.0, "good_steps": 3}, "good_steps must be a whole number below 3, got 3"),
        ({"scale": 8.0, "good_steps": 1.0}, "good_steps must be a whole number below 3, got 1.0"),
        ([8.0, 0], "scaler must hold scale and good_steps, got list"),
    ],
)
def test_a_state_out_of_range_is_refused_and_changes_nothing(state: Any, said: str):
    scaler = LossScaler(enabled=True, initial=64.0, interval=3)
    with pytest.raises(ValueError, match=said):
        scaler.load_state_dict(state)
    assert (scaler.scale, scaler.good_steps) == (64.0, 0)
    scaler.load_state_dict({"scale": 1, "good_steps": 2})
    assert (scaler.scale, scaler.good_steps) == (1.0, 2)


@pytest.mark.parametrize("allowed", [False, True])
def test_train_tf32_is_the_one_key_for_convolutions_and_products(dataset: Path, tmp_path: Path, allowed: bool):
    set_tf32(not allowed)
    arguments = small_run(dataset, tmp_path, "train.max_steps=1", "eval.targets=[]", f"train.tf32={allowed}")
    assert train.main(arguments) == 0
    products = torch.backends.cuda.matmul
    assert torch.backends.cudnn.allow_tf32 == products.allow_tf32 == allowed
    assert not products.allow_bf16_reduced_precision_reduction and not products.allow_fp16_reduced_precision_reduction


@pytest.mark.parametrize(("fast", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_auto_trains_and_evaluates_in_what_the_device_is_fast_at(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fast: bool, chosen: str
):
    monkeypatch.setattr(precision, "is_fast_in_bf16", lambda device: fast)
    scores = []
    for name in ("auto", chosen):
        more = [f"train.precision={name}", f"run.name={name}", "train.max_steps=2", "eval.targets=[]"]
        assert train.main(small_run(dataset, tmp_path, *more)) == 0
        log = (tmp_path / name / "train.log").read_text()
        assert f"1 x cpu, {chosen}, " in log and "emulates" not in log
        assert f"precision: {chosen}" in (tmp_path / name / "config.yaml").read_text()
        capsys.readouterr()
        report = tmp_path / f"report_{name}"
        words = [str(tmp_path / "auto"), "--targets", str(dataset / "tiny.bin"), "--precision", name, "--report", str(report)]
        assert evaluation.main(words) == 0
        assert f"{chosen} on cpu" in (report / "report.html").read_text()
        scores.append(capsys.readouterr().out.splitlines()[:4])
    equal_weights(tmp_path / "auto", tmp_path / chosen)
    assert scores[0] == scores[1]
    monkeypatch.setattr(precision, "is_fast_in_bf16", lambda device: not fast)
    capsys.readouterr()
    more = ["train.precision=auto", "run.name=auto", "train.max_steps=3", "eval.targets=[]"]
    assert train.main(small_run(dataset, tmp_path, *more)) == 0  # on another processor
    assert f"changed since that checkpoint: train.precision was '{chosen}', is " in capsys.readouterr().out


@pytest.mark.parametrize(("name", "best"), [("fp16", "bf16"), ("bf16", "fp32")])
def test_each_program_says_once_what_a_processor_emulates(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, best: str
):
    monkeypatch.setattr(precision, "is_fast_in_bf16", lambda device: best == "bf16")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    (tmp_path / "1.jpg").write_bytes(face(1, 1))
    words = f"{name}: this processor emulates it, many times slower than fp32; {{0}}auto takes {best}\n"
    small = [f"train.precision={name}", "train.max_steps=1", "eval.targets=[]"]
    assert train.main(small_run(dataset, tmp_path, *small)) == 0
    assert capsys.readouterr().out.count("WARNING: train.precision=" + words.format("train.precision=")) == 1
    run = [str(tmp_path / "tiny"), "--precision", name, "--device", "cpu"]
    assert evaluation.main([*run, "--targets", str(dataset / "tiny.bin")]) == 0
    assert capsys.readouterr().err.count("warning: --precision " + words.format("--precision ")) == 1
    assert embed.main([*run, str(tmp_path), "--processes", "1", "--out", str(tmp_path / "faces.npy")]) == 0
    assert capsys.readouterr().err.count("warning: --precision " + words.format("--precision ")) == 1


def _agrees_where_one_is_slow(rank: int, world_size: int) -> None:
    world = World(rank, world_size, rank, world_size, torch.device("cpu"))
    for slow, chosen in ((1, "fp32"), (None, "bf16")):
        precision.is_fast_in_bf16 = lambda device, slow=slow: rank != slow
        assert agreed_precision("auto", world) == chosen
        assert agreed_precision("bf16", world) == "bf16"


def test_all_processes_train_in_the_same_precision(run_ranks: Callable[..., None]):
    run_ranks(_agrees_where_one_is_slow, 2)
