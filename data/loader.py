"""Batches decoded ahead by threads of this process, straight into reused uint8 buffers.

OpenCV releases the GIL while it decodes, so threads scale as worker processes do, without copies between processes, without
fork, and without memory that climbs. An error in a thread reaches the training loop when it asks for that batch.
Shapes: n = images of this rank in one optimizer step, H = W = 112.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from utils.image import IMAGE_SIZE

from .sampler import Samples


class Decodes(Protocol):
    """What the loader needs of a dataset."""

    def prefetch(self, index: int) -> None: ...
    def decode_into(self, index: int, out: np.ndarray) -> int: ...


class Batch(NamedTuple):
    """One rank's images of one optimizer step, on the device."""

    images: Tensor  # (n, H, W, 3) uint8 RGB
    labels: Tensor  # (n,) int64, on the CPU: the head plans there
    mirrored: Tensor  # (n,) bool


class _Buffer:
    """Memory for one batch, pinned for CUDA; `copied` tells when the device has read it."""

    def __init__(self, size: int, pinned: bool) -> None:
        self.images = torch.empty(size, IMAGE_SIZE, IMAGE_SIZE, 3, dtype=torch.uint8, pin_memory=pinned)
        self.pixels = self.images.numpy()
        self.labels = np.empty(size, dtype=np.int64)
        self.copied: torch.cuda.Event | None = None


class Loader:
    """Iterate over the batches of steps [first_step, last_step), decoding `prefetch` batches ahead.

    Args:
        dataset: decodes sample i into a pixel array and returns its label; ValueError names the record.
        samples_of_step: this rank's samples of an optimizer step, the same number in each.
        threads: decoder threads.
        device: where images go.
    """

    def __init__(
        self,
        dataset: Decodes,
        samples_of_step: Callable[[int], Samples],
        first_step: int,
        last_step: int,
        threads: int,
        prefetch: int,
        device: torch.device,
    ) -> None:
        self.dataset, self.samples_of_step = dataset, samples_of_step
        self.first_step, self.last_step = first_step, last_step
        self.threads, self.prefetch, self.device = threads, prefetch, device

    def __iter__(self) -> Iterator[Batch]:
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decoder")
        free: deque[_Buffer] = deque()
        pending: deque[tuple[Samples, _Buffer, list[Future[None]]]] = deque()
        upcoming = iter(range(self.first_step, self.last_step))

        def submit() -> None:
            step = next(upcoming, None)
            if step is None:
                return
            samples = self.samples_of_step(step)
            buffer = free.popleft() if free else _Buffer(len(samples.indices), self.device.type == "cuda")
            for index in samples.indices.tolist():  # the storage starts on the whole batch before the first record is decoded
                self.dataset.prefetch(index)
            parts = np.array_split(np.arange(len(samples.indices)), self.threads)
            futures = [pool.submit(self._decode, samples, buffer, part) for part in parts if len(part)]
            pending.append((samples, buffer, futures))

        try:
            for _ in range(self.prefetch):
                submit()
            while pending:
                samples, buffer, futures = pending.popleft()
                for future in futures:
                    future.result()
                yield self._ship(samples, buffer)
                # the consumer is done with this batch: only now may its memory be filled again
                free.append(buffer)
                submit()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _decode(self, samples: Samples, buffer: _Buffer, rows: np.ndarray) -> None:
        if buffer.copied is not None:
            buffer.copied.synchronize()
        for row in rows.tolist():
            buffer.labels[row] = self.dataset.decode_into(int(samples.indices[row]), buffer.pixels[row])

    def _ship(self, samples: Samples, buffer: _Buffer) -> Batch:
        labels = torch.from_numpy(buffer.labels.copy())
        images = buffer.images.to(self.device, non_blocking=True)
        mirrored = torch.from_numpy(samples.mirrored).to(self.device, non_blocking=True)
        if self.device.type == "cuda":
            buffer.copied = torch.cuda.Event()
            buffer.copied.record()
        return Batch(images, labels, mirrored)
