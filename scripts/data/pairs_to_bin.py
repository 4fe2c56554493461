"""Make a verification set: face data pairs_to_bin lfw|cfp|csv|sample ... OUT.bin

lfw      a folder of NAME/NAME_0001.jpg and its pairs.txt
cfp      the folder of Celebrities in Frontal-Profile, with Protocol/ and the aligned pictures: --kind FP or FF
csv      lines "path1,path2,same" (apart by commas, tabs or blanks; "a,b.jpg" in quotes; same is 0 or 1; a header is skipped)
sample   balanced pairs drawn from a folder per identity, a RecordIO set or another set, in ten folds without common identities

Pictures must be aligned; files are stored byte for byte. The order of the pairs is the order of the folds.

pairs.txt of LFW: 'folds pairs' in its first line, then lines 'name n m' and 'name n name m', separated by tabs.

Examples:
  face data pairs_to_bin lfw lfw_aligned pairs.txt lfw.bin
  face data pairs_to_bin csv pictures pairs.csv own.bin
  face data pairs_to_bin sample set own.bin --pairs 3000
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data.scan import open_set_of
from eval.pair_sets.bin_file import read_csv, write_bin
from eval.pair_sets.sample import USUAL, most_pairs, sample_pairs
from eval.verification import FOLDS
from utils.cli import int_in_range, make_parser, progress
from utils.files import read_bytes, read_lines
from utils.image import IMAGE_SIZE, IMAGE_SUFFIXES, decode_rgb
from utils.program import run_main
from utils.text import prefix_errors

Pair = tuple[Path, Path, bool]


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face data pairs_to_bin", __doc__)
    kinds = parser.add_subparsers(dest="kind_of_list", required=True, metavar="lfw|cfp|csv|sample")
    lfw = kinds.add_parser("lfw", help="pairs.txt of LFW")
    lfw.add_argument("folder", type=Path, help="folder with NAME/NAME_0001.jpg")
    lfw.add_argument("pairs", type=Path, help="pairs.txt")
    cfp = kinds.add_parser("cfp", help="Celebrities in Frontal-Profile")
    cfp.add_argument("folder", type=Path, help="folder with Protocol/ and the pictures of its lists")
    cfp.add_argument("--kind", choices=("FP", "FF"), default="FP", help="frontal against profile, or frontal against frontal")
    csv = kinds.add_parser("csv", help="a list of pairs")
    csv.add_argument("folder", type=Path, help="folder that the paths are relative to")
    csv.add_argument("pairs", type=Path, help="lines 'path1,path2,same'")
    sample = kinds.add_parser("sample", help="draw the pairs")
    sample.add_argument("folder", type=Path, help="folder with a sub-folder per identity, or with train.rec")
    sample.add_argument("--pairs", type=int_in_range(1), help="half of them genuine (default: 6000, or as many as there are)")
    sample.add_argument("--seed", type=int_in_range(0), default=0, help="another seed draws other pairs (default 0)")
    for kind in (lfw, cfp, csv, sample):
        kind.add_argument("out", type=Path, help="file NAME.bin; NAME is what eval.targets calls the set")
        kind.add_argument("--any-size", action="store_true", help=f"allow pictures that are not {IMAGE_SIZE} x {IMAGE_SIZE}")
        kind.add_argument("--overwrite", action="store_true", help="replace OUT")
    return run_main(make, parser.parse_args(arguments))


def make(options: argparse.Namespace) -> None:
    """Read the pictures of the pairs, check each, and write the set."""
    if options.out.suffix != ".bin":
        raise ValueError(f"{options.out}: the name of a verification set ends in .bin")
    if options.out.exists() and not options.overwrite:
        raise ValueError(f"{options.out} exists; add --overwrite to replace it")
    if options.kind_of_list == "sample":
        images, names, same = _sample(options)
    else:
        readers: dict[str, Callable[[], list[Pair]]] = {
            "lfw": lambda: read_lfw(options.folder, options.pairs),
            "cfp": lambda: read_cfp(options.folder, options.kind),
            "csv": lambda: read_csv(options.folder, options.pairs),
        }
        pairs = readers[options.kind_of_list]()
        paths = [path for pair in pairs for path in pair[:2]]
        missing = [path for path in dict.fromkeys(paths) if not path.is_file()]
        if missing:
            raise ValueError(f"{missing[0]}: no such file; {len(missing)} of {len(set(paths))} files of the pairs are missing")
        stored = {path: read_bytes(path) for path in progress(dict.fromkeys(paths), None, "reading", "picture")}
        images, names, same = [stored[path] for path in paths], [str(path) for path in paths], [pair[2] for pair in pairs]
    distinct = dict(zip(names, images, strict=True))
    for name, image in progress(distinct.items(), len(distinct), "checking", "picture"):
        _check(image, name, options.any_size)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_bin(options.out, images, same)
    print(f"{options.out}: {len(same)} pairs, {sum(same)} of them genuine, {len(distinct)} distinct pictures")


def _check(image: bytes, name: str, any_size: bool) -> None:
    with prefix_errors(name):
        height, width = decode_rgb(image).shape[:2]
    if (height, width) != (IMAGE_SIZE, IMAGE_SIZE) and not any_size:
        raise ValueError(
            f"{name}: is {width} x {height} pixels, not {IMAGE_SIZE} x {IMAGE_SIZE}; align the pictures first "
            "(face data align), or add --any-size to have square pictures resized when they are scored"
        )


def _sample(options: argparse.Namespace) -> tuple[list[bytes], list[str], list[bool]]:
    dataset = open_set_of(options.folder)
    labels = np.asarray(dataset.labels())
    pairs = options.pairs or min(USUAL, most_pairs(labels, FOLDS, options.seed) or USUAL)
    first, second, same = sample_pairs(labels, pairs, FOLDS, options.seed)
    indices = np.stack([first, second], axis=1).reshape(-1).tolist()
    some = progress(dict.fromkeys(indices), None, "reading", "picture")
    stored = {index: bytes(dataset.sample(index)[0]) for index in some}
    return [stored[index] for index in indices], [dataset.key(index) for index in indices], same.tolist()


def read_lfw(folder: Path, path: Path) -> list[Pair]:
    """Return the pairs of a pairs.txt: "name 1 4" is genuine, "name 1 other 2" is not; the first line counts them."""

    def picture(name: str, number: str) -> Path:
        found = [folder / name / f"{name}_{int(number):04d}{suffix}" for suffix in IMAGE_SUFFIXES]
        return next((file for file in found if file.is_file()), found[0])

    pairs: list[Pair] = []
    lines = read_lines(path)
    for number, line in enumerate(lines[1:], 2):
        words = line.split()
        if len(words) == 3 and words[1].isdigit() and words[2].isdigit():
            pairs.append((picture(words[0], words[1]), picture(words[0], words[2]), True))
        elif len(words) == 4 and words[1].isdigit() and words[3].isdigit():
            pairs.append((picture(words[0], words[1]), picture(words[2], words[3]), False))
        elif words:
            raise ValueError(f"{path}: line {number} must be 'name i j' or 'name i other j', got '{line.strip()}'")
    counts = [int(word) for word in lines[0].split() if word.isdigit()] if lines else []
    expected = counts[0] * counts[1] * 2 if len(counts) == 2 else counts[0] * 2 if len(counts) == 1 else -1
    if expected != len(pairs):
        raise ValueError(f"{path}: its first line '{lines[0] if lines else ''}' says {expected} pairs, but {len(pairs)} follow")
    return pairs


def read_cfp(folder: Path, kind: str) -> list[Pair]:
    """Return the pairs of Protocol/Split/KIND/01 to 10: of each, same.txt, then diff.txt, which index the two lists."""
    protocol = folder / "Protocol"
    lists = {letter: _cfp_list(folder, protocol / f"Pair_list_{letter}.txt") for letter in set(kind)}
    pairs: list[Pair] = []
    splits = sorted(path for path in (protocol / "Split" / kind).glob("*") if path.is_dir())
    if not splits:
        raise ValueError(f"{protocol / 'Split' / kind}: no such folder of splits 01 to 10")
    for split in splits:
        for name, same in (("same.txt", True), ("diff.txt", False)):
            for number, line in enumerate(read_lines(split / name), 1):
                words = line.replace(",", " ").split()
                if not words:
                    continue
                try:
                    a, b = (lists[letter][int(word)] for letter, word in zip(kind, words, strict=True))
                except (ValueError, KeyError):
                    raise ValueError(
                        f"{split / name}: line {number} must be two numbers from the lists, got '{line.strip()}'"
                    ) from None
                pairs.append((a, b, same))
    return pairs


def _cfp_list(folder: Path, path: Path) -> dict[int, Path]:
    """Return the pictures by number. The list's paths start with ../, which is removed, so that they are relative to folder."""
    found = {}
    for number, line in enumerate(read_lines(path), 1):
        words = line.split(None, 1)
        if len(words) == 2 and words[0].isdigit():
            found[int(words[0])] = folder / re.sub(r"^(\.\./)+", "", words[1].strip())
        elif words:
            raise ValueError(f"{path}: line {number} must be 'number path', got '{line.strip()}'")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
