"""Enrol people in a gallery: face enrol [[NETWORK] GALLERY] FOLDER

FOLDER has a sub-folder of pictures for each person; see --person-from and --person for others. The pictures are aligned crops
of the network's size, or photographs if --detector names a face detector. GALLERY is a file, made if there is none, by default
people.gallery. It records network and detector, which later commands take from there; those of a new one are by default the
newest run in work_dirs, and none.

Pictures that are enrolled already are skipped, so that the same command continues after an interruption. Pictures are safe in
the gallery after each batch, and --list names them then. Rejected ones are named with the reason, three of each without --list.

Examples:
  face enrol people --detector yunet.onnx
  face enrol work_dirs/ms1mv3_r50 staff.gallery people --detector yunet.onnx
"""

from pathlib import Path

from deploy.faces.detector import add_detector_arguments
from deploy.faces.pictures import add_which_argument
from deploy.gallery.commands import add_person_arguments, choose_words, enrol_all
from deploy.gallery.gate import add_gate_arguments
from eval.networks import add_network_arguments
from utils.cli import make_parser
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face enrol", __doc__)
    parser.add_argument("words", type=Path, nargs="+", metavar="[[NETWORK] GALLERY] FOLDER", help="a folder may be a picture")
    add_network_arguments(parser, positional=False)
    parser.add_argument("--person", metavar="NAME", help="this person is on all pictures")
    add_person_arguments(parser)
    add_detector_arguments(parser)
    add_which_argument(parser, one=True)
    parser.add_argument("--no-pictures", action="store_true", help="keep no faces; another network then needs the pictures")
    add_gate_arguments(parser)
    parser.add_argument("--list", action="store_true", help="print a line for each picture when it is safe in the gallery")
    options = parser.parse_intermixed_args(arguments)
    words = options.words
    options.run, options.gallery, folders = choose_words(words) if len(words) < 3 else (words[0], words[1], words[2:])
    if len(folders) != 1:
        parser.error(f"one folder is enrolled at a time, got {' '.join(map(str, folders))}")
    options.folder = folders[0]
    return run_main(enrol_all, options)


if __name__ == "__main__":
    raise SystemExit(main())
