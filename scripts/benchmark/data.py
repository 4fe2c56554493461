"""Measure time and memory of the data pipeline against plain ones: face bench data

index     opening a set of 42 million records: a dict of the parsed lines (mxnet's way) against ours, each in its own process
decode    a bare loop over JPEGs in memory; the loader with one and two threads; a DataLoader with two worker processes that
          returns float tensors (arcface_torch's way); Pillow and other decoders. Synthetic faces, 112 x 112, as in the demo
memory    resident memory over an epoch of a million records
augment   the time of each augmentation

The rounds of the variants alternate and medians are reported, because the machine may be shared. ratio = plain / ours unless
stated otherwise.

Example: face bench data --quick --parts decode
"""

import argparse
import gc
import os
import statistics
import tempfile
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from configs import load_config
from data.augment import OPERATIONS
from data.loader import Loader
from data.record_dataset import RecordDataset
from data.recordio.image_record import RecordSetWriter
from data.recordio.index import read_index
from data.sampler import SampleOrder
from scripts.data.show_augmentation import changed
from scripts.demo.make_data import DrawnPicture, draw_all
from utils.cli import int_in_range, make_parser, progress
from utils.image import IMAGE_SIZE
from utils.parallel import torch_threads
from utils.program import run_main

from .kit import CPU, add_common_arguments, machine, peak_bytes, run_ranks, seconds_of, take_turns, write_json
from .plain_data import decoders, index_as_dict, plain_loader

_BATCH = 256


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face bench data", __doc__)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="default: all")
    count = int_in_range(1)
    parser.add_argument("--records", type=count, default=42_000_000, help="records of the index (default 42 million)")
    parser.add_argument("--images", type=count, default=4096, help="drawn faces to decode")
    parser.add_argument("--epoch", type=count, default=1_000_000, help="records of the epoch of `memory` (default a million)")
    parser.add_argument("--folder", type=Path, help="folder for the sets, 3 GB, removed at the end (default: temporary)")
    add_common_arguments(parser, device=False, rounds=5)
    return run_main(benchmark, parser.parse_args(arguments))


def benchmark(options: argparse.Namespace) -> None:
    """Measure the chosen parts, print a table of each, and write the JSON."""
    if options.quick:
        options.records, options.images, options.epoch, options.rounds = 1_000_000, 512, 40_000, 3
    cv2.setNumThreads(0)
    results: dict[str, Any] = {"machine": machine("cpu"), "opencv": cv2.__version__}
    print(f"{results['machine']}, OpenCV {results['opencv']}")
    with tempfile.TemporaryDirectory(prefix="benchmark_data_", dir=options.folder) as folder:
        for name in options.parts:
            results[name] = PARTS[name](options, Path(folder))
            write_json(options.json, results)


def measure_index(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Open a set of many records in each way, each in a separate process."""
    make_large_set(folder / "large", options.records)
    cases = {
        "dict": "dict of the parsed lines",
        "index": "ours: the index alone",
        "first": "ours: first opening, all headers checked, cache written",
        "cached": "ours: opening again",
    }
    rows = []
    for case, name in cases.items():
        rows.append({"way": name, **run_ranks(open_set, 1, case, folder / "large", folder / "cache")[0]})
    print(f"\n{f'opening {options.records} records':<60}{'seconds':>9}{'MiB':>10}{'time x':>9}{'memory x':>9}")
    for row in rows:
        row["time_ratio"] = rows[0]["seconds"] / row["seconds"]
        row["memory_ratio"] = rows[0]["mib"] / max(row["mib"], 0.1)
        print(f"  {row['way']:<58}{row['seconds']:9.3f}{row['mib']:10.1f}{row['time_ratio']:9.1f}{row['memory_ratio']:9.1f}")
    return rows


def open_set(rank: int, way: str, folder: Path, cache: Path) -> dict[str, float]:
    """Return {"seconds", "mib"}: the time, and the growth of the peak of the resident memory."""
    index = folder / "train.idx"
    ways: dict[str, Callable[[], object]] = {
        "dict": lambda: index_as_dict(index),
        "index": lambda: read_index(index),
        "first": lambda: RecordDataset(folder, cache),
        "cached": lambda: RecordDataset(folder, cache),
    }
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, so that imports do not count
    before, opened = peak_bytes(CPU), []
    seconds = seconds_of(lambda: opened.append(ways[way]()))
    return {"seconds": seconds, "mib": (peak_bytes(CPU) - before) / 2**20}


def make_large_set(folder: Path, num_records: int) -> None:
    """Write records of 40 bytes (a header and 8 bytes instead of an image), 20 per class, in headerless form."""
    folder.mkdir()
    names = ["magic", "length", "flag", "label", "id", "id2", "image"]
    block = np.zeros(1 << 18, np.dtype({"names": names, "formats": ["<u4", "<u4", "<u4", "<f4", "<u8", "<u8", "<u8"]}))
    block["magic"], block["length"], block["image"] = 0xCED7230A, 32, 1
    with open(folder / "train.rec", "wb") as rec, open(folder / "train.idx", "w") as idx:
        for begin in progress(range(0, num_records, len(block)), None, "making the index", "block"):
            keys = np.arange(begin, min(begin + len(block), num_records))
            part = block[: len(keys)]
            part["label"], part["id"] = keys // 20 % (1 << 24), keys
            part.tofile(rec)
            idx.write("".join([f"{key}\t{40 * key}\n" for key in keys.tolist()]))


def measure_decoding(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Compare the loader with a bare loop, a DataLoader and other decoders, in images per second."""
    make_faces(folder / "faces", options.images)
    dataset = RecordDataset(folder / "faces")
    images = [bytes(dataset.sample(index)[0]) for index in range(dataset.num_images)]
    ways: dict[str, Callable[[], float]]
    ways = {f"bare {name}": partial(_bare_rate, decode, images) for name, decode in decoders().items()}
    for threads in (1, 2):
        ways[f"loader, {threads} thread(s)"] = partial(_loader_rate, dataset, threads, 4 * len(images))
    batch = max(1, min(64, len(images) // 4))
    ways["DataLoader, 2 workers, float"] = partial(_plain_rate, folder / "faces" / "train.rec", batch)
    rates = take_turns(ways, options.rounds)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"\n{f'{len(images)} images, {sum(map(len, images)) / len(images):.0f} bytes each':<52}images/s")
    for name, rate in sorted(medians.items(), key=lambda item: -item[1]):
        print(f"  {name:<50}{rate:11.0f}")
    claims = [
        ("one thread, of the bare loop", _paired(rates, "loader, 1 thread(s)", "bare simplejpeg"), 0.9),
        ("two threads, of one", _paired(rates, "loader, 2 thread(s)", "loader, 1 thread(s)"), 1.7),
        ("two threads, of the DataLoader", _paired(rates, "loader, 2 thread(s)", "DataLoader, 2 workers, float"), 2.5),
        ("decoding per core, of Pillow's", _paired(rates, "bare simplejpeg", "bare pillow"), 2.0),
    ]
    for name, ratio, required in claims:
        print(f"  {name:<50}{ratio:11.2f}   (required {required})")
    rows: list[dict[str, Any]] = [{"way": name, "images_per_second": rate} for name, rate in medians.items()]
    return rows + [{"claim": name, "ratio": ratio, "required": required} for name, ratio, required in claims]


def _paired(rates: dict[str, list[float]], ours: str, plain: str) -> float:
    """Return the median over the rounds of ours / plain, measured one after the other."""
    return statistics.median(a / b for a, b in zip(rates[ours], rates[plain], strict=True))


def make_faces(folder: Path, count: int) -> None:
    """Draw up to 512 faces and write a set of `count` records with them in turn."""
    distinct = min(count, 512)
    images = list(draw_all([DrawnPicture(1, "train", i // 8, i % 8) for i in range(distinct)], distinct, 0))
    with RecordSetWriter(folder, header=False) as writer:
        for index in range(count):
            writer.add(index % 16, images[index % distinct])


def _bare_rate(decode: Callable[[bytes], np.ndarray], images: list[bytes]) -> float:
    return len(images) / seconds_of(lambda: deque(map(decode, images), maxlen=0))


def _loader_rate(dataset: RecordDataset, threads: int, count: int) -> float:
    """Return images per second of the loader over at least `count` images, from its start."""
    batch = min(_BATCH, dataset.num_images)
    order = SampleOrder(dataset.num_images, batch, 0, True)
    steps = -(-count // batch)
    loader = Loader(dataset, order.samples, 0, steps, threads, 4, CPU)
    return steps * batch / seconds_of(lambda: deque(loader, maxlen=0))


def _plain_rate(rec_path: Path, batch: int) -> float:
    """Return images per second of the DataLoader from its first batch on, so that starting the processes does not count."""
    loader = iter(plain_loader(rec_path, batch, 2))
    next(loader)
    counts: list[int] = []
    seconds = seconds_of(lambda: counts.extend(len(labels) for _, labels in loader))
    return sum(counts) / seconds


def measure_memory(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Watch the resident memory over an epoch of many small records."""
    flat = [cv2.imencode(".jpg", np.full((112, 112, 3), value, np.uint8))[1].tobytes() for value in range(0, 256, 8)]
    with RecordSetWriter(folder / "million", header=False) as writer:
        for index in progress(range(options.epoch), None, "making the set", "record"):
            writer.add(index % 1000, flat[index % len(flat)])
    dataset = RecordDataset(folder / "million", folder / "cache")
    order = SampleOrder(dataset.num_images, _BATCH, 0, True)
    steps = dataset.num_images // _BATCH
    seen: list[float] = []
    loader = Loader(dataset, order.samples, 0, steps, 2, 4, CPU)
    for step, _ in enumerate(progress(loader, steps, "an epoch", "batch")):
        if step % max(1, steps // 100) == 0:
            seen.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
    warm = seen[len(seen) // 20 :]
    growth = warm[-1] - warm[0]
    size = (folder / "million" / "train.rec").stat().st_size / 2**20
    print(
        f"\nan epoch of {dataset.num_images} records ({size:.0f} MiB): resident memory {warm[0]:.1f} MiB, "
        f"at its end {growth:+.1f} MiB"
    )
    return {"records": dataset.num_images, "mib_at_start": warm[0], "mib_growth": growth, "trace_mib": seen}


def measure_augmentation(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return microseconds per image for decoding, each operation, and AdaFace's shares of them."""
    if not (folder / "faces").exists():
        make_faces(folder / "faces", options.images)
    section = dict(load_config(Path(__file__).parents[2] / "configs" / "base.yaml").augment)  # whose operations are off
    dataset = RecordDataset(folder / "faces")
    count = min(128, dataset.num_images)
    pixels = np.empty((count, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    for index in range(count):
        dataset.decode_into(index, pixels[index])
    adaface = {**section, "crop": 0.2, "low_resolution": 0.2, "photometric": 0.2}
    ways: dict[str, Callable[[], object]] = {
        "decoding": lambda: [dataset.decode_into(index, pixels[index]) for index in range(count)],
        "AdaFace's three, a fifth each": partial(changed, pixels, adaface, 0, 0),
        **{name: partial(changed, pixels, {**section, name: 1.0}, 0, 0) for name in OPERATIONS},
    }
    with torch_threads(1):  # OpenCV has one already
        seconds = take_turns({name: partial(seconds_of, way) for name, way in ways.items()}, options.rounds)
    print(f"\n{'augmentation, one core':<52}us / image")
    found = {name: 1e6 * statistics.median(values) / count for name, values in seconds.items()}
    for name, value in found.items():
        print(f"  {name:<50}{value:11.1f}")
    return [{"way": name, "microseconds": value} for name, value in found.items()]


PARTS: dict[str, Callable[[argparse.Namespace, Path], Any]] = {
    "index": measure_index,
    "decode": measure_decoding,
    "memory": measure_memory,
    "augment": measure_augmentation,
}


if __name__ == "__main__":
    raise SystemExit(main())
