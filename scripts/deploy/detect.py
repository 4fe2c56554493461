"""Find and align faces: face detect FOLDER OUT --detector FILE.onnx

Every photograph below FOLDER is searched for faces. Each face that counts is aligned to the standard template
(utils/alignment.py) and written below OUT under the same relative name as a JPEG; with --which all as NAME_1.jpg, NAME_2.jpg
and so on, best score first. Photographs are turned as their EXIF orientation says. OUT then also holds

landmarks.csv   the five points of each face in pixels of its upright picture, then box and score; face data align reads it
rejected.csv    pictures without a face that can be aligned, with the reason
padding.csv     faces that are largely outside their picture, if there are any
detect.jsonl    what is done, so that an interrupted run can be continued: start the same command again

Example: face detect photographs aligned --detector scrfd_10g_bnkps.onnx --sheet faces.png
"""

from pathlib import Path

from deploy.faces.detect import run
from deploy.faces.detector import add_detector_arguments
from deploy.faces.pictures import add_which_argument
from deploy.gallery.gate import add_padding_argument
from utils.cli import add_threads, int_in_range, make_parser
from utils.image import IMAGE_SIZE
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face detect", __doc__)
    parser.add_argument("folder", type=Path, help="folder of photographs, with or without sub-folders")
    parser.add_argument("out", type=Path, help="folder for the aligned faces")
    add_detector_arguments(parser, required=True)
    add_which_argument(parser)
    add_padding_argument(parser)
    parser.add_argument("--size", type=int_in_range(8, 4096), default=IMAGE_SIZE, help="height and width in pixels")
    parser.add_argument("--quality", type=int_in_range(1, 100), default=95, help="JPEG quality")
    parser.add_argument("--sheet", type=Path, metavar="PNG", help="draw pictures with box and points beside their crops")
    parser.add_argument("--again", action="store_true", help="begin anew: nothing that OUT has is kept as it is")
    add_threads(parser)
    return run_main(run, parser.parse_args(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
