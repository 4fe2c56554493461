"""Write a network's model card: face card RUN --out DIR

The card says what a network is: backbone, data, recipe, results with 95 % intervals, thresholds, what it takes and returns.
DIR then has card.md with its pictures, and card.yaml. Only a person can say what the
network is meant for, under which licences, and whom to ask. Write that into card.yaml, and make the card again: card.yaml is
never changed, and a card that was changed by hand is never overwritten.

The results are those of results.json, which training writes at its end, and face eval --report for any network. Paths of
folders are not on the card, only the names of data sets and files.

Examples:
  face card work_dirs/demo_cpu --out card
  face card work_dirs/demo_cpu --best --results report/results.json --out card
"""

from pathlib import Path

from deploy.card.card import write_card
from eval.networks import add_network_arguments
from utils.cli import make_parser
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face card", __doc__)
    add_network_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the card")
    parser.add_argument("--results", type=Path, metavar="FILE", help="default: that of the run's end, if it is of this network")
    parser.add_argument("--fields", type=Path, metavar="FILE", help="texts that a person wrote; default: card.yaml in DIR")
    return run_main(write_card, parser.parse_args(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
