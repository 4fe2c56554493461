"""The benchmark of one GPU, as a program on the CPU: every part measures, and none can fail, hang or be left out unseen."""

import argparse
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_runs import FORKS, ROOT

from scripts.benchmark import device_rates, gpu
from scripts.benchmark.gpu_parts import heads
from scripts.benchmark.gpu_parts.measuring import Context, Interval, attempt, device_figures, outermost

POSITIVE = {  # of each part: figures that its rows have, each in one row at least
    "machine": {"TFLOP/s", "GB/s", "us"},
    "tests": {"seconds"},
    "head": {"wall_ms", "bytes_per_identity", "useful_tflops", "floor_ms", "share_of_floor"},
    "backbone": {"images_per_second", "peak_gib", "share of convolutions", "share of BatchNorm", "share of PReLU"},
    "training": {"images_per_second", "memory_gib", "step_ms", "last_loss"},
    "loader": {"images_per_second", "launches_per_second", "launches_of_alone"},
    "checkpoint": {"training_waits_s", "complete_after_s", "gib"},
    "largest": {"step_s", "peak_gib", "loss"},
}


def test_every_part_measures_on_the_cpu_and_the_page_has_its_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "subprocess", FORKS)
    files = ["--json", str(tmp_path / "gpu.json"), "--out", str(tmp_path / "gpu.html")]
    status = gpu.main(["--device", "cpu", "--quick", "--minutes", "30", *files])
    assert status == 0, str((tmp_path / "gpu.json").read_text())[-3000:]
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert list(result["parts"]) == list(gpu.PARTS) == list(POSITIVE)
    for name, part in result["parts"].items():
        assert part["status"] == "complete" and part["reason"] == "" and part["seconds"] > 0
        numbers = {key: value for row in part["rows"] for key, value in row.items() if isinstance(value, float)}
        assert numbers.keys() >= POSITIVE[name], name
        assert all(math.isfinite(value) and value >= 0 for value in numbers.values()), name
        for row in part["rows"]:
            assert all(row[key] > 0 for key in POSITIVE[name] & row.keys() - {"seconds"}), row
            assert "left_out" not in row or row["left_out"] == "CUDA graphs need CUDA"
    rows = {name: part["rows"] for name, part in result["parts"].items()}
    if not torch.cuda.is_available():
        assert {row["outcome"] for row in rows["tests"]} == {"skipped"} and len(rows["tests"]) >= 10
        assert all("CUDA" in row["reason"] or "two GPUs" in row["reason"] for row in rows["tests"])
    # what only CUDA can tell is left out, not made up
    found = {key for part in rows.values() for row in part for key in row}
    assert not found & {"gpu_ms", "enqueue_ms", "launches", "gpu_busy_ms", "gpu_idle_ms", "host_syncs"}
    assert any(len(row.get("timeline", [])) > 20 for row in rows["training"])
    page = (tmp_path / "gpu.html").read_text()
    assert page.count("<img ") == 6 and "no figure here says anything about a GPU" in page  # training has two


def _options(tmp_path: Path, *parts: str, minutes: float = 10.0) -> argparse.Namespace:
    places = {"json": tmp_path / "gpu.json", "out": tmp_path / "gpu.html"}
    return argparse.Namespace(device="cpu", quick=True, parts=list(parts), minutes=minutes, **places)


_BROKEN = """
import sys, time
from scripts.benchmark import gpu
def fails(context):
    yield {"what": "first", "seconds": 1.5}
    print("words of the part")
    raise RuntimeError("the card fell out")
def hangs(context):
    yield {"what": "before it hangs", "seconds": 2.5}
    time.sleep(1000)
def one_case(context):
    yield {"what": "a case", "failed": "ValueError: no"}
    yield {"what": "another", "seconds": 3.5}
gpu.PARTS.update(machine=gpu._Part(fails, 100), head=gpu._Part(hangs, 20), loader=gpu._Part(one_case, 100))
sys.exit(gpu.main(sys.argv[1:]))
"""


def test_a_part_that_fails_or_hangs_costs_itself_only_and_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "program.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{_BROKEN}")
    whole = subprocess.Popen

    def popen(command: list[str], **more: Any) -> Any:
        return whole([sys.executable, str(tmp_path / "program.py"), *command[3:]], **more)

    monkeypatch.setattr(gpu.subprocess, "Popen", popen)
    monkeypatch.setitem(gpu.PARTS, "head", gpu.PARTS["head"]._replace(seconds=15))
    begun = time.monotonic()
    with pytest.raises(ValueError, match="not complete: machine, head, loader"):
        gpu.benchmark(_options(tmp_path, "machine", "head", "loader"))
    assert time.monotonic() - begun < 120
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [part["status"] for part in parts.values()] == ["failed", "killed at its deadline", "failed"]
    assert [part["rows"][-1].get("seconds") for part in parts.values()] == [1.5, 2.5, 3.5]  # what was measured is kept
    assert "the card fell out" in parts["machine"]["reason"] and "longer than 15 s" in parts["head"]["reason"]
    assert "ValueError: no" in parts["loader"]["reason"]
    page = (tmp_path / "gpu.html").read_text()
    assert "words of the part" in page and "killed at its deadline" in page and "ValueError: no" in page


def test_parts_that_the_minutes_do_not_reach_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match="not complete: machine, largest"):
        gpu.benchmark(_options(tmp_path, "machine", "largest", minutes=0.01))
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {part["status"] for part in parts.values()} == {"not started"}


def test_a_device_that_is_not_there_or_no_time_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = ["--json", str(tmp_path / "gpu.json"), "--out", str(tmp_path / "gpu.html")]
    for arguments, said in (
        (["--minutes", "0"], "--minutes must be above 0"),
        ([], "--device cuda, but torch sees no CUDA device"),
    ):
        assert gpu.main([*arguments, *files]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and said in line
    assert list(tmp_path.iterdir()) == []


def test_device_figures_are_those_of_the_union_of_all_streams():
    def interval(lane: str, kind: str, start: float, end: float, name: str = "k") -> Interval:
        return Interval(lane, kind, name, start, end)

    intervals = [
        interval("host", "cuda_runtime", 0, 5, "cudaStreamSynchronize"),
        interval("host", "cuda_runtime", 5, 6, "cudaLaunchKernel"),
        interval("host, other threads", "cuda_runtime", 5, 9, "cudaEventSynchronize"),
        interval("stream 7", "kernel", 10, 40),
        interval("stream 9", "kernel", 20, 60),  # beside the first
        interval("stream 9", "gpu_memcpy", 30, 35),  # inside both
        interval("stream 7", "kernel", 90, 110),
    ]
    found = device_figures(intervals, steps=2)
    assert found == {"launches": 1.5, "gpu_busy_ms": 0.035, "gpu_idle_ms": 0.015, "host_syncs": 0.5}
    nested = [interval("host", "cpu_op", 0, 10, "outer"), interval("host", "cpu_op", 2, 5), interval("host", "cpu_op", 11, 12)]
    assert [kept.start for kept in outermost(nested)] == [0, 11]


def test_a_case_without_memory_is_left_out_and_any_other_error_is_a_failure():
    def raises(error: Exception) -> Any:
        raise error

    assert attempt({"a": 1}, lambda: {"b": 2.0}) == {"a": 1, "b": 2.0}
    short = attempt({"a": 1}, lambda: raises(torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")))
    assert short == {"a": 1, "left_out": "out of memory: CUDA out of memory. Tried"}
    assert attempt({"a": 1}, lambda: raises(KeyError("x"))) == {"a": 1, "failed": "KeyError: 'x'"}


def test_the_floor_of_a_step_is_that_of_the_operations_or_of_the_bytes(tmp_path: Path):
    settings = {"sample_rate": 0.5, "storage": "tiny", "matmul": "bf16", "cache_mb": -1, "chunk": 0, "kernels": "plain"}
    case = {"classes": 1000, "batch": 64, **settings}
    # bf16 centres in; bf16 E of 64 samples out and in; centre, int8 momentum, its scale and the norm in and out
    size = 500 * (512 * 2 + 4 + 64 * (2 + 2) + 2 * (512 * (2 + 1) + 4 + 4))
    operations = 500 * 6 * 64 * 512
    for rates, floor in (((1e-3, 1e9), operations / 1e6), ((1e9, 1e-3), size / 1e3)):
        limits = {"bf16": rates[0], "GB/s": rates[1]}
        row = heads._one(case, Context(torch.device("cpu"), True, tmp_path), limits)
        assert row["flops_per_byte"] == pytest.approx(operations / size)
        assert row["floor_ms"] == pytest.approx(floor) and row["share_of_floor"] == pytest.approx(floor / row["wall_ms"])


@pytest.mark.parametrize(("device", "calls"), [("cuda", 20), ("cpu", 1)])
def test_bare_work_on_a_gpu_is_timed_over_twenty_calls_between_two_waits(
    monkeypatch: pytest.MonkeyPatch, device: str, calls: int
):
    """The clock counts a second for a call of the work, and nine for a wait."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("wait"))
    clock = SimpleNamespace(perf_counter=lambda: done.count("work") + 9.0 * done.count("wait"))
    monkeypatch.setattr(device_rates, "time", clock)
    seconds = device_rates.bare_seconds(lambda: done.append("work"), torch.device(device), rounds=3)
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
