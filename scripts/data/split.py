"""Hold out people for testing: face data split SET OUT --held-out 200

OUT/train is the set without the held-out identities, OUT/held_out has only them, and OUT/held_out.bin has pairs of them, half
genuine, in ten folds without common identities. eval.targets=[held_out] eval.path=OUT scores them during training.

SET: a folder with train.rec and train.idx, with *.tar shards, or with a sub-folder of pictures for each person; or a text file
of lines 'path label'.

Example: face data split set cut --held-out 200
"""

import argparse
import shlex
from pathlib import Path

import numpy as np

from data.scan import copy_set, open_set_of
from eval.pair_sets.bin_file import write_bin
from eval.pair_sets.sample import USUAL, most_pairs, sample_pairs
from eval.verification import FOLDS
from utils.cli import int_in_range, make_parser
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face data split", __doc__)
    parser.add_argument("set", type=Path, help="folder with train.rec, *.tar or a sub-folder per identity; or a list file")
    parser.add_argument("out", type=Path, help="folder for train, held_out and held_out.bin")
    default = "2 %% of them, but at least 30, or 30 %% if the set has fewer than 100, and never fewer than 20"
    parser.add_argument("--held-out", type=float, help=f"number of identities, or below 1 their share (default: {default})")
    parser.add_argument("--pairs", type=int_in_range(1), help="half of them genuine (default: 6000, or as many as there are)")
    parser.add_argument("--seed", type=int_in_range(0), default=0, help="random seed of the choice (default 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace the files in OUT")
    return run_main(split, parser.parse_args(arguments))


def split(options: argparse.Namespace) -> None:
    """Choose the identities, draw the pairs, and write the two sets and the file of pairs."""
    dataset = open_set_of(options.set)
    labels = np.asarray(dataset.labels())
    counts = np.bincount(labels, minlength=dataset.num_classes)
    people = np.flatnonzero(counts)
    wanted = _how_many(options.held_out, len(people))
    target = options.out / "held_out.bin"
    paths = (*(options.out / name / "train.rec" for name in ("train", "held_out")), target)
    for path in paths:
        if path != target and path.resolve() == (options.set / path.name).resolve():
            raise ValueError(f"{path.parent}: the new sets must not be written over the old one; choose another folder")
        if path.exists() and not options.overwrite:
            raise ValueError(f"{path} exists; add --overwrite to replace it, or choose another folder")
    rng = np.random.default_rng(options.seed)
    held = np.zeros(dataset.num_classes, dtype=bool)
    # identities with several images first, because one image gives no genuine pair
    order = rng.permutation(people)
    held[order[np.argsort(counts[order] < 2, kind="stable")][:wanted]] = True
    inside = np.flatnonzero(held[labels])
    most = most_pairs(labels[inside], FOLDS, options.seed)
    pairs = min(USUAL, most) if options.pairs is None else options.pairs
    if pairs > most or not most:
        several = int(np.count_nonzero(counts[held] > 1))
        raise ValueError(
            f"the {wanted} held-out identities ({several} of them with several images) give at most {most} pairs in {FOLDS} "
            "folds without common identities; "
            + (f"ask for --pairs {most} or fewer, or " if most else "")
            + "hold out more with --held-out N"
        )
    first, second, same = sample_pairs(labels[inside], pairs, FOLDS, options.seed)
    for path in paths:  # all before the first is replaced: a new train beside an old held_out would share people with it
        path.unlink(missing_ok=True)
    copy_set(dataset, np.flatnonzero(~held[labels]), options.out / "train", options.overwrite)
    copy_set(dataset, inside, options.out / "held_out", options.overwrite)
    indices = inside[np.stack([first, second], axis=1).reshape(-1)].tolist()
    images = {index: bytes(dataset.sample(index)[0]) for index in dict.fromkeys(indices)}
    write_bin(target, [images[index] for index in indices], same.tolist())
    print(f"{target}: {len(same)} pairs of {len(images)} images")
    keys = [f"data.path={options.out / 'train'}", f"eval.path={options.out}", "eval.targets=[held_out]"]
    print(f"next: face train {shlex.join(['small', *keys])}")


def _how_many(given: float | None, people: int) -> int:
    """Return how many of `people` identities to hold out."""
    least = 2 * FOLDS
    wanted = max(round(0.02 * people), min(30, round(0.3 * people)), least) if given is None else given
    wanted = round(wanted * people) if 0 < wanted < 1 else wanted
    if people <= least:
        raise ValueError(f"{people} identities are too few: {FOLDS} folds of pairs need {least}, and some must remain")
    if not least <= wanted < people or wanted % 1:
        those = f"from {least} (two for each of {FOLDS} folds) to {people - 1}"
        raise ValueError(f"--held-out must be a share below 1, or a whole number {those}, got {wanted:.15g}")
    return int(wanted)


if __name__ == "__main__":
    raise SystemExit(main())
