"""Starts the torturer's training runs quickly: it imports everything once, and forks for each run.

The fork runs the real scripts/launch/torchrun.py with the real agent of torch, and the real train.py. Only one thing differs
when a user starts a run: a worker is a new Python process that imports torch, and here a fork made before the agent starts.

Orders are lines of JSON on stdin: {"program", "arguments", "processes", "script", "environment", "stderr", "statuses"} starts a
run, and the answer is {"pids": [the started process, its workers by rank]}. The answer to {"wait": pid} is
{"status": null while it lives}. The process ends when its stdin is closed.
"""

import contextlib
import importlib
import io
import json
import os
import runpy
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_TORCHRUN = str(_ROOT / "scripts" / "launch" / "torchrun.py")
_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"  # where torchrun starts workers
# what training imports only while it runs
_LATE = ("torch.utils.tensorboard", "matplotlib.figure", "matplotlib.backends.backend_agg", "simplejpeg", "PIL.JpegImagePlugin")
_ENDED: dict[int, int] = {}  # exit statuses of the started processes


def serve() -> None:
    """Import everything, then follow the orders on stdin."""
    sys.path[0] = str(_ROOT)
    runpy.run_path(str(_ROOT / "train.py"), run_name="imported")
    for name in _LATE:
        importlib.import_module(name)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        runpy.run_path(_TORCHRUN, run_name="imported")["main"](["--help"])  # imports everything that torchrun imports
    if threading.active_count() > 1:
        raise SystemExit(f"error: a fork needs a single thread, there are {threading.enumerate()}")
    print(json.dumps({"ready": True}), flush=True)
    while line := sys.stdin.readline():
        order = json.loads(line)
        if "wait" in order:
            print(json.dumps({"status": _status_of(order["wait"])}), flush=True)
        elif os.fork() == 0:
            _become(order)


def _status_of(pid: int) -> int | None:
    if pid not in _ENDED:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return None
        _ENDED[pid] = os.waitstatus_to_exitcode(status)
    return _ENDED[pid]


def _become(order: dict[str, Any]) -> None:
    """Run an order in this fork, as if it had been started by hand; ends the process."""
    answer = os.dup(1)
    nowhere, said = os.open(os.devnull, os.O_RDWR), os.open(order["stderr"], os.O_WRONLY)
    for place, handle in ((0, nowhere), (1, nowhere), (2, said)):
        os.dup2(handle, place)
    os.close(nowhere)
    os.close(said)
    for name, place in (("stdout", 1), ("stderr", 2)):  # the old objects are set up for another kind of file
        setattr(sys, name, open(place, "w", buffering=1, errors="backslashreplace", closefd=False))  # noqa: SIM115
    os.environ.update(order["environment"])
    workers = _Workers(order["processes"] if order["program"] == _TORCHRUN else 0, order["statuses"], answer)
    os.write(answer, (json.dumps({"pids": [os.getpid(), *workers.pids]}) + "\n").encode())
    os.close(answer)
    whole = subprocess.Popen

    def start(args: Any, **kwargs: Any) -> Any:
        return _Worker(workers, args, kwargs["env"]) if order["script"] in args else whole(args, **kwargs)

    sys.modules[_HANDLER].Popen = start  # type: ignore[attr-defined]
    _run(order["program"], order["arguments"])


def _run(program: str, arguments: list[str]) -> None:
    """Run a program file like Python; ends the process."""
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
    raise SystemExit(0)


class _Workers:
    """Forks of this process that wait for their command line. They end when this process does."""

    def __init__(self, count: int, statuses: str, answer: int) -> None:
        self.statuses = statuses
        self.pids: list[int] = []
        self._ends: list[int] = []
        for _ in range(count):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                for handle in (answer, write, *self._ends):
                    os.close(handle)
                _wait_for_orders(read)
            os.close(read)
            self.pids.append(pid)
            self._ends.append(write)
        self._given = 0

    def give(self, args: list[str], environment: dict[str, str]) -> int:
        """Send a command line to the next worker; return its process ID."""
        number, self._given = self._given, self._given + 1
        with contextlib.suppress(BrokenPipeError), os.fdopen(self._ends[number], "w") as pipe:  # it may be dead already
            pipe.write(json.dumps({"args": args, "environment": environment}) + "\n")
        return self.pids[number]


def _wait_for_orders(handle: int) -> None:
    os.setsid()
    with os.fdopen(handle) as pipe:
        line = pipe.readline()
    if not line:
        os._exit(0)  # no longer needed
    order = json.loads(line)
    os.environ.clear()
    os.environ.update(order["environment"])
    program = next(place for place, word in enumerate(order["args"]) if word.endswith(".py"))
    _run(order["args"][program], order["args"][program + 1 :])


class _Worker:
    """The methods of subprocess.Popen that torchrun uses."""

    def __init__(self, workers: _Workers, args: list[str], environment: dict[str, str]) -> None:
        self.args, self._statuses = args, workers.statuses
        self.returncode: int | None = None
        self.pid = workers.give(list(args), dict(environment))

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
                with open(self._statuses, "a") as file:
                    file.write(f"{self.returncode}\n")
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
