"""Align faces by five landmarks: python -m scripts.align_faces FOLDER LANDMARKS OUT

Every picture below FOLDER that LANDMARKS names is brought to the standard template (utils/alignment.py) and written below OUT
under the same relative name, as JPEG, or losslessly with --png. Pictures that OUT holds already are passed over, so that an
interrupted run goes on.

LANDMARKS: a line for each face, name,x1,y1,x2,y2,x3,y3,x4,y4,x5,y5 in pixels: left eye, right eye, nose, left
and right corner of the mouth, as they stand in the picture. name is the picture's path below FOLDER. A header may name the
columns in another order.

Example: python -m scripts.align_faces people landmarks.csv aligned
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m scripts.align_faces")

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import cv2

from utils.alignment import align
from utils.cli import make_parser
from utils.image import IMAGE_SIZE, MAX_PHOTO_PIXELS, decode_rgb
from utils.parallel import ordered
from utils.program import guarded

from .face_files import SUFFIXES, add_threads, points_of, progress, read_landmarks, to_jpeg, whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and align; return the exit status."""
    parser = make_parser("python -m scripts.align_faces", __doc__)
    parser.add_argument("folder", type=Path, help="with pictures, in sub-folders or not")
    parser.add_argument("landmarks", type=Path, help="CSV: name, x1, y1, ... x5, y5 in pixels of the picture; header or none")
    parser.add_argument("out", type=Path, help="folder for the aligned faces")
    parser.add_argument(
        "--size", type=whole(8, 4096), default=IMAGE_SIZE, help=f"height and width in pixels (default {IMAGE_SIZE})"
    )
    parser.add_argument("--plain-warp", action="store_true", help="as insightface does, without smoothing where faces shrink")
    parser.add_argument("--png", action="store_true", help="write PNG instead of JPEG")
    parser.add_argument("--quality", type=whole(1, 100), default=95, help="of the JPEG (default 95)")
    add_threads(parser)
    options = parser.parse_args(arguments)
    return guarded(lambda: align_all(options))


def align_all(options: argparse.Namespace) -> None:
    """Align every picture; a picture without landmarks, or one that cannot be aligned, is an error that names it."""
    if not options.folder.is_dir():
        raise ValueError(f"{options.folder}: no such folder of pictures")
    known = read_landmarks(options.landmarks)
    names = sorted(
        os.path.relpath(os.path.join(place, file), options.folder)
        for place, _, files in os.walk(options.folder, followlinks=True)
        for file in files
        if file.lower().endswith(SUFFIXES)
    )
    if not names:
        raise ValueError(f"{options.folder}: no picture in it ({' '.join(SUFFIXES)})")
    jobs = [(name, points_of(known, name)) for name in names]  # a missing line is said before any work is done

    def work(job: tuple) -> bool:
        name, points = job
        target = (options.out / name).with_suffix(".png" if options.png else ".jpg")
        if target.exists():
            return False
        try:
            face = align(
                decode_rgb((options.folder / name).read_bytes(), MAX_PHOTO_PIXELS), points, options.size, not options.plain_warp
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"{options.folder / name}: {error}") from None
        target.parent.mkdir(parents=True, exist_ok=True)
        if options.png:
            data = cv2.imencode(".png", cv2.cvtColor(face, cv2.COLOR_RGB2BGR))[1].tobytes()
        else:
            data = to_jpeg(face, options.quality)
        unfinished = target.with_name(f".{target.name}.unfinished")
        unfinished.write_bytes(data)
        unfinished.replace(target)
        return True

    written = sum(progress(ordered(work, jobs, options.threads), len(jobs), "aligning", "picture"))
    print(
        f"{options.out}: {written} faces aligned to {options.size} x {options.size}, {len(jobs) - written} were there already"
    )


if __name__ == "__main__":
    raise SystemExit(main())
