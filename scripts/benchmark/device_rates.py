"""Device rates for the step times of capacity: given, from a data sheet, or measured here.

The table comes from the manufacturers' data sheets. None of it was measured, and nothing here has run on these cards.
"""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/device_rates.py is no program; python -m scripts lists them")

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from partial_fc.config import matmul_dtype
from utils.precision import AUTOCAST, is_fast_in_bf16

_CALLS = 20  # of bare work on a GPU between two waits for it


class Card(NamedTuple):
    """Peak rates without sparsity, and memory."""

    name: str  # the exact variant, if several share the name
    half_tflops: float  # TFLOP/s of bf16 or fp16 products with fp32 sums, on tensor cores
    fp32_tflops: float  # TFLOP/s of fp32 products, without TF32
    bandwidth: float  # of the memory, GB/s
    memory: float  # GiB, rounded down from the data sheet's, because the driver reserves some
    bf16: bool = True  # whether it has bf16 at all


CARDS = {
    "h200": Card("H200 SXM", 989, 67, 4800, 139),
    "h100": Card("H100 SXM", 989, 67, 3350, 79),
    "h100-pcie": Card("H100 PCIe", 756, 51, 2000, 79),
    "a100": Card("A100 SXM, 80 GB", 312, 19.5, 2039, 79),
    "a100-40": Card("A100 SXM, 40 GB", 312, 19.5, 1555, 39),
    "v100": Card("V100 SXM2, 32 GB", 125, 15.7, 900, 31, bf16=False),
    "l40s": Card("L40S", 362, 91.6, 864, 44),
    "a10": Card("A10", 125, 31.2, 600, 22),
    "l4": Card("L4", 121, 30.3, 300, 22),
    "t4": Card("T4", 65, 8.1, 320, 14.5, bf16=False),
    "rtx4090": Card("GeForce RTX 4090", 165, 82.6, 1008, 23.5),
    "rtx3090": Card("GeForce RTX 3090", 71, 35.6, 936, 23.5),
}


def is_for_gpu(options: argparse.Namespace, device: torch.device) -> bool:
    """Return whether the target is a GPU: always, unless this CPU is to be measured."""
    return device.type == "cuda" or bool(options.card) or not (options.device == "cpu" or options.find)


def head_dtype(options: argparse.Namespace, device: torch.device) -> torch.dtype:
    """Return the dtype of the head's products that a training with head.matmul_dtype=auto takes on the target."""
    if device.type == "cpu" and is_for_gpu(options, device):  # a GPU that is not here
        has_bf16 = CARDS[options.card].bf16 if options.card else True
        return torch.bfloat16 if options.precision != "fp32" and has_bf16 else torch.float32
    return matmul_dtype("auto", AUTOCAST[options.precision], device, is_fast_in_bf16(device))


class Rates(NamedTuple):
    """The rates from which step times are computed."""

    head_tflops: float  # TFLOP/s of matrix products in the head's dtype
    backbone_tflops: float  # in the backbone's dtype
    bandwidth: float  # GB/s
    words: str  # their source, for the output


def rates_of(options: argparse.Namespace, device: torch.device) -> Rates | None:
    """Return the given rates, those of the card, or those measured here; None if the device is unknown."""
    for name, other in (("tflops", "bandwidth"), ("bandwidth", "tflops")):
        value = getattr(options, name)
        if value is not None and (getattr(options, other) is None or value <= 0):
            raise ValueError(f"--{name} must be above 0 and needs --{other} beside it, got {value:g}")
    if options.tflops is not None:
        source, tflops, bandwidth = "as given", (options.tflops, options.tflops), options.bandwidth
    elif options.card:
        card = CARDS[options.card]
        source, bandwidth = f"the peak of {card.name} on its data sheet", card.bandwidth
        head = card.half_tflops if head_dtype(options, device) == torch.bfloat16 else card.fp32_tflops
        tflops = (head, card.fp32_tflops if options.precision == "fp32" else card.half_tflops)
    elif device.type == "cuda" or options.device == "cpu":
        source = f"as measured on this {device.type}"
        measured, bandwidth = measured_rates(head_dtype(options, device), device)
        tflops = (measured, measured)
    else:
        return None
    parts = f"{tflops[0]:.3g}" if tflops[0] == tflops[1] else f"{tflops[0]:.3g} (head), {tflops[1]:.3g} (backbone)"
    words = f"step times are estimates, not measured: a lower bound, at {parts} TFLOP/s and {bandwidth:.3g} GB/s, {source}"
    return Rates(*tflops, bandwidth, words)


def measured_rates(dtype: torch.dtype, device: torch.device, quick: bool = False) -> tuple[float, float]:
    """Return TFLOP/s of matrix products in a dtype and GB/s of a copy on this device.

    Args:
        quick: take small matrices on a CPU, where half precision may be hundreds of times slower than fp32; the rate is lower.
    """
    size = 4096 if device.type == "cuda" else 256 if quick else 1024
    first = torch.randn(size, size, device=device).to(dtype)
    data, product = torch.empty(2**26, device=device), torch.empty_like(first)
    half = len(data) // 2
    copied = bare_seconds(lambda: data[:half].copy_(data[half:]), device)
    multiplied = bare_seconds(lambda: torch.mm(first, first, out=product), device)
    return 2e-12 * size**3 / multiplied, 8e-9 * half / copied


def bare_seconds(work: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Return the seconds of one call of some work: the median over the rounds, after one that is not timed.

    On a GPU a round is many calls between two waits for the device. After a wait the device is idle until the next launch
    reaches it, which takes about as long as a small product, and would be counted to a single call.
    """
    calls, times = _CALLS if device.type == "cuda" else 1, []
    for _ in range(1 + rounds):
        synchronise(device)
        started = time.perf_counter()
        for _ in range(calls):
            work()
        synchronise(device)
        times.append((time.perf_counter() - started) / calls)
    return statistics.median(times[1:])


def synchronise(device: torch.device) -> None:
    """Wait for all work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
