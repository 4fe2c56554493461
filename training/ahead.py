"""The batches of the coming steps with what the heads decide about them, prepared in a thread while a step is computed."""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Sequence
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
    is asked for, or its flags. The loaders must hold two batches (`Loader.held`).

    Args:
        heads: those that the batches of the loaders are for.
        accumulation: micro-batches of a step.
    """

    flags: Callable[[], Sequence[bool]] = tuple  # returns what this rank tells the others with the labels of each step

    def __init__(self, loaders: Sequence[Loader], heads: Sequence[PartialFC], first_step: int, accumulation: int) -> None:
        self.loaders, self.heads, self.first_step, self.accumulation = loaders, heads, first_step, accumulation
        self.waited = 0.0  # seconds in which the consumer waited for data, the first step aside
        self._has_data = False
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._ready: SimpleQueue[tuple[PreparedStep | BaseException, float]] = SimpleQueue()
        self._next: PreparedStep | BaseException | None = None  # which the consumer waited for already

    def doing(self) -> str:
        """Return what the next step waits for, for messages."""
        return "waiting for the labels of the other processes" if self._has_data else "waiting for data"

    def __iter__(self) -> Generator[PreparedStep, None, None]:
        # daemonic: the thread may wait for a process that is gone, and this process must end all the same
        thread = threading.Thread(target=self._prepare, name="planner", daemon=True)
        thread.start()
        self._asked.put(True)
        try:
            self._upcoming()
            self.waited = 0.0
            while (prepared := self._upcoming()).batches:
                self._next = None
                self._asked.put(True)
                yield prepared
        finally:
            self._next = None  # an error, whose frames hold the loaders and their files
            self._asked.put(False)
            thread.join(_PATIENCE)

    def shared_flags(self) -> Sequence[bool]:
        """Return for each of the flags whether any rank had it when it shared the labels of the step after the present one.

        It waits for that step. No rank is asked for its flags before it is done with the step before the present one.
        """
        plan = self._upcoming().plans[-1]
        return (plan.labels if isinstance(plan, StepPlan) else plan).flags

    def _upcoming(self) -> PreparedStep:
        """Wait until the next step is prepared, and return it or raise its error; after the last one it has no batches."""
        if self._next is None:
            started = time.perf_counter()
            self._next, had_data = self._ready.get()
            self.waited += max(0.0, had_data - started)
        if isinstance(self._next, BaseException):
            raise self._next
        return self._next

    def _prepare(self) -> None:
        """Prepare a step each time one is asked for."""
        device = self.loaders[0].device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has a device of its own
        number = self.first_step
        with contextlib.ExitStack() as stack:
            iterators = [stack.enter_context(contextlib.closing(iter(loader))) for loader in self.loaders]
            while self._asked.get():
                try:
                    batches = [batch for iterator in iterators if (batch := next(iterator, None)) is not None]
                    had_data, self._has_data = time.perf_counter(), True
                    labels = [batch.labels.view(self.accumulation, -1) for batch in batches]
                    heads = zip(self.heads if batches else [], labels, strict=True)
                    plans = [head.prepare(rows, number, self.flags()) for head, rows in heads]
                except BaseException as error:
                    self._ready.put((error, time.perf_counter()))
                    return
                self._has_data = False
                self._ready.put((PreparedStep(number, batches, plans), had_data))
                number += 1
