"""BatchNorm over several ranks against torch's over the whole batch on one."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rounding import network_bound
from tiny_runs import IRESNET, ended_well, read_metrics, run_train, tiny_run
from torch import Tensor, nn

import train
from backbones import build_backbone
from utils.checkpoint.format import list_checkpoints
from utils.checkpoint.reading import read_backbone
from utils.distributed import World
from utils.distributed.sync_norm import SyncBatchNorm, synchronise_norms

pytestmark = pytest.mark.numeric


def _network() -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 16, 4), nn.BatchNorm1d(4)
    ).double()
    for norm in (network[1], network[5]):
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.uniform_(norm.bias)
    return network


def _step(network: nn.Module, images: Tensor, weights: Tensor, total: int) -> Tensor:
    """Return the outputs of two steps with images and with their negatives, of which the gradients are added up."""
    out = torch.cat([network(images), network(1 - 3 * images)])
    ((out * weights).sum() / total).backward()
    return out.detach()


def _compare(rank: int, world_size: int) -> None:
    world = World(rank, world_size, rank, world_size, torch.device("cpu"))
    images, weights = torch.randn(6, 3, 6, 6, dtype=torch.float64) + 2, torch.randn(12, 4, dtype=torch.float64)
    dist.broadcast(images, 0) if world_size > 1 else None
    dist.broadcast(weights, 0) if world_size > 1 else None
    whole, own = _network(), _network()
    synchronise_norms(own, world)
    assert sum(isinstance(part, SyncBatchNorm) for part in own.modules()) == (2 if world_size > 1 else 0)
    assert own.state_dict().keys() == whole.state_dict().keys()
    b = 6 // world_size
    mine = slice(rank * b, rank * b + b)
    whole_images, own_images = images.clone().requires_grad_(), images[mine].clone().requires_grad_()
    expected = _step(whole, whole_images, weights, 1)
    found = _step(own, own_images, torch.cat([weights[:6][mine], weights[6:][mine]]), 1)
    torch.testing.assert_close(found, torch.cat([expected[:6][mine], expected[6:][mine]]))
    torch.testing.assert_close(own_images.grad, whole_images.grad[mine])
    for (name, a), b_ in zip(own.named_parameters(), whole.parameters(), strict=True):
        if world_size > 1:
            dist.all_reduce(a.grad)
        torch.testing.assert_close(a.grad, b_.grad, msg=lambda text, name=name: f"{name}: {text}")
    for name, value in own.state_dict().items():
        torch.testing.assert_close(value, whole.state_dict()[name], msg=lambda text, name=name: f"{name}: {text}")
    if world_size > 1:  # why there is one of our own
        with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
            nn.SyncBatchNorm(3)(images[mine].float())
    for network in (own, whole):
        network.eval()
    torch.testing.assert_close(own(images), whole(images))
    assert torch.equal(copy.deepcopy(own)(images), own(images))
    half = own[1].float().train()
    values = images[mine].bfloat16()[:, [0, 1, 2, 0, 1]]
    out = half(values)
    assert out.dtype == torch.bfloat16 and half.running_mean.dtype == torch.float32


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_outputs_gradients_and_statistics_are_those_of_the_batch_on_one_rank(run_ranks: Callable[..., None], world_size: int):
    run_ranks(_compare, world_size)


def test_a_run_with_synchronised_statistics_is_the_same_on_any_number_of_processes(dataset: Path, tmp_path: Path):
    """Without them the loss of three processes differs by more than rounding explains."""
    losses, weights = {}, {}
    for count in (1, 3):
        overrides = ["train.batch_size=12", "train.max_steps=1", "eval.targets=[]", IRESNET, f"run.name=n{count}"]
        arguments = tiny_run(dataset, tmp_path, *overrides, "backbone.sync_norm=true")
        if count == 1:
            assert train.main(arguments) == 0
        else:
            ended_well(run_train(count, arguments))
        losses[count] = read_metrics(tmp_path / f"n{count}")[1]["loss"]
        weights[count] = read_backbone(list_checkpoints(tmp_path / f"n{count}")[-1])
    bound = 16 * network_bound()  # a logit is 16, the scale, times a cosine, which is a product of outputs
    assert abs(losses[3] - losses[1]) < bound
    for name in ("bn1.running_mean", "layer4.1.bn3.running_var", "features.running_mean"):
        ours, theirs = weights[3][name], weights[1][name]
        assert float((ours - theirs).norm() / theirs.norm()) < 2 * network_bound(), name
    assert weights[1].keys() == build_backbone("r18", 16, 0.125).state_dict().keys() == weights[3].keys()


def test_a_compiled_backbone_with_synchronised_statistics_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train.main(tiny_run(tmp_path, tmp_path, "backbone.sync_norm=true", "train.compile=default")) == 1
    assert "backbone.sync_norm=true needs train.compile=off, got default" in capsys.readouterr().err
