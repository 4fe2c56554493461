"""The batches of the coming steps with what the heads decide about them, prepared in a thread while a step is computed."""

import contextlib
import threading
import time
from collections.abc import Generator, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import torch

from data.loader import LoadedBatch, Loader
from partial_fc import PartialFC
from partial_fc.sampling.planning import SharedLabels, StepPlan

_PATIENCE = 10.0  # seconds in which the thread ends its last step


class PreparedStep(NamedTuple):
    """The batches of an optimizer step, and what PartialFC.prepare returned for each."""

    number: int
    batches: list[LoadedBatch]
    plans: list[StepPlan | SharedLabels]


class StepsAhead:
    """Iterate over the steps that the loaders have, one prepared ahead. All ranks must ask for the same steps.

    A thread takes the batches, and makes the heads' collective call for their labels. An error there is raised when its step
    is asked for. The loaders must hold two batches (`Loader.held`).

    Args:
        heads: those that the batches of the loaders are for.
        accumulation: micro-batches of a step.
    """

    def __init__(self, loaders: Sequence[Loader], heads: Sequence[PartialFC], first_step: int, accumulation: int) -> None:
        self.loaders, self.heads, self.first_step, self.accumulation = loaders, heads, first_step, accumulation
        self.waited = 0.0  # seconds in which the consumer waited for data, the first step aside
        self._has_data = False

    def doing(self) -> str:
        """Return what the next step waits for, for messages."""
        return "waiting for the labels of the other processes" if self._has_data else "waiting for data"

    def __iter__(self) -> Generator[PreparedStep, None, None]:
        asked: SimpleQueue[bool] = SimpleQueue()
        ready: SimpleQueue[tuple[PreparedStep | None, float, BaseException | None]] = SimpleQueue()
        # daemonic: the thread may wait for a process that is gone, and this process must end all the same
        thread = threading.Thread(target=self._prepare, args=(asked, ready), name="planner", daemon=True)
        thread.start()
        asked.put(True)
        first = True
        try:
            while True:
                started = time.perf_counter()
                prepared, had_data, error = ready.get()
                self.waited += 0.0 if first else max(0.0, had_data - started)
                first = False
                if error is not None:
                    raise error
                if prepared is None:
                    return
                asked.put(True)
                yield prepared
        finally:
            asked.put(False)
            thread.join(_PATIENCE)

    def _prepare(
        self, asked: "SimpleQueue[bool]", ready: "SimpleQueue[tuple[PreparedStep | None, float, BaseException | None]]"
    ) -> None:
        """Prepare a step each time one is asked for."""
        device = self.loaders[0].device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has a device of its own
        number = self.first_step
        with contextlib.ExitStack() as stack:
            iterators = [stack.enter_context(contextlib.closing(iter(loader))) for loader in self.loaders]
            while asked.get():
                try:
                    batches = [batch for iterator in iterators if (batch := next(iterator, None)) is not None]
                    had_data, self._has_data = time.perf_counter(), True
                    if not batches:
                        ready.put((None, had_data, None))
                        return
                    labels = [batch.labels.view(self.accumulation, -1) for batch in batches]
                    plans = [head.prepare(rows, number) for head, rows in zip(self.heads, labels, strict=True)]
                except BaseException as error:
                    ready.put((None, time.perf_counter(), error))
                    return
                self._has_data = False
                ready.put((PreparedStep(number, batches, plans), had_data, None))
                number += 1
