"""A shim under the file operations of os: the nth of them fails, kills the process, or writes less than it was given."""

import os
import pathlib
import signal
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deploy.journal import Journal

OPERATIONS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")


class Disk:
    """What was done so far, and what goes wrong when."""

    def __init__(self, fail_at: int = -1, error: int = 0, short: bool = False, before: Callable[[str], Any] | None = None):
        self.fail_at, self.error, self.short, self.before = fail_at, error, short, before
        self.done: list[str] = []
        self._lock = threading.Lock()

    def wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                number = len(self.done)
                self.done.append(name)
            if self.before is not None:
                self.before(name)
            if number == self.fail_at:
                if self.error == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                named = () if isinstance(args[0], int) else (str(args[0]),)  # those of open files have no name
                raise OSError(self.error, os.strerror(self.error), *named)
            if self.short and name == "write":
                return original(args[0], args[1][: max(1, len(args[1]) // 3)])
            return original(*args, **kwargs)

        return operation


@contextmanager
def faulty(disk: Disk) -> Iterator[Disk]:
    """Put the shim in place. disk.error = 0 means SIGKILL."""
    accessor = getattr(pathlib, "_normal_accessor", None)  # Python 3.10's pathlib keeps its own references to os
    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            shim = disk.wrap(name, getattr(os, name))
            patch.setattr(os, name, shim)
            if accessor is not None and name not in ("open", "write", "fsync"):
                patch.setattr(accessor, name, shim)
        yield disk


def interrupted(patch: pytest.MonkeyPatch, moments: Container[int]) -> list[dict]:
    """Interrupt a run after so many records of its journal are added; return them, also those of the runs that follow."""
    original, records = Journal.add, []

    def add(journal: Journal, record: dict, *data: bytes) -> None:
        original(journal, record, *data)
        records.append(record)
        if len(records) in moments:
            raise KeyboardInterrupt

    patch.setattr(Journal, "add", add)
    return records
