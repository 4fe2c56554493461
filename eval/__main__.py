"""Score a trained network on verification sets: face eval RUN --targets lfw cfp_fp agedb_30.

RUN is a run folder (its newest checkpoint, or the best), one checkpoint folder, or a weights file together with --backbone,
such as arcface_torch's backbone.pth; without RUN it is the newest run in work_dirs. Under torchrun all processes share the
images. The report of a run goes into its folder.

A set of pairs is NAME.bin, as insightface ships it (a pickle, read without executing anything), NAME.safetensors, NAME.csv with
lines 'path1,path2,same', or a folder of people. ijbc:FOLDER and ijbb:FOLDER are IJB (meta/ and loose_crop/); identify:FOLDER
searches what begins with probes in what begins with gallery.

Examples:
  face eval work_dirs/ms1mv3_r50
  face eval work_dirs/ms1mv3_r50 --targets lfw ijbc:/data/IJBC
  face eval backbone.pth --backbone r50 --targets lfw cfp_fp --data /data/val --report report
"""

if __name__ == "__main__":
    from utils.machine import begin_imports, leave

    begin_imports()

import argparse
import errno
import time
from pathlib import Path

from backbones import build_backbone
from data.scan import open_set_of
from utils.cli import make_parser, warn
from utils.distributed import World
from utils.files import shown
from utils.program import run_main

from .monitor import evaluate, load_protocols
from .networks import Network, add_network_arguments, embed_settings, open_network
from .pair_sets.bin_file import PairSet
from .protocol import Embed, Protocol, Result
from .report import format_table, write_report


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face eval", __doc__)
    add_network_arguments(parser, newest=True)
    sets = "sets to score: names in --data, paths, ijbb:DIR, ijbc:DIR, identify:DIR; default: those of the run's config"
    parser.add_argument("--targets", nargs="+", metavar="SET", help=sets)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with NAME.bin; default: that of the run's config")
    parser.add_argument("--report", type=Path, metavar="DIR", help="for page, pictures and results (default: RUN/evaluation)")
    return run_main(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    """Evaluate according to the command line and print the table on rank 0."""
    world, network, protocols = open_network(options, build_backbone, lambda network: _load_protocols(options, network))
    results: dict[str, Result] = {}
    settings = embed_settings(options, network)
    for name, result in evaluate(Embed(network.model, world, settings, world.rank == 0), protocols):
        results[name] = result
        figure, value = next(iter(result.figures.items()))
        if world.rank == 0 and len(protocols) > 1 and value is not None:
            print(f"{name}: {'' if figure == 'accuracy' else f'{figure} '}{100 * value:.2f} %", flush=True)
    if world.rank != 0:
        return
    print(f"\n{network.title}\n{format_table(results)}")
    folder = options.report or (network.run / "evaluation" if network.run else None)
    if folder is None:
        return
    try:
        if not options.report and folder.is_symlink():  # of a run that may be from somebody else
            raise OSError(errno.ELOOP, "it is a link")
        write_report(folder, network.name, results, protocols, _facts(options, network, world, protocols))
        print(f"\nreport: {shown(folder / 'report.html')}")
    except OSError as error:
        if options.report:
            raise
        warn(f"{shown(folder)}: no report: {error.strerror}; name another folder with --report")


def _load_protocols(options: argparse.Namespace, network: Network) -> list[Protocol[Result]]:
    """Return the sets that the command line names, else those of the run's configuration."""
    config = network.config
    folder = options.data or config.get("eval", {}).get("path") or config.get("data", {}).get("path") or ""
    if options.targets:
        return load_protocols(folder, options.targets, open_set_of, "--targets", "--data")
    targets = config.get("eval", {}).get("targets")
    if not targets:
        whose = f"the configuration of {network.name} names none" if config else f"{network.name} has none that does"
        raise ValueError(f"no sets to score: {whose}; name them with --targets SET ...")
    try:
        return load_protocols(folder, targets, open_set_of, "the run's configuration", "--data")
    except ValueError as error:
        raise ValueError(f"{error}; or name other sets with --targets, another folder with --data") from None


def _facts(options: argparse.Namespace, network: Network, world: World, protocols: list[Protocol]) -> list[tuple[str, str]]:
    """Return the (name, value) pairs for the top of a report."""
    section = network.config.get("backbone", {})
    kind = options.backbone or section.get("name", "")
    width, size = section.get("width", options.width), section.get("embedding_size", options.embedding_size)
    precision = f"{options.precision} on {world.device.type}, batches of {options.batch_size}, {world.world_size} process(es)"
    counts = [len(protocol.same) for protocol in protocols if isinstance(protocol, PairSet)]
    return [
        ("network", f"{network.name}{f': {kind}, width {width:g}, {size} numbers per face' if kind else ''}"),
        ("images", f"{network.image_size} x {network.image_size} pixels"),
        *([("checkpoint", network.state)] if network.state else []),
        *((f"set {protocol.name}", f"{protocol.path}: {protocol.describe()}") for protocol in protocols),
        *([("pairs", f"{sum(counts):,}")] if counts else []),
        ("precision", precision),
        ("date", time.strftime("%Y-%m-%d %H:%M")),
    ]


if __name__ == "__main__":
    leave(main)
