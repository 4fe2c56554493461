"""Make a RecordIO set from pictures: face data folder_to_rec FOLDER OUT

FOLDER has a sub-folder per identity. Aligned 112 x 112 JPEG and PNG files are stored byte for byte; others are aligned by the
five landmarks of --landmarks, or resized with --resize. OUT then holds train.rec, train.idx, property and train.lst.

--landmarks: a CSV file name,x1,y1,x2,y2,x3,y3,x4,y4,x5,y5 in pixels, as face data align takes it.
FOLDER may also be a .lst file with a line for each picture: aligned, path, label (insightface) or index, label, path (im2rec),
separated by tabs. Paths are relative to the file.

Examples:
  face data folder_to_rec aligned set
  face data folder_to_rec photographs set --landmarks landmarks.csv --min-images 2
"""

import argparse
import shlex
from collections import Counter
from pathlib import Path

from data.datasets import FolderDataset
from data.recordio.image_record import RecordSetWriter
from deploy.faces.landmarks import points_of, read_landmarks, report_padding
from deploy.faces.pictures import UPRIGHT, Picture, Rejected, Rules, encode, report_turned
from deploy.faces.pictures import read_list as read_lst
from utils.cli import add_threads, int_in_range, make_parser, progress, warn
from utils.files import write_file
from utils.image import IMAGE_SIZE
from utils.parallel import map_in_order
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face data folder_to_rec", __doc__)
    parser.add_argument("folder", type=Path, help="folder with a sub-folder per identity, or a .lst of insightface or im2rec")
    parser.add_argument("out", type=Path, help="folder of the set")
    parser.add_argument("--landmarks", type=Path, help="CSV: name, x1, y1, ... x5, y5; aligns every picture")
    parser.add_argument("--upright", action="store_true", help=f"with --landmarks: {UPRIGHT}")
    parser.add_argument("--plain-warp", action="store_true", help="with --landmarks: align like insightface, without smoothing")
    parser.add_argument("--resize", action="store_true", help="resize pictures of another size, without alignment")
    parser.add_argument("--min-images", type=int_in_range(1), default=1, help="leave out identities with fewer pictures")
    parser.add_argument("--skip-bad", action="store_true", help="leave out unusable pictures, and list them in OUT/skipped.txt")
    parser.add_argument("--size", type=int_in_range(8, 4096), default=IMAGE_SIZE, help="height and width in pixels")
    parser.add_argument("--quality", type=int_in_range(1, 100), default=95, help="quality of new JPEGs")
    parser.add_argument("--overwrite", action="store_true", help="replace a set in OUT")
    add_threads(parser)
    return run_main(convert, parser.parse_args(arguments))


def convert(options: argparse.Namespace) -> None:
    """Write the set; an unusable picture is an error, or is listed with --skip-bad."""
    if options.folder.is_file():
        pictures = sorted(read_lst(options.folder), key=lambda picture: picture.label)
        if not pictures:
            raise ValueError(f"{options.folder}: the list has no pictures")
    else:
        people = FolderDataset(str(options.folder))
        warn(*people.warnings)
        pictures = [Picture(options.folder, file, people.label(index)) for index, file in enumerate(people.files)]
    counts = Counter(picture.label for picture in pictures)
    pictures = [picture for picture in pictures if counts[picture.label] >= options.min_images]
    left_out = sum(count < options.min_images for count in counts.values())
    if not pictures:
        most = f"the largest has {max(counts.values())}; lower --min-images"
        raise ValueError(f"{options.folder}: no identity has {options.min_images} pictures, {most}")
    if options.landmarks:
        known = read_landmarks(options.landmarks)
        found = points_of(known, [picture.name for picture in pictures])
        pictures = [picture._replace(points=points) for picture, points in zip(pictures, found, strict=True)]
    rules = Rules(options.size, options.quality, options.resize, not options.plain_warp, options.upright)
    skipped: list[Rejected] = []
    padding: dict[str, float] = {}
    turned: list[str] = []
    numbers: dict[int, int] = {}  # of the identities in their order, so that one without a usable picture leaves no gap
    with RecordSetWriter(options.out, size=options.size, overwrite=options.overwrite) as writer:
        results = map_in_order(lambda picture: (picture, encode(picture, rules)), pictures, options.threads)
        for picture, image in progress(results, len(pictures), "writing", "picture"):
            if isinstance(image, Rejected):
                if not options.skip_bad:
                    raise ValueError(f"{picture.folder / picture.name}: {image.reason}. {_advice(picture, image)}")
                skipped.append(image)
            else:
                writer.add(numbers.setdefault(picture.label, len(numbers)), image.data, picture.name)
                if picture.points is not None:
                    padding[picture.name] = image.padding
                    turned += [picture.name] * image.turned
    if skipped:
        text = "".join(f"{bad.name}\t{bad.reason}\n" for bad in skipped)
        write_file(options.out / "skipped.txt", text)
        print(f"{len(skipped)} pictures were left out, listed in {options.out / 'skipped.txt'}")
    report_padding(options.out, padding)
    report_turned(turned)
    if left_out:
        print(f"{left_out} identities have fewer than {options.min_images} pictures and were left out")
    print(f"{options.out}: {writer.num_images} images of {writer.num_classes} identities")
    print(f"next: face data inspect {shlex.quote(str(options.out))} --out report")


def _advice(picture: Picture, bad: Rejected) -> str:
    if picture.points is not None and "landmarks" in bad.reason:
        return "Correct the landmarks, or leave out all such pictures with --skip-bad"
    if "pixels, not" in bad.reason:
        return "Give --landmarks to align the faces, or --resize if they are aligned; --skip-bad leaves such pictures out"
    return "Remove the picture, or leave out all such pictures with --skip-bad"


if __name__ == "__main__":
    raise SystemExit(main())
