"""Train the demo network with every loss at its published settings: python -m scripts.benchmark.losses

Starts train.py for each loss, share of sampled classes and seed, in this order: all losses with the first seed and rate, then
with the next rate, then with the next seed. So the table is useful at any time. It is written anew after each training:
accuracy on the verification sets (mean and standard deviation over the seeds), mean cosines of genuine and impostor pairs, step
time and memory. A picture shows the cosines after training; --page and --curves-only also draw each loss and its derivative
over the angle.

The numbers of a training go into --json when it has ended, and it is not repeated while that file has them. One that was
interrupted goes on from its checkpoint when the same command is started again. One that fails costs only itself; the next start
tries it again.

Draw the data first: python -m scripts.demo.make_data, or, so that sampled classes matter,
python -m scripts.demo.make_data --out datasets/demo_10000 --identities 10000 --images-per-identity 12

Examples:
  python -m scripts.benchmark.losses --quick
  python -m scripts.benchmark.losses --seeds 1 --rates 1 --processes 2
  python -m scripts.benchmark.losses --losses arcface adaface --data datasets/demo_10000 --epochs 1
  python -m scripts.benchmark.losses --curves-only --out curves
"""

import argparse
import hashlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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
from eval.monitor import evaluate
from eval.networks import add_network_arguments, load_network
from eval.report import pair_results
from training.sections import NAMED
from training.setup import open_data
from utils import distributed
from utils.cli import int_in_range, make_parser, progress
from utils.distributed.agreement import digest
from utils.files import replace_text, shown
from utils.precision import AUTOCAST, choose_precision, is_fast_in_bf16
from utils.program import run_main

from .kit import machine, split_page, write_into_page
from .losses_report import BEGIN, BINS, SETTINGS, Row, accuracies, draw_cosines, draw_curves, loss_arguments, tables

ROOT = Path(__file__).parents[2]
_QUICK = ("backbone.name=mbf", "backbone.width=0.125", "train.batch_size=16", "schedule.warmup_epochs=0")
_QUICK_LOSSES = ["cosface", "curricularface"]
_OF_PLACE = (  # keys that do not change what is trained, or that hashes of the data stand for
    *("run.name", "run.output", "run.threads", "run.timeout_minutes", "run.device"),
    *("data.path", "data.index_cache", "eval.path"),
)
_OF_A_SEED = ("run.seed",)  # in which the runs of a line of a table differ; the lines of all tables of a set-up, in these, too:
_OF_A_LINE = ("loss", "head.sample_rate", *sorted({f"head.{key}" for row in SETTINGS.values() for key in row.row.head}))
_BY_OPTION = {"run.seed": "--seeds", "head.sample_rate": "--rates", "loss.name": "--losses"}
_HASHED = 256  # images
_WRITING = threading.Lock()  # of --json


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and measure; return the exit status."""
    options = parse(arguments)
    return run_main(lambda: measure(*options.worker) if options.worker else benchmark(options))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = make_parser("python -m scripts.benchmark.losses", __doc__)
    names = f"all, or among {', '.join(SETTINGS)}; default: all but variants"
    parser.add_argument("--losses", nargs="+", metavar="NAME", help=names)
    parser.add_argument("--rates", nargs="+", type=_share, default=[1.0, 0.1], help="values of head.sample_rate")
    parser.add_argument("--seeds", nargs="+", type=int_in_range(0), default=[1, 2, 3], help="values of run.seed")
    parser.add_argument("--config", type=Path, default=Path("configs/demo_cpu.yaml"), help="the training, but for its loss")
    parser.add_argument("--data", type=Path, help="another data.path; it must have the sets of eval.targets")
    parser.add_argument("--epochs", type=float, default=0.0, help="another train.epochs; 0 (default) = as configured")
    parser.add_argument("--steps", type=int_in_range(0), default=0, help="another train.max_steps; 0 (default) = as configured")
    precision = ("auto", *AUTOCAST)
    parser.add_argument(
        "--precision", choices=precision, default="auto", help="auto: the configuration's, but fp32 where bf16 is slow"
    )
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further keys of the trainings")
    parser.add_argument("--processes", type=int_in_range(1), default=1, help="trainings at a time, which share the cores")
    parser.add_argument("--out", type=Path, help="folder of runs, tables and pictures (work_dirs/losses or losses_quick)")
    parser.add_argument("--page", type=Path, help="write the tables into this page too, all pictures into images beside it")
    parser.add_argument("--json", type=Path, help="the numbers of all runs (default: losses.json in --out)")
    parser.add_argument("--curves-only", action="store_true", help="draw the losses over the angle, and train nothing")
    parser.add_argument("--quick", action="store_true", help="two losses, one seed, few steps: under a minute on two cores")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def benchmark(options: argparse.Namespace) -> None:
    """Train what is missing, and write tables and pictures.

    Raises:
        ValueError: an option is wrong; or, after everything else, a training failed.
    """
    options.seeds, options.rates = list(dict.fromkeys(options.seeds)), list(dict.fromkeys(options.rates))
    if options.quick:
        options.losses, options.seeds = options.losses or _QUICK_LOSSES, options.seeds[:1]
        options.rates, options.steps = options.rates[:1], options.steps or 4
        first = load_config(options.config, [], NAMED).eval.targets[:1]  # evaluation would take longer than the rest
        options.set = [*_QUICK, f"eval.targets=[{', '.join(first)}]", *options.set]
    options.out = options.out or Path("work_dirs/losses_quick" if options.quick else "work_dirs/losses")
    options.json = options.json or options.out / "losses.json"
    options.out.mkdir(parents=True, exist_ok=True)
    if options.curves_only:
        print("\n".join(f"written: {path}" for path in draw_curves(options.out)))
        return
    if options.page:  # now, since the end may be days away
        split_page(options.page, BEGIN)
    if not options.json.resolve().parent.is_dir():
        raise ValueError(f"--json: {shown(options.json.parent)} is no folder")
    jobs = list_jobs(options, chosen_settings(options.losses))
    known = {row["run"] for row in read_results(options.json)}
    failed = _train(options, [job for job in jobs if job.folder.name not in known], len(jobs))
    rows = read_results(options.json)
    pictures = draw_cosines(rows, options.out)
    if options.page:
        links = [f"![Cosines of genuine and impostor pairs](images/{path.name})" for path in pictures]
        write_into_page(options.page, "\n\n".join([accuracies(rows), *links]), BEGIN)
        pictures += draw_curves(options.out)
        images = options.page.parent / "images"
        images.mkdir(exist_ok=True)
        for path in pictures:
            (images / path.name).write_bytes(path.read_bytes())
    text = tables(rows) + "\n"
    replace_text(options.out / "table.md", text)
    print(f"\n{text}\nwritten: {', '.join(str(path) for path in (options.json, options.out / 'table.md', *pictures))}")
    if failed:
        raise ValueError(f"{len(failed)} of {len(jobs)} trainings failed: {'; '.join(failed)}. Their output.txt has more")


def chosen_settings(names: list[str] | None) -> list[str]:
    """Return the rows that the user named; None = all but variants, ["all"] = every row.

    Raises:
        ValueError: there is no such row.
    """
    if not names:
        return [name for name, setting in SETTINGS.items() if not setting.is_variant]
    if names == ["all"]:
        return list(SETTINGS)
    if any(name not in SETTINGS for name in names):
        raise ValueError(f"--losses must be all, or among {', '.join(SETTINGS)}; got {' '.join(names)}")
    return list(dict.fromkeys(names))


# ---- trainings


class Job(NamedTuple):
    """A training: a row of SETTINGS, its share of sampled classes and its seed, as overrides of the configuration."""

    setting: str
    rate: float
    seed: int
    overrides: tuple[str, ...]
    folder: Path
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
    program = [*_equal_for_all(options), *options.set]
    config = load_config(options.config, program, NAMED)
    if not config.eval.targets:
        raise ValueError(f"--config: {options.config} must name verification sets in eval.targets")
    dataset, sets = open_data(config, 1)
    data = [dataset.fingerprint(), _digest_of_images(dataset), [one for pairs in sets for one in pairs.fingerprint().values()]]
    epoch_steps = max(1, dataset.num_images // config.train.batch_size)
    jobs = []
    for seed, rate, setting in itertools.product(options.seeds, options.rates, settings):
        given = [*_overrides(setting, rate, seed, epoch_steps), *program]
        config = load_config(options.config, given, NAMED)
        run, recipe, common = _digests(config, data)
        folder = options.out / "runs" / f"{setting}_rate_{rate:g}_seed_{seed}_{run}"
        jobs.append(Job(setting, rate, seed, tuple(given), folder, _describe_setup(config, dataset), recipe, common))
    return jobs


def _equal_for_all(options: argparse.Namespace) -> list[str]:
    """Return the overrides that are equal for all losses."""
    config = load_config(options.config, options.set, NAMED)
    wanted = config.train.precision if options.precision == "auto" else options.precision
    if options.precision == "auto" and wanted == "bf16":  # where the device has no units for it, it takes hours
        wanted = "auto"
    fast = is_fast_in_bf16(distributed.choose_device(config.run.device, 0))
    given = {"data.path": options.data, "train.epochs": options.epochs, "train.max_steps": options.steps}
    chosen = {"log.every": 10, "train.precision": choose_precision(wanted, fast)}
    return [f"{key}={value}" for key, value in {**chosen, **{key: value for key, value in given.items() if value}}.items()]


def _overrides(setting: str, rate: float, seed: int, epoch_steps: int) -> list[str]:
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
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in given.items()]


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


def _describe_setup(config: EasyDict, dataset: FaceDataset) -> str:
    """Return what all losses of a table have in common."""
    network = f"{config.backbone.name} of width {config.backbone.width:g}, {config.train.precision}"
    size = config.data.image_size
    people = f"{dataset.num_classes:,} identities, {dataset.num_images:,} images of {size} x {size}"
    return f"{people}; {network}; {config.train.batch_size} images a step, learning rate {config.optimizer.lr:g}"


def _train(options: argparse.Namespace, jobs: Sequence[Job], count: int) -> list[str]:
    """Run the jobs, several at a time; return a line for each that failed. If this program is told to stop, they save."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"{count} trainings, {len(jobs)} of which are to be done; {options.processes} at a time", flush=True)
    threads = max(1, len(os.sched_getaffinity(0)) // options.processes)
    failed: list[str] = []
    active: set[subprocess.Popen] = set()
    with ThreadPoolExecutor(options.processes) as pool:
        futures = {pool.submit(_run, job, options, threads, active): job for job in jobs}
        try:
            for future in progress(as_completed(futures), len(jobs), "training", "run"):
                job, reason = futures[future], future.result()
                if reason:
                    failed.append(f"{job.title}: {reason}")
                print(f"{job.title}: {f'failed: {reason}' if reason else 'done'}", flush=True)
                replace_text(options.out / "table.md", tables(read_results(options.json)) + "\n")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(active):
                process.send_signal(signal.SIGTERM)
    return failed


def _run(job: Job, options: argparse.Namespace, threads: int, active: set[subprocess.Popen]) -> str:
    """Train and evaluate in processes of their own, so that a failure costs itself alone; return why, "" = it did not."""
    folder = job.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    own = [f"run.name={folder.name}", f"run.output={folder.parent}", f"run.threads={threads}"]
    commands = (
        ["train.py", str(options.config.resolve()), *job.overrides, *own],
        ["-m", "scripts.benchmark.losses", "--worker", str(folder), str(threads)],
    )
    for command in commands:
        with (folder / "output.txt").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT
            )
            active.add(process)
            status = process.wait()
            active.discard(process)
        if status:
            lines = (folder / "output.txt").read_text(errors="replace").strip().splitlines()
            errors = [line for line in lines if line.startswith("error: ")]
            return (errors or lines or [f"status {status}"])[-1].removeprefix("error: ")
    found = json.loads((folder / "measured.json").read_text())
    facts = {"run": folder.name, **{key: value for key, value in job._asdict().items() if key not in ("overrides", "folder")}}
    with _WRITING:
        rows = {row["run"]: row for row in [*read_results(options.json), {**facts, "threads": threads, **found}]}
        replace_text(options.json, "[\n{}\n]\n".format(",\n".join(json.dumps(row) for row in rows.values())))
    return ""


def measure(run: str, threads: str) -> None:
    """Evaluate the network of a run that has ended, and write its numbers into its folder."""
    folder = Path(run)
    parser = argparse.ArgumentParser()
    add_network_arguments(parser)
    network = load_network(parser.parse_args([run]), build_backbone)
    config = load_config(folder / "config.yaml", (), NAMED)
    _, sets = open_data(config, 1)
    world = distributed.init_distributed(config.run.device, int(threads))
    model = network.model.to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    precision = AUTOCAST[config.train.precision]
    settings = EmbedSettings(config.eval.batch_size, precision, int(threads), config.data.image_size)
    results = pair_results(dict(evaluate(model, sets, world, settings)))
    cosine = np.concatenate([1.0 - result.distances / 2.0 for result in results.values()])
    same = np.concatenate([result.same for result in results.values()])
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    records = [record for record in lines if record["kind"] == "train"]
    timed = records[1:] or records  # the first is slower
    found = {
        "steps": int(records[-1]["step"]),
        "accuracy": {name: result.accuracy for name, result in results.items()},
        "genuine": _cosines(cosine[same]),
        "impostor": _cosines(cosine[~same]),
        "step_seconds": statistics.median(config.train.batch_size / record["images_per_second"] for record in timed),
        "memory_gib": max(record["memory_gib"] for record in records),
        "loss": records[-1]["loss"],
        "positive_cosine": records[-1]["positive_cosine"],
        "machine": machine(world.device.type),
    }
    replace_text(folder / "measured.json", json.dumps(found))


def _cosines(cosine: np.ndarray) -> dict[str, Any]:
    histogram = np.histogram(cosine.clip(-1.0, 1.0), BINS)[0].tolist()
    return {"mean": float(cosine.mean()), "std": float(cosine.std()), "histogram": histogram}


def read_results(path: Path) -> list[Row]:
    """Return the numbers of all runs in a file, none if there is no file.

    Raises:
        ValueError: the file is none that this program wrote.
    """
    try:
        rows = json.loads(path.read_text()) if path.exists() else []
        return [row for row in rows if row["run"] and row["setting"] in SETTINGS]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"--json: {shown(path)}: it is no file of results, as this program writes it") from None


if __name__ == "__main__":
    raise SystemExit(main())
