"""Several tasks on one backbone, each with images, classes, margin and head of its own: gradients, checkpoints and resuming."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from dense_reference import all_centres, dense_loss, relative
from easydict import EasyDict
from rounding import head_bounds, rounding_bound
from tiny_runs import ended_well, face, read_metrics, reshard_and_back, run_program, same_bits, tiny_run, write_dataset
from torch import Tensor, nn

import train
from data.datasets import SyntheticDataset
from data.loader import LoadedBatch
from data.sampler import SampleOrder
from deploy.card.facts import data_facts, recipe_facts
from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowSGD
from partial_fc.centres.shard import slots_of_classes
from partial_fc.init import open_centres
from scripts import checkpoint as checkpoint_program
from scripts.arcface_torch import export_checkpoint
from scripts.eval import compare_runs
from training.ahead import PreparedStep
from training.model import Model
from training.setup import Task, batch_sizes
from training.step import forward_backward
from training.teachers import Teacher
from utils import distributed
from utils.checkpoint.format import list_checkpoints, read_manifest
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
        self.layer = nn.Linear(12, DIM + 10)

    def forward(self, images: Tensor, landmarks: Tensor) -> Tensor:
        return self.layer(nn.functional.adaptive_avg_pool2d(images, 2).flatten(1))


def _teacher() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, DIM))


def _batches() -> dict[str, LoadedBatch]:
    generator = torch.Generator().manual_seed(1)
    batches = {}
    for name, classes in CLASSES.items():
        images = torch.randint(0, 256, (SAMPLES[name], 112, 112, 3), generator=generator, dtype=torch.uint8)
        images[:, :56, :56] //= 1 + torch.arange(SAMPLES[name])[:, None, None, None]  # means that differ
        labels = torch.randint(0, classes, (SAMPLES[name],), generator=generator)
        flags, points = torch.zeros(SAMPLES[name], dtype=torch.bool), torch.rand(SAMPLES[name], 5, 2, generator=generator)
        points[1, 2] = torch.nan  # was not found
        batches[name] = LoadedBatch(images, labels, flags, torch.arange(SAMPLES[name]), points)
    return batches


def _dense() -> tuple[dict[str, float], Tensor, dict[str, Tensor]]:
    """Return the losses, the gradient of the layer and the centres after a step, in float64, all classes and samples here."""
    network, losses, total = _Network().double(), {"landmarks": 0.0, "teacher_embedding": 0.0}, torch.zeros(())
    centres = {name: all_centres(classes, DIM, seed=3).double().requires_grad_() for name, classes in CLASSES.items()}
    for name, batch in _batches().items():
        pixels = (batch.images.permute(0, 3, 1, 2).double() - 127.5) / 127.5
        assert batch.landmarks is not None
        output = network(pixels, batch.landmarks)
        loss = dense_loss(MARGINS[name], output[:, :DIM], centres[name], batch.labels)
        losses[name], total = loss.item(), total + WEIGHTS[name] * loss
        error = (output[:, DIM:].view(-1, 5, 2) - batch.landmarks).abs().nan_to_num()
        losses["landmarks"] += error.sum().item() / (10 * sum(SAMPLES.values()))
        cosine = torch.cosine_similarity(output[:, :DIM], _teacher().double()(pixels).detach())
        losses["teacher_embedding"] += (1 - cosine).sum().item() / sum(SAMPLES.values())
        total = total + error.sum() / (10 * sum(SAMPLES.values())) + 3 * (1 - cosine).sum() / sum(SAMPLES.values())
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
    teacher = Teacher(_teacher(), 112, DIM, "", 0, {"teacher_embedding": 3.0}, False, "")
    optimizer = build_optimizer(network, "sgd", RATE, 0.0, 0.0)
    model = Model(network, optimizer, heads, LossScaler(enabled=False), None, teacher=teacher)
    order = SampleOrder(12, 12, 0, False, "full", 1, 1)
    own = EasyDict(loss={"topology": 0.0})
    tasks = [Task(name, own, SyntheticDataset(2, 12, 0), order, 0, WEIGHTS[name]) for name in CLASSES]
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
        for other in ("landmarks", "teacher_embedding"):
            assert float(found[other]) == pytest.approx(losses[other], abs=of_embeddings)
        moved, should = head.centres.double(), centres[name][torch.from_numpy(head.shard_classes())]
        first = all_centres(CLASSES[name], DIM, seed=3)[torch.from_numpy(head.shard_classes())].double()
        assert float((moved - should).norm()) < (gradient_bound + of_embeddings) * float((should - first).norm())
    together = found["softmax"] + 0.5 * found["second"] + found["landmarks"] + 3 * found["teacher_embedding"]
    assert float(total) == pytest.approx(float(together))
    assert network.layer.weight.grad is not None
    assert relative(network.layer.weight.grad, gradient) < head_bounds(8.0, DIM, 1)[1] + of_embeddings


@pytest.mark.numeric
@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_two_heads_train_one_backbone_as_two_dense_ones(run_ranks: Callable[..., None], world_size: int, accumulation: int):
    run_ranks(_one_step, world_size, accumulation)


def test_sets_with_a_map_and_a_task_of_one_entry_train_as_one_merged_set(tmp_path: Path):
    """Two sets whose people have other numbers, joined by a file; the merged set is one list of all images."""
    people = {"a": [0, 1, 2, 3, 4, 0, 1, 2], "b": [3, 5, 0, 6, 3, 5, 0, 6, 2, 4]}  # person 4 of b is somebody else
    numbers = {"a": list(range(5)), "b": [5, 3, 1, 4, 0, 2, 6]}  # of each person of b in its list
    merged, number = [], 0
    for name, persons in people.items():
        lines = []
        for person in persons:
            (tmp_path / f"{number}.jpg").write_bytes(face(10 * (name == "b" and person == 4) + person, number))
            lines.append(f"{number}.jpg {numbers[name][person]}")
            merged.append(f"{number}.jpg {7 if name == 'b' and person == 4 else person}")
            number += 1
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    maps = [f"0 {label} {label}" for label in range(5)]
    maps += [f"1 {label} {7 if person == 4 else person}" for person, label in enumerate(numbers["b"])]
    (tmp_path / "map.txt").write_text("\n".join(maps))
    (tmp_path / "merged.txt").write_text("\n".join(merged))
    lists = ", ".join(f"{{source: list, path: {tmp_path}/{name}.txt}}" for name in people)
    both = ("data.path=", f"data.sources=[{lists}]", f"data.labels={tmp_path}/map.txt")
    ways = {
        "merged": ("data.source=list", f"data.path={tmp_path}/merged.txt"),
        "joined": both,
        "one": (*both, "tasks=[{name: softmax}]"),
    }
    for count, names in ((1, list(ways)), (2, ["merged", "joined"])):
        for name in names:
            shared = ["head.sample_rate=0.5", "eval.targets=[]", "train.max_steps=6", "train.accumulation=2", *ways[name]]
            run = functools.partial(tiny_run, tmp_path, tmp_path, *shared, image_size=48, batch_size=12)
            ended_well(run_program(train.main, [run(f"run.name={name}_{count}")] * count))
        first, *others = (_ends(tmp_path / f"{name}_{count}", {"softmax": 8}) for name in names)
        assert first["softmax.centres"].shape == (8, 16)
        for other in others:
            same_bits(first, other)
        if count == 2:
            reshard_and_back(list_checkpoints(tmp_path / "joined_2")[0], tmp_path / "broken")
            assert "after step 4" in ended_well(run_program(train.main, [run("run.name=broken")] * 2)).stdout
            same_bits(first, _ends(tmp_path / "broken", {"softmax": 8}))


DRAWN = "data: {source: synthetic, num_classes: 9, num_images: 30}, loss: {name: arcface}"
TWO = f"tasks=[{{name: first}}, {{name: second, batch_size: 4, weight: 0.5, {DRAWN}}}]"  # beside the 12 people of the file


def _ends(run: Path, heads: dict[str, int]) -> dict[str, Tensor]:
    newest = list_checkpoints(run)[-1]
    rows = {name: shard_reader(newest, name)(0, classes) for name, classes in heads.items()}
    return {**read_backbone(newest), **{f"{head}.{name}": value for head, by in rows.items() for name, value in by.items()}}


def test_a_run_on_two_sets_saves_both_heads_and_resumes_to_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_dataset(tmp_path)
    shared = [TWO, "head.sample_rate=0.5", "eval.targets=[]", "checkpoint.every=3", "train.max_steps=6"]
    run, heads = functools.partial(tiny_run, tmp_path, tmp_path, *shared, image_size=48), {"first": 12, "second": 9}
    assert (ended := run_program(train.main, [run("run.name=whole")] * 2)).returncode == 0, ended.stderr
    assert "task first: 4 images of each step, 0.5 of the loss" in ended.stdout and "21 classes" in ended.stdout
    assert "first: head: 12 classes" in ended.stdout and "second: first loss " in ended.stdout
    reshard_and_back(list_checkpoints(tmp_path / "whole")[0], tmp_path / "broken")
    (tmp_path / "copy").mkdir()  # of another machine
    write_dataset(tmp_path / "copy")
    ended = run_program(train.main, [run("run.name=broken", *more) for more in ([], [f"data.path={tmp_path}/copy"])])
    assert ended.returncode == 0 and "step_00000003 after step 3" in ended.stdout, ended.stderr
    names = {path.name for path in list_checkpoints(tmp_path / "broken")[-1].iterdir()}
    assert {f"{head}_0000{rank}_of_00002.safetensors" for head in heads for rank in (0, 1)} < names
    whole = _ends(tmp_path / "whole", heads)
    assert "second.momentum" in whole
    same_bits(whole, _ends(tmp_path / "broken", heads))
    last = read_metrics(tmp_path / "whole")[6]
    assert read_metrics(tmp_path / "broken")[6]["loss"] == last["loss"] > 0
    assert last["loss"] == pytest.approx(0.5 * last["loss_first"] + 0.25 * last["loss_second"], rel=1e-5)
    # the program for checkpoints knows of both
    assert checkpoint_program.main(["verify", str(tmp_path / "whole")]) == 0
    assert checkpoint_program.main(["reshard", str(tmp_path / "whole"), "3", str(tmp_path / "again")]) == 0
    same_bits(whole, _ends(tmp_path / "again", heads))
    merge = ["merge", str(tmp_path / "whole"), str(tmp_path / "second.pt")]
    assert checkpoint_program.main(merge) == 1
    assert "it has the heads first, second, got no name. face checkpoint merge --head NAME writes" in capsys.readouterr().err
    assert export_checkpoint.main([str(tmp_path / "whole"), str(tmp_path / "exported")]) == 1
    assert "its network was trained with tasks, and arcface_torch has one head" in capsys.readouterr().err
    assert checkpoint_program.main([*merge, "--head", "third"]) == 1
    assert "got third; face checkpoint show lists them" in capsys.readouterr().err
    assert checkpoint_program.main([*merge, "--head", "second"]) == 0
    seed = read_manifest(list_checkpoints(tmp_path / "whole")[-1])["run_signature"]["tasks"]["second"]["seed"]
    by_label = whole["second.centres"][torch.from_numpy(slots_of_classes(np.arange(9), 9, seed))]
    assert torch.equal(torch.load(tmp_path / "second.pt"), nn.functional.normalize(by_label, dim=-1, eps=1e-12))
    newest = list_checkpoints(tmp_path / "again")[-1]
    manifest = (newest / "manifest.json").read_text()
    (newest / "manifest.json").write_text(manifest.replace("second_00001_of_00003", "other_00001_of_00003"))
    (newest / "second_00001_of_00003.safetensors").rename(newest / "other_00001_of_00003.safetensors")
    capsys.readouterr()
    assert checkpoint_program.main(["verify", str(newest)]) == 1
    assert "second: class slots 3 to 5 are in no file" in capsys.readouterr().out
    ended = run_program(train.main, [run("run.name=again", "train.max_steps=7")])
    assert ended.returncode == 1 and "second: class slots 3 to 5 are in no file" in ended.stderr
    alone = json.loads(manifest)
    alone["files"] = {name: entry for name, entry in alone["files"].items() if not name.startswith("second")}
    (newest / "manifest.json").write_text(json.dumps(alone))
    assert checkpoint_program.main(["verify", str(newest)]) == 1
    assert "second: class slots 0 to 8 are in no file" in capsys.readouterr().out
    assert checkpoint_program.main([*merge[:1], str(newest), str(tmp_path / "none.pt"), "--head", "second"]) == 1


def test_one_task_is_a_run_without_tasks_to_the_bit(dataset: Path, tmp_path: Path):
    shared = ["eval.targets=[]", "train.max_steps=3", "head.sample_rate=0.5"]
    alone = tiny_run(dataset, tmp_path, *shared, "run.name=alone", image_size=48)
    assert (ended := run_program(train.main, [alone])).returncode == 0, ended.stderr
    given = ["data.path=''", "head.sample_rate=1", "loss.margin=0.4"]  # which the task says itself
    task = f"tasks=[{{name: softmax, data: {{path: {dataset}}}, head: {{sample_rate: 0.5}}, loss: {{margin: 0.2}}}}]"
    as_task = tiny_run(dataset, tmp_path, *shared, *given, task, "run.name=task", image_size=48)
    assert (ended := run_program(train.main, [as_task])).returncode == 0, ended.stderr
    one, other = (_ends(tmp_path / name, {"softmax": 12}) for name in ("alone", "task"))
    same_bits(one, other)
    config = read_manifest(list_checkpoints(tmp_path / "task")[-1])["config"]
    config["data"] = {"source": "folder", "flip": False}  # of no task
    known = dict([*data_facts(config, {}), *recipe_facts(config, 3, {})])  # of the model card
    assert "sample_rate=0.5" in known["head of softmax"] and "margin=0.2" in known["loss of softmax"] and "head" not in known
    assert known["kind"] == "recordio" and "mirrored" in known["augmentation"]


def test_a_run_on_two_sets_begins_with_the_heads_of_one_that_had_them(dataset: Path, tmp_path: Path):
    shared = ["eval.targets=[]", "train.max_steps=1", "init.new_classes=random"]
    run = functools.partial(tiny_run, dataset, tmp_path, *shared, image_size=48)
    assert run_program(train.main, [run(TWO, "run.name=old")]).returncode == 0
    old = f"init.backbone={tmp_path / 'old'}", f"init.head={tmp_path / 'old'}"
    (tmp_path / "map").write_text("".join(f"{label} {11 - label}\n" for label in range(12)))  # labels of the first alone
    for name, more in (("both", []), ("mapped", [f"init.classes={tmp_path / 'map'}", "optimizer.lr=0"])):
        ended = ended_well(run_program(train.main, [run(TWO, f"run.name={name}", *old, *more)]))
        assert "class centres: 21 kept, 0 from images, 0 at random" in ended.stdout
    centres, mapped = (open_centres(tmp_path / name, "first").read(np.arange(12)) for name in ("old", "mapped"))
    assert torch.equal(mapped, centres.flip(0)) and not torch.equal(mapped, centres)
    ended = ended_well(run_program(train.main, [run(TWO.replace("second", "third"), "run.name=third", *old)]))
    assert "class centres: 12 kept, 0 from images, 9 at random" in ended.stdout
    whole = run_program(train.main, [run(TWO, "run.name=whole", "train.max_steps=0", "train.epochs=1")])
    assert "finished 7 steps" in ended_well(whole).stdout  # an epoch has the 30 images of both sets
    runs = [str(tmp_path / name) for name in ("both", "third")]
    assert compare_runs.main([*runs, "--out", str(tmp_path / "table")]) == 0
    assert "tasks.second.head.sample_rate" in (tmp_path / "table" / "comparison.md").read_text()
    ended = run_program(train.main, [run("run.name=alone", *old)])
    assert ended.returncode == 1 and "init.head: " in ended.stderr and "it has the heads first, second" in ended.stderr


def test_a_run_on_two_sets_does_not_begin_with_a_checkpoint_of_one(dataset: Path, tmp_path: Path):
    assert run_program(train.main, [tiny_run(dataset, tmp_path, "eval.targets=[]", "train.max_steps=1")]).returncode == 0
    ended = run_program(train.main, [tiny_run(dataset, tmp_path, TWO, "eval.targets=[]", "train.max_steps=2")])
    assert ended.returncode == 1 and "num_classes was 12, this run has 21" in ended.stderr


def test_the_batch_is_shared_by_the_numbers_of_images():
    assert batch_sizes([0, 0], [300, 100], 1024) == [768, 256]
    assert batch_sizes([0, 0, 0], [1_000_000, 1000, 1], 1024) == [896, 64, 64]  # each has a sixteenth
    assert batch_sizes([256, 0, 0], [1, 500, 100], 1024) == [256, 640, 128]
    assert batch_sizes([0], [7], 30) == [30] and batch_sizes([10, 0], [7, 7], 30) == [10, 20]


WRONG = {
    "3": "tasks must be a list of entries like {name, batch_size, weight, data, head, loss}, got 3",
    "[{name: A}]": "tasks[0].name must be letters a to z, digits and _, as part of a file name, got 'A'",
    "[{name: a}, {name: a}]": "tasks[0].name must be its own, and no other part of a checkpoint, got 'a'",
    "[{name: ema}]": "tasks[0].name must be its own, and no other part of a checkpoint, got 'ema'",
    "[{name: a, weight: 0}]": "tasks[0].weight must be above 0 and at most 1e6, got 0.0",
    "[{name: a, batch_size: 4}, {name: b, batch_size: 2}]": "their batch_size add up to 6, train.batch_size is 8",
    "[{name: a, batch_size: 8}, {name: b}]": "of train.batch_size=8, 0 images are left for the 1 tasks without a batch_size",
    "[{name: a, data: {image_size: 64}}]": "tasks[0].data.image_size must be that of all tasks, 48, got 64",
    "[{name: a, head: {schedule: cosine}}]": "tasks[0].head.schedule must be that of all tasks, same, got cosine",
    "[{name: a, heads: {}}]": "tasks[0]: no key 'heads'. Did you mean head?",
    "[{name: a, sample_rate: 0.5}]": "tasks[0]: no key 'sample_rate'. Did you mean head.sample_rate?",
    "[{name: a, head: {sampel_rate: 1}}]": "tasks[0]: no key 'head.sampel_rate'. Did you mean head.sample_rate?",
    "[{name: a, loss: {m2: 0.5}}]": "tasks[0]: no key 'loss.m2'",
    "[{name: a, head: {stages: [{steps: 1, scale: 0}]}}]": "tasks: a: head.stages: from step 1 on loss.scale must be",
    "[{name: a, head: {sample_rate: 0}}]": "tasks: a: head.sample_rate must be above 0, got 0",
    "[{name: a, data: {path: nowhere}}]": "tasks: a: data.path: ",
    "[{name: a, batch_size: 7}, {name: b, batch_size: 1}]": "tasks: b has 1 of the images of each step: its batch_size, "
    "images per optimizer step, must be a multiple of 1 train.accumulation x 1 processes, with 2 images or more each, got 1. "
    "Valid choices: in a new run, its batch_size: 2",
}


@pytest.mark.parametrize("tasks", WRONG)
def test_wrong_tasks_are_one_line(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tasks: str):
    assert train.main([*tiny_run(dataset, tmp_path, f"tasks={tasks}", "eval.targets=[]", image_size=48), "--check"]) == 1
    assert WRONG[tasks] in capsys.readouterr().err


def test_tasks_are_printed_as_they_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train.main([*tiny_run(tmp_path, tmp_path, TWO), "--print-config"]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(printed)
    assert train.main([str(tmp_path / "again.yaml"), "--print-config"]) == 0
    assert capsys.readouterr().out == printed
    first, second = yaml.safe_load(printed)["tasks"]
    assert first["loss"]["name"] == "cosface" and second["loss"] | {"name": "arcface", "scale": 16.0} == second["loss"]
    assert first["head"] == second["head"] == yaml.safe_load(printed)["head"]


def test_the_example_of_the_page_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (block,) = re.findall(r"```yaml\n(train: .*?)```", (Path(__file__).parents[1] / "docs" / "data.md").read_text(), re.S)
    (tmp_path / "two.yaml").write_text(block)
    assert train.main([str(tmp_path / "two.yaml"), "--print-config"]) == 0
    asia, web = yaml.safe_load(capsys.readouterr().out)["tasks"]
    assert (asia["name"], asia["batch_size"], asia["weight"], asia["head"]["sample_rate"]) == ("asia", 256, 0.5, 1.0)
    assert (web["batch_size"], web["weight"], web["head"]["sample_rate"], web["loss"]["name"]) == (0, 1.0, 0.1, "cosface")


@pytest.mark.parametrize("value", ["3", '[{"name": "a"}]', '[{"name": 1, "data": {}, "head": {}, "loss": {}}]'])
def test_hostile_tasks_of_a_manifest_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str):
    write_dataset(tmp_path, 8)
    assert run_program(train.main, [tiny_run(tmp_path, tmp_path, "eval.targets=[]", "train.max_steps=1")]).returncode == 0
    path = list_checkpoints(tmp_path / "tiny")[-1] / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["config"]["tasks"] = json.loads(value)
    path.write_text(json.dumps(manifest))
    assert checkpoint_program.main(["verify", str(tmp_path / "tiny")]) == 1
    assert "config.tasks must be a list of objects with name, data, head and loss" in capsys.readouterr().out
