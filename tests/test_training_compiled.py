"""train.compile: the compiled network trains as the network itself, and what is missing is said before anything trains."""

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from rounding import network_bound
from tiny_runs import ROOT, ended_well, final_weights, read_metrics, run_program, run_train, tiny_run
from torch import Tensor, nn

import train
from backbones import build_backbone
from configs import load_config
from training import setup
from training.model import Recorded
from training.sections import NAMED

SETTINGS = [
    "backbone.name=one_block", "backbone.dropout=0.3", "train.max_steps=3", "eval.every=2", "checkpoint.every=0",
    "optimizer.lr=0.01", "loss.scale=16",
]  # fmt: skip


@pytest.mark.numeric
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
def test_the_compiled_network_trains_as_the_network_itself(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if os.environ.get("FACE_ONE_PROCESS"):
        pytest.skip("FACE_ONE_PROCESS: both sides have the same arithmetic, and compiling takes long")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # both processes compile already, and would start more for it
    runs = []
    for mode in ("off", "default"):
        arguments = tiny_run(dataset, tmp_path, *SETTINGS, f"run.name={mode}", f"train.compile={mode}")
        done = ended_well(run_program(train.main, [arguments] * 2, timeout=600))
        assert ("torch.compile in mode default" in done.stdout + done.stderr) == (mode == "default")
        runs.append(tmp_path / mode)
    cache = tmp_path / "cache"
    assert any("batch_norm" in path.read_text() for path in cache.rglob("*.py"))  # what training ran was compiled
    eager, compiled = ([values["loss"] for values in read_metrics(run).values()] for run in runs)
    assert compiled == pytest.approx(eager, abs=16 * network_bound())
    assert max(eager) - min(eager) > 100 * 16 * network_bound()
    eager_weights, weights = (final_weights(run) for run in runs)
    assert list(weights) == list(eager_weights)
    for name, value in eager_weights.items():
        bound = network_bound() * max(1.0, float(value.abs().max()))
        assert float((weights[name].double() - value.double()).abs().max()) < bound, name
    assert list(read_metrics(runs[1], "tiny")) == list(read_metrics(runs[0], "tiny")) == [2, 3]


def test_what_is_missing_to_compile_is_reported_in_one_line_before_the_run_has_a_folder(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    done = run_train(2, tiny_run(dataset, tmp_path, "train.compile=default"))
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: train.compile=default needs a C++ compiler (g++, or the one that CXX names)")
    assert done.stderr.endswith("install it, or set train.compile=off\n") and not (tmp_path / "tiny").exists()
    with pytest.raises(ValueError, match=r"train.compile=reduce-overhead records CUDA graphs.*set train.compile=default"):
        setup.check_compile("reduce-overhead", torch.device("cpu"))


@pytest.mark.parametrize(
    ("device", "processes", "key", "taken"),
    [
        ("cuda", 1, "train.max_steps=5000", "reduce-overhead"), ("cuda", 1, "train.compile=default", "default"),
        ("cpu", 1, "train.max_steps=5000", "off"), ("cuda", 2, "train.max_steps=5000", "off"),
        *[("cuda", 1, key, "off") for key in (
            "train.max_steps=4999", "backbone.name=vit_t", "backbone.dropout=0.1", "backbone.checkpointing=true",
            "backbone.sync_norm=true", "backbone.name=r2060",
        )],
    ],
)  # fmt: skip
def test_auto_takes_cuda_graphs_for_long_runs_of_an_iresnet_on_one_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, processes: int, key: str, taken: str
):
    monkeypatch.setattr(setup, "check_compile", look := mock.Mock())
    config = load_config(ROOT / "configs" / "ms1mv3_r50.yaml", ["train.max_steps=5000", key], NAMED)
    place = torch.device(device), processes, config.train.max_steps
    assert setup.choose_compile(config, *place) == (taken, [])
    look.side_effect = ValueError("no Triton")
    if taken == "reduce-overhead":
        mode, (warning,) = setup.choose_compile(config, *place)
        assert mode == "off" and warning.startswith("train.compile=auto does not compile here") and "no Triton" in warning


def test_recording_leaves_the_network_as_it_was_and_keeps_no_pass(monkeypatch: pytest.MonkeyPatch):
    """tests/test_gpu_training.py trains so; here torch's recorder is one that has no graph, but warms up as torch's does."""
    kept: list[Tensor] = []

    def record(module: Recorded, sample: tuple[Tensor], allow_unused_input: bool) -> None:
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()
        for _ in range(4):
            kept[:] = [module(*sample)]
            torch.autograd.grad(kept[0].sum(), list(module.parameters()), allow_unused=allow_unused_input)

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", record)
    network = nn.Sequential(build_backbone("one_block", 8, dropout=0.0), nn.Unflatten(1, (8, 1)), nn.Flatten())  # a view
    network.register_parameter("unused", nn.Parameter(torch.ones(1)))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    images = torch.randn(4, 3, 112, 112)
    recorded = Recorded(network, images, torch.bfloat16)
    assert [name for name, value in network.state_dict().items() if not torch.equal(value, before[name])] == []
    assert [id(one) for one in recorded.parameters()] == [id(one) for one in network.parameters()]
    assert kept[0].grad_fn is None  # what is recorded goes on, what autograd knew of it does not
    expected = network(images)
    network.load_state_dict(before)
    assert torch.equal(recorded(images), expected)


def test_what_cannot_be_recorded_is_named_by_its_cause(monkeypatch: pytest.MonkeyPatch):
    error = RuntimeError("operation failed due to a previous error during capture")  # as torch.cuda.graph ends
    error.__context__ = RuntimeError("Cannot copy between CPU and CUDA\nmore")
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", mock.Mock(side_effect=error))
    with pytest.raises(ValueError, match=r"recorded: Cannot copy between CPU and CUDA; set train.compile=off$"):
        Recorded(nn.Linear(2, 2), torch.ones(1, 2), None)


def test_what_auto_takes_is_compiled_in_a_folder_of_this_user_and_written_down(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked, compiled = [], []

    def choose(config: object, *situation: object) -> tuple[str, list[str]]:
        asked.append(situation)
        setup.check_compile("default", torch.device("cpu"))
        return "default", ["a reason why it is slow"]

    monkeypatch.setattr(setup, "choose_compile", choose)
    monkeypatch.setattr(torch, "compile", lambda what, **keys: compiled.append((what, keys)) or what)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert train.main(tiny_run(dataset, tmp_path, *SETTINGS[:2], "train.max_steps=0", "train.epochs=1", "eval.targets=[]")) == 0
    steps = max(read_metrics(tmp_path / "tiny"))
    assert asked == [(torch.device("cpu"), 1, steps)] and steps > 1
    assert compiled[0] == (torch.neg, {}) and compiled[1][1]["mode"] == "default" and len(compiled) == 2
    assert "WARNING: a reason why it is slow" in capsys.readouterr().out
    assert "  compile: default" in (tmp_path / "tiny" / "config.yaml").read_text()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "face_head" / "inductor")
