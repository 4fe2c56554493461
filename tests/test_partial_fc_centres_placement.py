"""Class centres that lie elsewhere than on the device: the same bits, room that is reserved, and nothing left behind."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_reference import all_centres
from head_losses import SEED, B, C, D, make_batch
from tiny_runs import final_weights, run_train, small_run
from torch import Tensor

import train
from configs import load_config
from losses import build_margin
from partial_fc import HeadConfig, PartialFC, RowAdamW, RowSGD
from partial_fc.centres.placement import Memory
from partial_fc.centres.store import FORMATS
from utils.checkpoint.format import list_checkpoints

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
        assert bool(fetched) == (head.centre_store.memory.is_far and head.config.fetches)
        losses += [head(part, micro) for micro, part in enumerate(x[mine].chunk(2))]
        head.step(0.05)
        assert not head.centre_store._fetched
    return {"losses": torch.stack(losses)} | {name: rows.clone() for name, rows in head.shard_state().items()}


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("storage", FORMATS)
def test_every_placement_gives_the_same_bits(tmp_path: Path, storage: str):
    for number, (words, setting) in enumerate(SETTINGS.items(), list(FORMATS).index(storage)):
        more = {"storage": storage, "optimizer": OPTIMIZERS[number % 3], **setting}
        expected = _train(_head(tmp_path, "device", **more), range(5))
        _assert_equal(_train(_head(tmp_path, "disk", **more), range(5)), expected)
        _assert_equal(_train(_head(tmp_path, "host", **more), range(5)), expected)
        far = _head(tmp_path, "host", far=True, **more)
        _assert_equal(_train(far, range(5)), expected)
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
        on_disk = _head(folder, "disk", rank, world_size, storage=storage, **SETTINGS[words])
        _assert_equal(_train(on_disk, range(5)), _train(whole, range(5)))


@pytest.mark.parametrize("storage", FORMATS)
def test_a_run_goes_on_in_another_placement_to_the_same_bits(tmp_path: Path, storage: str):
    more = {"storage": storage, "sample_rate": 0.5, "optimizer": RowAdamW()}
    whole = _head(tmp_path, "device", **more)
    saved = _train(whole, range(3))
    expected = _train(whole, range(3, 6))
    for placement, far in (("disk", False), ("host", True)):
        again = _head(tmp_path, placement, far=far, **more)
        again.load_rows(lambda low, high: {name: rows[low:high] for name, rows in saved.items() if name != "losses"})
        _assert_equal(_train(again, range(3, 6)), expected)


def test_the_rows_of_a_step_are_read_ahead_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[Tensor] = []
    monkeypatch.setattr("partial_fc.centres.store.read_ahead", seen.append)
    head = _head(tmp_path, "disk", sample_rate=0.5, optimizer=RowAdamW())
    _, labels = make_batch(all_centres(C, D, SEED), 0)
    head.begin_step(labels[None], 0)
    plan = head._current.plan  # type: ignore[union-attr]
    active = {row for chunk in plan.chunks for row in torch.arange(C)[chunk.select].tolist()}
    for name in ("centres", "momentum", "variance"):
        begin, size = head.centre_store.tensors[name].data_ptr(), 4 * D
        places = [(rows.data_ptr() - begin, rows.nbytes) for rows in seen if 0 <= rows.data_ptr() - begin < C * size]
        rows = [row for place, length in places for row in range(place // size, (place + length) // size)]
        assert set(rows) == active and len(rows) == len(active) < C


def _mapped(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{folder}/" in line]


def test_the_file_has_no_name_and_is_gone_with_the_head(tmp_path: Path):
    head = _head(tmp_path, "disk")
    (line,) = _mapped(tmp_path)
    assert line.endswith("(deleted)") and "rw-s" in line and list(tmp_path.iterdir()) == []
    del head
    assert _mapped(tmp_path) == []


def test_a_disk_without_room_is_an_error_of_one_line_before_training(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ValueError, match=r"^head.placement=disk: .* has no room for a file of 1073741824.00 GiB: .*run.output"):
        Memory("disk", torch.device("cpu"), 1 << 60, tmp_path)

    def full(handle: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert train.main(small_run(dataset, tmp_path, *ON_DISK)) == 1
    said = capsys.readouterr().err.strip()
    assert "No space left on device" in said and "\n" not in said and list_checkpoints(tmp_path / "tiny") == []


def test_a_file_for_a_gpu_and_a_copy_of_it_in_memory_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"head.placement=disk needs run.device=cpu"):
        Memory("disk", torch.device("cuda"), 1 << 20, tmp_path)
    with pytest.raises(ValueError, match=r"head.placement=disk needs checkpoint.background=false, got true"):
        path, *overrides = small_run(tmp_path, tmp_path, ON_DISK[0])
        load_config(path, overrides)


def test_a_training_on_disk_ends_with_the_bits_of_one_on_the_device_and_moves_between_them(dataset: Path, tmp_path: Path):
    more = ["head.sample_rate=0.5", "head.storage=mini", "eval.targets=[]", "train.max_steps=8", "schedule.power=0"]
    assert run_train(2, small_run(dataset, tmp_path, *more, "run.name=whole")).returncode == 0
    assert run_train(2, small_run(dataset, tmp_path, *more, *ON_DISK, "run.name=disk")).returncode == 0
    for steps, where in ((4, ON_DISK), (8, [])):
        arguments = small_run(dataset, tmp_path, *more, *where, f"train.max_steps={steps}", "run.name=moved")
        assert run_train(2, arguments).returncode == 0
    for name in ("disk", "moved"):
        _assert_equal(final_weights(tmp_path / name), final_weights(tmp_path / "whole"))
    for steps, processes, where in ((2, 2, ON_DISK), (4, 3, []), (8, 1, ON_DISK)):
        for name, placement in (("resharded", where), ("resharded_whole", [])):
            arguments = small_run(dataset, tmp_path, *more, *placement, "train.batch_size=12", f"run.name={name}")
            assert run_train(processes, [*arguments, f"train.max_steps={steps}"]).returncode == 0
    _assert_equal(final_weights(tmp_path / "resharded"), final_weights(tmp_path / "resharded_whole"))
