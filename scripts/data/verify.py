"""Read a set from end to end: face data verify SET_OR_BIN ...

Opens each set like training (index, header record, every label and length), then reads and decodes every image. The exit status
is 0 if there is no fault, otherwise 1; an image of one colour is a fault. --bad FILE lists every bad image for
face data filter --drop. face data repair mends a set that does not open.

SET_OR_BIN: a training set (a folder with train.rec, *.tar or a sub-folder for each person; a list of 'path label'), or pairs:
.bin, .safetensors, or .csv with lines 'path1,path2,same'.

Example: face data verify datasets/demo lfw.bin
"""

import argparse
from pathlib import Path

import numpy as np

from data.scan import is_plain, open_set_of, scan
from eval.pair_sets.bin_file import read_pairs
from utils.cli import add_threads, make_parser, progress
from utils.files import shown, write_csv
from utils.parallel import map_in_order
from utils.program import run_main
from utils.text import printable

_PAIRS = (".bin", ".safetensors", ".csv")  # files of verification sets
_SHOWN = 20  # bad images that are printed


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face data verify", __doc__)
    parser.add_argument("sets", type=Path, nargs="+", help="training sets; .bin, .safetensors or .csv files of pairs")
    parser.add_argument("--bad", type=Path, help="CSV file for the bad images (of one training set)")
    add_threads(parser)
    return run_main(verify, parser.parse_args(arguments))


def verify(options: argparse.Namespace) -> None:
    """Read all sets; raise ValueError at the end if one of them has a fault."""
    if options.bad and (len(options.sets) != 1 or options.sets[0].suffix in _PAIRS):
        raise ValueError("--bad lists the images of one training set; give one at a time")
    faults: list[str] = []
    for path in options.sets:
        try:
            bad = _verify_pairs(path, options.threads) if path.suffix in _PAIRS else _verify_set(path, options)
        except ValueError as error:
            faults.append(str(error))
            print(f"BAD  {printable(str(error))}")
            continue
        if bad:
            faults.append(f"{path}: {bad} bad image(s)")
        else:
            print(f"ok   {shown(path)}")
    if faults:
        raise ValueError(f"{len(faults)} of {len(options.sets)} set(s) have faults: {'; '.join(faults)}")


def _verify_set(path: Path, options: argparse.Namespace) -> int:
    dataset = open_set_of(path)
    print(dataset.describe())
    scanned = scan(dataset, np.arange(dataset.num_stored), options.threads, hashes=False)
    bad = dict(scanned.bad)
    for place in np.flatnonzero(scanned.odd).tolist():
        size = f"{scanned.width[place]} x {scanned.height[place]}"
        bad[place] = f"{dataset.key(place)}: is {size} pixels, not {scanned.size} x {scanned.size}"
    for place in np.flatnonzero(scanned.plain).tolist():
        bad.setdefault(place, f"{dataset.key(place)}: is of one colour, or nearly")
    for index, reason in sorted(bad.items())[:_SHOWN]:
        print(f"BAD  {index}: {reason if dataset.key(index) in reason else f'{dataset.key(index)}: {reason}'}")
    if len(bad) > _SHOWN:
        print(f"... and {len(bad) - _SHOWN} more{'' if options.bad else '; --bad FILE lists all'}")
    if options.bad:
        write_csv(options.bad, ("index", "reason"), sorted(bad.items()))
    return len(bad)


def _verify_pairs(path: Path, threads: int) -> int:
    pairs = read_pairs(path)
    print(f"{shown(path)}: {len(pairs.same)} pairs, {int(pairs.same.sum())} genuine, {len(pairs.images)} distinct images")

    def read(index: int) -> str:
        try:
            plain = is_plain(pairs.decode(index))
        except ValueError as error:
            return str(error)
        return f"{path}: image {index} is of one colour, or nearly" if plain else ""

    size = range(len(pairs.images))
    bad = [reason for reason in progress(map_in_order(read, size, threads), len(size), "reading", "image") if reason]
    for reason in bad[:_SHOWN]:
        print(f"BAD  {printable(reason)}")
    return len(bad)


if __name__ == "__main__":
    raise SystemExit(main())
