"""Presets of rules and decay by layer, against groups written by hand."""

from pathlib import Path

import pytest
import torch
from tiny_runs import IRESNET, small_run
from torch import nn

import train
from backbones import build_backbone
from utils.optim import ParameterRule, build_optimizer, describe_groups, layer_numbers


class _Transformer(nn.Module):
    """Modules called as those of a vision transformer, of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, 4, 6))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, 6))
        self.patch_embed = nn.Sequential(nn.Conv2d(3, 6, 2))
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(2)])
        self.norm = nn.LayerNorm(6)
        self.feature = nn.Sequential(nn.Linear(24, 5), nn.BatchNorm1d(5))


def _of_parameters(module: nn.Module, *rules: ParameterRule, layer_decay: float = 1.0) -> dict[str, tuple[float, float]]:
    """Return (lr_factor, weight_decay) of each trained parameter, each of which is in one group."""
    optimizer = build_optimizer(module, "sgd", 0.1, 0.9, 0.05, rules=rules, layer_decay=layer_decay)
    names = {parameter: name for name, parameter in module.named_parameters()}
    pairs = [(names[p], (g["lr_factor"], g["weight_decay"])) for g in optimizer.param_groups for p in g["params"]]
    assert len(dict(pairs)) == len(pairs) == sum(p.requires_grad for p in module.parameters())
    return dict(pairs)


def _is_norm(module: nn.Module, name: str) -> bool:
    owner = module.get_submodule(name.rpartition(".")[0])
    return isinstance(owner, (nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d))


def test_no_decay_norm_bias_leaves_weight_decay_to_the_other_weights():
    for module in (build_backbone("r18", 16, 0.125), _Transformer()):
        found = _of_parameters(module, ParameterRule("no_decay_norm_bias"))
        for name, values in found.items():
            assert values == (1.0, 0.0 if name.endswith("bias") or _is_norm(module, name) else 0.05), name
        assert {decay for _, decay in found.values()} == {0.0, 0.05}


@pytest.mark.parametrize("own", [None, 0.01])
def test_detectron_doubles_the_rate_of_biases_without_decay_and_norms_have_their_own(own: float | None):
    module = _Transformer()
    found = _of_parameters(module, ParameterRule("detectron", 0.5, own))
    for name, values in found.items():
        if _is_norm(module, name):
            assert values == (0.5, own or 0.0), name
        else:
            assert values == ((1.0, 0.0) if name.endswith(".bias") else (1.0, 0.05)), name


def test_a_preset_stands_in_the_order_of_the_rules_and_may_have_nothing_for_one_of_its_parts():
    module = _Transformer()
    found = _of_parameters(module, ParameterRule("feature", 0.1), ParameterRule("no_decay_norm_bias"))
    assert found["feature.1.weight"] == (0.1, 0.05) and found["norm.weight"] == (1.0, 0.0)
    mobile = build_backbone("mbf", 16, 0.125)  # all its biases are those of norms
    assert any(values == (1.0, 0.0) for values in _of_parameters(mobile, ParameterRule("detectron")).values())
    with pytest.raises(ValueError, match="match 'detectron': all parameters that it matches are matched by an earlier rule"):
        _of_parameters(mobile, ParameterRule("norms"), ParameterRule("detectron"))
    with pytest.raises(ValueError, match=r"match 'no_decay_norm_bias' sets the weight decay itself; take out weight_decay 0.1"):
        _of_parameters(mobile, ParameterRule("no_decay_norm_bias", weight_decay=0.1))


def test_the_rate_falls_by_the_decay_from_layer_to_layer_as_in_beit_and_mae():
    """MAE: num_layers = blocks + 1, layer i has decay^(num_layers - i); embeddings are layer 0, block i is layer i + 1."""
    by_hand = {
        "pos_embed": 0, "mask_token": 0, "patch_embed.0.weight": 0, "patch_embed.0.bias": 0, "norm.weight": 3, "norm.bias": 3,
        **{f"blocks.{i}.{j}.{kind}": i + 1 for i in (0, 1) for j in (0, 1) for kind in ("weight", "bias")},
        **{f"feature.{j}.{kind}": 3 for j in (0, 1) for kind in ("weight", "bias")},
    }  # fmt: skip
    module = _Transformer()
    assert layer_numbers([name for name, _ in module.named_parameters()]) == (by_hand, 3)
    real, last = layer_numbers([name for name, _ in build_backbone("vit_t", 16, 0.25).named_parameters()])
    assert real["pos_embed"] == 0 and [real[f"blocks.{k}.norm1.weight"] for k in (0, 1, 11)] == [1, 2, 12]
    assert real["norm.weight"] == last == max(real.values()) == 13
    of_package = {f"network.{name}": number for name, number in {**by_hand, "conv_stem.weight": 0, "bn1.bias": 0}.items()}
    of_package["fc.weight"] = 3
    assert layer_numbers(list(of_package)) == (of_package, 3)
    found = _of_parameters(module, ParameterRule("norm", 0.1), ParameterRule("biases", weight_decay=0.0), layer_decay=0.75)
    for name, (factor, decay) in found.items():
        own = 0.1 if name.startswith("norm.") else 1.0
        assert factor == pytest.approx(own * 0.75 ** (3 - by_hand[name])), name
        assert decay == (0.0 if name.endswith(".bias") and not name.startswith("norm.") else 0.05), name


def test_the_stages_of_an_iresnet_are_layers_and_another_network_is_refused_in_a_line():
    found = _of_parameters(build_backbone("r18", 16, 0.125), layer_decay=0.5)
    expected = {"conv1.weight": 5, "bn1.bias": 5, "prelu.weight": 5, "layer1.1.conv2.weight": 4, "layer4.0.bn1.weight": 1}
    expected |= {"bn2.weight": 0, "fc.weight": 0, "features.bias": 0}
    assert {name: found[name][0] for name in expected} == {name: 0.5**power for name, power in expected.items()}
    with pytest.raises(ValueError, match=r"this backbone has no layers called blocks.N .* take it out") as error:
        _of_parameters(build_backbone("mbf", 16, 0.125), layer_decay=0.5)
    assert "\n" not in str(error.value)


def test_without_layer_decay_no_network_is_asked_for_its_layers_and_groups_are_as_before():
    optimizer = build_optimizer(build_backbone("mbf", 16, 0.125), "sgd", 0.1, 0.9, 0.05)
    assert [(group["match"], group["lr_factor"]) for group in optimizer.param_groups] == [("", 1.0)]
    assert describe_groups(optimizer)[0].startswith("optimizer, all: ")


def test_a_run_logs_the_table_of_presets_and_layers(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rules = "optimizer.rules=[{match: detectron}]"
    few = ["train.max_steps=1", "eval.targets=[]", "checkpoint.every=0", IRESNET, rules]
    assert train.main(small_run(dataset, tmp_path, *few, "optimizer.layer_decay=0.5", "optimizer.nesterov=true")) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.startswith("optimizer, ")]
    assert lines[0].startswith("optimizer, norms, layer 0 of 5: 2 parameters, 32 numbers, lr x 0.03125, weight decay 0")
    assert any(line.startswith("optimizer, biases, layer 5 of 5: 1 parameters, 16 numbers, lr x 2,") for line in lines)
    assert any(line.startswith("optimizer, layer 4 of 5: ") and "lr x 0.5, weight decay 0.0005" in line for line in lines)
    assert train.main(small_run(dataset, tmp_path, *few[:3], "optimizer.layer_decay=0.5", "run.name=other")) == 1
    assert "error: optimizer.layer_decay: this backbone has no layers called blocks.N" in capsys.readouterr().err
