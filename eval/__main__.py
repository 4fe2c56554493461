"""Score a trained network on verification sets: python -m eval RUN --targets lfw cfp_fp agedb_30.

RUN is a run folder (its newest checkpoint, or the best), one checkpoint folder, or a weights file together with --backbone,
such as arcface_torch's backbone.pth. Under torchrun all processes share the images.

A set is NAME.bin, as insightface ships it (a pickle, read without executing anything), or NAME.safetensors, or NAME.csv with
lines 'path1,path2,same'.

Examples:
  python -m eval work_dirs/ms1mv3_r50
  python -m eval backbone.pth --backbone r50 --targets lfw cfp_fp --data /data/val --report report
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m eval")

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from backbones import build_backbone
from utils.cli import make_parser
from utils.distributed import World
from utils.files import shown
from utils.precision import AUTOCAST
from utils.program import run_main

from .evaluate import evaluate, load_pair_sets
from .html_report import write_report
from .networks import Network, add_network_arguments, open_network
from .pair_sets.bin_file import PairSet
from .report import format_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and evaluate; return the exit status."""
    parser = make_parser("python -m eval", __doc__)
    add_network_arguments(parser)
    parser.add_argument(
        "--targets",
        nargs="+",
        metavar="SET",
        help="sets to score: names in --data, or paths; default: those of the run's config",
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with NAME.bin; default: that of the run's config")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="also write report.html there, its pictures, results.json and results.md"
    )
    options = parser.parse_args(arguments)
    return run_main(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Evaluate according to the command line and print the table on rank 0."""
    world, network, pair_sets = open_network(
        options,
        build_backbone,
        lambda network: _load_sets(options, network),
        lambda pair_sets: {f"hash of {pair_set.name}": pair_set.digest() for pair_set in pair_sets},
    )
    results, settings = {}, (options.batch_size, AUTOCAST[options.precision], options.threads, network.image_size)
    for target, result in evaluate(network.model, pair_sets, world, *settings):
        results[target] = result
        if world.rank == 0 and len(pair_sets) > 1:
            print(f"{target}: {100 * result.accuracy:.2f} %", flush=True)
    if world.rank != 0:
        return
    print(f"\n{network.title}\n{format_table(results)}")
    if options.report:
        write_report(options.report, network.name, results, pair_sets, _facts(options, network, world, pair_sets))
        print(f"\nreport: {shown(options.report / 'report.html')}")


def _load_sets(options: argparse.Namespace, network: Network) -> list[PairSet]:
    """Return the sets that the command line names, else those of the run's configuration."""
    config = network.config
    folder = options.data or config.get("eval", {}).get("path") or config.get("data", {}).get("path") or ""
    if options.targets:
        return load_pair_sets(folder, options.targets, "--targets", "--data")
    targets = config.get("eval", {}).get("targets")
    if not targets:
        whose = (
            f"the configuration of {network.name} names none" if config else f"{network.name} has no configuration that does"
        )
        raise ValueError(f"no sets to score: {whose}; name them with --targets SET ...")
    try:
        return load_pair_sets(folder, targets, "the run's configuration", "--data")
    except ValueError as error:
        raise ValueError(f"{error}; or name other sets with --targets, another folder with --data") from None


def _facts(options: argparse.Namespace, network: Network, world: World, pair_sets: Sequence[PairSet]) -> list[tuple[str, str]]:
    """Return the (name, value) pairs for the top of a report."""
    section = network.config.get("backbone", {})
    kind = options.backbone or section.get("name", "")
    width, size = section.get("width", options.width), section.get("embedding_size", options.embedding_size)
    precision = f"{options.precision} on {world.device.type}, batches of {options.batch_size}, {world.world_size} process(es)"
    counts = [(len(pairs.same), int(pairs.same.sum()), len(pairs.images)) for pairs in pair_sets]
    return [
        ("network", f"{network.name}{f': {kind}, width {width:g}, {size} numbers per face' if kind else ''}"),
        ("images", f"{network.image_size} x {network.image_size} pixels"),
        *([("checkpoint", network.state)] if network.state else []),
        *(
            (f"set {pairs.name}", f"{pairs.path}: {total:,} pairs, {genuine:,} genuine, of {images:,} images")
            for pairs, (total, genuine, images) in zip(pair_sets, counts, strict=True)
        ),
        ("pairs", f"{sum(total for total, _, _ in counts):,}"),
        ("precision", precision),
        ("date", time.strftime("%Y-%m-%d %H:%M")),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
