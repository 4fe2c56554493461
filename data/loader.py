"""Decodes batches ahead in threads of this process, directly into reused uint8 buffers.

OpenCV releases the GIL while it decodes, so threads scale like worker processes, but without copies between processes, without
fork, and without growing memory. An error in a thread is raised in the training loop when it requests that batch.
Shapes: n = images of this rank in one optimizer step, H = W = image_size.
"""

import functools
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from utils.allocator import with_huge_pages
from utils.image import IMAGE_SIZE

from .augment import Augment
from .sampler import Samples


class Decodes(Protocol):
    """The methods of a dataset that the loader uses."""

    def prefetch(self, index: int) -> None: ...
    def read_ahead(self, indices: np.ndarray) -> None: ...
    def decode_into(self, index: int, out: np.ndarray) -> int: ...


class LoadedBatch(NamedTuple):
    """One rank's images of one optimizer step, on the device."""

    images: Tensor  # (n, H, W, 3) uint8 RGB
    labels: Tensor  # (n,) int64, on the CPU, where the head plans its step
    mirrored: Tensor  # (n,) bool
    indices: Tensor  # (n,) int64, of the images in the set, on the CPU


class _Buffer:
    """Memory for one batch, pinned for CUDA; the event `copied` is set once the device has read it."""

    def __init__(self, size: int, image_size: int, pinned: bool) -> None:
        shape = (size, image_size, image_size, 3)
        if pinned:
            self.images = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        else:  # an image spans ten small pages; huge pages save the TLB misses, 4 % of the decoding time
            self.images = with_huge_pages(torch.empty(shape, dtype=torch.uint8))
        self.pixels = self.images.numpy()
        self.labels = np.empty(size, dtype=np.int64)
        self.copied: torch.cuda.Event | None = None


class _Job(NamedTuple):
    """A batch that is being decoded."""

    samples: Samples
    buffer: _Buffer
    parts: list[Future[None]]


class Loader:
    """Iterate over the batches of steps [first_step, last_step), decoding `prefetch` batches ahead.

    On CUDA a batch is copied to the device on a separate stream while the previous step computes.

    Args:
        dataset: decodes sample i into a pixel array and returns its label; its ValueErrors name the record.
        samples_of_step: returns this rank's samples of an optimizer step, the same number for each step.
        threads: decoder threads.
        device: where images go.
        read_ahead: what storage should fetch when a step is prepared, see SampleOrder.read_ahead.
        augment: changes the decoded pixels; None = none.
        held: batches that the consumer uses at a time; a batch is valid until so many further ones have been asked for.
        image_size: height and width of the images in pixels.
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
        read_ahead: Callable[[int], np.ndarray] | None = None,
        augment: Augment | None = None,
        held: int = 1,
        image_size: int = IMAGE_SIZE,
    ) -> None:
        self.dataset, self.samples_of_step, self.read_ahead = dataset, samples_of_step, read_ahead
        self.first_step, self.last_step = first_step, last_step
        self.threads, self.prefetch, self.device, self.augment, self.held = threads, prefetch, device, augment, held
        self.image_size = image_size

    def __iter__(self) -> Generator[LoadedBatch, None, None]:
        # a decoder thread may wait for the device, and each thread has a device of its own
        set_device = functools.partial(torch.cuda.set_device, self.device) if self.device.type == "cuda" else None
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="decoder", initializer=set_device)
        reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        ahead: deque[Future[None]] = deque()
        free: deque[_Buffer] = deque()
        pending: deque[_Job] = deque()
        in_use: deque[_Buffer] = deque()
        upcoming = iter(range(self.first_step, self.last_step))
        ship = _Shipping(self.device)

        def submit() -> None:
            step = next(upcoming, None)
            if step is None:
                return
            while ahead and ahead[0].done():
                ahead.popleft().result()
            if self.read_ahead is not None and len(indices := self.read_ahead(step)):
                ahead.append(reader.submit(self.dataset.read_ahead, indices))
            samples = self.samples_of_step(step)
            buffer = free.popleft() if free else _Buffer(len(samples.indices), self.image_size, self.device.type == "cuda")
            for index in samples.indices.tolist():  # storage begins to fetch the whole batch before the first record is decoded
                self.dataset.prefetch(index)
            parts = np.array_split(np.arange(len(samples.indices)), self.threads)
            jobs = [pool.submit(self._decode, samples, buffer, part) for part in parts if len(part)]
            pending.append(_Job(samples, buffer, jobs))

        try:
            for _ in range(self.prefetch):
                submit()
            shipped: tuple[_Job, LoadedBatch] | None = None
            while pending or shipped:
                job, batch = shipped or ship.start(pending.popleft())
                # if the next batch is decoded already, copy it while the consumer works on this one
                decoded = pending and all(part.done() for part in pending[0].parts)
                shipped = ship.start(pending.popleft()) if decoded and self.device.type == "cuda" else None
                yield ship.arrive(job, batch)
                in_use.append(job.buffer)
                if len(in_use) >= self.held:  # the consumer is done with the oldest: only now may its memory be filled again
                    free.append(in_use.popleft())
                submit()
        finally:
            for executor in (pool, reader):
                executor.shutdown(wait=True, cancel_futures=True)

    def _decode(self, samples: Samples, buffer: _Buffer, rows: np.ndarray) -> None:
        if buffer.copied is not None:
            buffer.copied.synchronize()
        numbers = self.augment.draw(samples.positions[rows]) if self.augment else None
        for place, row in enumerate(rows.tolist()):
            buffer.labels[row] = self.dataset.decode_into(int(samples.indices[row]), buffer.pixels[row])
            if self.augment and numbers is not None:
                self.augment.apply(buffer.pixels[row], numbers[place])


class _Shipping:
    """Copies batches to the device, on CUDA with a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, job: _Job) -> tuple[_Job, LoadedBatch]:
        """Wait until the batch is decoded, then start its copy to the device. Errors of decoder threads are raised here."""
        for part in job.parts:
            part.result()
        labels, mirrored = torch.from_numpy(job.buffer.labels.copy()), torch.from_numpy(job.samples.mirrored)
        indices = torch.from_numpy(job.samples.indices)
        if self.stream is None:
            return job, LoadedBatch(job.buffer.images, labels, mirrored, indices)
        with torch.cuda.stream(self.stream):
            images = job.buffer.images.to(self.device, non_blocking=True)
            mirrored = mirrored.pin_memory().to(self.device, non_blocking=True)
            job.buffer.copied = torch.cuda.Event()
            job.buffer.copied.record(self.stream)
        return job, LoadedBatch(images, labels, mirrored, indices)

    def arrive(self, job: _Job, batch: LoadedBatch) -> LoadedBatch:
        """Return the batch for use on the current stream, which waits for the copy.

        The memory belongs to the copy stream. Without record_stream the allocator could reuse it for the next copy while the
        current stream still reads it.
        """
        if self.stream is not None and job.buffer.copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(job.buffer.copied)
            batch.images.record_stream(current)
            batch.mirrored.record_stream(current)
        return batch
