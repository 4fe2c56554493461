"""Search a gallery: who is on these pictures? face search [[NETWORK] GALLERY] PICTURES...

PICTURES are aligned crops, or photographs if --detector names a face detector; folders are searched for pictures. GALLERY is by
default people.gallery. Without NETWORK, the network and the detector are those that the gallery was enrolled with.

For each face the most similar people are printed, with the cosine of the most similar picture of each. With a threshold, faces
without a person above it are unknown. Without one the people are only ranked: somebody is always first.

The faces of a video, or of a --camera, are followed while they are in view. Each such track has one search, by the sum of the
embeddings of its best faces.

--labelled counts how often the right person is first, for pictures whose person is known by --person-from.

Examples:
  face search visitor.jpg --far 1e-2
  face search people.gallery clip.mp4 --every 5 --sheet tracks.png --json tracks.json
  face search work_dirs/ms1mv3_r50 people.gallery aligned --labelled --sheet found.png --json found.json
"""

from pathlib import Path

from deploy.faces.detector import add_detector_arguments
from deploy.faces.pictures import add_which_argument
from deploy.gallery.commands import add_person_arguments, choose_words
from deploy.gallery.report import MAX_ROWS, search_all
from deploy.results import add_threshold_arguments
from eval.networks import add_network_arguments
from utils.cli import int_in_range, make_parser
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face search", __doc__)
    parser.add_argument("words", type=Path, nargs="*", metavar="[[NETWORK] GALLERY] PICTURES", help="pictures, videos, folders")
    parser.add_argument("--camera", type=int_in_range(0, 99), metavar="N", help="search what this camera sees, until Ctrl-C")
    parser.add_argument("--every", type=int_in_range(1, 10**6), default=1, metavar="N", help="look at one video frame in N")
    add_network_arguments(parser, positional=False)
    parser.add_argument("--k", type=int_in_range(1, 1000), default=5, help="people shown for each face")
    parser.add_argument("--by", choices=("image", "template"), default="image", help="a person's images, or a pooled vector")
    weights = "of images in a template: the embedding's length times the detector's score, as for IJB-C, or equal"
    parser.add_argument("--weights", choices=("norm", "equal"), default="norm", help=weights)
    add_threshold_arguments(parser)
    add_detector_arguments(parser)
    add_which_argument(parser)
    parser.add_argument("--labelled", action="store_true", help="count right answers; --person-from says who is on a picture")
    add_person_arguments(parser)
    parser.add_argument("--sheet", type=Path, metavar="PNG", help=f"draw the faces and whom they resemble, {MAX_ROWS} at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--quiet", action="store_true", help="do not print the people for each face")
    options = parser.parse_intermixed_args(arguments)
    cameras = [] if options.camera is None else [Path()]  # a word behind the gallery
    if not options.words + cameras:
        parser.error("name pictures, videos or folders")
    options.run, options.gallery, found = choose_words(options.words + cameras)
    options.pictures = found[: len(found) - len(cameras)]
    return run_main(search_all, options)


if __name__ == "__main__":
    raise SystemExit(main())
