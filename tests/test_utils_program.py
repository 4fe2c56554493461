"""Signals that come while the main thread is in a call in which Python runs no handlers; whole runs: test_train_hangs.py."""

import ctypes
import os
import signal
import threading
import time

import pytest

from utils.program import StopSignal

LIBC = ctypes.CDLL(None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_is_seen_while_the_main_thread_is_in_a_call_that_does_not_return(number: signal.Signals):
    lock = ctypes.create_string_buffer(256)  # a pthread_mutex_t; who waits for it is woken by no signal
    seen = []

    def send() -> None:
        time.sleep(0.5)  # until the main thread waits; a shorter wait could only let this test pass
        deadline = time.monotonic() + 10
        os.kill(os.getpid(), number)
        while not stop.name and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(stop.name)
        LIBC.pthread_mutex_unlock(lock)

    before = signal.getsignal(number), signal.set_wakeup_fd(-1)
    with StopSignal() as stop:
        stop.can_save = True
        LIBC.pthread_mutex_lock(lock)
        thread = threading.Thread(target=send)
        thread.start()
        LIBC.pthread_mutex_lock(lock)  # until `send` unlocks it
        thread.join()
    assert seen == [number.name]
    assert (signal.getsignal(number), signal.set_wakeup_fd(-1)) == before
    assert "signals" not in {thread.name for thread in threading.enumerate()}
