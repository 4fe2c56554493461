"""Compute how many identities fit.

Prints the largest number of identities for each head.storage, from the memory model (partial_fc/memory.py, and a forward pass
that records what the backbone keeps): the same numbers with which train.py checks before training that the head fits. copy GiB
is the host memory that each process keeps for a copy of its class centres once it has saved. The memory is --memory, or that of
--card from its data sheet. --find measures how many identities fit: it trains one step per candidate number of identities on
this device, each in a separate process, until the largest is known to about 2 %.

--placement host or disk also prints what moves to and from there in a step, and how long that takes if memory keeps none, at
--bandwidth, or at that of the bus or the disk here, which is measured. The identities then have to fit into --room as well.

Examples:
  face bench capacity --gpus 8 --card v100 --precision fp16 --backbone r50 --batch 128
  face bench capacity --gpus 8 --memory 32 --storage lean
  face bench capacity --memory 2 --backbone mbf --batch 32 --device cpu --find --quick
  face bench capacity --gpus 8 --card h100 --placement host --room 200 --bandwidth 50 --sample-rate 0.1
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from backbones import build_backbone, list_backbones
from backbones.checkpointing import set_checkpointing
from losses import build_margin
from partial_fc import HeadConfig, PartialFC
from partial_fc.centres.placement import PLACEMENTS
from partial_fc.centres.store import FORMATS, CentreStore
from partial_fc.config import matmul_dtype
from partial_fc.kernels import choose_kernels
from partial_fc.kernels.plain import LONGEST_ROW
from partial_fc.memory import HeadMemory
from utils import distributed
from utils.allocator import out_of_memory
from utils.cli import int_in_range, make_parser, number_in_range
from utils.image import IMAGE_SIZE
from utils.memory import LIBRARY_BYTES, BackboneMemory, backbone_memory, bytes_beside_heads, free_bytes
from utils.optim import build_optimizer
from utils.precision import AUTOCAST, is_fast_in_bf16
from utils.program import run_main
from utils.text import prefix_errors

from .kit import add_common_arguments, peak_bytes, run_ranks, seconds_of, write_json

_GIB = 2**30
_PROBE = 256 << 20  # bytes with which a bandwidth is measured
_GIVEN = number_in_range(0.001, 1e6)  # GiB, or GB/s


CARDS = {  # GiB by the data sheets, rounded down, because the driver reserves some
    **{"h100": 79.0, "h100-pcie": 79.0, "a100": 79.0, "rtx4090": 23.5, "rtx3090": 23.5, "a10": 22.0, "l4": 22.0},
    **{"h200": 139.0, "a100-40": 39.0, "l40s": 44.0, "v100": 31.0, "t4": 14.5},
}
_WITHOUT_BF16 = ("v100", "t4")


def is_for_gpu(options: argparse.Namespace, device: torch.device) -> bool:
    """Return whether the target is a GPU: always, unless this CPU is to be measured."""
    return device.type == "cuda" or bool(options.card) or not (options.device == "cpu" or options.find)


def head_dtype(options: argparse.Namespace, device: torch.device) -> torch.dtype:
    """Return the dtype of the head's products that a training with head.matmul_dtype=auto takes on the target."""
    if device.type == "cpu" and is_for_gpu(options, device):  # a GPU that is not here
        return torch.bfloat16 if options.precision != "fp32" and options.card not in _WITHOUT_BF16 else torch.float32
    return matmul_dtype("auto", AUTOCAST[options.precision], device, is_fast_in_bf16(device))


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("face bench capacity", __doc__)
    parser.add_argument("--gpus", type=int_in_range(1), default=1, help="processes that share the classes")
    parser.add_argument("--card", choices=tuple(CARDS), help="target GPU, for its memory")
    parser.add_argument("--memory", type=_GIVEN, help="GiB of each process (default: that of --card)")
    parser.add_argument("--backbone", default="r50", choices=[*list_backbones(), "none"], help="none: the head alone")
    parser.add_argument("--width", type=float, default=1.0, help="factor on the backbone's channels")
    parser.add_argument("--checkpointing", action="store_true", help="backbone.checkpointing")
    parser.add_argument("--embedding-size", type=int_in_range(1), default=512, help="D, numbers per face")
    parser.add_argument("--image-size", type=int, default=IMAGE_SIZE, help="data.image_size, pixels")
    parser.add_argument("--batch", type=int_in_range(1), default=128, help="images per process and step")
    parser.add_argument("--storage", nargs="+", choices=tuple(FORMATS), default=list(FORMATS), help="a line for each")
    parser.add_argument("--placement", choices=PLACEMENTS, default="device", help="head.placement; disk: for a CPU")
    parser.add_argument("--room", type=_GIVEN, help="GiB of each process there (default: its part of what is free here)")
    parser.add_argument("--bandwidth", type=_GIVEN, help="GB/s to and from there (default: measured)")
    parser.add_argument("--folder", default=".", help="for disk: a folder on it")
    parser.add_argument("--sample-rate", type=number_in_range(1e-6, 1), default=1.0, help="head.sample_rate")
    parser.add_argument("--precision", choices=tuple(AUTOCAST), default="bf16", help="of backbone and head")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device here, to measure and --find")
    parser.add_argument("--find", action="store_true", help="verify on this device by bisection")
    add_common_arguments(parser, "with --find: to about 10 %% instead of 2 %%", device=False)
    return run_main(capacity, parser.parse_args(arguments))


def capacity(options: argparse.Namespace) -> None:
    """Print the table of what fits."""
    options.memory = options.memory or CARDS.get(options.card)
    if options.memory is None:
        raise ValueError("--memory is needed: GiB of each process; or --card, whose memory is known")
    if options.card in _WITHOUT_BF16 and options.precision == "bf16":
        raise ValueError(f"--card {options.card} has no bf16, the default of --precision; give --precision fp16")
    device = distributed.choose_device(options.device, 0)
    elsewhere = _Elsewhere(options, device) if options.placement != "device" else None
    memory = _backbone(options, device)
    others = bytes_beside_heads(memory, options.batch, "cuda" if is_for_gpu(options, device) else "cpu")
    budget = int(options.memory * _GIB)
    print(
        f"{options.gpus} process(es) of {options.memory:g} GiB, {options.batch} images each, D = {options.embedding_size}, "
        f"{options.precision}, sample rate {options.sample_rate:g}\n"
        f"backbone {options.backbone}: {memory.total(options.batch) / _GIB:.2f} GiB, "
        f"{memory.per_image / 2**20:.1f} MiB per image; {max(0, budget - others) / _GIB:.2f} GiB are left for class centres"
    )
    found = "  found here" if options.find else ""
    moved = f"  in a step from and to the {options.placement}" if elsewhere else ""
    print(f"\n{'storage':<7} {'B/identity':>10} {'identities':>12} {'copy GiB':>9}{found}{moved}")
    rows = []
    for storage in options.storage:
        head = _memory(options, storage, device)
        local = head.classes_in(budget - others)
        size = head.bytes_per_class + head.bytes_elsewhere
        if elsewhere is not None and head.bytes_elsewhere:
            local = min(local, elsewhere.room // head.bytes_elsewhere)
        row: dict[str, Any] = {"storage": storage, "bytes_per_identity": size, "identities": local * options.gpus}
        row["copy_bytes"] = 0 if options.placement == "disk" else local * size
        line = f"{storage:<7} {size:>10} {local * options.gpus:>12,} {row['copy_bytes'] / _GIB:>9.2f}"
        if options.find:
            most = row["found_per_process"] = _find(options, storage, local, device)
            line += f"  {most:,} per process ({most / max(1, local):.2f} of the model's)"
        if elsewhere is not None:
            reads, writes = row["read_bytes"], row["written_bytes"] = head.traffic(local)
            row["seconds"] = reads / elsewhere.reads + writes / elsewhere.writes
            line += f"  {reads / _GIB:.2f} and {writes / _GIB:.2f} GiB, {row['seconds']:.3g} s if memory keeps none"
        rows.append(row)
        print(line, flush=True)
        write_json(options.json, {"backbone_bytes": memory.total(options.batch), "rows": rows})
    if not any(row["identities"] for row in rows):
        advice = "; --device cpu counts no libraries of CUDA" if is_for_gpu(options, device) and not options.card else ""
        print(f"nothing fits beside the other {others / _GIB:.2f} GiB; lower --batch, or use a smaller backbone{advice}")


class _Elsewhere:
    """Where the centres lie instead of on the device: the bytes that one process has there, and bytes per second."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        on_disk = options.placement == "disk"
        if options.find:
            raise ValueError("--find measures --placement device; leave one of the two out")
        if on_disk == is_for_gpu(options, device):
            raise ValueError("--placement disk is for --device cpu, host for a GPU; on a CPU host is the same as device")
        if not on_disk and not options.bandwidth and device.type == "cpu":
            raise ValueError("--bandwidth is needed: GB/s of the bus of that GPU, since none is here to measure it")
        free = shutil.disk_usage(options.folder).free if on_disk else free_bytes(torch.device("cpu"), 1)
        self.room = int(options.room * _GIB) if options.room else free // options.gpus
        self.reads = self.writes = (options.bandwidth or 0) * 1e9
        if not options.bandwidth:
            self.reads, self.writes = _of_disk(options.folder) if on_disk else _of_bus(device)
        source = "given" if options.bandwidth else "measured"
        print(
            f"{options.placement}: {self.room / _GIB:.2f} GiB for each process, {self.reads / 1e9:.2f} GB/s from it and "
            f"{self.writes / 1e9:.2f} to it ({source})"
        )


def _of_disk(folder: str) -> tuple[float, float]:
    """Return the bytes per second that a disk gives and takes, of a file that is gone afterwards."""
    block = os.urandom(_PROBE >> 4)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        begun = time.perf_counter()
        for _ in range(_PROBE // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        written = time.perf_counter()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # or it would be read from memory
        file.seek(0)
        reading = time.perf_counter()
        while file.read(len(block)):
            pass
        return _PROBE / (time.perf_counter() - reading), _PROBE / (written - begun)


def _of_bus(device: torch.device) -> tuple[float, float]:
    """Return the bytes per second from locked memory of the host to a GPU, and back."""
    host, there = torch.zeros(_PROBE, dtype=torch.uint8, pin_memory=True), torch.zeros(_PROBE, dtype=torch.uint8, device=device)
    there.copy_(host)
    host.copy_(there)
    return _PROBE / seconds_of(lambda: there.copy_(host), device), _PROBE / seconds_of(lambda: host.copy_(there), device)


def _head_config(options: argparse.Namespace, storage: str, device: torch.device) -> HeadConfig:
    return HeadConfig(
        sample_rate=options.sample_rate, storage=storage, matmul_dtype=head_dtype(options, device), placement=options.placement
    )


def _memory(options: argparse.Namespace, storage: str, device: torch.device) -> HeadMemory:
    away = device.type == "cpu" and is_for_gpu(options, device)  # a GPU that is not here
    there = "triton" if options.embedding_size <= LONGEST_ROW else "plain"
    kernels = there if away else choose_kernels("auto", device, options.embedding_size)
    config, rows = _head_config(options, storage, device), options.batch * options.gpus
    where = {"world_size": options.gpus, "device": "cuda" if away else device.type}
    return HeadMemory(options.embedding_size, rows, config, kernels=kernels, **where)


def _backbone(options: argparse.Namespace, device: torch.device) -> BackboneMemory:
    if options.backbone == "none":
        return BackboneMemory(0, 0)
    size = options.image_size
    with prefix_errors("--backbone, --embedding-size, --width, --image-size, --checkpointing"):
        backbone = _build(options)
    backbone = backbone.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return backbone_memory(backbone, AUTOCAST[options.precision], 1, size)


def _build(options: argparse.Namespace) -> nn.Module:
    backbone = build_backbone(options.backbone, options.embedding_size, options.width, 0.0, options.image_size)
    if options.checkpointing:
        set_checkpointing(backbone)
    return backbone


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
    # on the CPU the growth of the process is measured, which includes the memory of libraries
    reserve = LIBRARY_BYTES["cuda"] if device.type == "cuda" else 0
    try:
        return run_ranks(_peak_of_a_step, 1, options, storage, local, device)[0] + reserve <= options.memory * _GIB
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, BrokenProcessPool) or out_of_memory(error):  # the kernel has killed it
            return False
        raise ValueError(f"--find: a probe failed: {error}") from None


def _peak_of_a_step(rank: int, options: argparse.Namespace, storage: str, local: int, device: torch.device) -> float:
    """Train one step of backbone and head in this process, like one rank of many; return the growth of its memory."""
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory * _GIB / torch.cuda.mem_get_info()[1]))
    rows, dim = options.batch * options.gpus, options.embedding_size
    torch.mm(torch.ones(64, 64, device=device), torch.ones(64, 64, device=device))
    if options.checkpointing:  # the first one imports torch's compiler
        checkpoint(torch.neg, torch.ones(1), use_reentrant=False)
    before = peak_bytes(device)
    # the automatic cache takes a part of what the rest leaves of this machine's memory, which may be more than --memory
    config = replace(_head_config(options, storage, device), cache_mb=0)
    with mock.patch.object(CentreStore, "fill_initial"):  # to draw those of a whole GPU takes the host minutes
        head = PartialFC(build_margin("arcface", scale=64.0, margin=0.5), local, dim, config=config, device=device)
    head.centre_store.write_centres(slice(None), torch.ones(1, dim))
    head.centre_store.refresh_norms()
    embeddings = torch.randn(rows, dim, device=device).requires_grad_()
    labels = torch.randint(local, (1, rows))
    if options.backbone != "none":
        size, backbone = options.image_size, _build(options)
        backbone = backbone.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = build_optimizer(backbone, "sgd", 0.1, 0.9, 5e-4)
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
    return peak_bytes(device) - before


if __name__ == "__main__":
    raise SystemExit(main())
