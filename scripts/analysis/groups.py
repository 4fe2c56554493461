"""Measure the error rates of groups of people: face groups TABLE --groups FILE.csv --by COLUMN --out DIR

TABLE is a table of `face embed`. FILE.csv has a column name (of a picture) or person, and others such as ethnicity, sex, age or
camera, of which COLUMN is one; more than ten ages are grouped by tens. All pairs of pictures are compared at one threshold.

With --pairs the pairs of a list are compared instead: a .csv with p1, p2, label (1 = the same person), and COLUMN1 and COLUMN2,
or COLUMN (BFW: --by att, a, g or e), or a folder of lists as of LFW, of which each is a group (RFW: African/African_pairs.txt).

DIR then has report.html, results.json, results.csv and pictures. Meanwhile DIR.unfinished keeps what is counted: a run that
was killed continues when the same command is started again.

Examples:
  face groups features.npy --groups people.csv --by ethnicity --out groups
  face groups rfw.npy --pairs RFW/test/txts --far 1e-2 --out groups
"""

import argparse
from pathlib import Path

import xxhash

from analysis.group_files import read_groups, read_pair_list
from analysis.groups import Grouped, Outcome, measure_list, measure_table, summary, write_groups
from deploy.embed.source import open_pixels
from deploy.journal import check_new, open_journal
from eval.embedding_table import Faces, read_table, stamps_of
from utils.cli import COSINE, RATE, make_parser
from utils.files import shown
from utils.program import run_main

_ALIKE = 20  # pairs


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face groups", __doc__)
    parser.add_argument("table", type=Path, help="table of `face embed`")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--groups", type=Path, metavar="CSV", help="groups of pictures or people")
    source.add_argument("--pairs", type=Path, metavar="LIST", help="pairs with groups: a .csv, or a folder of *_pairs.txt")
    parser.add_argument("--by", metavar="COLUMN", help="column of the .csv that has the group")
    at = parser.add_mutually_exclusive_group()
    at.add_argument("--far", type=RATE, help="of all groups together (default: 1e-3)")
    at.add_argument("--threshold", type=COSINE, metavar="COSINE", help="instead: a cosine")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the report")
    parser.add_argument("--pictures", type=Path, metavar="SET", help="folder or set that was embedded, to show lookalikes")
    parser.add_argument("--again", action="store_true", help="begin anew, although DIR has a report or a part of it")
    return run_main(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    """Measure, print the table, and write the report."""
    unfinished = options.out.with_name(f"{options.out.name}.unfinished")
    check_new(options.out / "results.json", None if options.pairs else unfinished, options.again)
    faces = read_table(options.table)
    read = None if options.pictures is None else open_pixels(options.pictures)
    far = 1e-3 if options.far is None and options.threshold is None else options.far
    if options.pairs:
        outcome, names, left_out = _of_list(faces, options, far)
    else:
        outcome, names, left_out = _of_table(faces, options, far, unfinished)
    facts = [
        ("table", shown(options.table)),
        ("groups", f"{shown(options.groups or options.pairs)}{f', column {options.by}' if options.by else ''}"),
        ("threshold", f"cosine {outcome.threshold:.5f}; all groups: FMR {outcome.pooled[0]:.3g}, FNMR {outcome.pooled[1]:.3g}"),
        ("left out", left_out),
    ]
    print(*(f"{name}: {text}" for name, text in facts), summary(outcome), sep="\n")
    write_groups(options.out, f"Groups of {options.table.name}", outcome, names, facts, read)
    print(f"report: {shown(options.out / 'report.html')}")


def _of_table(faces: Faces, options: argparse.Namespace, far: float | None, unfinished: Path) -> tuple[Outcome, list[str], str]:
    if options.by is None:
        raise ValueError(f"--groups: add --by with the column of {shown(options.groups)} that has the group")
    groups, names = read_groups(options.groups, options.by, faces)
    kept, total = groups >= 0, len(groups)
    vectors = faces.vectors if kept.all() else faces.vectors[kept]
    given = Grouped(vectors, faces.labels()[0][kept], groups[kept], names)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    inputs = {"table": stamps_of(options.table), "groups": xxhash.xxh3_128_hexdigest(given.labels.tobytes() + groups.tobytes())}
    with open_journal(unfinished, str(options.out)) as journal:
        journal.begin(inputs, options.again, str(unfinished), "was begun with")
        outcome = measure_table(given, far, options.threshold, _ALIKE, journal)
        unfinished.unlink()
    left_out = f"{total - len(given.labels):,} of {total:,} pictures, which have no group"
    return outcome, [faces.names[row] for row in kept.nonzero()[0]], left_out


def _of_list(faces: Faces, options: argparse.Namespace, far: float | None) -> tuple[Outcome, list[str], str]:
    pairs = read_pair_list(options.pairs, options.by, faces)
    total = pairs.missing + len(pairs.first)
    left_out = f"{pairs.missing:,} of {total:,} pairs, of which the table lacks a picture"
    return measure_list(faces.vectors, pairs, far, options.threshold, _ALIKE), faces.names, left_out


if __name__ == "__main__":
    raise SystemExit(main())
