"""Saving under every fault: whatever fails or dies when, the checkpoints there before stay whole, and the next save works."""

import errno
import mmap
import multiprocessing as mp
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import some
from faulty_disk import Disk, faulty
from saving import ALONE, as_files, no_space, save_now

from utils.checkpoint import format as ckpt
from utils.checkpoint import reading
from utils.checkpoint import writer as checkpoint_writer
from utils.checkpoint.resume import prepare_run_folder, write_config
from utils.checkpoint.writer import CheckpointWriter, RetentionPolicy
from utils.distributed import SharedError, World, any_ranks


def _state(value: float, world: World = ALONE) -> dict[str, Any]:
    """Return the arguments of a save; every number in it is `value`."""
    slots = (2 * world.rank, 2 * world.rank + 2)
    return {
        "backbone": {"w": torch.full((3, 2), value)},
        "softmax": {"centres": torch.full((2, 4), value), "momentum": torch.full((2, 4), value)},
        "slots": slots,
        "trainer": {"optimizer": {"state": {0: {"momentum_buffer": torch.full((3, 2), value)}}, "param_groups": []}},
        "facts": {"score": None},
    }


def _check_whole(run: Path, world_size: int = 1) -> list[int]:
    """Return the steps of all checkpoints after checking that each is whole and holds its own step's numbers."""
    steps = []
    for path in ckpt.list_checkpoints(run):
        step = ckpt.step_of(path)
        assert reading.check_hashes(path) == []
        assert reading.read_backbone(path)["w"].unique().tolist() == [step]
        assert reading.shard_reader(path)(0, 2 * world_size)["centres"].unique().tolist() == [step]
        assert reading.read_trainer(path)["optimizer"]["state"][0]["momentum_buffer"].unique().tolist() == [step]
        steps.append(step)
    return steps


def _writer(run: Path, world: World = ALONE, **more: Any) -> CheckpointWriter:
    return CheckpointWriter(run, world, more.pop("keep", RetentionPolicy(last=2, best=0)), **more)


def _operations_of_a_save(run: Path) -> int:
    """Return how many file operations the third save of a run has; leave the run before it as `before` beside."""
    save_now(run, step=1, **_state(1))
    save_now(run, step=2, **_state(2))
    shutil.copytree(run, run.parent / "before")
    writer = _writer(run, background=False)
    with faulty(Disk()) as disk:  # the third save also prunes the first
        writer.save(3, **as_files(**_state(3)), last=True)
    assert {"open", "write", "fsync", "rename", "mkdir", "rmdir", "unlink"} <= set(disk.done)
    return len(disk.done)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_every_file_operation_may_fail(tmp_path: Path, error: int):
    total = _operations_of_a_save(tmp_path / "count")
    failures = 0
    numbers = some(range(total), 1 if error == errno.ENOSPC else 3)
    for number in numbers:
        run = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        warnings: list[str] = []
        writer = _writer(run, background=False, max_failed=1, warn=warnings.append)
        with faulty(Disk(number, error)):
            writer.save(3, **as_files(**_state(3)))
        steps = _check_whole(run)
        assert 2 in steps and warnings, number
        if 3 not in steps:
            failures += 1
            assert steps == [1, 2] and "step_00000003 could not be saved" in warnings[0]
            assert os.strerror(error) in warnings[0] and "Training goes on" in warnings[0]
        writer.save(4, **as_files(**_state(4)))
        assert writer.failed == 0 and _check_whole(run)[-1] == 4
    assert failures > len(numbers) // 2  # the rest struck the pruning, after the checkpoint was whole


def test_checkpoints_are_saved_where_a_folder_cannot_be_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(handle: int) -> None:  # as CIFS does
        if os.path.isdir(f"/dev/fd/{handle}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", refuse)
    save_now(tmp_path, step=1, **_state(1))
    assert _check_whole(tmp_path) == [1]


def _save_and_die(run: Path, number: int) -> None:
    with faulty(Disk(number, error=0)):
        _writer(run, background=False).save(3, **as_files(**_state(3)), last=True)


def test_the_writer_may_be_killed_at_every_file_operation(tmp_path: Path):
    total = _operations_of_a_save(tmp_path / "count")
    said, context = 0, mp.get_context("fork")
    numbers = some(range(total), 2)
    for number in numbers:
        run = shutil.copytree(tmp_path / "before", tmp_path / str(number))
        process = context.Process(target=_save_and_die, args=(run, number))
        process.start()
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
        steps = _check_whole(run)
        assert 2 in steps and steps[-1] in (2, 3), number
        news = ckpt.remove_unfinished(run)
        said += any("step_00000003 was not finished" in line for line in news)
        assert not list((run / "checkpoints").glob(".*"))
        save_now(run, step=4, **_state(4))
        assert _check_whole(run)[-1] == 4
    assert said > len(numbers) // 2


def test_a_disk_that_takes_a_part_of_each_write_gets_all(tmp_path: Path):
    with faulty(Disk(short=True)) as disk:
        save_now(tmp_path, step=5, **_state(5))
    assert disk.done.count("write") > 20 and _check_whole(tmp_path) == [5]


def test_the_last_save_on_a_cpu_takes_no_memory_for_a_copy(tmp_path: Path):
    with _writer(tmp_path) as writer:
        writer.save(1, **as_files(**_state(1)), last=True)
        assert not writer._host_copy.has_memory() and _check_whole(tmp_path) == [1]


def test_training_may_change_everything_while_a_save_is_written(tmp_path: Path):
    state, gate = _state(7), threading.Event()
    with faulty(Disk(before=lambda name: gate.wait(30))), _writer(tmp_path) as writer:
        writer.save(7, **as_files(**state))
        for tensors in (state["backbone"], state["softmax"], state["trainer"]["optimizer"]["state"][0]):
            for tensor in tensors.values():
                tensor.fill_(-1)
        for _ in range(3):
            assert writer.is_writing
            writer.advance(any_writing=True)
        assert ckpt.list_checkpoints(tmp_path) == []
        gate.set()
    assert _check_whole(tmp_path) == [7]


@pytest.mark.gpu
def test_a_state_on_the_gpu_may_change_as_soon_as_save_returns(tmp_path: Path):
    world = World(0, 1, 0, 1, torch.device("cuda", 0))
    with _writer(tmp_path, world) as writer:
        for step in (1, 2):  # the second save goes through the pinned memory of the first
            state = _state(step)
            tensors = {kind: {name: tensor.cuda() for name, tensor in state[kind].items()} for kind in ("backbone", "softmax")}
            writer.save(step, **as_files(**{**state, **tensors}))
            for tensor in (*tensors["backbone"].values(), *tensors["softmax"].values()):
                tensor.fill_(-1)
    assert _check_whole(tmp_path) == [1, 2]


def test_a_save_that_comes_too_early_waits_for_the_one_before(tmp_path: Path):
    with _writer(tmp_path, keep=RetentionPolicy(last=5)) as writer:
        for step in (1, 2, 3):
            writer.save(step, **as_files(**_state(step)))
    assert _check_whole(tmp_path) == [1, 2, 3]


def test_the_folder_of_a_run_that_was_moved_away_is_not_made_anew(tmp_path: Path):
    run, warnings = tmp_path / "run", []
    save_now(run, step=1, **_state(1))
    writer = _writer(run, max_failed=1, warn=warnings.append)
    run.rename(tmp_path / "moved")
    writer.save(2, **as_files(**_state(2)))
    writer.finish()
    assert "step_00000002 could not be saved (rank 0: " in warnings[0] and not run.exists()
    assert _check_whole(tmp_path / "moved") == [1]


def test_so_many_saves_in_a_row_may_fail_and_the_last_one_must_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, warnings = checkpoint_writer.write_tensors, []
    writer = _writer(tmp_path, max_failed=2, warn=warnings.append)
    for step in (1, 2):
        monkeypatch.setattr(checkpoint_writer, "write_tensors", no_space)
        for failing in (10 * step, 10 * step + 1):
            writer.save(failing, **as_files(**_state(failing)))
            writer.finish()
        monkeypatch.setattr(checkpoint_writer, "write_tensors", whole)
        writer.save(step, **as_files(**_state(step)))  # one that works, and the count begins anew
        writer.finish()
    assert _check_whole(tmp_path) == [1, 2] and len(warnings) == 4
    monkeypatch.setattr(checkpoint_writer, "write_tensors", no_space)
    with pytest.raises(SharedError, match=r"step_00000003 could not be saved \(rank 0: .*No space left"):
        writer.save(3, **as_files(**_state(3)), last=True)
    for step in (4, 5):
        writer.failed = 0 if step == 4 else writer.failed
        writer.save(step, **as_files(**_state(step)))
        writer.finish()
    writer.save(6, **as_files(**_state(6)))
    with pytest.raises(SharedError, match="the ones before are untouched"):
        writer.finish()
    assert _check_whole(tmp_path) == [1, 2]


@pytest.mark.parametrize("found", ["before", "after all"])
def test_without_memory_for_a_copy_training_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str):
    warnings: list[str] = []
    with _writer(tmp_path, warn=warnings.append) as writer:
        with monkeypatch.context() as patch:
            if found == "before":
                patch.setattr(checkpoint_writer, "available_bytes", lambda world: 100)
            else:
                patch.setattr(mmap, "mmap", mock.Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")))
            writer.save(3, **as_files(**_state(3)))
        assert not writer.is_writing and "no memory for a copy" in warnings[0]
        writer.save(4, **as_files(**_state(4)))
    assert _check_whole(tmp_path) == [3, 4] and len(warnings) == 1


def _steps_of_ranks(rank: int, world_size: int, folder: str) -> None:
    """Loop as training does: a save every third step, a full disk on one rank for some of them."""
    world = World(rank, world_size, rank, world_size, torch.device("cpu"))
    run, warnings = Path(folder), []
    whole = checkpoint_writer.write_tensors
    with _writer(run, world, keep=RetentionPolicy(last=9), max_failed=1, warn=warnings.append) as writer:
        for step in range(1, 31):
            (writing,) = any_ranks([writer.is_writing], world)
            writer.advance(writing)
            if step % 6 == 0:
                writer.finish()  # each save is complete before the fault changes
                bad = step in (12, 24) and rank == world_size - 1
                checkpoint_writer.write_tensors = no_space if bad else whole
                writer.save(step, **as_files(**_state(step, world)))
    assert _check_whole(run, world_size) == [6, 18, 30]
    assert len(warnings) == 2 and f"step_00000012 could not be saved (rank {world_size - 1}: " in warnings[0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_save_beside_their_steps_and_agree_on_a_failure(run_ranks: Callable[..., None], tmp_path: Path, world_size: int):
    run_ranks(_steps_of_ranks, world_size, str(tmp_path / "run"))


def _one_rank_without_memory(rank: int, world_size: int, folder: str) -> None:
    world, warnings = World(rank, world_size, rank, world_size, torch.device("cpu")), []
    if rank == 1:
        checkpoint_writer.available_bytes = lambda world: 100
    with _writer(Path(folder), world, warn=warnings.append) as writer:
        writer.save(3, **as_files(**_state(3, world)))
        assert not writer.is_writing and len(ckpt.list_checkpoints(Path(folder))) == 1  # the save returned when it was complete
    assert len(warnings) == 1 and "no memory for a copy" in warnings[0]


def test_all_ranks_wait_for_the_disk_if_one_has_no_memory_for_a_copy(run_ranks: Callable[..., None], tmp_path: Path):
    run_ranks(_one_rank_without_memory, 2, str(tmp_path / "run"))
    assert _check_whole(tmp_path / "run", 2) == [3]


def _prepare(run: Path) -> Any:
    saving = SimpleNamespace(resume="auto", verify=False)
    plan = prepare_run_folder(run, saving, False, {"seed": 1}, ALONE)
    write_config(run, "a: 1\n", plan.checkpoint, ALONE)
    return plan


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_every_file_operation_of_a_start_may_fail_and_loses_nothing(tmp_path: Path, error: int):
    """A start locks the folder, removes what is not finished, puts a damaged checkpoint aside, writes the configuration."""

    def make(run: Path) -> None:
        for step in (1, 2, 3):
            save_now(run, step=step, **{**_state(step), "facts": {"run_signature": {"seed": 1}}})
        (ckpt.checkpoint_path(run, 3) / "trainer.pt").unlink()
        (run / "checkpoints" / ".step_00000004.partial").mkdir()
        (run / "checkpoints" / ".step_00000004.partial" / "backbone.safetensors").write_text("half")
        (run / "config.yaml").write_bytes(b"a: 2  # by hand, in Latin-1: \xe9\n")

    make(tmp_path / "count")
    with faulty(Disk()) as disk:
        start = _prepare(tmp_path / "count")
    assert start.checkpoint is not None and ckpt.step_of(start.checkpoint) == 2
    assert any("not finished" in line for line in start.warnings)
    assert any("trainer.pt is missing" in line for line in start.warnings)
    failures = 0
    for number in range(len(disk.done)):
        run = tmp_path / str(number)
        make(run)
        try:
            with faulty(Disk(number, error)):
                assert ckpt.step_of(_prepare(run).checkpoint) == 2
        except SharedError as failure:
            failures += 1
            assert os.strerror(error) in str(failure) and len(str(failure).splitlines()) == 1
        assert ckpt.step_of(_prepare(run).checkpoint) == 2  # the next start finds everything
        (run / "checkpoints").glob("damaged_*").__next__()
    assert failures >= 4


def _folder_that_is_not_shared(rank: int, world_size: int, folder: str) -> None:
    """As of a machine that did not mount it: it has a folder of that name, and all it writes succeeds."""
    world = World(rank, world_size, rank, world_size, torch.device("cpu"))
    run = Path(folder) / str(rank)
    with pytest.raises(SharedError, match=r"rank 0: .*several machines need a shared folder: .*softmax_00001_of_00002"):
        save_now(run, step=1, **_state(1, world), world=world)
    assert ckpt.list_checkpoints(run) == []


def test_a_checkpoint_whose_parts_lie_on_two_machines_gets_no_final_name(run_ranks: Callable[..., None], tmp_path: Path):
    run_ranks(_folder_that_is_not_shared, 2, str(tmp_path))
