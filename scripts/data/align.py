"""Align faces by five landmarks: face data align FOLDER LANDMARKS OUT

Every picture below FOLDER is aligned to the standard template (utils/alignment.py) by its line in LANDMARKS, and written below
OUT under the same relative name, as JPEG, or losslessly with --png. Pictures that OUT already has are skipped, so that an
interrupted run can be continued. Landmarks outside their picture are an error. OUT/padding.csv lists faces that are largely
padding. Landmarks of face detect need --upright, and --listed where it rejected pictures.

LANDMARKS: a CSV file with a line for each face, name,x1,y1,x2,y2,x3,y3,x4,y4,x5,y5 in pixels: left eye, right eye, nose, left
and right corner of the mouth, as seen in the picture. name is the picture's path below FOLDER. A header may say which columns
are x and y.

Example: face data align people landmarks.csv aligned
"""

import argparse
from pathlib import Path

import numpy as np

from deploy.faces.landmarks import points_of, read_landmarks, report_padding
from deploy.faces.pictures import UPRIGHT, check_distinct, is_turned, list_pictures, report_turned, to_jpeg
from utils.alignment import align, check_points
from utils.cli import add_threads, int_in_range, make_parser, progress
from utils.files import read_bytes, reading, write_file
from utils.image import IMAGE_SIZE, MAX_PHOTO_PIXELS, decode_rgb, image_size, to_png
from utils.parallel import map_in_order
from utils.program import run_main
from utils.text import prefix_errors


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face data align", __doc__)
    parser.add_argument("folder", type=Path, help="folder of pictures, with or without sub-folders")
    parser.add_argument("landmarks", type=Path, help="CSV: name, x1, y1, ... x5, y5 in pixels; the header is optional")
    parser.add_argument("out", type=Path, help="folder for the aligned faces")
    parser.add_argument("--size", type=int_in_range(8, 4096), default=IMAGE_SIZE, help="height and width in pixels")
    parser.add_argument("--upright", action="store_true", help=UPRIGHT)
    parser.add_argument("--listed", action="store_true", help="pass over pictures that LANDMARKS does not name; else an error")
    parser.add_argument("--overwrite", action="store_true", help="replace crops that OUT has; else those of this size are kept")
    parser.add_argument("--plain-warp", action="store_true", help="like insightface, without smoothing when faces shrink")
    parser.add_argument("--png", action="store_true", help="write PNG instead of JPEG")
    parser.add_argument("--quality", type=int_in_range(1, 100), default=95, help="JPEG quality")
    add_threads(parser)
    return run_main(align_all, parser.parse_args(arguments))


def align_all(options: argparse.Namespace) -> None:
    """Align every picture; a picture without landmarks, or one that cannot be aligned, is an error that names it."""
    if options.out.resolve().is_relative_to(options.folder.resolve()):
        raise ValueError(f"{options.out}: the crops must not be below {options.folder}, whose pictures are photographs")
    below = names = list_pictures(options.folder)
    known = read_landmarks(options.landmarks)
    if options.listed:
        names = [name for name in names if name in known]
        if not names:
            raise ValueError(f"{options.landmarks}: names no picture below {options.folder}; a name is a path below it")
        if len(names) < len(below):
            print(f"{len(below) - len(names)} of {len(below)} pictures have no landmarks, and are passed over")
    # report missing lines and name collisions before any work is done
    targets = [(options.out / name).with_suffix(".png" if options.png else ".jpg") for name in names]
    check_distinct(options.folder, names, targets)
    jobs = list(zip(names, points_of(known, names), targets, strict=True))

    turned: list[str] = []

    def work(job: tuple[str, np.ndarray, Path]) -> tuple[bool, float]:
        """Align a picture unless OUT has it already; return whether it is new, and the share of the face that is padding."""
        name, points, target = job
        with reading(options.folder / name), prefix_errors(str(options.folder / name)):
            data = read_bytes(options.folder / name)
            if target.exists() and not options.overwrite and image_size(read_bytes(target)) == (options.size, options.size):
                size = decode_rgb(data, MAX_PHOTO_PIXELS, True).shape[:2] if options.upright else image_size(data)
                return False, check_points(points, *size) if size else 0.0
            pixels = decode_rgb(data, MAX_PHOTO_PIXELS, options.upright)
            padding = check_points(points, *pixels.shape[:2])
            if not options.upright and is_turned(data):
                turned.append(name)
            face = align(pixels, points, options.size, not options.plain_warp)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, to_png(face) if options.png else to_jpeg(face, options.quality), durable=False)
        return True, padding

    done = list(progress(map_in_order(work, jobs, options.threads), len(jobs), "aligning", "picture"))
    written = sum(new for new, _ in done)
    report_turned(sorted(turned))
    report_padding(options.out, {name: padding for name, (_, padding) in zip(names, done, strict=True)})
    print(f"{options.out}: {written} faces aligned to {options.size} x {options.size}, {len(jobs) - written} were there")


if __name__ == "__main__":
    raise SystemExit(main())
