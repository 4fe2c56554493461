"""Embeds parts in this process, or in several, each with the network in memory and one thread for arithmetic."""

import argparse
import contextlib
import copy
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any

import torch

from utils.distributed import choose_device

from ..faces.detector import Detector, open_detector
from .embedder import Embedder, open_embedder
from .parts import Part, Parts, Plan, embed_part

_KEPT = "what is done is kept: start the same command again to go on"


def default_processes(device: str) -> int:
    """Return the number of GPUs that are used, or of cores without a GPU."""
    if choose_device(device, 0).type == "cuda":
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as each of several processes does, so that one process computes the same numbers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def open_network(options: argparse.Namespace, local_rank: int = 0) -> Embedder:
    """Return the network of the command line, for `one_thread`: --threads are for decoding here."""
    own = copy.copy(options)
    own.threads = 1
    return open_embedder(own, local_rank)


def embed_parts(
    options: argparse.Namespace,
    plan: Plan,
    parts: Parts,
    embedder: Embedder,
    detector: Detector | None,
    count: int,
    advance: Callable[[int], object],
) -> None:
    """Embed and store the parts that are missing.

    Args:
        embedder, detector: those of this process, which embeds if it is the only one.
        count: of processes.
        advance: called with the number of pictures that are done since the last call.

    Raises:
        ValueError: the network fails, or a process ends.
    """
    names = {number: plan.names_of(number) for number in parts.missing()}
    here = ((number, embed_part(options, embedder, detector, part)) for number, part in names.items())
    try:
        with contextlib.closing(here if count == 1 else _in_processes(options, names, count)) as made:
            for number, part in made:
                parts.add(number, part)
                advance(len(names[number]))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_KEPT) from None
    except (RuntimeError, MemoryError) as error:
        raise in_words(error) from None


def _in_processes(
    options: argparse.Namespace, names: dict[int, list[str]], count: int
) -> Generator[tuple[int, Part], None, None]:
    """Yield the parts as they are done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once, not by each process
    ranks = context.Value("i", 0)
    with ProcessPoolExecutor(count, context, _open, (options, ranks)) as pool, _children_killed_on_error():
        futures = {pool.submit(_embed, part): number for number, part in names.items()}
        for future in as_completed(futures):
            try:
                yield futures.pop(future), future.result()
            except BrokenProcessPool:
                raise ValueError(
                    f"one of the processes ended; {_KEPT}. If the machine has too little memory, give fewer --processes"
                ) from None


@contextlib.contextmanager
def _children_killed_on_error() -> Iterator[None]:
    try:
        yield
    except BaseException:
        for child in multiprocessing.active_children():
            child.kill()
        raise


_options: argparse.Namespace
_network: tuple[Embedder, Detector | None]  # of a process of the pool


def _open(options: argparse.Namespace, ranks: Any) -> None:
    """Begin a process of the pool: Ctrl-C is for its parent, with which it ends."""
    global _options, _network
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with ranks.get_lock():
        rank, ranks.value = ranks.value, ranks.value + 1
    _options = options
    _network = open_network(options, rank % max(1, torch.cuda.device_count())), open_detector(options)


def _embed(names: list[str]) -> Part:
    return embed_part(_options, *_network, names)


def in_words(error: RuntimeError | MemoryError) -> ValueError:
    """Return an error of the arithmetic in one line; torch raises RuntimeError if the memory of the machine or GPU is full."""
    # torch's words on Linux, and elsewhere
    full = "can't allocate memory" in str(error) or "not enough memory" in str(error)
    if full or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return ValueError(f"the memory is full; {_KEPT}, with fewer --processes, or on a GPU a smaller --batch-size")
    what = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ValueError(f"embedding fails: {what:.300}; {_KEPT}")


def _end_with_parent() -> None:
    """End this process with its parent, before another run begins in the same folder."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
