import pytest
import torch
from torch import nn

from backbones import build_backbone
from utils.checkpoint.trainer import load_optimizer
from utils.optim import ParameterRule, build_optimizer, set_learning_rate, step_if, unscale_and_clip_grad_norm_


def _net(gradient_scale: float = 1.0) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        parameter.grad = gradient_scale * torch.randn(parameter.shape, generator=generator)
    return net


LIMITS = [(0.0, 0.0), (0.0, 0.5), (0.0, 100.0), (0.7, 0.0), (0.7, 1.5), (100.0, 0.5)]


@pytest.mark.numeric
@pytest.mark.parametrize(("clip_value", "clip_norm"), LIMITS)
def test_scaled_gradients_come_out_as_torch_clips_the_plain_ones(clip_value: float, clip_norm: float):
    """First each number, then the norm."""
    plain, scaled = _net(), _net(1024.0)
    expected_norm = nn.utils.get_total_norm([parameter.grad for parameter in plain.parameters()])
    nn.utils.clip_grad_value_(plain.parameters(), clip_value or float("inf"))
    nn.utils.clip_grad_norm_(plain.parameters(), clip_norm or float("inf"))
    norm = unscale_and_clip_grad_norm_(scaled.parameters(), torch.tensor(1024.0), clip_norm, clip_value)
    torch.testing.assert_close(norm, expected_norm)
    for a, b in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.numeric
def test_nesterovs_momentum_is_torchs_and_rates_and_decay_are_those_of_the_rules():
    ours, theirs = _net(), _net()
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(ours, "sgd", 0.5, 0.9, 0.01, rules=[ParameterRule("0", 0.1)], nesterov=True)
    groups = [{"params": theirs[0].parameters(), "lr": 0.05}, {"params": theirs[1].parameters()}]
    by_torch = torch.optim.SGD(groups, 0.5, 0.9, weight_decay=0.01, nesterov=True)
    _three_steps_are_alike(ours, optimizer, theirs, by_torch)


def _three_steps_are_alike(ours: nn.Module, optimizer: torch.optim.Optimizer, theirs: nn.Module, expected: torch.optim.SGD):
    for _ in range(3):
        set_learning_rate(optimizer, 0.5)
        optimizer.step()
        expected.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_one_bad_gradient_shows_in_the_norm(bad: float):
    net = _net()
    next(net.parameters()).grad[0, 0] = bad
    assert not unscale_and_clip_grad_norm_(net.parameters(), 1.0, 5.0, 0.0).isfinite()


def test_frozen_parameters_stay_out_of_the_optimizer():
    net = _net()
    net[0].weight.requires_grad_(False)
    groups = build_optimizer(net, "sgd", 0.1, 0.9, 0.0).param_groups
    assert sum(p.numel() for group in groups for p in group["params"]) == 3 + 6 + 2
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter is trainable"):
        build_optimizer(net, "sgd", 0.1, 0.9, 0.0)


RULES = [
    ParameterRule("norms", weight_decay=0.0),
    ParameterRule("biases", lr_factor=2.0, weight_decay=0.0),
    ParameterRule("*.prelu.weight", weight_decay=0.0),
    ParameterRule("layer3.1", 0.5),
    ParameterRule("layer3", 0.1),
]


def _expected_rule(path: str, owner: nn.Module) -> tuple[float, float]:
    """Return the factor and the weight decay that RULES give a parameter, by the kind of its module and its name."""
    if isinstance(owner, (nn.BatchNorm1d, nn.BatchNorm2d)):
        return 1.0, 0.0
    if path.endswith(".bias"):
        return 2.0, 0.0
    if isinstance(owner, nn.PReLU) and path.count(".") > 1:
        return 1.0, 0.0
    return (0.5 if path.startswith("layer3.1.") else 0.1 if path.startswith("layer3.") else 1.0), 5e-4


def test_each_parameter_is_in_the_group_of_the_first_rule_that_matches_it():
    backbone = build_backbone("r18", 16, 0.125)
    optimizer = build_optimizer(backbone, "sgd", 0.1, 0.9, 5e-4, rules=RULES)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in backbone.named_parameters()}
    names = {parameter: name for name, parameter in backbone.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found[names[parameter]].append((group["lr_factor"], group["weight_decay"]))
    for name, parameter in backbone.named_parameters():
        owner = backbone.get_submodule(name.rpartition(".")[0])
        assert found[name] == ([_expected_rule(name, owner)] if parameter.requires_grad else []), name
    assert [group["match"] for group in optimizer.param_groups] == [*(rule.match for rule in RULES), ""]
    assert len({tuple(values) for values in found.values()}) == 6  # the test reaches all of them, and what does not train


@pytest.mark.numeric
def test_rules_move_the_parameters_as_groups_made_by_hand():
    """No weight decay on biases, as in most recipes of vision transformers, and a slow first layer."""
    ours, theirs = _net(), _net()
    theirs.load_state_dict(ours.state_dict())
    rules = [ParameterRule("biases", weight_decay=0.0), ParameterRule("0", lr_factor=0.1)]
    optimizer = build_optimizer(ours, "sgd", 0.5, 0.9, 0.01, rules=rules)
    groups = [
        {"params": [theirs[0].bias, theirs[1].bias], "weight_decay": 0.0},
        {"params": [theirs[0].weight], "lr": 0.05},
        {"params": [theirs[1].weight]},
    ]
    _three_steps_are_alike(ours, optimizer, theirs, torch.optim.SGD(groups, 0.5, 0.9, weight_decay=0.01))


@pytest.mark.numeric
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_moments_that_were_saved_in_another_layout_go_on_alike(name: str):
    """The fused step reads memory as it lies: contiguous moments of a channels-last weight would be taken for other ones."""
    ends = []
    for contiguous in (False, True):
        torch.manual_seed(0)
        module = nn.Conv2d(5, 4, 3).to(memory_format=torch.channels_last)
        optimizer = build_optimizer(module, name, 0.1, 0.9, 0.0)
        for number in range(4):
            if number == 2:
                state = optimizer.state_dict()
                if contiguous:
                    state["state"] = {k: {n: v.contiguous() for n, v in m.items()} for k, m in state["state"].items()}
                optimizer = build_optimizer(module, name, 0.1, 0.9, 0.0)
                load_optimizer(optimizer, state, module)
            module.zero_grad()
            module(torch.randn(2, 5, 6, 6).to(memory_format=torch.channels_last)).square().sum().backward()
            optimizer.step()
        ends.append(module.weight.detach().clone())
    assert torch.equal(*ends)


@pytest.mark.numeric
@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
def test_a_step_that_is_not_good_changes_nothing_and_the_others_are_as_without_it(name: str):
    """The first one too: torch would keep moments that nothing ever wrote."""
    ends = []
    for flags in ([False, True, False, True], [True, True]):
        net = _net()
        net.load_state_dict({key: torch.full_like(value, 0.5) for key, value in net.state_dict().items()})
        optimizer = build_optimizer(net, name, 0.1, 0.9, 0.01)
        for good in flags:
            before = [parameter.detach().clone() for parameter in net.parameters()]
            step_if(optimizer, torch.tensor(good))
            assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True)) != good
        ends.append(
            [*net.parameters(), *(m["momentum_buffer" if name == "sgd" else "exp_avg"] for m in optimizer.state.values())]
        )
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
