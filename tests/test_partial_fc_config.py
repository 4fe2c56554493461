"""What the head computes in, by the key, the backbone's precision and the device."""

from collections.abc import Callable

import pytest
import torch

from configs import load_config
from partial_fc import HeadConfig, config
from training.sections import NAMED
from utils import precision
from utils.distributed import World


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("device", "autocast", "expected"),
    [
        ("cuda", None, torch.float32), ("cuda", torch.bfloat16, torch.bfloat16), ("cuda", torch.float16, torch.bfloat16),
        ("cpu", None, torch.float32), ("cpu", torch.bfloat16, torch.bfloat16), ("cpu", torch.float16, torch.float32),
    ],
)  # fmt: skip
def test_auto_follows_the_backbone_where_the_device_is_fast_in_bf16(
    device: str, autocast: torch.dtype | None, expected: torch.dtype, fast: bool
):
    found = config.matmul_dtype("auto", autocast, torch.device(device), fast)
    assert found == (expected if fast else torch.float32)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        assert config.matmul_dtype(name, autocast, torch.device(device), fast) == dtype


def _agrees_where_one_is_slow(rank: int, world_size: int) -> None:
    run = load_config("configs/demo_cpu.yaml", [], NAMED)
    world = World(rank, world_size, rank, world_size, torch.device("cpu"))
    for slow, expected in ((1, torch.float32), (None, torch.bfloat16)):
        precision.is_fast_in_bf16 = lambda device, slow=slow: rank != slow
        found = config.head_config(run.head, run.loss, run.optimizer, torch.bfloat16, world)
        assert found.matmul_dtype == expected


def test_the_heads_of_all_ranks_multiply_in_the_same_dtype(run_ranks: Callable[..., None]):
    run_ranks(_agrees_where_one_is_slow, 2)


def test_the_defaults_of_a_head_are_those_of_the_configuration():
    run, world = load_config("configs/base.yaml", ["data.path=/data"], NAMED), World(0, 1, 0, 1, torch.device("cpu"))
    assert config.head_config(run.head, run.loss, run.optimizer, None, world) == HeadConfig()
