"""What a run is set up with: processes, tasks, verification sets, folder. Every mistake is reported before anything trains."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from easydict import EasyDict

from configs import as_plain, dump_config, shared_settings
from data import build_dataset
from data.augment import Augment
from data.base import FaceDataset
from data.datasets import open_set
from data.loader import Loader
from data.mixture import MixedDataset
from data.sampler import SampleOrder, check_batch
from data.tolerant import TolerantDataset
from eval.monitor import check_metric, check_names, load_protocols
from eval.protocol import Protocol, Result
from utils.checkpoint.format import SOFTMAX
from utils.checkpoint.resume import prepare_run_folder
from utils.distributed import World, choose_device, init_distributed, raise_on_all_ranks
from utils.distributed.agreement import require_equal, require_same_program
from utils.distributed.patience import patiently
from utils.precision import agreed_precision, set_tf32, slow_precision
from utils.schedule import Schedule


class Task(NamedTuple):
    """Identities to tell apart, and the images of them: a head of its own is trained on each task.

    Args:
        name: of its head, and of the head's files in a checkpoint.
        order: which sample stands at which place of which step.
        weight: factor on its loss.
    """

    name: str
    dataset: FaceDataset
    order: SampleOrder
    weight: float = 1.0


class Setup(NamedTuple):
    """A run before its first step."""

    world: World
    precision: str  # of the backbone: train.precision, but what this machine is fast at for auto
    tasks: list[Task]  # steps and epochs are those of the first
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
                dataset, protocols = open_data(config, count)
    seen = dataset.fingerprint()
    for protocol in protocols:
        seen |= protocol.fingerprint()
    require_equal(seen, world, "data.path and eval.path must hold the same data for all processes; copy them again")
    data, batch_size, seed = config.data, config.train.batch_size, config.run.seed
    order = SampleOrder(
        dataset.num_images, batch_size, seed, data.flip, data.shuffle, data.block, data.window, dataset.epoch_indices
    )
    facts = {
        "run_signature": {
            "backbone": [config.backbone.name, config.backbone.embedding_size, config.backbone.get("width", 1.0)],
            "num_classes": dataset.num_classes,
            "num_images": dataset.num_images,
            "batch_size": batch_size,
            "seed": seed,
            "labels": seen["hash of the labels"],
            "image_size": data.image_size,
        },
        "config": settled,
    }
    total_steps = config.train.max_steps or max(1, int(config.train.epochs * dataset.num_images / batch_size))
    with raise_on_all_ranks(world):
        schedules = build_schedules(config, total_steps, dataset.num_images / batch_size)
    folder = Path(config.run.output) / config.run.name
    text = "" if processes else dump_config(settled)
    plan = prepare_run_folder(folder, config.checkpoint, text, facts["run_signature"], world)
    return Setup(
        world,
        precision,
        [Task(SOFTMAX, dataset, order)],
        protocols,
        {"rank": world.rank, "world_size": count, "accumulation": config.train.accumulation},
        total_steps,
        batch_size / dataset.num_images,
        *schedules,
        folder,
        facts,
        plan.checkpoint,
        [*dataset.warnings, *unlike, *plan.warnings, *slow_precision("train.precision=", precision, world.device)],
    )


def build_schedules(config: EasyDict, total_steps: int, steps_per_epoch: float) -> tuple[Schedule, Schedule]:
    """Return the schedules of the learning rates of backbone and class centres.

    Raises:
        ValueError: the warm-up takes all steps of the run, or a milestone lies in it.
    """
    given, peak = config.schedule, config.optimizer.lr
    warmup = given.warmup_steps or round(given.warmup_epochs * steps_per_epoch)
    milestones = tuple(int(step) for step in given.milestone_steps)
    milestones = milestones or tuple(round(epoch * steps_per_epoch) for epoch in given.milestones)
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
    loaders = []
    for task in setup.tasks:
        samples = functools.partial(task.order.samples, **share)
        ahead = functools.partial(task.order.read_ahead, first_step=start_step, **share)
        augment = Augment(config.augment, config.run.seed)
        loaders.append(Loader(task.dataset, samples, *steps, ahead, augment, held=2, image_size=data.image_size))
    return loaders


def open_data(config: EasyDict, num_processes: int) -> tuple[FaceDataset, list[Protocol[Result]]]:
    """Return the training data and the verification sets, after checking what can be checked of them before training."""
    data = config.data
    check_batch(config.train.batch_size, config.train.accumulation, num_processes)
    cache = {"auto": str(Path(config.run.output) / "index_cache"), "off": None}.get(data.index_cache, data.index_cache)
    dataset = build_dataset(data, config.run.seed, cache)
    protocols = load_protocols(config.eval.path or data.path, config.eval.targets, open_set)
    check_names(protocols)
    check_metric(protocols, config.eval.metric)
    return dataset, protocols


def decode_sample(dataset: FaceDataset, size: int) -> None:
    """Decode 16 images, evenly spread, of each source of a set; raise ValueError at one that cannot be trained on."""
    inner = dataset.dataset if isinstance(dataset, TolerantDataset) else dataset
    counts = [source.dataset.num_images for source in inner.sources] if isinstance(inner, MixedDataset) else [inner.num_stored]
    for count, end in zip(counts, np.cumsum(counts).tolist(), strict=True):
        for index in np.unique(np.linspace(end - count, end - 1, 16, dtype=np.int64)).tolist():
            dataset.pixels_and_label(index, size)


def check_compile(mode: str, device: torch.device) -> None:
    """Compile a line of code if the run will compile its backbone, so that what is missing is reported before anything trains.

    Args:
        mode: train.compile, see configs/base.yaml.

    Raises:
        ValueError: this machine cannot.
    """
    if mode == "off":
        return
    if mode == "reduce-overhead" and device.type == "cpu":
        raise ValueError("train.compile=reduce-overhead records CUDA graphs, which a CPU has not; set train.compile=default")
    try:
        torch.compile(torch.neg)(torch.ones(2, device=device))
    except Exception as error:
        needs = "a C++ compiler (g++, or the one that CXX names)" if device.type == "cpu" else "Triton and a C compiler"
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"train.compile={mode} needs {needs}, and torch could not compile here: {reason}; "
            "install it, or set train.compile=off"
        ) from None
