"""Train the demo network with every loss at its published settings: python -m scripts.benchmark.losses

Starts train.py for each loss, share of sampled classes and seed, in this order: all losses with the first seed and rate, then
with the next rate, then with the next seed. So the table is useful at any time. It is written anew after each training:
accuracy on the verification sets (mean and standard deviation over the seeds), mean cosines of genuine and impostor pairs, step
time and memory. A picture shows the cosines after training; --page and --curves-only also draw each loss and its derivative
over the angle.

A training that has ended is kept in --out and not repeated, whatever else is asked for. --known takes over the results of
another machine, so that several can share the work. One that was interrupted goes on from its checkpoint when the same command
is started again. One that fails costs only itself; the next start tries it again.

Draw the data first: python -m scripts.demo.make_data, or, so that sampled classes matter,
python -m scripts.demo.make_data --out datasets/demo_10000 --identities 10000 --images-per-identity 12

Examples:
  python -m scripts.benchmark.losses --quick
  python -m scripts.benchmark.losses --seeds 1 --rates 1 --processes 2
  python -m scripts.benchmark.losses --losses arcface adaface --data datasets/demo_10000 --epochs 1
  python -m scripts.benchmark.losses --curves-only --out curves
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m scripts.benchmark.losses")

import argparse
import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from configs import load_config
from training.sections import NAMED
from utils.cli import int_in_range, make_parser, progress
from utils.files import shown
from utils.precision import AUTOCAST
from utils.program import run_main

from . import losses_report
from .kit import split_page, write_into_page
from .losses_results import (
    MEASURED,
    SETTINGS,
    chosen_settings,
    read_measured,
    read_results,
    require_alike,
    require_kept,
    write_measured,
    write_results,
)
from .losses_runs import Job, Runner, list_jobs, measure, steps_done

_QUICK = ("backbone.name=mbf", "backbone.width=0.125", "train.batch_size=16", "schedule.warmup_epochs=0")
_QUICK_LOSSES = ["cosface", "curricularface"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and measure; return the exit status."""
    options = parse(arguments)
    if options.worker:
        return run_main(lambda: measure(json.loads(options.worker)))
    return run_main(lambda: benchmark(options))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = make_parser("python -m scripts.benchmark.losses", __doc__)
    count = int_in_range(1)
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
    parser.add_argument("--processes", type=count, default=1, help="trainings at a time, which share the cores")
    parser.add_argument("--out", type=Path, help="folder of runs, tables and pictures (work_dirs/losses or losses_quick)")
    parser.add_argument("--page", type=Path, help="write the tables into this page too, all pictures into images beside it")
    parser.add_argument("--json", type=Path, help="also write the numbers of all runs there")
    parser.add_argument(
        "--known",
        type=Path,
        nargs="+",
        default=[],
        metavar="JSON",
        help="--json of others: their results go into the tables, and are not repeated",
    )
    parser.add_argument("--curves-only", action="store_true", help="draw the losses over the angle, and train nothing")
    parser.add_argument("--quick", action="store_true", help="two losses, one seed, few steps: under a minute on two cores")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
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
    options.out.mkdir(parents=True, exist_ok=True)
    if options.curves_only:
        print("\n".join(f"written: {path}" for path in losses_report.draw_curves(options.out)))
        return
    _check_files(options)
    jobs = list_jobs(options, chosen_settings(options.losses))
    runs = _take_known(options, jobs)
    if options.json:
        require_kept(options.json, runs)
    missing = [job for job in jobs if not (job.folder / MEASURED).is_file()]
    print(f"{len(jobs)} trainings, {len(missing)} of which are to be done; {options.processes} at a time", flush=True)
    failed = _train(options, missing)
    rows = read_measured(options.out)
    pictures = losses_report.draw_cosines(rows, options.out)
    if options.page:
        links = [f"![Cosines of genuine and impostor pairs](images/{path.name})" for path in pictures]
        write_into_page(options.page, "\n\n".join([losses_report.accuracies(rows), *links]), losses_report.BEGIN)
        pictures += losses_report.draw_curves(options.out)
        images = options.page.parent / "images"
        images.mkdir(exist_ok=True)
        for path in pictures:
            (images / path.name).write_bytes(path.read_bytes())
    text = _write_table(options.out, rows)
    print(f"\n{text}\nwritten: {', '.join(str(path) for path in (options.out / 'table.md', *pictures))}")
    if options.json:
        require_kept(options.json, [row["run"] for row in rows])  # a training failed, or another program wrote meanwhile
        write_results(options.json, rows)
    if failed:
        raise ValueError(f"{len(failed)} of {len(jobs)} trainings failed: {'; '.join(failed)}. Their output.txt has more")


def _take_known(options: argparse.Namespace, jobs: Sequence[Job]) -> set[str]:
    """Put the results of files, from other machines or an earlier start, beside those of --out.

    Returns:
        The runs that have results, or are to have them.
    """
    known = {}
    for path in options.known:
        found = read_results(path, "--known")
        print(f"--known: {len(found)} results are taken over from {shown(path)}")
        known.update({row["run"]: row for row in found})
    ours = [{**job._asdict(), "run": job.folder.name} for job in jobs]
    rows = [*known.values(), *read_measured(options.out), *ours]
    require_alike(rows)
    for run, row in known.items():
        folder = options.out / "runs" / run
        if not (folder / MEASURED).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_measured(folder, row)
    return {row["run"] for row in rows}


def _check_files(options: argparse.Namespace) -> None:
    """Raise ValueError if what is written at the end could not be, since that may be days away."""
    if options.page:
        split_page(options.page, losses_report.BEGIN)
    if options.json and not options.json.resolve().parent.is_dir():
        raise ValueError(f"--json: {shown(options.json.parent)} is no folder")


def _train(options: argparse.Namespace, jobs: Sequence[Job]) -> list[str]:
    """Run the jobs; return a line for each that failed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the trainings save
    failed: list[str] = []
    bar = progress([], sum(job.steps - steps_done(job.folder) for job in jobs), "training", "step")

    def ended(job: Job, reason: str) -> None:
        if reason:
            failed.append(f"{job.title}: {reason}")
        tqdm.write(f"{job.title}: {f'failed: {reason}' if reason else _summary(job)}", file=bar.fp)
        _write_table(options.out, read_measured(options.out))

    threads = max(1, len(os.sched_getaffinity(0)) // options.processes)
    with bar:
        Runner(options.processes, threads, ended, bar.update).run(jobs)
    return failed


def _write_table(out: Path, rows: losses_report.Rows) -> str:
    text = losses_report.tables(rows) + "\n"
    (out / "table.md").write_text(text)
    return text


def _summary(job: Job) -> str:
    found = json.loads((job.folder / MEASURED).read_text())
    accuracy = ", ".join(f"{name} {100 * value:.2f} %" for name, value in found["accuracy"].items())
    return f"{accuracy}; {1000 * found['step_seconds']:.0f} ms a step"


if __name__ == "__main__":
    raise SystemExit(main())
