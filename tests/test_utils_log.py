"""Clocks that jump: a run begun a year ahead that goes on a day before is the run that it would have been."""

import itertools
import re
import shutil
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import ROOT, read_metrics, small_run

import train

YEAR, DAY = 365 * 86400, 86400


def _run(dataset: Path, output: Path, monkeypatch: pytest.MonkeyPatch, *starts: tuple[int, ...]) -> dict[str, bytes]:
    """Train in several starts, each after a kill at its last step, under clocks that jump; return weights and centres."""
    real = time.time
    output.mkdir()
    for stop, jumps in zip((4, 8, 11), starts, strict=True):
        shifts = itertools.cycle(jumps)
        monkeypatch.setattr(time, "time", lambda shifts=shifts: real() + next(shifts))
        arguments = [f"train.max_steps={stop}", "checkpoint.every=3", "checkpoint.keep_last=9", "eval.targets=[]"]
        assert train.main(small_run(dataset, output, *arguments)) == 0
        monkeypatch.setattr(time, "time", real)
        if stop < 11:
            shutil.rmtree(output / "tiny" / "checkpoints" / f"step_{stop:08d}")
    paths = (output / "tiny" / "checkpoints").glob("*/*.safetensors")
    return {str(path.relative_to(output)): path.read_bytes() for path in paths}


def test_clock_jumps_between_and_within_starts_change_nothing(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = _run(dataset, tmp_path / "still", monkeypatch, (0,), (0,), (0,))
    assert _run(dataset, tmp_path / "moved", monkeypatch, (YEAR,), (-DAY,), (-2 * DAY, YEAR, 0)) == expected
    assert {name.split("/")[2] for name in expected} == {f"step_{step:08d}" for step in (3, 6, 9, 11)}
    run = tmp_path / "moved" / "tiny"
    losses = {step: record["loss"] for step, record in read_metrics(run).items()}
    assert losses == {step: record["loss"] for step, record in read_metrics(tmp_path / "still" / "tiny").items()}
    assert list(losses) == list(range(1, 12))
    events = EventAccumulator(str(run / "tensorboard")).Reload().Scalars("train/loss")
    assert {event.step: event.value for event in events} == pytest.approx(losses, rel=2**-23)  # kept as float32
    assert [event.step for event in events] == list(losses)


def test_the_time_of_day_is_asked_for_words_and_names_alone():
    """So locks, journals, caches and checkpoints of any program are right when the clock is wrong."""
    asks = re.compile(r"\btime\.(time|time_ns|strftime)\(|\b(datetime|date)\.(now|today|utcnow)\(")
    folders = [
        path for path in ROOT.iterdir() if path.is_dir() and path.name not in ("tests", "work_dirs") and path.name[0] != "."
    ]
    files = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    found = {str(path.relative_to(ROOT)) for path in files if asks.search(path.read_text())}
    words = {"eval/__main__.py", "scripts/benchmark/gpu.py", "utils/distributed/watchdog.py"}
    names = {"utils/checkpoint/resume.py", "utils/log.py"}  # of what is put aside, of the files of TensorBoard
    days = {"deploy/gallery/store.py", "deploy/gallery/commands.py"}  # on which a face was enrolled; nothing compares them
    assert found == words | names | days
