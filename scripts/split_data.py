"""Hold people out for testing: python -m scripts.split_data SET OUT --held-out 200

OUT/train is the set without the held-out identities, OUT/held_out has them, OUT/held_out.bin has pairs of them, half genuine,
in ten folds without a common identity: eval.targets=[held_out] eval.path=OUT scores it during training.

SET: a folder with train.rec and train.idx, with *.tar shards, or with a sub-folder of pictures for each person; or a text file
of lines 'path label'.

Example: python -m scripts.split_data set cut --held-out 200
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m scripts.split_data")

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.datasets import open_set
from eval.pairs import write_bin
from eval.sample_pairs import FOLDS, sample_pairs
from utils.cli import make_parser
from utils.program import guarded

from .face_files import whole
from .filter_data import copy_set


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and split; return the exit status."""
    parser = make_parser("python -m scripts.split_data", __doc__)
    parser.add_argument("set", type=Path, help="folder with train.rec, *.tar or a sub-folder per identity; or a list file")
    parser.add_argument("out", type=Path, help="folder for train, held_out and held_out.bin")
    parser.add_argument("--held-out", type=float, default=0.02, help="identities; below 1: this share of them (default 0.02)")
    parser.add_argument("--pairs", type=whole(1), default=6000, help="of held_out.bin, half of them genuine (default 6000)")
    parser.add_argument("--seed", type=whole(0), default=0, help="another seed holds out others (default 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace what OUT has")
    options = parser.parse_args(arguments)
    return guarded(lambda: split(options))


def split(options: argparse.Namespace) -> None:
    """Choose the identities, draw the pairs, and write the two sets and the file of pairs."""
    dataset = open_set(options.set)
    labels = np.asarray(dataset.labels())
    counts = np.bincount(labels, minlength=dataset.num_classes)
    people = np.flatnonzero(counts)
    wanted = round(options.held_out * len(people)) if options.held_out < 1 else int(options.held_out)
    if not 2 <= wanted < len(people):
        raise ValueError(f"--held-out must leave from 2 to {len(people) - 1} of the {len(people)} identities, got {wanted}")
    target = options.out / "held_out.bin"
    if target.exists() and not options.overwrite:
        raise ValueError(f"{target} exists; add --overwrite to replace it, or choose another folder")
    rng = np.random.default_rng(options.seed)
    held = np.zeros(dataset.num_classes, dtype=bool)
    # identities with several images first: those with one give no genuine pair
    order = rng.permutation(people)
    held[order[np.argsort(counts[order] < 2, kind="stable")][:wanted]] = True
    inside = np.flatnonzero(held[labels])
    first, second, same = sample_pairs(labels[inside], options.pairs, FOLDS, options.seed)
    copy_set(dataset, np.flatnonzero(~held[labels]), options.out / "train", options.overwrite, options.set)
    copy_set(dataset, inside, options.out / "held_out", options.overwrite, options.set)
    indices = inside[np.stack([first, second], axis=1).reshape(-1)].tolist()
    images = {index: bytes(dataset.sample(index)[0]) for index in dict.fromkeys(indices)}
    write_bin(target, [images[index] for index in indices], same.tolist())
    print(f"{target}: {len(same)} pairs of {len(images)} images")
    print(f"next: python train.py CONFIG data.path={options.out / 'train'} eval.path={options.out} eval.targets=[held_out]")


if __name__ == "__main__":
    raise SystemExit(main())
