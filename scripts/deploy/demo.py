"""Try a network on a page of your own: python -m scripts.deploy.demo NETWORK

Serves a page on this machine. Drop two photographs: is it the same person, and where does the score lie among genuine and
impostor pairs? With --gallery drop one: who is it? The pictures are compared in memory, and nothing is stored.

The page listens on 127.0.0.1, which no other machine reaches; everybody who is logged in on this machine does. Without
--detector a picture must be an aligned crop. Thresholds and histograms are those of --results, the results.json of a run or of
python -m eval --report; --pairs computes them from a verification set instead. End the program with Ctrl-C.

Examples:
  python -m scripts.deploy.demo work_dirs/demo_cpu --results work_dirs/demo_cpu/evaluation/results.json
  python -m scripts.deploy.demo model.onnx --detector detector.onnx --pairs lfw.bin --gallery people.gallery --far 1e-4
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m scripts.deploy.demo")

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deploy.embed.embedder import Embedder, open_embedder
from deploy.faces.detector import add_detector_arguments, open_detector
from deploy.gallery.store import Gallery
from deploy.results_file import Point, SetResult, parse_results, read_results_of
from deploy.serve.answers import WHICH_FACE, DemoAnswers
from deploy.serve.server import ADDRESS, PageServer
from eval.evaluate import load_pair_sets
from eval.networks import add_network_arguments
from eval.operating_points import FAR_TARGETS
from eval.report import as_json
from eval.verification import row_norms, verify
from utils.cli import int_in_range, make_parser, progress
from utils.files import shown
from utils.program import run_main
from utils.text import one_line

from .enrol import require_network, warn_of_other_detector

_PAGE = Path(__file__).with_name("demo_page.html")
_AT_ONCE = 64  # images of a set between two steps of the progress bar


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and serve the page; return the exit status."""
    parser = make_parser("python -m scripts.deploy.demo", __doc__)
    add_network_arguments(parser)
    add_detector_arguments(parser)
    parser.add_argument("--gallery", type=Path, metavar="DIR", help="gallery of python -m scripts.deploy.enrol, to search in")
    numbers = parser.add_mutually_exclusive_group()
    numbers.add_argument("--results", type=Path, metavar="FILE", help="results.json of this network")
    numbers.add_argument("--pairs", type=Path, metavar="SET", help="verification set, such as lfw.bin, to compute them now")
    parser.add_argument("--set", metavar="NAME", help="set in --results (default: the strictest at --far, else the largest)")
    parser.add_argument("--far", choices=FAR_TARGETS, help="of the threshold to begin with (default: the lowest measured)")
    parser.add_argument("--port", type=int_in_range(0, 65535), default=8000, help="0 = any that is free (default 8000)")
    options = parser.parse_args(arguments)
    return run_main(lambda: serve(options))


def serve(options: argparse.Namespace) -> None:
    """Open everything, and serve until Ctrl-C."""
    embedder = open_embedder(options)
    detector = open_detector(options)
    result = _result_of(options, embedder)
    gallery = Gallery(options.gallery) if options.gallery else None
    if gallery:
        require_network(gallery, embedder)
        warn_of_other_detector(gallery, one_line(detector.name) if detector else "", WHICH_FACE)
    answers = DemoAnswers(embedder, detector, gallery, result, _far_of(options, result))
    with PageServer(options.port, _PAGE.read_text(encoding="utf-8"), answers) as server:
        try:
            print(f"the page is at http://{ADDRESS}:{server.port}/ (Ctrl-C ends it)", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            server.computing.acquire(timeout=10)  # a thread that computes must not outlive the interpreter
            print("ended", flush=True)


def _result_of(options: argparse.Namespace, embedder: Embedder) -> SetResult | None:
    """Return the numbers of the set whose thresholds the page shows, if one is given."""
    if options.pairs:
        if options.set:
            raise ValueError("--set chooses one of the sets of --results, and --pairs is one; leave it out")
        return score(options.pairs, embedder)
    if not options.results:
        for flag in ("far", "set"):
            if getattr(options, flag):
                raise ValueError(f"--{flag} chooses a threshold of --results or --pairs; give one of them, or leave it out")
        return None
    found = read_results_of(options.results, options.ema, options.set)
    if options.set and options.set not in found:
        raise ValueError(f"--set: {shown(options.results)} has no set {options.set!r:.200}; it has {', '.join(found)}")
    if options.set:
        return found[options.set]
    at_far = [(point.cosine, result) for result in found.values() for point in measured(result) if _is(point, options.far)]
    if at_far:  # the strictest, as scripts.deploy.search has it
        return max(at_far, key=lambda pair: pair[0] or 0.0)[1]
    return max(found.values(), key=lambda result: result.num_impostor or 0)


def measured(result: SetResult) -> list[Point]:
    """Return the thresholds that the pairs of a set could measure, from the highest FAR to the lowest."""
    points = [point for point in result.points if point.cosine is not None and point.tar is not None]
    return sorted(points, key=lambda point: -float(point.target))


def _is(point: Point, far: str | None) -> bool:
    return far is not None and math.isclose(float(point.target), float(far))


def score(path: Path, embedder: Embedder) -> SetResult:
    """Return the numbers of a verification set, computed now."""
    pair_set = load_pair_sets("", [str(path)], "--pairs", "--pairs")[0]
    rows = []
    for first in progress(range(0, len(pair_set.images), _AT_ONCE), None, "scoring the set", "batch"):
        numbers = range(first, min(first + _AT_ONCE, len(pair_set.images)))
        rows.append(embedder.embed(np.stack([pair_set.decode(number, embedder.image_size) for number in numbers])))
    sums = np.concatenate(rows).astype(np.float64)
    norms = row_norms(sums)
    unit = sums / np.where(norms == 0, 1, norms)[:, None]
    result = verify(unit[pair_set.first], unit[pair_set.second], pair_set.same, xnorm=float(norms.mean()))
    return parse_results(as_json({pair_set.name: result}))[pair_set.name]


def _far_of(options: argparse.Namespace, result: SetResult | None) -> str:
    """Return the FAR that the page begins with, "" if no threshold is known."""
    points = measured(result) if result else []
    if options.far is None:
        return points[-1].target if points else ""
    for point in points:
        if _is(point, options.far):
            return point.target
    known = ", ".join(point.target for point in points) or "none, because it has too few pairs"
    raise ValueError(f"--far {options.far}: {result.name if result else 'no set'} has no threshold for it; it has {known}")


if __name__ == "__main__":
    raise SystemExit(main())
