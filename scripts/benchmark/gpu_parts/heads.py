"""Steps of the head alone: time, launches and memory over identities, sample rate, storage, batch, cache and chunk."""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/gpu_parts/heads.py is no program; python -m scripts lists them")

from collections.abc import Callable, Iterator
from typing import Any

import torch

from losses import build_margin
from partial_fc import HeadConfig, PartialFC
from scripts.benchmark.device_rates import measured_rates, synchronise
from scripts.benchmark.head_traffic import floor_per_class

from .machine import DTYPES
from .measuring import (
    Context,
    Row,
    attempt,
    centres_drawn_on_the_device,
    device_figures,
    event_ms,
    peak_from_here,
    record,
    times_of,
)

_DIM = 512
_CASE: Row = {
    **{"classes": 1_000_000, "sample_rate": 1.0, "storage": "lean", "matmul": "bf16", "batch": 512},
    **{"cache_mb": -1, "chunk": 0, "kernels": "auto"},
}


def _cases(quick: bool) -> Iterator[Row]:
    """Yield the cases, those that matter most first."""
    if quick:
        yield from ({**_CASE, "classes": count, "batch": 64, "matmul": "fp32"} for count in (500, 2000))
        yield {**_CASE, "classes": 2000, "batch": 64, "sample_rate": 0.1, "storage": "exact"}
        yield {**_CASE, "classes": 2000, "batch": 64, "storage": "tiny", "cache_mb": 0, "kernels": "plain"}
        return
    for storage, matmul in (("lean", "bf16"), ("exact", "bf16"), ("exact", "fp32"), ("tiny", "bf16")):
        for sample_rate in (1.0, 0.1):
            yield {**_CASE, "storage": storage, "matmul": matmul, "sample_rate": sample_rate}
    for classes in (10_000_000, 100_000):
        for storage in ("lean", "exact"):
            yield from ({**_CASE, "classes": classes, "storage": storage, "sample_rate": rate} for rate in (1.0, 0.1))
    yield from ({**_CASE, "batch": 4096, "sample_rate": rate} for rate in (1.0, 0.1))
    yield from ({**_CASE, "cache_mb": size} for size in (0, 128))
    yield from ({**_CASE, "chunk": size} for size in (8192, 65_536, 131_072))
    yield {**_CASE, "kernels": "plain"}


def measure(context: Context) -> Iterator[Row]:
    """Yield the rates that limit a head, then a row per case."""
    limits: dict[str, float] = {}
    for name, dtype in DTYPES.items():
        if name != "fp16":
            limits[name], limits["GB/s"] = measured_rates(dtype, context.device, context.quick)
    yield {"what": "limits", "TFLOP/s of bf16": limits["bf16"], "TFLOP/s of fp32": limits["fp32"], "GB/s": limits["GB/s"]}
    with centres_drawn_on_the_device():
        for case in _cases(context.quick):
            yield attempt(case, lambda case=case: _one(case, context, limits))  # type: ignore[misc]


def _one(case: Row, context: Context, limits: dict[str, float]) -> Row:
    device, steps = context.device, 3 if context.quick else 7
    peak = peak_from_here(device)
    before = peak()
    head, step = _head(case, device)
    for _ in range(3):
        step()
    synchronise(device)
    row: Row = {"bytes_per_identity": (peak() - before) / case["classes"]}
    row["wall_ms"], enqueue = times_of(device, step, steps)
    if device.type == "cuda":
        row["enqueue_ms"] = enqueue
        row["gpu_ms"] = event_ms(step, steps, head.shard_state)  # which makes this stream wait for the update's
        row |= device_figures(record(device, step))
    flops, size = 6.0 * case["batch"] * case["classes"] * case["sample_rate"] * _DIM, _least_bytes(case)
    milliseconds = row.get("gpu_ms", row["wall_ms"])  # of steps in a row, as training and the bare rates have them
    row["useful_tflops"] = flops / milliseconds / 1e9
    row["flops_per_byte"] = flops / size
    row["floor_ms"] = max(flops / limits[case["matmul"]] / 1e9, size / limits["GB/s"] / 1e6)
    row["share_of_floor"] = row["floor_ms"] / milliseconds
    return row


def _head(case: Row, device: torch.device) -> tuple[PartialFC, Callable[[], None]]:
    """Return a head, and a function that takes one step with it; its plans are made before, as a training's thread does."""
    margin = build_margin("arcface", scale=64.0, margin=0.5)
    head = PartialFC(margin, case["classes"], _DIM, config=_config(case), device=device)
    embeddings = torch.randn(case["batch"], _DIM, device=device).requires_grad_()
    labels = torch.randint(case["classes"], (1, case["batch"]))
    plan = head.prepare(labels, 0)

    def step() -> None:
        embeddings.grad = None
        head.begin_step(plan, 0)
        head(embeddings).backward()
        head.step(0.01)

    return head, step


def _config(case: Row) -> HeadConfig:
    settings: dict[str, Any] = {name: case[name] for name in ("sample_rate", "storage", "cache_mb", "chunk", "kernels")}
    return HeadConfig(**settings, matmul_dtype=DTYPES[case["matmul"]])


def _least_bytes(case: Row) -> float:
    """Return the fewest bytes that a step moves."""
    return floor_per_class(_config(case), case["batch"], _DIM) * case["classes"] * case["sample_rate"]
