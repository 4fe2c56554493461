"""The program that runs everything on one GPU: parts in processes of their own, of which one that fails costs itself only."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import ROOT

from scripts import face
from scripts.benchmark import gpu, kit


def _run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    status = gpu.main(["--device", "cpu", "--out", str(tmp_path / "out"), *arguments])
    return status, json.loads((tmp_path / "out" / "summary.json").read_text())


def test_a_part_is_a_benchmark_with_its_device_and_leaves_its_figures(tmp_path: Path):
    status, summary = _run(tmp_path, "--quick", "--parts", "capacity", "--minutes", "120")  # a deadline for a busy machine
    assert (status, summary["parts"]["capacity"]["status"]) == (0, "complete") and summary["machine"] == kit.machine("cpu")
    assert json.loads((tmp_path / "out" / "capacity.json").read_text()) and (tmp_path / "out" / "capacity.txt").stat().st_size


def test_every_part_is_a_program_that_takes_its_options(monkeypatch: pytest.MonkeyPatch):
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
    (tmp_path / "hangs.py").write_text("import time\nprint('before it hangs', flush=True)\ntime.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parts = {
        "tests": gpu._Part(("breaks",), 300),
        "head": gpu._Part(("hangs",), 8),
        "data": gpu._Part(("json.tool", "-h"), 300),
    }
    monkeypatch.setattr(gpu, "PARTS", parts)
    status, summary = _run(tmp_path)
    found = {name: part["status"] for name, part in summary["parts"].items()}
    assert status == 1 and found["data"] == "complete"
    assert found["tests"] == "failed with status 1" and found["head"].startswith("killed at its deadline")
    assert "not complete: tests, head" in capsys.readouterr().err
    assert "the card fell out" in (tmp_path / "out" / "tests.txt").read_text()  # what was said is kept
    assert "before it hangs" in (tmp_path / "out" / "head.txt").read_text()


def test_parts_that_the_minutes_do_not_reach_are_named(tmp_path: Path):
    status, summary = _run(tmp_path, "--parts", "head", "data", "--minutes", "0.01")
    assert status == 1 and all(part["status"].startswith("not started") for part in summary["parts"].values())


def test_a_device_that_is_not_there_or_no_time_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, said in ((["--minutes", "0"], "--minutes must be above 0"), ([], "--device cuda, but torch sees no CUDA")):
        assert gpu.main([*arguments, "--out", str(tmp_path / "out")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {said}") and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("device", "calls"), [("cuda", 20), ("cpu", 1)])
def test_bare_work_on_a_gpu_is_timed_over_twenty_calls_between_two_waits(
    monkeypatch: pytest.MonkeyPatch, device: str, calls: int
):
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
