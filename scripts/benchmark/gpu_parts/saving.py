"""Saves of a big head: how long training waits for the first and the next, and the memory of the host."""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/gpu_parts/saving.py is no program; python -m scripts lists them")

import time
from collections.abc import Iterator

import torch

from losses import build_margin
from partial_fc import HeadConfig, PartialFC
from scripts.benchmark.head import peak_bytes
from utils.checkpoint.format import SOFTMAX
from utils.checkpoint.writer import CheckpointWriter, RetentionPolicy, Shard
from utils.distributed import World

from .measuring import Context, Row, centres_drawn_on_the_device

_DIM = 512
_CPU = torch.device("cpu")


def measure(context: Context) -> Iterator[Row]:
    """Yield a row per save.

    Raises:
        ValueError: the host has no memory for the copy, or the disk no room.
    """
    classes = 20_000 if context.quick else 10_000_000
    margin = build_margin("cosface", scale=64.0, margin=0.4)
    with centres_drawn_on_the_device():
        head = PartialFC(margin, classes, _DIM, config=HeadConfig(storage="lean"), device=context.device)
    world = World(0, 1, 0, 1, context.device)
    facts = {"score": None, "run_signature": {"num_classes": classes, "seed": 0}}
    said: list[str] = []
    with CheckpointWriter(context.folder, world, RetentionPolicy(last=1, best=0), warn=said.append) as writer:
        for number, name in enumerate(("first", "second")):
            files = {SOFTMAX: Shard(head.shard_state(), (0, classes))}
            size = sum(tensor.nbytes for tensor in files[SOFTMAX].rows.values())
            before, begun = peak_bytes(_CPU), time.perf_counter()
            writer.save(number, files, facts)
            waited = time.perf_counter() - begun
            grown = peak_bytes(_CPU) - before
            writer.finish()
            if said:
                raise ValueError(said[0])
            yield {
                **{"save": name, "classes": classes, "gib": size / 2**30, "training_waits_s": waited},
                **{"complete_after_s": time.perf_counter() - begun, "host_memory_of_state": grown / size},
            }
