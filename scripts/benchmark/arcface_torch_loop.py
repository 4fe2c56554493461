"""Takes the training steps of arcface_torch from its checkout, whose code it imports. Started by face bench train.

That code has packages of the same names as this project (backbones, eval, utils), so this file imports nothing from here and
runs in a process of its own, with the allocator that ours has. The loop does what its train_v2.py does in a step: DDP with its
settings and its fp16 hook, its head and margin, one SGD, the gradient's norm clipped at 5, and on CUDA fp16 with a loss scaler.
Images are drawn once.
"""

import argparse
import contextlib
import importlib
import json
import os
import resource
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", help="arcface_torch's folder, with backbones, losses.py and partial_fc_v2.py")
    parser.add_argument("case", help="what face bench train measures, as JSON")
    options = parser.parse_args()
    runpy.run_path(str(Path(__file__).parents[2] / "utils" / "allocator.py"))["keep_freed_memory"]()
    with serving() as serve:
        try:
            step = _Loop(options.folder, json.loads(options.case))
        except Exception as error:
            print(f"error: --reference {options.folder}: {type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
            return 1
        serve({"time": lambda count: seconds_per_step(step, count, step.device), "peak": lambda _: step.peak_bytes()})
    return 0


@contextlib.contextmanager
def serving() -> Any:
    """Give a function that answers commands: lines `name count` on stdin call commands[name](count), the result goes to stdout.

    Whatever else is printed meanwhile goes to stderr.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def serve(commands: dict[str, Callable[[int], Any]]) -> None:
        for line in sys.stdin:
            name, count = line.split()
            print(json.dumps(commands[name](int(count))), file=replies, flush=True)

    yield serve


def seconds_per_step(step: Callable[[], Any], count: int, device: torch.device) -> float:
    """Return the mean time of `count` steps that follow an untimed one."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    step()
    started = now()
    for _ in range(count):
        step()
    return (now() - started) / count


class _Loop:
    """One rank of arcface_torch's training.

    Args:
        folder: of its checkout.
        case: network, classes, images of this rank in a step (rank_batch), rank, ranks, threads, device, half, rendezvous.
    """

    def __init__(self, folder: str, case: dict[str, Any]) -> None:
        sys.path[0] = str(Path(folder).resolve())  # in place of this file's own folder
        backbones, losses, heads = map(importlib.import_module, ("backbones", "losses", "partial_fc_v2"))
        rank, ranks = case["rank"], case["ranks"]
        torch.set_num_threads(case["threads"])
        self.device = torch.device(case["device"], rank) if case["device"] == "cuda" else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:  # its head moves tensors to CUDA where it makes them
            torch.Tensor.cuda = lambda tensor, *_: tensor  # type: ignore[method-assign]
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, init_method=f"file://{case['rendezvous']}", rank=rank, world_size=ranks)
        self.half = case["half"]
        network = backbones.get_model(case["network"], dropout=0.0, fp16=self.half, num_features=512).to(self.device).train()
        devices = [rank] if self.device.type == "cuda" else None
        settings: dict[str, Any] = {"broadcast_buffers": False, "bucket_cap_mb": 16, "find_unused_parameters": True}
        self.backbone = DistributedDataParallel(network, device_ids=devices, **settings)
        self.backbone.register_comm_hook(None, fp16_compress_hook)
        self.backbone._set_static_graph()
        margin = losses.CombinedMarginLoss(64, 1.0, 0.5, 0.0, 0)
        self.head = heads.PartialFC_V2(margin, 512, case["classes"], 1.0, False).to(self.device).train()
        groups = [{"params": self.backbone.parameters()}, {"params": self.head.parameters()}]
        self.optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=5e-4)
        self.scaler = torch.amp.GradScaler(self.device.type, growth_interval=100, enabled=self.half)
        self.images = torch.randn(case["rank_batch"], 3, 112, 112, device=self.device)
        self.labels = torch.randint(case["classes"], (case["rank_batch"],), device=self.device)

    def __call__(self) -> None:
        """Take one optimizer step."""
        loss = self.head(self.backbone(self.images), self.labels)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.backbone.parameters(), 5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def peak_bytes(self) -> float:
        """Return the peak memory of this process so far."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    raise SystemExit(main())
