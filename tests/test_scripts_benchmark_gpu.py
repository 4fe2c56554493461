"""The program that runs everything on one GPU: parts in processes of their own, of which one that fails costs itself only."""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import ROOT
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg

from scripts import face
from scripts.benchmark import gpu, kit


def _run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = gpu.main(["--device", "cpu", "--out", str(tmp_path / "out"), *arguments])
    return status, json.loads((tmp_path / "out" / "summary.json").read_text())


def test_a_part_is_a_benchmark_with_its_device_and_leaves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    part = gpu.PARTS["capacity"]
    monkeypatch.setitem(gpu.PARTS, "capacity", part._replace(command=(*part.command, "--storage", "lean")))  # one is enough
    status, summary = _run(tmp_path, "--quick", "--parts", "capacity", "--minutes", "120")  # a deadline for a busy machine
    assert (status, summary["parts"]["capacity"]["status"]) == (0, "complete") and summary["machine"] == kit.machine("cpu")
    assert json.loads((tmp_path / "out" / "capacity.json").read_text()) and (tmp_path / "out" / "capacity.txt").stat().st_size


def test_every_part_is_a_program_that_takes_its_options(monkeypatch: pytest.MonkeyPatch):
    assert all(part.seconds < 600 for part in gpu.PARTS.values()) and sum(part.seconds for part in gpu.PARTS.values()) == 1800
    programs = [part.command for part in gpu.PARTS.values() if part.command[0] != "pytest"]
    modules = set(face.all_verbs().values())
    for module, *words in programs:
        assert module in modules
        program = __import__(module, fromlist=["main"])
        monkeypatch.setattr(program, "run_main", lambda *_: 0)  # parse, and do nothing
        for device in ("cpu", "cuda"):
            assert program.main([word.format(device=device, json="x.json", memory="1") for word in words] + ["--quick"]) == 0


def test_a_part_that_fails_or_hangs_costs_itself_only_and_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "breaks.py").write_text("print('words of the part')\nraise RuntimeError('the card fell out')")
    row = "tests/test_gpu_head.py::test_of_a[b c] PASSED [  1%]"
    (tmp_path / "hangs.py").write_text(f"import time\nprint('{row}')\ntime.sleep(1000)")
    (tmp_path / "needs.py").write_text("import a_package_of_nobody.inside")
    (tmp_path / "lacks.py").write_text("import utils.a_file_of_ours_that_is_gone")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parts = {
        "tests": gpu._Part(("breaks",), 300),
        "head": gpu._Part(("hangs",), 8),
        "data": gpu._Part(("json.tool", "-h"), 300),
        "train": gpu._Part(("needs",), 300),
        "capacity": gpu._Part(("lacks",), 300),
    }
    monkeypatch.setattr(gpu, "PARTS", parts)
    status, summary = _run(tmp_path)
    found = {name: part["status"] for name, part in summary["parts"].items()}
    assert status == 1 and found["data"] == "complete" and found["train"] == "skipped: needs a_package_of_nobody"
    assert found["tests"] == found["capacity"] == "failed with status 1" and found["head"].startswith("killed at its deadline")
    assert "not complete: tests, head, capacity;" in capsys.readouterr().err
    assert "the card fell out" in (tmp_path / "out" / "tests.txt").read_text()  # what was said is kept
    assert summary["parts"]["head"]["tests"] == {"PASSED": 1}  # also what had been said before it was killed
    assert [_run(tmp_path, "--parts", *names)[0] for names in (["data", "train"], ["train"])] == [0, 1]


def test_the_tests_are_those_of_every_file_with_a_test_marked_gpu(request: pytest.FixtureRequest):
    """In a run of the whole suite, whose files are all collected."""
    marked = {f"tests/{item.path.name}" for item in request.session.items if item.get_closest_marker("gpu")}
    assert marked | {"tests/test_gpu_head.py"} <= set(gpu._gpu_tests()) and len(gpu._gpu_tests()) < 15


def test_where_packages_are_missing_what_can_run_runs_and_the_rest_is_named(tmp_path: Path):
    for name in ("easydict", "yaml", "xxhash", "simplejpeg", "tqdm", "matplotlib", "onnxruntime", "hypothesis", "pyarrow"):
        (tmp_path / f"{name}.py").write_text(f"""raise ModuleNotFoundError("No module named '{name}'")""")
    run = functools.partial(subprocess.run, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    benchmark = [sys.executable, "-m", "scripts.benchmark.gpu", "--device", "cpu", "--minutes", "300", "--out", tmp_path]
    done = run([*benchmark, "--parts", "tests"], cwd=ROOT)
    first, tests = done.stdout.splitlines()[0], json.loads((tmp_path / "summary.json").read_text())["parts"]["tests"]
    assert re.match(
        "missing here: simplejpeg==.* tqdm==.*; for parts that need them: .* -m pip install simplejpeg==.* torch==", first
    )
    assert done.returncode == 1 and done.stderr.startswith("error: not complete: tests; ")  # without a GPU none ran
    assert re.match("skipped: needs easydict", tests["status"]) and tests["tests"]["SKIPPED"] > 50
    done = run([sys.executable, "-c", "from scripts.benchmark import backbones, capacity, head, neighbours"], cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_tests_that_ran_count_where_others_need_a_package_unless_one_failed():
    for ended, status in (("PASSED", "complete: but for what needs yaml"), ("FAILED", "failed with status 1")):
        said = f"tests/test_a.py::test_b[c d] {ended} [ 1%]\n_ ERROR collecting tests/test_c.py _\nE   No module named 'yaml'\n"
        assert gpu._judged("failed with status 1", said) == {"status": status, "tests": {ended: 1}}


def test_a_gpu_tells_how_long_its_kernels_took_and_its_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    events = [FunctionEventAvg() for _ in range(4)]
    for event, microseconds in zip(events, (9e9, 1500.0, 500.0, 9e9), strict=True):
        event.device_type, event.self_device_time_total = DeviceType.CUDA, microseconds
    events[0].device_type, events[3].is_user_annotation = DeviceType.CPU, True
    profiled = SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: contextlib.nullcontext(profiled))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '1980 MHz, 0x4'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    work: list[int] = []
    found = kit.gpu_figures(lambda: work.append(1), torch.device("cuda"))
    assert found == {"gpu_busy_ms": 2.0, "clocks": ["1980 MHz, 0x4"]} and len(work) == 21
    monkeypatch.setenv("PATH", "")
    assert [kit.gpu_figures(list, torch.device(name)) for name in ("cuda", "cpu")] == [{"gpu_busy_ms": 2.0}, {}]


def test_parts_that_the_minutes_do_not_reach_are_named(tmp_path: Path):
    status, summary = _run(tmp_path, "--parts", "head", "data", "--minutes", "0.01")
    assert status == 1 and all(part["status"].startswith("not started") for part in summary["parts"].values())


def test_a_device_that_is_not_there_or_no_time_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, said in ((["--minutes", "0"], "--minutes must be above 0"), ([], "--device cuda, but torch sees no CUDA")):
        assert gpu.main([*arguments, "--out", str(tmp_path / "out")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {said}") and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("device", "calls"), [("cuda", 20), ("cpu", 1)])
def test_bare_work_on_a_gpu_is_timed_over_twenty_calls_between_waits(monkeypatch: pytest.MonkeyPatch, device: str, calls: int):
    """The clock counts a second for a call of the work, and nine for a wait."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("wait"))
    clock = SimpleNamespace(perf_counter=lambda: done.count("work") + 9.0 * done.count("wait"))
    monkeypatch.setattr(kit, "time", clock)
    seconds = kit.bare_seconds(lambda: done.append("work"), torch.device(device), rounds=3)
    waits = ["wait"] if device == "cuda" else []
    assert done == 4 * [*waits, *calls * ["work"], *waits]  # the first round is not counted
    assert seconds == (1.0 if device == "cpu" else (20 + 9) / 20)


def test_the_page_on_gpus_names_the_parts_and_tests_that_there_are():
    text = (ROOT / "docs" / "gpu.md").read_text()
    benchmark = text[text.index("## The benchmark") :]
    assert re.findall(r"^\| `(\w+)` \|", benchmark, re.M) == list(gpu.PARTS)
    named = set(re.findall(r"tests/test_\w+\.py", text))
    assert named and not [name for name in named if not (ROOT / name).is_file()]
    assert {f"tests/{path.name}" for path in (ROOT / "tests").glob("test_gpu_*.py")} <= named
