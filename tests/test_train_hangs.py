"""Processes that hang, stop, or lose the torchrun that started them: they end in time, say where, and leave no lock."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import REAL, ROOT, Started, command_of, descendants, run_file, run_program, run_train, small_run, wait_for

import train
from training import setup
from utils.checkpoint.format import list_checkpoints, step_of


def _program(tmp_path: Path, program: str) -> str:
    """Return the path of a training's program that does `program` before it calls train.main."""
    path = tmp_path / "program.py"
    head = f"import os, signal, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nimport train\n"
    path.write_text(f"{head}{program}\nsys.exit(train.main(sys.argv[1:]))\n")
    return str(path)


_DECODES = """
from data.datasets import ListDataset
from data.record_dataset import RecordDataset
whole, images = RecordDataset.decode_into, 0
def decode(self, index, out):
    global images
    images += 1
    if images > 20 and os.environ.get("RANK", "1") == "1":
        {act}  # MARK
    return whole(self, index, out)
RecordDataset.decode_into = decode
"""


def test_a_single_process_that_hangs_ends_in_time_and_says_where(dataset: Path, tmp_path: Path):
    arguments = small_run(dataset, tmp_path, "run.timeout_minutes=0.1", "eval.targets=[]", "data.threads=1", "data.prefetch=1")
    done = run_program(run_file, [[_program(tmp_path, _DECODES.format(act="time.sleep(1000)")), *arguments]])
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert re.match(r"error: step [45], waiting for data, for 0.\d minutes \(run.timeout_minutes=0.1\), at /", error), error
    marked = (tmp_path / "program.py").read_text().splitlines()
    line = 1 + next(number for number, text in enumerate(marked) if "# MARK" in text)
    assert error.endswith(f"decoder at {tmp_path / 'program.py'}:{line}"), error
    assert "Traceback" not in done.stderr


def test_a_single_process_that_was_stopped_for_longer_than_the_limit_trains_on(dataset: Path, tmp_path: Path):
    arguments = small_run(dataset, tmp_path, "run.timeout_minutes=0.1", "eval.targets=[]", "train.epochs=3")
    mark = tmp_path / "mark"
    program = _program(tmp_path, _DECODES.format(act=f"images == 21 and open({str(mark)!r}, 'w').close()"))
    started = Started(run_file, [[program, *arguments]], tmp_path)
    started.wait_until(mark.exists)
    started.send(signal.SIGSTOP, 0)
    time.sleep(9)
    started.send(signal.SIGCONT, 0)
    done = started.wait()
    assert done.returncode == 0, done.stderr


def test_a_stopped_rank_was_last_seen_in_the_step_where_it_stopped(dataset: Path, tmp_path: Path):
    arguments = small_run(dataset, tmp_path, "run.timeout_minutes=0.1", "eval.targets=[]", "data.threads=1", "data.prefetch=1")
    # stopped after a second, in which its step is published, also on a busy machine, and before the beat of two seconds
    program = _program(tmp_path, _DECODES.format(act="time.sleep(1), os.kill(os.getpid(), signal.SIGSTOP)"))
    started = Started(run_file, [[program, *arguments]] * 2, tmp_path)
    started.processes[0].join(120)
    started.send(signal.SIGKILL, 1)
    said = started.wait().stderr
    # 20 images of 2 a step: the eleventh step, counted from 0, has none
    of_rank_1 = r"rank 1 was in step 10, waiting for data, silent for \d+ s"
    assert re.search(rf"error: rank 0 in step (9|10), .*[.] {of_rank_1}", said), said


def _start(num_processes: int, arguments: list[str]) -> subprocess.Popen[bytes]:
    command = command_of(num_processes, arguments)
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")


def _wait_until_gone(workers: list[int], seconds: float = 10.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in workers if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, 9)
    return left


def _is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a run folder."""
    test = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    lock = folder / ".lock"
    return lock.exists() and subprocess.run([sys.executable, "-c", test, str(lock)], capture_output=True).returncode != 0


_DEAF = {
    # in C++ code, where no signal is handled: it connects to a store that is gone, and tries again for ever
    "setting up of 2": """
from training import setup
whole = setup.prepare_run_folder
def prepare(*arguments):
    found, parent = whole(*arguments), os.getppid()
    open({marker!r} + os.environ["RANK"], "w").close()
    while os.getppid() == parent:
        time.sleep(0.01)
    arguments[-1].store.clone()
    time.sleep(1000)
setup.prepare_run_folder = prepare
""",
    # torchrun is gone before the worker could ask for a signal
    "importing of 1": """
parent = os.getppid()
open({marker!r} + os.environ["RANK"], "w").close()
while os.getppid() == parent:
    time.sleep(0.01)
""",
}


@pytest.mark.parametrize("doing", _DEAF)
def test_workers_that_cannot_be_told_end_with_torchrun(dataset: Path, tmp_path: Path, doing: str):
    arguments = small_run(dataset, tmp_path, REAL, "train.epochs=400", "eval.targets=[]")
    marker = tmp_path / "there"
    program, count = _program(tmp_path, _DEAF[doing].format(marker=str(marker))), int(doing[-1])
    other = {str(ROOT / "train.py"): program, "--nproc_per_node=2": f"--nproc_per_node={count}"}
    command = [other.get(word, word) for word in command_of(2, arguments)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/") as process:
        wait_for(lambda: all(Path(f"{marker}{rank}").exists() for rank in range(count)), 60, process)
        workers = descendants(process.pid)
        process.kill()
    assert workers and not _wait_until_gone(workers)  # within ten seconds
    assert not _is_locked(tmp_path / "tiny")


def test_torchrun_killed_at_any_moment_leaves_no_process_and_no_lock_and_its_workers_save(dataset: Path, tmp_path: Path):
    """Without the request for a signal they would train on as orphans, and hold the run folder against the next start."""
    arguments = small_run(dataset, tmp_path, REAL, "train.epochs=400", "eval.targets=[]", "checkpoint.every=0")
    started, metrics = time.monotonic(), tmp_path / "whole" / "metrics.jsonl"
    with _start(2, [*arguments, "run.name=whole"]) as process:
        wait_for(metrics.exists, 60, process)
        whole = time.monotonic() - started
        wait_for(lambda: len(metrics.read_text().splitlines()) >= 3, 60, process)
        workers = descendants(process.pid)
        process.kill()
    assert workers and not _wait_until_gone(workers, 10 + whole)
    step = step_of(*list_checkpoints(tmp_path / "whole"))
    again = run_train(1, [*arguments, "run.name=whole", f"train.max_steps={step + 1}"])
    assert step >= 3 and again.returncode == 0 and f"after step {step}" in again.stdout
    for moment in (0, 5):  # from the first lines of the workers to the first step
        with _start(2, arguments) as process:
            time.sleep(whole * (moment + 5) / 14)
            workers = descendants(process.pid)
            process.kill()
        # a worker sees it once torch is imported, which takes most of `whole`
        assert not _wait_until_gone(workers, 10 + whole), f"after {whole * (moment + 5) / 14:.1f} s of {whole:.1f} s"
        assert not _is_locked(tmp_path / "tiny")
    again = run_train(1, [*arguments, "train.epochs=1", "checkpoint.resume=auto"])
    assert again.returncode == 0, again.stderr
    assert list_checkpoints(tmp_path / "tiny")


def _train_with_a_slow_parse(arguments: list[str]) -> int:
    """Train, where rank 0 reads the data for longer than a collective may take."""
    limit, init, build = 6.0, setup.init_distributed, setup.build_dataset

    def slow_build(*given: Any) -> Any:
        if os.environ["RANK"] == "0":
            time.sleep(limit + 2)
        return build(*given)

    setup.init_distributed = lambda device, threads, timeout_minutes: init(device, threads, limit / 60)
    setup.build_dataset = slow_build
    return train.main(arguments)


def test_reading_may_take_longer_than_a_collective(dataset: Path, tmp_path: Path):
    arguments = small_run(dataset, tmp_path, "eval.targets=[]", "train.epochs=1")
    done = run_program(_train_with_a_slow_parse, [arguments] * 2)
    assert done.returncode == 0 and "finished 7 steps" in done.stdout, done.stderr


_HANGS = {
    # a call in which Python runs no handlers and which no signal interrupts, as a wait for the GPU
    "deadlock": """
import ctypes
def hang():
    lock = ctypes.create_string_buffer(256)
    ctypes.CDLL(None).pthread_mutex_lock(lock)
    print("hangs now", flush=True)
    ctypes.CDLL(None).pthread_mutex_lock(lock)
""",
    "sleep": """
def hang():
    print("hangs now", flush=True)
    time.sleep(1000)
""",
}
_HANGS_IN_STEP_5 = """
whole = train.train_step
def train_step(config, tasks, model, parallel, prepared, *more):
    if prepared.number == 5:
        hang()
    return whole(config, tasks, model, parallel, prepared, *more)
train.train_step = train_step
"""
_HANGS_BEFORE_TRAINING = """
from training import setup
setup.build_dataset = lambda *arguments: hang()
"""
_HANGS_WHILE_IT_COMPILES = """
from training import setup
setup.choose_compile = lambda *arguments: ("default", [])
train.for_training = lambda *arguments: lambda *images: hang()
"""


def _interrupt(tmp_path: Path, program: str, arguments: list[str], after_first: str) -> tuple[int, str]:
    """Send SIGINT where the program prints "hangs now", and again after the line `after_first`; return status, stderr."""
    started = Started(run_file, [[_program(tmp_path, program), *arguments]], tmp_path)
    started.wait_until(lambda: "hangs now" in started.said()[0])
    started.send(signal.SIGINT, 0)
    if after_first:
        started.wait_until(lambda: after_first in started.said()[1])
        started.send(signal.SIGINT, 0)
    done = started.wait(30)
    return done.returncode, done.stderr


@pytest.mark.parametrize("kind", _HANGS)
def test_a_second_ctrl_c_ends_a_run_that_hangs_without_saving(dataset: Path, tmp_path: Path, kind: str):
    arguments = small_run(dataset, tmp_path, "eval.targets=[]", "checkpoint.every=0")
    after_first = "Ctrl-C again stops at once, without saving"
    status, said = _interrupt(tmp_path, _HANGS[kind] + _HANGS_IN_STEP_5, arguments, after_first)
    assert status == -signal.SIGINT and "Traceback" not in said, said
    assert list_checkpoints(tmp_path / "tiny") == []


@pytest.mark.parametrize("where", [_HANGS_BEFORE_TRAINING, _HANGS_WHILE_IT_COMPILES])
@pytest.mark.parametrize("kind", _HANGS)
def test_ctrl_c_before_training_ends_a_run_that_hangs(dataset: Path, tmp_path: Path, kind: str, where: str):
    arguments = small_run(dataset, tmp_path, "eval.targets=[]")
    status, said = _interrupt(tmp_path, _HANGS[kind] + where, arguments, "")
    assert status == 130
    assert said.strip() == "interrupted: no step was trained, so nothing was saved; earlier checkpoints are untouched"


def _train_where_a_collective_never_returns(arguments: list[str]) -> int:
    """As under NCCL: the main thread of rank 0 waits in a call that never returns; rank 1 ends with the first argument."""
    end, *rest = arguments
    whole, train.Watchdog = train.train_step, functools.partial(train.Watchdog, silence=2.0)  # type: ignore[misc,assignment]

    def train_step(config: Any, tasks: Any, model: Any, parallel: Any, prepared: Any, *more: Any) -> Any:
        if prepared.number == 5:
            if os.environ["RANK"] == "1":
                time.sleep(0.5)
                if end == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError(end)
            time.sleep(1000)
        return whole(config, tasks, model, parallel, prepared, *more)

    train.train_step = train_step
    return train.main(rest)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("killed", r"rank 1 has been silent for \d+ s"),
        ("CUDA error: an illegal memory access", "rank 1 failed"),
        ("NCCL error: unhandled cuda error", "rank 1 failed"),
    ],
)
def test_a_rank_whose_collective_never_returns_ends_when_its_peer_is_gone(dataset: Path, tmp_path: Path, end: str, said: str):
    arguments = small_run(dataset, tmp_path, "eval.targets=[]")
    done = run_program(_train_where_a_collective_never_returns, [[end, *arguments]] * 2, timeout=100)
    assert done.returncode != 0
    assert re.search(rf"error: rank 0 in step 5, training: {said}", done.stderr), done.stderr
    if end != "killed":  # the error itself is shown, and not taken for another rank's
        assert end in done.stderr
        assert "rank 1 in step 5, training: another process ended" not in done.stderr
