"""Score a trained network on verification sets: python -m eval RUN --targets lfw cfp_fp agedb_30.

RUN is a run folder (its newest checkpoint, or the best), one checkpoint folder, or a weights file together with --backbone,
such as arcface_torch's backbone.pth. Works under torchrun too; all processes share the images.

NAME.bin: a verification set as insightface ships it (a pickle, read without executing anything), or NAME.safetensors, or
NAME.csv with lines 'path1,path2,same'.

Examples:
  python -m eval work_dirs/ms1mv3_r50
  python -m eval backbone.pth --backbone r50 --targets lfw cfp_fp --data /data/val --report report
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m eval")

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from scripts.networks import add_network_arguments, load_network
from utils import distributed
from utils.cli import make_parser
from utils.distributed import together
from utils.optim import AUTOCAST
from utils.program import guarded

from .evaluate import evaluate, load_pair_sets
from .html_report import write_report
from .report import format_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and evaluate; return the exit status."""
    parser = make_parser("python -m eval", __doc__)
    add_network_arguments(parser)
    parser.add_argument("--targets", nargs="+", metavar="NAME", help="sets to score; default: those of the run's config")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with NAME.bin; default: that of the run's config")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="also write report.html there, its pictures, results.json and results.md"
    )
    options = parser.parse_args(arguments)
    return guarded(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Evaluate as the command line says and print the table on rank 0."""
    world = distributed.start(options.device)
    with together(world):
        model, name, config = load_network(options)
        targets = options.targets or config.get("eval", {}).get("targets")
        folder = options.data or config.get("eval", {}).get("path") or config.get("data", {}).get("path")
        if not targets or not folder:
            raise ValueError("say which sets to score: --targets NAME ... --data FOLDER")
        pair_sets = load_pair_sets(folder, targets)
    model = model.to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    results = {}
    for target, result in evaluate(model, pair_sets, world, options.batch_size, AUTOCAST[options.precision], options.threads):
        results[target] = result
        if world.rank == 0 and len(pair_sets) > 1:
            print(f"{target}: {100 * result.accuracy:.2f} %", flush=True)
    if world.rank != 0:
        return
    print(f"\n{name}\n{format_table(results)}")
    if options.report:
        write_report(options.report, name, results, pair_sets)
        print(f"\nreport: {options.report / 'report.html'}")


if __name__ == "__main__":
    raise SystemExit(main())
