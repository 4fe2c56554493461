"""Write verification sets without pickles: face data convert_bin lfw.bin cfp_fp.bin --out DIR

NAME.safetensors holds each distinct image once, byte for byte, and the same pairs in the same order. eval.targets finds it
under the same NAME. --to bin converts back, for tools that read only .bin.

A .bin file is a pickle of (encoded images, same or not for each pair), in insightface's format; it is read without
executing anything. A .csv file has lines 'path1,path2,same', with paths relative to it and same 0 or 1.

Example: face data convert_bin lfw.bin cfp_fp.bin --out sets
"""

import argparse
from pathlib import Path

import numpy as np

from eval.pair_sets.bin_file import read_pairs, write_bin, write_safetensors
from utils.cli import make_parser
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face data convert_bin", __doc__)
    parser.add_argument("sets", type=Path, nargs="+", help=".bin, .safetensors or .csv files")
    parser.add_argument("--out", type=Path, help="folder for the new files (default: beside the old ones)")
    parser.add_argument("--to", choices=("safetensors", "bin"), default="safetensors", help="format of the new files")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    return run_main(convert, parser.parse_args(arguments))


def convert(options: argparse.Namespace) -> None:
    """Convert all sets."""
    for path in options.sets:
        target = (options.out or path.parent) / f"{path.stem}.{options.to}"
        if target.exists() and not options.overwrite:
            raise ValueError(f"{target} exists; add --overwrite to replace it, or choose another --out")
        pairs = read_pairs(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if options.to == "bin":
            order = np.stack([pairs.first, pairs.second], axis=1).ravel().tolist()
            write_bin(target, [pairs.images[index] for index in order], pairs.same.tolist())
        else:
            write_safetensors(target, pairs)
        print(f"{target}: {len(pairs.same)} pairs, {len(pairs.images)} distinct images, {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    raise SystemExit(main())
