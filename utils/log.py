"""What a run says: a progress bar on a terminal, plain lines in a file, metrics.jsonl and TensorBoard. Silent off rank 0."""

import contextlib
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import cv2
import numpy as np
import torch
from tqdm import tqdm


class RunLog:
    """One run's log; on every rank but 0 all methods do nothing.

    On a terminal the progress bar shows the running numbers and events appear above it; otherwise each line is printed. The
    file train.log holds every line either way. What cannot be written, on a full disk or to a pipe that ended, is said once on
    stderr and never ends the run: its checkpoints are worth more than its log.

    Args:
        folder: of the run; train.log, metrics.jsonl and tensorboard/ are continued there.
        start_step, total_steps: optimizer steps, for the bar and the time left.
    """

    def __init__(self, folder: Path, rank: int, start_step: int, total_steps: int) -> None:
        self.active = rank == 0
        self.total_steps = total_steps
        self.bar: tqdm | None = None
        self.board: Any = None
        self._failed: set[str] = set()  # what could not be written
        if not self.active:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 needs it

        self.file = (folder / "train.log").open("a", encoding="utf-8", buffering=1)
        self.metrics_file = (folder / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        with self.tolerant("TensorBoard"):
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step)
        if sys.stderr.isatty():
            self.bar = tqdm(total=total_steps, initial=start_step, unit="step", dynamic_ncols=True)

    def __enter__(self) -> "RunLog":
        return self

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

    @contextlib.contextmanager
    def tolerant(self, what: str) -> Iterator[None]:
        """Pass over an OSError of the block, after a word on stderr if it is the first of `what`."""
        try:
            yield
        except OSError as error:
            if what not in self._failed:
                self._failed.add(what)
                with contextlib.suppress(OSError):
                    print(f"WARNING: {what} cannot be written ({error}); training goes on", file=sys.stderr, flush=True)

    def _line(self, text: str) -> None:
        with self.tolerant(self.file.name):
            self.file.write(f"{_now()} {text}\n")

    def _show(self, text: str) -> None:
        with self.tolerant("the output"):
            tqdm.write(text) if self.bar is not None else print(text, flush=True)

    def _on_board(self, write: Callable[[Any], object]) -> None:
        board, self.board = self.board, None  # once it has failed its thread is gone, and every later call would fail
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
        self.info(f"WARNING: {text}")

    def advance(self, step: int, loss: float) -> None:
        """Move the bar to `step` finished optimizer steps."""
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            self.bar.update(step - self.bar.n)

    def train(self, step: int, numbers: dict[str, float], eta_seconds: float) -> None:
        """Write the numbers of training after `step` optimizer steps."""
        if not self.active:
            return
        shown = "  ".join(f"{name} {value:.5g}" for name, value in numbers.items())
        line = f"step {step}/{self.total_steps}  {shown}  eta {format_seconds(eta_seconds)}"
        self._line(line)
        if self.bar is None:
            self._show(line)
        self.record(step, "train", numbers)

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
    """Images per second and the time left, over training alone: evaluation and saving are taken out by `pause`."""

    def __init__(self, images_per_step: int) -> None:
        self.images_per_step = images_per_step
        self.started = self.total_started = time.perf_counter()
        self.steps = self.total_steps = 0
        self.waited = 0.0

    def count(self) -> None:
        self.steps += 1
        self.total_steps += 1

    def pause(self, seconds: float) -> None:
        """Leave out seconds that were not training."""
        self.started += seconds
        self.total_started += seconds

    def lap(self, waited: float) -> tuple[float, float]:
        """Return images per second, and the share of the time that went into waiting for data, since the last lap.

        Args:
            waited: seconds waited for data since the start.
        """
        now = time.perf_counter()
        elapsed = max(now - self.started, 1e-9)
        rate, share = self.images_per_step * self.steps / elapsed, (waited - self.waited) / elapsed
        self.started, self.steps, self.waited = now, 0, waited
        return rate, share

    def eta(self, steps_left: int) -> float:
        """Return the seconds that steps_left steps will take at the mean rate so far."""
        return steps_left * (time.perf_counter() - self.total_started) / max(self.total_steps, 1)


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory this process has used so far: of the GPU on CUDA, resident on the CPU. In GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def format_seconds(seconds: float) -> str:
    """Return 75 as 1:15 and 3675 as 1:01:15."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
