"""The torturer finds nothing in a short run, and its checks see what they look for."""

import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from saving import save_now

from tests.attack import torture, torture_blows
from tests.attack.torture_checks import History, check_best, check_resumed, check_said
from tests.attack.torture_runs import Life
from utils.checkpoint.format import checkpoint_path

NUM_CLASSES = 4
needs_processes = pytest.mark.skipif(
    bool(os.environ.get("FACE_ONE_PROCESS")), reason="FACE_ONE_PROCESS: ran in the suite itself"
)


def _save(run: Path, step: int, score: float | None = None) -> Path:
    torch.manual_seed(step)
    state, rows = {"weight": torch.randn(3, 5)}, {"centres": torch.randn(NUM_CLASSES, 5)}
    trainer = {"optimizer": {"momentum": torch.randn(7), "lr": 0.1}}
    save_now(run, step, state, rows, (0, NUM_CLASSES), trainer, {"score": score})
    return run / "checkpoints" / f"step_{step:08d}"


def _seen(run: Path) -> History:
    """Return the history of a run with three checkpoints, of which the oldest is the best, and nothing wrong."""
    for step, score in ((3, 0.9), (6, 0.5), (9, None)):
        _save(run, step, score)
    lines = [json.dumps({"step": step, "kind": "train", "loss": 1.0}) for step in range(1, 11)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 11, "ki')  # a kill within the last line
    history = History(run, NUM_CLASSES)
    assert history.check() == [] and history.newest == 9
    return history


@needs_processes
def test_a_short_torture_finds_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report = tmp_path / "report.json"
    arguments = ["--kills", "2", "--minutes", "0.4", "--processes", "2", "--by-hand", "0", "--seed", "4"]
    status = torture.main([*arguments, "--out", str(tmp_path / "finds"), "--json", str(report)])
    said = capsys.readouterr()
    assert status == 0, said.err
    found = json.loads(report.read_text())
    assert found["blows"] >= 1 and found["finds"] == [] and sum(found["finished_runs"].values()) >= 1
    assert {blow["kind"] for blow in found["dealt"]} <= set(said.out.split())


@needs_processes
def test_a_process_that_lives_on_is_found_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    struck: list[int] = []
    monkeypatch.setattr(torture, "strike", lambda life, blow: struck.extend(life.alive()))  # a kill that kills nobody
    monkeypatch.setitem(torture_blows.LIMITS, "others", 0.1)
    arguments = ["--kills", "1", "--processes", "1", "--kinds", "kill_all", "--by-hand", "0"]
    assert torture.main([*arguments, "--out", str(tmp_path)]) == 1
    assert "1 process(es) live 0 s after the blow" in capsys.readouterr().out
    assert len(struck) == 1 and not Path(f"/proc/{struck[0]}").exists()
    (folder,) = tmp_path.iterdir()
    assert (folder / "run" / "train.log").is_file() and "kill_all" in (folder / "find.txt").read_text()


@pytest.mark.parametrize(
    ("said", "log", "newest", "faults"),
    [
        ("stopped by SIGTERM: saved after step 21 of 24", "", 21, 0),
        ("", "finished 24 steps; checkpoints are there", 24, 0),  # the signal came during the last evaluation
        ("", "", 24, 1),
        ("", "finished 24 steps; checkpoints are there", 21, 1),
    ],
)
def test_a_stop_is_answered_or_comes_too_late(said: str, log: str, newest: int, faults: int):
    class Ended:
        processes = 2

        def __getattr__(self, name: str) -> Callable[[], object]:
            return lambda: {"status": 1, "statuses": [0, 0], "said": said, "log": log}[name]

    blow = torture_blows.draw(random.Random(0), 2, ["term"])
    assert len(torture_blows.judge(cast(Life, Ended()), blow, "evaluation", 21, newest)) == faults


@pytest.mark.parametrize("name", ["backbone.safetensors", "softmax_00000_of_00001.safetensors", "trainer.pt"])
def test_a_single_bit_of_a_sealed_checkpoint_is_found(tmp_path: Path, name: str):
    history = _seen(tmp_path)
    path = tmp_path / "checkpoints" / "step_00000006" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert history.check() == [f"step_00000006: {name} has another size or hash than the manifest says"]


def test_a_file_more_or_less_in_a_sealed_checkpoint_is_found(tmp_path: Path):
    history = _seen(tmp_path)
    (tmp_path / "checkpoints" / "step_00000006" / "more").touch()
    (tmp_path / "checkpoints" / "step_00000009" / "trainer.pt").unlink()
    found = history.check()
    assert len(found) == 2 and all("the manifest names" in line for line in found)


def test_numbers_that_are_not_finite_and_lost_centres_are_found(tmp_path: Path):
    from tests.attack.torture_checks import check_checkpoint

    folder = _save(tmp_path, 3)
    assert check_checkpoint(folder, NUM_CLASSES) == []
    assert check_checkpoint(folder, NUM_CLASSES + 1) == ["step_00000003: its files hold class centres up to 4 of 5"]
    _rewrite(folder, "backbone.safetensors", lambda data: data[:-4] + b"\x00\x00\x80\x7f")  # inf
    _rewrite(folder, "trainer.pt", lambda data: data)
    assert check_checkpoint(folder, NUM_CLASSES) == ["step_00000003: backbone.safetensors: weight is not finite"]


def _rewrite(folder: Path, name: str, change: object) -> None:
    """Change a file, and the manifest so that size and hash fit it."""
    import xxhash

    data = change((folder / name).read_bytes())  # type: ignore[operator]
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] |= {"size": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_checkpoint_that_is_gone_is_found_unless_the_rule_lets_it_go(tmp_path: Path):
    history = _seen(tmp_path)
    _save(tmp_path, 12)
    shutil.rmtree(checkpoint_path(tmp_path, 6))  # two are newer, and another is better
    assert history.check() == []
    shutil.rmtree(checkpoint_path(tmp_path, 3))
    assert history.check() == ["step 3 is gone, which was one of the newest 2 or the best"]
    shutil.rmtree(checkpoint_path(tmp_path, 12))
    assert "the newest checkpoint was step 12, now it is 9" in history.check()


def test_a_best_score_without_its_checkpoint_is_found(tmp_path: Path):
    _seen(tmp_path)
    scores = ((3, 0.9), (6, 0.5))
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "kind": "tiny", "accuracy": {s}}}\n' for n, s in scores))
    assert check_best(tmp_path) == []
    shutil.rmtree(checkpoint_path(tmp_path, 3))
    assert check_best(tmp_path) == ["the best score was 0.9, the checkpoints that are left have [0.5, None]"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"step": 10, "kind": "train"}', "step 10 (train) is there 2 times"),
        ('{"step": 12, "kind": "train"}', "steps [11] are missing"),
        ('{"step": 11, "kind"', 'line 11 is \'{"step": 11, "kind"\''),
    ],
)
def test_a_forged_line_of_metrics_is_found(tmp_path: Path, line: str, what: str):
    history = _seen(tmp_path)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('{"step": 11, "ki', f"{line}\n"))
    assert history.check() == [f"metrics.jsonl: {what}"]


def test_a_lock_that_another_process_holds_is_found(tmp_path: Path):
    history = _seen(tmp_path)
    hold = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print('', flush=True); sys.stdin.read()"
    )
    lock = tmp_path / ".lock"
    with subprocess.Popen([sys.executable, "-c", hold, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert history.check() == ["the run folder is still locked"]
        process.communicate()
    assert history.check() == []
    with lock.open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_tracebacks_and_a_start_from_an_older_checkpoint_are_found():
    assert check_said("WARNING: a\nerror: b\n", False) == []
    assert check_said("Traceback (most recent call last):\n", False) == ["stderr has 'Traceback (most recent call last):'"]
    assert check_said("Traceback (most recent call last):\nKeyboardInterrupt\n", True) == []
    log = "10:00 resumed from work/step_00000006 after step 6\n10:01 step 7/27 loss 1\n"
    assert check_resumed(log, 6) == []
    assert check_resumed(log, 9) == ["started after step 6, the newest checkpoint was step 9"]
