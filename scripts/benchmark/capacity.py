"""Compute how many identities fit, and a lower bound of the step time.

Prints the largest number of identities for each head.storage, from the memory model (partial_fc/memory.py, and a forward pass
that records what the backbone keeps): the same numbers with which train.py checks before training that the head fits. copy GiB
is the host memory that each process keeps for a copy of its class centres once it has saved. Step times are estimates from
arithmetic and memory traffic at peak rates, a lower bound. The rates are those of --card, from its data sheet; those of
--tflops and --bandwidth; or those measured on this device, if it is a GPU or --device names it. Without any of these there are
no step times. --find measures how many identities fit: it trains one step per candidate number of identities on this device,
each in a separate process, until the largest is known to about 2 %.

Examples:
  python -m scripts.benchmark.capacity --gpus 8 --card v100 --precision fp16 --backbone r50 --batch 128
  python -m scripts.benchmark.capacity --gpus 8 --memory 32 --tflops 300 --bandwidth 2000 --storage lean
  python -m scripts.benchmark.capacity --memory 2 --backbone mbf --batch 32 --device cpu --find --quick
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backbones import build_backbone, list_backbones
from backbones.checkpointing import set_checkpointing
from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowAdamW, RowSGD
from partial_fc.centres.store import FORMATS
from partial_fc.config import matmul_dtype
from partial_fc.kernels import choose_kernels
from partial_fc.memory import HeadMemory
from partial_fc.sampling.planning import num_active
from utils import distributed
from utils.cli import int_in_range, make_parser
from utils.image import IMAGE_SIZE
from utils.memory import LIBRARY_BYTES, BackboneMemory, backbone_memory, bytes_beside_heads, forward_operations
from utils.optim import build_optimizer
from utils.precision import AUTOCAST, is_fast_in_bf16
from utils.program import run_main
from utils.text import prefix_errors

from .kit import measured_rates, peak_bytes

_GIB = 2**30
# printed instead of step times
_NO_RATES = "no step times: no GPU is named, and there is none here; name it with --card, or give --tflops and --bandwidth"


# The table comes from the manufacturers' data sheets. None of it was measured, and nothing here has run on these cards.
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and compute or find; return the exit status."""
    parser = make_parser("python -m scripts.benchmark.capacity", __doc__)
    parser.add_argument("--gpus", type=int, default=1, help="processes that share the classes (default 1)")
    parser.add_argument("--card", choices=tuple(CARDS), help="target GPU, for its memory and peak rates")
    parser.add_argument("--memory", type=float, help="GiB of each process (default: that of --card)")
    parser.add_argument("--backbone", default="r50", choices=[*list_backbones(), "none"], help="none: the head alone")
    parser.add_argument("--width", type=float, default=1.0, help="factor on the backbone's channels")
    parser.add_argument("--checkpointing", action="store_true", help="backbone.checkpointing")
    parser.add_argument("--embedding-size", type=int, default=512, help="D, numbers per face")
    parser.add_argument("--image-size", type=int, default=IMAGE_SIZE, help="data.image_size, pixels")
    parser.add_argument("--batch", type=int, default=128, help="images per process and step (default 128)")
    parser.add_argument(
        "--storage", nargs="+", choices=tuple(FORMATS), default=list(FORMATS), help="head.storage, one line for each"
    )
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd", help="of backbone and class centres")
    parser.add_argument("--sample-rate", type=float, default=1.0, help="head.sample_rate")
    parser.add_argument("--sub-centers", type=int_in_range(1, 64), default=1, help="head.sub_centers (default 1)")
    parser.add_argument("--precision", choices=tuple(AUTOCAST), default="bf16", help="of backbone and head (default bf16)")
    parser.add_argument("--cache-mb", type=int, default=-1, help="head.cache_mb (default -1)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="device of this machine, to measure and --find"
    )
    parser.add_argument("--tflops", type=float, help="rate of matrix products of the target device, TFLOP/s; with --bandwidth")
    parser.add_argument("--bandwidth", type=float, help="rate of its memory, GB/s; with --tflops")
    parser.add_argument("--find", action="store_true", help="verify on this device by bisection")
    parser.add_argument("--quick", action="store_true", help="with --find: to about 10 %% instead of 2 %%")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return run_main(lambda: _worker(options, json.loads(options.worker)))
    return run_main(lambda: capacity(options))


def capacity(options: argparse.Namespace) -> None:
    """Print the table of what fits."""
    card = CARDS[options.card] if options.card else None
    if options.memory is None:
        if card is None:
            raise ValueError("--memory is needed: GiB of each process; or --card, whose memory is known")
        options.memory = card.memory
    if card is not None and not card.bf16 and options.precision == "bf16":
        raise ValueError(f"--card {options.card} has no bf16, the default of --precision; give --precision fp16")
    for name in ("gpus", "memory", "batch", "embedding_size"):
        if getattr(options, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {getattr(options, name)}")
    if not 0 < options.sample_rate <= 1:
        raise ValueError(f"--sample-rate must be above 0 and at most 1, got {options.sample_rate}")
    device = distributed.choose_device(options.device, 0)
    rates = rates_of(options, device)
    memory, flops = _backbone(options, device)
    others = bytes_beside_heads(memory, options.batch, "cuda" if is_for_gpu(options, device) else "cpu")
    budget = int(options.memory * _GIB)
    print(
        f"{options.gpus} process(es) of {options.memory:g} GiB, {options.batch} images each, D = {options.embedding_size}, "
        f"{options.precision}, sample rate {options.sample_rate:g}\n"
        f"backbone {options.backbone}: {memory.total(options.batch) / _GIB:.2f} GiB, "
        f"{memory.per_image / 2**20:.1f} MiB per image; {max(0, budget - others) / _GIB:.2f} GiB are left for class centres"
    )
    print(f"{rates.words if rates else _NO_RATES}\n")
    times = f" {'head ms':>8} {'backbone ms':>12}" if rates else ""
    print(
        f"{'storage':<7} {'B/identity':>10} {'identities':>12} {'copy GiB':>9}{times}"
        + ("  found here" if options.find else "")
    )
    rows = []
    for storage in options.storage:
        head = _memory(options, storage, device)
        local = head.classes_in(budget - others)
        size = head.bytes_per_class
        row: dict[str, Any] = {"storage": storage, "bytes_per_identity": size, "identities": local * options.gpus}
        row["copy_bytes"] = local * size
        line = f"{storage:<7} {size:>10} {local * options.gpus:>12,} {row['copy_bytes'] / _GIB:>9.2f}"
        if rates:
            head_ms, body_ms = _step_ms(options, head, local, memory, flops, rates)
            row |= {"head_ms": head_ms, "backbone_ms": body_ms}
            line += f" {head_ms:>8.1f} {body_ms:>12.1f}"
        if options.find:
            row["found_per_process"] = _find(options, storage, local, device)
            line += (
                f"  {row['found_per_process']:,} per process ({row['found_per_process'] / max(1, local):.2f} of the model's)"
            )
        rows.append(row)
        print(line, flush=True)
    if not any(row["identities"] for row in rows):
        print(f"nothing fits: all else takes {others / _GIB:.2f} GiB; lower --batch, or use a smaller backbone")
    if options.json:
        facts = {"backbone_bytes": memory.total(options.batch), "rates": rates._asdict() if rates else None}
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


def _head_config(options: argparse.Namespace, storage: str, device: torch.device) -> HeadConfig:
    return HeadConfig(
        sample_rate=options.sample_rate,
        optimizer=RowAdamW() if options.optimizer == "adamw" else RowSGD(),
        storage=storage,
        matmul_dtype=head_dtype(options, device),
        cache_mb=options.cache_mb,
        sub_centers=options.sub_centers,
    )


def _memory(options: argparse.Namespace, storage: str, device: torch.device) -> HeadMemory:
    away = device.type == "cpu" and is_for_gpu(options, device)  # a GPU that is not here
    kernels = "triton" if away else choose_kernels("auto", device, options.embedding_size)
    config, rows = _head_config(options, storage, device), options.batch * options.gpus
    where = {"world_size": options.gpus, "device": "cuda" if away else device.type}
    return HeadMemory(options.embedding_size, rows, config, kernels=kernels, **where)


def _backbone(options: argparse.Namespace, device: torch.device) -> tuple[BackboneMemory, int]:
    """Return (its memory, operations of forward and backward per image)."""
    if options.backbone == "none":
        return BackboneMemory(0, 0), 0
    size = options.image_size
    with prefix_errors("--backbone, --embedding-size, --width, --image-size, --checkpointing"):
        backbone = _build(options)
    backbone = backbone.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    moments = 2 if options.optimizer == "adamw" else 1
    memory = backbone_memory(backbone, AUTOCAST[options.precision], moments, size)
    return memory, (4 if options.checkpointing else 3) * forward_operations(backbone, size)


def _build(options: argparse.Namespace) -> nn.Module:
    backbone = build_backbone(options.backbone, options.embedding_size, options.width, 0.0, options.image_size)
    if options.checkpointing:
        set_checkpointing(backbone)
    return backbone


def _step_ms(
    options: argparse.Namespace,
    head: HeadMemory,
    local: int,
    memory: BackboneMemory,
    flops: int,
    rates: Rates,
) -> tuple[float, float]:
    """Return lower bounds of the times of head and backbone: the sum of their arithmetic and memory traffic."""
    several = head.config.sub_centers
    active = several * num_active(max(1, local), 0, options.sample_rate)  # centres
    size = head.config.matmul_dtype.itemsize
    left = options.memory * _GIB - head.bytes_for(local) - memory.total(options.batch)
    cache = head.config.cache_mb * 2**20 if head.config.cache_mb >= 0 else max(0.0, left / 4)
    cached = min(1.0, cache / (active * head.rows * size))
    products = (6 * cached + 8 * (1 - cached)) * head.rows * active * head.dim
    traffic = active * (
        2.5 * head.bytes_per_class / several + 2 * cached * head.rows * size
    )  # optimizer state is read twice, the centres three times
    head_seconds = products / (rates.head_tflops * 1e12) + traffic / (rates.bandwidth * 1e9)
    body_seconds = options.batch * (flops / (rates.backbone_tflops * 1e12) + 4 * memory.per_image / (rates.bandwidth * 1e9))
    return 1e3 * head_seconds, 1e3 * body_seconds


def _find(options: argparse.Namespace, storage: str, guess: int, device: torch.device) -> int:
    """Return the largest number of identities with which one process trains a step within the memory, by bisection."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the probes are other processes
    low, high = 0, max(64, 2 * guess)
    probes = [max(32, guess), int(0.97 * guess), int(1.03 * guess)]  # the model should be close, so try near it first
    while high - low > max(16, (0.1 if options.quick else 0.02) * high):
        probe = probes.pop(0) if probes else (low + high) // 2
        if not low < probe < high:
            continue
        fits = _fits(options, storage, probe, device)
        print(f"  {probe:,} identities, {storage}: {'fits' if fits else 'does not fit'}", file=sys.stderr, flush=True)
        low, high = (probe, high) if fits else (low, probe)
    return low


def _fits(options: argparse.Namespace, storage: str, local: int, device: torch.device) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "peak"
        case = {"storage": storage, "local": local, "device": device.type, "result": str(result)}
        command = [sys.executable, "-m", "scripts.benchmark.capacity", *_arguments(options), "--worker", json.dumps(case)]
        process = subprocess.run(command, env=os.environ, capture_output=True, text=True)
        if process.returncode == 0 and result.is_file():
            # on the CPU the growth of the process is measured, which includes the memory of libraries
            reserve = LIBRARY_BYTES["cuda"] if device.type == "cuda" else 0
            return int(result.read_text()) + reserve <= options.memory * _GIB
        if "out of memory" in process.stderr.lower() or "can't allocate" in process.stderr or process.returncode < 0:
            return False
        raise ValueError(f"--find: a probe failed: {process.stderr.strip().splitlines()[-1:]}")


def _arguments(options: argparse.Namespace) -> list[str]:
    names = ["gpus", "memory", "backbone", "width", "embedding_size", "batch", "optimizer", "sample_rate", "precision"]
    texts = [
        text
        for name in [*names, "image_size", "cache_mb", "sub_centers"]
        for text in (f"--{name.replace('_', '-')}", str(getattr(options, name)))
    ]
    return [*texts, "--checkpointing"] if options.checkpointing else texts


def _worker(options: argparse.Namespace, case: dict[str, Any]) -> None:
    """Train one step of backbone and head in this process, like one rank of many; write the growth of its memory."""
    device = torch.device(case["device"])
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory * _GIB / torch.cuda.mem_get_info()[1]))
    margin = build_margin("arcface", scale=64.0, margin=0.5)
    rows, dim = options.batch * options.gpus, options.embedding_size
    torch.mm(torch.ones(64, 64, device=device), torch.ones(64, 64, device=device))
    if options.checkpointing:  # the first one imports torch's compiler
        checkpoint(torch.neg, torch.ones(1), use_reentrant=False)
    before = peak_bytes(device)
    # the automatic cache takes a part of what the rest leaves of this machine's memory, which may be more than --memory
    config = replace(_head_config(options, case["storage"], device), cache_mb=max(0, options.cache_mb))
    head = PartialFC(margin, case["local"], dim, config=config, device=device)
    for (
        tensor
    ) in head.centre_store.tensors.values():  # on the CPU untouched zeros take no memory, but training touches all of them
        tensor[:] = tensor[:]
    embeddings = torch.randn(rows, dim, device=device).requires_grad_()
    labels = torch.randint(case["local"], (1, rows))
    if options.backbone != "none":
        size, backbone = options.image_size, _build(options)
        backbone = backbone.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = build_optimizer(backbone, options.optimizer, 0.1, 0.9, 5e-4)
        images = torch.randn(options.batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
        autocast = AUTOCAST[options.precision]
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            own = backbone(images).float()
        embeddings = torch.cat([own, embeddings[len(own) :].detach()])
    head.begin_step(labels, 0)
    head(embeddings).backward()
    head.step(0.1)
    if options.backbone != "none":
        optimizer.step()
    Path(case["result"]).write_text(str(int(peak_bytes(device) - before)))


if __name__ == "__main__":
    raise SystemExit(main())
