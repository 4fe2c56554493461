"""`face train` and the Slurm job: what they start trains, saves when told to, and goes on after a process or machine was lost.

There is no Slurm and no second machine here: srun and scontrol are stand-ins, and the machines are network namespaces.
"""

import contextlib
import ctypes
import fcntl
import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_runs import FORKS, ROOT, Forked, descendants
from torch.distributed import run
from torch.distributed.elastic.metrics import api as metrics
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.utils import _PeriodicTimer
from torch.distributed.launcher import api

from scripts.launch import torchrun, train
from scripts.launch.torchrun import agent_like
from utils.checkpoint.format import list_checkpoints

SLURM = ROOT / "scripts" / "launch" / "slurm.sbatch"
TRAIN = [sys.executable, ROOT / "face_training.py", "train"]
FORKS_TRAIN = [sys.executable, "-m", "test_scripts_launch"]  # the same, in processes that need not import torch; see `_launch`
EVERY = 5  # optimizer steps between checkpoints
DEADLINE = 90.0  # seconds that any one wait may take


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return the config of a tiny run, `tiny`, on images made on the spot."""
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"run: {{output: {tmp_path}, threads: 1, device: cpu}}\n"
        "data: {source: synthetic, num_classes: 12, num_images: 30, image_size: 48}\n"
        "backbone: {name: mbf, width: 0.125, embedding_size: 16}\n"
        "loss: {name: cosface, margin: 0.2, scale: 16}\n"
        "train: {batch_size: 4}\n"
        f"checkpoint: {{every: {EVERY}, background: false}}\n"
        "log: {every: 1}\n"
        "eval: {targets: []}\n"
    )
    return path


def _environment(**variables: str) -> dict[str, str]:
    ours = ("RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    kept = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith("SLURM_")}
    return {**kept, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}


@contextlib.contextmanager
def _started(command: list[object], log: Path, environment: dict[str, str]) -> Iterator[Any]:
    """Start a command with its output in a file; SIGKILL it with all it started when the block ends."""
    start: Any = Forked if command[:3] == FORKS_TRAIN else subprocess.Popen
    with log.open("ab") as output:
        process = start([str(part) for part in command], stdout=output, stderr=output, env=environment, cwd="/")
    try:
        yield process
    finally:
        _kill([process.pid, *descendants(process.pid)])
        process.wait(DEADLINE)


def _kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait_until(holds: Callable[[], bool], process: Any, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while not holds():
        assert process.poll() is None, f"ended with {process.poll()}, too early:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"nothing happened:\n{log.read_text()[-3000:]}"
        time.sleep(0.02)


def _finish(process: Any, log: Path) -> int:
    try:
        return process.wait(DEADLINE)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running:\n{log.read_text()[-3000:]}")


def _steps(run: Path) -> list[int]:
    """Return the optimizer steps in the order in which they were shown; those lost and trained again are there twice."""
    path = run / "train.log"
    return [int(step) for step in re.findall(r"^\S+ \S+ step (\d+)/.*\n", path.read_text(), re.M)] if path.is_file() else []


def _lost_steps(run: Path, total: int) -> int:
    """Return how many steps a run trained twice, after checking that it resumed once and left out none."""
    steps = _steps(run)
    starts = [k for k in range(1, len(steps)) if steps[k] <= steps[k - 1]]
    assert len(starts) == 1, f"not one resume: {steps}"
    before, after = steps[: starts[0]], steps[starts[0] :]
    assert before == list(range(1, len(before) + 1)) and after == list(range(after[0], total + 1)), steps
    assert (run / "train.log").read_text().count("resumed from") == 1
    assert int(list_checkpoints(run)[-1].name[5:]) == total
    return before[-1] - (after[0] - 1)


class _Fork(ForkProcess):
    """Stands in for the subprocess.Popen of torchrun: a fork of it runs train.py."""

    wait = ForkProcess.join

    def __init__(self, args: tuple[str, ...], env: dict[str, str], **_: object) -> None:
        super().__init__(target=self._train, args=(args, env))
        self.start()

    @staticmethod
    def _train(command: tuple[str, ...], environment: dict[str, str]) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT, signal.SIGINT):  # not torchrun's
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        assert command[:3] == (sys.executable, "-u", str(ROOT / "train.py"))
        sys.exit(importlib.import_module("train").main(list(command[3:])))

    def poll(self) -> int | None:
        return self.exitcode


def _launch(way: str, *words: str) -> int | None:
    """Run `face train`, or torchrun instead; under nohup, with a late clock, or in a namespace of that name."""
    subprocess_handler.Popen = _Fork
    if way == "torchrun":
        return run.main(words)
    if way == "nohup":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    elif way == "late":  # a minute, as torch's rendezvous sees it
        now = {"now": lambda zone: datetime.now(zone) - timedelta(minutes=1)}
        dynamic_rendezvous.datetime = type("", (datetime,), now)
    elif way != "face":
        assert ctypes.CDLL(None).setns(os.open(f"/run/netns/{way}", os.O_RDONLY), 0) == 0
    return train.main(words)


def test_the_slurm_job_explains_itself_and_names_what_is_missing(config: Path):
    done = subprocess.run(["bash", SLURM, "--help"], capture_output=True, text=True, env=_environment())
    assert done.returncode == 0 and "scripts/launch/slurm.sbatch configs/" in done.stdout and len(done.stdout) > 500
    assert "set -euo" not in done.stdout
    for variables, arguments, message in [
        ({}, [], "no config given"),
        ({}, [config], "not inside a Slurm job"),
        ({"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": "/"}, [config], "no train.py in /"),
    ]:
        done = subprocess.run(["bash", SLURM, *arguments], capture_output=True, text=True, env=_environment(**variables))
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.startswith("error: ") and message in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machines", "2"], "error: --head must be the HOST[:PORT]"),
        (["--head", "localhost"], "error: --head is for several machines; add --machines N"),
        (["--run-id", "mine"], "error: --run-id is for several machines; add --machines N"),
        (["--is-head", "yes"], "error: --is-head is for several machines; add --machines N"),
        (["--machines", "2", "--head", "localhost:"], "error: --head: the port must be a number"),
        (["--machines", "2", "--head", "no.such.host.invalid"], "error: --head: no address for no.such.host.invalid here"),
        (["train.epoch=3", "--processes", "2"], "Did you mean train.epochs?"),
        (["--check", "--processes", "3"], "must be a multiple of 1 train.accumulation x 3 processes"),
        (["--check", "--processes", "13", "train.batch_size=26"], "head: 12 classes cannot be shared by 13 processes"),
    ],
)
def test_a_mistake_is_one_line_before_a_process_starts(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(train, "_start", None)
    assert train.main([str(config), *arguments]) == 1
    out, said = capsys.readouterr()
    assert out == "" and said.startswith("error: ") and message in said and said.count("\n") == 1


def test_the_processes_are_as_many_as_the_visible_gpus(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    driver, started = tmp_path / "nvidia-smi", []
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # so that it is undone
    own = "--local-addr=localhost"  # without it a machine whose name has no address would wait for itself
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    monkeypatch.setattr(train, "_start", lambda several, *more: started.append(" ".join(several)) or int(own not in several))
    monkeypatch.setattr(importlib.import_module("train"), "run", lambda options: started.append("this one"))
    for lines, visible, overrides, expected in [
        ("GPU 0: A\nGPU 1: B\n", None, ["run.device=auto"], "--nproc-per-node=2 --max-restarts=3"),
        ("GPU 0: A\nGPU 1: B\n", None, ["run.device=cpu"], "this one"),
        ("GPU 0: A\nGPU 1: B\n", None, ["run.device=cpu", "--processes", "3"], "--nproc-per-node=3"),
        ("GPU 0: A\nGPU 1: B\n", "1", ["run.device=auto"], "this one"),
        ("GPU 0: A\nGPU 1: B\n", "", ["run.device=auto"], "this one"),
        ("GPU 0: A\nGPU 1: B\n", "0,1", ["run.device=auto", "--gpus", "1", "--restarts", "1"], "--nproc-per-node=1"),
        ("NVIDIA-SMI has failed\n", None, ["run.device=auto"], "this one"),
    ]:
        driver.write_text(f"#!/bin/sh\nprintf '{lines}'\n")
        driver.chmod(0o755)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert train.main([str(config), *overrides]) == 0, capsys.readouterr().err
        assert f"{started.pop()} ".startswith(f"{expected} ") and not started, (lines, visible, overrides)
    assert train.main([str(config), "--machines", "2", "--head", "127.0.0.1"]) == 1
    assert ",read_timeout=600 " in started.pop() and os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "180"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *host: socket.inet_aton("no address"))
    assert train.main([str(config), "--processes", "3"]) == 1 and not started
    assert capsys.readouterr().err.startswith("error: --processes: localhost has no address here; write ")


@pytest.mark.parametrize("launcher", ["face", "torchrun"])
def test_a_run_on_one_machine_resumes_by_itself_when_a_process_is_killed(config: Path, tmp_path: Path, launcher: str):
    total, log, run = 16, tmp_path / "output.txt", tmp_path / "tiny"
    plain = [*FORKS_TRAIN, "torchrun", "--standalone", "--nproc_per_node=2", "--max-restarts=1", ROOT / "train.py"]
    command = plain if launcher == "torchrun" else [*FORKS_TRAIN, "face", "--processes=2", "--restarts=1"]
    with _started([*command, config, f"train.max_steps={total}"], log, _environment()) as process:
        _wait_until(lambda: len(_steps(run)) >= EVERY + 2, process, log)
        _kill(descendants(process.pid)[1:2])
        assert _finish(process, log) == 0, log.read_text()[-3000:]
    assert "2 x cpu" in log.read_text()
    assert 0 <= _lost_steps(run, total) <= EVERY


def _run_two(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*FORKS_TRAIN, "face", "--processes=2", config, *arguments]
    return FORKS.run([str(part) for part in command], env=_environment(), cwd="/")


def test_a_wrong_path_is_said_once_and_starts_no_processes(config: Path):
    done = _run_two(config, "data.source=recordio", "data.path=/nowhere")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: data.path: no file /nowhere/train.rec. Give the folder that holds train.rec, train.idx and property"
    ]


def test_an_error_found_when_the_processes_met_is_said_once_and_not_tried_again(config: Path, tmp_path: Path):
    (tmp_path / "tiny").mkdir()
    with (tmp_path / "tiny" / ".lock").open("w") as lock:  # which no check looks at
        fcntl.lockf(lock, fcntl.LOCK_EX)
        done = _run_two(config, "--restarts=3")
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 1 and "is in use by another job" in done.stderr
    assert len(done.stderr.splitlines()) <= 3 and "Traceback" not in done.stderr, done.stderr


def test_a_port_that_another_run_of_several_machines_holds_is_one_line(config: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = _run_two(config, "train.batch_size=8", "--machines=2", f"--head=127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 1 and done.stderr.count("error: ") == 1, done.stderr
    assert " for all 2 machines, at most ten minutes\n" in done.stderr
    assert "the port is in use by another run; choose one for all machines, --head HOST:PORT" in done.stderr


def test_the_loss_of_the_head_is_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def meet(arguments: list[str]) -> None:
        raise RendezvousConnectionError("See inner exception for details.") from RuntimeError("Broken pipe\nframe #0")

    monkeypatch.setattr(run, "main", meet)
    monkeypatch.setattr(api, "LocalElasticAgent", api.LocalElasticAgent)  # so that it is put back
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert torchrun.main(["train.py"]) == 1
    said = "Broken pipe; the machine of --head ended or cannot be reached: start the command on all of them again"
    assert capsys.readouterr().err == f"error: the machines cannot meet: {said}\n"


def test_a_process_that_is_killed_for_good_is_named_without_a_traceback(config: Path, tmp_path: Path):
    log, run = tmp_path / "output.txt", tmp_path / "tiny"
    command = [*TRAIN, config, "train.max_steps=500", "--processes=2", "--restarts=0"]
    with _started(command, log, _environment()) as process:
        _wait_until(lambda: len(_steps(run)) >= 2, process, log)
        _kill(descendants(process.pid)[1:2])
        assert _finish(process, log) == 1
    assert "error: the process of rank 1 was ended by SIGKILL" in log.read_text()
    assert "torch/distributed/run.py" not in log.read_text()  # a line of torchrun's own traceback


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_run_on_one_machine_that_is_told_to_stop_saves_and_is_not_restarted(config: Path, tmp_path: Path, number: int):
    """It is told so by a signal, but not by the end of its terminal if it runs under nohup."""
    log, run = tmp_path / "output.txt", tmp_path / "tiny"
    command = [*FORKS_TRAIN, "nohup", config, "train.max_steps=500", "checkpoint.every=0", "--processes=2"]
    with _started(command, log, _environment()) as process:
        _wait_until(lambda: len(_steps(run)) >= 2, process, log)
        if not torchrun.can_forward_signals() and number == signal.SIGUSR1:
            pytest.skip("this torchrun does not pass SIGUSR1 on")
        if torchrun.can_forward_signals():
            steps = len(_steps(run))
            _kill([process.pid], signal.SIGHUP)
            _wait_until(lambda: len(_steps(run)) > steps + 1, process, log)
        _kill([process.pid], number)
        assert _finish(process, log) == 1
    assert "Traceback" not in log.read_text() and "SIGHUP" not in log.read_text()
    (saved,) = list_checkpoints(run)
    assert f"stopped by {signal.Signals(number).name}: saved after step {int(saved.name[5:])} of 500" in log.read_text()
    assert _steps(run) == list(range(1, int(saved.name[5:]) + 1))


def test_a_second_ctrl_c_ends_all_processes_at_once_without_saving(config: Path, tmp_path: Path):
    log, run = tmp_path / "output.txt", tmp_path / "tiny"
    command = [*FORKS_TRAIN, "face", config, "train.max_steps=500", "checkpoint.every=0", "--processes=2"]
    with _started(command, log, _environment()) as process:
        _wait_until(lambda: len(_steps(run)) >= 2, process, log)
        workers = descendants(process.pid)[:2]
        os.kill(workers[1], signal.SIGSTOP)  # so that no step ends
        _kill([process.pid], signal.SIGINT)
        _wait_until(lambda: "Ctrl-C again stops at once, without saving" in log.read_text(), process, log)
        _kill([process.pid], signal.SIGINT)
        assert _finish(process, log) == 1
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert "Traceback" not in log.read_text() and list_checkpoints(run) == []


SRUN = """#!{python}
import os, signal, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
own = [{{"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}} for task in range(int(os.environ["SLURM_NTASKS"]))]
tasks = [subprocess.Popen(command, env={{**os.environ, **variables}}) for variables in own]
print("tasks", *(task.pid for task in tasks), flush=True)
statuses = [task.wait() for task in tasks]
print("statuses", statuses, flush=True)
sys.exit(max(status if status >= 0 else 128 - status for status in statuses))
"""
SCONTROL = """#!{python}
import sys
if sys.argv[1:] == ["show", "hostnames", "head[1-2]"]:
    print("127.0.0.1\\n127.0.0.2")
else:
    with open("{calls}", "a") as calls:
        print(*sys.argv[1:], file=calls)
"""


@pytest.fixture
def slurm(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """Return a file of the calls of scontrol, and the environment of a job of two tasks in which Slurm is a stand-in."""
    programs, calls = tmp_path / "programs", tmp_path / "calls.txt"
    programs.mkdir()
    calls.write_text("")
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text.format(python=sys.executable, calls=calls))
        (programs / name).chmod(0o755)
    job = next(number for number in range(os.getpid(), os.getpid() + 1000) if _is_free(15000 + number % 15000))
    return calls, _environment(
        PATH=f"{programs}:{os.environ['PATH']}", SLURM_JOB_ID=str(job), SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2",
        SLURM_JOB_NODELIST="head[1-2]", SLURM_SUBMIT_DIR=str(ROOT), SLURM_CPUS_PER_TASK="1",
    )  # fmt: skip


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def test_a_slurm_job_that_is_told_to_stop_is_requeued_once_and_then_finishes(
    config: Path, tmp_path: Path, slurm: tuple[Path, dict[str, str]]
):
    calls, environment = slurm
    log, run, total = tmp_path / "output.txt", tmp_path / "tiny", 20
    job = ["bash", SLURM, config, f"train.max_steps={total}", "checkpoint.every=0"]
    with _started(job, log, environment) as process:
        _wait_until(lambda: len(_steps(run)) >= 2, process, log)
        tasks = re.findall(r"\d+", next(line for line in log.read_text().splitlines() if line.startswith("tasks ")))
        _kill([int(task) for task in tasks], signal.SIGUSR1)  # as Slurm does, to all of them
        assert _finish(process, log) == 75, log.read_text()[-3000:]
    assert "statuses [75, 75]" in log.read_text() and "stopped by SIGUSR1: saved after step" in log.read_text()
    assert calls.read_text() == f"requeue {environment['SLURM_JOB_ID']}\n"
    (saved,) = list_checkpoints(run)
    assert _steps(run)[-1] == int(saved.name[5:]) < total
    with _started(job, log, environment) as process:
        assert _finish(process, log) == 0, log.read_text()[-3000:]
    assert calls.read_text().count("requeue") == 1
    assert _steps(run) == list(range(1, total + 1)) and "2 x cpu" in log.read_text()


def test_a_slurm_job_that_fails_passes_its_status_on(config: Path, tmp_path: Path, slurm: tuple[Path, dict[str, str]]):
    calls, environment = slurm
    log = tmp_path / "output.txt"
    with _started(["bash", SLURM, config, "data.source=recordio", "data.path=/nowhere"], log, environment) as process:
        assert _finish(process, log) == 1
    assert log.read_text().count("data.path: no file") == 1 and "statuses" not in log.read_text()  # srun did not run
    python = tmp_path / "programs" / "python_of_the_tasks"  # of 9 images a step for two processes, say: only they see it
    python.write_text("#!/bin/sh\n[ $# = 4 ] || exit $((3 + RANK * 2))\n")  # a check has a word more
    python.chmod(0o755)
    with _started(["bash", SLURM, config, "train.batch_size=9"], log, environment | {"PYTHON": str(python)}) as process:
        assert _finish(process, log) == 5
    assert "statuses [3, 5]" in log.read_text() and calls.read_text() == ""


@pytest.fixture
def machines() -> Iterator[list[tuple[str, str]]]:
    """Return (namespace, network interface) of two network namespaces that reach each other as 10.99.0.1 and 10.99.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("no program ip")
    names = [f"face{os.getpid()}{letter}" for letter in "ab"]
    made = subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"network namespaces are not allowed here: {made.stderr.strip()}")
    try:
        _ip("netns", "add", names[1])
        link = f"ip link add face0 netns {names[0]} type veth peer name face1 netns {names[1]}"
        linked = subprocess.run(link.split(), capture_output=True, text=True)
        if linked.returncode:
            pytest.skip(f"virtual network cards are not allowed here: {linked.stderr.strip()}")
        for k, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.99.0.{k + 1}/24", "dev", f"face{k}")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", f"face{k}", "up")
        yield [(name, f"face{k}") for k, name in enumerate(names)]
    finally:
        for name in names:
            _kill(_processes_of(name))
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _processes_of(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


def test_a_machine_that_is_lost_and_comes_back_is_taken_in(config: Path, tmp_path: Path, machines: list[tuple[str, str]]):
    total, run = 20, tmp_path / "tiny"
    logs = [tmp_path / f"output{k}.txt" for k in range(2)]

    def start(k: int) -> contextlib.AbstractContextManager[Any]:
        name, interface = machines[k]
        where = ["--machines=2", "--head=10.99.0.1", "--processes=1"]
        command = [*FORKS_TRAIN, name, *where, config, f"train.max_steps={total}"]
        return _started(command, logs[k], _environment(GLOO_SOCKET_IFNAME=interface))

    with start(0) as head:
        with start(1) as other:
            _wait_until(lambda: len(_steps(run)) >= EVERY + 2, other, logs[1])
            _kill(_processes_of(machines[1][0]))
            assert _finish(other, logs[1]) == -signal.SIGKILL
        with start(1) as other:
            for process, log in ((other, logs[1]), (head, logs[0])):
                assert _finish(process, log) == 0, log.read_text()[-3000:]
    assert "2 x cpu" in (run / "train.log").read_text()
    assert 0 <= _lost_steps(run, total) <= EVERY


def test_a_machine_whose_clock_is_wrong_leaves_no_other_to_train_alone(config: Path, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = ["--machines=2", f"--head=127.0.0.1:{free.getsockname()[1]}", "--processes=1", config, "train.max_steps=2"]
    second, log, here = [*FORKS_TRAIN, "late", *where, "--is-head=no"], tmp_path / "output.txt", _environment()
    first = [*FORKS_TRAIN, "face", *where]
    with _started(first, log, here) as head, _started(second, tmp_path / "other.txt", here):
        assert _finish(head, log) == 1, log.read_text()
    assert "error: the machines cannot meet: only 1 of 2 came; set their clocks, 10 s apart at most" in log.read_text()
    assert not (tmp_path / "tiny").exists()


class _Agent:
    """What torchrun's agent is to its keep-alive thread: that thread may hold the last reference to it."""

    def __init__(self) -> None:
        self.at_work, self.may_end = threading.Event(), threading.Event()
        self.timer = _PeriodicTimer(timedelta(milliseconds=1), self.keep_alive, weakref.ref(self))

    @staticmethod
    def keep_alive(reference: "weakref.ref[_Agent]") -> None:
        agent = reference()
        if agent is not None:
            agent.at_work.set()
            agent.may_end.wait()

    def run(self) -> None:
        self.timer.start()
        self.at_work.wait()


def test_the_end_of_torchrun_is_quiet_while_its_keep_alive_thread_works(monkeypatch: pytest.MonkeyPatch):
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    kind = agent_like(_Agent)
    agent = kind()
    agent.run()
    at_work, may_end, reference = agent.at_work, agent.may_end, weakref.ref(agent)
    del agent
    at_work.clear()
    may_end.set()
    assert at_work.wait(5)  # a second time: it lives. torch alone would join the thread in itself, and say that it cannot
    reference().timer.cancel()
    assert said == []


def test_a_second_ctrl_c_that_meets_torchrun_at_its_end_is_no_traceback():
    program = (
        "import atexit, os, signal, sys; from torch.distributed import run; from scripts.launch import torchrun\n"
        "def raising(number, frame): raise KeyError\n"
        "run.main = lambda arguments: signal.signal(signal.SIGINT, raising)\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT); sys.exit(torchrun.main(['train.py']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=DEADLINE)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_signal_that_meets_a_stopwatch_of_torch_before_it_begins_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def told() -> float:
        raise SignalException("got a signal", signal.SIGTERM)

    monkeypatch.setattr(metrics, "time", SimpleNamespace(time=told))
    monkeypatch.setattr(run, "main", metrics.prof(print))
    monkeypatch.setattr(api, "LocalElasticAgent", api.LocalElasticAgent)  # so that it is put back
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert torchrun.main(["train.py"]) == 1 and capfd.readouterr() == ("", "")


if __name__ == "__main__":  # of a fork
    sys.exit(_launch(*sys.argv[1:]))
