"""The terms of a loss on several ranks give the gradient of the whole batch on one."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rounding import rounding_bound
from tiny_runs import REAL, small_run, tiny_run
from torch import Tensor, nn

import train
from partial_fc import head as head_module
from partial_fc.workspace import SideStream
from training import model as training_model
from training import step as training_step
from training.step import LossTerm, backward
from utils import distributed
from utils.distributed import World

pytestmark = pytest.mark.numeric

SAMPLES, DIM = 12, 5


def _gradient(world: World, rank: int, world_size: int, loss_scale: float, accumulation: int) -> tuple[float, torch.Tensor]:
    """Return the loss and the gradient of a linear layer, from two terms over all ranks."""
    torch.manual_seed(0)
    images, layer = torch.randn(SAMPLES, DIM), nn.Linear(DIM, 1)
    model = distributed.as_data_parallel(layer, world)
    share, loss = SAMPLES // (world_size * accumulation), 0.0
    for micro_step in range(accumulation):
        begin = (micro_step * world_size + rank) * share
        with distributed.gradients_shared(model, now=micro_step == accumulation - 1):
            out = model(images[begin : begin + share])
            # this rank's part of means over the global micro-batch
            head, penalty = ((each.sum() / (share * world_size)) for each in (out**2, out.abs()))
            terms = [LossTerm("head", head), LossTerm("penalty", penalty, weight=0.3)]
            values = backward(terms, world_size, loss_scale, accumulation)
            loss += (values["head"] + 0.3 * values["penalty"]) / accumulation
    assert layer.weight.grad is not None
    return loss, layer.weight.grad / loss_scale


def _compare(rank: int, world_size: int) -> None:
    alone, own = World(0, 1, 0, 1, torch.device("cpu")), World(rank, world_size, rank, world_size, torch.device("cpu"))
    _, expected = _gradient(alone, 0, 1, 1.0, 1)
    bound = rounding_bound(torch.float32, SAMPLES) * float(expected.abs().max())
    for loss_scale, accumulation in ((1.0, 1), (256.0, 1), (1.0, 2)):
        _, gradient = _gradient(own, rank, world_size, loss_scale, accumulation)
        assert float((gradient - expected).abs().max()) < 8 * bound


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_terms_of_all_ranks_add_up_to_the_gradient_of_the_whole_batch(run_ranks: Callable[..., None], world_size: int):
    run_ranks(_compare, world_size)


def test_the_gradient_is_that_of_the_weighted_sum_and_an_empty_loss_is_refused():
    weight = torch.ones(1, requires_grad=True)
    terms = [LossTerm("a", 2 * weight.sum()), LossTerm("b", 3 * weight.sum(), weight=0.5)]
    assert backward(terms, 4) == {"a": 2.0, "b": 3.0}
    assert weight.grad is not None and float(weight.grad) == 4 * (2 + 1.5)  # the mean of DDP over 4 ranks makes it 2 + 1.5
    with pytest.raises(AssertionError, match="at least one term"):
        backward([], 1)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_images_and_weights_are_channels_last_from_the_first_convolution_to_the_last(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int
):
    build, seen = training_model.build_backbone, []

    def note(module: nn.Module, given: tuple[Tensor], out: Tensor) -> None:
        if module.training:
            seen.append((given[0], module.weight, out))

    def watched(**arguments: Any) -> nn.Module:
        network = build(**arguments)
        for part in network.modules():
            if isinstance(part, nn.Conv2d):
                part.register_forward_hook(note)
        return network

    monkeypatch.setattr(training_model, "build_backbone", watched)
    settings = ("train.max_steps=1", "eval.targets=[]", "train.batch_size=4", f"train.accumulation={accumulation}", REAL)
    assert train.main(tiny_run(dataset, tmp_path, *settings)) == 0
    images, _, _ = seen[0]
    b = 4 // accumulation
    assert images.shape == (b, 3, 112, 112) and images.stride() == (3 * 112 * 112, 1, 3 * 112, 3)
    assert len(seen) > 40 * accumulation
    for given, weight, out in seen:
        assert all(part.is_contiguous(memory_format=torch.channels_last) for part in (given, weight, out))


def test_the_update_of_the_centres_waits_for_the_flag_and_the_optimizer_does_not_wait_for_the_host(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls: list[str] = []
    whole = training_step.step_if
    monkeypatch.setattr(training_step, "step_if", lambda *given: (calls.append("optimizer"), whole(*given)))
    main = SimpleNamespace(record_event=lambda: calls.append("event") or len(calls), wait_stream=lambda stream: None)
    side = SimpleNamespace(device=0, wait_event=lambda event: calls.append(f"update after {calls[event - 1]}"))
    for name, value in (("Stream", side), ("current_stream", main), ("stream", contextlib.nullcontext())):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(head_module, "SideStream", lambda device: SideStream(torch.device("cuda")))
    settings = ("train.max_steps=2", "eval.targets=[]", "train.accumulation=2")
    assert train.main(small_run(dataset, tmp_path, *settings)) == 0
    assert calls == ["event", "optimizer", "update after event"] * 2


@pytest.mark.parametrize("keep", [False, True])
def test_a_graph_that_writes_where_it_wrote_before_leaves_kept_gradients_alone(keep: bool):
    weight, written = nn.Parameter(torch.ones(3)), [torch.zeros(3)]
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.register_hook(lambda gradient: written.append(gradient.detach()))  # no reference to what autograd takes over
    for _ in range(2):
        training_step.begin_gradients(optimizer, keep)
        for _ in range(2):
            written[-1].fill_(torch.nan)
            (weight * 3).sum().backward()
        assert weight.grad is not None and (weight.grad.tolist() == [6.0] * 3) == keep
