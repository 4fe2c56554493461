"""Measure how DDP shares the gradients: python -m scripts.benchmark.ddp

Several gloo processes run forward and backward passes of one network in turn under each setting of DDP: without sharing, and
with bucket sizes, views of the buckets and static_graph. Every round takes all settings once, in an order of its own, so that
other load on the machine meets all of them; ratios are medians over the rounds of a setting's time by that without sharing. The
time of the processors, which includes that of the threads that communicate, says more on a machine with other load.

Example: python -m scripts.benchmark.ddp --quick
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from backbones import build_backbone, list_backbones
from utils import distributed
from utils.cli import int_in_range, make_parser
from utils.distributed import init_local
from utils.program import run_main

from .kit import machine

_KEPT = "not shared"
SETTINGS: dict[str, dict[str, Any]] = {
    _KEPT: {},
    "as here": {},
    **{f"buckets of {size} MiB": {"bucket_cap_mb": size} for size in (1, 5, 10, 50, 200)},
    "gradients copied into buckets": {"gradient_as_bucket_view": False},
    "static_graph": {"static_graph": True},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and measure; return the exit status."""
    parser = make_parser("python -m scripts.benchmark.ddp", __doc__)
    parser.add_argument("--backbone", choices=list_backbones(), default="r18", help="network")
    parser.add_argument("--width", type=float, default=1.0, help="factor on its channels")
    parser.add_argument("--batch", type=int_in_range(2), default=4, help="images of a process")
    parser.add_argument("--processes", type=int_in_range(2), default=2, help="processes on this machine")
    parser.add_argument("--rounds", type=int_in_range(1), default=15, help="rounds")
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute on two cores")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args(arguments)
    return run_main(lambda: benchmark(options))


def benchmark(options: argparse.Namespace) -> None:
    """Measure all settings, print them, and write the JSON."""
    if options.quick:
        options.width, options.batch, options.rounds = min(options.width, 0.25), min(options.batch, 2), 3
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(options, folder), nprocs=options.processes)
        seconds = json.loads((Path(folder) / "seconds.json").read_text())
    rows: list[dict[str, Any]] = []
    print(f"{machine('cpu')}\n{options.backbone} of width {options.width:g}, {options.processes} processes, bf16, ")
    print(f"{options.batch} images each, forward and backward; the ratio is setting / {_KEPT}, of each round\n")
    print(f"{'setting':<32}{'clock ms':>10}{'ratio':>7}{'range':>14}{'processor ms':>14}{'ratio':>7}{'range':>14}")
    for name, rounds in seconds.items():
        row: dict[str, Any] = {"setting": name}
        shown = ""
        for number, kind in enumerate(("clock", "processor")):
            ratios = [own[number] / kept[number] for own, kept in zip(rounds, seconds[_KEPT], strict=True)]
            row[kind] = statistics.median(own[number] for own in rounds)
            row[f"{kind}_ratio"], row[f"{kind}_ratio_range"] = statistics.median(ratios), [min(ratios), max(ratios)]
            span = f"{min(ratios):.2f} to {max(ratios):.2f}"
            shown += f"{1e3 * row[kind]:{10 + 4 * number}.1f}{row[f'{kind}_ratio']:7.2f}{span:>14}"
        rows.append(row)
        print(f"{name:<32}{shown}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine("cpu"), "rows": rows}, indent=1) + "\n")


def _rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    world = init_local(rank, options.processes, "cpu", f"{folder}/rendezvous")
    models = {}
    for name, changed in SETTINGS.items():
        torch.manual_seed(0)
        network = build_backbone(options.backbone, width=options.width)
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        models[name] = distributed.as_data_parallel(network, world, **changed)
    images = torch.randn(options.batch, 3, 112, 112).to(memory_format=torch.channels_last)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    order, draw = list(models), random.Random(0)
    for turn in range(3 + options.rounds):  # DDP arranges its buckets anew after the first step
        draw.shuffle(order)
        for name in order:
            distributed.all_gather_objects(0, world)  # all begin together
            started, worked = time.perf_counter(), time.process_time()
            with distributed.gradients_shared(models[name], now=name != _KEPT):
                with torch.autocast("cpu", torch.bfloat16):
                    embeddings = models[name](images)
                embeddings.square().mean().backward()
            if turn >= 3:
                seconds[name].append((time.perf_counter() - started, time.process_time() - worked))
            models[name].zero_grad(set_to_none=True)
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds))
    distributed.stop()


if __name__ == "__main__":
    raise SystemExit(main())
