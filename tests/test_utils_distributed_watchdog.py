"""The watch of the next rank, with a store that answers as the test wants it; whole runs: tests/test_train_hangs.py."""

import threading
import time
import weakref

import pytest
import torch
from tiny_runs import wait_for

from utils.distributed import SharedError, World, watchdog
from utils.distributed.watchdog import Watchdog

SILENCE = 1.0


class _Store:
    """A store in which the next rank gives a sign of life until `frozen`; then no call returns, or each fails."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.frozen, self.told = fails, threading.Event(), []

    def _answer(self) -> None:
        if self.frozen.is_set():
            if self.fails:
                raise RuntimeError("Connection reset by peer")
            time.sleep(1000)

    def clone(self) -> "_Store":
        return self

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return keys[0].startswith("place")

    def get(self, key: str) -> bytes:
        self._answer()
        return str(time.monotonic()).encode()

    def set(self, key: str, value: str) -> None:
        self._answer()
        if key.startswith("end"):
            self.told.append((key, value))


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines with which the process would have ended."""
    lines: list[str] = []
    monkeypatch.setattr(Watchdog, "_end", lambda self, line, beat: lines.append(line))
    monkeypatch.setattr(watchdog, "_BEAT", 0.1)
    monkeypatch.setattr(watchdog, "_PATIENCE", 0.5)
    return lines


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("silence", "said"), [(SILENCE, "rank 1 has been silent"), (60.0, "for 0.1 minutes (run.timeout_minutes=0.05)")]
)
def test_a_store_that_stops_answering_is_silence_and_hinders_nothing(ended: list[str], fails: bool, silence: float, said: str):
    store = _Store(fails)
    watch = Watchdog(World(0, 2, 0, 2, torch.device("cpu"), store), timeout_minutes=0.05, silence=silence)
    with watch:
        wait_for(lambda: watch._heard_at)
        watch.at(7, "training")
        time.sleep(1.2 * SILENCE)
        assert not ended  # it lives
        store.frozen.set()
        wait_for(lambda: ended)
        assert "rank 0 in step 7, training" in ended[0] and said in ended[0]
    assert watch._stopped.is_set()  # leaving does not wait for the store either


def test_a_next_rank_that_was_never_heard_is_not_silent(ended: list[str]):
    store = _Store(fails=True)
    store.frozen.set()
    with Watchdog(World(0, 2, 0, 2, torch.device("cpu"), store), timeout_minutes=1, silence=0.2):
        time.sleep(1.0)
    assert not ended


@pytest.mark.parametrize(
    ("error", "how"), [(None, "ended"), (SharedError("on all"), "ended"), (MemoryError("here alone"), "failed")]
)
def test_a_rank_tells_how_it_ends(ended: list[str], error: Exception | None, how: str):
    store = _Store()
    watch = Watchdog(World(1, 2, 1, 2, torch.device("cpu"), store), timeout_minutes=1, silence=SILENCE)
    watch.__enter__()
    watch.__exit__(type(error), error, None)
    assert store.told == [("end 1", how)]


def test_the_threads_of_a_watch_that_ended_keep_nothing_alive(ended: list[str]):
    """They outlive it by seconds. With the head's process groups among what they kept, processes aborted at their end."""

    class Steps:
        def doing(self) -> str:
            return "waiting for data"

    steps = Steps()
    seen, watch = weakref.ref(steps), Watchdog(World(0, 2, 0, 2, torch.device("cpu"), _Store()), timeout_minutes=1)
    with watch:
        watch.at(3, steps.doing)
    del steps
    assert seen() is None and watch._here() == "rank 0 in step 3, waiting for data"
