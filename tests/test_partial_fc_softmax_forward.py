"""Every loss on two and three ranks against the slow references, which know of none; and how often the ranks communicate."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from head_losses import CASES, B, C, D, Setting, compare_steps, make_batch
from loss_cases import ONE_REDUCTION, SUMS
from torch import Tensor

from losses import build_margin
from partial_fc import HeadConfig, PartialFC
from partial_fc.collectives import Collectives

pytestmark = pytest.mark.numeric


def _compare(rank: int, world_size: int) -> None:
    """Compare every other loss on two ranks, the others on three; and one of each kind with everything else on both."""
    for case in list(CASES)[world_size % 2 :: 2]:
        compare_steps(rank, world_size, case, Setting(rate=0.6, correction="log_r" if world_size == 2 else "none"))
    for case in ("cosface", "sphereface", "npcface", "adaptiveface", *SUMS):
        bent = (0.0, 0.0) if case in SUMS else (1.5, 0.1)
        limit = None if world_size == 2 else 0.3
        setting = Setting(rate=0.7, limit=limit, focal=bent[0], smoothing=bent[1], accumulation=2, cache_mb=0)
        compare_steps(rank, world_size, case, setting)
    compare_steps(rank, world_size, "arcface", Setting(rate=0.7, entropy=True, accumulation=2))


@pytest.mark.parametrize("world_size", [2, 3])
def test_steps_on_several_ranks_equal_the_reference(run_ranks: Callable[..., None], world_size: int):
    run_ranks(_compare, world_size)


class Counting(Collectives):
    """Counts the collectives."""

    calls = 0

    def all_gather(self, rows: Tensor) -> Tensor:
        self.calls += 1
        return super().all_gather(rows)

    def sum(self, tensor: Tensor) -> Tensor:
        self.calls += 1
        return super().sum(tensor)

    def max(self, tensor: Tensor) -> Tensor:
        self.calls += 1
        return super().max(tensor)


def _count(rank: int, world_size: int) -> None:
    for case in CASES:
        for config in (HeadConfig(), HeadConfig(0.5, interclass_filtering_threshold=0.4, logit_correction="log_r")):
            head = PartialFC(build_margin(case.partition(",")[0], **CASES[case].arguments), C, D, rank, world_size, 3, config)
            head.collectives = head._forward.collectives = counting = Counting(world_size)
            x, labels = make_batch(torch.ones(C, D), 0)
            mine = slice(rank * B // 2, (rank + 1) * B // 2)
            head.begin_step(labels[mine][None], 0)
            head(x[mine])
            head.step(0.1)
            assert counting.calls == 1 + (1 if case in ONE_REDUCTION else 2), case  # 1: the embeddings are gathered


def test_ranks_exchange_sums_once_or_twice(run_ranks: Callable[..., None]):
    run_ranks(_count, 2)


def _equal_on_all(rank: int, world_size: int) -> None:
    for case in CASES:
        margin = build_margin(case.partition(",")[0], **CASES[case].arguments)
        if not margin.state_dict():
            continue
        head = PartialFC(margin, C, D, rank, world_size, 3, HeadConfig(0.5))
        for step in range(3):
            x, labels = make_batch(torch.zeros(C, D) + torch.arange(C)[:, None], step)
            mine = slice(rank * B // world_size, (rank + 1) * B // world_size)
            head.begin_step(labels[mine][None], step)
            head(x[mine])
            head.step(0.1)
        for name, value in margin.state_dict().items():
            parts = [torch.empty_like(value) for _ in range(world_size)]
            dist.all_gather(parts, value)
            assert all(torch.equal(part, value) for part in parts), f"{case}: {name}"


def test_statistics_and_trained_numbers_are_equal_on_all_ranks(run_ranks: Callable[..., None]):
    run_ranks(_equal_on_all, 3)
