"""Copy a RecordIO set in random order: face data shuffle SET OUT --seed 1

For readers that read the file from front to back (a network file system, DALI), and for data.shuffle=block. The copy has no
header record; images and labels do not change.

Example: face data shuffle set shuffled --seed 1
"""

import argparse
from pathlib import Path

import numpy as np

from data.record_dataset import RecordDataset
from data.recordio.image_record import RecordSetWriter
from utils.cli import int_in_range, make_parser, progress
from utils.program import run_main
from utils.randomness import permute

_AHEAD = 4096  # images that are prefetched at once


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face data shuffle", __doc__)
    parser.add_argument("set", type=Path, help="folder with train.rec")
    parser.add_argument("out", type=Path, help="folder of the copy")
    parser.add_argument("--seed", type=int_in_range(0), default=0, help="random seed of the order (default 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace a set in OUT")
    return run_main(shuffle, parser.parse_args(arguments))


def shuffle(options: argparse.Namespace) -> None:
    """Write the images in the order of a pseudo-random permutation."""
    if options.out.resolve() == options.set.resolve():
        raise ValueError(f"{options.out}: the copy must not overwrite the set; choose another folder")
    dataset = RecordDataset(options.set)
    with RecordSetWriter(options.out, False, overwrite=options.overwrite, num_classes=dataset.num_classes) as writer:
        bar = progress(range(0, dataset.num_images, _AHEAD), None, "shuffling", "block")
        for begin in bar:
            positions = np.arange(begin, min(begin + _AHEAD, dataset.num_images))
            indices = permute(positions, dataset.num_images, options.seed)
            dataset.read_ahead(np.sort(indices))
            for index in indices.tolist():
                image, label = dataset.sample(index)
                writer.add(label, image)
    print(f"{options.out}: {writer.num_images} images of {dataset.num_classes} identities in random order")


if __name__ == "__main__":
    raise SystemExit(main())
