"""The benchmark of the whole step: its rivals take the steps that they claim to take, and its figures add up."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rounding import rounding_bound
from torch import Tensor, nn

from backbones import build_backbone
from scripts.benchmark import arcface_torch_loop
from scripts.benchmark import train as benchmark_train
from scripts.benchmark.plain import PlainTraining
from utils import distributed
from utils.distributed import World

# a processor without bf16 units multiplies matrices in bf16 more slowly than it convolves, and takes minutes
FP32 = ["--precision", "fp32"]
TINY = [*FP32, "--backbone=mbf", "--width=1", "--batch-size=4", "--classes=40", "--steps=1", "--rounds=1", "--threads=1"]
CLASSES, DIM, BATCH = 6, 8, 4
CHECKOUT = {
    "backbones/__init__.py": "from torch import nn\n"
    "def get_model(name, dropout, fp16, num_features):\n"
    "    assert name == 'mbf' and not fp16\n"
    "    return nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten(), nn.Linear(4 * 14 * 14, num_features))\n",
    "losses.py": "def CombinedMarginLoss(s, m1, m2, m3, threshold):\n    return s\n",
    "partial_fc_v2.py": "import torch\n"
    "class PartialFC_V2(torch.nn.Linear):\n"
    "    def __init__(self, scale, dim, classes, rate, fp16):\n"
    "        super().__init__(dim, classes)\n"
    "    def forward(self, embeddings, labels):\n"
    "        return torch.nn.functional.cross_entropy(super().forward(embeddings).cuda(), labels)\n",
}


def _write_checkout(folder: Path, **changed: str) -> Path:
    """Write a folder with the files and the interfaces of arcface_torch that its loop uses."""
    for name, text in {**CHECKOUT, **changed}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_the_report_has_all_loops_and_its_figures_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, reference = tmp_path / "train.json", _write_checkout(tmp_path / "reference")
    assert benchmark_train.main([*TINY, "--reference", str(reference), "--json", str(file)]) == 0
    found, out = json.loads(file.read_text()), capsys.readouterr().out
    rows = {row["loop"]: row for row in found["rows"]}
    assert list(rows) == ["ours", "plain", "reference"] and all(name in out for name in ("arcface_torch", "communication"))
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["step_seconds"] / rows["ours"]["step_seconds"])  # of the only round
        assert row["step_seconds_range"] == [row["step_seconds"]] * 2
        assert row["images_per_second"] == pytest.approx(4 / row["step_seconds"]) and row["peak_gib"] > 0.1
    assert set(found["parts"]) == set(benchmark_train.PARTS)
    assert all(found["parts"][part] > 0 for part in ("data", "forward", "backward", "head", "optimizer"))
    useful = found["useful"]
    assert useful["tflops"] == pytest.approx(useful["gflop_per_image"] * rows["ours"]["images_per_second"] / 1e3)
    assert useful["share"] == pytest.approx(useful["tflops"] / useful["peak_tflops"]) and useful["share"] > 0
    for part, share in useful["part_shares"].items():
        assert re.search(rf"^  {part} .* % +{100 * share:.0f} %$", out, re.M)


@pytest.mark.parametrize(("name", "image_size"), [("r18", 112), ("r18", 48), ("vit_t", 112)])
def test_useful_operations_are_of_convolutions_and_products_thrice(monkeypatch: pytest.MonkeyPatch, name: str, image_size: int):
    monkeypatch.setattr(benchmark_train, "measured_rates", lambda dtype, device: (2.0, 1.0))
    numbers = {"width": 0.5, "image_size": image_size, "classes": 100, "batch_size": 10, "processes": 1}
    options = argparse.Namespace(backbone=name, precision="fp32", **numbers)
    found = benchmark_train._useful(options, 0.5, {"forward": 0.1, "backward": 0.25, "head": 0.05}, torch.device("cpu"))
    with torch.device("meta"):
        network = build_backbone(name, 512, 0.5, image_size=image_size)
    operations = []

    def note(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        operations.append(2 * out[0].numel() * module.weight[0].numel())

    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(note)
    network(torch.empty(2, 3, image_size, image_size, device="meta"))
    if name == "vit_t":  # two products of 12 layers between all 129 tokens that are not masked, of 128 numbers
        operations += [2 * 129 * 129 * 128] * 2 * 12
    # forward, gradient of the input, gradient of the weight; images need no gradient
    expected = 3 * sum(operations) - operations[0] + 6 * 100 * 512
    assert found["gflop_per_image"] == pytest.approx(expected / 1e9)
    assert found["share"] == pytest.approx(expected * 10 / 0.5 / 2e12)
    shares = (sum(operations) / 0.1, (2 * sum(operations) - operations[0]) / 0.25, 6 * 100 * 512 / 0.05)
    assert list(found["part_shares"].values()) == pytest.approx([share * 10 / 2e12 for share in shares])


def _plain_step_equals_autograd(rank: int, world_size: int) -> None:
    world = World(rank, world_size, rank, world_size, torch.device("cpu"))
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(3 * 7 * 7, DIM))
    for parameter in backbone.parameters():
        parameter.data *= 256  # longer embeddings have smaller gradients, which are not clipped
    torch.manual_seed(1 + rank)
    training = PlainTraining(backbone, CLASSES, DIM, BATCH // world_size, world)
    centres = torch.cat(distributed.all_gather_objects(training.head.weight.detach().clone(), world)).double()
    images, labels = (torch.cat(distributed.all_gather_objects(part, world)) for part in (training.images, training.labels))
    weight, bias = (parameter.detach().double().requires_grad_() for parameter in backbone.parameters())
    embeddings = F.linear(F.avg_pool2d(images.double(), 16).flatten(1), weight, bias)
    cosine = F.normalize(embeddings) @ F.normalize(centres).t()
    rows = torch.arange(BATCH)
    logits = 64 * cosine.index_put((rows, labels), torch.cos(torch.acos(cosine[rows, labels]) + 0.5))
    F.cross_entropy(logits, labels).backward()
    assert weight.grad is not None and bias.grad is not None
    assert float(torch.cat([weight.grad.flatten(), bias.grad]).norm()) < 4.9
    expected = (weight - 0.01 * (weight.grad + 5e-4 * weight)).detach()
    training.step()
    updated, before = backbone[2].weight.detach().double(), weight.detach()
    bound = 0.01 * rounding_bound(torch.float32, 3 * 7 * 7 * DIM, 64.0) + 2**-24 * float(expected.abs().max())
    assert float((updated - expected).abs().max()) < bound
    assert float((expected - before).abs().max()) > 10 * bound  # it moved by far more than that


@pytest.mark.numeric
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_of_the_plain_loop_is_that_of_the_dense_softmax(run_ranks: Callable[..., None], world_size: int):
    run_ranks(_plain_step_equals_autograd, world_size)


def test_the_plain_loop_has_none_of_our_activations():
    world = World(0, 1, 0, 1, torch.device("cpu"))
    training = PlainTraining(build_backbone("r18", DIM, 0.125), CLASSES, DIM, 2, world)
    activations = [module for module in training.backbone.modules() if isinstance(module, nn.PReLU)]
    assert len(activations) == 9 and all(type(module) is nn.PReLU for module in activations)


def test_a_part_within_a_part_is_counted_once(monkeypatch: pytest.MonkeyPatch):
    now = 0.0

    def takes(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(benchmark_train, "clock", lambda device: now)
    watch, owner = benchmark_train._Stopwatch(torch.device("cpu")), SimpleNamespace(inner=lambda: takes(2.0))
    with watch.timed("head", owner, "inner"), watch.part("other"):
        takes(1.0)
        owner.inner()
        takes(4.0)
    takes(8.0)
    owner.inner()  # no longer counted
    assert watch.seconds == {"other": 5.0, "head": 2.0}


def test_what_the_reference_cannot_do_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert benchmark_train.main([*TINY, "--reference", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: --reference: no file ") and said.endswith("give the folder recognition/arcface_torch\n")
    folder = _write_checkout(tmp_path, **{"losses.py": "import a_missing_module\n"})
    assert benchmark_train.main([*TINY, "--width", "0.5", "--reference", str(folder)]) == 1
    assert "--reference needs --width 1" in capsys.readouterr().err
    assert benchmark_train.main([*TINY, "--image-size", "48", "--reference", str(folder)]) == 1
    assert "--reference needs --image-size 112" in capsys.readouterr().err
    command = [sys.executable, arcface_torch_loop.__file__, str(folder), "{}"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: --reference {folder}: ModuleNotFoundError: No module named 'a_missing_module'\n"


def test_a_loop_that_cannot_start_ends_the_benchmark_with_its_reason(capsys: pytest.CaptureFixture[str]):
    assert benchmark_train.main([*TINY, "--set", "train.epochs=-1"]) == 1
    said = capsys.readouterr().err
    assert said == "error: the loop ours ended: train.epochs must be above 0, got -1.0\n"
