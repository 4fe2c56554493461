"""The memory model against heads that really run, and what a run that cannot fit is told."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_reference import bytes_of_workspace

from backbones import build_backbone
from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowAdamW, RowSGD, check_head_fits
from partial_fc.centres.store import FORMATS
from partial_fc.kernels import KERNELS
from partial_fc.kernels.plain import auto_chunk
from partial_fc.memory import HeadMemory, check_fits
from partial_fc.sampling.planning import search_bytes
from utils.distributed import World
from utils.memory import backbone_memory

D, ROWS = 64, 32


TYPES = (torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)  # of products, and whether bf16 is fast here
STEPS = (1.0, 1, 1), (0.3, 2, 0), (0.5, 1, 64)  # sample rate, micro-batches and MB of the cache
ROWS_OF = (RowSGD(), 1), (RowAdamW(), 1), (RowSGD(), 3)  # optimizer and sub-centers
# any three values of these, and of the kernels, are together in some case
CASES = [
    (state, *kind, *STEPS[step], *ROWS_OF[(number + first + step) % 3], KERNELS[(first == step) ^ (number % 2)])
    for number, state in enumerate(FORMATS)
    for first, kind in enumerate(TYPES)
    for step in range(3)
]


@pytest.mark.parametrize(
    ("state", "dtype", "fast", "sample_rate", "accumulation", "cache_mb", "optimizer", "sub_centers", "kernels"), CASES
)
def test_the_model_is_what_a_head_holds(
    state: str,
    dtype: torch.dtype,
    fast: bool,
    sample_rate: float,
    accumulation: int,
    cache_mb: int,
    optimizer: RowSGD,
    sub_centers: int,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("partial_fc.kernels.plain.is_fast_in_bf16", lambda device: fast)
    torch.manual_seed(0)  # how many rows are read one by one depends on the labels
    num_classes = 20_000 // sub_centers
    more = {"chunk": 2048, "cache_mb": cache_mb, "kernels": kernels, "sub_centers": sub_centers}
    config = HeadConfig(sample_rate, optimizer, state, "decay", matmul_dtype=dtype, **more)
    head = PartialFC(build_margin("cosface"), num_classes, D, config=config)
    for step in range(2):
        head.begin_step(torch.randint(num_classes, (accumulation, ROWS)), step)
        for micro in range(accumulation):
            head(torch.randn(ROWS, D), micro)
        head.step(0.1)
    memory = HeadMemory(D, ROWS, config, accumulation, head.kernels.name)
    assert memory.bytes_per_class == sub_centers * head.centre_store.bytes_per_row
    assert (f"{num_classes} classes of 3 sub-centers" in head.describe()) == (sub_centers > 1)
    noise = head.centre_store.noise
    held = bytes_of_workspace(head) + (0 if noise is None else sum(table.nbytes for table in noise._tables.values()))
    model = memory.shared_bytes(num_classes)
    assert 0.75 * model < held <= model  # the model counts small tensors besides, and never too little


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch_on_a_gpu_has_the_chunks_and_the_search_of_a_gpu(dtype: torch.dtype):
    classes, world = 200_000, World(0, 1, 0, 1, torch.device("cuda"))

    def fitting(**settings: Any) -> int:
        config = HeadConfig(kernels="plain", matmul_dtype=dtype, **settings)
        return check_head_fits(build_margin("arcface"), classes, D, world, config, ROWS, 1, 0, 1 << 40)

    assert fitting() == fitting(chunk=auto_chunk("cuda", dtype)) > fitting(chunk=auto_chunk("cpu", dtype))
    graph = 4 * HeadConfig().neighbours * classes
    searched = search_bytes(HeadConfig(matmul_dtype=dtype), classes, classes, D, "cuda")
    assert fitting(sample_rate=0.5, sampling="neighbours") - fitting(sample_rate=0.5) >= graph + searched


@pytest.mark.parametrize("state", FORMATS)
def test_the_largest_number_that_fits_is_the_largest(state: str):
    memory = HeadMemory(512, 1024, HeadConfig(storage=state))
    for budget in (1 << 28, 1 << 30, 5 << 30):
        most = memory.classes_in(budget)
        assert memory.bytes_for(most) <= budget < memory.bytes_for(most + 1)
    assert memory.classes_in(1000) == 0


def test_a_run_that_cannot_fit_is_told_what_would():
    memory = HeadMemory(512, 1024)
    check_fits(memory, 6_000_000, 1, 32 << 30, 6 << 30)
    with pytest.raises(ValueError, match=r"8000000 classes over 1 .* head.storage=lean .* 2 processes instead of 1"):
        check_fits(memory, 8_000_000, 1, 32 << 30, 6 << 30)
    check_fits(memory._replace(config=HeadConfig(storage="lean")), 8_000_000, 1, 32 << 30, 6 << 30)
    check_fits(memory, 8_000_000, 2, 32 << 30, 6 << 30)
    with pytest.raises(ValueError, match=r"smaller train.batch_size or backbone"):
        check_fits(memory, 1000, 1, 1 << 30, 2 << 30)


def test_a_head_that_lies_elsewhere_takes_its_buffers_and_norms_alone(monkeypatch: pytest.MonkeyPatch):
    for config in (HeadConfig(), HeadConfig(0.1, RowAdamW(), "tiny"), HeadConfig(storage="mini", sub_centers=2)):
        for device, placement in (("cpu", "disk"), ("cuda", "host")):
            here = HeadMemory(512, 1024, config, device=device)
            away = here._replace(config=replace(config, placement=placement))
            assert away.bytes_per_class + away.bytes_elsewhere == here.bytes_per_class and here.bytes_elsewhere == 0
            assert away.bytes_per_class <= 24 and away.bytes_elsewhere == config.sub_centers * 512 * sum(
                dtype.itemsize for dtype in FORMATS[config.storage][: 2 + config.has_second_moment]
            )
            copied = away.shared_bytes(100_000) - here.shared_bytes(100_000)  # what is multiplied, but mini copies that anyway
            assert (copied > 0) == (placement == "host" and config.storage != "mini")
        on_host = HeadMemory(512, 1024, replace(config, placement="host"))
        assert on_host.bytes_per_class == HeadMemory(512, 1024, config).bytes_per_class  # a CPU has no other memory
    with pytest.raises(
        ValueError,
        match=r"30000000 classes .* head.placement=disk checkpoint.background=false \(114.44 GiB there\), or 5 processes",
    ):
        check_fits(HeadMemory(512, 1024), 30_000_000, 1, 32 << 30, 6 << 30)
    with pytest.raises(ValueError, match=r"head.placement=host \(114.44 GiB there\)"):
        check_fits(HeadMemory(512, 1024, device="cuda"), 30_000_000, 1, 32 << 30, 6 << 30)
    margin, world = build_margin("arcface"), World(0, 2, 0, 2, torch.device("cuda"))
    monkeypatch.setattr("partial_fc.memory.available_bytes", lambda world: 57 << 30 if world.device.type == "cpu" else 0)
    with pytest.raises(ValueError, match=r"head.placement=host: 30000000 classes over 2 process\(es\) need 57.22 GiB of host"):
        check_head_fits(margin, 30_000_000, 512, world, HeadConfig(placement="host"), ROWS, 1, 0, 32 << 30)
    check_head_fits(margin, 29_000_000, 512, world, HeadConfig(placement="host"), ROWS, 1, 0, 32 << 30)


def test_the_backbone_probe_counts_what_autograd_keeps_and_moves_nothing():
    backbone = build_backbone("r18", 64, 0.25, 0.0).train()
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    small = backbone_memory(backbone, None, moments=1, image_size=112)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())
    assert backbone.training
    parameters = sum(p.numel() for p in backbone.parameters())
    assert small.parameters == pytest.approx(12 * parameters, rel=0.01)
    assert backbone_memory(backbone, None, moments=2, image_size=112).parameters == pytest.approx(16 * parameters, rel=0.01)
    half = backbone_memory(backbone, torch.bfloat16, moments=1, image_size=112)
    assert 0.4 < half.per_image / small.per_image < 0.8
    # r18 at full width keeps 25 MB per image in half precision (the convolutions' inputs and those of BatchNorm and PReLU)
    full = backbone_memory(build_backbone("r18", 512, 1.0, 0.0), torch.bfloat16, moments=1, image_size=112)
    assert 20 < full.per_image / 2**20 < 30
