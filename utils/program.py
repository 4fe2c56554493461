"""What the programs share: one-line errors with an exit status, and signals that ask a run to stop."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from . import distributed
from .distributed import LostPeerError, RendezvousError, SharedError

REQUEUE = 75  # exit status of a run that saved and stopped because it was told to: EX_TEMPFAIL of sysexits.h, "try again later"
# exit status under torchrun of an error that would come again: EX_CONFIG. scripts/torchrun.py starts nothing again after it
USER_ERROR = 78


class StoppedError(Exception):
    """Training stopped at a step boundary because it was told to, after it had saved."""


class StopSignal:
    """Notes SIGTERM and SIGUSR1 instead of dying of them: the training loop saves at the next step boundary, and stops.

    Schedulers send these before they take a machine away. Outside the main thread nothing is installed.
    """

    def __init__(self) -> None:
        self.name = ""  # of the signal that came
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.name = signal.Signals(number).name


def guarded(run: Callable[[], None]) -> int:
    """Run a program; return its exit status. An error is one line, said once where all ranks have the same."""
    rank = os.environ.get("RANK", "0")
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    status = 1
    try:
        run()
        distributed.stop()
        return 0
    except SharedError as error:
        if rank == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        status = USER_ERROR if "TORCHELASTIC_RUN_ID" in os.environ else 1
    except ValueError as error:
        print(f"error: {f'rank {rank}: ' if several else ''}{error}", file=sys.stderr, flush=True)
        if "TORCHELASTIC_RUN_ID" in os.environ and not isinstance(error, RendezvousError):
            status = USER_ERROR
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        print(f"error: {f'rank {rank}: ' if several else ''}{error.filename}: {error.strerror}", file=sys.stderr, flush=True)
    except StoppedError as stopped:
        if rank == "0":
            print(f"stopped by {stopped}", file=sys.stderr, flush=True)
        status = REQUEUE
    except KeyboardInterrupt:
        print("interrupted; the same command resumes from the last checkpoint", file=sys.stderr, flush=True)
        status = 130
    except RuntimeError as error:
        if not (several and distributed.is_lost_peer(error)):
            raise
        text = str(error) if isinstance(error, LostPeerError) else f"rank {rank}: another process ended or cannot be reached"
        print(f"error: {text}", file=sys.stderr, flush=True)
    if several:
        os._exit(status)  # leaving a process group in order would wait for ranks that may be gone
    return status
