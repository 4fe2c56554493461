"""Compare all pairs of a set: face pairs TABLE --out DIR

TABLE is a table of `face embed` of labelled pictures. Every pair of its faces is compared once: TAR at FAR down to 1e-8, EER,
AUC, and the pairs that are most wrong. DIR then has report.html, pairs.png and results.json, from which `face search --results`
takes thresholds. What is done is kept in DIR/unfinished; start the same command again to go on after a kill.

Example: face pairs features.npy --out pairs --pictures people
"""

import argparse
from pathlib import Path

from analysis.all_pairs import NUM_BINS, count_pairs, write_pairs
from deploy.embed.source import open_pixels
from deploy.journal import check_new, open_journal
from eval.embedding_table import read_table, stamps_of
from eval.report import POINT_COLUMNS, point_rows
from utils.cli import int_in_range, make_parser, progress
from utils.files import shown
from utils.program import run_main
from utils.text import plain_table


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face pairs", __doc__)
    parser.add_argument("table", type=Path, help="table of `face embed`, .npy or .parquet")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the report")
    parser.add_argument("--pictures", type=Path, metavar="SET", help="folder or set that was embedded, to show the worst pairs")
    parser.add_argument("--worst", type=int_in_range(0, 1000), default=12, help="pairs of each kind that are shown")
    parser.add_argument("--again", action="store_true", help="begin anew, although DIR has a report or a part of it")
    return run_main(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    """Count the pairs that are not counted yet, and write the report."""
    faces = read_table(options.table)
    labels, people = faces.labels()
    read = None if options.pictures is None else open_pixels(options.pictures)
    unfinished = options.out / "unfinished"
    check_new(options.out / "results.json", unfinished, options.again)
    total, shape = len(labels) * (len(labels) - 1) // 2, f"{len(labels):,} faces of {len(people):,} people"
    options.out.mkdir(parents=True, exist_ok=True)
    with open_journal(unfinished, str(options.out)) as journal, progress([], total, "comparing", "pair") as bar:
        facts = {"table": stamps_of(options.table), "number of bins": NUM_BINS, "worst": options.worst}
        journal.begin(facts, options.again, str(options.out), "was begun with")
        counts = count_pairs(faces.vectors, labels, worst=options.worst, journal=journal, advance=bar.update)
        title, facts_of_page = f"All pairs of {shown(options.table)}", [("faces", shape), ("pairs", f"{total:,}")]
        rates = write_pairs(options.out, title, options.table.stem, counts, faces, labels, facts_of_page, read)
        unfinished.unlink()
    print(f"{shape}: {rates.num_genuine:,} genuine and {rates.num_impostor:,} impostor pairs")
    rows = point_rows(options.table.stem, rates.points, rates.intervals)
    print(plain_table([POINT_COLUMNS, *(tuple(map(str, row)) for row in rows)]))
    if rates.eer is not None and rates.auc is not None:
        print(f"EER {100 * rates.eer:.3f} %, AUC {rates.auc:.6f}")
    print(f"report: {shown(options.out / 'report.html')}")


if __name__ == "__main__":
    raise SystemExit(main())
