"""Decodes batches ahead in threads, directly into reused uint8 buffers.

The decoders release Python's lock, so threads scale like worker processes, but without copies between processes, and without
growing memory. Between two images they need it, as does each launch of a kernel: a main thread that launches a thousand in a
step waits for the decoders as often. So they may have a process of their own, one for all threads, which shares the buffers.
An error in a thread is raised in the training loop when it requests that batch.
Shapes: n = images of this rank in one optimizer step, H = W = image_size.
"""

import contextlib
import errno
import functools
import gc
import json
import mmap
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn

import cv2
import numpy as np
import torch
from torch import Tensor

from utils.allocator import lock_for, with_huge_pages
from utils.distributed import World, all_gather_objects
from utils.files import write_file
from utils.image import IMAGE_SIZE

from .augment import Augment
from .base import FaceDataset
from .landmarks import mirrored_landmarks
from .sampler import Samples


class LoadedBatch(NamedTuple):
    """One rank's images of one optimizer step, on the device."""

    images: Tensor  # (n, H, W, 3) uint8 RGB
    labels: Tensor  # (n,) int64, on the CPU, where the head plans its step
    mirrored: Tensor  # (n,) bool
    indices: Tensor  # (n,) int64, of the images in the set, on the CPU
    landmarks: Tensor | None = None  # (n, 5, 2) float32, of the mirrored images, where the set has some: data/landmarks.py


class _Buffer:
    """Memory for one batch, pinned for CUDA; the event `copied` is set once the device has read it."""

    def __init__(self, number: int, size: int, image_size: int, pinned: bool) -> None:
        shape = (size, image_size, image_size, 3)
        self.number = number  # by which another process names it; -1 = this process has it alone
        if number >= 0:  # not in /dev/shm, which is small in containers
            memory = mmap.mmap(-1, size * (image_size * image_size * 3 + 8))
            self.images = torch.frombuffer(memory, dtype=torch.uint8)[: -8 * size].view(shape)
            self.labels = np.frombuffer(memory, dtype=np.int64)[-size:]
        else:
            # an image spans ten small pages; huge pages save the TLB misses, 4 % of the decoding time
            usual = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
            self.images = usual if pinned else with_huge_pages(usual)
            self.labels = np.empty(size, dtype=np.int64)
        self.pixels = self.images.numpy()
        self.copied: torch.cuda.Event | None = None


class _Job(NamedTuple):
    """A batch that is being decoded."""

    samples: Samples
    buffer: _Buffer
    parts: list[Future[None]]


@dataclass(eq=False)
class Loader:
    """Iterate over the batches of steps [first_step, last_step), decoding `prefetch` batches ahead.

    On CUDA a batch is copied to the device on a separate stream while the previous step computes.
    """

    dataset: FaceDataset  # decodes sample i into a pixel array and returns its label; its ValueErrors name the record
    samples_of_step: Callable[[int], Samples]  # returns this rank's samples of an optimizer step, the same number for each step
    first_step: int
    last_step: int
    threads: int  # that decode
    prefetch: int
    device: torch.device  # where images go
    # what storage should fetch when a step is prepared, see SampleOrder.read_ahead
    read_ahead: Callable[[int], np.ndarray] | None = None
    augment: Augment | None = None  # changes the decoded pixels; None = none
    held: int = 1  # batches that the consumer uses at a time; a batch is valid until so many further ones have been asked for
    image_size: int = IMAGE_SIZE  # height and width of the images in pixels
    apart: bool = False  # decode in a process of its own; Linux only

    def __iter__(self) -> Generator[LoadedBatch, None, None]:
        is_cuda = self.device.type == "cuda"
        decoders = _Apart(self) if self.apart else _Decoders(self, self.device)
        free: deque[_Buffer] = deque(decoders.buffers)
        pending: deque[_Job] = deque()
        in_use: deque[_Buffer] = deque()
        upcoming = iter(range(self.first_step, self.last_step))
        ship = _Shipping(self.device, self.dataset.landmarks, self.augment)

        def submit() -> None:
            step = next(upcoming, None)
            if step is None:
                return
            samples = self.samples_of_step(step)
            buffer = free.popleft() if free or self.apart else _Buffer(-1, len(samples.indices), self.image_size, is_cuda)
            pending.append(_Job(samples, buffer, decoders.start(step, samples, buffer)))

        try:
            for _ in range(self.prefetch):
                submit()
            shipped: tuple[_Job, LoadedBatch] | None = None
            while pending or shipped:
                job, batch = shipped or ship.start(pending.popleft())
                # if the next batch is decoded already, copy it while the consumer works on this one
                decoded = pending and all(part.done() for part in pending[0].parts)
                shipped = ship.start(pending.popleft()) if decoded and is_cuda else None
                yield ship.arrive(job, batch)
                in_use.append(job.buffer)
                if len(in_use) >= self.held:  # the consumer is done with the oldest: only now may its memory be filled again
                    free.append(in_use.popleft())
                submit()
        finally:
            decoders.close()


class _Decoders:
    """The threads that decode a loader's batches and wait for copies to `device`, the CPU in a process that has only them."""

    buffers: Sequence[_Buffer] = ()  # made beforehand

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self.loader = loader
        # a thread may wait for the device, and each thread has a device of its own
        set_device = functools.partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(loader.threads, thread_name_prefix="decoder", initializer=set_device)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._ahead: deque[Future[None]] = deque()

    def start(self, step: int, samples: Samples, buffer: _Buffer) -> list[Future[None]]:
        """Begin to decode a batch into a buffer; return what ends when it is decoded."""
        loader = self.loader
        while self._ahead and self._ahead[0].done():
            self._ahead.popleft().result()
        if loader.read_ahead is not None and len(indices := loader.read_ahead(step)):
            self._ahead.append(self._reader.submit(loader.dataset.read_ahead, indices))
        for index in samples.indices.tolist():  # storage begins to fetch the whole batch before the first record is decoded
            loader.dataset.prefetch(index)
        parts = np.array_split(np.arange(len(samples.indices)), loader.threads)
        return [self._pool.submit(self._decode, samples, buffer, part) for part in parts if len(part)]

    def _decode(self, samples: Samples, buffer: _Buffer, rows: np.ndarray) -> None:
        if buffer.copied is not None:
            buffer.copied.synchronize()
        dataset, augment = self.loader.dataset, self.loader.augment
        numbers = augment.draw(samples.positions[rows]) if augment else None
        for place, row in enumerate(rows.tolist()):
            buffer.labels[row] = dataset.decode_into(int(samples.indices[row]), buffer.pixels[row])
            if augment and numbers is not None:
                augment.apply(buffer.pixels[row], numbers[place])

    def close(self) -> None:
        """Wait for the images that are being decoded."""
        for executor in (self._pool, self._reader):
            executor.shutdown(wait=True, cancel_futures=True)


class _Apart:
    """The same threads in a process of their own: a fork of this one, which shares the buffers and never touches the GPU."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        size = len(loader.samples_of_step(loader.first_step).indices)
        self.buffers = [_Buffer(number, size, loader.image_size, False) for number in range(loader.prefetch + loader.held - 1)]
        cv2.setNumThreads(1)  # the fork would wait for threads of OpenCV, which it does not have
        self._pipe, theirs = Pipe()
        # until the fork ignores them, a signal would take the way to this process's handlers there
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
        try:
            self._fork = os.fork()
            if not self._fork:
                _serve(loader, self.buffers, self._pipe, theirs)
        except OSError as error:
            raise ValueError(f"data.decoders=process: {error.strerror}; data.decoders=threads needs no process") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._receiver = ThreadPoolExecutor(1, thread_name_prefix="decoder")
        device = loader.device  # whose copies are only slower of what cannot be locked
        self._locked = [one for one in self.buffers if device.type == "cuda" and not lock_for(device, one.images)]

    def start(self, step: int, samples: Samples, buffer: _Buffer) -> list[Future[None]]:
        """Begin to decode a batch into a buffer; return what ends when it is decoded."""
        if buffer.copied is not None:
            buffer.copied.synchronize()
        with contextlib.suppress(OSError):  # it is gone, as _receive will say
            self._pipe.send((step, samples, buffer.number))
        return [self._receiver.submit(self._receive)]

    def _receive(self) -> None:
        try:
            error, warnings = self._pipe.recv()
        except (EOFError, OSError):  # unlike a ValueError, one after which a run is started again
            why = "the process that decodes images is gone, perhaps killed for want of memory; threads need no process"
            raise ChildProcessError(errno.ECHILD, why, "data.decoders=process") from None
        self.loader.dataset.hear(warnings)
        if error is not None:
            raise error

    def close(self) -> None:
        """End the process."""
        os.kill(self._fork, signal.SIGKILL)
        self._receiver.shutdown(wait=True, cancel_futures=True)
        os.waitpid(self._fork, 0)
        self._pipe.close()
        for buffer in self._locked:
            with contextlib.suppress(RuntimeError):  # of a device that failed before
                if buffer.copied is not None:
                    buffer.copied.synchronize()
                torch.cuda.cudart().cudaHostUnregister(buffer.images.data_ptr())


# the parent decides when it is over
_IGNORED = {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}


def _serve(loader: Loader, buffers: list[_Buffer], parent: Connection, pipe: Connection) -> NoReturn:
    """Decode the batches that the parent asks for, in its fork, until the parent closes the pipe or is gone."""
    try:
        gc.freeze()  # what the parent had is not taken apart here
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
        parent.close()
        decoders, begins, replies = _Decoders(loader, torch.device("cpu")), ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        while True:
            step, samples, number = pipe.recv()
            begun = begins.submit(decoders.start, step, samples, buffers[number])
            replies.submit(_reply, begun, loader.dataset, pipe)
    finally:
        os._exit(0)


def _reply(begun: Future[list[Future[None]]], dataset: FaceDataset, pipe: Connection) -> None:
    """Tell the parent that a batch is decoded, or why it is not."""
    error: BaseException | None = None
    warnings: list[str] = []
    try:
        for part in begun.result():
            part.result()
        warnings = dataset.take_warnings()
    except BaseException as raised:
        error = raised
    try:
        pipe.send((error, warnings))
    except OSError:  # the parent is gone
        os._exit(0)
    except Exception:  # the error cannot be sent
        pipe.send(((ValueError if isinstance(error, ValueError) else RuntimeError)(f"{type(error).__name__}: {error}"), []))


class _Shipping:
    """Copies batches to the device, on CUDA with a separate stream."""

    def __init__(self, device: torch.device, table: np.ndarray | None, augment: Augment | None) -> None:
        self.device, self.table, self.augment = device, table, augment
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, job: _Job) -> tuple[_Job, LoadedBatch]:
        """Wait until the batch is decoded, then start its copy to the device. Errors of decoder threads are raised here."""
        for part in job.parts:
            part.result()
        labels, mirrored = torch.from_numpy(job.buffer.labels.copy()), torch.from_numpy(job.samples.mirrored)
        indices, points = torch.from_numpy(job.samples.indices), None
        if self.table is not None:
            given = self.table[job.samples.indices]
            moved = self.augment.move(given, job.samples.positions) if self.augment else given
            points = torch.from_numpy(mirrored_landmarks(moved, job.samples.mirrored))
        if self.stream is None:
            return job, LoadedBatch(job.buffer.images, labels, mirrored, indices, points)
        with torch.cuda.stream(self.stream):
            images = job.buffer.images.to(self.device, non_blocking=True)
            mirrored = mirrored.pin_memory().to(self.device, non_blocking=True)
            points = None if points is None else points.pin_memory().to(self.device, non_blocking=True)
            job.buffer.copied = torch.cuda.Event()
            job.buffer.copied.record(self.stream)
        return job, LoadedBatch(images, labels, mirrored, indices, points)

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
            if batch.landmarks is not None:
                batch.landmarks.record_stream(current)
        return batch


def write_bad_batch(
    path: Path, step: int, why: str, dataset: FaceDataset, samples: Samples, embeddings: Sequence[Tensor], world: World
) -> str:
    """Write the record keys of a global batch to the JSON file `path`; collective.

    Args:
        samples: this rank's samples of the step.
        embeddings: of each of its micro-batches, (b, D).

    Returns:
        A sentence that says where the keys are and which embeddings are bad. Only rank 0 writes, and knows whether that failed.
    """
    finite = torch.cat([rows.detach().float().isfinite().all(dim=1) for rows in embeddings]).tolist()
    mine = [
        {"rank": world.rank, "record": dataset.key(index), "label": dataset.label(index), "embedding_finite": good}
        for index, good in zip(samples.indices.tolist(), finite, strict=True)
    ]
    everyone = [entry for entries in all_gather_objects(mine, world) for entry in entries]
    bad = [entry["record"] for entry in everyone if not entry["embedding_finite"]]
    where = f"are in {path}"
    if world.rank == 0:
        try:
            write_file(path, json.dumps({"step": step, "why": why, "samples": everyone}, indent=1))
        except OSError as error:  # a full disk must not hide the original error
            where = f"could not be written to {path} ({error.strerror})"
    some = "its embeddings are finite"
    if bad:
        some = f"{len(bad)} of its {len(everyone)} embeddings are not finite, the first is that of {bad[0]}"
    return f"The records of its batch {where}: {some}"
