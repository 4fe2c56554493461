"""Backward-compatible training: the old centres as a second term, which never change, in checkpoints, resumes and reshards."""

import copy
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_reference import active_classes, all_centres, dense_loss, relative
from easydict import EasyDict
from rounding import head_bounds, network_bound, rounding_bound
from tiny_runs import ended_well, error_of, read_metrics, reshard_and_back, run_program, same_bits, tiny_run, write_old_and_new
from torch import nn

import train
from backbones import build_backbone
from configs import load_config
from data import build_dataset
from data.datasets import SyntheticDataset
from data.loader import LoadedBatch
from data.sampler import SampleOrder
from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowSGD
from partial_fc.init import open_centres
from scripts import checkpoint as checkpoint_program
from training.ahead import PreparedStep
from training.compatible import COMPATIBLE
from training.model import Model
from training.setup import Task
from training.step import forward_backward
from utils import distributed
from utils.checkpoint.format import find_checkpoint, list_checkpoints
from utils.checkpoint.reading import read_backbone, shard_reader
from utils.distributed import World
from utils.optim import build_optimizer
from utils.precision import LossScaler

DIM, CLASSES, ROWS, WEIGHT, TASK_WEIGHT = 6, 9, 12, 0.7, 0.5
OLD = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(9))


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, DIM))


def _batch() -> LoadedBatch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (ROWS, 32, 32, 3), generator=generator, dtype=torch.uint8)
    images[:, :16, :16] //= 1 + torch.arange(ROWS)[:, None, None, None]
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    return LoadedBatch(images, labels, torch.zeros(ROWS, dtype=torch.bool), torch.arange(ROWS))


def _two_steps(rank: int, world_size: int, accumulation: int, loss: str, rate: float, storage: str) -> None:
    world = World(rank, world_size, rank, world_size, torch.device("cpu"))
    margin = build_margin(loss, scale=8.0)
    config = HeadConfig(rate, RowSGD(0.9, 0.1), chunk=2, inactive_rows="decay", storage=storage)
    head = PartialFC(copy.deepcopy(margin), CLASSES, DIM, rank, world_size, 3, config)
    old = head.frozen()
    old.centre_store.write_centres(slice(0, old.num_slots), OLD[torch.from_numpy(old.shard_classes())])
    old.centre_store.refresh_norms()
    before = {name: value.clone() for name, value in old.shard_state().items()}
    assert set(before) == {"centres", "inverse_norms"}
    network, batch = _network(), _batch()
    mine = torch.cat([part.chunk(world_size)[rank] for part in torch.arange(ROWS).chunk(accumulation)])
    own = LoadedBatch(*(tensor[mine] for tensor in batch[:4]))
    optimizer = build_optimizer(network, "sgd", 0.1, 0.0, 0.0)
    model = Model(network, optimizer, {"softmax": head, COMPATIBLE: old}, LossScaler(enabled=False), None, None, WEIGHT)
    order = SampleOrder(ROWS, ROWS, 0, False, "full", 1, 1)
    task = Task("softmax", EasyDict(loss={"topology": 0.0}), SyntheticDataset(2, ROWS, 0), order, 0, TASK_WEIGHT)
    parallel = distributed.as_data_parallel(network, world)
    for step in range(2):
        plans = [head.prepare(own.labels.view(accumulation, -1), step)]
        network.zero_grad()
        total, losses, _ = forward_backward(model, parallel, [task], PreparedStep(step, [own], plans), accumulation, world)
        active = distributed.all_gather_objects(active_classes(head).numpy(), world)
        if step == 0:
            _compare(margin, batch, torch.from_numpy(np.any(active, axis=0)), storage, float(total), network)
            assert set(losses) == {"softmax", COMPATIBLE}
        for one in (head, old):
            one.step(0.1)
    after = old.shard_state()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert not torch.equal(head.centres, PartialFC(margin, CLASSES, DIM, rank, world_size, 3, config).centres)


def _compare(margin: nn.Module, batch: LoadedBatch, active: torch.Tensor, form: str, total: float, network: nn.Module) -> None:
    """Compare with both softmaxes over the active classes in float64."""
    reference, pixels = _network().double(), (batch.images.permute(0, 3, 1, 2).double() - 127.5) / 127.5
    centres = [all_centres(CLASSES, DIM, seed=3), OLD]
    centres = [values.bfloat16() if form == "lean" else values for values in centres]
    both = []
    for values in centres:
        rule = copy.deepcopy(margin).double()
        rule.prepare(CLASSES, CLASSES)
        both.append(dense_loss(rule, reference(pixels), values.double(), batch.labels, active))
    expected = TASK_WEIGHT * (both[0] + WEIGHT * both[1])
    expected.backward()
    of_embeddings = 8 * rounding_bound(torch.float32, 16 * 16 + 12)
    loss_bound, gradient_bound = head_bounds(8.0, DIM, ROWS)
    assert total == pytest.approx(expected.item(), abs=2 * loss_bound + of_embeddings)
    found, wanted = network[2].weight.grad, reference[2].weight.grad
    assert found is not None and wanted is not None and relative(found, wanted) < gradient_bound + of_embeddings


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("world_size", "accumulation", "loss", "rate", "storage"),
    [
        (1, 1, "cosface", 1.0, "exact"), (1, 3, "adaface", 0.5, "exact"), (1, 1, "curricularface", 1.0, "exact"),
        (1, 2, "arcface", 0.5, "lean"), (2, 1, "arcface", 0.5, "exact"), (3, 2, "cosface", 0.6, "lean"),
    ],
)  # fmt: skip
def test_the_old_centres_are_a_term_of_the_dense_loss_and_keep_their_bits(
    run_ranks: Callable[..., None], world_size: int, accumulation: int, loss: str, rate: float, storage: str
):
    run_ranks(_two_steps, world_size, accumulation, loss, rate, storage)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `data`, a run `old` on it, `more`: its people in reverse order behind three new ones, and a map."""
    folder = tmp_path_factory.mktemp("place")
    write_old_and_new(folder)
    assert train.main(_run(folder, folder, "data", "run.name=old", "run.seed=5", "backbone.width=0.25")) == 0
    return folder


def _run(place: Path, out: Path, data: str, *more: str) -> list[str]:
    short = ["eval.targets=[]", "checkpoint.every=3", "train.max_steps=6", "head.sample_rate=0.7"]
    return tiny_run(place / data, out, *short, *more, image_size=48)


def _to_old(place: Path) -> list[str]:
    return [f"compatible.path={place / 'old'}", f"compatible.classes={place / 'map.txt'}", "init.images_per_class=3"]


def _by_label(checkpoint: Path, count: int, head: str, name: str = "centres") -> torch.Tensor:
    seed = json.loads((checkpoint / "manifest.json").read_text())["run_signature"]["seed"]
    order = PartialFC(build_margin("cosface"), count, 16, seed=seed).shard_classes()
    return shard_reader(checkpoint, head)(0, count)[name][torch.from_numpy(np.argsort(order))]


@pytest.mark.numeric
def test_a_run_takes_the_old_centres_by_label_and_resumes_on_any_ranks_to_the_same_bits(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = functools.partial(_run, place, tmp_path, "more", *_to_old(place), "compatible.weight=0.3")
    assert (ended := run_program(train.main, [run("run.name=whole")] * 2)).returncode == 0, ended.stderr
    for values in read_metrics(tmp_path / "whole").values():
        assert values["loss"] == pytest.approx(values["loss_softmax"] + 0.3 * values["loss_compatible"], rel=1e-6)
    said = f"compatible with {place / 'old'}: 12 of its class centres, and means of its embeddings for 3 other classes"
    assert said in ended.stdout and "frozen head: 15 classes" in ended.stdout and "compatible: cos+ 0." in ended.stdout
    whole = list_checkpoints(tmp_path / "whole")
    old = open_centres(place / "old").read(np.arange(12))
    frozen = _by_label(whole[0], 15, COMPATIBLE)
    assert torch.equal(frozen[3:].flip(0), old)
    # by hand: the first three images of each new person, one at a time, in the old network
    network = build_backbone("shallow", 16, 0.25, image_size=48)
    network.load_state_dict(read_backbone(find_checkpoint(place / "old")))
    network.eval()
    found = build_dataset(train.load_config(run()[0]).data, 0, None)
    for label in range(3):
        rows = np.flatnonzero(found.labels() == label)[:3]
        pixels = torch.stack([torch.from_numpy(found.pixels_and_label(int(row), 48)[0]) for row in rows])
        with torch.inference_mode():
            embeddings = nn.functional.normalize(network((pixels.permute(0, 3, 1, 2).float() - 127.5) / 127.5))
        cosine = nn.functional.cosine_similarity(embeddings.mean(0), frozen[label], dim=0)
        assert float(cosine) == pytest.approx(1, abs=rounding_bound(torch.float32, 50 * 576))
        assert float(frozen[label].norm()) == pytest.approx(float(old.norm(dim=1).mean()), rel=1e-5)

    reshard_and_back(whole[0], tmp_path / "broken")
    assert "step_00000003 after step 3" in ended_well(run_program(train.main, [run("run.name=broken")] * 2)).stdout
    last, again = whole[-1], list_checkpoints(tmp_path / "broken")[-1]
    for head in ("softmax", COMPATIBLE):
        same_bits(shard_reader(last, head)(0, 15), shard_reader(again, head)(0, 15), head)
    same_bits(read_backbone(last), read_backbone(again))
    assert torch.equal(_by_label(last, 15, COMPATIBLE), frozen)
    assert read_metrics(tmp_path / "broken")[6]["loss"] == read_metrics(tmp_path / "whole")[6]["loss"]

    assert checkpoint_program.main(["verify", str(last)]) == 0
    assert checkpoint_program.main(["reshard", str(tmp_path / "whole"), "3", str(tmp_path / "three")]) == 0
    assert (ended := run_program(train.main, [run("run.name=three", "train.max_steps=7")])).returncode == 0, ended.stderr
    assert torch.equal(_by_label(list_checkpoints(tmp_path / "three")[-1], 15, COMPATIBLE), frozen)


@pytest.mark.numeric
def test_one_two_and_three_processes_train_the_same(place: Path, tmp_path: Path):
    same, found = ["head.sample_rate=1", "train.batch_size=12", "train.accumulation=2", "train.max_steps=2"], []
    for count in (1, 2, 3):
        words = [*_to_old(place), *same, "backbone.freeze_norm=true", f"run.name=of_{count}"]
        ended_well(run_program(train.main, [_run(place, tmp_path, "more", *words)] * count))
        found.append([read_metrics(tmp_path / f"of_{count}")[2][name] for name in ("loss", "loss_compatible", "grad_norm")])
    assert found[1] == pytest.approx(found[0], rel=network_bound())
    assert found[2] == pytest.approx(found[0], rel=network_bound())


def test_a_resume_with_another_old_network_or_none_is_refused(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(place / "old", tmp_path / "old")
    run = functools.partial(_run, place, tmp_path, "data", "run.name=new", "checkpoint.every=2")
    with_old = f"compatible.path={tmp_path / 'old'}"
    assert train.main(run(with_old, "train.max_steps=2")) == 0
    ended_well(run_program(train.main, [run(f"compatible.path={old / 'old'}", "run.name=copies") for old in (place, tmp_path)]))
    assert train.main(run("train.max_steps=3")) == 1
    assert "heads compatible, softmax, this run has softmax; set tasks and compatible.path to" in capsys.readouterr().err
    shutil.rmtree(list_checkpoints(tmp_path / "old")[-1])  # the newest is now an earlier one
    assert "weights of compatible.path was" in error_of(train.main(run(with_old, "train.max_steps=3")), capsys)
    ended = run_program(train.main, [run(f"compatible.path={old / 'old'}", "run.name=copies") for old in (place, tmp_path)])
    assert ended.returncode == 1 and "compatible.path must be the same checkpoint for all processes" in ended.stderr


def test_old_networks_that_do_not_fit_are_named_with_the_key(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for words, says in (
        ([f"compatible.path={tmp_path}"], "compatible.path: no complete checkpoint at"),
        ([f"compatible.path={place / 'old'}"], "has 12 classes, the data 15; say with compatible.classes which label"),
        (["backbone.embedding_size=32", *_to_old(place)], "have 16 numbers, backbone.embedding_size is 32"),
    ):
        said = error_of(train.main(_run(place, tmp_path, "more", "run.name=not", *words)), capsys)
        assert "compatible." in said and says in said
    for words, says in (
        (["compatible.classes=a"], "compatible.classes needs compatible.path"),
        (["compatible.path=a", "tasks=[{name: a}]"], "compatible.path is for a run without tasks, got 1"),
        (["compatible.path=a", "head.sub_centers=2"], "compatible.path needs head.sub_centers=1, got 2"),
        (["compatible.weight=0"], "compatible.weight must be above 0, got 0"),
    ):
        with pytest.raises(ValueError, match=says):
            load_config("configs/base.yaml", words)


def test_the_old_centres_on_the_disk_lie_beside_the_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = HeadConfig(optimizer=RowSGD(0.0, 0.0), placement="disk")
    head = PartialFC(build_margin("cosface"), 5, 4, 0, 1, 3, config, torch.device("cpu"), tmp_path)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "full"))
    assert head.frozen(tmp_path).centres.shape == (5, 4)
