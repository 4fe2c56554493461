"""Score a network on IJB-B or IJB-C: python -m scripts.eval.ijb RUN --root /data/IJBC --json FILE

ROOT has meta/ and loose_crop/, as in the archives that insightface links to. 1:1 is TAR at FAR over template pairs, both as the
papers compute it and at a FAR not above the target. 1:N, if the gallery and probe lists are in meta/, is rank-1, 5, 10 and
TPIR at FPIR. Under torchrun the processes share the images.

In meta/: SET_face_tid_mid.txt (lines 'picture template medium'), SET_template_pair_label.txt ('template template same')
and SET_name_5pts_score.txt ('picture x1 y1 ... x5 y5 score'); SET is ijbb or ijbc.

Example: python -m scripts.eval.ijb work_dirs/ms1mv3_r50 --root /data/IJBC --json ijbc.json
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m scripts.eval.ijb")

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from backbones import build_backbone
from eval.embed import embed_sums
from eval.identification import identify
from eval.networks import Network, add_network_arguments, open_network
from eval.operating_points import FAR_TARGETS, operating_points
from eval.templates import TemplateSet, pool_templates, published_tar, read_template_set, score_pairs
from utils.alignment import align
from utils.cli import make_parser, progress
from utils.files import read_bytes, read_lines
from utils.image import IMAGE_SIZE, MAX_PHOTO_PIXELS, decode_rgb
from utils.precision import AUTOCAST
from utils.program import run_main

_GALLERIES = {"ijbb": ("S1", "S2"), "ijbc": ("G1", "G2")}
_RANKS = (1, 5, 10)
_FPIR = (0.01, 0.1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and evaluate; return the exit status."""
    parser = make_parser("python -m scripts.eval.ijb", __doc__)
    add_network_arguments(parser)
    parser.add_argument("--root", type=Path, required=True, help="folder with meta/ and loose_crop/")
    parser.add_argument("--set", choices=("ijbb", "ijbc"), help="default: the one whose lists are in meta/")
    parser.add_argument("--no-detector-score", action="store_true", help="give all images of a medium the same weight")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--scores", type=Path, help="write the score of every template pair to this .npy file")
    options = parser.parse_args(arguments)
    return run_main(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Embed all images on all ranks; pool, score and print on rank 0."""

    def read(network: Network) -> tuple[str, TemplateSet]:
        name = options.set or _find_set(options.root)
        return name, read_template_set(options.root, name)

    world, network, (name, lists) = open_network(
        options, build_backbone, read, lambda found: {f"hash of the lists of {found[0]}": found[1].digest()}
    )

    def decode(index: int) -> np.ndarray:
        return read_face(options.root / "loose_crop" / lists.images[index], lists.points[index], network.image_size)

    with progress([], -(-len(lists.images) // world.world_size), "embedding", "image") as bar:
        features = embed_sums(
            network.model,
            decode,
            len(lists.images),
            world,
            options.batch_size,
            AUTOCAST[options.precision],
            options.threads,
            bar.update,
            network.image_size,
        )
    if world.rank == 0:
        weights = np.ones_like(lists.scores) if options.no_detector_score else lists.scores
        numbers, vectors = pool_templates(features, weights, lists.templates, lists.media)
        del features  # a gigabyte
        report = evaluate_templates(lists, numbers, vectors, options, name)
        print(f"\n{network.title} on {name}: {len(lists.images)} images, {len(np.unique(lists.templates))} templates")
        _print(report)
        if options.json:
            options.json.write_text(json.dumps({"network": network.title, "set": name, **report}, indent=1) + "\n")


def _find_set(root: Path) -> str:
    found = [name for name in _GALLERIES if (root / "meta" / f"{name}_face_tid_mid.txt").is_file()]
    if len(found) != 1:
        raise ValueError(f"--root: {root}/meta must hold ijbb_face_tid_mid.txt or ijbc_face_tid_mid.txt; it has {len(found)}")
    return found[0]


def read_face(path: Path, points: np.ndarray, size: int = IMAGE_SIZE) -> np.ndarray:
    """Return the (size, size, 3) uint8 face of a photograph, aligned as the published scripts do, without smoothing."""
    try:
        return align(decode_rgb(read_bytes(path), MAX_PHOTO_PIXELS), points, size, smooth=False)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def evaluate_templates(
    lists: TemplateSet, numbers: np.ndarray, vectors: np.ndarray, options: argparse.Namespace, name: str
) -> dict[str, Any]:
    """Return the results of 1:1 and, with galleries, of 1:N, from template numbers (T,) and vectors (T, D)."""

    def bar(chunks: Sequence[int]) -> Iterable[int]:
        return progress(chunks, len(chunks), "scoring", "chunk")

    scores = score_pairs(vectors, numbers, lists.pairs, bar)
    if options.scores:
        np.save(options.scores, scores)
    published = published_tar(scores, lists.same, FAR_TARGETS)
    distances = 2.0 - 2.0 * scores
    points = operating_points(np.sort(distances[lists.same]), np.sort(distances[~lists.same]))
    report: dict[str, Any] = {
        "pairs": len(scores),
        "genuine": int(lists.same.sum()),
        "tar_as_published": published,
        "operating_points": [point.as_json() for point in points],
    }
    galleries = [options.root / "meta" / f"{name}_1N_gallery_{part}.csv" for part in _GALLERIES[name]]
    probe = options.root / "meta" / f"{name}_1N_probe_mixed.csv"
    if probe.is_file() and all(path.is_file() for path in galleries):
        found = [search(vectors, numbers, path, probe) for path in galleries]
        report["identification"] = {
            key: None if any(part[key] is None for part in found) else float(np.mean([part[key] for part in found]))
            for key in found[0]
        }
    return report


def search(vectors: np.ndarray, numbers: np.ndarray, gallery: Path, probe: Path) -> dict[str, float | None]:
    """Return rank-k and TPIR at FPIR of one gallery, from lists of template_id,subject_id."""
    (entries, people), (probes, wanted) = (read_people(path, numbers) for path in (gallery, probe))
    found = identify(vectors[entries], people, vectors[probes], wanted)
    rates: dict[str, float | None] = {f"rank_{k}": found.rank_rate(k) for k in _RANKS}
    return rates | {f"tpir_at_fpir_{fpir}": found.tpir_at_fpir(fpir) for fpir in _FPIR}


def read_people(path: Path, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (rows of the templates, subjects) of a CSV file whose first columns are template_id and subject_id."""
    rows = []
    for number, line in enumerate(read_lines(path)[1:], 2):
        words = line.split(",")
        if len(words) < 2 or not words[0].strip().isdigit() or not words[1].strip().isdigit():
            raise ValueError(f"{path}: line {number} must begin with template_id,subject_id, two whole numbers")
        rows.append((int(words[0]), int(words[1])))
    table = np.unique(np.array(rows, dtype=np.int64).reshape(-1, 2), axis=0)  # the lists have a line per image of a template
    places = np.searchsorted(numbers, table[:, 0])
    known = numbers[np.minimum(places, len(numbers) - 1)] == table[:, 0]
    if not known.all() or not len(table):
        missing = table[~known][0, 0] if len(table) else "any"
        raise ValueError(f"{path}: template {missing} has no image in the 1:1 lists")
    return places, table[:, 1]


def _print(report: dict[str, Any]) -> None:
    print(f"1:1, {report['pairs']:,} pairs, {report['genuine']:,} of them genuine")
    print(f"  {'FAR':<8}{'as published':>14}{'FAR not above':>15}{'impostors accepted':>20}{'cosine threshold':>18}")
    for point in report["operating_points"]:
        target, tar = point["target"], point["tar"]
        exact = "n/a" if tar is None else f"{100 * tar:.2f}"
        threshold = point["cosine_threshold"]
        cosine = "n/a" if threshold is None else f"{threshold:.4f}"
        print(
            f"  {target:<8}{100 * report['tar_as_published'][target]:>14.2f}{exact:>15}{point['num_accepted']:>20}{cosine:>18}"
        )
    for key, value in report.get("identification", {}).items():
        print(f"  1:N {key:<22}{'not measurable' if value is None else f'{100 * value:.2f} %'}")


if __name__ == "__main__":
    raise SystemExit(main())
