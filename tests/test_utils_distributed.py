import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiny_runs import Started, run_program
from torch import nn

import train
from partial_fc.collectives import Collectives
from utils import distributed
from utils.distributed import (
    RendezvousError,
    SharedError,
    World,
    all_gather_rows,
    any_ranks,
    broadcast_module,
    choose_device,
    init_distributed,
    is_lost_peer,
    raise_on_all_ranks,
)
from utils.program import run_main


def _all_at_once(rank: int, world_size: int) -> None:
    world = World(rank, world_size, rank, world_size, torch.device("cpu"))
    with pytest.raises(SharedError, match=r"^rank 1: no file B$"), raise_on_all_ranks(world):
        if rank == 1:
            raise ValueError("no file B")
    with pytest.raises(SharedError, match=r"^same everywhere$"), raise_on_all_ranks(world):
        raise ValueError("same everywhere")
    with pytest.raises(SharedError, match=r"^rank 1: /there: No space left on device$"), raise_on_all_ranks(world):
        if rank == 1:
            raise OSError(28, "No space left on device", "/there")
    expected = KeyError if rank == 1 else SharedError  # a bug is shown where it is, and ends the others all the same
    with pytest.raises(expected, match="rank 1: KeyError: 'bug'" if rank != 1 else "bug"), raise_on_all_ranks(world):
        if rank == 1:
            raise KeyError("bug")
    with raise_on_all_ranks(world):
        pass
    counts = [2, 0, 3][:world_size]
    rows = torch.full((counts[rank], 2), float(rank))
    gathered = all_gather_rows(rows, counts, world)
    assert gathered[:, 0].tolist() == [float(r) for r in range(world_size) for _ in range(counts[r])]
    assert any_ranks([rank == 1], world) == [True] and any_ranks([False], world) == [False]
    assert any_ranks([False, rank == 1, True], world) == [False, True, True]
    module = nn.BatchNorm1d(2)
    module.running_mean.fill_(rank + 1.0)
    broadcast_module(module, world)
    assert module.running_mean.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_fail_gather_and_agree_together(run_ranks: Callable[..., None], world_size: int):
    run_ranks(_all_at_once, world_size)


def test_one_process_needs_no_group_and_no_port(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    world = init_distributed("cpu")
    assert (world.rank, world.world_size, world.device.type) == (0, 1, "cpu")
    assert not torch.distributed.is_initialized()
    rows = torch.ones(2, 3)
    assert all_gather_rows(rows, [2], world) is rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_an_error():
    with pytest.raises(ValueError, match=r"run.device=cuda, but torch sees no CUDA device"):
        init_distributed("cuda")


def test_a_port_in_use_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in words.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ValueError, match=f"port 127.0.0.1:{port} is in use"):
            init_distributed("cpu")
    monkeypatch.setattr(dist, "rendezvous", mock.Mock(side_effect=RuntimeError("Gloo connectFullMesh failed")))
    with pytest.raises(ValueError, match=f"cannot meet at 127.0.0.1:{port}: no way between them; name the interface"):
        init_distributed("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="local rank 1 has no GPU of the 1 here"):
        choose_device("auto", 1)


def _meet(arguments: list[str]) -> int:
    with mock.patch.object(distributed, "_SILENT", 0.01):
        return run_main(lambda: print(init_distributed("cpu", timeout_minutes=0.01)))


def test_a_port_that_does_not_answer_ends_the_wait_in_time(tmp_path: Path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        words = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        done = Started(_meet, [[]], tmp_path, {**os.environ, **words}).wait(60)
    port = f"127.0.0.1:{words['MASTER_PORT']}"
    says = f"error: rank 1: the processes cannot meet: port {port} does not answer; is rank 0 there, or another program?\n"
    waits = f"rank 1 of 2 waits for others at {port}: do all run, with this WORLD_SIZE and address?\n"
    assert done.returncode == 1 and done.stderr == waits + says


@pytest.mark.parametrize(("name", "value", "least"), [("RANK", "first", 0), ("LOCAL_WORLD_SIZE", "0", 1)])
def test_a_broken_environment_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, least: int
):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"environment variable {name} must be a whole number from {least} on, got '{value}'"):
        init_distributed("cpu")


@pytest.mark.parametrize(("world_size", "words"), [("2", "RANK=1 is there already"), ("3", "WORLD_SIZE is 3 here, 2 there")])
def test_a_process_of_another_job_at_the_same_port_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, world_size: str, words: str
):
    store = dist.HashStore()
    for name, value in (("WORLD_SIZE", "2"), ("RANK 1", "1")):  # which the rank 1 that came first has left
        store.set(name, value)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", world_size)):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **how: iter([(store, 1, int(world_size))]))
    with pytest.raises(RendezvousError, match=words):
        init_distributed("cpu", timeout_minutes=0.01)


def test_a_rank_without_a_world_size_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "3")
    ended = run_program(train.main, [["demo_cpu", f"run.output={tmp_path}", "run.device=cpu"]])
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert "RANK must be below WORLD_SIZE, got RANK=3 and WORLD_SIZE=not set" in ended.stderr


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("NCCL error in: ProcessGroupNCCL.cpp:77, remote process exited or there was a network error, NCCL version 2.27", True),
        ("NCCL error in: NCCLUtils.cpp:94, ncclSystemError: System call (e.g. socket, malloc) failed", True),
        ("NCCL communicator was aborted on rank 1.", True),
        ("Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE) ran for 600000 milliseconds", True),
        ("NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details)", False),
        ("NCCL error: invalid usage, ncclInvalidUsage: This usually reflects invalid usage of NCCL library.", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4242", True),
    ],
)
@pytest.mark.parametrize("kind", [RuntimeError, dist.DistBackendError])
def test_only_what_means_that_another_process_is_gone_is_taken_for_it(kind: type[Exception], text: str, lost: bool):
    assert is_lost_peer(kind(text)) == (lost or (kind is dist.DistBackendError and "CUDA" in text))


def _wait_for_labels(arguments: list[str]) -> int:
    world = init_distributed("cpu", timeout_minutes=0.05)
    collectives, gave_up, begun = Collectives(world.world_size), Path(arguments[1]), time.monotonic()
    if world.rank == 1:
        while not gave_up.exists() and time.monotonic() < begun + 30:
            time.sleep(0.05)
        os._exit(0)
    try:
        {"labels": collectives.gather_labels, "sum": collectives.sum}[arguments[0]](torch.zeros(1, 2, dtype=torch.int64))
    except RuntimeError:
        if time.monotonic() < begun + 20:  # and not because the other process is gone
            gave_up.touch()
    os._exit(0)


@pytest.mark.skipif(bool(os.environ.get("FACE_ONE_PROCESS")), reason="FACE_ONE_PROCESS: ran in the suite itself")
@pytest.mark.parametrize("what", ["labels", "sum"])
def test_the_groups_of_the_head_wait_as_long_as_run_timeout_minutes_says(tmp_path: Path, what: str):
    run_program(_wait_for_labels, [[what, str(tmp_path / "gave_up")]] * 2, timeout=60)
    assert (tmp_path / "gave_up").exists()
