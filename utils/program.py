"""Shared by the programs: one-line errors with an exit status, and signals that ask a run to stop."""

import contextlib
import ctypes
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from . import distributed
from .allocator import keep_freed_memory, out_of_memory
from .cli import drop_output, leave_closed_output
from .distributed import LostPeerError, RendezvousError, SharedError
from .distributed.parent import ask_to_die_with_parent, follow_parent
from .machine import end_imports
from .text import PrintableOutput, one_line

REQUEUE = 75  # exit status of a run that saved and stopped on request: EX_TEMPFAIL of sysexits.h, "try again later"
INTERRUPTED = 130  # exit status after Ctrl-C, as in shells: 128 + SIGINT
# exit status under torchrun of an error that would occur again: EX_CONFIG. scripts/launch/torchrun.py then restarts nothing
USER_ERROR = 78
_STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # signals that ask a run to stop
_NOTHING_SAVED = "no step was trained, so nothing was saved; earlier checkpoints are untouched"
_PATIENCE = 3.0  # seconds in which the main thread raises KeyboardInterrupt, unless it hangs
# what an OSError that names no file says -> what to do
_UNNAMED = {
    "No space left|Disk quota exceeded": "make room on the disk of the output or of temporary files",
    "temporary directory": "set TMPDIR to a folder that can be written",
    "AF_UNIX path too long": "set TMPDIR to a folder with a shorter path",
}
TESTED_TORCH = "2.13.0"  # of requirements.txt


def untested_torch() -> str:
    """Return a line that says so if this torch is not the one that the tests run with, "" if it is."""
    own = torch.__version__.partition("+")[0]  # 2.13.0+cpu
    return "" if own == TESTED_TORCH else f"torch {torch.__version__} is installed, but the tests run with {TESTED_TORCH}"


class StoppedError(Exception):
    """Training saved and stopped at a step boundary, on request; `status` is the exit status of the program."""

    on_all_ranks = True

    def __init__(self, message: str, status: int = REQUEUE) -> None:
        super().__init__(message)
        self.status = status


class StopSignal:
    """Records the signals that ask a run to stop. The training loop then saves after this step or the next, and stops.

    Schedulers send SIGTERM or SIGUSR1 before they take a machine away. Ctrl-C (SIGINT) is recorded only while `can_save` is
    true; before that it raises KeyboardInterrupt, as there is nothing to save. A second Ctrl-C ends the process immediately.
    Outside the main thread no handlers are installed. The death of torchrun counts as SIGTERM, see utils/distributed/parent.py.

    Python runs handlers in the main thread, between two instructions, so not while that thread waits for a GPU or another
    process. But it writes the number of each signal to a pipe at once. A thread reads that, and does what cannot wait.
    """

    def __init__(self) -> None:
        self.name = ""  # the last signal
        self._can_save = False
        self._before: dict[int, Any] = {}
        self._pipe_before, self._pipe, self._reader = -1, -1, threading.Thread()
        self._interrupted = threading.Event()  # the main thread has raised KeyboardInterrupt

    @property
    def can_save(self) -> bool:
        """Whether the run can save after a step."""
        return self._can_save

    @can_save.setter
    def can_save(self, value: bool) -> None:
        self._can_save = value
        ask_to_die_with_parent(signal.SIGTERM if value else signal.SIGKILL)

    def __enter__(self) -> "StopSignal":
        follow_parent(lambda: self.can_save)
        if threading.current_thread() is threading.main_thread():
            numbers, self._pipe = os.pipe()
            os.set_blocking(self._pipe, False)
            self._reader = threading.Thread(target=self._read, args=(numbers,), name="signals", daemon=True)
            self._reader.start()
            self._pipe_before = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
            for number in _STOPPING:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.can_save = False
        self._interrupted.set()  # the main thread hangs no more
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pipe >= 0:
            signal.set_wakeup_fd(self._pipe_before)
            os.write(self._pipe, b"\0")  # which ends the thread; forks may have the pipe, too, so that to close it may not
            os.close(self._pipe)
            self._reader.join()

    @property
    def status(self) -> int:
        """The exit status of a run that saved and stopped because of the signal."""
        return INTERRUPTED if self.name == "SIGINT" else REQUEUE

    def _handle(self, number: int, frame: object) -> None:
        """Run in the main thread; what else there is to do the thread has done."""
        if number == signal.SIGINT and not self.can_save:
            self._interrupted.set()
            raise KeyboardInterrupt(_NOTHING_SAVED)

    def _read(self, numbers: int) -> None:
        """Run in the thread: act on each signal whose number arrives."""
        with open(numbers, "rb", buffering=0) as pipe:
            while (number := pipe.read(1)) != b"\0":
                if number[0] in _STOPPING:
                    self._note(signal.Signals(number[0]))

    def _note(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and not self.can_save:
            if self._interrupted.wait(_PATIENCE):
                return
            if not self.can_save:  # the main thread hangs in a call
                if _is_rank_0():
                    os.write(2, f"interrupted: {_NOTHING_SAVED}\n".encode())
                os._exit(INTERRUPTED)
            # it has begun to train between the signal and the handler
        if number == signal.SIGINT:
            # the system's default, which ends the process whatever it does; Python allows signal.signal in the main thread only
            ctypes.CDLL(None).signal(int(number), None)
            if _is_rank_0():  # not print: the main thread may be in print, and hold its lock
                text = "\nCtrl-C: saving and stopping after this step or the next. Ctrl-C again stops at once, without saving\n"
                os.write(2, text.encode())
        self.name = number.name


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _say(line: str) -> None:
    """Print one escaped line on stderr, after closing progress bars that an error left open."""
    for bar in list(getattr(sys.modules["tqdm"].tqdm, "_instances", ())) if "tqdm" in sys.modules else ():
        bar.close()
    print(one_line(line), file=sys.stderr, flush=True)


def run_main(run: Callable[..., int | None], *arguments: Any) -> int:
    """Run a program with its arguments; return its exit status, which is 0, or what `run` returns, unless there is an error.

    An error is one line, printed once if all ranks have the same.

    Control characters in the program's output, such as in names of files and people, are escaped.
    """
    rank = os.environ.get("RANK", "0")
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    who, status = f"rank {rank}: " if several else "", 1
    end_imports()
    keep_freed_memory()
    if "cv2" in sys.modules:  # its own lines would come before ours, which say what is wrong
        sys.modules["cv2"].utils.logging.setLogLevel(0)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that this terminal cannot encode must not end the program
            stream.reconfigure(errors="backslashreplace")
    try:
        with contextlib.redirect_stdout(PrintableOutput(sys.stdout)):
            done = run(*arguments)
        sys.stdout.flush()
        distributed.stop()
        return done or 0
    except SharedError as error:
        if rank == "0":
            _say(f"error: {error}")
        status = USER_ERROR if "TORCHELASTIC_RUN_ID" in os.environ else 1
    except ValueError as error:
        _say(f"error: {who}{error}")
        if "TORCHELASTIC_RUN_ID" in os.environ and not isinstance(error, RendezvousError):
            status = USER_ERROR
    except BrokenPipeError as error:
        status = leave_closed_output(error)
    except OSError as error:
        text = f"{error.filename}: {error.strerror}"
        if error.filename is None or error.strerror is None:
            fix = next((fix for part, fix in _UNNAMED.items() if re.search(part, str(error))), "")
            if not fix:
                raise
            text = f"{error}; {fix}"
            drop_output()
        _say(f"error: {who}{text}")
    except StoppedError as stopped:
        if rank == "0":
            _say(f"stopped by {stopped}")
        status = stopped.status
    except KeyboardInterrupt as interrupt:
        if rank == "0":
            _say(f"interrupted{f': {interrupt}' if interrupt.args else ''}")
        status = INTERRUPTED
    except (RuntimeError, MemoryError) as error:
        text = str(error) if isinstance(error, LostPeerError) else f"rank {rank}: another process ended or cannot be reached"
        if out_of_memory(error):
            text = f"{who}the memory is full; take a smaller network, or fewer images or classes"
        elif str(error) == "can't start new thread":
            text = f"{who}the system starts no further thread: raise the limit of memory or of processes (ulimit -d, -v, -u)"
        elif not (several and distributed.is_lost_peer(error)):
            raise
        _say(f"error: {text}")
    if several:
        os._exit(status)  # leaving a process group in order would wait for ranks that may be gone
    return status
