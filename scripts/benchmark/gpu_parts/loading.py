"""The loader beside a main thread that launches work, with more and more decoder threads."""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/gpu_parts/loading.py is no program; python -m scripts lists them")

import statistics
import time
from collections.abc import Iterator

import cv2
import torch

from data.loader import Loader
from data.record_dataset import RecordDataset
from data.sampler import SampleOrder
from scripts.benchmark.data import make_faces
from scripts.benchmark.device_rates import synchronise

from .measuring import Context, Row

_LAUNCHES = 300


def measure(context: Context) -> Iterator[Row]:
    """Yield the launches per second of the main thread alone, then a row per number of decoder threads."""
    cv2.setNumThreads(0)
    device, seconds = context.device, 0.5 if context.quick else 4.0
    images, batch = (32, 32) if context.quick else (4096, 512)
    make_faces(context.folder / "faces", images)
    dataset = RecordDataset(context.folder / "faces")
    order = SampleOrder(images, batch, 0, True)
    small = torch.zeros(64, device=device)
    alone = statistics.median(_launches_per_second(small) for _ in range(200))
    yield {"threads": 0, "launches_per_second": alone}
    for threads in (1, 2) if context.quick else (1, 2, 4, 8, 12, 16):
        loader = Loader(dataset, order.samples, 0, 1 << 30, threads, 4, device)
        batches = iter(loader)
        try:
            for _ in range(5):
                next(batches)
            waited, begun, launches = loader.waited, time.perf_counter(), []
            while time.perf_counter() < begun + seconds:
                next(batches)
                launches.append(_launches_per_second(small))
            elapsed = time.perf_counter() - begun
            waited = loader.waited - waited
        finally:
            batches.close()
        rate = statistics.median(launches)
        yield {
            **{"threads": threads, "images_per_second": len(launches) * batch / elapsed, "waited_share": waited / elapsed},
            **{"launches_per_second": rate, "launches_of_alone": rate / alone},
        }


def _launches_per_second(small: torch.Tensor) -> float:
    """Launch some hundred kernels, as a step of a network does; return the host's rate."""
    begun = time.perf_counter()
    for _ in range(_LAUNCHES):
        small.add_(1.0)
    rate = _LAUNCHES / (time.perf_counter() - begun)
    synchronise(small.device)
    return rate
