"""LoRA and tuning of the last blocks, in networks of this project; networks of timm are in test_backbones_foundations.py."""

import copy
from argparse import Namespace
from pathlib import Path

import onnxruntime
import pytest
import torch
from rounding import FP32_UNIT, network_bound
from tiny_runs import IRESNET, ended_well, equal_weights, read_metrics, reshard_and_back, run_train, small_run, write_dataset
from torch import Tensor, nn

import train
from backbones import build_backbone
from backbones.lora import LoraLinear, add_lora, all_called
from configs import load_config
from eval.networks import load_network
from scripts import checkpoint as tool
from scripts.deploy import export
from utils.checkpoint.format import BACKBONE, EMA, list_checkpoints
from utils.checkpoint.reading import load_weights, merged, read_backbone, read_file
from utils.checkpoint.trainer import trained_names
from utils.memory import backbone_memory
from utils.optim import freeze, frozen_parts

VIT = ["backbone.name=shallow_vit", "backbone.width=0.25", "backbone.drop_path=0", "backbone.mask_ratio=0"]
MORE = ["optimizer.name=adamw", "optimizer.lr=0.003", "schedule.power=0", "eval.targets=[]"]
SHORT = [*VIT, *MORE, "train.max_steps=3", "checkpoint.every=1"]
LORA = ["backbone.lora_rank=2", "backbone.lora_alpha=6"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `data`, a run `base`, and a run `tuned` of three steps with LoRA from there."""
    folder = tmp_path_factory.mktemp("lora")
    write_dataset(folder / "data", 24)
    assert train.main(small_run(folder / "data", folder, *SHORT, "run.name=base", "train.max_steps=2")) == 0
    assert train.main(_tuning(folder, folder, "tuned", *LORA, "train.ema=0.5", "checkpoint.keep_last=99")) == 0
    return folder


def _tuning(source: Path, output: Path, name: str, *more: str) -> list[str]:
    begin = [f"run.name={name}", f"init.backbone={source / 'base'}", "init.new_classes=random"]
    return small_run(source / "data", output, *SHORT, *begin, *more)


def _raw(run: Path, name: str = BACKBONE) -> dict[str, Tensor]:
    return read_file(list_checkpoints(run)[-1], name)


@pytest.mark.numeric
def test_a_layer_computes_and_learns_as_the_dense_one_and_begins_as_it_was():
    torch.manual_seed(3)
    linear = nn.Linear(7, 5)
    x = torch.randn(4, 7)
    layer = LoraLinear(linear, 2, 6.0)
    assert torch.equal(layer(x), linear(x)) and layer.lora_a.abs().min() > 0
    layer = layer.double()
    nn.init.normal_(layer.lora_b)
    layer(x.double()).square().sum().backward()
    a, b = (value.detach().clone().requires_grad_() for value in (layer.lora_a, layer.lora_b))
    dense = x.double() @ (linear.weight.double() + 3.0 * b @ a).t() + linear.bias.double()
    dense.square().sum().backward()
    torch.testing.assert_close(layer.lora_a.grad, a.grad)
    torch.testing.assert_close(layer.lora_b.grad, b.grad)
    plain = merged({f"x.{name}": value.detach() for name, value in layer.state_dict().items()})
    assert set(plain) == {"x.weight", "x.bias"}
    torch.testing.assert_close(x.double() @ plain["x.weight"].t() + plain["x.bias"], dense.detach())


def test_what_trains_is_the_changes_and_what_follows_the_blocks():
    network = build_backbone("shallow_vit", 8, 0.25, image_size=48)
    before = set(network.state_dict())
    add_lora(network, 2, 4.0)
    paths = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    parts = {f"blocks.{k}.{path}.lora_{x}" for k in range(4) for path in paths for x in "ab"}
    after = {name for name, _ in network.named_parameters() if name.startswith(("norm.", "feature."))}
    assert set(trained_names(network)) == parts | after and before <= set(network.state_dict())
    last = build_backbone("vit_t", 8, 0.25, image_size=48)
    freeze(last, frozen_parts(last, [], 3))
    blocks = {name.split(".")[1] for name in trained_names(last) if name.startswith("blocks")}
    assert blocks == {"9", "10", "11"} and {name.split(".")[0] for name in trained_names(last)} == {"blocks", "norm", "feature"}
    sizes = {True: 0, False: 0}
    for parameter in network.parameters():
        sizes[parameter.requires_grad] += parameter.numel() * 4
    free = copy.deepcopy(network).requires_grad_(True)
    found, most = (backbone_memory(each, None, 2, 48).parameters for each in (network, free))
    assert most - found == 2 * sizes[False]  # no gradient and moments; a moving average is counted
    for name, words in (("r18", "no linear layers called qkv"), ("mbf", "no layers called blocks")):
        with pytest.raises(ValueError, match=words):
            add_lora(build_backbone(name, 8, 0.125), 2, 4.0)


def test_a_layer_whose_weight_is_read_and_that_is_not_called_is_refused():
    network = build_backbone("shallow_vit", 8, 0.25, image_size=48).eval()
    add_lora(network, 2, 4.0)
    images = torch.zeros(1, 3, 48, 48)
    with all_called(network):
        network(images)
    qkv = network.blocks[3].attn.qkv
    network.blocks[3].attn.qkv = nn.Identity()
    network.blocks[3].attn.forward = lambda x: nn.functional.linear(x, qkv.weight)[..., : x.shape[-1]]
    network.blocks[3].attn.qkv = qkv
    with pytest.raises(ValueError, match=r"reads the weight of blocks\.3\.attn\.qkv without calling it"), all_called(network):
        network(images)


def test_a_run_begins_as_the_other_ended_changes_only_what_it_may_and_resumes_to_the_bit(source: Path, tmp_path: Path):
    assert train.main(_tuning(source, tmp_path, "full", "train.max_steps=1")) == 0
    first = [read_metrics(run)[1]["loss"] for run in (source / "tuned", tmp_path / "full")]
    assert first[0] == first[1]
    base, tuned = _raw(source / "base"), _raw(source / "tuned")
    network = build_backbone("shallow_vit", 16, 0.25, image_size=48)
    add_lora(network, 2, 6.0)
    trained = set(trained_names(network))
    kept = [name for name in base if name not in trained and "running" not in name and "num_b" not in name]
    assert all(torch.equal(base[name], tuned[name]) for name in kept)
    assert all((tuned[name] != 0).any() for name in tuned if name.endswith("lora_b"))
    halves = _tuning(source, tmp_path, "halves", *LORA, "train.ema=0.5")
    assert train.main([*halves, "train.max_steps=1"]) == 0 and train.main(halves) == 0
    for name in (BACKBONE, EMA):
        whole, found = _raw(source / "tuned", name), _raw(tmp_path / "halves", name)
        assert set(whole) == set(found) and all(torch.equal(whole[key], found[key]) for key in whole)
    log = (source / "tuned" / "train.log").read_text()
    count = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    assert f"{count:,} numbers" in log


@pytest.mark.numeric
def test_several_ranks_and_micro_batches_train_as_one_and_resume_to_the_bit_after_a_reshard(source: Path, tmp_path: Path):
    same = [*LORA, "backbone.freeze_norm=true", "optimizer.layer_decay=0.8", "optimizer.name=sgd", "backbone.train_last=3"]
    same += ["train.batch_size=12", "checkpoint.keep_last=9"]
    assert train.main(_tuning(source, tmp_path, "one", *same)) == 0
    one, begun = _raw(tmp_path / "one"), _raw(source / "base")
    assert all(bool(one[f"blocks.{k}.attn.qkv.lora_b"].any()) == (k >= 1) for k in range(4))
    for count, more in ((2, ["train.accumulation=2", "backbone.checkpointing=true"]), (3, [])):
        done = ended_well(run_train(count, _tuning(source, tmp_path, f"of_{count}", *same, *more)))
        norms = [read_metrics(tmp_path / name)[3]["grad_norm"] for name in ("one", f"of_{count}")]
        assert norms[1] == pytest.approx(norms[0], rel=network_bound())  # before it is clipped
        found = _raw(tmp_path / f"of_{count}")
        assert set(found) == set(one)
        for name, value in one.items():  # three updates round a number below 1; the gradients' own errors are smaller
            torch.testing.assert_close(found[name], value, rtol=0, atol=8 * FP32_UNIT)
            moved = (value - begun.get(name, 0 * value)).abs().max()
            assert moved == 0 or "num_b" in name or moved > 64 * FP32_UNIT, name
    reshard_and_back(list_checkpoints(tmp_path / "of_2")[0], tmp_path / "broken")
    again = _tuning(source, tmp_path, "broken", *same, "train.accumulation=2")
    assert (done := run_train(2, again)).returncode == 0 and "after step 1" in done.stdout, done.stderr
    equal_weights(tmp_path / "of_2", tmp_path / "broken")
    whole, broken = _raw(tmp_path / "of_2"), _raw(tmp_path / "broken")
    assert set(whole) == set(broken) and all(torch.equal(whole[name], broken[name]) for name in whole)


@pytest.mark.numeric
@pytest.mark.parametrize("name", [BACKBONE, EMA])
@pytest.mark.usefixtures("onnx_operators")
def test_what_is_evaluated_and_exported_is_the_plain_network_that_computes_the_same(name: str, source: Path, tmp_path: Path):
    network = build_backbone("shallow_vit", 16, 0.25, image_size=48).eval()
    add_lora(network, 2, 6.0)
    network.load_state_dict(_raw(source / "tuned", name))
    images = torch.randn(3, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = network(images)
    if name == EMA:  # which no export takes by itself; both are read alike, see below
        assert export.main([str(source / "tuned"), "--to", "onnx", "--out", str(tmp_path / "model.onnx"), "--ema"]) == 0
        session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
        found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])
        expected_unit, found_unit = (nn.functional.normalize(each) for each in (expected, found))
        torch.testing.assert_close(found_unit, expected_unit, rtol=0, atol=1e-5)
    options = Namespace(
        run=source / "tuned", best=False, untrained=False, ema=name == EMA, backbone=None, image_size=None, trust_code=False,
        colour=None, input_mean=None, input_std=None, threads=1,
    )  # fmt: skip
    model = load_network(options, build_backbone).model.eval()
    assert not any("lora" in key for key in model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["lora_a", "lora_b", "lora_scale"])
def test_parts_that_do_not_fit_together_are_left_as_they_are(part: str):
    weights = {"x.weight": torch.ones(3, 4), "x.lora_a": torch.ones(2, 4), "x.lora_b": torch.ones(3, 2)}
    weights |= {"x.lora_scale": torch.ones(()), f"x.{part}": torch.ones(5, 4)}
    assert merged(weights) is weights


def test_names_of_other_kinds_of_lora_are_not_left_out_but_refused():
    plain = nn.Linear(4, 3)
    for others in ({"lora_A": torch.ones(2, 4), "lora_B": torch.ones(3, 2)}, {"lora_b": torch.ones(3, 2)}):
        weights = {**plain.state_dict(), **others}
        with pytest.raises(ValueError, match=r"file: lora_\w is .*, in this backbone it is absent; hint"):
            load_weights(plain, weights, "file", "hint")
        nested = {f"x.{name}": value for name, value in weights.items()}
        with pytest.raises(ValueError, match=r"file: x\.lora_\w is .*, in this backbone it is absent; hint"):
            load_weights(nn.ModuleDict({"x": plain}), nested, "file", "hint")
    scalars = {f"x.{name}": torch.ones(()) for name in ("weight", "lora_a", "lora_b", "lora_scale")}
    assert merged(scalars) is scalars


@pytest.mark.numeric
def test_other_programs_see_merged_weights(source: Path, tmp_path: Path):
    first, last = list_checkpoints(source / "tuned")[0], list_checkpoints(source / "tuned")[-1]
    assert tool.main(["average", str(first), str(last), "--out", str(tmp_path / "mean.pt")]) == 0
    mean, plain = torch.load(tmp_path / "mean.pt"), [read_backbone(path) for path in (first, last)]
    assert set(mean) == set(_raw(source / "base"))
    expected = (plain[0]["blocks.3.mlp.fc1.weight"].double() + plain[1]["blocks.3.mlp.fc1.weight"].double()) / 2
    torch.testing.assert_close(mean["blocks.3.mlp.fc1.weight"].double(), expected, rtol=0, atol=FP32_UNIT)
    again = _tuning(source, tmp_path, "again", *LORA, f"init.backbone={source / 'tuned'}", "train.max_steps=1")
    assert train.main(again) == 0
    begun = _raw(tmp_path / "again")
    assert torch.equal(begun["blocks.3.mlp.fc1.weight"], plain[1]["blocks.3.mlp.fc1.weight"])


def test_the_last_stages_train_alone_as_with_a_list_of_frozen_parts(source: Path, tmp_path: Path):
    short = [IRESNET, "backbone.width=0.125", "eval.targets=[]", "train.max_steps=1"]
    assert train.main(small_run(source / "data", tmp_path, *short, "run.name=base")) == 0
    begin = [*short, f"init.backbone={tmp_path / 'base'}", "init.new_classes=random"]
    assert train.main(small_run(source / "data", tmp_path, *begin, "run.name=last", "backbone.train_last=2")) == 0
    frozen = "backbone.freeze=[conv1, bn1, prelu, layer1, layer2]"
    assert train.main(small_run(source / "data", tmp_path, *begin, "run.name=listed", frozen)) == 0
    base, last, listed = (_raw(tmp_path / name) for name in ("base", "last", "listed"))
    assert all(torch.equal(last[name], listed[name]) for name in last)
    changed = {name.split(".")[0] for name in last if not torch.equal(last[name], base[name])}
    assert {"layer3", "layer4", "fc"} <= changed and not changed & {"conv1", "bn1", "prelu", "layer1", "layer2"}


def test_what_cannot_work_is_one_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match=r"backbone\.lora_rank needs init\.backbone"):
        load_config("small", LORA)
    for more, words in (
        (["backbone.train_last=5"], "backbone.train_last: this backbone has 4 blocks or stages, got 5; take fewer"),
        ([*LORA, "backbone.name=mbf"], "backbone.lora_rank: this backbone has no layers called blocks"),
        (["backbone.train_last=1", "backbone.name=mbf"], "backbone.train_last: this backbone has no layers called blocks"),
    ):
        begin = [*SHORT[4:], f"init.backbone={source / 'base'}", "run.name=wrong", *([] if "mbf" in str(more) else VIT)]
        assert train.main(small_run(source / "data", tmp_path, *begin, *more)) != 0
        assert words in capsys.readouterr().err
    other = [*LORA, "train.ema=0.5", "train.max_steps=4", "backbone.lora_alpha=2"]
    for run, more, words in (
        ("tuned", other, "lora was [2, 6.0], this run has [2, 2.0]"),
        ("tuned", other[2:3], "lora was [2, 6.0], this run has none"),
        ("base", [*LORA, "train.max_steps=4"], "lora was none, this run has [2, 6.0]"),
    ):
        assert train.main(_tuning(source, source, run, *more)) != 0
        assert words in capsys.readouterr().err
