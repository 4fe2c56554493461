"""Activation checkpointing: less is kept for the backward pass, and nothing else differs, to the bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_runs import tiny_run
from torch import Tensor, nn

import train
from backbones import BACKBONES, build_backbone
from backbones.checkpointing import CheckpointedBlock, set_checkpointing
from backbones.iresnet import Block
from backbones.vit import TransformerBlock
from utils.distributed import World, as_data_parallel
from utils.distributed.sync_norm import synchronise_norms
from utils.memory import backbone_memory
from utils.optim import set_training

NAMES = ["r18", "mbf", "vit_t"]
RANDOM = {"vit_t": {"drop_path": 0.4, "mask_ratio": 0.3}}


def _pair(name: str, width: float = 0.125, synchronised: World | None = None) -> tuple[nn.Module, nn.Module]:
    """Return two equal networks, of which the second is checkpointed."""
    networks = []
    for _ in range(2):
        torch.manual_seed(0)
        networks.append(build_backbone(name, 8, width, 0.3, **RANDOM.get(name, {})).to(memory_format=torch.channels_last))
        if synchronised is not None:
            synchronise_norms(networks[-1], synchronised)
    set_checkpointing(networks[1])
    return networks[0], networks[1]


def _steps(network: nn.Module, precision: torch.dtype | None, count: int = 2, seed: int = 1) -> list[Tensor]:
    """Return the embeddings of forward and backward passes whose gradients add up, as micro-batches do."""
    torch.manual_seed(seed)
    found = []
    for _ in range(count):
        images = torch.randn(2, 3, 112, 112).to(memory_format=torch.channels_last)
        with torch.autocast("cpu", precision, enabled=precision is not None):
            embeddings = network(images)
        (embeddings * torch.randn_like(embeddings)).sum().backward()
        found.append(embeddings.detach())
    return found


def _assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, value), again in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, again), name
    for (name, parameter), again in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (parameter.grad is None) == (again.grad is None), name
        assert parameter.grad is None or torch.equal(parameter.grad, again.grad), name


@pytest.mark.parametrize(
    ("name", "precision"), [("r18", None), ("mbf", torch.bfloat16), ("vit_t", None), ("vit_t", torch.bfloat16)]
)
def test_outputs_gradients_and_statistics_are_the_same_to_the_bit(name: str, precision: torch.dtype | None):
    plain, checkpointed = _pair(name)
    calls: list[nn.Module] = []
    for block in checkpointed.modules():
        if isinstance(block, CheckpointedBlock):
            next(block.children()).register_forward_pre_hook(lambda part, _: calls.append(part))
    assert all(torch.equal(*pair) for pair in zip(_steps(plain, precision), _steps(checkpointed, precision), strict=True))
    assert all(calls.count(part) == 4 for part in calls) and len(set(calls)) >= 8  # twice in each of the passes
    _assert_same(plain, checkpointed)
    counts = {int(value) for key, value in checkpointed.state_dict().items() if key.endswith("num_batches_tracked")}
    assert counts == {2}
    calls.clear()
    with torch.no_grad():
        assert torch.equal(plain.eval()(torch.ones(1, 3, 112, 112)), checkpointed.eval()(torch.ones(1, 3, 112, 112)))
    assert all(calls.count(part) == 1 for part in calls)


def test_frozen_parts_and_frozen_statistics_are_the_same_too():
    plain, checkpointed = _pair("r18")
    for network in (plain, checkpointed):
        set_training(network, freeze_norm=True, frozen=["layer1", "conv1"])
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and not name.startswith(("layer1", "conv1")))
        _steps(network, None, count=1)
    _assert_same(plain, checkpointed)
    assert int(plain.state_dict()["layer2.0.bn1.num_batches_tracked"]) == 0


def _kept(network: nn.Module, images: Tensor) -> int:
    """Return the bytes that autograd keeps for the backward pass, without the weights."""
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = network(images)
    del output
    return sum(kept.values())


@pytest.mark.parametrize("name", NAMES)
def test_blocks_keep_their_inputs_alone_and_the_memory_model_knows(name: str):
    plain, checkpointed = (network.eval() for network in _pair(name))
    images = torch.zeros(2, 3, 112, 112).to(memory_format=torch.channels_last)
    inside: list[int] = []

    def measure(block: nn.Module, given: tuple[Tensor]) -> None:
        leaf = given[0].detach().clone().requires_grad_()
        inside.append(_kept(_Within(block), leaf) - leaf.untyped_storage().nbytes())

    blocks = [block for block in plain.modules() if isinstance(block, CheckpointedBlock)]
    before, after = _kept(plain, images), _kept(checkpointed, images)
    hooks = [block.register_forward_pre_hook(measure) for block in blocks]
    plain(images)
    for hook in hooks:
        hook.remove()
    assert len(inside) == len(blocks) and after == before - sum(inside)
    assert after < 0.5 * before
    parameters = sum(p.numel() * p.element_size() for p in checkpointed.parameters())
    model = backbone_memory(checkpointed, None, 1, 112)
    per_image = (after + max(inside)) / 2
    assert model.total(2) - 3 * parameters == pytest.approx(1.1 * 2 * per_image, rel=0.02)
    assert all(block.checkpointing for block in checkpointed.modules() if isinstance(block, CheckpointedBlock))


class _Within(nn.Module):
    def __init__(self, block: CheckpointedBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block.compute(x)


KINDS = {getattr(made, "func", made): name for name, made in reversed(BACKBONES.items())}  # class: its first name


@pytest.mark.parametrize("name", KINDS.values())
def test_every_kind_of_network_has_blocks(name: str):
    with torch.device("meta"):
        network = build_backbone(name)
    set_checkpointing(network)
    blocks = [block for block in network.modules() if isinstance(block, CheckpointedBlock)]
    assert len(blocks) >= 8 and all(block.checkpointing for block in blocks)


def _synchronised(rank: int, world_size: int) -> None:
    world = World(rank, world_size, rank, world_size, torch.device("cpu"))
    plain, checkpointed = _pair("mbf", synchronised=world)
    for network in (plain, checkpointed):
        _steps(as_data_parallel(network, world), None, seed=rank)
    _assert_same(plain, checkpointed)
    assert int(checkpointed.state_dict()["conv_sep.layers.1.num_batches_tracked"]) == 2


def test_statistics_over_all_processes_are_the_same_too(run_ranks: Callable[..., None]):
    run_ranks(_synchronised, 2)


def test_a_network_without_blocks_is_refused_before_anything_trains(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Linear(nn.Sequential):
        def __init__(self, embedding_size: int = 512, width: float = 1.0, dropout: float = 0.0) -> None:
            super().__init__(nn.Flatten(), nn.Linear(3 * 112 * 112, embedding_size))

    monkeypatch.setitem(BACKBONES, "r18", Linear)
    assert train.main(tiny_run(dataset, tmp_path, "backbone.name=r18", "backbone.checkpointing=true")) == 1
    assert capsys.readouterr().err == (
        "error: backbone.checkpointing: this backbone has no blocks that can be computed again; set it to false\n"
    )


class _TwoBlocks(nn.Module):
    """A network that compiles in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.last = nn.Conv2d(3, 16, 16, 16), Block(16, 16, 1), TransformerBlock(16, 8, 4, 0.5)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.block(self.stem(images.contiguous())).flatten(2).transpose(1, 2)).flatten(1)


def test_a_compiled_network_has_the_same_gradients_and_statistics():
    """With the back end that traces as the default one does, and then runs torch's own operators: no compiler is needed."""
    networks = []
    for _ in range(2):
        torch.manual_seed(0)
        networks.append(_TwoBlocks())
    set_checkpointing(networks[1])
    _steps(networks[0], None)
    _steps(torch.compile(networks[1], backend="aot_eager", dynamic=False), None)
    _assert_same(*networks)
    assert int(networks[1].state_dict()["block.bn1.num_batches_tracked"]) == 2
