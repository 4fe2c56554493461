"""Work of one process that takes longer than any collective may: the others wait, but not for a process that is gone."""

import os
import signal
import subprocess
import time

import pytest
from tiny_runs import run_program

from utils.distributed import LostPeerError, SharedError, World, init_distributed, is_lost_peer, patience, raise_on_all_ranks
from utils.distributed.patience import patiently

pytestmark = pytest.mark.skipif(bool(os.environ.get("FACE_ONE_PROCESS")), reason="FACE_ONE_PROCESS: ran in the suite itself")
LIMIT = 3.0  # seconds that a collective may take


def _of_three(what: str) -> subprocess.CompletedProcess[str]:
    return run_program(_rank, [[what]] * 3, timeout=60)


def _rank(arguments: list[str]) -> int:
    """Do what the test is named after; leave without the order in which a process group would wait for others."""
    world = init_distributed("cpu", timeout_minutes=LIMIT / 60)
    patience._BEAT, patience._SILENCE, patience._SAY = 0.2, 60.0, 1.0
    print(f"rank {world.rank}: {_ACTS[arguments[0]](world)}", flush=True)
    os._exit(0)


def _parse(world: World) -> str:
    with raise_on_all_ranks(world), patiently(world, "reading the data"):
        if world.rank == 0:
            time.sleep(LIMIT + 2)
    return "is done"


def _several(world: World) -> str:
    patience._SILENCE = 1.0
    with patiently(world, "counting"):
        pass
    if world.rank == 1:  # not there yet, and so without a sign of life
        time.sleep(2.5)
    try:
        with raise_on_all_ranks(world), patiently(world, "failing"):
            if world.rank == 1:
                raise ValueError("no such set")
            time.sleep(0.5)
    except SharedError as error:
        return str(error)
    return "no error"


def _dies(world: World) -> str:
    started = time.monotonic()
    try:
        with patiently(world, "reading"):
            if world.rank == 1:
                time.sleep(1)
                os.kill(os.getpid(), signal.SIGKILL)
    except RuntimeError as error:
        return f"lost a peer: {is_lost_peer(error)}, in time: {time.monotonic() - started < 20}"
    return "is done"


def _stops(world: World) -> str:
    patience._SILENCE = 2.0
    if world.rank == 1:
        world.store.set("pid", str(os.getpid()))
    try:
        with patiently(world, "reading"):
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
    except LostPeerError as error:
        print(f"rank {world.rank}: {error}", flush=True)
        os.kill(int(world.store.get("pid")), signal.SIGKILL)
        time.sleep(1)  # rank 0 has the store
    except RuntimeError as error:
        return f"lost a peer: {is_lost_peer(error)}"
    return "ends"


_ACTS = {"parse": _parse, "several": _several, "dies": _dies, "stops": _stops}


def test_work_may_take_longer_than_a_collective_and_one_process_says_who_is_waited_for():
    done = _of_three("parse")
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: is done" for rank in range(3)], done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("waiting for")]
    assert said and set(said) == {"waiting for rank 0 for 0 minute(s): reading the data"}
    assert len(said) <= LIMIT + 2  # each second, and only rank 2, whose next one is rank 0


def test_who_comes_late_is_not_silent_and_errors_reach_all():
    done = _of_three("several")
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: rank 1: no such set" for rank in range(3)], done.stderr


def test_a_process_that_dies_meanwhile_ends_the_wait_at_once():
    done = _of_three("dies")
    said = sorted(done.stdout.splitlines())
    assert said == [f"rank {rank}: lost a peer: True, in time: True" for rank in (0, 2)], done.stderr


def test_a_process_that_is_stopped_meanwhile_ends_the_wait():
    done = _of_three("stops")
    lines = sorted(done.stdout.splitlines())
    silent = "rank 0: rank 0, waiting for the other processes (reading): rank 1 has been silent for"
    assert any(line.startswith(silent) for line in lines), (lines, done.stderr)
    assert "rank 2: lost a peer: True" in lines
