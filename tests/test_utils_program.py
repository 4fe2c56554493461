"""Signals in a call in which Python runs no handlers, and what the system refuses; whole runs: test_train_hangs.py."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock

from utils import program
from utils.cli import progress
from utils.program import StopSignal, run_main

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


def test_ctrl_c_in_the_moment_before_training_can_be_saved_does_not_end_it_later(monkeypatch: pytest.MonkeyPatch):
    """The thread that reads signals sees one before the run can save, and the main thread's handler runs just after that."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(program, "_PATIENCE", 1.0)
    before = signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        thread = threading.Thread(target=stop._note, args=(signal.SIGINT,))
        thread.start()
        time.sleep(0.2)  # a thread that is not there yet could only let this test pass
        stop.can_save = True
        stop._handle(signal.SIGINT, None)
        thread.join()
        assert ended == [] and stop.name == "SIGINT"
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize(("output", "status", "said"), [(">&-", 0, ""), ("<&- >&- 2>&-", 0, ""), (">/dev/full", 1, "error: ")])
def test_a_closed_or_full_output_is_no_traceback(output: str, status: int, said: str):
    if "full" in output and not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    words = ["sh", "-c", f'exec "$0" face_training.py train small --print-config {output}', sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == status and done.stderr.startswith(said) and done.stderr.count("\n") == status


def test_no_place_for_temporary_files_or_sockets_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/missing"])
    monkeypatch.setattr(program, "drop_output", lambda: None)  # it would drop pytest's
    assert run_main(tempfile.gettempdir) == run_main(lambda: socket.socket(socket.AF_UNIX).bind("x" * 200)) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ") and first.endswith("set TMPDIR to a folder that can be written")
    assert second.startswith("error: ") and second.endswith("set TMPDIR to a folder with a shorter path")


@pytest.mark.parametrize("shown", [False, True])
def test_a_bar_starts_no_thread_and_no_lock_of_all_processes(shown: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tqdm, "monitor_interval", 10)  # as after its import
    monkeypatch.delattr(tqdm, "_lock", raising=False)
    monkeypatch.delattr(TqdmDefaultWriteLock, "mp_lock", raising=False)
    monkeypatch.setattr("multiprocessing.RLock", pytest.fail)
    before = threading.active_count()
    with progress(range(2), 2, "counting", "number", shown=shown) as bar:
        bar.update(1)
        assert list(bar) == [0, 1] and threading.active_count() == before
