"""Compare measures of quality: face quality TABLE --columns norm padding --out DIR

TABLE is a table of `face embed` of labelled pictures. For each measure, genuine comparisons of the lowest quality are
discarded, and FNMR is drawn over their share (error versus discard, ISO/IEC 29794-1), at the threshold that gives --far over
all impostor pairs. A measure is norm, padding, score or ser_fiq of TABLE, or a column of a .csv in --from, joined by its
column name (of pictures), or of OFIQ's table.csv. DIR then has report.html, quality.png, results.json and results.csv; printed
are gates for `face enrol`. Counted pairs are kept in DIR/unfinished; start the same command again to go on after a kill.

Example: face quality features.npy --columns norm UnifiedQualityScore --from ofiq.csv --out quality
"""

import argparse
from pathlib import Path

import numpy as np

from analysis.all_pairs import NUM_BINS, count_pairs, points_at
from analysis.quality import COLUMNS, GATE_COLUMNS, error_versus_discard, gate_rows, read_measures, rows_of, write_quality
from deploy.embed.source import open_pixels
from deploy.journal import Journal, check_new, open_journal
from eval.embedding_table import Faces, read_table, stamps_of
from utils.cli import RATE, SHARE, make_parser, progress
from utils.files import shown
from utils.program import run_main
from utils.text import did_you_mean, one_line, plain_table, prefix_errors


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face quality", __doc__)
    parser.add_argument("table", type=Path, help="table of `face embed`, .npy or .parquet")
    parser.add_argument("--columns", nargs="+", default=["norm"], metavar="NAME", help="measures to compare")
    lower = "those whose lower values are better, as padding's always are"
    parser.add_argument("--lower", nargs="+", default=[], metavar="NAME", help=lower)
    parser.add_argument("--from", dest="files", nargs="+", type=Path, default=[], metavar="FILE.csv", help="tables of measures")
    parser.add_argument("--far", type=RATE, default=1e-3, help="of all impostor pairs; sets the threshold")
    parser.add_argument("--discard", type=SHARE, default=0.05, metavar="SHARE", help="of the pictures that a gate may discard")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the report")
    parser.add_argument("--pictures", type=Path, metavar="SET", help="folder or set that was embedded, to show pictures of it")
    parser.add_argument("--again", action="store_true", help="begin anew, although DIR has a report or a part of it")
    return run_main(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    """Count the pairs that are not counted yet, and write the report."""
    faces = read_table(options.table)
    labels, people = faces.labels()
    measures = _measures(faces, options)
    if unknown := [name for name in options.lower if name not in measures]:
        raise ValueError(f"--lower: {unknown[0]} is not in --columns.{did_you_mean(unknown[0], measures)}")
    lower = ["padding", *options.lower]
    read = None if options.pictures is None else open_pixels(options.pictures)
    unfinished = options.out / "unfinished"
    check_new(options.out / "results.json", unfinished, options.again)
    options.out.mkdir(parents=True, exist_ok=True)
    with open_journal(unfinished, str(options.out)) as journal:
        threshold = _threshold(faces, labels, options, journal)
        with prefix_errors("--columns"):
            found = error_versus_discard(faces.vectors, labels, threshold, measures, lower)
        shape = f"{len(labels):,} faces of {len(people):,} people; threshold {threshold:.4f} of FAR {options.far:g}"
        title = f"Quality of {shown(options.table)}"
        write_quality(options.out, title, shape, found, options.discard, measures, lower, faces.names, read)
        unfinished.unlink()
    print(shape)
    for head, rows in ((COLUMNS, rows_of(found, len(labels))), (GATE_COLUMNS, gate_rows(found, lower, options.discard))):
        print(plain_table([head, *rows]))
    print(f"report: {shown(options.out / 'report.html')}")


def _measures(faces: Faces, options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Return the values of each column of the command line, (n,) float64."""
    known, names = {"norm": faces.norms, **faces.qualities}, ["norm", *faces.qualities]
    for path in options.files:
        found, head = read_measures(path, [name for name in options.columns if name not in known], faces.names)
        known |= found
        names += head
    for name in options.columns:
        if name not in known:
            raise ValueError(f"--columns: no {name}.{did_you_mean(name, names)} There are: {one_line(', '.join(names))[:200]}")
    return {name: known[name] for name in options.columns}


def _threshold(faces: Faces, labels: np.ndarray, options: argparse.Namespace, journal: Journal) -> float:
    """Return the cosine above which a pair is accepted."""
    with progress([], len(labels) * (len(labels) - 1) // 2, "comparing", "pair") as bar:
        facts = {"table": stamps_of(options.table), "number of bins": NUM_BINS}
        journal.begin(facts, options.again, str(options.out), "was begun with")
        counts = count_pairs(faces.vectors, labels, journal=journal, advance=bar.update)
    impostor = counts.impostor.sum(axis=(0, 1))
    (point,) = points_at(counts.genuine.sum(axis=0), impostor, counts.edges, [str(options.far)])
    if point.cosine is None:
        raise ValueError(f"--far: {options.far:g} of {impostor.sum():,} impostor pairs is less than one, or no pair is genuine")
    return point.cosine


if __name__ == "__main__":
    raise SystemExit(main())
