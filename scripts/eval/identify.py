"""Search probes in a gallery: python -m scripts.eval.identify RUN --gallery gallery.txt --probes probes.txt

Each list names pictures of aligned faces, 112 x 112 for most networks, with a line "path label" per picture. A RecordIO
set, tar shards or a folder per person also work. Several galleries are combined, as for TinyFace with its distractors. Probes
whose person is in no gallery are strangers. Prints rank-1, 5, 10, 20 and, if there are strangers among the probes, TPIR at
FPIR.

gallery.txt and probes.txt: a line 'path label' for each picture. The path is relative to the list and may contain spaces. The
label is a whole number, the same for the same person in all lists.

Example: python -m scripts.eval.identify work_dirs/ms1mv3_r50 --gallery gallery.txt --probes probes.txt
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from backbones import build_backbone
from data.scan import open_set_of
from eval.identification import Identification
from eval.monitor import evaluate
from eval.networks import add_network_arguments, embed_settings, open_network
from utils.cli import make_parser
from utils.program import run_main


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and search; return the exit status."""
    parser = make_parser("python -m scripts.eval.identify", __doc__)
    add_network_arguments(parser)
    parser.add_argument("--gallery", type=Path, nargs="+", required=True, help="pictures of the known people")
    parser.add_argument("--probes", type=Path, required=True, help="pictures to search for in the gallery")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    return run_main(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    """Embed both sides on all ranks; search and print on rank 0."""

    def read(_: object) -> list[Identification]:
        return [Identification([open_set_of(path) for path in options.gallery], open_set_of(options.probes))]

    world, network, protocols = open_network(options, build_backbone, read)
    settings = embed_settings(options, network)
    ((_, result),) = evaluate(network.model, protocols, world, settings, shows_progress=True)
    if world.rank != 0:
        return
    report = {"network": network.title, **result.as_json()}
    for key, value in report.items():
        shown = f"{100 * value:.2f} %" if isinstance(value, float) else "not measurable" if value is None else value
        print(f"  {key.replace('_', ' '):<28}{shown}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
