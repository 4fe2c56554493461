"""Train the demo network with every loss at its published settings: face bench losses

Starts train.py for each loss, share of sampled classes and seed, in this order: all losses with the first seed and rate, then
with the next rate, then with the next seed. So the table of accuracies is useful at any time; it is written anew after each
training. --curves-only draws each loss and its derivative over the angle, and so does --page.

The numbers of a training go into --json when it has ended, and it is not repeated while that file has them. One that was
interrupted goes on from its checkpoint when the same command is started again. One that fails costs only itself; the next start
tries it again.

Examples:
  face demo_data --out datasets/demo_10000 --identities 10000 --images-per-identity 12
  face bench losses --quick
  face bench losses --seeds 1 --rates 1 --processes 2
  face bench losses --losses arcface adaface --set data.path=datasets/demo_10000 train.epochs=1
  face bench losses --curves-only --out curves
"""

import argparse
import hashlib
import itertools
import json
import math
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
import torch.nn.functional as F
import yaml
from easydict import EasyDict
from torch import Tensor

from configs import dump_config, load_config
from data.base import FaceDataset
from losses import MARGINS, Margin, Published, build_margin, margin_arguments
from training.sections import NAMED
from training.setup import open_data
from utils import distributed
from utils.cli import int_in_range, make_parser, progress
from utils.distributed.agreement import digest
from utils.files import check_folder_of, read_text, shown, write_file
from utils.machine import num_cores
from utils.precision import choose_precision, is_fast_in_bf16
from utils.program import run_main
from utils.report import make_figure
from utils.text import markdown_table

from .kit import machine, split_page, write_into_page

ROOT = Path(__file__).parents[2]
BEGIN = "<!-- begin: written by face bench losses -->"
NOTHING = "Not measured yet."
_QUICK = ("backbone.name=mbf", "backbone.width=0.125", "train.batch_size=16", "train.max_steps=4", "schedule.warmup_epochs=0")
_WRITING = threading.Lock()  # of --json
Row = dict[str, Any]  # the numbers of a run


# Papers, or the programs of their authors, train with these numbers, on millions of photographs; none was chosen for the demo.
# Three say how a number follows from that of the identities: the scale of AdaCos, the first biases of SphereFace2 and UniFace.
class Setting(NamedTuple):
    """A row of the benchmark: a loss and the settings that it is trained with."""

    loss: str
    row: Published


SETTINGS: dict[str, Setting] = {
    "demo": Setting("cosface", Published("demo", "CosFace as in the demo", "1801.09414", {"scale": 32.0, "margin": 0.3})),
    **{row.name: Setting(loss, row) for loss, margin in MARGINS.items() for row in margin.published},
}
_OF_PLACE = (  # keys that do not change what is trained, or that hashes of the data stand for
    *("run.name", "run.output", "run.threads", "run.timeout_minutes", "run.device"),
    *("data.path", "data.index_cache", "eval.path"),
)
# in which the runs of a table differ
_HEAD_KEYS = sorted({f"head.{key}" for setting in SETTINGS.values() for key in setting.row.head})
_OF_A_ROW = ("run.seed", "loss", "head.sample_rate", *_HEAD_KEYS)
_BY_OPTION = {"run.seed": "--seeds", "head.sample_rate": "--rates"}


def main(arguments: list[str] | None = None) -> int:
    return run_main(benchmark, parse(arguments))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = make_parser("face bench losses", __doc__)
    names = f"all, or among {', '.join(SETTINGS)}; default: all but variants"
    parser.add_argument("--losses", nargs="+", metavar="NAME", help=names)
    parser.add_argument("--rates", nargs="+", type=float, default=[1.0, 0.1], help="values of head.sample_rate")
    parser.add_argument("--seeds", nargs="+", type=int_in_range(0), default=[1, 2, 3], help="values of run.seed")
    parser.add_argument("--config", type=Path, default=Path("configs/demo_cpu.yaml"), help="the training, but for its loss")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys, such as data.path or train.epochs")
    parser.add_argument("--processes", type=int_in_range(1), default=1, help="trainings at a time, which share the cores")
    parser.add_argument("--out", type=Path, help="folder of runs, table and pictures (work_dirs/losses or losses_quick)")
    parser.add_argument("--page", type=Path, help="write the table into this page too, the curves into images beside it")
    parser.add_argument("--json", type=Path, help="the numbers of all runs (default: losses.json in --out)")
    parser.add_argument("--curves-only", action="store_true", help="draw the losses over the angle, and train nothing")
    parser.add_argument("--quick", action="store_true", help="two losses, one seed, few steps: under a minute on two cores")
    return parser.parse_args(arguments)


def benchmark(options: argparse.Namespace) -> None:
    """Train what is missing, and write the table and the pictures.

    Raises:
        ValueError: an option is wrong; or, after everything else, a training failed.
    """
    options.seeds, options.rates = list(dict.fromkeys(options.seeds)), list(dict.fromkeys(options.rates))
    if options.quick:
        options.losses, options.seeds = options.losses or ["cosface", "curricularface"], options.seeds[:1]
        options.rates = options.rates[:1]
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
    check_folder_of(options.json, "--json")
    jobs = list_jobs(options, chosen_settings(options.losses))
    known = {row["run"] for row in read_results(options.json)}
    failed = _train(options, [job for job in jobs if job.folder.name not in known], len(jobs))
    text = tables(read_results(options.json))
    write_file(options.out / "table.md", text + "\n")
    print(f"\n{text}\n\nwritten: {options.json}, {options.out / 'table.md'}")
    if options.page:
        write_into_page(options.page, text, BEGIN)
        images = options.page.parent / "images"
        images.mkdir(exist_ok=True)
        draw_curves(images)
    if failed:
        raise ValueError(f"{len(failed)} of {len(jobs)} trainings failed: {'; '.join(failed)}. Their output.txt has more")


def chosen_settings(names: list[str] | None) -> list[str]:
    """Return the rows that the user named; None = all but variants, ["all"] = every row.

    Raises:
        ValueError: there is no such row.
    """
    if not names:
        return [name for name, setting in SETTINGS.items() if not setting.row.arguments]  # else another row stands for the loss
    if names == ["all"]:
        return list(SETTINGS)
    if any(name not in SETTINGS for name in names):
        raise ValueError(f"--losses must be all, or among {', '.join(SETTINGS)}; got {' '.join(names)}")
    return list(dict.fromkeys(names))


class Job(NamedTuple):
    """A training: a row of SETTINGS, its share of sampled classes and its seed, as overrides of the configuration."""

    setting: str
    rate: float
    seed: int
    overrides: tuple[str, ...]
    folder: Path
    setup: str
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
        if key in _BY_OPTION or key.startswith("loss."):
            raise ValueError(f"--set {key}: this program sets it itself; use {_BY_OPTION.get(key, '--losses')}")
    program = [*_equal_for_all(options), *options.set]
    config = load_config(options.config, program, NAMED)
    if not config.eval.targets:
        raise ValueError(f"--config: {options.config} must name verification sets in eval.targets")
    (task,), sets = open_data(config, 1)
    dataset = task.dataset
    data = [dataset.fingerprint(), _digest_of_images(dataset), [one for pairs in sets for one in pairs.fingerprint().values()]]
    epoch_steps = max(1, dataset.num_images // config.train.batch_size)
    jobs = []
    for seed, rate, setting in itertools.product(options.seeds, options.rates, settings):
        given = [*_overrides(setting, rate, seed, epoch_steps), *program]
        config = load_config(options.config, given, NAMED)
        run, common = _digests(config, data)
        folder = options.out / "runs" / f"{setting}_rate_{rate:g}_seed_{seed}_{run}"
        jobs.append(Job(setting, rate, seed, tuple(given), folder, _describe_setup(config, dataset), common))
    return jobs


def _equal_for_all(options: argparse.Namespace) -> list[str]:
    """Return the overrides that are equal for all losses; bf16 must be asked for where the device has no units for it."""
    config = load_config(options.config, options.set, NAMED)
    wanted = config.train.precision
    if wanted == "bf16" and not any(given.startswith("train.precision=") for given in options.set):
        wanted = "auto"
    fast = is_fast_in_bf16(distributed.choose_device(config.run.device, 0))
    return ["log.every=10", f"train.precision={choose_precision(wanted, fast)}"]


def loss_arguments(setting: Setting, epoch_steps: int) -> dict[str, Any]:
    """Return every argument of the loss, since one that is left out would keep the value of the configuration below.

    Args:
        epoch_steps: optimizer steps of an epoch, after which KappaFace refreshes its margins.
    """
    defaults = margin_arguments(setting.loss)
    return {**defaults, **({"every": epoch_steps} if "every" in defaults else {}), **setting.row.arguments}


def _overrides(setting: str, rate: float, seed: int, epoch_steps: int) -> list[str]:
    """Return what a training changes in the configuration."""
    given = {
        "loss.name": SETTINGS[setting].loss,
        **{f"loss.{key}": value for key, value in loss_arguments(SETTINGS[setting], epoch_steps).items()},
        **{f"head.{key}": value for key, value in SETTINGS[setting].row.head.items()},
        **{"head.sample_rate": rate, "run.seed": seed, "eval.at_start": False, "eval.at_end": False, "eval.every": 0},
        **{"checkpoint.every": 0, "checkpoint.every_minutes": 5.0, "checkpoint.keep_last": 1, "checkpoint.keep_best": 0},
    }
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in given.items()]


def _digests(config: EasyDict, data: Sequence[Any]) -> list[str]:
    """Return two hashes of what decides the result of a training, so that no other is taken for it: of all, and of what the
    runs of a table have in common."""
    sections, found = yaml.safe_load(dump_config(config)), []
    for names in (_OF_PLACE, _OF_A_ROW):
        for section, key in (name.partition(".")[::2] for name in names):
            del (sections[section] if key else sections)[key or section]
        text = json.dumps([sections, data], sort_keys=True)
        found.append(hashlib.sha256(text.encode()).hexdigest()[:8])
    return found


def _digest_of_images(dataset: FaceDataset) -> str:
    """Return a hash of 256 images of a set, since other copies of it have the same names and labels."""
    places = np.linspace(0, dataset.num_images - 1, min(dataset.num_images, 256)).astype(np.int64)
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
    torch.set_num_threads(max(1, num_cores() // options.processes))
    failed: list[str] = []
    active: set[subprocess.Popen] = set()
    with ThreadPoolExecutor(options.processes) as pool:
        futures = {pool.submit(_run, job, options, active): job for job in jobs}
        try:
            for future in progress(as_completed(futures), len(jobs), "training", "run"):
                job, reason = futures[future], future.result()
                if reason:
                    failed.append(f"{job.title}: {reason}")
                print(f"{job.title}: {f'failed: {reason}' if reason else 'done'}", flush=True)
                write_file(options.out / "table.md", tables(read_results(options.json)) + "\n")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(active):
                process.send_signal(signal.SIGTERM)
    return failed


def _run(job: Job, options: argparse.Namespace, active: set[subprocess.Popen]) -> str:
    """Train in a process of its own, so that a failure costs itself alone; return why it failed, "" = it did not."""
    folder, threads = job.folder.resolve(), torch.get_num_threads()
    folder.mkdir(parents=True, exist_ok=True)
    own = [f"run.name={folder.name}", f"run.output={folder.parent}", f"run.threads={threads}", "eval.at_end=true"]
    command = [sys.executable, "train.py", str(options.config.resolve()), *job.overrides, *own]
    with (folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        active.add(process)
        status = process.wait()
        active.discard(process)
    if status:
        lines = (folder / "output.txt").read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or [f"status {status}"])[-1].removeprefix("error: ")
    facts = {"run": folder.name, **{key: value for key, value in job._asdict().items() if key not in ("overrides", "folder")}}
    with _WRITING:
        rows = {row["run"]: row for row in [*read_results(options.json), {**facts, "threads": threads, **measured(folder)}]}
        write_file(options.json, "[\n{}\n]\n".format(",\n".join(json.dumps(row) for row in rows.values())))
    return ""


def measured(folder: Path) -> Row:
    """Return the numbers of a run that has ended, from its log and its results.json."""
    config = load_config(folder / "config.yaml", (), NAMED)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    records = [record for record in lines if record["kind"] == "train"]
    timed = records[1:] or records  # the first is slower
    results = json.loads((folder / "results.json").read_text())
    return {
        "steps": int(records[-1]["step"]),
        "accuracy": {name: result["accuracy"] for name, result in results.items()},
        "step_seconds": statistics.median(config.train.batch_size / record["images_per_second"] for record in timed),
        "memory_gib": max(record["memory_gib"] for record in records),
        "loss": records[-1]["loss"],
        "positive_cosine": records[-1]["positive_cosine"],
        "machine": machine(distributed.choose_device(config.run.device, 0).type),
    }


def read_results(path: Path) -> list[Row]:
    """Return the numbers of all runs in a file, also of settings that only another version has; none if there is no file.

    Raises:
        ValueError: the file is none that this program wrote.
    """
    try:
        rows: list[Row] = json.loads(read_text(path)) if path.exists() else []
        if not isinstance(rows, list) or not all(row["run"] and row["setting"] for row in rows):
            raise ValueError
        tables(rows)  # which takes all else
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(f"--json: {shown(path)}: it is no file of results, as this program writes it") from None
    return rows


def tables(rows: Sequence[Row]) -> str:
    """Return the Markdown: a table for each set-up, a line for each loss, a column for each share of classes and set."""

    def place(row: Row) -> tuple[int, str, str, int]:  # few identities first
        identities = row["setup"].partition(" ")[0].replace(",", "")
        return int(identities) if identities.isdecimal() else 0, row["setup"], row["common"], row["steps"]

    rows = [row for row in rows if row["setting"] in SETTINGS]
    parts = []
    for (_, setup, _, steps), group in itertools.groupby(sorted(rows, key=place), place):
        chosen = list(group)
        sets = dict.fromkeys(name for row in chosen for name in row["accuracy"])
        columns = list(itertools.product(sorted({row["rate"] for row in chosen}, reverse=True), sets))
        lines = [["loss", *(f"{name} at {rate:g}" for rate, name in columns)]]
        for name in (name for name in SETTINGS if any(row["setting"] == name for row in chosen)):
            own = [row for row in chosen if row["setting"] == name]
            found = [
                [100 * row["accuracy"][of] for row in own if row["rate"] == rate and of in row["accuracy"]]
                for rate, of in columns
            ]
            lines.append([SETTINGS[name].row.title, *map(_mean, found)])
        machines = "; ".join(sorted({row["machine"].split(", torch")[0] for row in chosen}))
        parts.append(f"{setup}; {steps} steps. {machines}.\n\n{markdown_table(lines)}")
    return "\n\n".join(parts) or NOTHING


def _mean(values: Sequence[float]) -> str:
    """Return the mean, and from two runs on the standard deviation of a run."""
    if not values:
        return "n/a"
    return f"{statistics.fmean(values):.2f}" + (f"+-{statistics.stdev(values):.2f}" if len(values) > 1 else "")


# ---- the losses over the angle. The curves come from the margins, through the interface by which the head uses them. What
# depends on a batch or a training is as at the first step. Shapes: T = angles, all of float64.

NORM = 20.0  # of the embeddings: the mean with which AdaFace begins
NUM_CLASSES = 500  # of the demo
LATE = 1_000_000  # the optimizer step, in which every schedule has ended
NEGATIVE_AT = math.pi / 3  # the sample's own angle in the picture of the negatives
# each picture has the losses that are compared with one another; ArcFace is in all
GROUPS = {
    family: [name for name, margin in MARGINS.items() if margin.family == family or name == "arcface"]
    for family in ("added", "adaptive", "multiplied", "angles", "hard_and_sums")
}
IN_LOGITS = "angles"  # the picture whose logits are not divided by the scale: that of QAMFace multiplies the square of an angle
NEGATIVES = ("arcface", "curricularface", "mv_softmax", "arcnegface", "npcface", "circle", "li_arcface", "sphereface2")
_COLOURS = ("black", "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:cyan")


def first_step_margin(name: str) -> Margin:
    """Return the margin of a row of SETTINGS before its first step, with ended schedules; ElasticFace with its mean margin."""
    setting = SETTINGS[name]
    arguments = loss_arguments(setting, NUM_CLASSES)
    if setting.loss == "elasticface":
        arguments["std"] = 0.0
    margin = build_margin(setting.loss, **arguments)
    margin.prepare(NUM_CLASSES, NUM_CLASSES)
    margin.at_step(LATE)
    return margin


def curve(margin: Margin, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three (T,) of the angles theta (T,), radians: the target's logit; minus its derivative with respect to the angle,
    positive where the loss pulls; the loss with NUM_CLASSES - 1 negatives at 90 degrees."""
    cosine = theta.cos().requires_grad_()
    norm = torch.full_like(theta, NORM)
    state = margin.observe(cosine.detach(), norm)
    of_negatives, _ = margin.negatives(cosine.detach(), norm, state).logits(torch.zeros(1, len(theta), dtype=torch.float64))
    log_z = of_negatives[0] + math.log(NUM_CLASSES - 1)
    state = margin.complete(state, log_z, torch.zeros(2, len(theta), dtype=torch.float64))
    logit = margin.target(cosine, norm, state)
    (by_cosine,) = torch.autograd.grad(logit.sum(), cosine)
    logit = logit.detach()
    if margin.link == "softmax":
        loss = F.softplus(log_z - logit)
    else:
        loss = margin.target_weight * F.softplus(-logit)
        loss = loss + margin.negative_weight * (NUM_CLASSES - 1) * F.softplus(of_negatives[0])
    return logit, by_cosine * theta.sin(), loss.detach()


def negative_curve(margin: Margin, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logit (T,) of a negative at the angles theta, of a sample at NEGATIVE_AT, and minus its derivative (T,)."""
    own, norm = torch.full((1,), math.cos(NEGATIVE_AT), dtype=torch.float64), torch.full((1,), NORM, dtype=torch.float64)
    state = margin.observe(own, norm)
    logit, by_cosine = margin.negatives(own, norm, state).logits(theta.cos()[:, None])
    return logit[:, 0], by_cosine[:, 0] * theta.sin()


def unit_of(margin: Margin) -> float:
    """Return the scale by which a picture divides the logits: the norm where it takes the scale's place."""
    cosine, norm = torch.zeros(1), torch.full((1,), NORM)
    return float(torch.as_tensor(margin.negative_scale(norm, margin.observe(cosine, norm))).reshape(-1)[0])


def draw_curves(folder: Path) -> list[Path]:
    """Draw all pictures into a folder; return the files."""
    paths = []
    theta = torch.linspace(0.01, math.pi - 0.01, 1441, dtype=torch.float64)
    for group, names in {**GROUPS, "negatives": NEGATIVES}.items():
        by = "" if group == IN_LOGITS else " / s"
        titles = [f"target logit{by}", "minus its derivative: how hard it pulls"]
        titles.append(f"loss, with {NUM_CLASSES - 1} negatives at 90 degrees")
        if group == "negatives":
            degrees = math.degrees(NEGATIVE_AT)
            titles = [f"logit of a negative / s, own class at {degrees:.0f} degrees", "minus its derivative / s"]
        figure = make_figure(4.7 * len(titles), 4.4, layout="constrained")
        axes = figure.subplots(1, len(titles))
        for number, (name, colour) in enumerate(zip(names, _COLOURS, strict=False)):
            margin = first_step_margin(name)
            found, scale = (negative_curve if group == "negatives" else curve)(margin, theta), unit_of(margin)
            unit, label = (scale if by else 1.0), f"{SETTINGS[name].row.title}, s = {scale:.3g}"
            for axis, values, divisor in zip(axes, found, (unit, unit, 1.0), strict=False):
                # where lines coincide, the later is thinner
                axis.plot(
                    theta.rad2deg(), values / divisor, label=label, color=colour, linewidth=0.4 + 0.6 * (len(names) - number)
                )
        for axis, title in zip(axes, titles, strict=True):
            axis.set(title=title, xlabel="angle to the class centre, degrees", xlim=(0, 180), xticks=range(0, 181, 30))
            axis.grid(alpha=0.3)
        if len(titles) == 3:
            axes[2].set(yscale="log", ylim=(1e-3, None))
        axes[0].legend(fontsize=8)
        paths.append(folder / f"losses_{group}.png")
        figure.savefig(paths[-1])
    return paths


if __name__ == "__main__":
    raise SystemExit(main())
