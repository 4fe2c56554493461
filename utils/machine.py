"""What this machine leaves to its processes, also in containers and jobs (control groups of Linux). Needs no torch."""

import atexit
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

_NO_LIMIT = 1 << 62
_GROUPS, _OWN_GROUPS, _OWN_WAITS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/thread-self/schedstat")
# how often an OpenMP thread looks whether the others have finished before it sleeps, below a millisecond. gcc's OpenMP
# takes 300,000: where other programs want the cores, its threads then spend whole time slices on waiting for one another
_SPINS = "20000"
_importing = False  # after begin_imports
_status: int | None = None  # of a program that leave() ends


def begin_imports() -> None:
    """Prepare this process, and those it starts, for importing torch.

    OpenMP threads will sleep soon when they wait. Until end_imports, Ctrl-C ends the program in silence, and no garbage is
    collected, which takes a third of its start, because each collection walks through all that was imported.
    """
    global _importing
    atexit.register(_end)  # before all others, so that it is called after them
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by `>&-`: the next file, perhaps a gallery, would get its number
            os.set_inheritable(number := os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(number, mode))  # noqa: SIM115 - until the end
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    if gc.isenabled():
        gc.disable()
        _importing = True
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_imports() -> None:
    """Take back what begin_imports did; what was imported stays out of collections of garbage."""
    global _importing
    if _importing:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()
        gc.enable()
        _importing = False


def leave(main: Callable[[], int]) -> NoReturn:
    """Run a program and end this process with its status, as sys.exit(main()) does, but sooner.

    Threads, functions of atexit that came after begin_imports, and the output are waited for. Python does not take apart what
    was imported, most of a second where that is torch: the system takes the memory back.
    """
    global _status
    try:
        _status = main()
    except SystemExit as ended:  # of argparse
        _status = ended.code if isinstance(ended.code, int) else None
        raise
    raise SystemExit(_status)


def _end() -> None:
    if _status is None:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # nobody reads any more, as with `| head`
        os._exit(128 + signal.SIGPIPE)
    except (OSError, ValueError, AttributeError):  # Python ends it, and says what is wrong
        return
    os._exit(_status)


def num_cores() -> int:
    """Return the cores that this process may use: those it may run on, or fewer if a control group allows less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder, is_second in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # ValueError: `max`, no limit
            files = ["cpu.max"] if is_second else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
            quota, period = map(int, " ".join((folder / file).read_text() for file in files).split())
            if quota > 0:  # -1: no limit
                cores = min(cores, quota // period)
    return max(1, cores)


def waited_for_core() -> tuple[float, float]:
    """Return the seconds that this thread has run, and those it could have run but another had the core; 0, 0 if unknown."""
    try:
        ran, waited, _ = map(int, _OWN_WAITS.read_text().split())
    except (OSError, ValueError):
        return 0.0, 0.0
    return ran / 1e9, waited / 1e9


def left_to_container() -> int:
    """Return the bytes of memory that the limits of control groups leave; 1 << 62 without a limit."""
    left = _NO_LIMIT
    for folder, is_second in _groups("memory"):
        limit, usage, reclaimable = (
            ("memory.max", "memory.current", "inactive_file")
            if is_second
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        with contextlib.suppress(OSError, ValueError):  # ValueError: `max`, no limit
            most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left = min(left, max(0, most - used + int(stat.get(reclaimable, 0))))
    return left


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the control groups that limit this process, and whether they are of version 2."""
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN_GROUPS.read_text().splitlines():
            number, controllers, name = line.split(":", 2)
            if number != "0" and controller not in controllers.split(","):
                continue
            base = _GROUPS if number == "0" else _GROUPS / controller
            folder = base / name.lstrip("/")
            yield folder, number == "0"
            while folder != base and base in folder.parents:  # a group above may have the limit
                folder = folder.parent  # in a container the path may be the host's and not exist
                yield folder, number == "0"
