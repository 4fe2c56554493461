"""Measure the cost of one evaluation: face bench eval

numbers     milliseconds from embeddings to all numbers of a set of 6,000 pairs, against loops over folds and thresholds
embedding   seconds to score one set with two processes, against rank 0 alone with batches of ten while the other waits; also
            as a share of the training interval between two evaluations

Example: face bench eval --quick
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backbones import build_backbone
from data.record_dataset import RecordDataset
from eval.embed import EmbedSettings
from eval.monitor import evaluate
from eval.pair_sets.bin_file import PairSet, read_bin, write_bin
from eval.protocol import Embed
from eval.verification import verify
from utils import distributed
from utils.cli import make_parser
from utils.distributed import init_local
from utils.program import run_main

from .data import make_faces
from .kit import add_common_arguments, run_ranks, seconds_of, take_turns, write_json
from .plain_data import plain_embed, plain_numbers

_INTERVAL = 2000  # optimizer steps between evaluations
_STEPS = 3  # optimizer steps that are timed together


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face bench eval", __doc__)
    parser.add_argument("--pairs", type=int, default=1500, help="pairs of the set that is embedded")
    parser.add_argument("--processes", type=int, default=2, help="processes that share the images")
    parser.add_argument("--batch-size", type=int, default=128, help="images of an optimizer step")
    add_common_arguments(parser, device=False, rounds=3)
    return run_main(benchmark, parser.parse_args(arguments))


def benchmark(options: argparse.Namespace) -> None:
    """Measure both parts, print them, and write the JSON."""
    if options.quick:
        options.pairs, options.rounds = 200, 2
    results: dict[str, Any] = {"numbers": measure_numbers(options.rounds)}
    with tempfile.TemporaryDirectory() as folder:
        results["embedding"] = measure_embedding(options, Path(folder))
    write_json(options.json, results)


def measure_numbers(rounds: int) -> dict[str, float]:
    """Compare `verify` with the loops on 6,000 pairs of 512 numbers; both must find the same accuracies."""
    rng = np.random.default_rng(0)
    same = np.arange(6000) // 300 % 2 == 0
    first = rng.normal(size=(6000, 512))
    second = np.where(same[:, None], first, rng.normal(size=(6000, 512))) + 2.0 * rng.normal(size=(6000, 512))
    rows = np.stack([first, second], axis=1).reshape(-1, 512)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    accuracies, _ = plain_numbers(rows, same)
    if not np.array_equal(accuracies, verify(rows[0::2], rows[1::2], same, xnorm=1.0).accuracy_per_fold):
        raise ValueError("the loops and this project disagree on the accuracy of a fold")
    ways: dict[str, Callable[[], object]] = {
        "here": lambda: verify(rows[0::2], rows[1::2], same, xnorm=1.0),
        "loops": lambda: plain_numbers(rows, same),
    }
    seconds = take_turns({name: partial(seconds_of, way) for name, way in ways.items()}, rounds)
    found = {
        "milliseconds": 1e3 * statistics.median(seconds["here"]),
        "loops_milliseconds": 1e3 * statistics.median(seconds["loops"]),
        "ratio": statistics.median(a / b for a, b in zip(seconds["loops"], seconds["here"], strict=True)),
    }
    print("6,000 pairs, from embeddings to all numbers")
    print(f"  here  {found['milliseconds']:9.1f} ms (required 50)")
    print(f"  loops {found['loops_milliseconds']:9.1f} ms, {found['ratio']:.0f} times as long (required 20)")
    return found


def measure_embedding(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Compare scoring one set on all processes with scoring it on the first alone."""
    make_set(folder, options.pairs)
    found: dict[str, float] = run_ranks(_rank, options.processes, options, folder)[0]
    interval = _INTERVAL * found["step_seconds"]
    for way in ("ours", "plain"):
        found[f"{way}_share"] = found[f"{way}_seconds"] / (found[f"{way}_seconds"] + interval)
    found["ratio"] = found["plain_seconds"] / found["ours_seconds"]
    print(f"\n{options.pairs} pairs, {options.processes} processes, r18 of width 0.25, {options.batch_size} images in a step")
    print(f"  a step of training        {found['step_seconds']:9.2f} s; {_INTERVAL} steps {interval:.0f} s")
    for way, name in (("ours", "shared by all processes"), ("plain", "rank 0, tens of images")):
        print(f"  {name:<25} {found[f'{way}_seconds']:9.2f} s, {100 * found[f'{way}_share']:.2f} % of the run")
    print(f"  ratio                     {found['ratio']:9.2f}")
    return found


def make_set(folder: Path, pairs: int) -> None:
    """Write a set of pairs of drawn faces; as in LFW, two thirds of its pictures are distinct (7,701 of 12,000)."""
    distinct = max(2, round(0.64 * 2 * pairs))
    make_faces(folder / "faces", min(512, distinct))
    dataset = RecordDataset(folder / "faces")
    faces = [bytes(dataset.sample(index)[0]) for index in range(dataset.num_images)]
    order = np.random.default_rng(0).permutation(2 * pairs) % distinct
    # the appended bytes make them distinct
    images = [faces[index % len(faces)] + index.to_bytes(4, "little") for index in range(distinct)]
    write_bin(folder / "set.bin", [images[index] for index in order.tolist()], [bool(pair % 2) for pair in range(pairs)])


def _rank(rank: int, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the seconds of each way and of a step, as this rank sees them."""
    world = init_local(rank, options.processes, "cpu", f"{folder}/rendezvous")
    torch.manual_seed(0)
    model = build_backbone("r18", 128, 0.25)
    shared = build_backbone("r18", 128, 0.25).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    pair_set: PairSet = read_bin(f"{folder}/set.bin")

    def plain() -> None:
        if rank == 0:
            model.eval()
            plain_numbers(plain_embed(model, pair_set), pair_set.same)
        distributed.all_gather_objects(0, world)  # the others wait

    def steps() -> None:
        model.train()
        for _ in range(_STEPS):
            model(torch.rand(options.batch_size // options.processes, 3, 112, 112)).square().mean().backward()

    def timed(work: Callable[[], object]) -> float:
        distributed.all_gather_objects(0, world)
        return seconds_of(work)

    ours = partial(evaluate, Embed(shared, world, EmbedSettings(threads=1)), [pair_set])
    ways: dict[str, Callable[[], object]] = {"ours": lambda: dict(ours()), "plain": plain, "step": steps}
    seconds = take_turns({name: partial(timed, way) for name, way in ways.items()}, options.rounds)
    distributed.stop()
    found = {f"{name}_seconds": statistics.median(values) for name, values in seconds.items()}
    return found | {"step_seconds": found["step_seconds"] / _STEPS}


if __name__ == "__main__":
    raise SystemExit(main())
