"""Versions of everything, and the bare rates: copies, matrix products, launches."""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/gpu_parts/machine.py is no program; python -m scripts lists them")

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from scripts.benchmark.device_rates import measured_rates
from scripts.benchmark.head import machine

from .measuring import Context, Row, times_of

_PACKAGES = ("torch", "triton", "numpy", "opencv-python-headless", "torchvision", "timm", "pytest")
_ROOT = Path(__file__).parents[3]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def measure(context: Context) -> Iterator[Row]:
    """Yield the versions in one row, and each rate in another."""
    device = context.device
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    row: Row = {"what": "versions", "machine": machine(device.type), "python": platform.python_version(), **versions}
    row |= {"cores": len(os.sched_getaffinity(0)), "C compiler": shutil.which("cc") or "none", "commit": _commit()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        row |= {"card": properties.name, "GiB": properties.total_memory / 2**30, "processors": properties.multi_processor_count}
        row |= {"capability": f"{properties.major}.{properties.minor}", "CUDA": str(torch.version.cuda)}
        row |= {"cuDNN": torch.backends.cudnn.version(), "GPUs": torch.cuda.device_count(), "driver": _driver()}
        row["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    yield row
    for name, dtype in DTYPES.items():
        tflops, gbs = measured_rates(dtype, device, context.quick)
        yield {"what": f"products, {name}", "TFLOP/s": tflops}
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        yield {"what": "products, tf32", "TFLOP/s": measured_rates(torch.float32, device)[0]}
        torch.backends.cuda.matmul.allow_tf32 = False
    yield {"what": "copy on the device, read and written", "GB/s": gbs}
    small, count = torch.zeros(1, device=device), 1000

    def launch() -> None:
        for _ in range(count):
            small.add_(1.0)

    launch()
    done, free = times_of(device, launch, 3)
    yield {"what": "small operation: host, and until done", "host us": 1e3 * free / count, "us": 1e3 * done / count}
    if device.type == "cuda":
        host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(host, device=device)
        for name, work in (("to", lambda: there.copy_(host)), ("from", lambda: host.copy_(there))):
            yield {"what": f"copy {name} the device, pinned", "GB/s": host.nbytes / times_of(device, work, 5)[0] / 1e6}


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=_ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if not shutil.which(query[0]):
        return "unknown"
    return subprocess.run(query, capture_output=True, text=True).stdout.strip().partition("\n")[0]
