"""Measure time and memory of the head against plain heads: face bench head [--json FILE] [--plot FOLDER]

Every line of the table is a separate process (one per rank): some warm-up steps, the median of several steps (on a GPU of turns
of 20 between two waits), and the growth of its peak memory. ratio = plain / ours, in time and in memory. busy: the kernels of a
step, on a GPU. At sample rate 1 the plain head is the dense one of tutorials, below 1 Partial FC as in arcface_torch: plain.py.
"target-only" is a dense head that computes the margin only for the targets, the best plain version. With --loss other losses
are measured with their default arguments, their steps in turn with those of ArcFace in the same process; arcface x = median of
loss / ArcFace. With --placement the steps are in turn with those of a head on the device; device x = median of placement /
device. The file of disk is here.

Examples:
  face bench head --quick
  face bench head --classes 1000000 --sample-rate 0.1 --plot figures
  face bench head --classes 60000 --no-plain --storage exact --matmul fp32 --loss circle sphereface2
  face bench head --classes 200000 --sample-rate 1 0.1 --no-plain --storage exact --placement disk
"""

import argparse
import importlib
import itertools
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import torch

from losses import MARGINS, build_margin
from partial_fc import HeadConfig, PartialFC
from partial_fc.centres.placement import PLACEMENTS
from partial_fc.centres.store import FORMATS
from partial_fc.kernels import KERNELS
from partial_fc.kernels.plain import product_dtype
from partial_fc.softmax.choice import FORMS
from utils import distributed
from utils.cli import int_in_range, make_parser
from utils.memory import free_bytes
from utils.precision import set_tf32
from utils.program import run_main
from utils.report import make_figure

from .kit import CALLS, add_common_arguments, bare_seconds, gpu_figures, machine, peak_bytes, run_ranks, seconds_of, write_json
from .plain import PlainHead

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_OURS = (("exact", "fp32"), ("exact", "bf16"), ("lean", "bf16"), ("tiny", "bf16"), ("mini", "bf16"))
_DIM = 512
_COMMON = ("batch", "kernels", "chunk", "cache_mb", "world_size", "steps", "placement", "alone")
_PLAIN_BYTES = {"tutorial": 67_000, "target-only": 40_000, "sampled": 12_000}  # per class; what does not fit is not started
_COLOURS = {
    **{"plain, tutorial": "tab:red", "plain, target-only": "tab:orange", "plain, sampled": "tab:brown"},
    **{"ours exact fp32": "tab:blue", "ours exact bf16": "tab:cyan", "ours lean bf16": "tab:green"},
    **{"ours tiny bf16": "tab:purple", "ours mini bf16": "tab:pink"},
}


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face bench head", __doc__)
    parser.add_argument("--classes", type=int, nargs="+", help="identities over all ranks; default 100000 and 1000000")
    parser.add_argument("--sample-rate", type=float, nargs="+", help="default: 1 up to 100000 classes, 0.1 and 1 above")
    parser.add_argument("--batch", type=int, default=512, help="global batch")
    parser.add_argument("--storage", nargs="+", choices=tuple(FORMATS), help="default: exact in fp32, all in bf16")
    parser.add_argument("--matmul", nargs="+", choices=tuple(_DTYPES), help="with --storage: of the products; default both")
    parser.add_argument("--kernels", choices=(*KERNELS, *FORMS), default="auto", help="head.kernels")
    parser.add_argument("--chunk", type=int, default=0, help="classes at once, 0 = what suits the device")
    parser.add_argument("--cache-mb", type=int, default=-1, help="head.cache_mb")
    parser.add_argument("--world-size", type=int, default=1, help="gloo or NCCL processes on this machine")
    parser.add_argument("--steps", type=int_in_range(1), default=5, help="timed, on a GPU turns of 20 (default 5)")
    parser.add_argument("--loss", nargs="+", choices=tuple(MARGINS), default=["arcface"], help="default arcface")
    parser.add_argument("--placement", choices=PLACEMENTS, default="device", help="head.placement")
    parser.add_argument("--no-plain", action="store_true", help="leave the plain heads out")
    parser.add_argument("--alone", action="store_true", help="compare no loss or placement, for memory that holds one head")
    add_common_arguments(parser)
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw time and memory over the number of classes there")
    return run_main(benchmark, parser.parse_args(arguments))


def benchmark(options: argparse.Namespace) -> None:
    """Run every case, print the table, write the requested files."""
    if options.quick:
        options.classes, options.batch, options.steps = options.classes or [20_000], min(options.batch, 128), 3
        options.sample_rate = options.sample_rate or [1.0, 0.1]
    device = distributed.choose_device(options.device, 0).type
    pairs = [pair for pair in _OURS if options.kernels not in FORMS or pair[1] == "bf16"]  # the forms are those of bf16
    if options.storage or options.matmul:
        pairs = [(s, m) for s in options.storage or FORMATS for m in options.matmul or ("fp32", "bf16")]
    common = {key: getattr(options, key) for key in _COMMON}
    common["device"] = device
    bare = {name: _run(common | {"head": "bare", "matmul": name, "classes": 100_000}) for name in {m for _, m in pairs}}
    no_plain = options.no_plain or "arcface" not in options.loss  # the plain heads have no other loss
    rows: list[dict[str, Any]] = []
    print(f"{machine(device)}\nbatch {options.batch}, {options.world_size} process(es), D = {_DIM}; ratios are plain / ours\n")
    names = f"{'classes':>9} {'rate':>5}  {'head':<22} {'step ms':>9} {'range':>18} {'busy ms':>8} {'B/class':>8} {'time x':>7}"
    print(f"{names} {'memory x':>8} {'of bare':>8} {'arcface x':>9} {'device x':>9}")
    found = {"machine": machine(device), "bare": bare, "rows": rows}
    for classes in options.classes or [100_000, 1_000_000]:
        for rate in options.sample_rate or ([1.0] if classes <= 100_000 else [0.1, 1.0]):
            case = common | {"classes": classes, "sample_rate": rate}
            plain = {}
            for kind in () if no_plain else ("tutorial", "target-only") if rate == 1.0 else ("sampled",):
                # all of the GPUs' free memory, or most of the machine's
                share = min(options.world_size, torch.cuda.device_count()) if device == "cuda" else 0.8
                if classes * _PLAIN_BYTES[kind] > share * free_bytes(torch.device(device), 1):
                    print(f"{classes:>9} {rate:>5}  plain, {kind:<15} {'does not fit into memory here':>32}", flush=True)
                    continue
                plain[kind] = _run(case | {"head": kind})
                rows.append({"head": kind} | case | plain[kind])
                _print_row(rows[-1])
                write_json(options.json, found)  # so that what is measured is kept, whatever comes next
            for (storage, matmul), loss in itertools.product(pairs, options.loss):
                row = {"head": "ours"} | case | {"storage": storage, "matmul": matmul, "loss": loss}
                row |= _run(row)
                row["useful_gflops"] = 6 * options.batch * classes * rate * _DIM / row["step_ms"] / 1e6
                row["share_of_bare_products"] = row["useful_gflops"] / bare[matmul]["gflops"]
                for kind, base in plain.items() if loss == "arcface" else ():
                    suffix = "_target_only" if kind == "target-only" else ""
                    row[f"time_ratio{suffix}"] = base["step_ms"] / row["step_ms"]
                    row[f"memory_ratio{suffix}"] = base["bytes_per_identity"] / row["bytes_per_identity"]
                rows.append(row)
                _print_row(row)
                write_json(options.json, found)
    for name, result in sorted(bare.items()):
        each = ", ".join(f"{key} {value:.0f}" for key, value in result["gflops_of_each"].items())
        note = result["note"] and f"{result['note']},"
        print(f"bare products in {name}{note} with 100000 classes: {result['gflops']:.0f} GFLOP/s together ({each})")
    if options.plot:
        draw(rows, options.plot)


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    """Draw time and memory over the number of identities into a folder: a panel for each sample rate, of ArcFace."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
        "time": ("step, ms", lambda row: row["step_ms"]),
        "memory": ("memory growth, GiB", lambda row: row["bytes_per_identity"] * row["classes"] / 2**30),
    }
    rates = sorted({row["sample_rate"] for row in rows}, reverse=True)
    for kind, (label, value) in kinds.items():
        figure = make_figure(5.2 * len(rates) + 1.6, 4, layout="constrained")
        for axes, rate in zip(figure.subplots(1, len(rates), squeeze=False)[0], rates, strict=True):
            lines: dict[str, list[tuple[int, float]]] = {}
            for row in rows:
                if row["sample_rate"] == rate and row.get("loss", "arcface") == "arcface":
                    lines.setdefault(_name(row), []).append((row["classes"], value(row)))
            for name, points in lines.items():
                style = "--" if name.startswith("plain") else "-"
                axes.plot(*zip(*sorted(points), strict=True), style, color=_COLOURS.get(name), marker="o", label=name)
            axes.set(xscale="log", yscale="log", xlabel="identities", ylabel=label, title=f"sample rate {rate:g}")
            axes.grid(True, which="both", alpha=0.25)
            axes.legend(fontsize=8)
        figure.savefig(folder / f"head_{kind}.png")


def _name(row: dict[str, Any]) -> str:
    if row["head"] != "ours":
        return f"plain, {row['head']}"
    return f"{'ours' if row['loss'] == 'arcface' else row['loss']} {row['storage']} {row['matmul']}"


def _print_row(row: dict[str, Any]) -> None:
    widths = {"time_ratio": 8, "memory_ratio": 9, "share_of_bare_products": 9, "arcface_ratio": 10, "device_ratio": 10}
    ratios = "".join(f"{row[key]:>{width}.2f}" if key in row else " " * width for key, width in widths.items())
    span = "{:.2f} to {:.2f}".format(*row["step_ms_range"])
    busy = f"{row['gpu_busy_ms']:.2f}" if "gpu_busy_ms" in row else ""
    numbers = f"{row['step_ms']:>9.2f} {span:>18} {busy:>8} {row['bytes_per_identity']:>8.0f}"
    print(f"{row['classes']:>9} {row['sample_rate']:>5}  {_name(row):<22} {numbers}{ratios}", flush=True)


def _run(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case in new processes, one per rank; return rank 0's figures."""
    ranks = 1 if case["head"] == "bare" else case["world_size"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            found: dict[str, Any] = run_ranks(work, ranks, case | {"rendezvous": f"{folder}/rendezvous", "ranks": ranks})[0]
        except BrokenProcessPool:
            raise ValueError(f"a process was killed, perhaps because the memory is too small, at {case}") from None
    return found


def work(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    """Measure one case in this process; return the figures."""
    world = distributed.init_local(rank, case["ranks"], case["device"], case["rendezvous"])
    torch.manual_seed(rank)
    device = world.device
    if case["head"] == "bare":
        return bare_products(case["classes"], case["batch"], _DIM, _DTYPES[case["matmul"]], device)
    embeddings = torch.randn(case["batch"] // case["ranks"], _DIM, device=device)
    labels = torch.randint(case["classes"], (len(embeddings),), device=device)
    torch.mm(embeddings, embeddings.t())  # so that the library's memory is allocated before the measurement
    if case["head"] != "ours":
        importlib.import_module("torch._dynamo")  # as the optimizer of torch does in its first step, 150 MB
    before = peak_bytes(device)
    head = _our_head(case, rank, device) if case["head"] == "ours" else None
    step = _our_step(head, embeddings, labels) if head else _plain_step(case, rank, embeddings, labels)
    for number in range(2):
        step(number)
    steps, taken = [step], (peak_bytes(device) - before) * case["ranks"] / case["classes"]
    beside = {"arcface_ratio": {"loss": "arcface"}, "device_ratio": {"placement": "device"}}
    against = next((key for key, usual in beside.items() if head and not case["alone"] and case | usual != case), "")
    if against:  # in turn with the usual one, since a machine's speed may change
        steps.append(_our_step(_our_head(case | beside[against], rank, device), embeddings, labels))
        for number in range(2):
            steps[1](number)
    # as in training, the host waits for a GPU only after several steps
    calls = CALLS if device.type == "cuda" else 1
    turns = [range(2 + number * calls, 2 + (number + 1) * calls) for number in range(case["steps"])]
    times = [[1e3 / calls * seconds_of(partial(list, map(one, turn)), device) for one in steps] for turn in turns]
    own = [row[0] for row in times]
    figures: dict[str, Any] = {"step_ms": statistics.median(own), "step_ms_range": [min(own), max(own)]}
    figures |= {"bytes_per_identity": taken, **gpu_figures(partial(step, 2 + case["steps"] * calls), device)}
    if head:
        figures["described"] = head.describe()
    if len(steps) > 1:
        figures[against] = statistics.median(row[0] / row[1] for row in times)
    distributed.stop()
    return figures


def _plain_step(case: dict[str, Any], rank: int, embeddings: torch.Tensor, labels: torch.Tensor) -> Callable[[int], Any]:
    local, start = case["classes"] // case["ranks"], rank * (case["classes"] // case["ranks"])
    head = PlainHead(case["head"], local, _DIM, start, case["ranks"], case["sample_rate"], embeddings.device)
    labels = labels % (local * case["ranks"])
    return lambda number: head.step(embeddings, labels)


def _our_head(case: dict[str, Any], rank: int, device: torch.device) -> PartialFC:
    named = {key: case[key] for key in ("sample_rate", "storage", "chunk", "cache_mb", "kernels", "placement")}
    config = HeadConfig(matmul_dtype=_DTYPES[case["matmul"]], **named)
    margin, place = build_margin(case["loss"]), (rank, case["ranks"])
    head = PartialFC(margin, case["classes"], _DIM, *place, device=device, config=config, folder=Path())
    set_tf32(False)  # the flags of training
    head.choose_form(case["batch"])
    return head


def _our_step(head: PartialFC, embeddings: torch.Tensor, labels: torch.Tensor) -> Callable[[int], Any]:
    known = labels[None].cpu()  # as in training, where labels come from the loader

    def step(number: int) -> None:
        own = embeddings.clone().requires_grad_()
        head.begin_step(known, number)
        head(own).backward()
        head.step(0.01)

    return step


def bare_products(classes: int, batch: int, dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return the rates of the step's three products alone, into given buffers, and of a copy.

    They are computed in fp32 where the head computes them in fp32 instead of bf16.
    """
    asked, dtype = dtype, product_dtype(device, dtype)
    x, w = torch.randn(batch, dim, device=device).to(dtype), torch.randn(classes, dim, device=device).to(dtype)
    e = torch.empty(classes, batch, device=device, dtype=dtype)
    u, dw = torch.empty_like(x), torch.empty_like(w)
    works = {
        "logits": lambda: torch.mm(w, x.t(), out=e),
        "embedding gradient": lambda: torch.mm(e.t(), w, out=u),
        "centre gradient": lambda: torch.mm(e, x, out=dw),
        "copy": lambda: dw.copy_(w),
    }
    seconds = {name: bare_seconds(work, device, rounds=7) for name, work in works.items()}
    copy = 2 * w.nbytes / seconds.pop("copy") / 1e9
    product = 2 * batch * classes * dim / 1e9
    rates = {name: product / value for name, value in seconds.items()}
    note = "" if dtype == asked else ", computed in fp32"
    return {"gflops": 3 * product / sum(seconds.values()), "gflops_of_each": rates, "copy_gbs": copy, "note": note}


if __name__ == "__main__":
    raise SystemExit(main())
