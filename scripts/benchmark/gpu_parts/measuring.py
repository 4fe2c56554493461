"""What the parts share: times, peak memory, what the profiler saw, and cases that may fail alone."""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/gpu_parts/measuring.py is no program; python -m scripts lists them")

import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from partial_fc.centres.store import CentreStore
from scripts.benchmark.device_rates import synchronise
from scripts.benchmark.head import peak_bytes

Row = dict[str, Any]
_MEASURED = "measured"  # the name of the work among the profiler's records
_BLOCK = 1 << 18  # rows of centres that are drawn at once


class Context(NamedTuple):
    """Where and how a part measures."""

    device: torch.device
    quick: bool
    folder: Path  # for files, removed afterwards


class Interval(NamedTuple):
    """One record of the profiler, in microseconds from the begin of the work."""

    lane: str  # "host", "host, other threads", or "stream N"
    kind: str  # the profiler's: cpu_op, cuda_runtime, kernel, gpu_memcpy, ...
    name: str
    start: float
    end: float


def times_of(device: torch.device, work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the medians of milliseconds until the work is done, and until the host is free again."""
    done, free = [], []
    for _ in range(repeats):
        synchronise(device)
        begun = time.perf_counter()
        work()
        free.append(1e3 * (time.perf_counter() - begun))
        synchronise(device)
        done.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(done), statistics.median(free)


def event_ms(work: Callable[[], object], repeats: int, join: Callable[[], object] = lambda: None) -> float:
    """Return the milliseconds of one of several calls in a row between two CUDA events.

    Args:
        join: makes the current stream wait for the streams that the work uses beside it.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        work()
    join()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def peak_from_here(device: torch.device) -> Callable[[], float]:
    """Return a function that returns the peak memory since now, in bytes: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # Linux: the peak of resident memory begins anew
            Path("/proc/self/clear_refs").write_text("5")
    return lambda: peak_bytes(device)


def record(device: torch.device, work: Callable[[], object]) -> list[Interval]:
    """Run the work under torch's profiler; return what host and streams did, in order of time."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    synchronise(device)
    with profile(activities=activities) as found:
        with record_function(_MEASURED):
            work()
        synchronise(device)
    with tempfile.TemporaryDirectory() as folder:
        found.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    events = [event for event in events if event.get("ph") == "X" and event.get("cat")]
    whole = next(event for event in events if event["name"] == _MEASURED and event["cat"] == "user_annotation")
    kept = []
    for event in events:
        on_device = event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
        begun = float(event["ts"]) - float(whole["ts"])
        if not on_device and (event["cat"] not in ("cpu_op", "cuda_runtime", "cuda_driver") or begun > float(whole["dur"])):
            continue
        host = "host" if event["tid"] == whole["tid"] else "host, other threads"
        lane = f"stream {event['args'].get('stream', '?')}" if on_device else host
        kept.append(Interval(lane, event["cat"], event["name"], begun, begun + float(event["dur"])))
    return sorted(kept, key=lambda interval: (interval.start, -interval.end))


def outermost(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals (in order of time) that lie in no other one of their lane."""
    kept: list[Interval] = []
    ends: dict[str, float] = {}
    for interval in intervals:
        if interval.end > ends.get(interval.lane, -1.0):
            ends[interval.lane] = interval.end
            kept.append(interval)
    return kept


def device_figures(intervals: Iterable[Interval], steps: int = 1) -> Row:
    """Return per step: launched kernels, milliseconds with work on a stream and with none between, waits of the host."""
    intervals = list(intervals)
    kernels = [interval for interval in intervals if interval.lane.startswith("stream")]
    busy, end = 0.0, kernels[0].start if kernels else 0.0
    for interval in kernels:
        busy += max(0.0, interval.end - max(interval.start, end))
        end = max(end, interval.end)
    span = end - kernels[0].start if kernels else 0.0
    waits = [i.name for i in intervals if i.lane == "host" and i.kind.startswith("cuda_") and "Synchronize" in i.name]
    return {
        "launches": sum(interval.kind == "kernel" for interval in kernels) / steps,
        "gpu_busy_ms": busy / 1e3 / steps,
        "gpu_idle_ms": (span - busy) / 1e3 / steps,
        "host_syncs": len(waits) / steps,
    }


def attempt(case: Row, measure: Callable[[], Row]) -> Row:
    """Return the case with its figures; or with `left_out` if the memory is short, or with `failed`, the error in a line."""
    try:
        return {**case, **measure()}
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {**case, "left_out": f"out of memory: {str(error).splitlines()[0][:200] if str(error) else ''}"}
    except Exception as error:  # the other cases are measured all the same
        return {**case, "failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error) else ''}"}
    finally:
        gc.collect()  # the next case has all of the memory


@contextlib.contextmanager
def centres_drawn_on_the_device() -> Iterator[None]:
    """Draw the first centres of heads on their device: one thread of the host takes minutes for 85 million."""

    def fill(self: CentreStore, start: int, seed: int) -> None:
        for low in range(0, self.num_rows, _BLOCK):
            self.tensors["centres"][low : low + _BLOCK].normal_(std=0.01)
        self.refresh_norms()

    whole = CentreStore.fill_initial
    CentreStore.fill_initial = fill  # type: ignore[method-assign]
    try:
        yield
    finally:
        CentreStore.fill_initial = whole  # type: ignore[method-assign]
