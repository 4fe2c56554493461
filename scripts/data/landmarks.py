"""Find five landmarks of each image of a set: face data landmarks SET OUT.npy --detector FILE.onnx

backbone.name=vit_kprpe_s and vit_kprpe_b train with them: data.landmarks=OUT.npy. The file is (images, 5, 2) float16, row i of
image i, x and y as shares of the side; NaN where the detector finds no face. The images are aligned crops, in which a face
fills the picture, so the detector sees them with a black border of half their side.

Example: face data landmarks datasets/demo landmarks.npy --detector yunet.onnx
"""

import argparse
from pathlib import Path

import numpy as np

from data.landmarks import write_landmarks
from data.scan import open_set_of
from deploy.faces.detector import add_detector_arguments, open_detector
from deploy.faces.pictures import chosen
from utils.alignment import POINTS
from utils.cli import add_threads, int_in_range, make_parser, progress
from utils.files import check_folder_of
from utils.image import IMAGE_SIZE
from utils.parallel import map_in_order
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face data landmarks", __doc__)
    parser.add_argument("set", type=Path, help="folder with train.rec, *.tar or a folder per person; or a list of 'path label'")
    parser.add_argument("out", type=Path, help=".npy file")
    add_detector_arguments(parser, required=True)
    parser.add_argument("--size", type=int_in_range(16, 1024), default=IMAGE_SIZE, help="height and width in pixels")
    add_threads(parser)
    return run_main(find, parser.parse_args(arguments))


def find(options: argparse.Namespace) -> None:
    """Write the landmarks of a set."""
    if options.out.suffix != ".npy":
        raise ValueError(f"OUT must end in .npy, got {options.out}")
    if options.out.exists():
        raise ValueError(f"{options.out}: exists already; choose another name")
    check_folder_of(options.out, "OUT")
    dataset, detector, size = open_set_of(options.set), open_detector(options), options.size
    assert detector is not None
    border = size // 2

    def work(index: int) -> np.ndarray:
        pixels, _ = dataset.pixels_and_label(index, size)
        faces = detector.detect(np.pad(pixels, ((border, border), (border, border), (0, 0))))
        if not faces:
            return np.full((len(POINTS), 2), np.nan)
        points = faces[chosen(faces, "central", *[size + 2 * border] * 2)[0]].points
        return (points - border + 0.5) / size

    count = dataset.num_stored
    table = np.empty((count, len(POINTS), 2), dtype=np.float32)
    for index, points in enumerate(progress(map_in_order(work, range(count), options.threads), count, "finding", "image")):
        table[index] = points
    missing = int(np.isnan(table).any(axis=(1, 2)).sum())
    if missing == count:
        raise ValueError(f"--detector: found no face in any of {count} images; see --min-score and --min-size")
    write_landmarks(options.out, table)
    print(f"{options.out}: landmarks of {count - missing} of {count} images; in {missing} the detector found no face")


if __name__ == "__main__":
    raise SystemExit(main())
