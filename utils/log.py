"""The log of a run: a progress bar on a terminal, plain lines in a file, metrics.jsonl and TensorBoard. Only rank 0 logs."""

import contextlib
import json
import math
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import cv2
import numpy as np
import torch
from tqdm import tqdm

from .cli import progress
from .files import MAX_TEXT, lines_of, open_own, read_bytes, write_file
from .text import printable


def _rate(value: float) -> str:
    return f"{value:.0f} img/s" if value >= 100 else f"{value:.3g} img/s"


# the format of each training metric, with its unit
FORMS: dict[str, Callable[[float], str]] = {
    "loss": "loss {:.3f}".format,
    "lr": "lr {:.3g}".format,
    "lr_centres": "lr of centres {:.3g}".format,
    # of fp16 alone: any other step with such a gradient ends the run
    "grad_norm": lambda norm: f"grad {norm:.3g}" if math.isfinite(norm) else "overflow, step skipped",
    "positive_cosine": "cos+ {:.3f}".format,
    "images_per_second": _rate,
    "data_wait": lambda share: f"data {100 * share:.1f} %",
    "memory_gib": "{:.2f} GiB".format,
    "loss_scale": "scale {:.0f}".format,
}


def _shown(name: str, value: float) -> str:
    form = next(form for form in FORMS if name == form or (name.startswith(f"{form}_") and name not in FORMS))
    return f"{name[len(form) + 1 :]}: {FORMS[form](value)}" if name != form else FORMS[form](value)


_ON_BAR = ("lr", "images_per_second", "data_wait")
TRAINING = "train"  # the kind of training metrics in metrics.jsonl and TensorBoard; other kinds are names of sets
_KEPT = "\n\t"  # control characters that are not escaped, because tables have several lines
_BAR = "{percentage:3.0f}% |{bar}| step {n_fmt}/{total_fmt}{postfix}"


class RunLog(contextlib.AbstractContextManager["RunLog"]):
    """One run's log; on every rank but 0 all methods do nothing.

    On a terminal the progress bar shows the current metrics and events appear above it; otherwise each line is printed. The
    file train.log has every line in both cases. If a line cannot be written, to a full disk or a closed pipe, one warning goes
    to stderr and the run continues: its checkpoints are worth more than its log.

    Args:
        folder: of the run; train.log, metrics.jsonl and tensorboard/ are continued there.
        start_step, total_steps: optimizer steps, for the bar and the time left. Metrics that an interrupted run wrote after
            start_step are removed from metrics.jsonl and TensorBoard, because those steps are trained again.
        epochs_per_step: share of an epoch that is one optimizer step.
    """

    def __init__(self, folder: Path, rank: int, start_step: int, total_steps: int, epochs_per_step: float = 0.0) -> None:
        self.active = rank == 0
        self.total_steps, self.epochs_per_step = total_steps, epochs_per_step
        self.bar: tqdm | None = None
        self._numbers_on_bar = ""  # those of the last log line
        self.board: Any = None
        self._failed: set[str] = set()  # what could not be written
        if not self.active:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 needs it

        self.file = open(folder / "train.log", "a", 1, "utf-8", "backslashreplace", opener=open_own)  # noqa: SIM115
        with self.tolerant("metrics.jsonl, to remove what is trained again,"):
            _keep_steps(folder / "metrics.jsonl", start_step)
        self.metrics_file = open(folder / "metrics.jsonl", "a", 1, "utf-8", opener=open_own)  # noqa: SIM115
        with self.tolerant("TensorBoard"):
            _end_files_of_tensorboard(folder / "tensorboard")
            # hides all numbers from this step on
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1 if start_step else 0)
        self._before = threading.excepthook
        threading.excepthook = self._on_thread_error
        if sys.stderr.isatty():
            self.bar = progress([], total_steps, None, "step", initial=start_step, dynamic_ncols=True, bar_format=_BAR)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.active:
            return
        if error is not None:
            self._line(f"stopped by {type(error).__name__}: {error}")
        if self.bar is not None:
            self.bar.close()
        self._on_board(lambda board: board.close())
        for file in (self.file, self.metrics_file):
            with self.tolerant(file.name):
                file.close()
        threading.excepthook = self._before

    def _on_thread_error(self, args: threading.ExceptHookArgs) -> None:
        """Suppress an OSError traceback of TensorBoard's writer thread: the next call of the board raises the same error."""
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
            self._before(args)

    @contextlib.contextmanager
    def tolerant(self, what: str, *others: type[Exception]) -> Iterator[None]:
        """Suppress an OSError of the block, or one of `others`; warn on stderr once per `what`."""
        suppressed: tuple[type[Exception], ...] = (OSError, *others)
        try:
            yield
        except suppressed as error:
            if what not in self._failed:
                self._failed.add(what)
                with contextlib.suppress(OSError):
                    print(f"WARNING: {what} cannot be written ({error}); training goes on", file=sys.stderr, flush=True)

    def _line(self, text: str) -> None:
        with self.tolerant(self.file.name):
            self.file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(text, keep=_KEPT)}\n")

    def _show(self, text: str) -> None:
        with self.tolerant("the output"):
            tqdm.write(text) if self.bar is not None else print(text, flush=True)

    def _on_board(self, write: Callable[[Any], object]) -> None:
        board, self.board = self.board, None  # stays None after an error: its thread is gone, and later calls would fail too
        if board is not None:
            with self.tolerant("TensorBoard, until the next start,"):
                write(board)
                self.board = board

    def info(self, text: str) -> None:
        """Show an event on the terminal and in the file."""
        if not self.active:
            return
        self._line(text)
        self._show(text)

    def warn(self, text: str) -> None:
        """Log a warning."""
        self.info(f"WARNING: {text}")

    def advance(self, step: int, loss: float) -> None:
        """Move the bar to `step` finished optimizer steps."""
        if self.bar is not None:
            self.bar.set_postfix_str(f"{self._epoch(step)}  loss {loss:.3f}{self._numbers_on_bar}", refresh=False)
            self.bar.update(step - self.bar.n)

    def train(self, step: int, numbers: dict[str, float], eta_seconds: float) -> None:
        """Write the training metrics after `step` optimizer steps: in the log, and on the terminal or its progress bar.

        Args:
            numbers: by the names in FORMS; loss and positive_cosine also with a name: loss_asia.
        """
        if not self.active:
            return
        shown = {name: _shown(name, value) for name, value in numbers.items()}
        eta = f"eta {tqdm.format_interval(round(eta_seconds)).removeprefix('0')}"
        line = "  ".join([f"step {step}/{self.total_steps}", self._epoch(step), *shown.values(), eta])
        self._line(line)
        if self.bar is None:
            self._show(line)
        else:
            self._numbers_on_bar = "".join(f"  {shown[name]}" for name in _ON_BAR if name in shown) + f"  {eta}"
            self.advance(step, numbers["loss"])
        self.record(step, TRAINING, {"epoch": step * self.epochs_per_step, **numbers})

    def _epoch(self, step: int) -> str:
        total = self.total_steps * self.epochs_per_step
        return f"epoch {step * self.epochs_per_step:.2f}/{total:.4g}"

    def record(self, step: int, kind: str, numbers: dict[str, Any]) -> None:
        """Append numbers to metrics.jsonl and TensorBoard, as kind/name."""
        if not self.active:
            return
        # JSON has no nan or inf
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}
        with self.tolerant(self.metrics_file.name):
            self.metrics_file.write(json.dumps({"step": step, "kind": kind, **clean}) + "\n")

        def write(board: Any) -> None:
            for name, value in numbers.items():
                if isinstance(value, (int, float)):
                    board.add_scalar(f"{kind}/{name}", value, step)

        self._on_board(write)

    def picture(self, step: int, name: str, png: bytes) -> None:
        """Show a PNG in TensorBoard."""
        if self.board is not None:
            pixels = cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR_RGB)
            self._on_board(lambda board: board.add_image(name, pixels, step, dataformats="HWC"))


class Speed:
    """Images per second and the time left. `pause` excludes evaluation and saving, so only training counts."""

    def __init__(self, images_per_step: int) -> None:
        self.images_per_step = images_per_step
        self.started = self.total_started = time.perf_counter()
        self.steps = self.total_steps = 0
        self.waited = 0.0

    def count(self) -> None:
        """Count an optimizer step."""
        self.steps += 1
        self.total_steps += 1

    def pause(self, seconds: float) -> None:
        """Exclude seconds that were not training."""
        self.started += seconds
        self.total_started += seconds

    def lap(self, waited: float) -> tuple[float, float]:
        """Return images/s and the share of time waited for data since the last lap; `waited` is in seconds since the start."""
        now = time.perf_counter()
        elapsed = max(now - self.started, 1e-9)
        rate, share = self.images_per_step * self.steps / elapsed, (waited - self.waited) / elapsed
        self.started, self.steps, self.waited = now, 0, waited
        return rate, share

    def eta(self, steps_left: int) -> float:
        """Return the seconds that steps_left steps will take at the mean rate so far."""
        return steps_left * (time.perf_counter() - self.total_started) / max(self.total_steps, 1)


def _end_files_of_tensorboard(folder: Path) -> None:
    """Make the next file the last one: TensorBoard reads files in the order of their names, which begin with the second."""
    last = f"events.out.tfevents.{int(time.time()) - 1:010d}."
    later = sorted(path for path in folder.glob("events.out.tfevents.*") if path.name > f"{last}~")
    for number, path in enumerate(later):  # of this second, or the clock was turned back; "~" comes after all other names
        rest = re.sub(r"^(~[0-9]+[.])+", "", path.name.split(".", 4)[-1])
        path.rename(path.with_name(f"{last}~{number:03d}.{rest}"))


def _keep_steps(path: Path, last: int) -> None:
    """Remove records after optimizer step `last`, and a truncated line, from metrics.jsonl; 0 removes all."""
    if not path.is_file():
        return
    lines = list(lines_of(read_bytes(path, MAX_TEXT)))
    kept = [line for line in lines if last and (step := _step_of(line)) is not None and step <= last]
    if len(kept) < len(lines):
        write_file(path, b"".join(line.rstrip() + b"\n" for line in kept))


def _step_of(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process in GiB: GPU memory on CUDA, resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
