"""Measure how many requests `face serve` answers, and how fast: face bench serve

The service runs in a process of its own, with a network that is not trained and a gallery of some people. 1, 4 and 16 clients
search for a face, each without pause. Beside that, `one at a time`: the same service, which embeds each face alone.

Example: face bench serve --quick
"""

import argparse
import http.client
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backbones import build_backbone
from deploy.embed.embedder import Embedder
from deploy.gallery.database import Facts
from deploy.gallery.store import Gallery, NewImage
from deploy.serve.answers import Answers, Batcher
from deploy.serve.server import PageServer
from eval.networks import Network
from utils.cli import int_in_range, make_parser
from utils.distributed import choose_device
from utils.image import to_png
from utils.program import run_main

from .kit import add_common_arguments, machine, take_turns, write_json

_SIZE, _DIM, _PEOPLE = 112, 128, 1000
_CLIENTS = (1, 4, 16)
_HEADERS = {"Content-Type": "application/octet-stream"}


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face bench serve", __doc__)
    parser.add_argument("--backbone", default="r18", help="network (default: %(default)s)")
    parser.add_argument("--width", type=float, default=1.0, help="its width (default: %(default)s)")
    parser.add_argument("--requests", type=int_in_range(1), default=200, help="of each measurement (default: %(default)s)")
    add_common_arguments(parser, quick="a network of width 0.25, 48 requests, one round", rounds=3)
    return run_main(benchmark, parser.parse_args(arguments))


def benchmark(options: argparse.Namespace) -> None:
    """Measure, print, and write the JSON."""
    if options.quick:
        options.width, options.requests, options.rounds = 0.25, 48, 1
    context = multiprocessing.get_context("spawn")
    services = {}
    for name, together in (("together", True), ("one at a time", False)):
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(options, together, there), daemon=True)
        process.start()
        services[name] = here.recv()
    device = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    print(f"{options.backbone} of width {options.width}, {_PEOPLE:,} people; {machine(device)}")
    print(f"{'clients':>7}  {'':<13}  {'answers/s':>9}  {'median ms':>9}  {'95 % ms':>8}  {'99 % ms':>8}")
    rows: list[dict[str, Any]] = []
    for clients in _CLIENTS:
        seconds: dict[str, list[float]] = {name: [] for name in services}
        ways = {name: partial(_ask, port, clients, options.requests, seconds[name]) for name, port in services.items()}
        rates = take_turns(ways, options.rounds)
        for name, found in rates.items():
            times = np.percentile(seconds[name], [50, 95, 99]) * 1e3
            row = {"clients": clients, "way": name, "per_second": float(np.median(found)), "milliseconds": times.tolist()}
            rows.append(row)
            print(f"{clients:>7}  {name:<13}  {row['per_second']:>9.1f}  {times[0]:>9.0f}  {times[1]:>8.0f}  {times[2]:>8.0f}")
    write_json(options.json, {"machine": machine(device), "rows": rows})


def _serve(options: argparse.Namespace, together: bool, channel: Any) -> None:
    """Serve in this process; send the port."""
    torch.manual_seed(0)
    model = build_backbone(options.backbone, _DIM, options.width).eval()
    embedder = Embedder(Network(model, "a network", {}), choose_device(options.device, 0), 64, None)
    with tempfile.TemporaryDirectory() as folder:
        facts = Facts("a network", embedder.digest, _DIM, _SIZE, "", "largest")
        gallery = Gallery.create(Path(folder) / "people.gallery", facts)
        rows = np.random.default_rng(0).normal(size=(_PEOPLE, _DIM)).astype(np.float32)
        gallery.add([NewImage(f"p{number}", "", b"", 0, 1.0, row, None) for number, row in enumerate(rows)])
        answers = Answers(embedder, None, gallery, None, "")
        if not together:
            answers.batcher = Batcher(embedder.embed, 1)
        server = PageServer(0, answers)
        channel.send(server.port)
        server.serve()


def _ask(port: int, clients: int, requests: int, seconds: list[float]) -> float:
    """Return answers per second of that many clients; add the seconds of each request."""
    picture = to_png(np.random.default_rng(1).integers(0, 256, (_SIZE, _SIZE, 3), dtype=np.uint8))
    left = iter(range(requests))  # of which each client takes the next one

    def client(_: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        for _ in left:
            started = time.perf_counter()
            connection.request("POST", "/api/search", picture, _HEADERS)
            reply = connection.getresponse()
            found = json.loads(reply.read())
            if reply.status != 200:
                raise ValueError(f"the service answered {reply.status}: {found}")
            seconds.append(time.perf_counter() - started)
        connection.close()

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    return requests / (time.perf_counter() - started)


if __name__ == "__main__":
    raise SystemExit(main())
