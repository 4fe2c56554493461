"""Tracks the position of each rank, so that a hanging run reports where it hangs, and ends.

Under gloo a collective raises an error when another process is gone. Under NCCL it waits, in a call in which Python handles
nothing. So there each rank also watches the signs of life of the next rank, and ends when they stop.

Each rank records its step and its activity; a thread publishes them in the key-value store of the rendezvous. When a rank
stays in one place for longer than the time limit, or a collective fails because another process is gone, the error names this
rank, its step, and where all others were last seen. A single process is watched in the same way.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from . import LostPeerError, World, is_lost_peer

_BEAT = 2.0  # seconds between heartbeats
_PAUSE = 0.1  # the shortest time between heartbeats when this process moves on, seconds
_PATIENCE = 10.0  # seconds that the store has to answer where the others are
_SILENCE = 30.0  # seconds without a sign of life of the next rank, after which it counts as gone
_LIBRARY = ("<", os.path.dirname(threading.__file__))
_WORKERS = ("decoder", "reader", "planner")  # prefixes of the names of the loader's threads


class Watchdog:
    """Watches this process after the set-up.

    Args:
        timeout_minutes: the longest that a rank may stay in one limited activity.
        silence: seconds after which a silent next rank ends this process; 0 = never; None = what the device needs.
    """

    def __init__(self, world: World, timeout_minutes: float, silence: float | None = None) -> None:
        self.world, self.limit = world, 60 * timeout_minutes
        self.silence = silence if silence is not None else _SILENCE if world.device.type == "cuda" else 0.0
        self._heard_at = 0.0  # when the last sign of life of the next rank came, 0 = never
        self._next_ended = ""  # how the next rank ended
        self._store: Any = None  # opened by the thread, because connecting may hang if the first machine is gone
        self._place: tuple[int, str | Callable[[], str], float, bool] = (0, "setting up", time.monotonic(), False)
        self._stopped, self._moved = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        if world.store is not None:
            self._threads.append(threading.Thread(target=self._show, name="watchdog's signs of life", daemon=True))
            if self.silence:
                self._threads.append(threading.Thread(target=self._listen, name="watchdog of the next rank", daemon=True))

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # the threads outlive this call; if they kept what `doing` belongs to, with its process groups, the process would abort
        step, doing = self._step_and_words()
        self._place = (step, doing, time.monotonic(), False)
        # a rank that fails alone leaves the others waiting
        self._tell("ended" if error is None or getattr(error, "on_all_ranks", False) else "failed")
        if error is not None and self.world.world_size > 1 and is_lost_peer(error):
            time.sleep(1.5 * _BEAT)  # so that living ranks have sent a heartbeat
            raise LostPeerError(f"{self._here()}: another process ended or cannot be reached. {self._others()}") from None
        self._stopped.set()
        self._moved.set()

    def at(self, step: int, doing: str | Callable[[], str], limited: bool = True) -> None:
        """Record what this rank does now.

        Args:
            doing: in words, or a function that returns them.
            limited: whether the time limit applies. It does not apply to evaluation and saving, but the other ranks, which wait
                for this one at the end, give up a minute after the limit.
        """
        self._place = (step, doing, time.monotonic(), limited)
        self._moved.set()

    def _here(self) -> str:
        step, doing = self._step_and_words()
        return f"{f'rank {self.world.rank} in ' if self.world.world_size > 1 else ''}step {step}, {doing}"

    def _step_and_words(self) -> tuple[int, str]:
        step, doing, _, _ = self._place
        return step, doing if isinstance(doing, str) else doing()

    def _new_store(self) -> Any:
        """Return a connection to the store of the caller's own, if torch can clone it; calls of one object block each other."""
        return getattr(self.world.store, "clone", lambda: self.world.store)()

    def _others(self) -> str:
        """Return where the other ranks were last seen; give up if the store does not answer."""
        answer: list[str] = []
        name = "watchdog's question"
        thread = threading.Thread(target=lambda: answer.append(self._ask()), name=name, daemon=True)
        thread.start()
        thread.join(_PATIENCE)
        return answer[0] if answer else "The first machine cannot be reached"

    def _ask(self) -> str:
        """Return where the other ranks were last seen, silent ones first, at most ten."""
        seen: list[tuple[float, str]] = []
        for rank in range(self.world.world_size):
            key = f"place {rank}"
            if rank == self.world.rank:
                continue
            try:
                if self._store is None or not self._store.check([key]):
                    seen.append((float("inf"), f"rank {rank} was not heard of"))
                    continue
                step, doing, since = json.loads(self._store.get(key))
            except RuntimeError:
                return "The first machine cannot be reached"
            silent = time.time() - since
            late = f", silent for {silent:.0f} s" if silent > 1.4 * _BEAT else ""
            seen.append((silent if late else 0.0, f"rank {rank} was in step {step}, {doing}{late}"))
        seen.sort(key=lambda entry: -entry[0])
        more = f"; and {len(seen) - 10} more" if len(seen) > 10 else ""
        return "; ".join(text for _, text in seen[:10]) + more

    def _show(self) -> None:
        """Publish where this rank is, until the watch ends."""
        with contextlib.suppress(RuntimeError):  # the store's machine is gone; the collectives will report that
            self._store = self._new_store()
        while self._store is not None and not self._stopped.is_set():
            self._moved.clear()
            step, doing = self._step_and_words()
            with contextlib.suppress(RuntimeError):
                self._store.set(f"place {self.world.rank}", json.dumps([step, doing, time.time()]))
            self._stopped.wait(_PAUSE)
            self._moved.wait(_BEAT)  # a new step is published at once, in case a rank stops in it

    def _watch(self) -> None:
        """End the process when it stays in one place for too long, until the watch ends."""
        beat, awake = min(_BEAT, self.limit / 4), 0.0
        looked = time.monotonic()
        while not self._stopped.wait(beat):
            now = time.monotonic()
            if now - looked > beat + min(_PATIENCE, self.limit / 2):
                awake = now  # the whole process was suspended, for example by Ctrl-Z; that time does not count
            looked = now
            _, _, since, limited = self._place
            waited = now - max(since, awake)
            if self.silence and (gone := self._next_is_gone(now, awake)):
                self._end(f"error: {self._here()}: {gone}. {self._others()}", beat)
            if limited and waited > self.limit:
                others = f". {self._others()}" if self.world.world_size > 1 else ""
                minutes = f"for {waited / 60:.1f} minutes (run.timeout_minutes={self.limit / 60:g})"
                self._end(f"error: {self._here()}, {minutes}, at {_lines_of_code()}{others}", beat)

    def _end(self, line: str, beat: float) -> None:
        """End the process, whose main thread hangs."""
        print(line, file=sys.stderr, flush=True)
        self._tell("failed")
        time.sleep(beat)  # the others end the same way; let them read the store, which may be in this process
        os._exit(1)

    def _next_is_gone(self, now: float, awake: float) -> str:
        """Return how the next rank ended or since when it is silent, "" if it lives or was never heard."""
        rank = (self.world.rank + 1) % self.world.world_size
        if self._next_ended:
            return f"rank {rank} failed" if self._next_ended == "failed" else ""
        quiet = now - max(self._heard_at, awake)
        return f"rank {rank} has been silent for {quiet:.0f} s" if self._heard_at and quiet > self.silence else ""

    def _listen(self) -> None:
        """Note the signs of life of the next rank, until the watch ends. A store that does not answer counts as silence."""
        rank, sign = (self.world.rank + 1) % self.world.world_size, b""
        with contextlib.suppress(RuntimeError):
            store = self._new_store()
            while not self._stopped.wait(_BEAT / 2):
                if store.check([f"end {rank}"]):
                    self._next_ended = store.get(f"end {rank}").decode()
                elif store.check([f"place {rank}"]) and (new := store.get(f"place {rank}")) != sign:
                    sign, self._heard_at = new, time.monotonic()

    def _tell(self, how: str) -> None:
        """Publish how this rank ends, where another one watches it; give up if the store does not answer."""
        if not self.silence or self.world.store is None:
            return

        def publish() -> None:
            with contextlib.suppress(RuntimeError):
                self._new_store().set(f"end {self.world.rank}", how)

        thread = threading.Thread(target=publish, name="watchdog's last word", daemon=True)
        thread.start()
        thread.join(_PATIENCE)


def _lines_of_code() -> str:
    """Return the lines of code of the main thread and of the loader's active threads."""
    frames = sys._current_frames()
    main = frames[threading.main_thread().ident or 0]
    places = [f"{main.f_code.co_filename}:{main.f_lineno}"]
    for thread in threading.enumerate():
        if thread.name.startswith(_WORKERS) and thread.ident in frames:
            entries = traceback.extract_stack(frames[thread.ident])
            stack = [one for one in entries if "site-packages" not in one.filename and not one.filename.startswith(_LIBRARY)]
            if stack:
                places.append(f"{thread.name.split('_')[0]} at {stack[-1].filename}:{stack[-1].lineno}")
    return ", ".join(dict.fromkeys(places))
