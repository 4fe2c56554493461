import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import ROOT, small_run

import train
from utils import machine
from utils.distributed import init_distributed

NONE = 1 << 62
GIB = 1 << 30


def _group(folder: Path, limit: str, used: int, cache: int, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{'' if version == 2 else 'total_'}inactive_file {cache}\n")


def _cores(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the kernel's files: `fs` of the control groups, `own` of this process's; 16 cores."""
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "fs")
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("own", "groups", "left"),
    [
        ("0::/", {}, NONE),
        ("0::/job", {"job": ("max", GIB, 0)}, NONE),
        ("0::/job", {"job": (str(8 * GIB), 5 * GIB, GIB)}, 4 * GIB),  # cache is given back when memory is wanted
        ("0::/job/step", {"job": (str(8 * GIB), 5 * GIB, 0), "job/step": ("max", GIB, 0)}, 3 * GIB),  # of the group above
        ("0::/not/here", {"": (str(2 * GIB), GIB, 0)}, GIB),  # the host's path, seen from a container
        ("0::/job", {"job": (str(GIB), 2 * GIB, 0)}, 0),
        ("nonsense", {}, NONE),
    ],
)
def test_the_limit_of_a_container_counts(kernel: Path, own: str, groups: dict[str, tuple[str, int, int]], left: int):
    for name, numbers in groups.items():
        _group(kernel / "fs" / name, *numbers)
    (kernel / "own").write_text(own + "\n")
    assert machine.left_to_container() == left


def test_the_limits_of_an_older_kernel_count(kernel: Path):
    _group(kernel / "fs" / "memory" / "docker" / "abc", str(6 * GIB), 3 * GIB, GIB, version=1)
    _cores(kernel / "fs" / "cpu" / "docker", {"cpu.cfs_quota_us": "300000", "cpu.cfs_period_us": "100000"})
    assert (machine.left_to_container(), machine.num_cores()) == (NONE, 16)
    (kernel / "own").write_text("4:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n")
    assert (machine.left_to_container(), machine.num_cores()) == (4 * GIB, 3)


@pytest.mark.parametrize(
    ("groups", "cores"),
    [
        ({}, 16),
        ({"job/step": "max 100000"}, 16),
        ({"job/step": "250000 100000"}, 2),  # two and a half
        ({"job": "400000 100000", "job/step": "max 100000"}, 4),  # of the group above
        ({"job/step": "50000 100000"}, 1),
        ({"job/step": "3200000 100000"}, 16),  # more than there are
        ({"job/step": "nonsense"}, 16),
    ],
)
def test_a_process_may_use_the_cores_that_it_has_and_its_container_allows(kernel: Path, groups: dict[str, str], cores: int):
    for name, text in groups.items():
        _cores(kernel / "fs" / name, {"cpu.max": text})
    (kernel / "own").write_text("0::/job/step\n")
    assert machine.num_cores() == cores


def test_training_computes_with_the_cores_that_a_container_allows(kernel: Path, monkeypatch: pytest.MonkeyPatch):
    chosen: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    (kernel / "own").write_text("0::/job\n")
    _cores(kernel / "fs" / "job", {"cpu.max": "600000 100000"})
    init_distributed("cpu")
    init_distributed("cpu", threads=9)
    assert chosen == [6, 9]


def test_a_run_that_waits_for_cores_says_so_once(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ticks = itertools.count()
    monkeypatch.setattr(train, "waited_for_core", lambda: ((now := next(ticks)) * 5.0, now * 4.0))
    assert train.main(small_run(dataset, tmp_path, "train.max_steps=3", "eval.targets=[]")) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "cores are free" in line]
    assert len(said) == 1 and "44 % of the time" in said[0]


def test_the_kernel_says_how_long_this_thread_has_run_and_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before, started = machine.waited_for_core(), time.thread_time()
    while time.thread_time() < started + 0.2:
        pass
    ran, waited = machine.waited_for_core()
    assert waited >= before[1] and (ran - before[0] > 0.15 or (ran, waited) == (0.0, 0.0))
    monkeypatch.setattr(machine, "_OWN_WAITS", tmp_path / "none")
    assert machine.waited_for_core() == (0.0, 0.0)


@pytest.mark.parametrize(("end", "status"), [("return 3", 3), ("sys.exit(2)", 2)])
def test_a_program_ends_with_its_status_after_all_its_work_and_leaves_its_memory_to_the_system(end: str, status: int):
    program = (
        "import atexit, sys, threading, time\nfrom utils.machine import begin_imports, leave\n"
        "class Kept:\n def __del__(self): print('taken apart')\nkept = Kept()\n"
        "def late():\n time.sleep(0.3)\n print('thread')\n"
        "def main():\n atexit.register(print, 'handler', end='')\n threading.Thread(target=late).start()\n"
        f" print('main')\n {end}\nbegin_imports()\nleave(main)\n"
    )
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "main\nthread\nhandler"), done.stderr


def test_ctrl_c_while_a_program_imports_is_no_traceback_and_interrupts_what_it_does_later():
    program = (
        "import os, signal, sys\nfrom utils.machine import begin_imports, end_imports\nbegin_imports()\n"
        "if sys.argv[1:]: end_imports()\n"
        "try: os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt: print('interrupted')\n"
    )
    starts = [[sys.executable, "-c", program, *words] for words in ([], ["later"])]
    done = [subprocess.run(start, cwd=ROOT, capture_output=True, text=True) for start in starts]
    assert [(one.returncode, one.stdout, one.stderr) for one in done] == [(-signal.SIGINT, "", ""), (0, "interrupted\n", "")]


@pytest.mark.parametrize(
    ("words", "given", "spins"),
    [
        ("face_training.py train demo_cpu --print-config", {}, "20000"),
        ("eval nothing", {}, "20000"),
        ("train.py nothing", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("face_training.py serve nothing", {"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_no_collection_walks_through_what_a_program_imported_and_its_threads_wait_asleep_unless_told_otherwise(
    words: str, given: dict[str, str], spins: str | None
):
    program = words.split()[0]
    run = "run_path" if program.endswith(".py") else "run_module"
    look = (
        f"import gc, runpy, sys\nsys.argv, collected = {words.split()}, []\n"
        "gc.callbacks.append(lambda phase, facts: collected.append(facts['generation']))\n"
        f"try: runpy.{run}({program!r}, run_name='__main__')\n"
        "except SystemExit: print(collected.count(2), gc.isenabled(), gc.get_freeze_count() > 50_000)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", **given}  # OpenMP shows what it took when torch loads it
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (int("nothing" in words), "0 True True"), done.stderr
    shown = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    if shown is None:
        pytest.skip("this torch has another OpenMP than gcc's")
    assert shown[1] == spins if spins else int(shown[1]) > 1_000_000, done.stderr
