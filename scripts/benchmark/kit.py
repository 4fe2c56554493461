"""What all benchmarks share: the machine in words, new processes, time and memory on any device, tables written into a page."""

import argparse
import contextlib
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from utils.allocator import keep_freed_memory
from utils.cli import int_in_range
from utils.parallel import forks_of_torch

CPU = torch.device("cpu")
END = "<!-- end -->"  # after the tables on a page
CALLS = 20  # of what is timed on a GPU, between two waits for it
_CLOCKS = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"


def add_common_arguments(
    parser: argparse.ArgumentParser, quick: str = "small, under a minute on two cores", device: bool = True, rounds: int = 0
) -> None:
    """Add --quick, which does what `quick` says, --json, and --device and --rounds, if the benchmark has a choice of these."""
    if rounds:
        parser.add_argument("--rounds", type=int_in_range(1), default=rounds, help="turns of each; the median counts")
    if device:
        parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes CUDA if there is one")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="write all figures there")


def write_json(path: Path | None, found: Mapping[str, Any]) -> None:
    """Write the figures, if --json names a file."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)  # what was measured must not be lost
        (new := path.with_name(f"{path.name}.new")).write_text(json.dumps(found, indent=1) + "\n")
        new.replace(path)  # the file is complete at any time


def machine(device: str) -> str:
    """Return a line that names processor, threads and versions."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model}, {torch.get_num_threads()} threads, torch {torch.__version__}, {platform.system()}"


def peak_bytes(device: torch.device) -> float:
    """Return the peak memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if device.type == "cpu" and status.is_file():  # getrusage would include the parent's memory at the fork
        return 1024.0 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    from utils.log import peak_memory_gib  # it needs packages that `gpu` starts without

    return peak_memory_gib(device) * 2**30


def clock(device: torch.device) -> float:
    """Return the time, in seconds, when a GPU has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def run_ranks(work: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Return what `work(rank, *arguments)` returns, each rank in a new process, with the allocator of all programs.

    Raises:
        BrokenProcessPool: a process was killed.
    """
    with ProcessPoolExecutor(ranks, forks_of_torch(), keep_freed_memory) as pool:
        return [rank.result() for rank in [pool.submit(work, rank, *arguments) for rank in range(ranks)]]


def take_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return what each way measures in each round. They take turns, so that other load on the machine meets all."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, measure in ways.items():
            found[name].append(measure())
    return found


def seconds_of(work: Callable[[], object], device: torch.device = CPU) -> float:
    """Return the seconds that some work takes, until the device has done it."""
    started = clock(device)
    work()
    return clock(device) - started


def bare_seconds(work: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Return the seconds of one call of some work: the median over the rounds, after one that is not timed.

    On a GPU a round is many calls between two waits for the device. After a wait the device is idle until the next launch
    reaches it, which takes about as long as a small product, and would be counted to a single call.
    """
    calls = CALLS if device.type == "cuda" else 1
    times = [seconds_of(lambda: [work() for _ in range(calls)], device) / calls for _ in range(1 + rounds)]
    return statistics.median(times[1:])


def gpu_figures(work: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Return what only a GPU has, {} on the CPU: how long its kernels and copies take in a call of some work, and its clocks.

    gpu_busy_ms sums their times, also of those that run beside each other. clocks is the answer of nvidia-smi beside further
    calls, one line for each GPU: clocks of SM and memory, power, temperature, and a bit for each reason that lowers the
    clocks. What does not answer is left out.
    """
    if device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds_of(work, device)
    events = [event for event in profile.key_averages() if not getattr(event, "is_user_annotation", False)]
    times = [event.self_device_time_total for event in events if str(event.device_type) == "DeviceType.CUDA"]
    figures: dict[str, Any] = {"gpu_busy_ms": sum(times) / 1e3} if times else {}
    query = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(CALLS):  # as many on all ranks
            work()
        said = asked.communicate(timeout=30)[0]
        figures |= {"clocks": said.splitlines()} if asked.returncode == 0 else {}
    clock(device)
    return figures


def measured_rates(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Return TFLOP/s of matrix products in a dtype and GB/s of a copy on this device."""
    size = 4096 if device.type == "cuda" else 1024
    first = torch.randn(size, size, device=device).to(dtype)
    data, product = torch.empty(2**26, device=device), torch.empty_like(first)
    half = len(data) // 2
    copied = bare_seconds(lambda: data[:half].copy_(data[half:]), device)
    multiplied = bare_seconds(lambda: torch.mm(first, first, out=product), device)
    return 2e-12 * size**3 / multiplied, 8e-9 * half / copied


def write_into_page(page: Path, text: str, start: str) -> None:
    """Replace what stands between the lines `start` and END on a page; errors as for `split_page`."""
    before, after = split_page(page, start)
    page.write_text(f"{before}{start}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def split_page(page: Path, start: str) -> tuple[str, str]:
    """Return what stands before the line `start` on a page, and after the line END; ValueError without these two lines."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(start)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"--page: {page} must have the lines {start} and {END}; the tables go between them")
    return before, after
