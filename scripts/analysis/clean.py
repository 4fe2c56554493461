"""Find wrong labels of a training set: face clean TABLE SET --out labels

TABLE holds the embeddings of the images of SET: face embed NETWORK SET --out TABLE. A network that was
trained on SET itself will do. The report has

report.html    pictures to decide by, the surest decisions and the most doubtful ones
decisions.csv  action,image,identity,to,sure,why: images to drop or to move to another identity, identities to merge, labels
               to split, people of test sets to drop; for a person to edit, and for face data filter --decisions

Example: face clean set.npy set --out labels --tests lfw.npy
"""

import argparse
import shlex
from pathlib import Path

import numpy as np

from analysis.cleaning import clean, find_overlap
from analysis.cleaning_report import HEADINGS, decide, write_page
from data.base import FaceDataset
from data.decisions import write_decisions
from data.scan import indices_of, open_set_of
from eval.embedding_table import Faces, read_table
from utils.cli import SHARE, make_parser
from utils.files import shown
from utils.program import run_main
from utils.text import prefix_errors


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face clean", __doc__)
    parser.add_argument("table", type=Path, help="table of face embed of the images of SET: .npy or .parquet")
    parser.add_argument("set", type=Path, help="folder with train.rec, *.tar or a folder per person; or a list of 'path label'")
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    parser.add_argument("--tests", type=Path, nargs="*", default=[], help="tables of test pictures in a folder per person")
    parser.add_argument("--far", type=SHARE, help="share of other people's images that pass (default: that of fewest errors)")
    parser.add_argument("--move", type=SHARE, default=0.95, help="probability from which an image moves; 1 = all are dropped")
    parser.add_argument("--overwrite", action="store_true", help="replace decisions.csv in OUT")
    return run_main(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    """Find what is wrong and write the report."""
    target = options.out / "decisions.csv"
    if target.exists() and not options.overwrite:
        raise ValueError(f"--out: {shown(target)} exists, and may have been edited; add --overwrite, or choose another folder")
    faces, dataset = read_table(options.table), open_set_of(options.set)
    tests = [(shown(path.stem), read_table(path)) for path in options.tests]
    for name, test in tests:
        with prefix_errors(f"--tests: {name}"):
            test.check_network(faces)
            test.labels()
    indices = _indices(faces, dataset, options)
    labels = np.asarray(dataset.labels(), dtype=np.int64)[indices]
    if missing := dataset.num_stored - len(indices):
        print(f"{missing} of {dataset.num_stored} images are not in {shown(options.table)}, and stay as they are")
    found = clean(faces.vectors, labels, options.far)
    overlaps = [one for name, test in tests for one in find_overlap(found, test, name)]
    made = decide(found, indices, labels, overlaps, options.move)
    options.out.mkdir(parents=True, exist_ok=True)
    write_page(options.out / "report.html", f"Labels of {shown(options.set)}", dataset, found, indices, made)
    write_decisions(target, (one for kind in HEADINGS for one in made[kind]))  # last: it is not replaced
    for kind, (heading, _) in HEADINGS.items():
        print(f"  {heading:<44}{len(made[kind]):,}")
    print(f"report: {shown(options.out / 'report.html')}")
    print(f"next: face data filter {shlex.join([shown(options.set), 'OUT', '--decisions', shown(target)])}")


def _indices(faces: Faces, dataset: FaceDataset, options: argparse.Namespace) -> np.ndarray:
    """Return the index in the set of each row of the table, (n,) int64."""
    indices, people = indices_of(faces.names, dataset), dataset.people()
    wrong = indices < 0
    wrong[~wrong] = people[indices[~wrong]] != np.array(faces.people)[~wrong]
    again = np.ones(len(indices), dtype=bool)  # the second row of an image
    again[np.unique(indices, return_index=True)[1]] = False
    wrong |= again
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"{shown(options.table)}: must have one row for each image of {shown(options.set)}, with its label; row {row} is "
            f"{faces.names[row]} of {faces.people[row]}. Make it with `face embed` from this set"
        )
    return indices


if __name__ == "__main__":
    raise SystemExit(main())
