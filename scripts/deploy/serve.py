"""A network as a service, with a page to try it on: face serve [NETWORK]

Drop two photographs on the page: is it the same person, and where does the score lie among genuine and impostor pairs? With
--gallery drop one: who is it? Programs ask by REST: verify, search, embed, enrol, remove; the page /api lists the requests.

It listens on 127.0.0.1, for all who are logged in on this machine. With --keys requests need a key of the file, whose lines
are `ask KEY` or `change KEY`; only the latter may enrol and remove, and only with keys may --host name another address.
Without --detector a picture must be an aligned crop. Thresholds and histograms are those of the run that is the network, or of
--results, the results.json of face eval --report, or of --pairs, a verification set. Ctrl-C ends it.

Examples:
  face serve work_dirs/demo_cpu
  face serve model.onnx --detector detector.onnx --pairs lfw.bin --gallery people.gallery --far 1e-2
  face serve model.onnx --gallery people.gallery --keys keys --host 0.0.0.0 --tls cert.pem key.pem
"""

import argparse
import contextlib
from pathlib import Path
from shlex import quote

from deploy.embed.embedder import open_embedder
from deploy.faces.detector import add_detector_arguments, open_detector
from deploy.gallery.adapted import result_for_page
from deploy.gallery.commands import facts_of, recorded_network, require_network, take_recorded_network, warn_of_other_detector
from deploy.gallery.gate import add_gate_arguments, gate_of
from deploy.gallery.store import Gallery
from deploy.serve.answers import WHICH_FACE, Answers, result_of
from eval.networks import add_network_arguments
from eval.verification import FAR_TARGETS
from utils.checkpoint.format import newest_run
from utils.cli import int_in_range, make_parser, warn
from utils.files import shown
from utils.program import run_main
from utils.text import pip_install

_PATIENCE = 5.0  # seconds that an enrolment waits for another process; searches wait for it


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face serve", __doc__)
    add_network_arguments(parser, newest=True)
    add_detector_arguments(parser)
    parser.add_argument("--gallery", type=Path, metavar="FILE", help="to search in; with keys that may change it, made if new")
    add_gate_arguments(parser)
    numbers = parser.add_mutually_exclusive_group()
    numbers.add_argument("--results", type=Path, metavar="FILE", help="results.json of this network")
    numbers.add_argument("--pairs", type=Path, metavar="SET", help="verification set, such as lfw.bin, to compute them now")
    parser.add_argument("--set", metavar="NAME", help="set in --results (default: the strictest at --far)")
    parser.add_argument("--far", choices=FAR_TARGETS, help="to begin with (default: the lowest of the largest set)")
    parser.add_argument("--port", type=int_in_range(0, 65535), default=8000, help="0 = any that is free")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="of this machine, to listen on; 0.0.0.0 = all")
    parser.add_argument("--keys", type=Path, metavar="FILE", help="keys of those who may ask, or change the gallery")
    parser.add_argument("--tls", type=Path, nargs=2, metavar=("CERT", "KEY"), help="PEM files of a certificate and its key")
    options = parser.parse_args(arguments)
    options.which = WHICH_FACE
    return run_main(serve_page, options)


def serve_page(options: argparse.Namespace) -> None:
    """Open everything, and serve until Ctrl-C."""
    try:
        from deploy.serve.access import LOOPBACK, Access
        from deploy.serve.server import PageServer
    except ImportError as error:
        packages = pip_install("starlette", "uvicorn", "prometheus-client")
        raise ValueError(f"the page needs starlette, uvicorn and prometheus-client ({error}): {packages}") from None
    access = Access(options.keys)
    if options.host != LOOPBACK and not options.keys:
        raise ValueError(f"--host: other machines may ask only with keys; give --keys FILE, or leave --host out for {LOOPBACK}")
    may_enrol = bool(options.gallery and access.may_change)
    if options.run and options.run.suffix == ".gallery":  # the first word of face search
        raise ValueError(f"{shown(options.run)} is a gallery, not a network; give it as --gallery {quote(shown(options.run))}")
    gate, is_new = gate_of(options, may_enrol), may_enrol and not options.gallery.exists()
    if options.run is None and options.gallery and not is_new:
        take_recorded_network(options)
    options.run = options.run or newest_run()
    recorded = recorded_network(options)
    embedder, detector = open_embedder(options), open_detector(options)
    result, far = result_of(options, embedder)
    gallery = None
    if options.gallery:
        facts = facts_of(options, embedder, detector, recorded)
        gallery = Gallery.create(options.gallery, facts, _PATIENCE) if is_new else Gallery(options.gallery, _PATIENCE)
        require_network(gallery, embedder)
        warn_of_other_detector(gallery, facts.detector, WHICH_FACE)
        with contextlib.suppress(ValueError):  # of a damaged vector, which each search names
            gallery.searcher()  # who asks first does not wait until a large gallery is read
        result, far = result_for_page(options, gallery, (result, far))
    answers = Answers(embedder, detector, gallery, result, far, gate)
    server = PageServer(options.port, answers, access, options.host, options.tls)
    with contextlib.suppress(KeyboardInterrupt):
        print(f"the page is at {server.page} (Ctrl-C ends it)", flush=True)
        if options.host != LOOPBACK and not options.tls:
            warn("keys and pictures are not encrypted; give --tls, or let a proxy do it")
        server.serve()
    print("ended", flush=True)  # also after a SIGINT that the shell ignores for programs behind &


if __name__ == "__main__":
    raise SystemExit(main())
