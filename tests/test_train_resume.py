"""Going on: whatever ends a run when, the same command continues it to the same bits, and nothing that was saved is lost."""

import itertools
import json
import multiprocessing as mp
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rounding import network_bound
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import (
    IRESNET,
    REAL,
    Started,
    command_of,
    ended_well,
    equal_weights,
    error_of,
    one_line,
    read_metrics,
    run_file,
    run_program,
    run_train,
    small_run,
    wait_for,
)

import train
from eval import embed, monitor
from utils.checkpoint import writer as checkpoint_writer
from utils.checkpoint.format import list_checkpoints, read_manifest, step_of
from utils.checkpoint.reading import check_hashes, read_trainer
from utils.checkpoint.tensor_file import write_object
from utils.distributed import SharedError, World
from utils.log import RunLog

AUGMENTED = ["augment.crop=0.3", "augment.photometric=0.5", "augment.blur=0.3", "augment.cutout=0.5", "augment.jpeg=0.3"]


def _count_lines(metrics: Path) -> int:
    return len(metrics.read_text().splitlines()) if metrics.is_file() else 0


def _run_and_kill(num_processes: int, arguments: list[str], metrics: Path, after_steps: int) -> None:
    """Start, and SIGKILL all processes at once when metrics.jsonl shows so many steps."""
    folder = metrics.parents[1] / "output"
    folder.mkdir()
    started = Started(train.main, [arguments] * num_processes, folder)
    # a save goes on beside the steps, so the first checkpoint may be complete some steps later
    started.wait_until(lambda: list_checkpoints(metrics.parent) != [] and _count_lines(metrics) >= after_steps)
    for rank in range(num_processes):
        started.send(signal.SIGKILL, rank)
    assert started.wait().returncode == -signal.SIGKILL


def test_a_checkpoint_of_the_older_layout_goes_on_to_the_same_bits(dataset: Path, tmp_path: Path):
    overrides = ["head.sample_rate=0.5", "head.storage=lean", "eval.targets=[]", "checkpoint.every=4", "train.epochs=1"]
    run, whole = tmp_path / "older", tmp_path / "whole"
    assert train.main(small_run(dataset, tmp_path, *overrides, "run.name=whole")) == 0
    shutil.copytree(whole, run)
    newest, *_ = list_checkpoints(run)
    for path in list_checkpoints(run)[1:]:
        shutil.rmtree(path)
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["format"], manifest["identity"] = 1, manifest.pop("run_signature")  # as the first version wrote them
    manifest["config"]["head"]["state"] = manifest["config"]["head"].pop("storage")
    manifest["config"]["optimizer"]["lr_factors"] = list(manifest["config"]["optimizer"].pop("rules"))
    trainer = read_trainer(newest)
    trainer["margin"] = trainer.pop("margins")["softmax"]
    assert trainer["optimizer"]["param_groups"][0].pop("match") == ""
    (newest / "trainer.pt").unlink()
    manifest["files"]["trainer.pt"] = write_object(newest / "trainer.pt", trainer)
    (newest / "manifest.json").write_text(json.dumps(manifest))
    resumed = run_train(1, small_run(dataset, tmp_path, *overrides, "run.name=older"))
    assert resumed.returncode == 0 and "resumed from" in resumed.stdout, resumed.stderr
    assert "changed since" not in resumed.stdout
    equal_weights(whole, run)
    for path in list_checkpoints(run)[1:]:
        shutil.rmtree(path)
    other_seed = run_train(1, small_run(dataset, tmp_path, *overrides, "run.name=older", "run.seed=3"))
    assert other_seed.returncode == 1 and "seed was" in other_seed.stderr


def test_a_run_killed_and_resumed_ends_with_the_same_bits(dataset: Path, tmp_path: Path):
    """Of two processes; test_kills_at_random_moments_lose_no_checkpoint kills one."""
    overrides = ["head.sample_rate=0.5", "backbone.dropout=0.2", "train.max_steps=8", "eval.every=4", IRESNET, *AUGMENTED]
    overrides += ["checkpoint.every=2"]
    ended_well(run_train(2, small_run(dataset, tmp_path, *overrides, "run.name=whole")))
    broken = small_run(dataset, tmp_path, *overrides, "run.name=broken")
    kill_after = random.Random(time.time_ns()).randint(3, 6)  # 8 steps in all
    _run_and_kill(2, broken, tmp_path / "broken" / "metrics.jsonl", kill_after)
    assert "resumed from" in ended_well(run_train(2, broken)).stdout
    equal_weights(tmp_path / "whole", tmp_path / "broken", f"killed after {kill_after} records:")
    assert read_metrics(tmp_path / "whole")[8]["loss"] == read_metrics(tmp_path / "broken")[8]["loss"]


@pytest.mark.parametrize("name", ["ghostfacenet_v2_2", "edgeface_xs"])  # IResNet: above; others run everywhere; ViT: its file
def test_every_kind_of_network_goes_on_to_the_same_bits(dataset: Path, tmp_path: Path, name: str):
    overrides = [f"backbone.name={name}", "backbone.dropout=0.2", "eval.targets=[]", "schedule.power=0", "checkpoint.every=2"]
    assert train.main(small_run(dataset, tmp_path, *overrides, "train.max_steps=4", "run.name=whole")) == 0
    for steps in (2, 4):
        assert train.main(small_run(dataset, tmp_path, *overrides, f"train.max_steps={steps}", "run.name=broken")) == 0
    assert "resumed from" in (tmp_path / "broken" / "train.log").read_text()
    equal_weights(tmp_path / "whole", tmp_path / "broken")


def _stop_last_process() -> None:
    rank, last = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)) - 1
    if rank == last:
        os.kill(os.getpid(), signal.SIGUSR1 if last else signal.SIGTERM)
        time.sleep(0.5)  # until it is noted


def _told_to_stop_in_step_2(arguments: list[str]) -> int:
    """Train; the last process gets a signal within the step of this number, when the labels of the next may be shared."""
    whole = train.train_step

    def train_step(config: Any, tasks: Any, model: Any, parallel: Any, prepared: Any, *more: Any) -> Any:
        if prepared.number == 2:
            _stop_last_process()
        return whole(config, tasks, model, parallel, prepared, *more)

    train.train_step = train_step
    return train.main(arguments)


def _told_to_stop_in_an_evaluation(arguments: list[str]) -> int:
    """Train; the last process gets a signal within the first batch of the first evaluation. Each says so of every batch."""
    whole, batches = embed._forward, itertools.count()

    def forward(*given: Any) -> torch.Tensor:
        print(f"rank {os.environ.get('RANK', 0)} embeds")
        if next(batches) == 0:
            _stop_last_process()
        return whole(*given)

    embed._forward = forward
    return train.main(arguments)


@pytest.mark.parametrize("num_processes", [1, 3])  # sums of three depend on their order; Ctrl-C, below, stops two
def test_a_run_that_is_told_to_stop_saves_within_two_steps_and_goes_on_to_the_same_bits(
    dataset: Path, tmp_path: Path, num_processes: int
):
    """SIGTERM, or SIGUSR1 to one of three processes: all save at the same step, long before the next checkpoint is due."""
    overrides = ["head.sample_rate=0.5", "train.max_steps=6", "train.batch_size=12", "eval.every=3", "checkpoint.every=0"]
    overrides += ["eval.at_end=false", "checkpoint.keep_best=0"]
    ended_well(run_train(num_processes, small_run(dataset, tmp_path, *overrides, "run.name=whole")))
    stopped = small_run(dataset, tmp_path, *overrides, "run.name=stopped")
    done = run_program(_told_to_stop_in_step_2, [stopped] * num_processes)
    (saved,) = [step_of(path) for path in list_checkpoints(tmp_path / "stopped")]
    assert saved in ((3,) if num_processes == 1 else (3, 4)) and done.returncode == 75, done.stderr
    assert f"saved after step {saved} of 6" in done.stderr
    assert ("of 6, without its evaluation; " in done.stderr) == (saved == 3)
    ended_well(run_train(num_processes, stopped))
    equal_weights(tmp_path / "whole", tmp_path / "stopped")
    scored = [read_metrics(tmp_path / run, "tiny") for run in ("whole", "stopped")]
    assert sorted(scored[0]) == sorted(scored[1]) == [3, 6]  # what the stop left out is made up


@pytest.mark.parametrize(
    ("num_processes", "settings", "said"),
    [
        (1, "eval.at_start=true", "in step 0"),  # there is nothing to save
        (2, "eval.every=3", "saved after step 3"),
        (1, "eval.every=0 train.ema=0.9", "saved after step 4"),  # the last
    ],
)
def test_a_stop_does_not_wait_for_the_end_of_an_evaluation_which_is_made_up(
    dataset: Path, tmp_path: Path, num_processes: int, settings: str, said: str
):
    given = ["train.max_steps=4", "checkpoint.every=0", "eval.every=0", "eval.batch_size=4", *settings.split()]
    arguments = small_run(dataset, tmp_path, *given)
    done = run_program(_told_to_stop_in_an_evaluation, [arguments] * num_processes)
    assert f"{said} of 4, without its evaluation; the same command goes on from there" in done.stderr and done.returncode == 75
    assert done.stdout.count(f"rank {num_processes - 1} embeds") == 1
    step, run = int(said[-1]), tmp_path / "tiny"
    assert [step_of(path) for path in list_checkpoints(run)] == [step] * (step > 0) and not read_metrics(run, "tiny")
    again = [f"checkpoint.resume={run}/../tiny"] * (step > 0)  # another path to it
    ended_well(run_train(num_processes, [*arguments, *again]))
    scored = read_metrics(run, "ema/tiny" if "ema" in settings else "tiny")
    assert sorted(scored) == sorted({step, 4}) and max(read_metrics(run)) == 4
    assert {step_of(path): read_manifest(path)["score"] for path in list_checkpoints(run)} == {
        made: figures["accuracy"] for made, figures in scored.items() if made
    }


def test_the_error_of_a_process_that_ends_in_an_evaluation_is_said_by_the_others(monkeypatch: pytest.MonkeyPatch):
    """They ask it nothing, whose end would hide the error."""
    monkeypatch.setattr(monitor, "broadcast_module", lambda *_: None)
    broken = mock.Mock(score=mock.Mock(side_effect=SharedError("rank 1: RuntimeError: odd")))
    world = World(0, 2, 0, 2, torch.device("cpu"))
    evaluator = monitor.Evaluator(mock.Mock(), [broken], world, embed.EmbedSettings(), "auc", mock.Mock(), "run", 3, Path())
    with pytest.raises(SharedError, match=r"rank 1: RuntimeError: odd\. If the set is at fault"):
        evaluator.score(3)


def test_the_first_process_decides_whether_an_evaluation_is_made_up(monkeypatch: pytest.MonkeyPatch):
    """It may have put the score into the manifest, of which another machine still sees the one before."""
    monkeypatch.setattr(train, "read_manifest", lambda path: {"score": None})
    monkeypatch.setattr(train.distributed, "all_gather_objects", lambda value, world: [False, value])
    config, setup, never = mock.MagicMock(), mock.MagicMock(total_steps=3), mock.Mock()
    train.evaluate_first(config, setup, 3, never, never, never)
    assert not never.mock_calls


@pytest.mark.parametrize("num_processes", [1, 2])
def test_ctrl_c_saves_and_the_run_goes_on_to_the_same_bits(dataset: Path, tmp_path: Path, num_processes: int):
    """A terminal sends SIGINT to what it started; torchrun passes it on to its workers."""
    overrides = [REAL, "head.sample_rate=0.5", "train.epochs=2.5", "eval.targets=[]", "checkpoint.every=0"]
    ended_well(run_train(num_processes, small_run(dataset, tmp_path, *overrides, "run.name=whole")))
    stopped = small_run(dataset, tmp_path, *overrides, "run.name=stopped")
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    if num_processes == 1:
        started = Started(train.main, [stopped], tmp_path)
        started.wait_until(lambda: _count_lines(metrics) >= 3)
        started.send(signal.SIGINT, 0)
        status, said = (done := started.wait()).returncode, done.stderr
    else:
        with subprocess.Popen(command_of(num_processes, stopped), stderr=subprocess.PIPE, text=True, cwd="/") as process:
            wait_for(lambda: _count_lines(metrics) >= 3, 120, process)
            process.send_signal(signal.SIGINT)
            said, status = process.communicate(timeout=120)[1], process.returncode
    (saved,) = list_checkpoints(tmp_path / "stopped")
    assert said.count("Ctrl-C: saving and stopping after this step or the next") == 1
    assert f"stopped by SIGINT: saved after step {step_of(saved)} of 18; the same command goes on from there" in said
    if num_processes == 1:
        assert status == 130 and "Traceback" not in said, said
    assert "train.py" not in said.replace("error", ""), said  # of a worker's traceback
    ended_well(run_train(num_processes, stopped))
    equal_weights(tmp_path / "whole", tmp_path / "stopped")


def test_ctrl_c_in_another_program_speaks_of_no_checkpoint(tmp_path: Path):
    program = tmp_path / "sleeps.py"
    lines = ["def run():", "    print('it is here', flush=True)", "    time.sleep(30)", "sys.exit(run_main(run))"]
    program.write_text("\n".join(["import sys, time", "from utils.program import run_main", *lines]))
    started = Started(run_file, [[str(program)]], tmp_path)
    started.wait_until(lambda: "it is here" in started.said()[0])
    started.send(signal.SIGINT, 0)
    done = started.wait(60)
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


def test_a_resumed_run_says_which_keys_changed_and_keeps_each_configuration(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert train.main(small_run(dataset, tmp_path, "train.max_steps=2")) == 0
    assert "changed since" not in capsys.readouterr().out
    changes = ["loss.margin=0.3", "optimizer.lr=0.01", "augment.blur=0.5", "eval.targets=[]"]
    os.truncate(tmp_path / "tiny" / "metrics.jsonl", 40 << 30)  # which is not read
    assert train.main(small_run(dataset, tmp_path, "train.max_steps=4", "optimizer.name=adamw")) == 1
    assert "max_steps: 2" in (tmp_path / "tiny" / "config.yaml").read_text()  # a start that is refused changes nothing
    assert train.main(small_run(dataset, tmp_path, "train.max_steps=4", *changes)) == 0
    out, beside = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("changed since")]
    assert "WARNING: metrics.jsonl, to remove what is trained again, cannot be written" in beside
    assert lines == [
        "changed since that checkpoint: augment.blur was 0.0, is 0.5",
        "changed since that checkpoint: loss.margin was 0.2, is 0.3",
        "changed since that checkpoint: optimizer.lr was 0.05, is 0.01",
        "changed since that checkpoint: train.max_steps was 2, is 4",
        "changed since that checkpoint: eval.targets was ['tiny'], is []",
    ]
    (earlier,) = (tmp_path / "tiny").glob("config_until_step_00000002_*.yaml")
    assert "max_steps: 2" in earlier.read_text() and "max_steps: 4" in (tmp_path / "tiny" / "config.yaml").read_text()


def test_a_resumed_run_has_each_step_once_in_metrics_and_tensorboard(dataset: Path, tmp_path: Path):
    """Killed after steps that no checkpoint has: they are trained again, and the first time is forgotten."""
    overrides = ["checkpoint.every=4", "eval.every=4", "eval.at_start=true", "train.epochs=2.5"]
    arguments = small_run(dataset, tmp_path, *overrides)
    _run_and_kill(1, arguments, tmp_path / "tiny" / "metrics.jsonl", 9)
    with (tmp_path / "tiny" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 17, "kind": "tr')  # a line that the kill cut short
    assert train.main(arguments) == 0
    records = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    trained = [record["step"] for record in records if record["kind"] == "train"]
    evaluated = [record["step"] for record in records if record["kind"] == "tiny"]
    assert trained == list(range(1, 19)) and evaluated == [0, 4, 8, 12, 16, 18]
    board = EventAccumulator(str(tmp_path / "tiny" / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == trained
    assert [event.step for event in board.Scalars("tiny/accuracy")] == evaluated
    losses = {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
    assert [event.value for event in board.Scalars("train/loss")] == pytest.approx([losses[step] for step in trained])


def test_a_run_started_anew_within_a_second_is_read_after_the_first(tmp_path: Path):
    with RunLog(tmp_path, 0, 0, 8) as log:
        for step in range(1, 9):
            log.record(step, "train", {"loss": 1.0})
    (file,) = (tmp_path / "tensorboard").iterdir()  # of a process whose number is above that of the next
    file.rename(file.with_name(f"events.out.tfevents.{int(time.time())}.zzz"))
    os.truncate(tmp_path / "metrics.jsonl", 300_000_000)  # as long as of a million steps; the rest is a damaged line
    with RunLog(tmp_path, 0, 4, 8) as log:
        log.record(5, "train", {"loss": 2.0})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4, 5]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("train/loss")
    assert [(event.step, event.value) for event in events] == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2)]


def test_a_run_folder_in_use_is_refused(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    arguments = small_run(dataset, tmp_path, "train.epochs=100", "eval.targets=[]")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")  # of mpirun
    started = Started(train.main, [arguments], tmp_path)
    started.wait_until((tmp_path / "tiny" / "metrics.jsonl").is_file)
    alone = "started 8 processes without RANK and WORLD_SIZE: each trains alone, see docs/running.md"
    assert train.main(arguments) == 1 and alone in capsys.readouterr().err
    assert alone in (tmp_path / "tiny" / "train.log").read_text()
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    assert train.main(arguments) == 1
    assert "is in use by another job" in capsys.readouterr().err
    started.send(signal.SIGKILL, 0)
    assert started.wait().returncode == -signal.SIGKILL
    assert train.main(small_run(dataset, tmp_path, "train.max_steps=1", "eval.targets=[]", "run.name=other")) == 0


def test_a_restarted_attempt_waits_for_the_one_before(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An error would end the run for good: the launcher takes it for one that would come again."""
    arguments = small_run(dataset, tmp_path, "train.epochs=1000", "eval.targets=[]", "checkpoint.every=0")
    started = Started(train.main, [arguments], tmp_path)
    started.wait_until((tmp_path / "tiny" / "metrics.jsonl").is_file)
    threading.Timer(1.0, started.send, (signal.SIGKILL, 0)).start()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train.main(small_run(dataset, tmp_path, "train.max_steps=1", "eval.targets=[]")) == 0
    assert started.wait().returncode == -signal.SIGKILL


def test_a_checkpoint_of_other_data_or_architecture_is_refused_and_kept(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    short = ["train.max_steps=4", "eval.targets=[]"]
    assert train.main(small_run(dataset, tmp_path, *short)) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "tiny" / "checkpoints").rglob("*") if path.is_file()}
    for overrides, message in [
        (["backbone.width=0.25"], "backbone was shallow, 16-d, width 0.125, this run has shallow, 16-d, width 0.25;"),
        ([IRESNET], "backbone was"),
        (["run.seed=1"], "seed was"),
        (["train.batch_size=16"], "batch_size was 4, this run has 16"),
        (["data.source=synthetic", "data.num_classes=13", "data.num_images=60"], "num_classes was 12"),
        (["checkpoint.resume=never"], "holds 1 checkpoint(s)"),
    ]:
        assert train.main(small_run(dataset, tmp_path, "train.max_steps=8", "eval.targets=[]", *overrides)) == 1
        assert message in one_line(capsys)
    assert before == {path: path.read_bytes() for path in (tmp_path / "tiny" / "checkpoints").rglob("*") if path.is_file()}


def test_the_same_command_goes_on_with_a_run_that_an_explicit_checkpoint_began(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert train.main(small_run(dataset, tmp_path, "train.max_steps=4", "eval.targets=[]")) == 0
    # a run, of which its newest is taken
    folder = [f"checkpoint.resume={tmp_path / 'tiny'}", "run.name=first", "train.max_steps=5"]
    assert train.main(small_run(dataset, tmp_path, "eval.targets=[]", *folder)) == 0
    assert sorted(read_metrics(tmp_path / "first")) == [5]
    (tmp_path / "tiny" / "checkpoints" / "step_00000004").rename(tmp_path / "best")  # a name that tells no step
    overrides = ["eval.targets=[]", "run.name=second"]
    source = f"checkpoint.resume={tmp_path / 'best'}"
    assert train.main(small_run(dataset, tmp_path, *overrides, "train.max_steps=6", source)) == 0
    assert train.main(small_run(dataset, tmp_path, *overrides, "train.max_steps=8", source)) == 0
    assert "after step 6" in capsys.readouterr().out and sorted(read_metrics(tmp_path / "second")) == [5, 6, 7, 8]
    shutil.copytree(tmp_path / "best", tmp_path / "copy")
    assert train.main(small_run(dataset, tmp_path, *overrides, f"checkpoint.resume={tmp_path / 'copy'}")) == 1
    assert "is step 4, but" in capsys.readouterr().err and _whole_steps(tmp_path / "second") == [6, 8]


def _train_quietly(arguments: list[str]) -> None:
    """Train in this process, which a forkserver made with everything imported."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    raise SystemExit(train.main(arguments))


def _whole_steps(run: Path) -> list[int]:
    """Return the steps of the checkpoints with a final name, after checking every byte of them."""
    found = list_checkpoints(run)
    assert [line for path in found for line in check_hashes(path)] == []
    return [step_of(path) for path in found]


def test_kills_at_random_moments_lose_no_checkpoint(dataset: Path, tmp_path: Path):
    """Every other kill waits for a save to begin, and strikes within it. Two of six find the class centres in a file."""
    overrides = [REAL, "head.sample_rate=0.5", "checkpoint.every=1", "eval.targets=[]", "schedule.power=0", *AUGMENTED[:2]]
    context = mp.get_context("forkserver")
    arguments = small_run(dataset, tmp_path, *overrides, "train.epochs=1000", "run.name=killed")
    run, luck = tmp_path / "killed", random.Random(time.time_ns())
    newest, inside_a_save, resumed, startup = 0, 0, 0, 2.0
    for number in range(6):
        before = set((run / "checkpoints").glob(".step_*"))  # left by the kill before
        on_disk = ["head.placement=disk", "checkpoint.background=false"] if number in (2, 3) else []
        process = context.Process(target=_train_quietly, args=([*arguments, *on_disk],))
        process.start()
        started = time.monotonic()
        if number % 2:  # within the first save, then twice within the second, so that the run gets on
            seen: set[Path] = set()
            while len(seen) < (2 if number > 2 else 1):
                assert process.is_alive() and time.monotonic() < started + 60
                seen |= set((run / "checkpoints").glob(".step_*.partial")) - before
            startup = time.monotonic() - started
            time.sleep(luck.uniform(0, 0.05))
        else:
            time.sleep(luck.uniform(0, 1.5 * startup))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        inside_a_save += bool(list((run / "checkpoints").glob(".step_*.partial")))
        steps = _whole_steps(run) if run.is_dir() else []
        assert max(steps, default=0) >= newest, f"kill {number}: {newest} was complete, {steps} are left"
        resumed += max(steps, default=0) > newest
        newest = max(steps, default=0)
    assert inside_a_save >= 2 and resumed >= 2, (inside_a_save, resumed)
    left = list((run / "checkpoints").glob(".step_*.partial"))
    for name in ("killed", "whole"):
        assert train.main(small_run(dataset, tmp_path, *overrides, f"run.name={name}", f"train.max_steps={newest + 3}")) == 0
    equal_weights(tmp_path / "killed", tmp_path / "whole")
    # a start that was killed itself may have deleted the others, before it could say so
    assert not left or "was not finished when the run ended" in (run / "train.log").read_text()
    assert list((run / "checkpoints").glob(".*")) == []


def test_damaged_checkpoints_are_put_aside_and_an_older_one_goes_on_to_the_same_bits(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Put aside with a loud word, and an older one taken; to the same end as the unbroken run."""
    overrides = ["eval.targets=[]", "checkpoint.every=2", "checkpoint.keep_last=9"]
    assert train.main(small_run(dataset, tmp_path, *overrides, "run.name=whole")) == 0
    run = tmp_path / "tiny"
    assert train.main(small_run(dataset, tmp_path, *overrides)) == 0
    for path in list_checkpoints(run)[4:]:
        shutil.rmtree(path)  # as if the run had ended after step 8
    (list_checkpoints(run)[-1] / "trainer.pt").write_bytes(b"short")
    flipped = list_checkpoints(run)[-2] / "backbone.safetensors"
    flipped.write_bytes(flipped.read_bytes()[:-1] + bytes([flipped.read_bytes()[-1] ^ 1]))
    capsys.readouterr()
    assert train.main(small_run(dataset, tmp_path, *overrides, "checkpoint.verify=true")) == 0
    said = capsys.readouterr().out
    assert "trainer.pt is 5 bytes" in said and "backbone.safetensors is damaged" in said
    assert "resumed from" in said and "after step 4" in said
    assert len(list((run / "checkpoints").glob("damaged_step_0000000[68]_*"))) == 2
    equal_weights(tmp_path / "whole", run)
    for path in list_checkpoints(run):
        (path / "trainer.pt").unlink()
    assert train.main(small_run(dataset, tmp_path, *overrides)) == 1
    assert "is damaged:" in capsys.readouterr().err


def test_a_leftover_that_cannot_be_deleted_is_a_warning(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    leftover = tmp_path / "tiny" / "checkpoints" / ".step_00000003.partial"
    leftover.mkdir(parents=True)
    whole = shutil.rmtree

    def refuse(path: Path, *arguments: object, **options: object) -> None:
        if Path(path) == leftover:
            raise PermissionError(1, "Operation not permitted", str(path))
        whole(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert train.main(small_run(dataset, tmp_path, "eval.targets=[]", "train.max_steps=2")) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "cannot be deleted" in line]
    assert line.startswith("WARNING: ") and str(leftover) in line and "delete it by hand" in line
    assert _whole_steps(tmp_path / "tiny") == [2]


def test_a_checkpoint_that_lost_its_manifest_is_put_aside(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It would take the name of the one that is to be saved at its step, for ever."""
    overrides = ["eval.targets=[]", "train.max_steps=6"]
    assert train.main(small_run(dataset, tmp_path, *overrides)) == 0
    newest = list_checkpoints(tmp_path / "tiny")[-1]
    (newest / "manifest.json").unlink()
    (newest.parent / "step_mine____").mkdir()  # not of this program
    assert train.main(small_run(dataset, tmp_path, *overrides)) == 0
    assert "has no manifest.json" in capsys.readouterr().out
    assert _whole_steps(tmp_path / "tiny") == [4, 6]
    assert len(list(newest.parent.glob("damaged_step_00000006_*"))) == 1 and (newest.parent / "step_mine____").is_dir()
    for path in list_checkpoints(tmp_path / "tiny"):
        (path / "manifest.json").unlink()
    _refused_untouched(small_run(dataset, tmp_path, *overrides), "every checkpoint of .* is damaged", capsys)


def test_checkpoints_without_the_right_to_read_or_list_them_are_neither_damaged_nor_a_new_run(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    arguments, whole = small_run(dataset, tmp_path, "eval.targets=[]", "train.max_steps=2"), os.listdir
    assert train.main(arguments) == 0
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: Path(path).name != "manifest.json")
        _refused_untouched(arguments, r"step_00000002: no right to read its files; give it, or start as the user", capsys)

    def refuse(path: Path) -> list[str]:
        if Path(path).name == "checkpoints":
            raise PermissionError(13, "Permission denied", str(path))
        return whole(path)

    monkeypatch.setattr(os, "listdir", refuse)
    _refused_untouched(arguments, r"tiny/checkpoints: Permission denied", capsys)


def _refused_untouched(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Start a run that must end in one line with these words, and leave the files of the run as they are."""
    run = Path(arguments[0]).parent / "tiny"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name not in (".lock", ".holder")}
    capsys.readouterr()
    assert re.search(words, error_of(train.main(arguments), capsys))
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_disk_that_is_full_for_a_while_costs_a_warning(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    whole, saves = checkpoint_writer.write_tensors, 0

    def sometimes_full(path: Path, tensors: object) -> object:
        nonlocal saves
        saves += path.name.startswith("backbone")  # the first file
        if saves in (2, 3) or saves > 4:
            raise OSError(28, "No space left on device")
        return whole(path, tensors)

    monkeypatch.setattr(checkpoint_writer, "write_tensors", sometimes_full)
    overrides = ["eval.targets=[]", "checkpoint.every=3", "checkpoint.keep_last=9", "checkpoint.background=false"]
    assert train.main(small_run(dataset, tmp_path, *overrides)) == 1  # the last save of all fails
    done = capsys.readouterr()
    assert done.out.count("WARNING: checkpoint: step_0000000") == 2 and "No space left on device" in done.out
    assert "step_00000015 could not be saved" in done.err and "goes on from there" in done.err
    assert [step_of(path) for path in list_checkpoints(tmp_path / "tiny")] == [3, 12]
    monkeypatch.setattr(checkpoint_writer, "write_tensors", whole)
    assert train.main(small_run(dataset, tmp_path, *overrides)) == 0
    assert train.main(small_run(dataset, tmp_path, *overrides, "run.name=unbroken")) == 0
    equal_weights(tmp_path / "tiny", tmp_path / "unbroken")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_checkpoint_is_saved_whenever_its_minutes_are_over(dataset: Path, tmp_path: Path, num_processes: int):
    overrides = ["eval.targets=[]", "checkpoint.every=0", "checkpoint.keep_last=99", "checkpoint.every_minutes=1e-5"]
    ended_well(run_train(num_processes, small_run(dataset, tmp_path, *overrides, "train.max_steps=5")))
    assert [step_of(path) for path in list_checkpoints(tmp_path / "tiny")] == [1, 2, 3, 4, 5]


@pytest.mark.numeric
def test_another_number_of_processes_goes_on_along_the_same_curve(dataset: Path, tmp_path: Path):
    """2 -> 3 -> 1 with all classes and frozen statistics: the global batches are the same, and so is their mean loss."""
    overrides = ["eval.targets=[]", "backbone.freeze_norm=true", "optimizer.lr=1e-4", "train.batch_size=12", IRESNET]
    whole = small_run(dataset, tmp_path, *overrides, "train.max_steps=6", "schedule.power=0", "run.name=whole")
    ended_well(run_train(2, whole))
    for num_processes, steps in ((2, 2), (3, 4), (1, 6)):
        moved = small_run(dataset, tmp_path, *overrides, f"train.max_steps={steps}", "schedule.power=0", "run.name=moved")
        ended_well(run_train(num_processes, moved))
    expected, got = (read_metrics(tmp_path / name) for name in ("whole", "moved"))
    assert sorted(got) == sorted(expected) == list(range(1, 7))
    for step in expected:
        # loss.scale times the error of the embeddings; those of the steps are independent
        assert got[step]["loss"] == pytest.approx(expected[step]["loss"], abs=16.0 * network_bound() * step**0.5), step
