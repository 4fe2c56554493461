"""Turn a RecordIO set into picture files: face data rec_to_folder SET OUT

Writes a folder per identity, OUT/000123/KEY.jpg, with the bytes of the set. Existing files of the right size are skipped, so an
interrupted run can be continued.

Example: face data rec_to_folder set pictures --classes 0:10
"""

import argparse
from pathlib import Path

import numpy as np

from data.record_dataset import RecordDataset
from data.scan import parse_classes
from utils.cli import make_parser, progress
from utils.files import read_bytes, write_file
from utils.image import IMAGE_STARTS
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face data rec_to_folder", __doc__)
    parser.add_argument("set", type=Path, help="folder with train.rec")
    parser.add_argument("out", type=Path, help="folder for the pictures")
    parser.add_argument("--classes", default="", help="A:B for labels A to B - 1, or a list A,B,C (default: all)")
    return run_main(extract, parser.parse_args(arguments))


def extract(options: argparse.Namespace) -> None:
    """Write the pictures of the chosen identities."""
    dataset = RecordDataset(options.set)
    labels = dataset.labels()
    wanted = np.zeros(dataset.num_classes, dtype=bool)
    wanted[parse_classes(options.classes, dataset.num_classes)] = True
    chosen, written = np.flatnonzero(wanted[labels]), 0
    for index in progress(map(int, chosen), len(chosen), "writing", "picture"):
        data = bytes(dataset.sample(index)[0])
        suffix = next((suffix for start, suffix in IMAGE_STARTS.items() if data.startswith(start)), ".bin")
        target = options.out / f"{labels[index]:06d}" / f"{dataset.record_key(index)}{suffix}"
        there = read_bytes(target) if target.exists() else b""
        if there == data:
            continue
        if not data.startswith(there):  # or it was not finished
            raise ValueError(f"{target}: is another picture than the set's, and would be lost; choose another folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, data, durable=False)
        written += 1
    print(f"{options.out}: {written} pictures of {np.count_nonzero(np.bincount(labels[chosen]))} identities written")


if __name__ == "__main__":
    raise SystemExit(main())
