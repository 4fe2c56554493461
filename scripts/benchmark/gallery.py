"""Measure the search in a gallery against float32 products with all vectors: face bench gallery

The people are random, each with four images, whose cosine is 0.5. Every second query shows one of them. Both ways must find the
same cosines. Bytes are what a new process needs at most to load the gallery, for each image. TMPDIR needs 6.3 kB an image.

Example: face bench gallery --quick
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from deploy.gallery.database import Facts
from deploy.gallery.store import Gallery, NewImage
from utils.cli import int_in_range, make_parser, progress
from utils.program import run_main

from .kit import CPU, add_common_arguments, machine, peak_bytes, run_ranks, seconds_of, take_turns, write_json

_IMAGES, _SIZE, _BLOCK, _FOUND = 4, 512, 4096, 5  # of a person; numbers of a vector; people drawn at once; people found


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face bench gallery", __doc__)
    parser.add_argument("--people", type=int_in_range(_FOUND), default=250_000, help="with four images each")
    parser.add_argument("--queries", type=int_in_range(1), nargs="+", default=[1, 256], help="searched at once")
    add_common_arguments(parser, "10,000 people: under a minute on two cores", device=False, rounds=3)
    return run_main(benchmark, parser.parse_args(arguments))


def benchmark(options: argparse.Namespace) -> None:
    """Measure, print, and write the JSON."""
    people, rng = 10_000 if options.quick else options.people, np.random.default_rng(0)
    print(machine("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        path, shape = Path(folder) / "people.gallery", (_IMAGES * people, _SIZE)
        rows = np.memmap(Path(folder) / "rows", np.float32, "w+", shape=shape)
        with Gallery.create(path, Facts("random", "0", _SIZE, 112, "", "largest")) as gallery:
            for begin in progress(range(0, people, _BLOCK), None, "enrolling", "block"):
                names = np.repeat(np.arange(begin, min(begin + _BLOCK, people)), _IMAGES)
                drawn = rng.standard_normal((len(names), _SIZE), dtype=np.float32)
                drawn += np.repeat(rng.standard_normal((len(names) // _IMAGES, _SIZE), dtype=np.float32), _IMAGES, axis=0)
                part = rows[_IMAGES * begin : _IMAGES * begin + len(names)]
                part[:] = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
                gallery.add(
                    [NewImage(f"{name}", "", rng.bytes(32), 0, 1.0, row, None) for name, row in zip(names, part, strict=True)]
                )
            loaded = run_ranks(_load, 1, path)[0]
            found = {"images": len(rows), "load_seconds": loaded[0], "bytes_per_image": loaded[1] / len(rows), "queries": {}}
            print(f"{len(rows):,} images: loaded in {loaded[0]:.1f} s, {found['bytes_per_image']:,.0f} bytes for each")
            for count in options.queries:
                queries = rng.standard_normal((count, _SIZE), dtype=np.float32) / np.float32(_SIZE**0.5)
                queries[::2] += rows[rng.integers(len(rows), size=len(queries[::2]))]
                queries /= np.linalg.norm(queries, axis=1, keepdims=True)
                ours = np.array([[match.cosine for match in one] for one in gallery.search(queries, _FOUND)])
                if not np.allclose(ours, _plain(rows, queries), atol=1e-5):  # 512 products in float32
                    raise ValueError("the two ways do not find the same people")
                ways: dict[str, Callable[[], object]] = {
                    "here": partial(gallery.search, queries, _FOUND),
                    "plain": partial(_plain, rows, queries),
                }
                times = take_turns({name: partial(seconds_of, way) for name, way in ways.items()}, options.rounds)
                here, plain = (statistics.median(times[name]) for name in ways)
                found["queries"][str(count)] = {"here_seconds": here, "plain_seconds": plain, "ratio": plain / here}
                print(
                    f"  {count:>5} queries: {1e3 * here:9.1f} ms, plain {1e3 * plain:9.1f} ms, {plain / here:.2f} times as long"
                )
    write_json(options.json, found)


def _load(rank: int, path: Path) -> tuple[float, float]:
    """Return the seconds that a gallery takes to load, and the bytes."""
    before = peak_bytes(CPU)
    with Gallery(path) as gallery:
        seconds = seconds_of(gallery.searcher)
    return seconds, peak_bytes(CPU) - before


def _plain(rows: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Return the cosines (q, _FOUND) of the most similar people, best first, by float32 products with all rows."""
    step = _IMAGES << 13  # rows at once
    parts = [(queries @ rows[at : at + step].T).reshape(len(queries), -1, _IMAGES).max(2) for at in range(0, len(rows), step)]
    return -np.sort(-np.partition(np.concatenate(parts, axis=1), -_FOUND, axis=1)[:, -_FOUND:], axis=1)


if __name__ == "__main__":
    raise SystemExit(main())
