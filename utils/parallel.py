"""Processes many items in threads, with results in order and a bounded number of items in flight; starts processes."""

import contextlib
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def forks_of_torch() -> multiprocessing.context.BaseContext:
    """Return a context whose processes are forks of one that has imported torch, which each would import otherwise."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    return context


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads."""
    import torch  # programs that do not compute start without it

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def map_in_order(function: Callable[[Item], Result], items: Iterable[Item], threads: int, ahead: int = 16) -> Iterator[Result]:
    """Yield function(item) for each item, in order, with at most `ahead` items per thread in flight.

    An exception of the function is raised in place of its result; items that were not started are then dropped.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="worker")
    rest = iter(items)
    pending: deque[Future[Result]] = deque(pool.submit(function, item) for item in islice(rest, threads * ahead))
    try:
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(function, item) for item in islice(rest, 1))
    except BaseException as error:
        # the garbage collector may close a generator that was given up, even within the locks of `threading`
        pool.shutdown(wait=not isinstance(error, GeneratorExit), cancel_futures=True)
        raise
    pool.shutdown()
