"""The trainings of scripts.benchmark.losses: their command lines, their folders, and what is measured when one has ended."""

import argparse
import hashlib
import itertools
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from easydict import EasyDict

from backbones import build_backbone
from configs import dump_config, load_config
from data.base import FaceDataset
from eval.embed import EmbedSettings
from eval.evaluate import evaluate
from eval.networks import add_network_arguments, load_network
from eval.report import pair_results
from eval.verification import VerificationResult
from training.sections import NAMED
from training.setup import open_data
from utils import distributed
from utils.distributed.agreement import digest
from utils.precision import AUTOCAST, choose_precision, is_fast_in_bf16

from .kit import machine
from .losses_results import BINS, SETTINGS, loss_arguments, write_measured

ROOT = Path(__file__).parents[2]
FAILED = "failed.txt"  # in the folder of a run
_OF_PLACE = (  # keys that do not change what is trained, or that hashes of the data stand for
    *("run.name", "run.output", "run.threads", "run.timeout_minutes", "run.device"),
    *("data.path", "data.index_cache", "eval.path"),
)
_OF_A_SEED = ("run.seed",)  # in which the runs of a line of a table differ; the lines of all tables of a set-up, in these, too:
_OF_A_LINE = ("loss", "head.sample_rate", *sorted({f"head.{key}" for row in SETTINGS.values() for key in row.row.head}))
_BY_OPTION = {"run.seed": "--seeds", "head.sample_rate": "--rates", "loss.name": "--losses"}
_HASHED = 256  # images
_POLL = 0.5  # seconds


class Job(NamedTuple):
    """A training: a row of SETTINGS, its share of sampled classes and its seed, as overrides of the configuration."""

    setting: str
    rate: float
    seed: int
    config: Path
    overrides: tuple[str, ...]
    folder: Path
    steps: int
    setup: str
    recipe: str
    common: str

    @property
    def title(self) -> str:
        """The job in a few words."""
        return f"{self.setting}, rate {self.rate:g}, seed {self.seed}"


def list_jobs(options: argparse.Namespace, settings: Sequence[str]) -> list[Job]:
    """Return the trainings in the order in which their results are worth most: every loss once, then again.

    Raises:
        ValueError: the configuration does not accept an override, or its data or verification sets cannot be read.
    """
    for key in (given.partition("=")[0] for given in options.set):
        if key in _BY_OPTION:
            raise ValueError(f"--set {key}: this program sets it itself; use {_BY_OPTION[key]}")
    config = load_config(options.config, [*_of_program(options), *options.set], NAMED)
    if not config.eval.targets:
        raise ValueError(f"--config: {options.config} must name verification sets in eval.targets")
    dataset, sets = open_data(config, 1)
    data = [dataset.fingerprint(), _digest_of_images(dataset), [one for pairs in sets for one in pairs.fingerprint().values()]]
    epoch_steps = max(1, dataset.num_images // config.train.batch_size)
    jobs = []
    for seed, rate, setting in itertools.product(options.seeds, options.rates, settings):
        given = _overrides(options, setting, rate, seed, epoch_steps)
        config = load_config(options.config, given, NAMED)
        run, recipe, common = _digests(config, data)
        folder = options.out / "runs" / f"{setting}_rate_{rate:g}_seed_{seed}_{run}"
        steps = config.train.max_steps or max(1, int(config.train.epochs * dataset.num_images / config.train.batch_size))
        setup = _describe_setup(config, dataset)
        jobs.append(Job(setting, rate, seed, options.config, tuple(given), folder, steps, setup, recipe, common))
    return jobs


def _overrides(options: argparse.Namespace, setting: str, rate: float, seed: int, epoch_steps: int) -> list[str]:
    """Return what a training changes in the configuration."""
    given = {
        "loss.name": SETTINGS[setting].loss,
        **{f"loss.{key}": value for key, value in loss_arguments(SETTINGS[setting], epoch_steps).items()},
        **{f"head.{key}": value for key, value in SETTINGS[setting].row.head.items()},
        "head.sample_rate": rate,
        "run.seed": seed,
        "eval.at_start": False,
        "eval.at_end": False,  # this program evaluates, and keeps the cosines
        "eval.every": 0,
        "checkpoint.every": 0,
        "checkpoint.every_minutes": 5.0,
        "checkpoint.keep_last": 1,
        "checkpoint.keep_best": 0,
    }
    texts = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in given.items()}
    return [*_of_program(options), *(f"{key}={text}" for key, text in texts.items()), *options.set]


def _digests(config: EasyDict, data: Sequence[Any]) -> list[str]:
    """Return three hashes of what decides the result of a training, so that another one is never taken for it: of all, of what
    the runs of a line of a table have in common, and of what all lines have in common."""
    sections, found = yaml.safe_load(dump_config(config)), []
    for names in (_OF_PLACE, _OF_A_SEED, _OF_A_LINE):
        for section, key in (name.partition(".")[::2] for name in names):
            del (sections[section] if key else sections)[key or section]
        text = json.dumps([sections, data], sort_keys=True)
        found.append(hashlib.sha256(text.encode()).hexdigest()[:8])
    return found


def _digest_of_images(dataset: FaceDataset) -> str:
    """Return a hash of the images at _HASHED places, since other copies of a set have the same names and labels."""
    places = np.linspace(0, dataset.num_images - 1, min(dataset.num_images, _HASHED)).astype(np.int64)
    images = (dataset.sample(int(place))[0] for place in places)
    return digest(image.tobytes() if isinstance(image, np.ndarray) else bytes(image) for image in images)


def _of_program(options: argparse.Namespace) -> list[str]:
    """Return the overrides that are equal for all losses."""
    given = ["log.every=10"]
    if options.data:
        given.append(f"data.path={options.data}")
    if options.precision != "auto":
        given.append(f"train.precision={options.precision}")
    else:
        given.append(f"train.precision={_fitting_precision(options)}")
    if options.epochs:
        given.append(f"train.epochs={options.epochs}")
    if options.steps:
        given.append(f"train.max_steps={options.steps}")
    return given


def _fitting_precision(options: argparse.Namespace) -> str:
    """Return the configuration's precision, but fp32 for bf16 where the device has no units for it."""
    config = load_config(options.config, options.set, NAMED)
    is_bf16 = config.train.precision in ("auto", "bf16")
    return choose_precision(
        "auto" if is_bf16 else config.train.precision, is_fast_in_bf16(distributed.choose_device(config.run.device, 0))
    )


class Runner:
    """Runs jobs, several at a time, each in processes of its own, so that a job that fails or is killed costs itself alone.

    Args:
        processes: jobs at a time.
        ended: called with a job when its results are there, or it has failed.
        moved: called with the number of optimizer steps that were done since the last call.
    """

    def __init__(self, processes: int, threads: int, ended: Callable[[Job, str], None], moved: Callable[[int], None]) -> None:
        self.processes, self.threads, self.ended, self.moved = processes, threads, ended, moved
        self._active: list[_Active] = []

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs, in this order. If this program is told to stop, the trainings save, and go on when it starts again."""
        waiting = list(jobs)
        try:
            while waiting or self._active:
                while waiting and len(self._active) < self.processes:
                    self._active.append(_Active(waiting.pop(0), self.threads))
                time.sleep(_POLL)
                for active in list(self._active):
                    self.moved(active.new_steps())
                    if (reason := active.advance()) is not None:
                        self._active.remove(active)
                        self.ended(active.job, reason)
        finally:
            for active in self._active:
                active.stop()


class _Active:
    """A job that runs: first its training, then its evaluation."""

    def __init__(self, job: Job, threads: int) -> None:
        self.job, self.threads, self._is_evaluating = job, threads, False
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / FAILED).unlink(missing_ok=True)
        own = [f"run.name={job.folder.name}", f"run.output={job.folder.parent.resolve()}", f"run.threads={threads}"]
        self._seen = steps_done(job.folder)
        self._start(["train.py", str(job.config.resolve()), *job.overrides, *own])

    def _start(self, command: Sequence[str]) -> None:
        with (self.job.folder / "output.txt").open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT
            )

    def new_steps(self) -> int:
        """Return how many steps were logged since the last call."""
        before, self._seen = self._seen, max(self._seen, steps_done(self.job.folder))
        return self._seen - before

    def advance(self) -> str | None:
        """Go on to the evaluation after the training; return None while the job runs, "" when it is done, or why it failed."""
        status = self._process.poll()
        if status is None:
            return None
        if status:
            lines = (self.job.folder / "output.txt").read_text(errors="replace").strip().splitlines()
            errors = [line for line in lines if line.startswith("error: ")]
            reason = (errors or lines or [f"status {status}"])[-1].removeprefix("error: ")
            (self.job.folder / FAILED).write_text(reason + "\n")
            return reason
        if self._is_evaluating:
            return ""
        self._is_evaluating = True
        case = {**self.job._asdict(), "folder": str(self.job.folder.resolve()), "threads": self.threads}
        self._start(["-m", "scripts.benchmark.losses", "--worker", json.dumps(case, default=str)])
        return None

    def stop(self) -> None:
        """Let the training save, and wait for its end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()


def steps_done(folder: Path) -> int:
    """Return the last optimizer step in a run's metrics.jsonl, 0 if there is none."""
    records = _train_records(folder)
    return int(records[-1]["step"]) if records else 0


def _train_records(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    if lines and not lines[-1].endswith("}"):  # it is being written
        lines.pop()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


def measure(case: dict[str, Any]) -> None:
    """Evaluate the network of a run that has ended, and write all numbers of the run to its folder."""
    folder = Path(case["folder"])
    parser = argparse.ArgumentParser()
    add_network_arguments(parser)
    network = load_network(parser.parse_args([str(folder)]), build_backbone)
    config = load_config(folder / "config.yaml", (), NAMED)
    _, sets = open_data(config, 1)
    world = distributed.init_distributed(config.run.device, case["threads"])
    model = network.model.to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    precision = AUTOCAST[config.train.precision]
    settings = EmbedSettings(config.eval.batch_size, precision, case["threads"], config.data.image_size)
    results = pair_results(dict(evaluate(model, sets, world, settings)))
    records = _train_records(folder)
    seconds = [
        config.train.batch_size / record["images_per_second"] for record in records[1:] or records
    ]  # the first is slower
    found = {
        "run": folder.name,
        **{name: case[name] for name in ("setting", "rate", "seed", "threads", "setup", "recipe", "common")},
        "steps": int(records[-1]["step"]),
        "accuracy": {name: result.accuracy for name, result in results.items()},
        **_cosines(list(results.values())),
        "step_seconds": statistics.median(seconds),
        "memory_gib": max(record["memory_gib"] for record in records),
        "loss": records[-1]["loss"],
        "positive_cosine": records[-1]["positive_cosine"],
        "machine": machine(world.device.type),
    }
    write_measured(folder, found)


def _describe_setup(config: EasyDict, dataset: FaceDataset) -> str:
    """Return what all losses of a table have in common."""
    network = f"{config.backbone.name} of width {config.backbone.width:g}, {config.train.precision}"
    size = config.data.image_size
    people = f"{dataset.num_classes:,} identities, {dataset.num_images:,} images of {size} x {size}"
    return f"{people}; {network}; {config.train.batch_size} images a step, learning rate {config.optimizer.lr:g}"


def _cosines(results: Sequence[VerificationResult]) -> dict[str, Any]:
    """Return mean, deviation and histogram of the cosines of genuine and of impostor pairs, of all sets together."""
    cosine = np.concatenate([1.0 - result.distances / 2.0 for result in results])
    same = np.concatenate([result.same for result in results])
    return {
        name: {
            "mean": float(cosine[of].mean()),
            "std": float(cosine[of].std()),
            "histogram": np.histogram(cosine[of].clip(-1.0, 1.0), BINS)[0].tolist(),
        }
        for name, of in (("genuine", same), ("impostor", ~same))
    }
