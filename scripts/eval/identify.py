"""Search probes in a gallery: python -m scripts.eval.identify RUN --gallery gallery.txt --probes probes.txt

Each list names pictures of aligned faces, 112 x 112 for most networks, with a line "path label" per picture. A RecordIO
set, tar shards or a folder per person also work. Several galleries are combined, as for TinyFace with its distractors. Probes
whose person is in no gallery are strangers. Prints rank-1, 5, 10, 20 and, if there are strangers among the probes, TPIR at
FPIR.

gallery.txt and probes.txt: a line 'path label' for each picture. The path is relative to the list and may contain spaces. The
label is a whole number, the same for the same person in all lists.

Example: python -m scripts.eval.identify work_dirs/ms1mv3_r50 --gallery gallery.txt --probes probes.txt
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m scripts.eval.identify")

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from backbones import build_backbone
from data.base import FaceDataset
from data.datasets import FolderDataset
from data.tools import open_set_of
from eval.embed import embed_sums
from eval.identification import identify
from eval.networks import Network, add_network_arguments, open_network
from utils.cli import make_parser, progress
from utils.distributed import World
from utils.distributed.agreement import digest
from utils.precision import AUTOCAST
from utils.program import run_main

_RANKS = (1, 5, 10, 20)
_FPIR = (0.001, 0.01, 0.1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and search; return the exit status."""
    parser = make_parser("python -m scripts.eval.identify", __doc__)
    add_network_arguments(parser)
    parser.add_argument("--gallery", type=Path, nargs="+", required=True, help="pictures of the known people")
    parser.add_argument("--probes", type=Path, required=True, help="pictures to search for in the gallery")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args(arguments)
    return run_main(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Embed both sides on all ranks; search and print on rank 0."""

    def read(network: Network) -> list[FaceDataset]:
        return [open_set_of(path) for path in (*options.gallery, options.probes)]

    world, network, sets = open_network(options, build_backbone, read, _facts)
    names = [people_of(dataset) for dataset in sets]
    vectors = [embed_set(network, dataset, world, options) for dataset in sets]
    if world.rank != 0:
        return
    number_of = {name: number for number, name in enumerate(dict.fromkeys(np.concatenate(names).tolist()))}
    people = [np.array([number_of[name] for name in part.tolist()]) for part in names]

    def bar(chunks: Sequence[int]) -> Iterable[int]:
        return progress(chunks, len(chunks), "searching", "chunk")

    found = identify(np.concatenate(vectors[:-1]), np.concatenate(people[:-1]), vectors[-1], people[-1], bar)
    report: dict[str, Any] = {
        "network": network.title,
        "gallery_images": sum(map(len, vectors[:-1])),
        "gallery_people": len(np.unique(np.concatenate(people[:-1]))),
        "probes_with_mate": found.num_mated,
        "probes_without": found.num_unmated,
        **{f"rank_{k}": found.rank_rate(k) for k in _RANKS},
        **{f"tpir_at_fpir_{fpir}": found.tpir_at_fpir(fpir) for fpir in _FPIR},
    }
    for key, value in report.items():
        shown = f"{100 * value:.2f} %" if isinstance(value, float) else "not measurable" if value is None else value
        print(f"  {key.replace('_', ' '):<28}{shown}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def _facts(sets: Sequence[FaceDataset]) -> dict[str, object]:
    """Return hashes and counts of the galleries and the probes, by name."""
    whose = [*(f"gallery {number}" for number in range(1, len(sets))), "the probes"]
    found: dict[str, object] = {}
    for who, dataset in zip(whose, sets, strict=True):
        found |= {f"{what} of {who}": value for what, value in dataset.fingerprint().items()}
        people = "\0".join(people_of(dataset).tolist())
        found[f"hash of the people of {who}"] = digest([people.encode("utf-8", "surrogateescape")])
    return found


def people_of(dataset: FaceDataset) -> np.ndarray:
    """Return the person on each image (n,): the folder's name if there are folders, else the label."""
    labels = np.asarray(dataset.labels())
    if isinstance(dataset, FolderDataset):
        return np.array(dataset.classes)[labels]
    return labels.astype(str)


def embed_set(network: Network, dataset: FaceDataset, world: World, options: argparse.Namespace) -> np.ndarray:
    """Return the unit embeddings (n, D) float32, plain + mirrored, of all images of a set."""

    def decode(index: int) -> np.ndarray:
        return dataset.pixels_and_label(index, size)[0]

    count, size = dataset.num_stored, network.image_size
    settings = (options.batch_size, AUTOCAST[options.precision], options.threads)
    with progress([], -(-count // world.world_size), "embedding", "image") as bar:
        sums = embed_sums(network.model, decode, count, world, *settings, bar.update, size)
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    return sums / np.where(norms == 0, 1, norms)


if __name__ == "__main__":
    raise SystemExit(main())
