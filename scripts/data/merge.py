"""Write several sets as one: face data merge SET SET ... --out OUT

--labels maps the labels, like data.labels in training: offset (people of different sets are different, the default), same
(equal numbers are one person), or a file of lines 'source label class'. Training on several sets needs no copy: see
data.sources.

The file of --labels lists every label of every SET: source is 0 for the first SET, 1 for the next; class is the person's
label in OUT, from 0 without gaps.

Examples:
  face data merge first second --out both
  face data merge first second --out both --labels classes.txt
"""

import argparse
from pathlib import Path

import numpy as np

from data.mixture import MixedDataset, Source, class_maps
from data.scan import copy_set, open_set_of
from utils.cli import make_parser
from utils.program import run_main
from utils.text import prefix_errors


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face data merge", __doc__)
    parser.add_argument("sets", type=Path, nargs="+", help="folders with train.rec, *.tar or a folder per identity; list files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new set")
    parser.add_argument("--labels", default="offset", help="offset, same, or a file of lines 'source label class'")
    parser.add_argument("--overwrite", action="store_true", help="replace a set in OUT")
    return run_main(merge, parser.parse_args(arguments))


def merge(options: argparse.Namespace) -> None:
    """Write all images under their merged identities."""
    if any(options.out.resolve() == path.resolve() for path in options.sets):
        raise ValueError(f"{options.out}: the new set must not overwrite one of the old sets; choose another folder")
    parts = [open_set_of(path) for path in options.sets]
    with prefix_errors("--labels"):
        maps = class_maps([part.num_classes for part in parts], options.labels)
    mixed = MixedDataset([Source(part, 1, classes) for part, classes in zip(parts, maps, strict=True)], 0)
    copy_set(mixed, np.arange(mixed.num_stored), options.out, options.overwrite)


if __name__ == "__main__":
    raise SystemExit(main())
