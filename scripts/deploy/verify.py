"""Are two pictures of one person? face verify [NETWORK] A B

A and B are aligned crops, or photographs if --detector names a face detector. Prints the cosine of the two faces, and with a
threshold whether it is the same person.

Exit status: 0 = the same person, or no threshold was given; 3 = different people; 1 = an error, such as a picture without a
face; 2 = a wrong command line.

Example: face verify work_dirs/ms1mv3_r50 a.jpg b.jpg --detector yunet.onnx --far 1e-2
"""

import argparse
from pathlib import Path

import numpy as np

from deploy.embed.embedder import open_embedder
from deploy.faces.detector import add_detector_arguments, open_detector
from deploy.faces.pictures import Crop, Rejected, add_which_argument, read_crops
from deploy.gallery.commands import NO_DIRECTION
from deploy.results import add_threshold_arguments, threshold_of
from eval.networks import add_network_arguments
from utils.checkpoint.format import newest_run
from utils.cli import make_parser
from utils.files import shown
from utils.program import run_main
from utils.text import one_line

DIFFERENT = 3  # exit status


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face verify", __doc__)
    add_network_arguments(parser, newest=True)
    parser.add_argument("a", type=Path, help="a picture")
    parser.add_argument("b", type=Path, help="another picture")
    add_threshold_arguments(parser)
    add_detector_arguments(parser)
    add_which_argument(parser, one=True, otherwise="an error")
    return run_main(compare, parser.parse_intermixed_args(arguments))


def compare(options: argparse.Namespace) -> int:
    """Print the cosine of two faces and what it means; return DIFFERENT if they are different people, otherwise 0."""
    options.run = options.run or newest_run()
    threshold = threshold_of(options)
    embedder, detector = open_embedder(options), open_detector(options)
    crops: list[Crop] = []
    for path in (options.a, options.b):
        found = read_crops(path.parent, path.name, detector, embedder.image_size, options.which)
        if isinstance(found, Rejected):
            raise ValueError(f"{shown(path)}: {found.reason}")
        crops.append(found[0])
    raw = embedder.embed(np.stack([crop.pixels for crop in crops])).astype(np.float64)
    norms = np.linalg.norm(raw, axis=1)
    for path, norm in zip((options.a, options.b), norms, strict=True):
        if not np.isfinite(norm) or norm == 0:
            raise ValueError(f"{shown(path)}: {NO_DIRECTION}")
    cosine = float(np.clip((raw[0] / norms[0]) @ (raw[1] / norms[1]), -1, 1))
    print(f"cosine {cosine:.4f} (norms {norms[0]:.3g} and {norms[1]:.3g}), network {one_line(embedder.title)}")
    if threshold is None:
        print("no threshold, so no answer; see --far and --threshold")
        return 0
    same = cosine > threshold.cosine
    print(f"{'the same person' if same else 'different people'}: {'above' if same else 'not above'} the {threshold.words}")
    return 0 if same else DIFFERENT


if __name__ == "__main__":
    raise SystemExit(main())
