"""As many identities as one card holds, up to 85 million in `tiny`: one whole step."""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/gpu_parts/largest.py is no program; python -m scripts lists them")

import time
from collections.abc import Iterator

import torch

from losses import build_margin
from partial_fc import HeadConfig, PartialFC
from partial_fc.kernels import choose_kernels
from partial_fc.memory import HeadMemory
from scripts.benchmark.device_rates import synchronise
from utils.memory import free_bytes

from .measuring import Context, Row, centres_drawn_on_the_device, peak_from_here

_DIM, _BATCH = 512, 128


def measure(context: Context) -> Iterator[Row]:
    """Yield one row.

    Raises:
        ValueError: a loss or a centre is not finite.
    """
    device = context.device
    matmul = torch.float32 if context.quick else torch.bfloat16
    config = HeadConfig(storage="tiny", matmul_dtype=matmul, cache_mb=64)
    kernels = choose_kernels("auto", device, _DIM)
    memory = HeadMemory(_DIM, _BATCH, config, kernels=kernels, device=device.type)
    wanted = 30_000 if context.quick else 85_000_000
    classes = min(wanted, memory.classes_in(int(0.97 * free_bytes(device, 1))))
    peak = peak_from_here(device)
    begun = time.perf_counter()
    with centres_drawn_on_the_device():
        head = PartialFC(build_margin("arcface", scale=64.0, margin=0.5), classes, _DIM, config=config, device=device)
    synchronise(device)
    made = time.perf_counter() - begun
    embeddings = torch.randn(_BATCH, _DIM, device=device).requires_grad_()
    labels = torch.randint(classes, (1, _BATCH))
    seconds = []
    for step in range(2):
        begun = time.perf_counter()
        head.begin_step(labels, step)
        loss = head(embeddings)
        loss.backward()
        head.step(0.01)
        synchronise(device)
        seconds.append(time.perf_counter() - begun)
    if not bool(loss.isfinite()) or not bool(head.centres[-1000:].isfinite().all()):
        raise ValueError(f"the loss is {float(loss.detach())}")
    row: Row = {"classes": classes, "wanted": wanted, "peak_gib": peak() / 2**30, "build_s": made}
    yield {**row, "first_step_s": seconds[0], "step_s": seconds[1], "loss": float(loss.detach())}
