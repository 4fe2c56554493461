"""Class centres that lie elsewhere than on the device: the same bits, room that is reserved, and nothing left behind."""

import ctypes
import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_reference import all_centres
from head_losses import SEED, B, C, D, make_batch
from saving import save_now
from tiny_runs import final_weights, one_line, run_train, same_bits, small_run
from torch import Tensor

import train
from configs import load_config
from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowAdamW, RowSGD
from partial_fc.centres.placement import Memory
from partial_fc.centres.store import FORMATS
from utils.allocator import out_of_memory
from utils.checkpoint.format import list_checkpoints
from utils.checkpoint.reading import shard_reader

OPTIMIZERS = RowSGD(), RowAdamW(), RowSGD(nesterov=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "all classes": {},
    "sampled": {"sample_rate": 0.5, "logit_correction": "log_r"},
    "without a cache": {"sample_rate": 0.5, "cache_mb": 0},
    "bf16 products": {"sample_rate": 0.5, "matmul_dtype": torch.bfloat16},
    "smoothed": {"sample_rate": 0.5, "label_smoothing": 0.1},
    "neighbours": {"sample_rate": 0.6, "sampling": "neighbours", "neighbours": 3, "neighbours_every": 2},
    "decay": {"sample_rate": 0.5, "inactive_rows": "decay"},
    "plain torch": {"sample_rate": 0.5, "kernels": "plain"},
    "sub-centers": {"sample_rate": 0.5, "sub_centers": 3},
}
_TOP_PAD = -2  # of malloc.h: bytes by which the memory grows
ON_DISK = ["head.placement=disk", "checkpoint.background=false"]


def _head(folder: Path, placement: str, rank: int = 0, world_size: int = 1, far: bool = False, **more: Any) -> PartialFC:
    config = HeadConfig(chunk=5, placement=placement, **more)
    head = PartialFC(build_margin("arcface"), C, D, rank, world_size, SEED, config, folder=folder)
    head.centre_store.memory.is_far = far  # as on a GPU, for which the CPU stands in
    return head


def _train(head: PartialFC, steps: range) -> dict[str, Tensor]:
    """Train; return what a checkpoint would hold, and the losses."""
    share, losses = B // head.world_size, []
    mine = slice(head.rank * share, (head.rank + 1) * share)
    for step in steps:
        x, labels = make_batch(all_centres(C, D, SEED), step)
        head.begin_step(labels[mine].view(2, -1), step)
        fetched = head.centre_store._fetched
        assert bool(fetched) == (head.centre_store.memory.is_far and head.config.fetches_at(head.config.sample_rate))
        losses += [head(part, micro) for micro, part in enumerate(x[mine].chunk(2))]
        head.step(0.05)
        assert not head.centre_store._fetched
    return {"losses": torch.stack(losses)} | {name: rows.clone() for name, rows in head.shard_state().items()}


@pytest.mark.parametrize("storage", FORMATS)
def test_every_placement_gives_the_same_bits(tmp_path: Path, storage: str):
    for number, (words, setting) in enumerate(SETTINGS.items(), list(FORMATS).index(storage)):
        more = {"storage": storage, "optimizer": OPTIMIZERS[number % 3], **setting}
        expected = _train(_head(tmp_path, "device", **more), range(4))  # of which step 2 builds a graph
        same_bits(_train(_head(tmp_path, "disk", **more), range(4)), expected)
        same_bits(_train(_head(tmp_path, "host", **more), range(4)), expected)
        far = _head(tmp_path, "host", far=True, **more)
        same_bits(_train(far, range(4)), expected)
        if words == "sampled":  # what is multiplied is a copy on the device, made before the step
            select = slice(0, 5)
            far.centre_store.fetch([(select, 5)], torch.float32)
            rows = far.centre_store.operand(select, torch.float32, 5)
            assert rows.data_ptr() != far.centres.data_ptr() and rows.data_ptr() == far.centre_store._fetched[0][1].data_ptr()
            assert torch.equal(rows, far.centres[:5].float())


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_placement_gives_the_same_bits_on_several_ranks(run_ranks: Callable[..., None], tmp_path: Path, world_size: int):
    run_ranks(_compare, world_size, tmp_path)


def _compare(rank: int, world_size: int, folder: Path) -> None:
    for storage, words in [("exact", "all classes"), ("mini", "sampled"), ("tiny", "neighbours"), ("lean", "decay")]:
        whole = _head(folder, "device", rank, world_size, storage=storage, **SETTINGS[words])
        expected = _train(whole, range(4))
        for placement in ("disk", "host"):
            head = _head(folder, placement, rank, world_size, far=placement == "host", storage=storage, **SETTINGS[words])
            same_bits(_train(head, range(4)), expected)


@pytest.mark.parametrize("storage", FORMATS)
def test_a_run_goes_on_in_another_placement_to_the_same_bits(tmp_path: Path, storage: str):
    more = {"storage": storage, "sample_rate": 0.5, "optimizer": RowAdamW()}
    whole = _head(tmp_path, "device", **more)
    saved = _train(whole, range(3))
    expected = _train(whole, range(3, 6))
    for placement, far in (("disk", False), ("host", True)):
        again = _head(tmp_path, placement, far=far, **more)
        again.load_rows(lambda low, high: {name: rows[low:high] for name, rows in saved.items() if name != "losses"})
        same_bits(_train(again, range(3, 6)), expected)


def test_the_rows_of_a_step_are_read_ahead_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[Tensor, int, int]] = []
    monkeypatch.setattr("partial_fc.centres.store.read_ahead", lambda *rows: seen.append(rows))
    head = _head(tmp_path, "disk", sample_rate=0.5, optimizer=RowAdamW())
    _, labels = make_batch(all_centres(C, D, SEED), 0)
    head.begin_step(labels[None], 0)
    plan = head._current.plan  # type: ignore[union-attr]
    active = sorted(row for chunk in plan.chunks for row in torch.arange(C)[chunk.select].tolist())
    assert 0 < len(active) < C
    for name in ("centres", "momentum", "variance"):
        rows = [row for tensor, low, high in seen if tensor is head.centre_store.tensors[name] for row in range(low, high)]
        assert sorted(rows) == active


def _mapped(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{folder}/" in line]


def test_the_file_has_no_name_and_is_gone_with_the_head(tmp_path: Path):
    head = _head(tmp_path, "disk")
    (line,) = _mapped(tmp_path)
    assert line.endswith("(deleted)") and "rw-s" in line and list(tmp_path.iterdir()) == []
    del head
    assert _mapped(tmp_path) == []


@pytest.mark.parametrize("placement", ["disk", "device"])
def test_a_head_four_times_larger_than_the_memory_limit_trains_and_resumes_on_two_ranks(
    run_ranks: Callable[..., None], tmp_path: Path, placement: str
):
    run_ranks(_train_with_little_memory, 2, tmp_path, placement)


def _train_with_little_memory(rank: int, world_size: int, folder: Path, placement: str) -> None:
    """Train and resume with 96 MiB more than the process has before there is a head.

    RLIMIT_DATA (ulimit -d) counts private memory. Pages of a shared file, which the kernel can take back at any time, are not
    counted. RLIMIT_AS counts every address, and RLIMIT_RSS does nothing on Linux.
    """
    libc, limit, dim = ctypes.CDLL(None), 96 << 20, 256
    libc.mallopt(_TOP_PAD, 1 << 20)
    lines = Path("/proc/self/status").read_text().splitlines()
    data = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (data + limit, resource.RLIM_INFINITY))
    classes = 4 * limit // (3 * 4 * dim)  # centre and two moments
    config = HeadConfig(0.1, RowAdamW(), placement=placement, chunk=512, cache_mb=0)
    arguments = build_margin("arcface"), classes, dim, rank, world_size, SEED, config
    try:
        head = PartialFC(*arguments, folder=folder)
    except RuntimeError as error:
        assert placement == "device" and out_of_memory(error)
        return
    assert placement == "disk"
    batches = [(torch.randint(classes, (1, B)), torch.randn(B, dim)) for _ in range(4)]
    _few_steps(head, batches, range(3))
    rows, slots = head.shard_state(), (head.first_slot, head.end_slot)
    assert sum(each.nbytes for each in rows.values()) > 2 * limit - 3 * 4 * dim
    path = save_now(folder / f"{rank}", 3, {"w": torch.zeros(1)}, rows, slots, {"a": 1}, {})
    _few_steps(head, batches, range(3, 4))
    expected = head.shard_state()
    del head
    again = PartialFC(*arguments, folder=folder)
    again.load_rows(shard_reader(path))
    _few_steps(again, batches, range(3, 4))
    same_bits(again.shard_state(), expected)


def _few_steps(head: PartialFC, batches: list[tuple[Tensor, Tensor]], steps: range) -> None:
    for step in steps:
        labels, embeddings = batches[step]
        head.begin_step(labels, step)
        head(embeddings)
        head.step(0.05)


def test_a_disk_without_room_is_an_error_of_one_line_before_training(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ValueError, match=r"^head.placement=disk: .* has no room for a file of 1073741824.00 GiB: .*run.output"):
        Memory("disk", torch.device("cpu"), 1 << 60, tmp_path)

    def full(handle: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert train.main(small_run(dataset, tmp_path, *ON_DISK)) == 1
    assert "No space left on device" in one_line(capsys) and list_checkpoints(tmp_path / "tiny") == []
    monkeypatch.delattr(os, "posix_fallocate")  # macOS has none
    assert not Memory("disk", torch.device("cpu"), 1 << 16, tmp_path).zeros((64, 4), torch.float32)[0].any()


def test_a_file_for_a_gpu_and_a_copy_of_it_in_memory_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"head.placement=disk needs run.device=cpu"):
        Memory("disk", torch.device("cuda"), 1 << 20, tmp_path)
    with pytest.raises(ValueError, match=r"head.placement=disk needs checkpoint.background=false, got true"):
        path, *overrides = small_run(tmp_path, tmp_path, ON_DISK[0])
        load_config(path, overrides)


def test_a_training_moves_between_placements_and_numbers_of_processes_to_the_same_bits(dataset: Path, tmp_path: Path):
    more = ["head.sample_rate=0.5", "head.storage=mini", "eval.targets=[]", "schedule.power=0", "train.batch_size=12"]
    for name, plan in {
        "whole": ((2, 4, []),),
        "moved": ((2, 2, ON_DISK), (2, 4, [])),
        "of the host": ((2, 4, ["head.placement=host"]),),
        "resharded": ((3, 2, []), (1, 4, [])),
        "resharded on disk": ((3, 2, ON_DISK), (1, 4, ON_DISK)),
    }.items():
        for processes, steps, where in plan:
            arguments = small_run(dataset, tmp_path, *more, *where, f"train.max_steps={steps}", f"run.name={name}")
            assert run_train(processes, arguments).returncode == 0
    for name in ("moved", "of the host"):
        same_bits(final_weights(tmp_path / name), final_weights(tmp_path / "whole"))
    same_bits(final_weights(tmp_path / "resharded on disk"), final_weights(tmp_path / "resharded"))
    log = (tmp_path / "moved" / "train.log").read_text()
    assert "on the disk (mini)" in log and "changed since that checkpoint: head.placement was 'disk', is 'device'" in log
