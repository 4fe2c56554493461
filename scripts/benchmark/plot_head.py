"""Draw the results of the head's benchmark: python -m scripts.benchmark.plot_head FILE.json FOLDER

head_time.png    step time over the number of identities, plain and ours
head_memory.png  memory per process over the number of identities
head_roofline.png  arithmetic rate against memory traffic, with the rates of bare products and of a copy as roofs

Example: python -m scripts.benchmark.plot_head head.json figures
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partial_fc import HeadConfig, PartialFC
from partial_fc.centres.store import FORMATS
from partial_fc.memory import HeadMemory
from partial_fc.softmax.passes import constant_shift
from utils.cli import make_parser
from utils.program import run_main
from utils.report.contact_sheet import make_figure

from .plain import PlainHead

_COLOURS = {
    "plain, tutorial": "tab:red",
    "plain, target-only": "tab:orange",
    "plain, sampled": "tab:brown",
    "ours exact fp32": "tab:blue",
    "ours exact bf16": "tab:cyan",
    "ours lean bf16": "tab:green",
    "ours tiny bf16": "tab:purple",
}
_DIM = 512
_COUNTED = 4096  # classes of the plain head whose traffic is counted


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and draw; return the exit status."""
    parser = make_parser("python -m scripts.benchmark.plot_head", __doc__)
    parser.add_argument("file", type=Path, help="written by python -m scripts.benchmark.head --json FILE")
    parser.add_argument("folder", type=Path, help="folder for the pictures")
    options = parser.parse_args(arguments)
    return run_main(lambda: _plot_file(options.file, options.folder))


def _plot_file(file: Path, folder: Path) -> None:
    try:
        result = json.loads(file.read_text())
        rows, bare = [{"storage": row.get("state", ""), **row} for row in result["rows"]], result["bare"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: is no result of scripts.benchmark.head ({error}); write one with --json") from None
    plot(rows, bare, folder)


def plot(rows: list[dict[str, Any]], bare: dict[str, Any], folder: Path) -> None:
    """Write the three pictures into folder; they are of ArcFace."""
    rows = [row for row in rows if row.get("loss", "arcface") == "arcface"]
    folder.mkdir(parents=True, exist_ok=True)
    _curves(rows, folder / "head_time.png", lambda row: row["step_ms"], "step, ms")
    _curves(
        rows, folder / "head_memory.png", lambda row: row["bytes_per_identity"] * row["classes"] / 2**30, "memory growth, GiB"
    )
    _roofline(rows, bare, folder / "head_roofline.png")


def name_of(row: dict[str, Any]) -> str:
    """Return the name of a row in tables and pictures."""
    return f"ours {row['storage']} {row['matmul']}" if row["head"] == "ours" else f"plain, {row['head']}"


def _curves(rows: list[dict[str, Any]], path: Path, value: Any, label: str) -> None:
    rates = sorted({row["sample_rate"] for row in rows}, reverse=True)
    figure = make_figure(5.2 * len(rates) + 1.6, 4, layout="constrained")
    for number, rate in enumerate(rates):
        axes = figure.add_subplot(1, len(rates), number + 1)
        chosen = [row for row in rows if row["sample_rate"] == rate]
        for name, colour in _COLOURS.items():
            points = sorted((row["classes"], value(row)) for row in chosen if name_of(row) == name)
            if points:
                style = "--" if name.startswith("plain") else "-"
                axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3.5, label=name)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="identities",
            ylabel=label,
            title=f"sample rate {rate:g}, batch {chosen[0]['batch']}",
        )
        axes.grid(True, which="both", alpha=0.25)
        axes.legend(fontsize=8)
    figure.savefig(path)


class _Traffic(TorchDispatchMode):
    """Counts the bytes that each operation reads and writes; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        inside = {leaf.untyped_storage().data_ptr() for leaf in inputs}
        in_place = func._schema.is_mutable
        if in_place or any(leaf.untyped_storage().data_ptr() not in inside for leaf in outputs):
            self.bytes += sum(leaf.nbytes for leaf in inputs) + sum(leaf.nbytes for leaf in outputs)
        return result


def _traffic(row: dict[str, Any]) -> float:
    """Return the bytes that a step moves per active class: counted for plain heads, the floor for ours."""
    if row["head"] != "ours":
        head = PlainHead(row["head"], _COUNTED, _DIM, 0, 1, row["sample_rate"], torch.device("cpu"))
        embeddings, labels = torch.randn(row["batch"], _DIM), torch.randint(_COUNTED, (row["batch"],))
        head.step(embeddings, labels)  # creates the optimizer's state
        with _Traffic() as counter:
            head.step(embeddings, labels)
        return counter.bytes / (_COUNTED * row["sample_rate"])
    dtype = torch.float32 if row["matmul"] == "fp32" else torch.bfloat16
    return floor_per_class(HeadConfig(storage=row["storage"], matmul_dtype=dtype), row["batch"], _DIM)


def _roofline(rows: list[dict[str, Any]], bare: dict[str, Any], path: Path) -> None:
    figure = make_figure(6.8, 4, layout="constrained")
    axes = figure.add_subplot()
    bandwidth = max(result["copy_gbs"] for result in bare.values())
    low, high = 1.0, 1000.0
    for name, result in sorted(bare.items()):
        axes.plot([result["gflops"] / bandwidth, high], [result["gflops"]] * 2, color="gray")
        text = f"bare products, {name}{result.get('note', '')}: {result['gflops']:.0f} GFLOP/s"
        axes.annotate(text, (high, result["gflops"]), ha="right", va="bottom", fontsize=8)
    top = max(result["gflops"] for result in bare.values())
    axes.plot([low, top / bandwidth], [low * bandwidth, top], color="gray", label=f"copy, {bandwidth:.0f} GB/s")
    for name, colour in _COLOURS.items():
        found = [row for row in rows if name_of(row) == name]
        if not found:
            continue
        row = max(found, key=lambda r: (r["classes"] * r["sample_rate"] <= 100_000, r["classes"] * r["sample_rate"]))
        flops = 6 * row["batch"] * _DIM  # per class: logits and both gradients
        rate = flops * row["classes"] * row["sample_rate"] / row["step_ms"] / 1e6
        text = f"{name}, {row['classes']} at rate {row['sample_rate']:g}"
        axes.plot(flops / _traffic(row), rate, "s" if name.startswith("plain") else "o", color=colour, label=text)
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="useful operations per byte moved", ylabel="useful GFLOP/s")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=7.5, loc="lower right")
    figure.savefig(path)


# The bytes that a step moves. Counted are the tensors that the products and the C or Triton kernels read and write, each once
# per use, as if no cache kept anything from one use to the next. Not counted are what does not grow with the classes, partial
# sums, 8 B / 64 bytes, label smoothing, and the blocks that a CPU without units for bf16 converts to fp32, which stay in its
# cache. If negatives are not one number times the cosine, a weight of the same size takes the place of an exponential.
# Shapes: B = samples of the global batch, D = embedding size.
_NORM = 4  # bytes of 1 / norm


def parts_per_class(
    config: HeadConfig, batch: int, dim: int, cached: float, maxima: bool = False
) -> dict[str, tuple[float, float]]:
    """Return the bytes (read, written) of each part of a step with one micro-batch.

    Args:
        cached: share of the exponentials that are kept for the second pass, from 0 to 1.
        maxima: whether the samples' largest logits are found, because no constant keeps the exponentials in range.
    """
    size, centre = config.matmul_dtype.itemsize, FORMATS[config.storage][0].itemsize
    state = _state_bytes(config, batch, dim)
    parts: dict[str, tuple[float, float]] = {}
    if FORMATS[config.storage][0] != config.matmul_dtype:
        parts["centres for the products"] = (dim * centre, dim * size)
    parts["logits"] = (dim * size, batch * size)
    parts["exponentials"] = (batch * size + _NORM, batch * size)
    again = [(1 - cached) * sum(part[way] for part in parts.values()) for way in (0, 1)]
    if maxima:
        parts["maxima"] = (batch * size + _NORM, 0)
    parts["embedding gradient"] = ((batch + dim) * size, 0)
    if cached < 1:
        parts["exponentials again"] = (again[0], again[1])
    parts["centre gradient"] = (batch * size, dim * size)
    parts["update"] = (dim * size + state, state)
    return parts


def floor_per_class(config: HeadConfig, batch: int, dim: int) -> float:
    """Return the bytes if all else were fused: centres read by the first pass, exponentials kept, read by the second, which
    reads and writes each centre's state once."""
    kept = 2 * batch * config.matmul_dtype.itemsize
    return dim * FORMATS[config.storage][0].itemsize + _NORM + kept + 2 * _state_bytes(config, batch, dim)


def moved(head: PartialFC, batch: int) -> dict[str, Any]:
    """Return the bytes per active class of the step that the head took last: parts, total and floor; {} for plain torch."""
    if head.kernels.name == "plain":
        return {}
    config = head.config
    wanted = head.num_active() / head.world_size * batch * config.matmul_dtype.itemsize
    cached = min(1.0, head.workspace.cache_bytes / wanted)
    maxima = constant_shift(head.margin, head.num_classes) is None
    parts = parts_per_class(config, batch, head.embedding_size, cached, maxima)
    total = sum(read + written for read, written in parts.values())
    return {"parts": parts, "total": total, "floor": floor_per_class(config, batch, head.embedding_size)}


def describe(row: dict[str, Any]) -> str:
    """Return a line for a row of the benchmark that has `moved`."""
    parts = ", ".join(f"{name} {read:.0f} + {written:.0f}" for name, (read, written) in row["moved"]["parts"].items())
    total, floor = row["moved"]["total"], row["moved"]["floor"]
    loss = "" if row["loss"] == "arcface" else f"{row['loss']}, "
    where = f"{loss}{row['classes']} classes at rate {row['sample_rate']:g}, {row['storage']} {row['matmul']}"
    return f"bytes moved per active class, {where}: {total:.0f}, {total / floor:.2f} of the floor {floor:.0f} ({parts})"


def _state_bytes(config: HeadConfig, batch: int, dim: int) -> int:
    return HeadMemory(dim, batch, replace(config, sampling="uniform")).bytes_per_class


if __name__ == "__main__":
    raise SystemExit(main())
