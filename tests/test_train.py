"""The trainer end to end on tiny data: it learns, it survives SIGKILL to the last bit, and says what is wrong in one line."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import train
from data.recordio import RecordWriter, pack
from eval.pairs import write_bin
from utils.checkpoint import list_checkpoints, read_backbone, read_manifest, read_tensors, softmax_reader

ROOT = Path(train.__file__).parent
NUM_CLASSES, NUM_IMAGES = 12, 60


def _face(label: int, number: int) -> bytes:
    """Return a JPEG of coarse coloured tiles, the class's, under noise."""
    tiles = np.random.default_rng(label).integers(40, 215, (7, 7, 3)).astype(np.uint8)
    noise = np.random.default_rng(1000 + number).normal(0, 12, (112, 112, 3))
    pixels = cv2.resize(tiles, (112, 112), interpolation=cv2.INTER_NEAREST) + noise
    return cv2.imencode(".jpg", pixels.clip(0, 255).astype(np.uint8))[1].tobytes()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a RecordIO set and a verification set of other classes, `tiny`."""
    folder = tmp_path_factory.mktemp("data")
    with RecordWriter(folder / "train.rec", folder / "train.idx") as writer:
        for key in range(NUM_IMAGES):
            writer.write(key, pack(float(key % NUM_CLASSES), key, 0, _face(key % NUM_CLASSES, key)))
    (folder / "property").write_text(f"{NUM_CLASSES},112,112")
    same = [bool(pair % 2) for pair in range(20)]
    images = [_face(50 + pair + (side and not same[pair]), 2 * pair + side) for pair in range(20) for side in (0, 1)]
    write_bin(folder / "tiny.bin", images, same)
    return folder


def _arguments(dataset: Path, output: Path, *overrides: str) -> list[str]:
    config = output / "tiny.yaml"
    config.write_text(
        f"run: {{output: {output}, threads: 1}}\n"
        f"data: {{path: {dataset}}}\n"
        "backbone: {name: r18, width: 0.125, embedding_size: 16}\n"
        "loss: {name: cosface, margin: 0.2, scale: 16}\n"
        "head: {chunk: 5}\n"
        "train: {batch_size: 8, epochs: 2}\n"
        "optimizer: {lr: 0.05}\n"
        "checkpoint: {every: 4}\n"
        "log: {every: 1}\n"
        "eval: {targets: [tiny], every: 8, batch_size: 16}\n"
    )
    return [str(config), *overrides]


def _metrics(run: Path, kind: str = "train") -> dict[int, dict[str, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record for record in records if record["kind"] == kind}


def _final_weights(run: Path) -> dict[str, torch.Tensor]:
    newest = list_checkpoints(run)[-1]
    return {**read_backbone(newest), **softmax_reader(newest)(0, NUM_CLASSES)}


def test_training_learns_evaluates_and_leaves_a_complete_run_folder(dataset: Path, tmp_path: Path):
    assert train.main(_arguments(dataset, tmp_path, "train.epochs=6", "schedule.warmup_epochs=0.5")) == 0
    run = tmp_path / "tiny"
    losses = [record["loss"] for record in _metrics(run).values()]
    assert len(losses) == 6 * NUM_IMAGES // 8
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    assert _metrics(run, "tiny")[45]["accuracy"] >= 0.5
    for name in ("config.yaml", "train.log", "results.json", "results.md", "verification.png", "tensorboard"):
        assert (run / name).exists(), name
    assert [int(path.name[5:]) for path in list_checkpoints(run)][-2:] == [44, 45]
    assert train.main(_arguments(dataset, tmp_path, "train.epochs=6", "schedule.warmup_epochs=0.5")) == 0  # nothing left to do


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_precisions_take_the_same_path(dataset: Path, tmp_path: Path, precision: str):
    arguments = _arguments(dataset, tmp_path, f"train.precision={precision}", "train.max_steps=4", "eval.targets=[]")
    assert train.main(arguments) == 0
    records = _metrics(tmp_path / "tiny")
    assert all(np.isfinite(record["loss"]) for record in records.values())
    assert ("loss_scale" in records[4]) == (precision == "fp16")


def test_accumulated_micro_batches_follow_one_large_batch_with_frozen_statistics(dataset: Path, tmp_path: Path):
    runs = []
    for accumulation in (1, 2):
        name = f"acc{accumulation}"
        overrides = ["train.max_steps=4", "eval.targets=[]", "backbone.freeze_norm=true", "optimizer.lr=0.01"]
        arguments = _arguments(dataset, tmp_path, *overrides, f"run.name={name}", f"train.accumulation={accumulation}")
        assert train.main(arguments) == 0
        runs.append([record["loss"] for record in _metrics(tmp_path / name).values()])
    assert runs[0] == pytest.approx(runs[1], rel=1e-3)


def _command(num_processes: int, arguments: list[str]) -> list[str]:
    if num_processes == 1:
        return [sys.executable, str(ROOT / "train.py"), *arguments]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    return [*start, str(ROOT / "train.py"), *arguments]


def _run(num_processes: int, arguments: list[str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(num_processes, arguments), capture_output=True, text=True, timeout=timeout, cwd="/")


def _descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(grandchild for child in children for grandchild in _descendants(child))]


def _run_and_kill(num_processes: int, arguments: list[str], metrics: Path, after_steps: int) -> None:
    """Start, and SIGKILL all processes at once when metrics.jsonl shows so many steps."""
    with subprocess.Popen(
        _command(num_processes, arguments),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    ) as process:
        deadline = time.monotonic() + 120
        while not metrics.is_file() or len(metrics.read_text().splitlines()) < after_steps:
            assert process.poll() is None and time.monotonic() < deadline, "the run ended, or did nothing, before the kill"
            time.sleep(0.005)
        # the launcher's workers have sessions of their own; the launcher goes first, so that it cannot restart or report
        for pid in [process.pid, *_descendants(process.pid)]:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_killed_and_resumed_ends_with_the_same_bits(dataset: Path, tmp_path: Path, num_processes: int):
    overrides = ["head.sample_rate=0.5", "backbone.dropout=0.2", "train.epochs=2.5", "eval.every=6"]
    assert _run(num_processes, _arguments(dataset, tmp_path, *overrides, "run.name=whole")).returncode == 0
    broken = _arguments(dataset, tmp_path, *overrides, "run.name=broken")
    kill_after = random.Random(time.time_ns()).randint(5, 14)  # 18 steps in all
    _run_and_kill(num_processes, broken, tmp_path / "broken" / "metrics.jsonl", kill_after)
    resumed = _run(num_processes, broken)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from" in resumed.stdout
    whole, again = _final_weights(tmp_path / "whole"), _final_weights(tmp_path / "broken")
    assert whole.keys() == again.keys()
    different = [name for name in whole if not torch.equal(whole[name], again[name])]
    assert not different, f"killed after {kill_after} records: {different}"
    assert _metrics(tmp_path / "whole")[18]["loss"] == _metrics(tmp_path / "broken")[18]["loss"]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_that_is_told_to_stop_saves_and_goes_on_to_the_same_bits(dataset: Path, tmp_path: Path, num_processes: int):
    """SIGTERM, or SIGUSR1 to one of two processes: all save at the same step, long before the next checkpoint is due."""
    overrides = ["head.sample_rate=0.5", "train.epochs=2.5", "eval.targets=[]", "checkpoint.every=0"]
    assert _run(num_processes, _arguments(dataset, tmp_path, *overrides, "run.name=whole")).returncode == 0
    stopped = _arguments(dataset, tmp_path, *overrides, "run.name=stopped")
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    with subprocess.Popen(_command(num_processes, stopped), stderr=subprocess.PIPE, text=True, cwd="/") as process:
        deadline = time.monotonic() + 120
        while not metrics.is_file() or len(metrics.read_text().splitlines()) < 3:
            assert process.poll() is None and time.monotonic() < deadline, "the run ended, or did nothing, before the signal"
            time.sleep(0.002)
        workers = _descendants(process.pid)
        os.kill(workers[-1] if num_processes > 1 else process.pid, signal.SIGUSR1 if num_processes > 1 else signal.SIGTERM)
        said = process.communicate(timeout=120)[1]
    saved = [int(path.name[5:]) for path in list_checkpoints(tmp_path / "stopped")]
    assert len(saved) == 1 and 3 <= saved[0] < 18, said
    assert f"saved after step {saved[0]} of 18" in said
    assert process.returncode == (75 if num_processes == 1 else 1)  # torchrun has an exit status of its own
    assert _run(num_processes, stopped).returncode == 0
    whole, again = _final_weights(tmp_path / "whole"), _final_weights(tmp_path / "stopped")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_a_run_folder_in_use_is_refused(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = _arguments(dataset, tmp_path, "train.epochs=100", "eval.targets=[]")
    with subprocess.Popen(_command(1, arguments), stdout=subprocess.DEVNULL, cwd="/") as process:
        while not (tmp_path / "tiny" / "metrics.jsonl").is_file():
            assert process.poll() is None
            time.sleep(0.01)
        assert train.main(arguments) == 1
        assert "is in use by another job" in capsys.readouterr().err
        process.kill()
    assert train.main(_arguments(dataset, tmp_path, "train.max_steps=1", "eval.targets=[]", "run.name=other")) == 0


def test_two_processes_see_the_same_samples_and_losses_as_one(dataset: Path, tmp_path: Path):
    # a small rate: frozen statistics of an untrained network normalise nothing, and large steps would amplify rounding errors
    losses = []
    for num_processes in (1, 2):
        name = f"n{num_processes}"
        overrides = [
            "train.max_steps=20",
            "eval.targets=[]",
            "backbone.freeze_norm=true",
            "optimizer.lr=1e-3",
            f"run.name={name}",
        ]
        done = _run(num_processes, _arguments(dataset, tmp_path, *overrides))
        assert done.returncode == 0, done.stderr
        losses.append([record["loss"] for record in _metrics(tmp_path / name).values()])
    assert len(losses[0]) == 20
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.path="], "data.path"),
        (["data.path=/nowhere"], "/nowhere"),
        (["data.num_classes=13"], "data.num_classes is 13"),
        (["eval.targets=[tinny]"], "tinny.bin. Did you mean 'tiny'?"),
        (["eval.targets=[text]"], "text.bin: not a verification set"),
        (["train.batch_size=7", "train.accumulation=7"], "train.batch_size"),
        (["train.epoch=3"], "Did you mean train.epochs?"),
        (["backbone.name=r19"], "backbone.name"),
        (["checkpoint.resume=/nowhere"], "no complete checkpoint at /nowhere"),
        (["run.output=/proc/nothing"], "cannot be written"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_checkpoint(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
):
    (dataset / "text.bin").write_text("hello")
    assert train.main(_arguments(dataset, tmp_path, *overrides)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and len(error.strip().splitlines()) == 1
    assert not list_checkpoints(tmp_path / "tiny")


def test_a_checkpoint_of_other_data_or_architecture_is_refused_and_kept(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    short = ["train.max_steps=4", "eval.targets=[]"]
    assert train.main(_arguments(dataset, tmp_path, *short)) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "tiny" / "checkpoints").rglob("*") if path.is_file()}
    for overrides, message in [
        (["backbone.width=0.25"], "backbone was"),
        (["backbone.name=mbf"], "backbone was"),
        (["run.seed=1"], "seed was"),
        (["train.batch_size=16"], "batch_size was 8, this run has 16"),
        (["data.source=synthetic", "data.num_classes=13", "data.num_images=60"], "num_classes was 12"),
        (["checkpoint.resume=never"], "holds 1 checkpoint(s)"),
    ]:
        assert train.main(_arguments(dataset, tmp_path, "train.max_steps=8", "eval.targets=[]", *overrides)) == 1
        error = capsys.readouterr().err
        assert message in error and len(error.strip().splitlines()) == 1, error
    assert before == {path: path.read_bytes() for path in (tmp_path / "tiny" / "checkpoints").rglob("*") if path.is_file()}


def test_a_resumed_run_keeps_each_configuration_it_had(dataset: Path, tmp_path: Path):
    for steps in (2, 4):
        assert train.main(_arguments(dataset, tmp_path, f"train.max_steps={steps}", "eval.targets=[]")) == 0
    (earlier,) = (tmp_path / "tiny").glob("config_until_step_00000002_*.yaml")
    assert "max_steps: 2" in earlier.read_text()
    assert "max_steps: 4" in (tmp_path / "tiny" / "config.yaml").read_text()


def test_an_explicit_checkpoint_starts_another_run(dataset: Path, tmp_path: Path):
    assert train.main(_arguments(dataset, tmp_path, "train.max_steps=4", "eval.targets=[]")) == 0
    source = f"checkpoint.resume={tmp_path / 'tiny'}"
    assert train.main(_arguments(dataset, tmp_path, "train.max_steps=6", "eval.targets=[]", "run.name=second", source)) == 0
    assert sorted(_metrics(tmp_path / "second")) == [5, 6]


def test_a_broken_record_ends_all_processes_with_its_key(dataset: Path, tmp_path: Path):
    folder = tmp_path / "broken_data"
    folder.mkdir()
    with RecordWriter(folder / "train.rec", folder / "train.idx") as writer:
        for key in range(NUM_IMAGES):
            payload = _face(key % NUM_CLASSES, key)
            writer.write(key, pack(float(key % NUM_CLASSES), key, 0, payload[:500] if key == 37 else payload))
    started = time.monotonic()
    done = _run(2, _arguments(folder, tmp_path, "eval.targets=[]"))
    assert done.returncode != 0
    assert "37" in done.stderr and "train.rec" in done.stderr and "cannot be decoded" in done.stderr
    assert time.monotonic() - started < 60


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    overrides = ["optimizer.lr=1e30", "optimizer.clip_norm=0", "eval.targets=[]"]
    assert train.main(_arguments(dataset, tmp_path, *overrides)) == 1
    error = capsys.readouterr().err
    assert "is not finite in step" in error or "the loss is" in error
    for path in list_checkpoints(tmp_path / "tiny"):
        assert all(tensor.isfinite().all() for tensor in read_tensors(path / "backbone.safetensors").values())


def test_a_failed_evaluation_names_its_set_and_loses_nothing(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    whole = train.evaluate

    def broken(*arguments: object) -> object:
        raise ValueError("evaluation of tiny: image 3: cannot be decoded")

    monkeypatch.setattr(train, "evaluate", broken)
    overrides = ["eval.every=6", "checkpoint.every=0"]
    assert train.main(_arguments(dataset, tmp_path, *overrides)) == 1
    assert "evaluation of tiny: image 3" in capsys.readouterr().err
    assert [path.name for path in list_checkpoints(tmp_path / "tiny")] == ["step_00000006"]
    monkeypatch.setattr(train, "evaluate", whole)
    assert train.main(_arguments(dataset, tmp_path, *overrides)) == 0
    (tmp_path / "other").mkdir()
    assert train.main(_arguments(dataset, tmp_path / "other", *overrides)) == 0
    ends = [_final_weights(folder / "tiny") for folder in (tmp_path, tmp_path / "other")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])


def test_the_best_checkpoint_is_best_in_what_was_asked(dataset: Path, tmp_path: Path):
    overrides = ["eval.metric=eer", "eval.every=4", "train.epochs=3"]
    assert train.main(_arguments(dataset, tmp_path, *overrides)) == 0
    errors = {step: record["eer"] for step, record in _metrics(tmp_path / "tiny", "tiny").items()}
    scores = {int(path.name[5:]): read_manifest(path)["score"] for path in list_checkpoints(tmp_path / "tiny")}
    assert min(errors.values()) == -max(score for score in scores.values() if score is not None)
    assert all(scores[step] == -errors[step] for step in scores if scores[step] is not None)


def test_a_metric_that_the_sets_cannot_carry_is_refused_before_training(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert train.main(_arguments(dataset, tmp_path, "eval.metric=tar@1e-2")) == 1
    assert "eval.metric=tar@1e-2 needs 100 impostor pairs" in capsys.readouterr().err
    assert not (tmp_path / "tiny").exists()


def test_without_evaluation_at_the_end_there_are_no_results(dataset: Path, tmp_path: Path):
    assert train.main(_arguments(dataset, tmp_path, "eval.at_end=false", "eval.every=0", "train.max_steps=2")) == 0
    assert not (tmp_path / "tiny" / "results.json").exists() and len(list_checkpoints(tmp_path / "tiny")) == 1


def test_published_config_takes_three_steps_on_synthetic_data(tmp_path: Path):
    arguments = [
        str(ROOT / "configs" / "ms1mv2_r50.yaml"), "data.source=synthetic", "data.num_classes=500", "data.num_images=5000",
        f"run.output={tmp_path}", "train.max_steps=3", "train.batch_size=4", "train.precision=bf16", "backbone.width=0.125",
        "eval.targets=[]", "log.every=1", "run.device=cpu",
    ]  # fmt: skip
    assert train.main(arguments) == 0
    assert len(_metrics(tmp_path / "ms1mv2_r50")) == 3


def test_print_config_prints_and_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = [str(ROOT / "configs" / "ms1mv3_r100.yaml"), "--print-config", f"run.output={tmp_path}"]
    assert train.main(arguments) == 0
    assert "name: r100" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
