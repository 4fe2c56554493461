"""Draw the results of the head's benchmark: python -m scripts.benchmark.plot_head FILE.json FOLDER

head_time.png    step time over the number of identities, plain and ours
head_memory.png  memory per process over the number of identities
head_roofline.png  arithmetic rate against memory traffic, with the rates of bare products and of a copy as roofs

Example: python -m scripts.benchmark.plot_head head.json figures
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m scripts.benchmark.plot_head")

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from partial_fc import HeadConfig
from utils.cli import make_parser
from utils.program import run_main
from utils.report.figure import make_figure

from .baselines.heads import PlainHead
from .head_traffic import floor_per_class

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


if __name__ == "__main__":
    raise SystemExit(main())
