"""Embeds parts in this process, or in several, each with the network in memory and one thread for arithmetic."""

import argparse
import contextlib
import copy
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from utils.distributed import choose_device

from ..faces.detector import Detector, open_detector
from .embedder import Embedder, open_embedder
from .parts import Job, Plan, embed_part, write_part

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
    plan: Plan,
    embedder: Embedder,
    detector: Detector | None,
    missing: Sequence[int],
    count: int,
    advance: Callable[[int], object],
) -> None:
    """Embed and store parts.

    Args:
        embedder, detector: those of this process, which embeds if it is the only one.
        missing: numbers of the parts.
        count: of processes.
        advance: called with the number of pictures that are done since the last call.

    Raises:
        ValueError: the network fails, or a process ends.
    """
    try:
        if count == 1:
            for number in missing:
                write_part(plan.job, number, embed_part(plan.job, embedder, detector, plan.names_of(number), advance))
        else:
            _in_processes(plan, missing, count, advance)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_KEPT) from None
    except (RuntimeError, MemoryError) as error:
        raise in_words(error) from None


def _in_processes(plan: Plan, missing: Sequence[int], count: int, advance: Callable[[int], object]) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once, not by each process
    processes: dict[Connection, BaseProcess] = {}
    tasks = iter(missing)
    try:
        for rank in range(count):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=_work, args=(plan.job, rank, theirs), daemon=True)
            processes[ours] = process
            with _interrupts_blocked():  # which processes inherit: Ctrl-C is for this one, which ends the others
                process.start()
            theirs.close()
        busy = {connection for connection in processes if _give(connection, plan, tasks)}
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                message = _receive(connection, processes[connection])
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, int):
                    advance(message)
                elif not _give(connection, plan, tasks):
                    busy.discard(connection)
    finally:
        for process in processes.values():
            if process.pid is not None:
                process.kill()
                process.join()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _give(connection: Connection, plan: Plan, tasks: Iterator[int]) -> bool:
    """Give a process the next part; return whether there is one."""
    number = next(tasks, None)
    if number is None:
        return False
    with contextlib.suppress(OSError):  # it has ended, which `_receive` explains
        connection.send((number, plan.names_of(number)))
    return True


def _receive(connection: Connection, process: BaseProcess) -> object:
    try:
        return connection.recv()
    except (EOFError, OSError):
        process.join(5)
        code = process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with status {code}"
        raise ValueError(
            f"one of the processes ended {how}; {_KEPT}. If the machine has too little memory, give fewer --processes"
        ) from None


def _work(job: Job, rank: int, connection: Connection) -> None:
    """Embed the parts that arrive, until the parent has no more or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        embedder = open_network(job.options, rank % max(1, torch.cuda.device_count()))
        detector = open_detector(job.options)
        while True:
            number, names = connection.recv()
            write_part(job, number, embed_part(job, embedder, detector, names, connection.send))
            connection.send("done")
    except (ValueError, OSError) as error:
        connection.send(error)
    except (RuntimeError, MemoryError) as error:
        connection.send(in_words(error))
    except EOFError:
        pass


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
