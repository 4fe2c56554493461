"""Ends a worker when its torchrun dies, after a checkpoint if training has begun.

A killed torchrun cannot tell its workers. They would continue for hours and keep the run folder locked, so that the same
command fails. Linux can send a signal when the parent dies. Before training there is nothing to save, and a worker may wait in
C++ code, where Python handles no signals, so the signal is SIGKILL. During training it is SIGTERM, which
`utils.program.StopSignal` records. A thread also polls the parent, in case it died before the request, and for systems other
than Linux.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_POLL = 0.5  # seconds between checks of the parent
_GRACE = 3.0  # seconds for a worker that cannot save to end by itself
_NAME = "parent"


def follow_parent(can_save: Callable[[], bool] = lambda: False) -> None:
    """End this process when the torchrun that started it dies. Does nothing without torchrun, or in a second call.

    Args:
        can_save: returns whether this process would now save and end by itself after SIGTERM.
    """
    if not _under_torchrun() or any(thread.name == _NAME for thread in threading.enumerate()):
        return
    parent = os.getppid()
    ask_to_die_with_parent(signal.SIGKILL)
    if os.getppid() != parent or _is_orphan():  # it died before that, perhaps while this process imported torch
        _end()
    threading.Thread(target=_watch, args=(parent, can_save), name=_NAME, daemon=True).start()


def ask_to_die_with_parent(number: int) -> None:
    """Ask Linux for a signal when the parent dies. Call it from the main thread, because the request is per thread."""
    if _under_torchrun() and sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(number))


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _watch(parent: int, can_save: Callable[[], bool]) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL)
    told, deadline = False, time.monotonic() + _GRACE
    while True:
        if not can_save():
            if time.monotonic() > deadline:
                _end()
        else:
            deadline = time.monotonic() + _GRACE
            if not told:
                os.kill(os.getpid(), signal.SIGTERM)
                told = True
        time.sleep(_POLL)


def _end() -> None:
    # not print: another thread may hold stderr, and its reader may have died with the parent
    try:
        os.write(2, b"error: torchrun ended, so this process ends too\n")
    finally:
        os._exit(1)


def _is_orphan() -> bool:
    """Return whether torchrun is gone already: no ancestor of this process is a Python.

    A process whose parent died is adopted by init, or by another process that adopts orphans. There may be a shell between this
    process and a living torchrun (torchrun --no-python), so all ancestors are checked.
    """
    own, pid = _executable(os.getpid()), os.getppid()
    if not own:
        return False  # a system without /proc
    while pid > 0:
        above = _executable(pid)
        if above == own or os.path.basename(above).startswith("python"):
            return False
        if not above and pid > 1:
            return False  # hidden by the settings of /proc, so it may be torchrun
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return False
    return True


def _executable(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:  # the process of another user, such as init, or no such process
        return ""
