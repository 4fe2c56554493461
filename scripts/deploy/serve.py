"""Try a network on a page of your own: python -m scripts.deploy.serve [NETWORK]

Serves a page on this machine. Drop two photographs: is it the same person, and where does the score lie among genuine and
impostor pairs? With --gallery drop one: who is it? The pictures are compared in memory, and nothing is stored.

The page listens on 127.0.0.1, which no other machine reaches; everybody who is logged in on this machine does. Without
--detector a picture must be an aligned crop. Thresholds and histograms are those of the run that is the network, or of
--results, the results.json of python -m eval --report; --pairs computes them from a verification set instead. Programs can ask,
too: GET /api/info, POST /api/search with the bytes of a picture, POST /api/verify with two (docs/deploy.md). Ctrl-C ends it.

Examples:
  python -m scripts.deploy.serve work_dirs/demo_cpu
  python -m scripts.deploy.serve model.onnx --detector detector.onnx --pairs lfw.bin --gallery people.gallery --far 1e-2
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from deploy.embed.embedder import open_embedder
from deploy.faces.detector import add_detector_arguments, open_detector
from deploy.gallery.commands import require_network, take_recorded_network, warn_of_other_detector
from deploy.gallery.store import Gallery
from deploy.serve.answers import WHICH_FACE, Answers, result_of
from eval.networks import add_network_arguments
from eval.verification import FAR_TARGETS
from utils.checkpoint.format import newest_run
from utils.cli import int_in_range, make_parser
from utils.program import run_main
from utils.text import one_line, pip_install


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and serve the page; return the exit status."""
    parser = make_parser("python -m scripts.deploy.serve", __doc__)
    add_network_arguments(parser, newest=True)
    add_detector_arguments(parser)
    parser.add_argument("--gallery", type=Path, metavar="FILE", help="gallery of `face enrol`, to search in")
    numbers = parser.add_mutually_exclusive_group()
    numbers.add_argument("--results", type=Path, metavar="FILE", help="results.json of this network")
    numbers.add_argument("--pairs", type=Path, metavar="SET", help="verification set, such as lfw.bin, to compute them now")
    parser.add_argument("--set", metavar="NAME", help="set in --results (default: the strictest at --far, else the largest)")
    parser.add_argument("--far", choices=FAR_TARGETS, help="of the threshold to begin with (default: the lowest measured)")
    parser.add_argument("--port", type=int_in_range(0, 65535), default=8000, help="0 = any that is free")
    return run_main(serve_page, parser.parse_args(arguments))


def serve_page(options: argparse.Namespace) -> None:
    """Open everything, and serve until Ctrl-C."""
    try:
        from deploy.serve.server import ADDRESS, PageServer
    except ImportError as error:
        raise ValueError(f"the page needs starlette and uvicorn ({error}): {pip_install('starlette', 'uvicorn')}") from None
    if options.run is None and options.gallery:
        take_recorded_network(options)
    options.run = options.run or newest_run()
    embedder = open_embedder(options)
    detector = open_detector(options)
    result, far = result_of(options, embedder)
    gallery = Gallery(options.gallery) if options.gallery else None
    if gallery:
        require_network(gallery, embedder)
        warn_of_other_detector(gallery, one_line(detector.name) if detector else "", WHICH_FACE)
    answers = Answers(embedder, detector, gallery, result, far)
    server = PageServer(options.port, answers)
    try:
        print(f"the page is at http://{ADDRESS}:{server.port}/ (Ctrl-C ends it)", flush=True)
        server.serve()
    except KeyboardInterrupt:
        print("ended", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
