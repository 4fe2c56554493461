"""Forward and backward passes of the backbones alone: images per second, memory, and where the time goes."""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/gpu_parts/networks.py is no program; python -m scripts lists them")

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from backbones import build_backbone
from scripts.benchmark.device_rates import synchronise
from utils.precision import AUTOCAST

from .measuring import Context, Row, attempt, device_figures, peak_from_here, record, times_of

# what the names of operators contain -> what they are; the first match counts
_KINDS = (
    ("conv", "convolutions"),
    ("norm", "BatchNorm"),
    ("prelu", "PReLU"),
    ("mm", "products"),
    ("linear", "products"),
    ("add", "additions"),
    ("copy", "copies and casts"),
)


def _cases(quick: bool) -> Iterator[Row]:
    if quick:
        for mode in ("eager", "graph"):
            yield {"backbone": "r18", "width": 0.125, "batch": 2, "precision": "fp32", "mode": mode}
        yield {"backbone": "mbf", "width": 0.125, "batch": 2, "precision": "bf16", "mode": "eager"}
        return
    common: Row = {"width": 1.0}
    for batch in (128, 512, 32):
        for mode in ("eager", "graph"):
            for precision in ("bf16", "fp16", "fp32") if batch == 128 else ("bf16",):
                yield {"backbone": "r50", **common, "batch": batch, "precision": precision, "mode": mode}
    yield {"backbone": "r50", **common, "batch": 128, "precision": "bf16", "mode": "compile"}
    for name in ("r100", "mbf"):
        for batch in (128, 512, 32):
            for mode in ("eager", "graph"):
                yield {"backbone": name, **common, "batch": batch, "precision": "bf16", "mode": mode}
    yield {"backbone": "mbf", **common, "batch": 512, "precision": "bf16", "mode": "compile"}


def measure(context: Context) -> Iterator[Row]:
    """Yield a row per case."""
    torch.backends.cudnn.benchmark = True
    for case in _cases(context.quick):
        if case["mode"] == "graph" and context.device.type != "cuda":
            yield {**case, "left_out": "CUDA graphs need CUDA"}
        else:
            yield attempt(case, lambda case=case: _one(case, context))  # type: ignore[misc]


def _one(case: Row, context: Context) -> Row:
    device = context.device
    peak = peak_from_here(device)
    backbone = build_backbone(case["backbone"], width=case["width"])
    backbone = backbone.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(case["batch"], 3, 112, 112, device=device).to(memory_format=torch.channels_last)
    network: Any = torch.compile(backbone) if case["mode"] == "compile" else backbone
    eager = _passes(backbone, network, images, case)
    for _ in range(3):
        eager()
    work = _captured(eager) if case["mode"] == "graph" else eager
    work()
    milliseconds, enqueue = times_of(device, work, 3 if context.quick else 8)
    row: Row = {"images_per_second": 1e3 * case["batch"] / milliseconds, "wall_ms": milliseconds}
    row["peak_gib"] = peak() / 2**30
    if device.type == "cuda":
        row |= {"enqueue_ms": enqueue, **device_figures(record(device, work))}
    if case["mode"] == "eager":
        row |= _shares(device, work)
    return row


def _passes(backbone: nn.Module, network: Any, images: torch.Tensor, case: Row) -> Callable[[], None]:
    dtype = AUTOCAST[case["precision"]]

    def work() -> None:
        backbone.zero_grad(set_to_none=True)
        # a captured cast would be read by replays after its memory went to others
        with torch.autocast(images.device.type, dtype, dtype is not None, cache_enabled=case["mode"] != "graph"):
            embeddings = network(images)
        embeddings.float().square().mean().backward()

    return work


def _captured(work: Callable[[], None]) -> Callable[[], None]:
    """Return a function that replays the work as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what a capture must not do happens before it: choices of algorithms, workspaces
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _shares(device: torch.device, work: Callable[[], None]) -> Row:
    """Return the share of each kind of operator in the time of the device's work."""
    on_gpu = device.type == "cuda"
    synchronise(device)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
        work()
        synchronise(device)
    times: dict[str, float] = {}
    for event in found.key_averages():
        if not event.key.startswith("aten::"):
            continue  # kernels, which the operators that launched them stand for
        kind = next((kind for part, kind in _KINDS if part in event.key), "others")
        times[kind] = times.get(kind, 0.0) + (event.self_device_time_total if on_gpu else event.self_cpu_time_total)
    whole = sum(times.values()) or 1.0
    return {f"share of {kind}": times[kind] / whole for kind in sorted(times, key=lambda kind: -times[kind])}
