"""What a run is set up with: processes, tasks, verification sets, folder. Every mistake is reported before anything trains."""

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from easydict import EasyDict

from configs import as_plain, shared_settings, task_configs
from data import build_dataset
from data.augment import Augment
from data.base import FaceDataset
from data.datasets import open_set
from data.loader import Loader
from data.mixture import MixedDataset
from data.sampler import SampleOrder, check_batch
from eval.monitor import check_metric, check_names, load_protocols
from eval.protocol import Protocol, Result
from partial_fc.kernels.cpu import compiled_folder
from utils.checkpoint.format import SOFTMAX
from utils.checkpoint.resume import prepare_run_folder
from utils.distributed import World, choose_device, init_distributed, raise_on_all_ranks
from utils.distributed.agreement import require_equal, require_same_program
from utils.distributed.patience import patiently
from utils.precision import agreed_precision, set_tf32, slow_precision
from utils.randomness import derive
from utils.schedule import Schedule, steps_of
from utils.text import first_line, prefix_errors

from .compatible import old_network
from .teachers import Teacher, open_teacher


class Task(NamedTuple):
    """Identities to tell apart, and the images of them: a head of its own is trained on each task."""

    name: str  # of its head, and of the head's files in a checkpoint
    config: EasyDict  # of the run, with the sections `data`, `head` and `loss` of the task
    dataset: FaceDataset  # of config.data
    order: SampleOrder  # which sample stands at which place of which step
    seed: int  # of the order, the augmentation and the head
    weight: float = 1.0  # factor on its loss


class Setup(NamedTuple):
    """A run before its first step."""

    world: World
    precision: str  # of the backbone: train.precision, but what this machine is fast at for auto
    compile: str  # train.compile, but what is best here for auto
    tasks: list[Task]  # an epoch has as many images as all of them together
    protocols: list[Protocol[Result]]
    share: dict[str, int]  # this rank's part of each global batch
    total_steps: int
    epochs_per_step: float
    schedule: Schedule  # of the backbone's learning rate
    head_schedule: Schedule  # of the class centres', before head.lr_factor
    folder: Path
    facts: dict[str, Any]  # what its checkpoints tell of it
    resume_from: Path | None
    warnings: list[str]
    teacher: Teacher | None


def set_up(config: EasyDict, processes: int = 0, machines: int = 1) -> Setup:
    """Start the processes' group, open data and verification sets, make the run folder, and choose the checkpoint to resume.

    Args:
        processes: 0 = train; else only look, alone, for the first of so many processes on each of the machines.

    Raises:
        SharedError: on every rank, naming what is wrong.
    """
    if processes:
        choose_device(config.run.device, processes - 1, "run.device=")
        world = World(0, 1, 0, processes, choose_device(config.run.device, 0))
    else:  # one minute beyond the watchdog, which reports first
        world = init_distributed(config.run.device, config.run.threads, config.run.timeout_minutes + 1)
    count = processes * machines or world.world_size
    set_tf32(config.train.tf32)
    unlike = require_same_program(shared_settings(as_plain(config)), world)
    settled = as_plain(config)  # for the run's files, which name what it computes in
    precision = settled["train"]["precision"] = agreed_precision(config.train.precision, world)
    with raise_on_all_ranks(world):
        check_compile(config.train.compile, world.device)
    for first in (True, False):  # one process of each machine parses the data, the others map what it found
        with raise_on_all_ranks(world), patiently(world, "reading the data"):
            if (world.local_rank == 0) is first:
                tasks, protocols = open_data(config, count)
    with raise_on_all_ranks(world), patiently(world, "reading the teacher"):
        teacher = open_teacher(config, tasks[0].dataset)
    seen: dict[str, int | str] = {} if teacher is None else {"hash of the teacher": teacher.identity}
    prints = {task.name: task.dataset.fingerprint() for task in tasks}
    for name, found in prints.items():
        seen |= {key if len(tasks) == 1 else f"{name}: {key}": value for key, value in found.items()}
    for protocol in protocols:
        seen |= protocol.fingerprint()
    require_equal(
        seen, world, "data.path, data.landmarks, eval.path, teacher.path must be the same for all processes; copy them again"
    )
    with raise_on_all_ranks(world):
        old = old_network(config.compatible.path)
    require_equal(old, world, "compatible.path must be the same checkpoint for all processes; copy it again")
    batch_size, num_images = config.train.batch_size, sum(task.dataset.num_images for task in tasks)
    facts = {"run_signature": {**signature_of(config, tasks, prints, teacher), **old}, "config": settled}
    total_steps = config.train.max_steps or steps_of(config.train.epochs, num_images, batch_size)
    with raise_on_all_ranks(world):
        schedules = build_schedules(config, total_steps, num_images / batch_size)
    folder = Path(config.run.output) / config.run.name
    plan = prepare_run_folder(folder, config.checkpoint, bool(processes), facts["run_signature"], world)
    share = {"rank": world.rank, "world_size": count, "accumulation": config.train.accumulation}
    length = (total_steps, batch_size / num_images, *schedules)
    warnings = [line for task in tasks for line in task.dataset.warnings] + [*unlike, *plan.warnings]
    mode, slower = choose_compile(config, world.device, count, total_steps)
    settled["train"]["compile"] = mode
    warnings += slower + slow_precision("train.precision=", precision, world.device)
    return Setup(world, precision, mode, tasks, protocols, share, *length, folder, facts, plan.checkpoint, warnings, teacher)


def signature_of(
    config: EasyDict, tasks: list[Task], prints: dict[str, dict[str, int | str]], teacher: Teacher | None
) -> dict[str, Any]:
    """Return what a checkpoint must have been trained on to be resumed; `prints` are the fingerprints of the tasks' data."""
    several = {}
    for task in tasks:
        counts = {"num_classes": task.dataset.num_classes, "num_images": task.dataset.num_images}
        labels = prints[task.name]["hash of the labels"]
        several[task.name] = {**counts, "batch_size": task.order.batch_size, "seed": task.seed, "labels": labels}
        points = prints[task.name].get("hash of the landmarks")
        several[task.name] |= {"landmarks": points} if points else {}
    first = several[tasks[0].name]
    return {
        "backbone": [config.backbone.name, config.backbone.embedding_size, config.backbone.get("width", 1.0)],
        "num_classes": sum(task["num_classes"] for task in several.values()),
        "num_images": sum(task["num_images"] for task in several.values()),
        "batch_size": config.train.batch_size,
        "seed": config.run.seed,
        "labels": first["labels"],
        "image_size": config.data.image_size,
        "lora": [config.backbone.lora_rank, config.backbone.lora_alpha] if config.backbone.lora_rank else [],
        **({"tasks": several} if config.tasks else {}),
        **{key: value for key, value in first.items() if key == "landmarks"},
        **({} if teacher is None else {"teacher": teacher.identity}),
    }


def build_schedules(config: EasyDict, total_steps: int, steps_per_epoch: float) -> tuple[Schedule, Schedule]:
    """Return the schedules of backbone and centres; ValueError if the warm-up takes all steps, or a milestone lies in it."""
    given, peak = config.schedule, config.optimizer.lr
    warmup = given.warmup_steps or round(given.warmup_epochs * steps_per_epoch)
    milestones = tuple(int(step) for step in given.milestone_steps)
    milestones = milestones or tuple(round(epoch * steps_per_epoch) for epoch in given.milestones)
    if len(set(milestones)) < len(milestones):
        raise ValueError(f"schedule.milestones {list(given.milestones)} are at the steps {list(milestones)}; move them apart")
    if given.warmup_steps >= total_steps and not config.train.max_steps:
        raise ValueError(f"schedule.warmup_steps must be below the {total_steps} steps, got {given.warmup_steps}; set fewer")
    if milestones and milestones[0] < warmup:
        raise ValueError(
            f"schedule: the first milestone is step {milestones[0]}, before the end of the warm-up, {warmup} steps; shorten "
            "the warm-up or move the milestone"
        )
    kind = given.kind if config.head.schedule == "same" else config.head.schedule
    backbone = Schedule(given.kind, peak, total_steps, warmup, given.power, given.min_lr, milestones, given.factor)
    return backbone, backbone._replace(kind=kind)


def open_loaders(config: EasyDict, setup: Setup, start_step: int) -> list[Loader]:
    """Return the loader of each task, from the step `start_step` to the last."""
    data, share = config.data, setup.share
    steps = (start_step, setup.total_steps, data.threads, data.prefetch, setup.world.device)
    forks = setup.world.device.type == "cuda" and sys.platform.startswith("linux")
    apart = forks if data.decoders == "auto" else data.decoders == "process"
    loaders = []
    for task in setup.tasks:
        samples = functools.partial(task.order.samples, **share)
        ahead = functools.partial(task.order.read_ahead, first_step=start_step, **share)
        augment = Augment(config.augment, task.seed)
        loaders.append(Loader(task.dataset, samples, *steps, ahead, augment, held=2, image_size=data.image_size, apart=apart))
    return loaders


def open_data(config: EasyDict, num_processes: int) -> tuple[list[Task], list[Protocol[Result]]]:
    """Return the training data and the verification sets, after checking what can be checked of them before training."""
    data, seed = config.data, config.run.seed
    check_batch(config.train.batch_size, config.train.accumulation, num_processes)
    cache = {"auto": str(Path(config.run.output) / "index_cache"), "off": None}.get(data.index_cache, data.index_cache)
    found = []
    for number, own in enumerate(task_configs(config)):
        task_seed = derive(seed, "task", own.task.name) if number else seed
        with naming_task(config, own.task.name):
            found.append((own, build_dataset(own.data, task_seed, cache), task_seed))
    given = [own.task.batch_size for own, _, _ in found]
    sizes = batch_sizes(given, [dataset.num_images for _, dataset, _ in found], config.train.batch_size)
    tasks = []
    for (own, dataset, task_seed), size in zip(found, sizes, strict=True):
        with prefix_errors(f"tasks: {own.task.name} has {size} of the images of each step"):
            check_batch(size, config.train.accumulation, num_processes, "its batch_size")
        how = own.data
        order = SampleOrder(
            dataset.num_images, size, task_seed, how.flip, how.shuffle, how.block, how.window, dataset.epoch_indices
        )
        weight = own.task.weight * size / config.train.batch_size
        tasks.append(Task(own.task.name or SOFTMAX, own, dataset, order, task_seed, weight))
    protocols = load_protocols(config.eval.path or data.path, config.eval.targets, open_set, "eval.targets", "eval.path")
    check_names(protocols)
    check_metric(protocols, config.eval.metric)
    return tasks, protocols


def naming_task(config: EasyDict, name: str) -> contextlib.AbstractContextManager[None]:
    """Return a context that puts the task in front of errors, in a run that has tasks."""
    return prefix_errors(f"tasks: {name}") if config.tasks else contextlib.nullcontext()


def batch_sizes(given: list[int], num_images: list[int], total: int) -> list[int]:
    """Return how many images of each step belong to each task.

    What the tasks with a size of their own leave is shared by the others in proportion to their numbers of images, in
    sixteenths of the whole, or in single images where that is no multiple of 16. The same on any number of processes.

    Args:
        given: 0 = by the number of images.

    Raises:
        ValueError: too little is left.
    """
    open_ = [number for number, size in enumerate(given) if not size]
    unit = total // 16 if total % 16 == 0 else 1
    left, images = (total - sum(given)) // unit, sum(num_images[number] for number in open_)
    if left < len(open_) or (open_ and (total - sum(given)) % unit):
        raise ValueError(
            f"tasks: of train.batch_size={total}, {total - sum(given)} images are left for the {len(open_)} tasks without a "
            f"batch_size, in parts of {unit}; give each task its batch_size"
        )
    shares = dict.fromkeys(open_, 1)  # and the rest one by one, to the task that is furthest below its part
    for _ in range(left - len(open_)):
        shares[max(open_, key=lambda number: num_images[number] / images * left - shares[number])] += 1
    return [size or shares[number] * unit for number, size in enumerate(given)]


def decode_sample(dataset: FaceDataset, size: int) -> None:
    """Decode 16 images, evenly spread, of each source of a set; raise ValueError at one that cannot be trained on."""
    sources = [source.dataset for source in dataset.sources] if isinstance(dataset, MixedDataset) else [dataset]
    counts = [source.num_stored for source in sources]
    for count, end in zip(counts, np.cumsum(counts).tolist(), strict=True):
        for index in np.unique(np.linspace(end - count, end - 1, 16, dtype=np.int64)).tolist():
            dataset.pixels_and_label(index, size)


def check_compile(mode: str, device: torch.device) -> None:
    """Compile a line of code if the run will compile its backbone; ValueError if this machine cannot, with what is missing."""
    if mode in ("auto", "off"):
        return
    if mode == "reduce-overhead" and device.type == "cpu":
        raise ValueError("train.compile=reduce-overhead records CUDA graphs, which a CPU has not; set train.compile=default")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled_folder() / "inductor"))  # torch's own anybody can make
    try:
        torch.compile(torch.neg)(torch.ones(2, device=device))
    except Exception as error:
        needs = "a C++ compiler (g++, or the one that CXX names)" if device.type == "cpu" else "Triton and a C compiler"
        raise ValueError(
            f"train.compile={mode} needs {needs}, and torch could not compile here: {first_line(error)}; "
            "install it, or set train.compile=off"
        ) from None


def choose_compile(config: EasyDict, device: torch.device, processes: int, steps: int) -> tuple[str, list[str]]:
    """Return train.compile, for auto what it takes here, and a warning if the machine cannot do that.

    CUDA graphs save 17 ms of a step of r50 with 256 images on an H200, and take a minute to make: 3,500 steps. vit_t could not
    be recorded; nobody has tried dropout. With several GPUs gradients would be sent after the whole backward pass.
    """
    mode, backbone = config.train.compile, config.backbone
    if mode != "auto":
        return mode, []
    unlike = backbone.name not in ("r18", "r34", "r50", "r100", "r200") or backbone.dropout or backbone.checkpointing
    if device.type == "cpu" or processes > 1 or steps < 5000 or unlike or backbone.sync_norm:
        return "off", []
    try:
        check_compile("reduce-overhead", device)
    except ValueError as error:
        return "off", [f"train.compile=auto does not compile here, so training is slower: {error}"]
    return "reduce-overhead", []
