"""Measure the cost of checkpoints: face bench checkpoint

save        seconds that training waits for a save, against torch.save of the same state as in tutorials, with and without
            waiting for the disk; and the speed of arithmetic while a save is written in the background
bandwidth   bytes per second from the start of a save to the complete checkpoint, against plainly writing the same bytes

Example: face bench checkpoint --quick
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from backbones import build_backbone
from losses import build_margin
from partial_fc import PartialFC
from utils.checkpoint.format import BACKBONE, SOFTMAX, TRAINER, RetentionPolicy
from utils.checkpoint.tensor_file import BLOCK, flush
from utils.checkpoint.trainer import TrainerState
from utils.checkpoint.writer import CheckpointWriter, Shard
from utils.cli import make_parser
from utils.distributed import World
from utils.optim import build_optimizer
from utils.precision import LossScaler
from utils.program import run_main
from utils.text import prefix_errors

from .kit import add_common_arguments, seconds_of, write_json

_DIM = 512


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face bench checkpoint", __doc__)
    parser.add_argument("--classes", type=int, help="classes (default: 200000, half of them with less than 8 GiB free)")
    parser.add_argument("--backbone", default="r50", help="(default r50)")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: the temporary folder)")
    add_common_arguments(parser, device=False, rounds=3)
    return run_main(benchmark, parser.parse_args(arguments))


def benchmark(options: argparse.Namespace) -> None:
    """Measure all parts, print them, and write the JSON."""
    if options.quick:
        options.classes, options.backbone, options.rounds = 40_000, "r18", 2
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        options.classes = options.classes or (200_000 if shutil.disk_usage(folder).free > 8 << 30 else 100_000)
        results = {"save": measure_save(options, Path(folder))}
    write_json(options.json, results)


def measure_save(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Compare saves of a real training state."""
    state = training_state(options.backbone, options.classes)
    size = sum(t.nbytes for part in (state[BACKBONE], state[SOFTMAX].rows) for t in part.values())
    size += sum(t.nbytes for moments in state[TRAINER]["optimizer"]["state"].values() for t in moments.values())
    facts = {"score": None, "run_signature": {"num_classes": options.classes, "seed": 0}}
    world = World(0, 1, 0, 1, torch.device("cpu"))
    seconds: dict[str, list[float]] = {name: [] for name in ("wait", "complete", "inline", "plain", "flushed", "bare")}
    alone, beside = [], []
    steps = iter(range(1000))

    def save_in_place() -> None:
        with CheckpointWriter(folder / "ours", world, RetentionPolicy(last=1, best=0), background=False) as writer:
            writer.save(next(steps), state, facts)

    writer = CheckpointWriter(folder / "ours", world, RetentionPolicy(last=1, best=0))
    for number in range(options.rounds + 1):
        alone.append(_products_per_second(until=lambda seconds: seconds > 0.5))
        os.sync()
        begun = time.perf_counter()
        writer.save(next(steps), state, facts)
        waited = time.perf_counter() - begun
        rate = _products_per_second(until=lambda _: not writer.is_writing)
        writer.finish()
        complete = time.perf_counter() - begun
        if number == 0:
            first = waited
            continue
        seconds["wait"].append(waited)
        seconds["complete"].append(complete)
        beside.append(rate)
        seconds["inline"].append(_timed(save_in_place))
        seconds["bare"].append(_timed(lambda: _bare_write(size, folder / "bare")))
        seconds["plain"].append(_timed(lambda: _plain_save(state, folder / "plain.pt", on_disk=False)))
        seconds["flushed"].append(_timed(lambda: _plain_save(state, folder / "plain.pt", on_disk=True)))
    shutil.rmtree(folder / "ours")
    found = {name: statistics.median(values) for name, values in seconds.items()}
    found |= {"bytes": size, "first_wait": first, "arithmetic_beside": statistics.median(beside) / statistics.median(alone)}
    print(f"state of {size / 2**20:.0f} MiB: {options.backbone}, {options.classes} classes of {_DIM} numbers, SGD")
    print(f"training waits for a save       {found['wait']:8.3f} s   the first one, which takes new memory: {first:.3f} s")
    others = {"plain": "torch.save in its place", "flushed": "torch.save, on the disk", "inline": "background=false"}
    for name, what in others.items():
        print(f"{what:<32}{found[name]:8.3f} s   {found[name] / found['wait']:.1f} times as long")
    rates = {"complete": "complete, with arithmetic beside", "inline": "complete, without it", "bare": "the same bytes, bare"}
    for name, what in rates.items():
        print(f"{what:<32}{found[name]:8.3f} s   {size / found[name] / 2**20:.0f} MiB/s")
    print(f"arithmetic beside a save runs at {found['arithmetic_beside']:.0%} of its speed")
    return found


def training_state(name: str, classes: int) -> dict[str, Any]:
    """Return the files of a save for a network with all moments and class centres."""
    with prefix_errors("--backbone"):
        backbone = build_backbone(name, _DIM)
    optimizer = build_optimizer(backbone, "sgd", 0.1, 0.9, 5e-4)
    for parameter in backbone.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    margin = build_margin("cosface", scale=64.0, margin=0.4)
    head = PartialFC(margin, classes, _DIM)
    return {
        BACKBONE: backbone.state_dict(),
        SOFTMAX: Shard(head.shard_state(), (head.first_slot, head.end_slot)),
        TRAINER: TrainerState(backbone, {SOFTMAX: margin}, optimizer, LossScaler(enabled=False)).state(),
    }


def _plain_save(state: dict[str, Any], path: Path, on_disk: bool) -> None:
    torch.save({**state, SOFTMAX: state[SOFTMAX].rows}, path)
    if on_disk:
        flush(path)


def _bare_write(size: int, path: Path) -> None:
    block = memoryview(bytearray(os.urandom(1 << 20)) * (BLOCK >> 20))
    with open(path, "wb", buffering=0) as file:
        for start in range(0, size, BLOCK):
            file.write(block[: min(BLOCK, size - start)])
        os.fsync(file.fileno())
    path.unlink()


def _timed(act: Callable[[], object]) -> float:
    os.sync()  # earlier writes must not count
    return seconds_of(act)


def _products_per_second(until: Callable[[float], bool]) -> float:
    """Return the matrix products per second of this process until `until` is true of the seconds since."""
    matrix, count, begun = torch.randn(512, 512), 0, time.perf_counter()
    while not until(time.perf_counter() - begun):
        torch.mm(matrix, matrix)
        count += 1
    return max(count, 1) / (time.perf_counter() - begun)


if __name__ == "__main__":
    raise SystemExit(main())
