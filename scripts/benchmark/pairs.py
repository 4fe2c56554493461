"""Measure the comparison of all pairs against bare products of the same blocks: face bench pairs

The faces are random vectors, ten of each person. Bare products multiply the same blocks of rows, and look at no cosine.

Example: face bench pairs --quick
"""

import argparse
import statistics

import numpy as np
import torch

from analysis.all_pairs import ROWS, count_pairs
from utils.cli import int_in_range, make_parser
from utils.program import run_main

from .kit import add_common_arguments, machine, seconds_of, take_turns, write_json

_IMAGES, _SIZE = 10, 512  # of a person; numbers of a vector


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face bench pairs", __doc__)
    parser.add_argument("--people", type=int_in_range(2), default=10_000, help="with ten images each")
    add_common_arguments(parser, "1,500 people: under a minute on two cores", device=False, rounds=3)
    return run_main(benchmark, parser.parse_args(arguments))


def benchmark(options: argparse.Namespace) -> None:
    """Measure, print, and write the JSON."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # as count_pairs chooses
    labels = np.repeat(np.arange(1500 if options.quick else options.people), _IMAGES)
    vectors = np.random.default_rng(0).standard_normal((len(labels), _SIZE), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    pairs = len(labels) * (len(labels) - 1) // 2
    print(machine(device.type))
    count_pairs(vectors[:4096], labels[:4096])  # first calls allocate
    ways = {
        "here": lambda: seconds_of(lambda: count_pairs(vectors, labels), device),
        "bare": lambda: seconds_of(lambda: _multiply(vectors, device), device),
    }
    times = take_turns(ways, options.rounds)
    here, bare = (statistics.median(times[name]) for name in ways)
    ratios = sorted(one / other for one, other in zip(times["here"], times["bare"], strict=True))
    ratio = statistics.median(ratios)
    print(
        f"{len(labels):,} faces, {pairs:,} pairs: {here:.1f} s, {1e-6 * pairs / here:,.0f} million pairs a second; bare "
        f"products {bare:.1f} s, ratio of the times {ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    found = {"faces": len(labels), "pairs": pairs, "pairs_per_second": pairs / here, "ratio": ratio}
    write_json(options.json, found | {f"{name}_seconds": seconds for name, seconds in times.items()})


def _multiply(vectors: np.ndarray, device: torch.device) -> None:
    """Multiply each block of rows with itself and all later ones, as count_pairs does."""
    blocks = torch.from_numpy(vectors).to(device).split(ROWS[device.type])
    for last, right in enumerate(blocks):
        for block in blocks[: last + 1]:
            block @ right.T


if __name__ == "__main__":
    raise SystemExit(main())
