"""Open a set in one of several ways and print seconds and MiB: one line of scripts.benchmark.data, in a separate process.

python -m scripts.benchmark.open_set dict|index|first|cached SET CACHE

SET: a folder with train.rec and train.idx.

Example: python -m scripts.benchmark.open_set index datasets/demo cache
"""

import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from data.record_dataset import RecordDataset
from data.recordio.index import read_index
from utils.cli import make_parser
from utils.program import run_main

from .baselines.data import index_as_dict


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, open, and print; return the exit status."""
    parser = make_parser("python -m scripts.benchmark.open_set", __doc__)
    parser.add_argument("way", choices=("dict", "index", "first", "cached"), help="way to open the set")
    parser.add_argument("set", type=Path, help="folder with train.rec and train.idx")
    parser.add_argument("cache", type=Path, help="folder for the parsed index")
    options = parser.parse_args(arguments)
    return run_main(lambda: measure(options.way, options.set, options.cache))


def measure(way: str, folder: Path, cache: Path) -> None:
    """Print {"seconds", "mib"}: the time, and the growth of the peak of the resident memory."""
    index = folder / "train.idx"
    ways: dict[str, Callable[[], object]] = {
        "dict": lambda: index_as_dict(index),
        "index": lambda: read_index(index),
        "first": lambda: RecordDataset(folder, cache),
        "cached": lambda: RecordDataset(folder, cache),
    }
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, so that imports do not count
    before, begun = _peak_mib(), time.perf_counter()
    opened = ways[way]()
    seconds = time.perf_counter() - begun
    print(json.dumps({"seconds": seconds, "mib": _peak_mib() - before}))
    del opened


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return float(status.split("VmHWM:")[1].split()[0]) / 1024


if __name__ == "__main__":
    raise SystemExit(main())
