"""LAMB against a loop over Algorithm 2 of its paper, in float64, and through a training."""

from pathlib import Path

import pytest
import torch
from rounding import rounding_bound
from tiny_runs import equal_weights, one_line, small_run
from torch import Tensor, nn

import train
from utils.checkpoint.trainer import load_optimizer
from utils.optim import ParameterRule, build_optimizer, set_learning_rate, step_if

pytestmark = pytest.mark.numeric

BETA1, BETA2, EPS = 0.9, 0.99, 1e-6


def _algorithm_2(w: Tensor, gradients: list[Tensor], rates: list[float], weight_decay: float) -> Tensor:
    """Return the weights of one layer after these steps."""
    w, m, s = w.double(), torch.zeros(w.shape, dtype=torch.float64), torch.zeros(w.shape, dtype=torch.float64)
    for k, (gradient, lr) in enumerate(zip(gradients, rates, strict=True), 1):
        g = gradient.double()
        m = BETA1 * m + (1 - BETA1) * g
        s = BETA2 * s + (1 - BETA2) * g**2
        u = (m / (1 - BETA1**k)) / ((s / (1 - BETA2**k)).sqrt() + EPS) + weight_decay * w
        norms = float(w.norm()), float(u.norm())
        trust = norms[0] / norms[1] if weight_decay > 0 and min(norms) > 0 else 1.0
        w = w - lr * trust * u
    return w


def _network() -> nn.Module:
    torch.manual_seed(3)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(6, 5))
    nn.init.zeros_(network[2].weight)  # a layer of norm 0 has the ratio 1
    return network.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("bad", [(), (0, 3)])
def test_weights_are_those_of_the_paper_and_skipped_steps_are_as_if_they_were_not(bad: tuple[int, ...]):
    network, rates = _network(), [0.1, 0.05, 0.02, 0.1, 0.01, 0.03]
    rules = [ParameterRule("no_decay_norm_bias"), ParameterRule("0", lr_factor=0.5)]
    optimizer = build_optimizer(network, "lamb", 0.1, BETA1, 0.3, BETA2, EPS, rules)
    first = {name: value.detach().clone() for name, value in network.named_parameters()}
    gradients: dict[str, list[Tensor]] = {name: [] for name in first}
    for number, lr in enumerate(rates):
        set_learning_rate(optimizer, lr)
        for name, parameter in network.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 10.0 ** (-number)
            if number in bad:
                parameter.grad.view(-1)[0] = float("nan")
            else:
                gradients[name].append(parameter.grad.clone())
        step_if(optimizer, torch.tensor(number not in bad))
        if number == 2:  # as a run that resumes: the moments go through a state of another memory layout
            state = optimizer.state_dict()
            state["state"] = {k: {n: v.clone().contiguous() for n, v in kept.items()} for k, kept in state["state"].items()}
            optimizer = build_optimizer(network, "lamb", 0.1, BETA1, 0.3, BETA2, EPS, rules)
            load_optimizer(optimizer, state, network, [n for n, _ in _in_order(network, optimizer)])
    taken = [lr for number, lr in enumerate(rates) if number not in bad]
    for name, parameter in network.named_parameters():
        decays = name in ("0.weight", "2.weight")
        factor = 0.5 if name == "0.weight" else 1.0
        expected = _algorithm_2(first[name], gradients[name], [lr * factor for lr in taken], 0.3 if decays else 0.0)
        # some twenty operations in each step, and norms of up to 108 numbers
        bound = rounding_bound(torch.float32, 20 * len(taken) + 108, float(expected.abs().max() + 1))
        assert float((parameter.detach().double() - expected).abs().max()) < bound, name
        assert float((parameter.detach() - first[name]).abs().max()) > 1e-3, name


def _in_order(network: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    names = {parameter: name for name, parameter in network.named_parameters()}
    return [(names[parameter], parameter) for group in optimizer.param_groups for parameter in group["params"]]


def test_a_layer_moves_by_the_rate_times_its_length_whatever_its_gradient():
    """What the paper is about: without weight decay in u, |w' - w| = lr |w|."""
    for size in (1e-6, 1.0, 1e6):
        network = nn.Linear(8, 8, bias=False)
        before = network.weight.detach().clone()
        optimizer = build_optimizer(network, "lamb", 0.01, 0.9, 1e-12, 0.999, 1e-12)
        network.weight.grad = size * torch.randn(8, 8)
        optimizer.step()
        assert float((network.weight.detach() - before).norm() / before.norm()) == pytest.approx(0.01, rel=1e-4)


def test_a_run_with_lamb_resumes_to_the_same_bits_and_needs_another_optimizer_for_the_centres(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    common = ["eval.targets=[]", "optimizer.name=lamb", "schedule.kind=constant", "optimizer.lr=0.02"]
    assert train.main(small_run(dataset, tmp_path, *common)) == 1
    assert one_line(capsys).startswith("error: head.optimizer must be sgd or adamw with optimizer.name=lamb")
    common += ["head.optimizer=sgd", "optimizer.rules=[{match: no_decay_norm_bias}]"]
    assert train.main(small_run(dataset, tmp_path, *common, "train.max_steps=6", "run.name=whole")) == 0
    for steps in (3, 6):
        assert train.main(small_run(dataset, tmp_path, *common, f"train.max_steps={steps}", "run.name=broken")) == 0
    equal_weights(tmp_path / "whole", tmp_path / "broken")
    capsys.readouterr()
    assert train.main(small_run(dataset, tmp_path, "eval.targets=[]", "optimizer.name=adamw", "run.name=broken")) == 1
    assert "it is of another optimizer; set optimizer.name to what it was" in capsys.readouterr().err
