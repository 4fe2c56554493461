"""Runs cases of the fuzzer, each with files and a command, in a child process with limits, and judges them.

A case is good if the program returned 0, or returned 1 and printed exactly one line `error: ...`, as the last line of stderr.
Everything else is a find: a traceback, a death by signal, more than MAX_SECONDS, memory beyond the input's bound, the marker
file that hostile payloads create, an event of Python's audit hooks that no input may cause, or a file outside the folder of the
case.
"""

import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from .fuzz_files import Case, Files, Place, lay_out

MAX_SECONDS = 20  # for one case, on a busy machine
_MEMORY = 2 << 30  # bytes of address space beyond the fuzzer's own
_FILE = 1 << 28  # bytes of a file that a case may write
_MMAP_THRESHOLD, _BLOCK = -3, 1 << 20  # of malloc.h; bytes
_HANDLES = 256  # beyond those that the fuzzer itself has open
_MAINS = {"eval": "eval.__main__"}
_LINE = re.compile(r'File "([^"]+)", line (\d+)')
# events that no file may ever cause
_FORBIDDEN = (
    "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "socket.connect", "pty.spawn",
)  # fmt: skip
_CHANGES = ("os.remove", "os.rmdir", "os.rename", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


Program = Callable[[list[str]], int]


class Outcome(NamedTuple):
    """How a case ended."""

    kind: str  # "read", "refused", or the fault in a few words, equal for equal faults
    detail: str = ""  # the output of the program
    seconds: float = 0.0
    growth: float = 0.0  # of resident memory, MiB

    @property
    def is_find(self) -> bool:
        """Whether the case was neither read nor refused."""
        return self.kind not in ("read", "refused")


def run_cases(place: Place, cases: Sequence[Callable[[], Case]], sound: Files, memory: float) -> Iterator[Outcome]:
    """Run cases in a child that makes them, beside the sound files, in `memory` MiB more; after each death in a new child."""
    done = 0
    while done < len(cases):
        child, pipe = _fork(place, cases[done:], sound)
        try:
            for line in _answers(pipe):
                yield _judge(line, memory)
                done += 1
        finally:  # also if the caller stops iterating
            ended = _end(child, pipe)
        if done < len(cases):
            yield _judge({**ended, **place.left()}, memory)
            done += 1


def _fork(place: Place, cases: Sequence[Callable[[], Case]], sound: Files) -> tuple[int, int]:
    """Start a child that runs the cases and writes a line of JSON about each; return its process ID and the pipe."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # so that the child's collections do not copy the parent's pages
    child = os.fork()
    if child:
        os.close(writing)
        gc.unfreeze()
        return child, reading
    try:
        os.close(reading)
        os.setsid()
        _child(place, cases, sound, writing)
    except BaseException:
        os.write(writing, json.dumps({"kind": "fuzzer", "said": traceback.format_exc()}).encode() + b"\n")
    finally:
        os._exit(0)


def _answers(pipe: int) -> Iterator[dict[str, Any]]:
    """Yield the child's answers until it ends, or is silent for too long."""
    rest = b""
    while select.select([pipe], [], [], MAX_SECONDS)[0]:
        data = os.read(pipe, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from map(json.loads, lines)


def _end(child: int, pipe: int) -> dict[str, Any]:
    """End the child and its descendants; return how it ended, as the answer for the case that it was running."""
    os.close(pipe)
    handle = os.pidfd_open(child)
    alive = not select.select([handle], [], [], 0.5)[0]
    os.close(handle)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:  # before its setsid
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if alive:
        return {"kind": "hang", "seconds": MAX_SECONDS}
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    name = signal.Signals(number).name if number else f"exit status {os.waitstatus_to_exitcode(status)} in the middle"
    return {"kind": "hang" if name == "SIGXCPU" else f"died: {name}"}


def _child(place: Place, cases: Sequence[Callable[[], Case]], sound: Files, pipe: int) -> None:
    """Run the cases. This process is a fork of the fuzzer and shares its memory until it writes to it."""
    tqdm._instances.clear()  # otherwise the fuzzer's bar would shift those of the programs
    watch = _Watch(place.work)
    sys.addaudithook(watch)
    handles = _HANDLES + max(map(int, os.listdir("/proc/self/fd")))
    for number, limit in ((resource.RLIMIT_FSIZE, _FILE), (resource.RLIMIT_NOFILE, handles), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(number, (limit, limit))
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + _MEMORY,) * 2)
    os.environ["TMPDIR"] = tempfile.tempdir = str(place.work)
    faulthandler.enable(2)  # prints a traceback if a signal kills the case
    for make in cases:
        case = make()
        lay_out(place.work, sound, case.files)
        os.chdir(place.work)
        handle = os.open(place.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.close(handle)
        sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), write_through=True) for fd in (1, 2))
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + MAX_SECONDS + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        _give_back_free_memory()
        with open("/proc/self/clear_refs", "w") as file:  # resets the peak of resident memory
            file.write("5")
        before, begun = _status("VmHWM"), time.monotonic()
        kind = _run(case.command, watch)
        answer = {"kind": kind, "seconds": time.monotonic() - begun, "growth": (_status("VmHWM") - before) / 2**20}
        os.chdir(place.root)
        answer |= place.left()
        os.write(pipe, json.dumps(answer).encode() + b"\n")


def _give_back_free_memory() -> None:
    """Leave no free memory in this process that is resident, because a case that reuses it would not seem to grow.

    malloc_trim returns what is free to the system, but for the end of an arena that is not the first, or whose memory somebody
    else continues. A process may keep much there (utils/allocator.py). That is allocated here, and neither used nor freed.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):  # glibc has it, musl has not
        return
    libc.mallopt(_MMAP_THRESHOLD, _BLOCK)  # with nothing free, a block comes from the system
    libc.malloc_trim(0)
    before = _status("VmSize")
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    while libc.malloc(_BLOCK) and _status("VmSize") == before:
        pass


def _run(command: list[str], watch: "_Watch") -> str:
    """Run a program in this process; return "status N", or the way in which it failed."""
    program = find_program(_MAINS.get(command[0], command[0]))
    watch.events.clear()
    watch.on = True
    try:
        kind = f"status {program(command[1:])}"
    except SystemExit as end:
        kind = f"usage {end.code}"
    except BaseException as error:  # a find
        traceback.print_exc()
        kind = f"traceback: {type(error).__name__}"
    finally:
        watch.on = False
    return f"event: {watch.events[0]}" if watch.events else kind


def find_program(name: str) -> Program:
    """Return the function of a command: main for `MODULE`, or the named function for `MODULE:function`."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function or "main")


class _Watch:
    """An audit hook that records events that no input may cause."""

    def __init__(self, work: Path) -> None:
        self.work, self.on = os.path.realpath(work), False
        self.events: list[str] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event.startswith(_FORBIDDEN) and not (event == "socket.connect" and args[1][0] == "127.0.0.1"):  # the page
            self.events.append(event)
        elif event == "open" and isinstance(args[2], int) and args[2] & _WRITES:
            self._outside(event, args[:1])
        elif event in _CHANGES:
            self._outside(
                event, args[:2] if event in ("os.rename", "os.link") else args[1:2] if event == "os.symlink" else args[:1]
            )
        elif event == "ctypes.dlopen" and isinstance(args[0], str) and self._is_inside(args[0]):
            self.events.append("a library of the case was loaded")

    def _outside(self, event: str, paths: Sequence[Any]) -> None:
        for path in paths:
            if isinstance(path, (str, bytes)) and not self._is_inside(path) and os.fsdecode(path) != os.devnull:
                self.events.append(f"{event} outside")

    def _is_inside(self, path: str | bytes) -> bool:
        on, self.on = self.on, False
        try:
            parent, name = os.path.split(os.path.abspath(os.fsdecode(path)))
            return os.path.join(os.path.realpath(parent), name).startswith(self.work)
        except ValueError:  # a zero byte, which the system rejects anyway
            return True
        finally:
            self.on = on


def _judge(answer: dict[str, Any], memory: float) -> Outcome:
    """Return the outcome of a case from the child's answer."""
    kind, said, fault = str(answer["kind"]), str(answer.get("said", "")), answer.get("fault", "")
    lines = [line for line in said.replace("\r", "\n").split("\n") if line.strip()]
    errors = sum(line.startswith("error: ") for line in lines)
    if fault:
        kind = fault
    elif "Traceback (most recent call last)" in said:
        kind = f"traceback: {_last_word(lines)}{_where(said)}"
    elif "\x1b" in said:
        kind = "escape: a terminal's control characters in what is said"
    elif kind in ("status 0", "status 3"):  # 3: `face verify` says that these are different people
        kind = "silent: an error line, but exit status 0" if errors else "read"
    elif kind == "status 1":
        is_one_line = errors == 1 and lines[-1].startswith("error: ")
        kind = (
            "refused" if is_one_line else f"lines: {errors} error lines, the last line {lines[-1][:60] if lines else 'none'!r}"
        )
    elif kind == "usage 2" and lines and ": error: " in lines[-1]:
        kind = "refused"
    growth, seconds = float(answer.get("growth", 0.0)), float(answer.get("seconds", 0.0))
    if kind in ("read", "refused") and growth > memory:
        kind = "large: resident memory"
    if kind in ("read", "refused") and seconds > MAX_SECONDS:
        kind = "hang"
    return Outcome(kind, said, seconds, growth)


def _last_word(lines: Sequence[str]) -> str:
    """Return the exception that a traceback ends with."""
    named = [
        line.split(":")[0] for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning)?(:|$)", line)
    ]
    return named[-1] if named else "?"


def _where(said: str) -> str:
    """Return the innermost line of a traceback that belongs to this project."""
    root = str(Path(__file__).parents[2])
    own = [f" at {path[len(root) + 1 :]}:{line}" for path, line in _LINE.findall(said) if path.startswith(root)]
    return own[-1] if own else ""


def _status(name: str) -> int:
    """Return a number of /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{name}:")) << 10
