"""What the command lines share: a parser whose --help shows docstring and defaults, options, a progress bar, an early end."""

import argparse
import contextlib
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from .machine import num_cores
from .text import one_line

if TYPE_CHECKING:  # `face doctor` runs where packages are missing
    from tqdm import tqdm

Number = TypeVar("Number", int, float)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description, and adds an option's default if its help does not state it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False or action.default in ("", [], argparse.SUPPRESS)
        if not action.help or silent or action.nargs == 0 or "default" in action.help:
            return action.help
        value = action.default
        shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        return f"{action.help} (default: {shown.replace('%', '%%')})"


class Parser(argparse.ArgumentParser):
    """ArgumentParser with the help format of all programs here, also for its subcommands."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Help)
        super().__init__(*args, **kwargs)


def make_parser(command: str, docstring: str | None) -> Parser:
    """Return the parser of a program: of a command such as face data align, and its module's docstring, as --help shows it."""
    return Parser(prog=command, description=docstring)


Advance = Callable[[int], object]  # of a bar: takes the number of items done since its last call; `int` shows nothing


def progress(
    items: Iterable, total: int | None, what: str | None, unit: str, delay: float = 0.0, shown: bool = True, **more: Any
) -> "tqdm":
    """Return the items under a bar of tqdm, shown after a delay, which writes fewer lines if stderr is not a terminal."""
    from tqdm import tqdm

    if tqdm.monitor_interval:
        tqdm.monitor_interval = 0  # no thread, which miniters=1 makes superfluous
        tqdm.set_lock(threading.RLock())  # tqdm's own is shared by processes; Python 3.14 starts one to watch over it
    more |= {"delay": delay, "miniters": 1, "mininterval": 0.1 if os.isatty(2) else 5.0, "disable": not shown}
    # position: no cursor is moved for one in another
    return tqdm(items, total=total, desc=what, unit=unit, unit_scale=unit == "B", position=0, **more)


def warn(*lines: str) -> None:
    """Print warnings to stderr, each as one line."""
    for line in lines:
        print(f"warning: {one_line(line)}", file=sys.stderr)


def leave_closed_output(error: BrokenPipeError) -> int:
    """Return the exit status of a program whose output nobody reads any more, as with `| head`; what it still holds is dropped.

    Raises:
        BrokenPipeError: the error itself, where it is that of another pipe.
    """
    poll = select.poll()
    poll.register(1, 0)
    if not poll.poll(0):
        raise error
    drop_output()
    return 128 + signal.SIGPIPE  # as shells give it


def drop_output() -> None:
    """Write what stdout holds; if it takes no more, let Python write it to nowhere when the program ends."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def int_in_range(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers from `low` to `high`, for argparse's `type`."""
    if high is None:
        return _in_range(int, low, math.inf, f"a whole number of at least {low}")
    return _in_range(int, low, high, f"a whole number from {low} to {high}")


def number_in_range(low: float, high: float = math.inf, what: str = "a number") -> Callable[[str], float]:
    """Return a parser of finite numbers from `low` to `high`, for argparse's `type`."""
    return _in_range(float, low, high, f"{what} from {low:g} {'on' if high == math.inf else f'to {high:g}'}")


def _in_range(read: Callable[[str], Number], low: float, high: float, rule: str) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        with contextlib.suppress(ValueError):
            value = read(text)
            if low <= value <= high and value < math.inf:
                return value
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text}")

    return parse


COSINE, SHARE = number_in_range(-1, 1, "a cosine"), number_in_range(0, 1)
RATE = number_in_range(1e-12, 0.999, "a rate such as 1e-3")


def rate_text(text: str) -> str:
    """Return the text of a rate as it is, for argparse's `type`; results have it as a key."""
    RATE(text)
    return text


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Add --threads, the threads that read and decode."""
    parser.add_argument("--threads", type=int_in_range(1, 1024), default=num_cores(), help="that decode (default: one a core)")
