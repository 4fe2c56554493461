"""Configurations of arcface_torch become configurations here, and nothing in them is ever run."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from configs import load_config
from scripts.arcface_torch import import_config as import_arcface_config

HEADER = "from easydict import EasyDict as edict\n\n# make training faster\nconfig = edict()\n"
RUN = """config.margin_list = (1.0, 0.0, 0.4)
config.network = "r100"
config.resume = False
config.output = None
config.embedding_size = 256
config.sample_rate = 0.2
config.fp16 = True
config.momentum = 0.9
config.weight_decay = 5e-4
config.batch_size = 64 * 2
config.lr = 0.4
config.verbose = 10000
config.dali = False
config.rec = "/train_tmp/WebFace42M"
config.num_classes = 2059906
config.num_image = 42474557
config.num_epoch = 20
config.warmup_epoch = config.num_epoch // 10
config.val_targets = ["lfw", "cfp_fp"]
"""
NEEDED = 'config.rec = "/d"\nconfig.num_classes = 5\nconfig.num_image = 50\nconfig.num_epoch = 2\n'
NEEDED += "config.warmup_epoch = 0\nconfig.val_targets = []\n"


def _convert(folder: Path, text: str, *more: str, gpus: int = 8) -> Any:
    """Return the loaded result."""
    (folder / "theirs.py").write_text(text)
    out = folder / "ours.yaml"
    out.unlink(missing_ok=True)
    assert import_arcface_config.main([str(folder / "theirs.py"), "--gpus", str(gpus), "--out", str(out), *more]) == 0
    return load_config(out, (), train.NAMED)


def _error(folder: Path, capsys: pytest.CaptureFixture[str], text: str, *more: str) -> str:
    (folder / "theirs.py").write_text(text)
    capsys.readouterr()
    assert import_arcface_config.main([str(folder / "theirs.py"), "--gpus", "8", *more]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and out == ""
    return err


def test_every_key_of_a_published_run_arrives(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = _convert(tmp_path, HEADER + RUN, gpus=32)
    assert (config.loss.name, config.loss.margin, config.loss.scale) == ("cosface", 0.4, 64.0)
    assert (config.backbone.name, config.backbone.embedding_size) == ("r100", 256)
    assert (config.head.sample_rate, config.head.interclass_filtering_threshold) == (0.2, 0.0)
    assert (config.train.batch_size, config.train.accumulation, config.train.precision) == (4096, 1, "fp16")
    assert (config.train.epochs, config.schedule.warmup_epochs, config.schedule.power) == (20.0, 2.0, 2.0)
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.4, 0.9, 5e-4)
    assert (config.data.source, config.data.path) == ("recordio", "/train_tmp/WebFace42M")
    assert (config.data.num_classes, config.data.num_images) == (2059906, 42474557)
    assert config.eval.targets == ("lfw", "cfp_fp") and config.eval.every == 10000
    assert config.log.every == 10 and config.run.seed == 2048 and config.run.name == "ours"
    text, err = (tmp_path / "ours.yaml").read_text(), capsys.readouterr().err
    assert "128 x 32 GPUs" in text and "the last arcface_torch has 1" in text and text.isascii()
    for key in ("dali", "resume"):
        assert f"# Not converted: config.{key} = False" in text and f"note: config.{key} = False" in err
    assert import_arcface_config.main([str(tmp_path / "theirs.py"), "--gpus", "32", "--out", f"{tmp_path}/my own.yaml"]) == 0
    assert f"start with ./face train '{tmp_path}/my own.yaml' --machines 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("margins", "expected"),
    [
        ("(1.0, 0.5, 0.0)", {"name": "arcface", "margin": 0.5}),
        ("[1, 0.3, 0]", {"name": "arcface", "margin": 0.3}),
        ("(1.0, 0.0, 0.4)", {"name": "cosface", "margin": 0.4}),
        ("(1.0, 0.5, 0.35)", {"name": "cosface", "margin": 0.35}),  # there m2 is ignored
        ("(1.35, 0.0, 0.0)", {"name": "combined", "m1": 1.35, "m2": 0.0, "m3": 0.0}),
    ],
)
def test_margins_go_by_the_rules_of_arcface_torch(tmp_path: Path, margins: str, expected: dict[str, Any]):
    loss = _convert(tmp_path, f"{HEADER}{NEEDED}config.margin_list = {margins}\n").loss
    assert {key: loss[key] for key in expected} == expected
    assert ("m2 = 0.5 are ignored" in (tmp_path / "ours.yaml").read_text()) == (margins == "(1.0, 0.5, 0.35)")


@pytest.mark.numeric
@pytest.mark.parametrize(("name", "optimizer"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_accumulation_counts_in_the_batch_the_periods_and_the_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, optimizer: Any
):
    more = "config.gradient_acc = 4\nconfig.batch_size = 32\nconfig.verbose = 1000\nconfig.frequent = 2\n"
    more += f"config.optimizer = '{name}'\n"
    config = _convert(tmp_path, HEADER + NEEDED + more, "--power", "1", gpus=2)
    assert (config.train.batch_size, config.train.accumulation, config.optimizer.name) == (256, 4, name)
    assert (config.eval.every, config.log.every, config.schedule.power) == (250, 1, 1.0)
    (advice,) = re.findall(r"^note: (gradients are averaged, there summed: .*)", capsys.readouterr().err, re.M)
    assert f"accumulation: 4  # {advice}\n" in (tmp_path / "ours.yaml").read_text()
    ends = []
    for share, overrides in ((1, []), (1 / 4, [word for word in advice.split() if "=" in word])):  # a sum, a mean
        given = load_config(tmp_path / "ours.yaml", overrides, train.NAMED).optimizer
        weights = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        more = {"momentum": given.momentum} if name == "sgd" else {"eps": given.eps}
        steps = optimizer([weights], lr=given.lr, weight_decay=given.weight_decay, **more)
        for step in range(8):
            steps.zero_grad()
            for part in range(4):
                (weights - torch.tensor([part - step, 0.1])).square().sum().mul(share).backward()
            weights.grad *= min(1.0, given.clip_norm / float(weights.grad.norm()))  # most steps, and not all
            steps.step()
        ends.append(weights.detach())
    torch.testing.assert_close(*ends, rtol=1e-12, atol=0.0)


def test_synthetic_data_zero_sampling_and_old_keys_are_converted(tmp_path: Path):
    text = HEADER + NEEDED.replace('"/d"', '"synthetic"') + "config.sample_rate = 0\nconfig.loss = 'cosface'\n"
    config = _convert(tmp_path, text + "config.momentum = 0.5\nconfig.output = 'out/x y'\nconfig.warmup_epoch = -1\n")
    assert (config.data.source, config.data.path, config.data.num_images) == ("synthetic", "", 50)
    assert 0 < config.head.sample_rate < 1e-6 and (config.loss.name, config.loss.margin) == ("cosface", 0.4)
    assert config.optimizer.momentum == 0.9 and (config.run.name, config.run.output) == ("x y", "out")
    assert config.schedule.warmup_epochs == 0
    assert "0.5 is ignored there" in (tmp_path / "ours.yaml").read_text()


def test_the_steps_of_2021_are_milestones_as_far_as_the_run_reaches_them(tmp_path: Path):
    text = HEADER + NEEDED.replace("num_epoch = 2", "num_epoch = 20")
    schedule = _convert(tmp_path, text + "config.decay_epoch = [8, 14, 20]\n").schedule
    assert (schedule.kind, schedule.milestones, schedule.factor) == ("step", (8.0, 14.0), 0.1)
    assert _convert(tmp_path, text + "config.decay_epoch = [99]\n").schedule.kind == "constant"


def test_a_base_of_ones_own_lies_underneath(tmp_path: Path):
    (tmp_path / "base.py").write_text(HEADER + "config.network = 'mbf'\nconfig.lr = 0.3\nconfig.batch_size = 10\n")
    config = _convert(tmp_path, HEADER + NEEDED + "config.lr = config.lr / 2\n", "--base", str(tmp_path / "base.py"))
    assert (config.backbone.name, config.optimizer.lr, config.train.batch_size) == ("mbf", 0.15, 80)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import os", "only config.KEY = VALUE can be converted, got `import os`"),
        ("os.mkdir('executed')", "only config.KEY = VALUE"),
        ("config.rec = __import__('os').mkdir('executed')", "is neither a literal nor arithmetic"),
        ("config.rec = open", "`open` is neither a literal"),
        ("config.lr = [0.1 for _ in range(3)]", "is neither a literal"),
        ("if config.dataset == 'x':\n    config.lr = 1", "only config.KEY = VALUE"),
        ("config = edict(lr=1)", "only config.KEY = VALUE"),
        ("a = config.b = 1", "only config.KEY = VALUE"),
        ("config.lr = 1 / 0", "cannot be computed (ZeroDivisionError)"),
        ("config.lr = 9 ** 9 ** 9", "is neither a literal nor arithmetic"),
        ("config.lr = 1e29 * 1e29", "a number is too large"),
        ("config.rec = 'a' * 3", "is not a number"),
        ("config.lr = config.rate", "config.rate is used before it is set"),
        ("config.network = 'vit_g'", "network 'vit_g' has no counterpart"),
        ("config.batch_size = '128'", "config.batch_size must be a whole number, got '128'"),
        ("config.fp16 = 1", "config.fp16 must be True or False, got 1"),
        ("config.margin_list = (1.0, 0.5)", "must be three numbers"),
    ],
)
def test_what_is_no_plain_setting_is_an_error_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, said: str
):
    monkeypatch.chdir(tmp_path)
    err = _error(tmp_path, capsys, HEADER + NEEDED + line + "\n")
    assert said in err and f"theirs.py:{HEADER.count(chr(10)) + NEEDED.count(chr(10)) + 1}: " in err
    assert not (tmp_path / "executed").exists()


def test_other_mistakes_are_one_line_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "theirs.py:1: is not Python" in _error(tmp_path, capsys, "config.lr = = 1")
    assert "config.rec is not set" in _error(tmp_path, capsys, HEADER)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("config.optimizer = 'adagrad'", "optimizer.name must be one of sgd, adamw"),
        ("config.margin_list = (1.0, 0.0, 3.0)", "loss.margin must be"),
        ("config.lr = -1", "optimizer.lr must be at least 0"),
        ("config.warmup_epoch = 9", "schedule.warmup_epochs must be below train.epochs"),
        ("config.seed = 9999999999999999999999", "run.seed"),
        ("config.val_targets = ['lfw', 'lfw']", "eval.targets names a set twice"),
    ],
)
def test_a_value_that_is_refused_here_is_an_error_with_its_line_and_key_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
):
    where = f"theirs.py:{(HEADER + NEEDED).count(chr(10)) + 1}: {line.partition(' =')[0]}: cannot be converted: "
    assert where + said in _error(tmp_path, capsys, HEADER + NEEDED + line + "\n")
    (tmp_path / "latin.py").write_bytes(b"config.rec = '\xe9'\n")
    assert import_arcface_config.main([str(tmp_path / "latin.py"), "--gpus", "8"]) == 1
    assert "latin.py: is not Python text" in capsys.readouterr().err
    assert "theirs.py" in _error(tmp_path, capsys, "config.a = " + "(" * 5000 + ")" * 5000)
    assert "theirs.py" in _error(tmp_path, capsys, "config.a = " + "1 + " * 20000 + "1")
    (tmp_path / "ours.yaml").write_text("mine")
    said = _error(tmp_path, capsys, HEADER + NEEDED, "--out", str(tmp_path / "ours.yaml"))
    assert said.endswith("ours.yaml: exists already and is never overwritten; choose another name\n")
    assert (tmp_path / "ours.yaml").read_text() == "mine"


def test_values_of_secret_keys_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _convert(tmp_path, HEADER + NEEDED + "config.wandb_key = 'abc123'\nconfig.notes = 'a\\nb: #'\n")
    said = capsys.readouterr().err + (tmp_path / "ours.yaml").read_text()
    assert "config.wandb_key = ...: no counterpart here" in said and "abc123" not in said
    assert "note: config.notes = 'a\\nb: #': no counterpart here\n" in said


@pytest.mark.parametrize(
    ("network", "name", "drop_path", "mask_ratio", "checkpointing"),
    [
        ("vit_t", "vit_t", 0.1, 0.1, False),
        ("vit_t_dp005_mask0", "vit_t", 0.05, 0.0, False),
        ("vit_s", "vit_s", 0.1, 0.1, False),
        ("vit_s_dp005_mask_0", "vit_s", 0.05, 0.0, False),
        ("vit_b", "vit_b", 0.1, 0.1, True),
        ("vit_b_dp005_mask_005", "vit_b", 0.05, 0.1, True),  # that code masks a tenth, whatever it is told
        ("vit_l_dp005_mask_005", "vit_l", 0.05, 0.1, True),
        ("vit_h", "vit_h", 0.1, 0.0, True),
    ],
)
def test_vision_transformers_have_their_arguments_in_their_names(
    tmp_path: Path, network: str, name: str, drop_path: float, mask_ratio: float, checkpointing: bool
):
    found = _convert(tmp_path, f"{HEADER}{NEEDED}config.network = '{network}'\n").backbone
    assert (found.name, found.drop_path, found.mask_ratio) == (name, drop_path, mask_ratio)
    assert found.checkpointing == checkpointing
    assert ("there a mask is always a tenth" in (tmp_path / "ours.yaml").read_text()) == network.endswith("mask_005")
