"""Several tasks on one backbone, each with images, classes, margin and head of its own: gradients, checkpoints and resuming."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dense_reference import all_centres, dense_loss, relative
from rounding import head_bounds, rounding_bound
from tiny_runs import read_metrics, run_program, tiny_run, write_dataset
from torch import Tensor, nn

import train
from data.base import FaceDataset
from data.datasets import SyntheticDataset
from data.loader import LoadedBatch
from data.sampler import SampleOrder
from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowSGD
from scripts import checkpoint as checkpoint_program
from training.ahead import PreparedStep
from training.model import Model
from training.setup import Setup, Task, set_up
from training.step import forward_backward
from utils import distributed
from utils.checkpoint.format import list_checkpoints
from utils.checkpoint.reading import read_backbone, shard_reader
from utils.distributed import World
from utils.optim import build_optimizer
from utils.precision import LossScaler

DIM, CLASSES = 6, {"softmax": 7, "second": 5}
MARGINS = {"softmax": build_margin("arcface", scale=8.0, margin=0.3), "second": build_margin("cosface", scale=4.0, margin=0.2)}
WEIGHTS, SAMPLES = {"softmax": 1.0, "second": 0.5}, {"softmax": 12, "second": 6}  # of the global batch
RATE = 0.1


class _Network(nn.Module):
    """One linear layer over the mean colours of four quarters of an image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(12, DIM)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(nn.functional.adaptive_avg_pool2d(images, 2).flatten(1))


def _batches() -> dict[str, LoadedBatch]:
    generator = torch.Generator().manual_seed(1)
    batches = {}
    for name, classes in CLASSES.items():
        images = torch.randint(0, 256, (SAMPLES[name], 112, 112, 3), generator=generator, dtype=torch.uint8)
        images[:, :56, :56] //= 1 + torch.arange(SAMPLES[name])[:, None, None, None]  # means that differ
        labels = torch.randint(0, classes, (SAMPLES[name],), generator=generator)
        batches[name] = LoadedBatch(images, labels, torch.zeros(SAMPLES[name], dtype=torch.bool))
    return batches


def _dense() -> tuple[dict[str, float], Tensor, dict[str, Tensor]]:
    """Return the losses, the gradient of the layer and the centres after a step, in float64, all classes and samples here."""
    network, losses, total = _Network().double(), {}, torch.zeros(())
    centres = {name: all_centres(classes, DIM, seed=3).double().requires_grad_() for name, classes in CLASSES.items()}
    for name, batch in _batches().items():
        pixels = (batch.images.permute(0, 3, 1, 2).double() - 127.5) / 127.5
        loss = dense_loss(MARGINS[name], network(pixels), centres[name], batch.labels)
        losses[name], total = loss.item(), total + WEIGHTS[name] * loss
    total.backward()
    gradient = network.layer.weight.grad
    assert gradient is not None
    # the weight of a task slows the backbone's part of it alone: its head has a loss and a rate of its own
    steps = {name: value.grad / WEIGHTS[name] for name, value in centres.items() if value.grad is not None}
    return losses, gradient, {name: value.detach() - RATE * steps[name] for name, value in centres.items()}


def _one_step(rank: int, world_size: int, accumulation: int) -> None:
    world = World(rank, world_size, rank, world_size, torch.device("cpu"))
    network, config = _Network(), HeadConfig(optimizer=RowSGD(0.0, 0.0), chunk=2)
    heads = {name: PartialFC(MARGINS[name], CLASSES[name], DIM, rank, world_size, 3, config) for name in CLASSES}
    model = Model(network, build_optimizer(network, "sgd", RATE, 0.0, 0.0), heads, LossScaler(enabled=False), None)
    order = SampleOrder(12, 12, 0, False, "full", 1, 1)
    tasks = [Task(name, SyntheticDataset(2, 12, 0), order, WEIGHTS[name]) for name in CLASSES]
    batches = []
    for batch in _batches().values():  # micro-batch by micro-batch, rank by rank, as SampleOrder gives them
        mine = [part.chunk(world_size)[rank] for part in torch.arange(len(batch.labels)).chunk(accumulation)]
        batches.append(LoadedBatch(*(tensor[torch.cat(mine)] for tensor in batch)))
    parallel = distributed.as_data_parallel(network, world)
    plans = [head.prepare(b.labels.view(accumulation, -1), 0) for head, b in zip(heads.values(), batches, strict=True)]
    total, found, _ = forward_backward(model, parallel, tasks, PreparedStep(0, batches, plans), accumulation, world)
    for head in heads.values():
        head.step(RATE)
    losses, gradient, centres = _dense()
    # an embedding is a sum of 12 products of means over 56 x 56 pixels; a logit is up to 8 times a cosine of embeddings
    of_embeddings = 8 * rounding_bound(torch.float32, 56 * 56 + 12)
    for name, head in heads.items():
        loss_bound, gradient_bound = head_bounds(8.0, DIM, SAMPLES[name])
        assert float(found[name]) == pytest.approx(losses[name], abs=loss_bound + of_embeddings)
        moved, should = head.centres.double(), centres[name][torch.from_numpy(head.shard_classes())]
        first = all_centres(CLASSES[name], DIM, seed=3)[torch.from_numpy(head.shard_classes())].double()
        assert float((moved - should).norm()) < (gradient_bound + of_embeddings) * float((should - first).norm())
    assert float(total) == pytest.approx(float(found["softmax"] + 0.5 * found["second"]))
    assert network.layer.weight.grad is not None
    assert relative(network.layer.weight.grad, gradient) < head_bounds(8.0, DIM, 1)[1] + of_embeddings


@pytest.mark.numeric
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_two_heads_train_one_backbone_as_two_dense_ones(run_ranks: Callable[..., None], world_size: int, accumulation: int):
    run_ranks(_one_step, world_size, accumulation)


def _with_a_second_task(config: object) -> Setup:
    """Return what train.py sets up, and a task of 30 drawn images of 9 people beside it."""
    setup = set_up(config)
    dataset: FaceDataset = SyntheticDataset(9, 30, seed=1)
    return setup._replace(tasks=[*setup.tasks, Task("second", dataset, SampleOrder(30, 8, 5, True, "full", 1, 1), 0.5)])


def train_on_two(arguments: list[str]) -> int:
    """Run train.py with a second task."""
    train.set_up = _with_a_second_task
    return train.main(arguments)


def _ends(run: Path) -> dict[str, Tensor]:
    newest = list_checkpoints(run)[-1]
    rows = {name: shard_reader(newest, name)(0, classes) for name, classes in (("softmax", 12), ("second", 9))}
    return {**read_backbone(newest), **{f"{head}.{name}": value for head, by in rows.items() for name, value in by.items()}}


def test_a_run_with_two_heads_saves_both_and_resumes_to_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_dataset(tmp_path)
    shared = ["head.sample_rate=0.5", "eval.targets=[]", "checkpoint.every=3", "train.max_steps=6"]
    run = functools.partial(tiny_run, tmp_path, tmp_path, *shared, image_size=48)
    assert (ended := run_program(train_on_two, [run("run.name=whole")] * 2)).returncode == 0, ended.stderr
    shutil.copytree(tmp_path / "whole", tmp_path / "broken")
    shutil.rmtree(list_checkpoints(tmp_path / "broken")[-1])
    ended = run_program(train_on_two, [run("run.name=broken")] * 2)
    assert ended.returncode == 0 and "step_00000003 after step 3" in ended.stdout, ended.stderr
    names = {path.name for path in list_checkpoints(tmp_path / "broken")[-1].iterdir()}
    assert {f"{head}_0000{rank}_of_00002.safetensors" for head in ("softmax", "second") for rank in (0, 1)} < names
    whole, broken = _ends(tmp_path / "whole"), _ends(tmp_path / "broken")
    assert "second.momentum" in whole and all(torch.equal(broken[name], value) for name, value in whole.items())
    assert read_metrics(tmp_path / "broken")[6]["loss"] == read_metrics(tmp_path / "whole")[6]["loss"] > 0
    # the program for checkpoints knows of both
    assert checkpoint_program.main(["verify", str(tmp_path / "whole")]) == 0
    assert checkpoint_program.main(["reshard", str(tmp_path / "whole"), "3", str(tmp_path / "again")]) == 0
    again = _ends(tmp_path / "again")
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    newest = list_checkpoints(tmp_path / "again")[-1]
    manifest = (newest / "manifest.json").read_text()
    (newest / "manifest.json").write_text(manifest.replace("second_00001_of_00003", "other_00001_of_00003"))
    (newest / "second_00001_of_00003.safetensors").rename(newest / "other_00001_of_00003.safetensors")
    capsys.readouterr()
    assert checkpoint_program.main(["verify", str(newest)]) == 1
    assert "second: class slots 3 to 5 are in no file" in capsys.readouterr().out
    ended = run_program(train_on_two, [run("run.name=again", "train.max_steps=7")])
    assert ended.returncode == 1 and "second: class slots 3 to 5 are in no file" in ended.stderr


def test_a_run_with_two_heads_does_not_begin_with_a_checkpoint_of_one(tmp_path: Path):
    write_dataset(tmp_path)
    assert run_program(train.main, [tiny_run(tmp_path, tmp_path, "eval.targets=[]", "train.max_steps=1")]).returncode == 0
    ended = run_program(train_on_two, [tiny_run(tmp_path, tmp_path, "eval.targets=[]", "train.max_steps=2")])
    assert ended.returncode == 1
    assert "its trainer.pt does not fit this run: it has the margins of the heads softmax, this run has" in ended.stderr
