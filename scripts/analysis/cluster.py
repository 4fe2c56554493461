"""Group unlabelled faces into people: face cluster TABLE --calibrate OTHER --far 1e-4 --out people.csv

TABLE is a table of `face embed`. Two clusters become one while the mean cosine between their faces reaches a threshold: that of
the FAR in OTHER, a table of the same network with labelled pictures of other people, measured for clusters of one, two and four
faces; each face is averaged with as many neighbours as serve OTHER best beforehand. Or --threshold, for all sizes, without.
people.csv has name, face, cluster, sure and cosine; a face is not sure if it is alone, or as near to another cluster.
Where all faces of TABLE have a person, the clusters are compared with them. With --set, people.csv.html shows pictures. With
--to-rec the sure faces become a set, with clusters as labels.

What is done is kept in OUT.unfinished; start the same command again to go on after a kill.

Example: face cluster new.npy --calibrate lfw.npy --far 1e-4 --out people.csv --set new --to-rec labelled
"""

import argparse
from pathlib import Path

import numpy as np

from analysis.clustering import NEIGHBOURS, SIZES, Clusters, agreement, calibrate, cluster, expand, write_page
from data.recordio.index import distinct
from data.scan import copy_set, indices_of, open_set_of
from deploy.journal import Journal, check_new, open_journal
from eval.embedding_table import Faces, read_table, stamps_of
from utils.cli import int_in_range, make_parser, number_in_range, progress, rate_text, warn
from utils.files import shown, write_csv
from utils.program import run_main
from utils.text import prefix_errors

_FAR_MORE = 4  # times the faces of a person of --calibrate, which a person here is not likely to have


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face cluster", __doc__)
    parser.add_argument("table", type=Path, help="table of `face embed`, .npy or .parquet")
    parser.add_argument("--out", type=Path, required=True, metavar="CSV", help="file to write")
    parser.add_argument("--calibrate", type=Path, metavar="TABLE", help="labelled faces of other people, for --far")
    parser.add_argument("--far", type=rate_text, metavar="FAR", help="share of the pairs of two people there that pass")
    cosine = number_in_range(-0.9999, 1, "a cosine")
    parser.add_argument("--threshold", type=cosine, metavar="COSINE", help="instead of --calibrate and --far")
    parser.add_argument("--set", type=Path, help="set or folder that was embedded: OUT.html shows its pictures")
    parser.add_argument("--to-rec", type=Path, metavar="DIR", help="folder of a new RecordIO set, from --set")
    parser.add_argument("--min-images", type=int_in_range(2), help="of a cluster that goes into it (default: 2)")
    parser.add_argument("--again", action="store_true", help="begin anew, although OUT or a part of it exists")
    return run_main(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    """Cluster, and write what was asked for."""
    if options.set is None and options.to_rec is not None:
        raise ValueError("--to-rec needs --set, the set that was embedded")
    if options.to_rec is None and options.min_images is not None:
        raise ValueError("--min-images is of the clusters that --to-rec writes; add that, or take it out")
    unfinished, page = (options.out.with_name(f"{options.out.name}.{end}") for end in ("unfinished", "html"))
    for path in (options.out, page)[: 1 if options.set is None else 2]:
        check_new(path, unfinished, options.again)
    if options.to_rec is not None and (options.to_rec / "train.rec").exists():
        raise ValueError(f"--to-rec: {shown(options.to_rec)} holds a train.rec; choose another folder")
    faces = read_table(options.table)
    dataset = None if options.set is None else open_set_of(options.set, loose=True)
    indices = None if dataset is None else indices_of(faces.names, dataset)
    if indices is not None and (indices < 0).any():
        name = faces.names[int((indices < 0).argmax())]
        raise ValueError(f"--set: {shown(options.set)} has no image {name}; give the set that was embedded")
    if options.to_rec is not None and indices is not None and len(distinct(indices)) < len(indices):
        raise ValueError(f"--to-rec: a picture of {shown(options.table)} has several faces; embed crops of one face each")
    others = _known(options, faces)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with open_journal(unfinished, str(options.out)) as journal:
        stamps = None if others is None else stamps_of(options.calibrate)
        begun = {"table": stamps_of(options.table), "threshold": options.threshold, "calibrate": stamps, "far": options.far}
        journal.begin(begun, options.again, str(unfinished), "was begun with")
        try:
            count, thresholds, meaning = _thresholds(options, others, journal)
            vectors = faces.vectors
            if count:
                with progress([], len(vectors), "finding neighbours", "face") as bar:
                    vectors = expand(vectors, count, journal, bar.update)
            with progress([], len(vectors), "comparing", "face") as bar:
                found = cluster(vectors, thresholds, journal, bar.update)
        except ValueError:  # these words never work, and the next ones may be others
            unfinished.unlink()
            raise
        rows = zip(faces.names, faces.numbers, found.labels, found.sure.astype(int), found.own.round(4), strict=True)
        write_csv(options.out, ("name", "face", "cluster", "sure", "cosine"), rows)
        facts = _facts(faces, found, meaning)
        print("\n".join(f"{name:<18}{value}" for name, value in facts))
        print(f"written: {shown(options.out)}")
        largest = np.bincount(found.labels).max()
        if others is not None and largest > _FAR_MORE * (known := np.bincount(others.labels()[0]).max()):
            warn(
                f"the largest cluster has {largest:,} faces, the person of most faces in {shown(options.calibrate)} {known:,}: "
                "it may join people. Calibrate with faces like these, or lower --far"
            )
        if dataset is not None and indices is not None:
            write_page(page, f"Clusters of {shown(options.table)}", found, dataset, indices, facts)
            print(f"report: {shown(page)}")
        if options.to_rec is not None and dataset is not None and indices is not None:
            kept = found.sure.copy()
            kept &= np.bincount(found.labels, kept)[found.labels] >= (least := options.min_images or 2)
            if not kept.any():
                raise ValueError(f"--min-images: no cluster has {least} sure faces; lower it, or raise --far")
            labels = np.full(dataset.num_stored, -1, dtype=np.int64)
            labels[indices[kept]] = dataset.num_classes + found.labels[kept]
            names = [f"cluster {number}" for number in range(int(found.labels.max()) + 1)]
            copy_set(dataset, np.sort(indices[kept]), options.to_rec, False, options.set, labels, names)
        unfinished.unlink()  # last: what is done is kept until all is written


def _known(options: argparse.Namespace, faces: Faces) -> Faces | None:
    """Return the faces of --calibrate, None with --threshold."""
    if (options.threshold is None) == (options.calibrate is None) or (options.calibrate is None) != (options.far is None):
        raise ValueError("the threshold comes from --calibrate TABLE with --far FAR, or from --threshold; give one of the two")
    if options.threshold is not None:
        return None
    others = read_table(options.calibrate)
    with prefix_errors("--calibrate"):
        others.check_network(faces)
    return others


def _thresholds(options: argparse.Namespace, others: Faces | None, journal: Journal) -> tuple[int, np.ndarray, str]:
    """Return the number of neighbours to average, the thresholds of cluster sizes, and where they come from."""
    if others is None:
        return 0, np.array([[options.threshold]]), f"cosine {options.threshold:g}"
    with prefix_errors("--calibrate"), progress([], (1 + len(NEIGHBOURS)) * len(others.names), "calibrating", "face") as bar:
        count, found = calibrate(others.vectors, others.labels()[0], options.far, journal, bar.update)
    sizes = ", ".join(f"{value:.4f} ({size})" for value, size in zip(np.diag(found), SIZES, strict=False))
    words = f"cosine of two clusters {sizes} by their faces, each averaged with {count} neighbours"
    return count, found, f"{words}; FAR {options.far} in {shown(options.calibrate)}"


def _facts(faces: Faces, found: Clusters, meaning: str) -> list[tuple[str, str]]:
    sizes, sure = np.bincount(found.labels), found.sure
    facts = [
        ("threshold", meaning),
        ("faces", f"{len(faces.names):,}: {np.count_nonzero(sizes == 1):,} alone, {np.count_nonzero(~sure):,} not sure"),
        ("clusters", f"{np.count_nonzero(sizes > 1):,} with several faces, the largest {sizes.max():,}"),
    ]
    if "" not in faces.people and len(set(faces.people)) > 1:
        values = agreement(found.labels, faces.labels()[0])._asdict()
        facts += [(name.replace("_", " "), f"{100 * value:.2f} %") for name, value in values.items()]
    return facts


if __name__ == "__main__":
    raise SystemExit(main())
