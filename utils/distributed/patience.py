"""Waits for the long work of other processes, such as reading a data set for the first time, without a time limit.

A collective of the run's group ends the run after run.timeout_minutes, however busy the others are. Here a process that is busy
shows signs of life in the key-value store of the rendezvous, and each process watches those of the next one. So the wait ends
when the work is done, at once when a process ends, and within a minute when one is stopped or its machine is gone.
"""

import contextlib
import datetime
import itertools
import sys
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from utils import distributed

from . import LostPeerError, World, gloo_group

_BEAT = 2.0  # seconds between signs of life
_SILENCE = 60.0  # seconds without one, after which a process counts as gone
_SAY = 60.0  # seconds between lines that say who is waited for
_PAUSE = 0.25  # the longest time between looks at whether all are done, seconds
_UNLIMITED = datetime.timedelta(days=20)  # in milliseconds it must fit into 31 bits
_numbers = itertools.count()  # of the calls of `patiently`, which are the same on all ranks


@contextlib.contextmanager
def patiently(world: World, doing: str) -> Iterator[None]:
    """Run a block on every rank and wait until all ranks have left theirs, however long that takes. A collective call.

    An Exception of the block is raised after the wait. The block itself must not communicate. `doing` says what it does, for
    messages, such as "reading the data".

    Raises:
        LostPeerError: the next rank gives no sign of life.
        RuntimeError: another process ended, see distributed.is_lost_peer.
    """
    if world.world_size == 1:
        yield
        return
    group = gloo_group("waits without a limit", _UNLIMITED)
    with _SignsOfLife(world, next(_numbers), doing) as signs:
        try:
            yield
        except Exception:
            _wait(group, signs)
            raise
        _wait(group, signs)


def _wait(group: dist.ProcessGroup, signs: "_SignsOfLife") -> None:
    signs.is_done()
    work = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
    started, pause = time.monotonic(), 1e-3
    while not work.is_completed():  # in Python rather than in work.wait(), so that Ctrl-C works
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE)
        signs.watch_next(time.monotonic() - started)
    work.wait()


class _SignsOfLife:
    """Shows the others that this rank lives, and watches the next rank. Without a store it does neither."""

    def __init__(self, world: World, number: int, doing: str) -> None:
        self.world, self.number, self.doing = world, number, doing
        self._next = (world.rank + 1) % world.world_size
        self._sign, self._quiet = "", 0.0  # the last of the next rank, and the seconds since then
        self._looked, self._said = time.monotonic(), 0.0
        self._is_lost = False  # the store: under torchrun it ends with it, and the processes are to save all the same
        self._busy, self._moved, self._stopped = True, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._show, name="signs of life", daemon=True)

    def __enter__(self) -> "_SignsOfLife":
        if self.world.store is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stopped.set()
        self._moved.set()
        if self.world.store is not None:
            self._thread.join(_BEAT)  # not for ever: a store that is gone may not answer

    def is_done(self) -> None:
        """Show that this rank has done its work, and only waits."""
        self._busy = False
        self._moved.set()

    def _show(self) -> None:
        """Exchange signs with the store, in a thread, because a call of a store that is gone may never return."""
        try:
            store = getattr(self.world.store, "clone", lambda: self.world.store)()  # calls of one object block each other
            for beat in itertools.count():
                self._moved.clear()
                store.set(f"life {self.world.rank}", f"{self.number} {self._busy} {beat}")
                if self._stopped.is_set():
                    return
                key = f"life {self._next}"
                if store.check([key]) and (sign := store.get(key).decode()) != self._sign:
                    self._sign, self._quiet = sign, 0.0
                self._moved.wait(_BEAT)
        except RuntimeError:
            self._is_lost = True

    def watch_next(self, waited: float) -> None:
        """Judge the next rank's signs of life, `waited` seconds after this rank has done its work.

        Raises:
            LostPeerError: there was none for too long.
        """
        if self.world.store is None:
            return
        now = time.monotonic()
        self._quiet += min(now - self._looked, _BEAT)  # this process may have been stopped
        self._looked = now
        number, busy, _ = self._sign.split() if self._sign else ("", "", "")
        is_here = number == str(self.number)
        known = is_here and not self._is_lost
        limit = _SILENCE if known else max(_SILENCE, (distributed._timeout or _UNLIMITED).total_seconds())
        if self._quiet > limit:
            here = f"rank {self.world.rank}, waiting for the other processes ({self.doing})"
            raise LostPeerError(f"{here}: rank {self._next} has been silent for {self._quiet:.0f} s")
        if busy == "True" and known and waited - self._said > _SAY:
            self._said = waited
            minutes = f"{waited / 60:.0f} minute(s)"
            print(f"waiting for rank {self._next} for {minutes}: {self.doing}", file=sys.stderr, flush=True)
