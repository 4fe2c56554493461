"""A step of 64 ranks: how often each rank calls, what it sends and over how many hops, and that its loss is that of one."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rounding import rounding_bound
from torch import Tensor

from losses import build_margin
from partial_fc import HeadConfig, PartialFC

RANKS, SHARE, D, C, STEPS = 64, 2, 8, 300, 2
OTHERS = RANKS - 1
SUM, GATHER, SCATTER = "all_reduce", "all_gather", "reduce_scatter"
NUMBERS = 2 * 4 * SHARE * OTHERS  # bytes that a rank sends for a sum of one number for each sample
# what else than embeddings and gradients a micro-batch sends: function, whether the group is not that of all, hops, bytes sent
SUMS = {
    "cosface": [(SUM, False, 2 * OTHERS, 2 * NUMBERS)],
    "sphereface2": [(SUM, False, 2 * OTHERS, NUMBERS), (SUM, False, 2 * OTHERS, 3 * NUMBERS)],
    "circle": [(SUM, False, 2 * OTHERS, NUMBERS), (GATHER, False, OTHERS, 4 * 4 * RANKS * SHARE * OTHERS)],  # K of each shard
}


class _Threads:
    """Ranks that are threads: torch.distributed's functions between them, and what each rank called, sent as in a ring."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.here, self.barrier, self.groups = threading.local(), threading.Barrier(RANKS), 0
        self.given = [torch.empty(0)] * RANKS
        self.calls: list[list[tuple[str, bool, int, int]]] = [[] for _ in range(RANKS)]
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "new_group", self.new_group)
        patch.setattr(dist, SUM, self.all_reduce)
        for ending in ("single", "into_tensor", "tensor"):  # torch 2.13 renamed them
            patch.setattr(dist, f"{GATHER}_{ending}", self.all_gather, raising=False)
            patch.setattr(dist, f"{SCATTER}_{ending}", self.reduce_scatter, raising=False)

    def new_group(self, **named: Any) -> "_Threads":
        self.groups += 1
        return self

    def _meet(self, name: str, tensor: Tensor, group: "_Threads | None", hops: int, sent: int) -> Tensor:
        """Note a call, and return what all ranks gave, (RANKS, ...)."""
        self.calls[self.here.rank].append((name, group is not None, hops, sent))
        self.given[self.here.rank] = tensor
        self.barrier.wait(60)
        everyone = torch.stack(self.given)
        self.barrier.wait(60)
        return everyone

    def all_reduce(self, tensor: Tensor, group: "_Threads | None" = None) -> None:
        if hasattr(self.here, "rank"):  # and not while the heads are built
            tensor.copy_(self._meet(SUM, tensor, group, 2 * OTHERS, 2 * tensor.nbytes * OTHERS // RANKS).sum(dim=0))

    def all_gather(self, output: Tensor, block: Tensor, group: "_Threads | None" = None) -> None:
        output.copy_(self._meet(GATHER, block, group, OTHERS, block.nbytes * OTHERS).flatten(0, 1))

    def reduce_scatter(self, output: Tensor, rows: Tensor, group: "_Threads | None" = None) -> None:
        everyone = self._meet(SCATTER, rows, group, OTHERS, output.nbytes * OTHERS)
        output.copy_(everyone.unflatten(1, (RANKS, -1))[:, self.here.rank].float().sum(dim=0))


def _train(head: PartialFC, embeddings: Tensor, labels: Tensor) -> tuple[list[list[float]], list[list[bool]]]:
    """Return the losses of each step and micro-batch, and the flags that came with them; the last rank has one in step 1."""
    losses, flags = [], []
    for step in range(STEPS):
        plan: Any = head.prepare(labels[step], step, [head.rank == head.world_size - 1 and step == 1, False, step == 0])
        head.begin_step(plan, step)
        found = [head(rows.clone().requires_grad_(), micro) for micro, rows in enumerate(embeddings[step])]
        torch.stack(found).mean().backward()
        head.step(0.5)
        losses.append(torch.stack(found).tolist())
        flags.append(plan.labels.flags)
    return losses, flags


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("loss", "wire", "accumulation"),
    [("cosface", torch.float32, 1), ("sphereface2", torch.float32, 1), ("circle", torch.bfloat16, 2)],
)
def test_a_step_of_64_ranks_makes_these_calls_and_no_other_and_has_the_loss_of_one(
    monkeypatch: pytest.MonkeyPatch, loss: str, wire: torch.dtype, accumulation: int
):
    torch.manual_seed(0)
    batch = (STEPS, accumulation, RANKS, SHARE)
    embeddings, labels, config = torch.randn(*batch, D), torch.randint(C, batch), HeadConfig(wire_dtype=wire, cache_mb=0)
    one = PartialFC(build_margin(loss), C, D, seed=3, config=config)
    alone, _ = _train(one, embeddings.flatten(2, 3), labels.flatten(2, 3))
    threads = _Threads(monkeypatch)
    heads = [PartialFC(build_margin(loss), C, D, rank, RANKS, 3, config) for rank in range(RANKS)]
    assert threads.groups == 1  # that of the labels, for any number of heads

    def run(head: PartialFC) -> tuple[list[list[float]], list[list[bool]]]:
        threads.here.rank = head.rank
        return _train(head, embeddings[:, :, head.rank], labels[:, :, head.rank])

    with ThreadPoolExecutor(RANKS) as pool:
        together = list(pool.map(run, heads))
    assert together == RANKS * together[:1]  # to the bit: no rank asks the others whether the loss is finite
    losses, flags = together[0]
    assert flags == [[False, False, True], [True, False, False]]
    for expected, found in zip(itertools.chain(*alone), itertools.chain(*losses), strict=True):
        assert abs(found - expected) <= rounding_bound(torch.float32, STEPS * C, expected)
    labels_and_flags = (GATHER, True, OTHERS, 8 * (SHARE + 1) * accumulation * OTHERS)
    rows = (False, OTHERS, D * wire.itemsize * SHARE * OTHERS)
    step = [labels_and_flags, *accumulation * [(GATHER, *rows), *SUMS[loss], (SCATTER, *rows)]]
    assert threads.calls == RANKS * [STEPS * step]
