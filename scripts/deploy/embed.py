"""Embed a folder of faces: face embed NETWORK FOLDER --out features.parquet

Every picture below FOLDER, or image of a training set (train.rec, *.tar, a list of 'path label'), becomes a unit vector: the
sum of the network's embeddings of the face and its mirror image, divided by its norm. Pictures are aligned crops of the
network's size, or photographs with --detector. --out decides the form:

features.parquet   a row for each face: name, face (its number in the picture), person (the first folder of the name), norm,
                   padding (share of the crop outside the picture), score (of the detector), ser_fiq (with --ser-fiq),
                   embedding; needs pyarrow. In a training set, the name is the index of the image, the person its label
features.npy       the vectors, (faces, D) float32, and features.csv with the other columns in the same order

OUT.rejected.csv lists pictures without a face or a vector, with the reason. A low norm is a sign of a poor picture.

What is done is kept in OUT.unfinished. A run that was killed continues where it was when the same command is started again.
Each process has one thread for arithmetic, so that the vectors do not depend on the number of processes.

Examples:
  face embed work_dirs/ms1mv3_r50 crops --out features.parquet
  face embed r100.onnx photographs --detector yunet.onnx --out features.npy --processes 4
"""

import argparse
from pathlib import Path

from deploy.embed.parts import Parts, default_processes, embed_parts, open_network
from deploy.embed.source import open_source
from deploy.embed.table import FORMS, check_form, files_of, write_table
from deploy.faces.detector import add_detector_arguments, open_detector
from deploy.faces.pictures import add_which_argument
from deploy.journal import check_new, open_journal
from eval.networks import add_network_arguments
from utils.cli import int_in_range, make_parser, progress, warn
from utils.distributed import choose_device
from utils.parallel import torch_threads
from utils.precision import choose_precision, is_fast_in_bf16
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face embed", __doc__)
    add_network_arguments(parser)
    parser.add_argument("folder", type=Path, help="folder of pictures, with or without sub-folders, or a training set")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=f"file to write: {' or '.join(FORMS)}")
    add_detector_arguments(parser)
    add_which_argument(parser)
    what = "measure quality by how little dropout changes an embedding, for `face quality`; takes more memory"
    parser.add_argument("--ser-fiq", action="store_true", help=what)
    what = "that embed, each with the network in memory (default: one per GPU, or per core; one for few pictures)"
    parser.add_argument("--processes", type=int_in_range(1, 1024), help=what)
    parser.add_argument("--again", action="store_true", help="begin anew, although OUT or parts of it exist")
    return run_main(run, parser.parse_args(arguments))


def run(options: argparse.Namespace) -> None:
    """Embed the parts that are missing, join all of them, and remove them."""
    out: Path = options.out
    check_form(out)
    source = open_source(options.folder, options.detector)
    warn(*source.warnings)
    unfinished = out.with_name(f"{out.name}.unfinished")
    if out.is_dir():
        raise ValueError(f"--out: {out} is a folder; name a file")
    for path in files_of(out):
        check_new(path, unfinished, options.again)
    # for all processes, and for the run that goes on: parts of another precision are not mixed with these
    options.precision = choose_precision(options.precision, is_fast_in_bf16(choose_device(options.device, 0)))
    with torch_threads(1):  # as in each of several processes, so that one process computes the same numbers
        embedder, detector = open_network(options), open_detector(options)  # before anything is written
        out.parent.mkdir(parents=True, exist_ok=True)
        with open_journal(unfinished, str(out)) as journal:
            parts = Parts(options, embedder, source, journal)
            missing = parts.missing()
            count = options.processes or (default_processes(options.device) if len(missing) > 2 else 1)  # a start takes seconds
            count = max(1, min(count, len(missing)))
            done = len(source.names) - sum(len(parts.names_of(number)) for number in missing)
            with progress([], len(source.names), "embedding", "picture") as bar:
                bar.update(done)
                embed_parts(options, parts, embedder, detector, count, bar.update)
            faces, rejected = write_table(out, parts, embedder)
            unfinished.unlink()
    if done:
        print(f"{done} of {len(source.names)} pictures were done already")
    if rejected:
        print(f"{rejected} of {len(source.names)} pictures rejected, with the reason in {out.name}.rejected.csv")
    print(f"{out}: {faces} faces of {len(source.names) - rejected} pictures, embedded by {embedder.title}")


if __name__ == "__main__":
    raise SystemExit(main())
