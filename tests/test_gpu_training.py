"""Training on a GPU: no step waits for it, precisions, overflows, batches and checkpoints beside it. CI runs it on the CPU."""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rounding import network_bound
from test_data_loader import Numbered
from tiny_runs import read_metrics, tiny_run
from torch import Tensor

import train
from data import loader as loader_module
from data.loader import Loader
from data.sampler import SampleOrder
from losses import build_margin
from partial_fc import HeadConfig, PartialFC
from training import model as model_module
from training import step as step_module
from utils.checkpoint.format import SOFTMAX, checkpoint_path, list_checkpoints
from utils.checkpoint.reading import check_hashes, read_backbone, shard_reader
from utils.checkpoint.writer import CheckpointWriter, RetentionPolicy, Shard
from utils.distributed import World
from utils.precision import LossScaler

PRECISIONS = ["fp32", "bf16", "fp16"]


def _run(dataset: Path, output: Path, device: torch.device, *overrides: str) -> list[str]:
    return tiny_run(dataset, output, f"run.device={device.type}", "eval.targets=[]", "train.epochs=100", *overrides)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("more", [[], ["head.sample_rate=0.5"], ["head.sample_rate=0.5", "head.storage=tiny"]])
def test_a_warm_step_makes_no_call_that_waits_for_the_gpu(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, more: list[str]
):
    """CUDA's own word for it; tests/test_training_late.py counts such calls on the CPU."""
    whole, checked = train.train_step, []

    def train_step(config: Any, tasks: Any, model: Any, parallel: Any, prepared: Any, *others: Any) -> Any:
        warm = prepared.number >= 4  # the steps before compile kernels, choose algorithms and allocate
        torch.cuda.set_sync_debug_mode("error" if warm else "default")
        try:
            result = whole(config, tasks, model, parallel, prepared, *others)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        checked.append(warm)
        return result

    monkeypatch.setattr(train, "train_step", train_step)
    few = ["train.max_steps=10", "checkpoint.every=0", "log.every=50", "train.accumulation=2", f"train.precision={precision}"]
    assert train.main(_run(dataset, tmp_path, torch.device("cuda"), *few, *more)) == 0
    assert checked == [False] * 4 + [True] * 6


def _backbone(folder: Path) -> Tensor:
    """Return the parameters of the newest checkpoint's backbone, in one row."""
    weights = read_backbone(list_checkpoints(folder)[-1])
    return torch.cat([weights[name].flatten().double() for name in sorted(weights) if name.endswith(("weight", "bias"))])


@pytest.mark.parametrize(
    ("place", "precision"), [("cpu", "fp32"), *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in PRECISIONS)]
)
def test_a_run_learns_and_a_resumed_one_goes_on_as_the_whole_one(dataset: Path, tmp_path: Path, place: str, precision: str):
    device = torch.device(place)
    few = [f"train.precision={precision}", "checkpoint.every=12", "schedule.power=0", "train.max_steps=14"]
    assert train.main(_run(dataset, tmp_path, device, *few, "run.name=whole")) == 0
    losses = [record["loss"] for record in read_metrics(tmp_path / "whole").values()]
    assert len(losses) == 14 and sum(losses[-4:]) < 0.9 * sum(losses[:4])
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(checkpoint_path(tmp_path / "part", 14))
    middle = _backbone(tmp_path / "part")
    assert train.main(_run(dataset, tmp_path, device, *few, "run.name=part")) == 0
    whole, resumed = _backbone(tmp_path / "whole") - middle, _backbone(tmp_path / "part") - middle
    # without its momentum, or with other images, it would go another way. A GPU adds in another order each time, and the more
    # steps there are, the more that changes
    assert (resumed - whole).norm() < (0 if device.type == "cpu" else 0.25) * whole.norm() + 1e-12
    assert whole.norm() > 1e-3 * middle.norm()


NEIGHBOURS = ["head.sampling=neighbours", "head.neighbours_every=1", "head.sample_rate=0.5"]
OTHERS = [["head.sub_centers=3", "train.ema=0.5"], ["train.compile=default"], ["train.compile=reduce-overhead"]]


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("place", "more"),
    [("cpu", NEIGHBOURS), *(pytest.param("cuda", more, marks=pytest.mark.gpu) for more in (NEIGHBOURS, *OTHERS))],
)
def test_a_gpu_trains_and_evaluates_as_a_cpu(dataset: Path, tmp_path: Path, place: str, more: list[str]):
    few = ["backbone.name=one_block", "optimizer.lr=0.01", "train.max_steps=3", "train.accumulation=2"]
    found = []
    for name, here in (("expected", "cpu"), ("found", place)):
        own = [word for word in more if here == place or "compile" not in word]
        assert train.main(tiny_run(dataset, tmp_path, *few, *own, f"run.device={here}", f"run.name={name}")) == 0
        losses = [record["loss"] for record in read_metrics(tmp_path / name).values()]
        found.append([*losses, read_metrics(tmp_path / name, "tiny")[3]["xnorm"]])
    assert len(found[0]) == 4 and found[0] == pytest.approx(found[1], abs=16 * network_bound())  # 16 is loss.scale


def test_an_overflow_of_fp16_moves_nothing_and_halves_the_scale(
    device: torch.device, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole_pass, whole_step = step_module.forward_backward, train.train_step
    moved: list[bool] = []
    # the scaler at work in fp32 on the CPU, where fp16 takes a second per step; no other step overflows
    monkeypatch.setattr(model_module, "LossScaler", lambda enabled, device: LossScaler(True, initial=256.0, device=device))

    def forward_backward(model: Any, parallel: Any, tasks: Any, prepared: Any, *more: Any) -> Any:
        result = whole_pass(model, parallel, tasks, prepared, *more)
        if prepared.number == 3:
            gradient = next(model.backbone.parameters()).grad
            gradient[0, 0, 0, 0] = torch.inf
        return result

    def train_step(config: Any, tasks: Any, model: Any, *more: Any) -> Any:
        head = model.heads[SOFTMAX]
        before = [tensor.clone() for tensor in (*model.backbone.parameters(), *head.shard_state().values())]
        result = whole_step(config, tasks, model, *more)
        after = [*model.backbone.parameters(), *head.shard_state().values()]
        moved.append(any(not torch.equal(*pair) for pair in zip(before, after, strict=True)))
        return result

    monkeypatch.setattr(step_module, "forward_backward", forward_backward)
    monkeypatch.setattr(train, "train_step", train_step)
    precision = "fp16" if device.type == "cuda" else "fp32"
    few = [f"train.precision={precision}", "train.max_steps=6", "checkpoint.every=0", "log.every=1"]
    assert train.main(_run(dataset, tmp_path, device, *few)) == 0
    scales = [record["loss_scale"] for record in read_metrics(tmp_path / "tiny").values()]
    assert scales == [256.0] * 3 + [128.0] * 3 and moved == [True] * 3 + [False] + [True] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("held", [1, 2])
def test_no_batch_is_torn_by_a_slow_copy_or_a_slow_reader(monkeypatch: pytest.MonkeyPatch, held: int, apart: bool):
    """The CPU, whose batches are the decoders' memory itself, has such tests in tests/test_data_loader.py."""
    whole = loader_module._Shipping.start

    def start(self: Any, job: Any) -> Any:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(3_000_000)  # some 2 ms
        return whole(self, job)

    monkeypatch.setattr(loader_module._Shipping, "start", start)
    order, cuda = SampleOrder(1000, batch_size=16, seed=4, flip=True), torch.device("cuda", torch.cuda.current_device())
    found: list[Tensor] = []
    held_batches: list[Any] = []
    for step, batch in enumerate(Loader(Numbered(), order.samples, 0, 60, 3, 3, cuda, held=held, apart=apart)):
        held_batches = [*held_batches[1 - held :], batch] if held > 1 else [batch]
        if step % 3 == 0:
            torch.cuda._sleep(6_000_000)  # the batch is read long after it was asked for
        oldest = held_batches[0]
        pixels = oldest.images.flatten(1)
        found.append(torch.stack([pixels.amin(dim=1).long(), pixels.amax(dim=1).long(), oldest.mirrored.long()]))
        assert oldest.labels.tolist() == order.samples(max(0, step - len(held_batches) + 1)).indices.tolist()
    for step, numbers in enumerate(found):
        samples = order.samples(max(0, step - held + 1))
        low, high, mirrored = numbers.cpu()
        expected = torch.from_numpy(samples.indices % 256)
        assert torch.equal(low, expected) and torch.equal(high, expected), step
        assert mirrored.bool().tolist() == samples.mirrored.tolist(), step


@contextlib.contextmanager
def _growth() -> Iterator[SimpleNamespace]:
    """Yield an object whose `bytes` become the most by which this process's memory grew in the block: resident, or pinned."""

    def now() -> tuple[int, int]:
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        pinned = getattr(torch.cuda, "host_memory_stats", dict)() if torch.cuda.is_available() else {}
        return resident, pinned.get("allocated_bytes.current", 0)

    before, found, ended = now(), SimpleNamespace(bytes=0), threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            found.bytes = max(found.bytes, *(after - first for after, first in zip(now(), before, strict=True)))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def test_a_save_beside_training_has_the_bytes_of_its_step_and_the_memory_of_one_copy(device: torch.device, tmp_path: Path):
    if not Path("/proc/self/statm").is_file():
        pytest.skip("needs Linux, to see the memory of this process")
    num_classes, dim = (400_000, 512) if device.type == "cuda" else (60_000, 512)
    margin = build_margin("cosface", scale=64.0, margin=0.4)
    head = PartialFC(margin, num_classes, dim, config=HeadConfig(storage="lean", sample_rate=0.1), device=device)
    x = torch.randn(16, dim, generator=torch.Generator().manual_seed(0)).to(device)

    def step(number: int) -> None:
        head.begin_step(torch.arange(16)[None] + number, number)
        head(x)
        head.step(0.1)

    for number in range(3):
        step(number)
    world = World(0, 1, 0, 1, device)
    facts = {"score": None, "run_signature": {"num_classes": num_classes, "seed": 0}}
    size = sum(tensor.nbytes for tensor in head.shard_state().values())
    number, steps_beside = 3, []
    with CheckpointWriter(tmp_path, world, RetentionPolicy(last=9, best=0), warn=pytest.fail) as writer, _growth() as growth:
        for save in (1, 2):  # the second one reuses the memory of the first
            if save == 2:
                grown = growth.bytes
                expected = {name: tensor.clone().cpu() for name, tensor in head.shard_state().items()}
            writer.save(save, {SOFTMAX: Shard(head.shard_state(), (0, num_classes))}, facts)
            begun = number
            while writer.is_writing:
                step(number)
                number += 1
                time.sleep(0.001)
            steps_beside.append(number - begun)
            writer.finish()
    assert min(steps_beside) > 0
    if device.type == "cpu":
        assert grown > 0.9 * size  # so that the next line says something
    assert grown < 1.5 * size  # a second copy would make it two
    saved = shard_reader(checkpoint_path(tmp_path, 2))(0, num_classes)
    assert check_hashes(checkpoint_path(tmp_path, 2)) == [] and saved.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(saved[name], expected[name])] == []
    assert not torch.equal(saved["centres"], head.centres.cpu())  # training went on meanwhile
