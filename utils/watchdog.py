"""Where each rank is, so that a run that waits for one of them says for which, and ends instead of hanging.

Each rank notes its step and what it does; a thread shows that to the others through the key-value store by which the processes
met. When a rank stays in one place for longer than the time limit, or a collective fails because another process is gone, the
error names this rank, its step, and where all others were last seen.
"""

import contextlib
import json
import os
import sys
import threading
import time

from .distributed import LostPeerError, World, is_lost_peer

_BEAT = 2.0  # seconds between two signs of life


class Watchdog:
    """Watches one process of several; with a single process every method does nothing.

    Args:
        timeout_minutes: the longest that a rank may stay in one place that has a limit.
    """

    def __init__(self, world: World, timeout_minutes: float) -> None:
        self.world, self.limit = world, 60 * timeout_minutes
        # calls of one object wait for one another, so this thread wants its own where torch can copy it
        self._store = getattr(world.store, "clone", lambda: world.store)()
        self._place = (0, "setting up", time.monotonic(), False)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._store is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._store is not None and is_lost_peer(error):
            time.sleep(1.5 * _BEAT)  # so that those that still live have said so
            raise LostPeerError(f"{self._here()}: another process ended or cannot be reached. {self._others()}") from None
        self._stopped.set()

    def at(self, step: int, doing: str, limited: bool = True) -> None:
        """Note what this rank does now.

        Args:
            limited: whether it may take no longer than the time limit. Evaluation and saving may; but the others, who wait for
                this rank at the end of it, give up a minute after the limit.
        """
        self._place = (step, doing, time.monotonic(), limited)

    def _here(self) -> str:
        step, doing, _, _ = self._place
        return f"rank {self.world.rank} in step {step}, {doing}"

    def _others(self) -> str:
        """Return where the other ranks were seen last: those that are silent first, at most ten."""
        seen = []
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

    def _watch(self) -> None:
        beat = min(_BEAT, self.limit / 4)
        while not self._stopped.is_set():
            step, doing, since, limited = self._place
            if self._store is not None:
                with contextlib.suppress(RuntimeError):  # the store's machine is gone; the collectives find that out
                    self._store.set(f"place {self.world.rank}", json.dumps([step, doing, time.time()]))
            waited = time.monotonic() - since
            if limited and waited > self.limit:
                frame = sys._current_frames()[threading.main_thread().ident or 0]
                print(
                    f"error: {self._here()}, for {waited / 60:.1f} minutes (run.timeout_minutes={self.limit / 60:g}), "
                    f"at {frame.f_code.co_filename}:{frame.f_lineno}. {self._others()}",
                    file=sys.stderr,
                    flush=True,
                )
                time.sleep(beat)  # the others come to the same end; let them read the store, which may be this process's
                os._exit(1)  # the main thread hangs
            self._stopped.wait(beat)
