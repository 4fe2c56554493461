"""What the programs share: one-line errors with an exit status, and a run's folder with its choice of a checkpoint."""

import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import distributed
from .checkpoint import find_checkpoint, list_checkpoints, read_manifest
from .distributed import SharedError, World, all_gather_objects, together

REQUEUE = 75  # exit status of a run that saved and stopped because it was told to: EX_TEMPFAIL of sysexits.h, "try again later"


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
    except ValueError as error:
        print(f"error: {f'rank {rank}: ' if several else ''}{error}", file=sys.stderr, flush=True)
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        print(f"error: {f'rank {rank}: ' if several else ''}{error.filename}: {error.strerror}", file=sys.stderr, flush=True)
    except StoppedError as stopped:
        if rank == "0":
            print(f"stopped by {stopped}; the same command goes on from there", file=sys.stderr, flush=True)
        status = REQUEUE
    except KeyboardInterrupt:
        print("interrupted; the same command resumes from the last checkpoint", file=sys.stderr, flush=True)
        status = 130
    except RuntimeError as error:
        if not (several and distributed.is_lost_peer(error)):
            raise
        print(f"error: rank {rank} stopped: another process ended or cannot be reached", file=sys.stderr, flush=True)
    if several:
        os._exit(status)  # leaving a process group in order would wait for ranks that may be gone
    return status


def prepare_run_folder(folder: Path, resume: str, config_text: str, identity: dict[str, Any], world: World) -> Path | None:
    """Make the run folder with its config.yaml; return the checkpoint to resume from, the same on all ranks, or None."""
    chosen: Path | None = None
    with together(world):
        if world.rank == 0:
            _hold(folder)
            chosen = choose_checkpoint(folder, resume, identity)
            try:
                _write_config(folder, config_text, chosen)
            except OSError as error:
                raise ValueError(f"run.output: the run folder {folder} cannot be written: {error.strerror}") from None
    chosen = all_gather_objects(chosen, world)[0]
    with together(world):
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"run.output: {folder} is not visible here; several machines need a shared folder")
    return chosen


def _hold(folder: Path) -> None:
    """Lock the run folder until this process ends, however it ends, so that two jobs never write into it.

    torchrun killed by SIGKILL leaves its workers running, so a resumed run may well meet them.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(f"run.output: the run folder {folder} cannot be written: {error.strerror}") from None
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise ValueError(
            f"run.output: {folder} is in use by another job that still runs; wait for it, end it, or choose another run.name"
        ) from None
    except OSError:
        return  # a file system without locks


def choose_checkpoint(folder: Path, resume: str, identity: dict[str, Any]) -> Path | None:
    """Return the checkpoint that checkpoint.resume means for this run, after checking that it fits; None = start anew."""
    found = list_checkpoints(folder)
    if resume == "never" and found:
        raise ValueError(
            f"checkpoint.resume=never, but {folder} holds {len(found)} checkpoint(s), which would mix with new ones; "
            "choose another run.name, delete the folder, or resume with checkpoint.resume=auto"
        )
    if resume in ("never", "auto"):
        chosen = found[-1] if found else None
    else:
        chosen = find_checkpoint(Path(resume))
        newer = [path for path in found if path.name > chosen.name]
        if newer:
            raise ValueError(
                f"checkpoint.resume={resume} is step {int(chosen.name[5:])}, but {folder} holds later checkpoints up to "
                f"{newer[-1].name}, which would be overwritten; choose another run.name"
            )
    if chosen is None:
        return None
    saved = read_manifest(chosen).get("identity", {})
    for key, value in identity.items():
        if saved.get(key) != value:
            raise ValueError(
                f"checkpoint {chosen}: {key} was {saved.get(key)}, this run has {value}; use the same, or start anew under "
                "another run.name"
            )
    return chosen


def _write_config(folder: Path, text: str, resumed: Path | None) -> None:
    """Save the merged configuration; an earlier one that differs is kept beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    if path.is_file() and path.read_text() != text:
        until = f"{resumed.name}_" if resumed else ""
        path.rename(folder / f"config_until_{until}{time.strftime('%Y%m%d_%H%M%S')}.yaml")
    path.write_text(text)
