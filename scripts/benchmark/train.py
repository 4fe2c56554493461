"""Measure the whole training step: face bench train

Takes steps of the real training code (loader, backbone, head, optimizer, several processes) and of a plain loop, fp32 and
eager, plain.py, and prints images per second, their ratio and the peak memory of a process. Both run in processes of
their own and take turns, so that other load on the machine meets both; a turn is --steps steps after an untimed one.
--reference adds the loop of arcface_torch, which computes in fp32 on a CPU and in fp16 on CUDA, on images drawn once.

Then it splits a step of ours into its parts, and gives the rate of the useful operations (those of the network's convolutions
and products, forward and backward, and 6 B C D of the head) as a share of matrix products in the same dtype, measured here; of
the whole step, and of each part that has such operations.

Examples:
  face bench train --quick
  face bench train --backbone r50 --classes 93431 --processes 2 --json train.json
"""

import argparse
import contextlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from backbones import build_backbone, list_backbones
from configs import load_config
from configs.rules import CHOICES
from training import step as training_step
from training.ahead import PreparedStep, StepsAhead
from training.model import build_model, for_training
from training.sections import NAMED
from training.setup import open_loaders, set_up
from training.step import LateValues
from utils import distributed
from utils.cli import int_in_range, make_parser
from utils.distributed import choose_device, init_local
from utils.image import IMAGE_SIZE
from utils.machine import num_cores
from utils.memory import training_operations
from utils.precision import AUTOCAST, PRECISIONS, choose_precision, is_fast_in_bf16
from utils.program import run_main

from .arcface_torch_loop import seconds_per_step, serving
from .kit import add_common_arguments, clock, gpu_figures, machine, measured_rates, peak_bytes, take_turns, write_json
from .plain import PlainTraining

_BASE = Path(__file__).parents[2] / "configs" / "base.yaml"
PARTS = ("data", "forward", "backward", "head", "communication", "optimizer", "other")


def serve_case(case: dict[str, Any]) -> None:
    """Take the steps that the parent asks for."""
    with serving() as serve:
        training: Any = OurTraining(case) if case["way"] == "ours" else _plain(case)
        commands = {
            "time": lambda count: seconds_per_step(training.step, count, training.device),
            "peak": lambda _: peak_bytes(training.device),
            "gpu": lambda _: gpu_figures(training.step, training.device),
        }
        if case["way"] == "ours":
            commands["parts"] = training.parts
        serve(commands)
    distributed.stop()


def _plain(case: dict[str, Any]) -> PlainTraining:
    world = init_local(case["rank"], case["ranks"], case["device"], case["rendezvous"])
    torch.set_num_threads(case["threads"])
    torch.manual_seed(0)
    backbone = build_backbone(case["network"], case["dim"], case["width"], image_size=case["image_size"])
    return PlainTraining(backbone, case["classes"], case["dim"], case["rank_batch"], world, case["image_size"])


class OurTraining:
    """One rank of a run of train.py, without its log, evaluations and checkpoints."""

    def __init__(self, case: dict[str, Any]) -> None:
        config = load_config(_BASE, case["overrides"], NAMED)
        setup = set_up(config)
        self.config, self.setup, self.world, self.device = config, setup, setup.world, setup.world.device
        self.model = build_model(config, setup)
        torch.backends.cudnn.benchmark = True
        self.parallel = for_training(config, setup, self.model)
        heads = [self.model.heads[task.name] for task in setup.tasks]
        self.ahead = iter(StepsAhead(open_loaders(config, setup, 0), heads, 0, config.train.accumulation))
        self.late = LateValues()

    def step(self) -> None:
        """Take one optimizer step, as train.py does."""
        self._take(next(self.ahead))

    def _take(self, prepared: PreparedStep) -> None:
        rates = (self.config.optimizer.lr, self.config.optimizer.lr)
        result = training_step.train_step(self.config, self.setup.tasks, self.model, self.parallel, prepared, rates, self.world)
        self.late.post(prepared.number, result)
        for values in self.late.take(prepared.number):
            if not (values.good or (self.model.scaler.enabled and math.isfinite(values.loss))):  # fp16 looks for its scale
                raise ValueError(f"step {values.step}: loss {values.loss}, gradient norm {values.grad_norm}: nothing to time")

    def parts(self, count: int) -> dict[str, float]:
        """Return the mean seconds of each of PARTS in a step, as rank 0 sees them; on CUDA it waits at the end of each part.

        What DDP's communication adds to the backward pass is the difference to steps that keep their gradients for themselves.
        """
        shared, kept = self._timed_parts(count, shared=True), self._timed_parts(count, shared=False)
        waits = max(0.0, shared["backward"] - kept["backward"]) if self.world.world_size > 1 else 0.0
        return {**shared, "backward": shared["backward"] - waits, "communication": shared["communication"] + waits}

    def _timed_parts(self, count: int, shared: bool) -> dict[str, float]:
        self.step()
        watch = _Stopwatch(self.device)
        with contextlib.ExitStack() as stack:
            for part, owner, name in self._calls():
                stack.enter_context(watch.timed(part, owner, name))
            for _ in range(count):
                with distributed.gradients_shared(self.parallel, now=shared), watch.part("other"):
                    with watch.part("data"):
                        prepared = next(self.ahead)
                    self._take(prepared)
        return {part: watch.seconds.get(part, 0.0) / count for part in PARTS}

    def _calls(self) -> Iterator[tuple[str, Any, str]]:
        """Yield the parts of train_step: name of the part, and the object and attribute by which train_step calls it."""
        for part, name in (("data", "prepare"), ("forward", "_embed"), ("backward", "backward")):
            yield part, training_step, name
        for name in ("set_learning_rate", "unscale_and_clip_grad_norm_", "step_if"):
            yield "optimizer", training_step, name
        for head in self.model.heads.values():
            yield from (("head", head, name) for name in ("begin_step", "forward", "settle", "_update"))
            yield from (("communication", head.collectives, name) for name in ("all_gather", "reduce_scatter", "sum"))


class _Stopwatch:
    """Sums the time spent in each part. A part within a part is not counted to the outer one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0

    def _turn(self) -> None:
        """Count the time since the last turn to the part that is open."""
        now = clock(self.device)
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside to a part."""
        self._turn()
        self._open.append(name)
        yield
        self._turn()
        self._open.pop()

    def timed(self, part: str, owner: Any, name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the calls of owner.name count to a part."""
        function = getattr(owner, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            with self.part(part):
                return function(*arguments, **named)

        return mock.patch.object(owner, name, counted)


_DIM = 512
_REFERENCE_LOOP = Path(__file__).parent / "arcface_torch_loop.py"
_NAMES = {"ours": "ours", "plain": "plain, fp32", "reference": "arcface_torch"}


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face bench train", __doc__)
    count = int_in_range(1)
    names = [name for name in list_backbones() if not name.startswith("vit_kprpe")]  # which need landmarks
    parser.add_argument("--backbone", choices=names, default="r18", help="network")
    parser.add_argument("--width", type=float, default=1.0, help="factor on its channels")
    size = int_in_range(16, 448)
    parser.add_argument("--image-size", type=size, default=IMAGE_SIZE, help="height and width of the images, in pixels")
    parser.add_argument("--batch-size", type=count, default=64, help="images of a step, over all processes")
    parser.add_argument("--classes", type=count, default=10_000, help="identities")
    parser.add_argument("--precision", choices=PRECISIONS, default="auto", help="train.precision of ours")
    parser.add_argument("--compile", choices=CHOICES["train.compile"], default="auto", help="train.compile of ours")
    parser.add_argument("--processes", type=count, default=1, help="processes on this machine, one per GPU")
    parser.add_argument("--threads", type=int_in_range(0), default=0, help="CPU threads of a process, 0 = share the cores")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further keys of ours, as for train.py")
    parser.add_argument("--reference", type=Path, metavar="DIR", help="folder of arcface_torch, measured as well")
    parser.add_argument("--steps", type=count, help="timed steps of a turn (default: 3, on a GPU 20)")
    add_common_arguments(parser, rounds=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return run_main(serve_case, json.loads(options.worker))
    return run_main(benchmark, options)


def benchmark(options: argparse.Namespace) -> None:
    """Measure all loops in turn, print the table and the parts of a step, and write the JSON."""
    if options.quick:
        options.batch_size, options.classes, options.steps, options.rounds = min(options.batch_size, 32), 1000, 2, 2
        options.width = options.width if options.reference else min(options.width, 0.25)
    device = choose_device(options.device, 0)
    options.steps = options.steps or (20 if device.type == "cuda" else 3)
    options.precision = choose_precision(options.precision, is_fast_in_bf16(device))
    _check(options, device)
    torch.set_num_threads(num_cores())
    ways = ["ours", "plain", *(["reference"] if options.reference else [])]
    with tempfile.TemporaryDirectory() as folder:
        loops = {way: _Loop(way, options, device.type, Path(folder)) for way in ways}
        try:
            turns = {way: lambda loop=loop: loop.ask("time", options.steps)[0] for way, loop in loops.items()}
            seconds = take_turns(turns, options.rounds)
            peaks = {way: max(loop.ask("peak", 0)) for way, loop in loops.items()}
            on_gpu = {way: loop.ask("gpu", 0)[0] for way, loop in loops.items() if way != "reference"}
            parts = loops["ours"].ask("parts", options.steps)[0]
        finally:
            for loop in loops.values():
                loop.end()
    rows = [{"loop": way, **_figures(seconds["ours"], seconds[way], options.batch_size, peaks[way])} for way in ways]
    rows = [row | on_gpu.get(row["loop"], {}) for row in rows]
    _print_table(options, device, rows)
    useful = _useful(options, rows[0]["step_seconds"], parts, device)
    for part, value in parts.items():
        share = f" {100 * useful['part_shares'][part]:6.0f} %" if part in useful["part_shares"] else ""
        print(f"  {part:<15}{1e3 * value:9.1f} ms {100 * value / sum(parts.values()):6.1f} %{share}")
    print(f"\n{useful['gflop_per_image']:.1f} GFLOP an image, {useful['tflops']:.3g} TFLOP/s: {100 * useful['share']:.0f} % of")
    print(f"the {useful['peak_tflops']:.3g} TFLOP/s of matrix products in {useful['dtype']}, measured here")
    if options.json:
        asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        found = {"machine": machine(device.type), "options": asked, "rows": rows, "parts": parts, "useful": useful}
        write_json(options.json, found)


def _check(options: argparse.Namespace, device: torch.device) -> None:
    if options.batch_size % options.processes:
        raise ValueError(f"--batch-size must be a multiple of --processes, got {options.batch_size} and {options.processes}")
    if options.precision == "fp16" and device.type == "cpu":
        raise ValueError("--precision fp16 is for CUDA; a CPU computes in bf16 or fp32")
    if options.reference:
        for name in ("backbones/__init__.py", "losses.py", "partial_fc_v2.py"):
            if not (options.reference / name).is_file():
                raise ValueError(f"--reference: no file {options.reference / name}; give the folder recognition/arcface_torch")
        if options.width != 1:
            raise ValueError(f"--reference needs --width 1, the only one that arcface_torch has, got {options.width:g}")
        if options.image_size != IMAGE_SIZE:
            raise ValueError(f"--reference needs --image-size {IMAGE_SIZE}, as arcface_torch does, got {options.image_size}")


class _Loop:
    """The processes that take the steps of one loop, a process per rank."""

    def __init__(self, way: str, options: argparse.Namespace, device: str, folder: Path) -> None:
        self.way, ranks = way, options.processes
        threads = options.threads or max(1, num_cores() // ranks)
        case = {
            "way": way,
            "network": options.backbone,
            "width": options.width,
            "image_size": options.image_size,
            "dim": _DIM,
            "classes": options.classes,
            "rank_batch": options.batch_size // ranks,
            "ranks": ranks,
            "threads": threads,
            "device": device,
            "half": device == "cuda",  # of arcface_torch
            "rendezvous": str(folder / f"rendezvous_{way}"),
            "overrides": _overrides(options, device, threads, folder),
        }
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        if several := ranks > 1 and way == "ours":
            environment |= {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        self.processes, self.said = [], folder / f"said_{way}"
        for rank in range(ranks):
            payload = json.dumps(case | {"rank": rank})
            command = [sys.executable, "-m", "scripts.benchmark.train", "--worker", payload]
            if way == "reference":
                command = [sys.executable, str(_REFERENCE_LOOP), str(options.reference), payload]
            place = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if several else {}
            with open(self.said, "a") as said:
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said, "text": True}
                self.processes.append(subprocess.Popen(command, env=environment | place, **pipes))

    def ask(self, command: str, count: int) -> list[Any]:
        """Return what each rank answers to a command."""
        for process in self.processes:
            assert process.stdin is not None
            try:
                print(command, count, file=process.stdin, flush=True)
            except BrokenPipeError:  # it ended, and does not answer
                continue
        answers = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        if not all(answers):
            said = self.said.read_text(errors="replace").strip().splitlines() or ["without a word"]
            raise ValueError(f"the loop {_NAMES[self.way]} ended: {said[-1].removeprefix('error: ')}")
        return [json.loads(answer) for answer in answers]

    def end(self) -> None:
        """End the processes, which need not save anything."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate()


def _overrides(options: argparse.Namespace, device: str, threads: int, folder: Path) -> list[str]:
    """Return the keys of the run that ours trains."""
    return [
        "data.source=synthetic",
        f"data.num_classes={options.classes}",
        f"data.num_images={10 * options.classes}",
        f"data.image_size={options.image_size}",
        "data.prefetch=1",  # or the loader would decode many batches ahead while the other loops have their turn
        f"run.output={folder}",
        f"run.device={device}",
        f"run.threads={threads}",
        f"backbone.name={options.backbone}",
        f"backbone.width={options.width}",
        f"backbone.embedding_size={_DIM}",
        f"train.precision={options.precision}",
        f"train.compile={options.compile}",
        f"train.batch_size={options.batch_size}",
        "train.max_steps=1000000",
        "optimizer.lr=0.01",
        *options.set,
    ]


def _figures(ours: Sequence[float], seconds: Sequence[float], images: int, peak: float) -> dict[str, Any]:
    """Return a row of the table; its ratio is the median over the rounds of this loop's time by ours."""
    ratios = [theirs / own for theirs, own in zip(seconds, ours, strict=True)]
    return {
        "step_seconds": statistics.median(seconds),
        "step_seconds_range": [min(seconds), max(seconds)],
        "images_per_second": images / statistics.median(seconds),
        "peak_gib": peak / 2**30,
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }


def _print_table(options: argparse.Namespace, device: torch.device, rows: Sequence[dict[str, Any]]) -> None:
    print(machine(device.type))
    print(f"{options.backbone} of width {options.width:g}, {options.precision}, {options.batch_size} images")
    size = f"{options.image_size} x {options.image_size}"
    print(f"of {size}, {options.classes} classes, {options.processes} process(es); the ratio is loop / ours, of each round\n")
    print(f"{'loop':<16}{'step ms':>10}{'of turns':>18}{'images/s':>10}{'peak GiB':>10}{'ratio':>8}{'range':>16}")
    for row in rows:
        span = "{:.2f} to {:.2f}".format(*row["ratio_range"])
        turns = "{:.1f} to {:.1f}".format(*(1e3 * seconds for seconds in row["step_seconds_range"]))
        numbers = f"{1e3 * row['step_seconds']:10.1f}{turns:>18}{row['images_per_second']:10.1f}{row['peak_gib']:10.2f}"
        print(f"{_NAMES[row['loop']]:<16}{numbers}{row['ratio']:8.2f}{span:>16}")
    print("\na step of ours, timed part by part: time, share of the step, share of the rate of matrix products")


def _useful(options: argparse.Namespace, step_seconds: float, parts: dict[str, float], device: torch.device) -> dict[str, Any]:
    """Return the useful operations of a step, their rate, and its share of that of matrix products on all devices.

    Args:
        parts: seconds of each of PARTS; "part_shares" has the share of those whose useful operations are known.
    """
    with torch.device("meta"):
        network = build_backbone(options.backbone, _DIM, options.width, image_size=options.image_size)
    forward, backward = training_operations(network, options.image_size)
    flops = {"forward": forward, "backward": backward, "head": 6 * options.classes * _DIM}  # per image
    flop = sum(flops.values())
    dtype = AUTOCAST[options.precision] or torch.float32
    peak = measured_rates(dtype, device)[0] * (options.processes if device.type == "cuda" else 1)
    rate = flop * options.batch_size / step_seconds / 1e12
    shares = {part: flops[part] * options.batch_size / parts[part] / 1e12 / peak for part in flops}
    found = {"gflop_per_image": flop / 1e9, "tflops": rate, "peak_tflops": peak, "share": rate / peak, "part_shares": shares}
    return found | {"dtype": str(dtype).removeprefix("torch.")}


if __name__ == "__main__":
    raise SystemExit(main())
