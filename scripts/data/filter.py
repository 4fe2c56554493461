"""Copy a part of a set: face data filter SET OUT --min-images 3 --drop report/drop.csv

The remaining identities are renumbered 0 to C - 1, in their old order; OUT/classes.csv has the old numbers. Image bytes do not
change. SET may be any training set; OUT is a RecordIO set.

--drop: a text file whose lines begin with the index of an image to drop, such as drop.csv of face data inspect.
--decisions: decisions.csv of face clean: images to drop or to move, identities to drop, to merge or to split.

Examples:
  face data filter set cleaned --min-images 3 --drop report/drop.csv
  face data filter set cleaned --min-images 3 --decisions labels/decisions.csv
"""

import argparse
from pathlib import Path

import numpy as np

from data.decisions import apply_decisions, read_decisions
from data.scan import copy_set, open_set_of, parse_classes
from utils.cli import int_in_range, make_parser
from utils.files import read_lines
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face data filter", __doc__)
    parser.add_argument("set", type=Path, help="folder with train.rec, *.tar or a folder per person; or a list of 'path label'")
    parser.add_argument("out", type=Path, help="folder of the new set")
    parser.add_argument("--drop", type=Path, help="CSV or text file: a line's first column is the index of an image to drop")
    parser.add_argument("--decisions", type=Path, help="CSV: action,image,identity,to, as face clean writes it")
    parser.add_argument("--classes", default="", help="identities to keep, A:B for A to B - 1, or a list A,B,C (default: all)")
    parser.add_argument("--min-images", type=int_in_range(1), default=1, help="drop identities with fewer images left")
    parser.add_argument("--max-images", type=int_in_range(0), default=0, help="of an identity, drawn at random; 0 = all")
    parser.add_argument("--seed", type=int_in_range(0), default=0, help="random seed of --max-images")
    parser.add_argument("--overwrite", action="store_true", help="replace a set in OUT")
    return run_main(select, parser.parse_args(arguments))


def select(options: argparse.Namespace) -> None:
    """Choose the images and copy them."""
    dataset = open_set_of(options.set)
    labels = np.asarray(dataset.labels())
    names: list[str] = []
    if options.decisions:
        decisions = read_decisions(options.decisions, labels, dataset.num_classes)
        labels, names = apply_decisions(decisions, labels, dataset.num_classes)
    count = dataset.num_classes + len(names)
    keep = labels >= 0
    if options.drop:
        keep[read_indices(options.drop, dataset.num_stored)] = False
    classes = np.zeros(count, dtype=bool)
    classes[parse_classes(options.classes, count)] = True
    keep &= classes[labels]
    if options.max_images:
        keep &= _at_most(labels, keep, options.max_images, options.seed)
    counts = np.bincount(labels[keep], minlength=count)
    keep &= counts[labels] >= max(1, options.min_images)
    if not keep.any():
        raise ValueError(f"{options.set}: no image is left; relax --min-images, --classes, --decisions or --drop")
    copy_set(dataset, np.flatnonzero(keep), options.out, options.overwrite, options.set, labels, names)
    print(
        f"the old set has {dataset.num_stored} images of {dataset.num_classes} identities; their old numbers are in "
        f"{options.out / 'classes.csv'}"
    )


def read_indices(path: Path, count: int) -> np.ndarray:
    """Return the indices in the first column of a CSV or text file; a first line without a number is a header."""
    found = []
    for number, line in enumerate(read_lines(path), 1):
        word = line.replace(",", " ").split()[:1]
        if not word or (number == 1 and not word[0].isdigit()):
            continue
        if not word[0].isdigit() or int(word[0]) >= count:
            raise ValueError(f"{path}: line {number} must begin with the index of an image, 0 to {count - 1}, got '{word[0]}'")
        found.append(int(word[0]))
    return np.array(found, dtype=np.int64)


def _at_most(labels: np.ndarray, keep: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Return (n,) bool with at most `most` of the kept images of each identity, drawn at random."""
    chosen = np.zeros(len(labels), dtype=bool)
    places = np.flatnonzero(keep)
    places = places[np.random.default_rng(seed).permutation(len(places))]
    places = places[np.argsort(labels[places], kind="stable")]
    ranks = np.arange(len(places)) - np.searchsorted(labels[places], labels[places], side="left")
    chosen[places[ranks < most]] = True
    return chosen


if __name__ == "__main__":
    raise SystemExit(main())
