"""Measure networks on hard versions of sets: face robustness NETWORK ... --targets SET ... --out DIR

The second picture of each pair is degraded on the fly, at some strengths of each kind: masked, eyes, mouth, occluded,
low_resolution, jpeg, blur, motion, noise, dark, bright, rotated, shifted, scaled. That is done at 112 x 112 pixels, whatever
the network's input size is, to which the picture is then resized. DIR then has report.html, accuracy over strength and examples
as pictures, results.json and results.csv. What is done is kept in DIR/unfinished; start the same command again to go on after
a kill.

Examples:
  face robustness work_dirs/r50 work_dirs/r18 --targets lfw cfp_fp --data /data/val --out hard
  face robustness work_dirs/r50 --targets lfw.bin --kinds masked blur=1,2,4 --both --out hard
"""

import argparse
import contextlib
from pathlib import Path

from analysis.degrade import KINDS, parse_kinds
from analysis.robustness import Row, count_images, measure, write_robustness
from backbones import build_backbone
from deploy.journal import Journal, open_journal
from eval.monitor import load_pair_sets
from eval.networks import add_network_arguments, embed_settings, open_network
from eval.pair_sets.bin_file import PairSet
from utils.cli import int_in_range, make_parser, progress
from utils.distributed import all_gather_objects, init_distributed, raise_on_all_ranks
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face robustness", __doc__)
    parser.add_argument("networks", type=Path, nargs="+", metavar="NETWORK", help="as for face eval")
    add_network_arguments(parser, positional=False)
    parser.add_argument("--targets", nargs="+", required=True, metavar="SET", help="sets of pairs: names in --data, or paths")
    parser.add_argument("--data", type=Path, default="", metavar="DIR", help="folder with NAME.bin")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the report, new or empty")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), metavar="KIND[=S,S]", help="kinds, with strengths (all)")
    parser.add_argument("--both", action="store_true", help="degrade both pictures of a pair, not the second alone")
    parser.add_argument("--seed", type=int_in_range(0), default=0, help="of places, directions, colours and noise (default 0)")
    parser.add_argument("--again", action="store_true", help="begin anew, although DIR has a report or a part of it")
    return run_main(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    """Measure each network on each set, and write the report on rank 0."""
    kinds = parse_kinds(options.kinds)
    unfinished = options.out / "unfinished"
    if options.out.is_dir() and any(options.out.iterdir()) and not unfinished.exists() and not options.again:
        raise ValueError(f"--out must be a new or an empty folder, but {options.out} has files; name another, or add --again")
    if len(set(options.networks)) < len(options.networks):
        raise ValueError("a network is named twice; leave one out")
    rows: list[Row] = []
    sets: list[PairSet] = []
    names = [path.name for path in options.networks]
    if len(set(names)) < len(names):  # checkpoints of several runs
        names = list(map(str, options.networks))
    journal: Journal | None = None
    world = init_distributed(options.device, setting="--device ")
    with contextlib.ExitStack() as stack:
        with raise_on_all_ranks(world):
            if world.rank == 0:
                options.out.mkdir(parents=True, exist_ok=True)
                journal = stack.enter_context(open_journal(unfinished, str(options.out)))
                journal.begin({"program": "robustness"}, options.again, str(options.out), "was begun with")
        kept = all_gather_objects([entry.record for entry in journal.entries] if journal else [], world)[0]
        for name, path in zip(names, options.networks, strict=True):
            options.run = path
            _, network, sets = open_network(
                options, build_backbone, lambda _: load_pair_sets(options.data, options.targets, "--targets", "--data")
            )
            settings = embed_settings(options, network)
            total = sum(count_images(pairs, kinds, options.both) for pairs in sets) // world.world_size
            with progress([], total, "embedding", "image", shown=world.rank == 0) as bar:
                for pairs in sets:
                    same = (network.image_size, options.precision, options.both, options.seed)
                    facts = [network.identity, pairs.digest(), *same]  # a row depends on, beside its kind and strength
                    found = [Row(name, pairs.name, *record["row"][2:]) for record in kept if record.get("facts") == facts]
                    done = {(row.kind, row.strength): row for row in found}
                    arguments = (pairs, kinds, options.both, options.seed, world, settings, bar.update, done)
                    for row in measure(network.model, name, *arguments):
                        rows.append(row)
                        if journal and (row.kind, row.strength) not in done:
                            journal.add({"facts": facts, "row": row})
        if journal:
            write_robustness(options.out, rows, sets, kinds, options.both, options.seed)
            unfinished.unlink()
            for row in rows:
                print(f"{row.network} {row.set} {row.kind} {row.strength:g}: {100 * row.accuracy:.2f} %")
            print(f"report: {options.out / 'report.html'}")


if __name__ == "__main__":
    raise SystemExit(main())
