"""Score a network on IJB-B or IJB-C: python -m scripts.eval.ijb RUN --root /data/IJBC --json FILE

ROOT has meta/ and loose_crop/, as in the archives that insightface links to. 1:1 is TAR at FAR over template pairs, both as the
papers compute it and at a FAR not above the target. 1:N, if the gallery and probe lists are in meta/, is rank-1, 5, 10 and
TPIR at FPIR. Under torchrun the processes share the images.

In meta/: SET_face_tid_mid.txt (lines 'picture template medium'), SET_template_pair_label.txt ('template template same')
and SET_name_5pts_score.txt ('picture x1 y1 ... x5 y5 score'); SET is ijbb or ijbc.

Example: python -m scripts.eval.ijb work_dirs/ms1mv3_r50 --root /data/IJBC --json ijbc.json
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backbones import build_backbone
from eval.monitor import evaluate
from eval.networks import add_network_arguments, embed_settings, open_network
from eval.templates import TemplateProtocol
from utils.cli import make_parser
from utils.program import run_main


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and evaluate; return the exit status."""
    parser = make_parser("python -m scripts.eval.ijb", __doc__)
    add_network_arguments(parser)
    parser.add_argument("--root", type=Path, required=True, help="folder with meta/ and loose_crop/")
    parser.add_argument("--set", choices=("ijbb", "ijbc"), help="default: the one whose lists are in meta/")
    parser.add_argument("--no-detector-score", action="store_true", help="give all images of a medium the same weight")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--scores", type=Path, help="write the score of every template pair to this .npy file")
    return run_main(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    """Score on all ranks; print on rank 0."""
    weighted = not options.no_detector_score
    world, network, (protocol,) = open_network(
        options, build_backbone, lambda _: [TemplateProtocol(options.root, options.set, weighted, options.scores)]
    )
    settings = embed_settings(options, network)
    ((name, result),) = evaluate(network.model, [protocol], world, settings, shows_progress=True)
    if world.rank == 0:
        report = result.as_json()
        print(f"\n{network.title} on {name}: {protocol.describe()}")
        _print(report)
        if options.json:
            options.json.write_text(json.dumps({"network": network.title, "set": name, **report}, indent=1) + "\n")


def _print(report: dict[str, Any]) -> None:
    print(f"1:1, {report['pairs']:,} pairs, {report['genuine']:,} of them genuine")
    print(f"  {'FAR':<8}{'as published':>14}{'FAR not above':>15}{'impostors accepted':>20}{'cosine threshold':>18}")
    for point in report["operating_points"]:
        target, tar = point["target"], point["tar"]
        exact = "n/a" if tar is None else f"{100 * tar:.2f}"
        threshold = point["cosine_threshold"]
        cosine = "n/a" if threshold is None else f"{threshold:.4f}"
        print(
            f"  {target:<8}{100 * report['tar_as_published'][target]:>14.2f}{exact:>15}{point['num_accepted']:>20}{cosine:>18}"
        )
    for key, value in report.get("identification", {}).items():
        print(f"  1:N {key:<22}{'not measurable' if value is None else f'{100 * value:.2f} %'}")


if __name__ == "__main__":
    raise SystemExit(main())
