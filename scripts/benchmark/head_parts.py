"""What the benchmark of the head measures beside heads: the step's products alone, and the sampling."""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/head_parts.py is no program; python -m scripts lists them")

import statistics
import time
from typing import Any

import numpy as np
import torch

from partial_fc.kernels.products import product_dtype
from partial_fc.sampling.planning import draw_active

from .device_rates import bare_seconds


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


def time_draws(num_classes: int) -> dict[str, float]:
    """Return microseconds of one step's sampling, ours and the plain head's, on the CPU."""
    positives = np.unique(np.random.default_rng(0).integers(num_classes, size=512))

    def plain() -> None:
        priority = torch.rand(num_classes)
        priority[torch.from_numpy(positives)] = 2.0
        torch.topk(priority, k=num_classes // 10)[1].sort()

    figures: dict[str, float] = {"classes": num_classes}
    for name, work, repeats in (("ours_us", lambda: draw_active(positives, num_classes, 0.1, 1), 50), ("plain_us", plain, 3)):
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            work()
            times.append(1e6 * (time.perf_counter() - started))
        figures[name] = statistics.median(times)
    return figures
