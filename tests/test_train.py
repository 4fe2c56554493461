"""The trainer end to end on tiny data: it learns, it survives SIGKILL to the last bit, and says what is wrong in one line."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rounding import network_bound
from tiny_runs import (
    NUM_CLASSES,
    NUM_IMAGES,
    ROOT,
    face,
    final_weights,
    read_metrics,
    run_train,
    tiny_run,
    write_dataset,
)

import train
from data.recordio import RecordWriter, pack
from utils.checkpoint import list_checkpoints, read_manifest

LOSS_BOUND = 16.0 * network_bound()  # of one step: loss.scale times the error of the embeddings; those of steps are independent


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a RecordIO set and a verification set of other classes, `tiny`."""
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder)
    return folder


def test_training_learns_evaluates_and_leaves_a_complete_run_folder(dataset: Path, tmp_path: Path):
    assert train.main(tiny_run(dataset, tmp_path, "train.epochs=6", "schedule.warmup_epochs=0.5")) == 0
    run = tmp_path / "tiny"
    losses = [record["loss"] for record in read_metrics(run).values()]
    assert len(losses) == 6 * NUM_IMAGES // 8
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    assert read_metrics(run, "tiny")[45]["accuracy"] >= 0.5
    for name in ("config.yaml", "train.log", "results.json", "results.md", "verification.png", "tensorboard"):
        assert (run / name).exists(), name
    assert [int(path.name[5:]) for path in list_checkpoints(run)][-2:] == [44, 45]
    assert train.main(tiny_run(dataset, tmp_path, "train.epochs=6", "schedule.warmup_epochs=0.5")) == 0  # nothing left to do


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_precisions_take_the_same_path(dataset: Path, tmp_path: Path, precision: str):
    arguments = tiny_run(dataset, tmp_path, f"train.precision={precision}", "train.max_steps=4", "eval.targets=[]")
    assert train.main(arguments) == 0
    records = read_metrics(tmp_path / "tiny")
    assert all(np.isfinite(record["loss"]) for record in records.values())
    assert ("loss_scale" in records[4]) == (precision == "fp16")


@pytest.mark.numeric
def test_accumulated_micro_batches_follow_one_large_batch_with_frozen_statistics(dataset: Path, tmp_path: Path):
    runs = []
    for accumulation in (1, 2):
        name = f"acc{accumulation}"
        overrides = ["train.max_steps=4", "eval.targets=[]", "backbone.freeze_norm=true", "optimizer.lr=0.01"]
        arguments = tiny_run(dataset, tmp_path, *overrides, f"run.name={name}", f"train.accumulation={accumulation}")
        assert train.main(arguments) == 0
        runs.append([record["loss"] for record in read_metrics(tmp_path / name).values()])
    assert runs[0] == pytest.approx(runs[1], abs=4**0.5 * LOSS_BOUND)


@pytest.mark.numeric
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
        done = run_train(num_processes, tiny_run(dataset, tmp_path, *overrides))
        assert done.returncode == 0, done.stderr
        losses.append([record["loss"] for record in read_metrics(tmp_path / name).values()])
    assert len(losses[0]) == 20
    assert losses[0] == pytest.approx(losses[1], abs=20**0.5 * LOSS_BOUND)


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
    assert train.main(tiny_run(dataset, tmp_path, *overrides)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and len(error.strip().splitlines()) == 1
    assert not list_checkpoints(tmp_path / "tiny")


def test_a_broken_record_ends_all_processes_with_its_key(dataset: Path, tmp_path: Path):
    folder = tmp_path / "broken_data"
    folder.mkdir()
    with RecordWriter(folder / "train.rec", folder / "train.idx") as writer:
        for key in range(NUM_IMAGES):
            payload = face(key % NUM_CLASSES, key)
            writer.write(key, pack(float(key % NUM_CLASSES), key, 0, payload[:500] if key == 37 else payload))
    started = time.monotonic()
    done = run_train(2, tiny_run(folder, tmp_path, "eval.targets=[]"))
    assert done.returncode != 0
    assert "37" in done.stderr and "train.rec" in done.stderr and "cannot be decoded" in done.stderr
    assert time.monotonic() - started < 60


def test_a_failed_evaluation_names_its_set_and_loses_nothing(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    whole = train.evaluate

    def broken(*arguments: object) -> object:
        raise ValueError("evaluation of tiny: image 3: cannot be decoded")

    monkeypatch.setattr(train, "evaluate", broken)
    overrides = ["eval.every=6", "checkpoint.every=0"]
    assert train.main(tiny_run(dataset, tmp_path, *overrides)) == 1
    assert "evaluation of tiny: image 3" in capsys.readouterr().err
    assert [path.name for path in list_checkpoints(tmp_path / "tiny")] == ["step_00000006"]
    monkeypatch.setattr(train, "evaluate", whole)
    assert train.main(tiny_run(dataset, tmp_path, *overrides)) == 0
    (tmp_path / "other").mkdir()
    assert train.main(tiny_run(dataset, tmp_path / "other", *overrides)) == 0
    ends = [final_weights(folder / "tiny") for folder in (tmp_path, tmp_path / "other")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])


def test_the_best_checkpoint_is_best_in_what_was_asked(dataset: Path, tmp_path: Path):
    overrides = ["eval.metric=eer", "eval.every=4", "train.epochs=3"]
    assert train.main(tiny_run(dataset, tmp_path, *overrides)) == 0
    errors = {step: record["eer"] for step, record in read_metrics(tmp_path / "tiny", "tiny").items()}
    scores = {int(path.name[5:]): read_manifest(path)["score"] for path in list_checkpoints(tmp_path / "tiny")}
    assert min(errors.values()) == -max(score for score in scores.values() if score is not None)
    assert all(scores[step] == -errors[step] for step in scores if scores[step] is not None)


def test_a_metric_that_the_sets_cannot_carry_is_refused_before_training(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert train.main(tiny_run(dataset, tmp_path, "eval.metric=tar@1e-2")) == 1
    assert "eval.metric=tar@1e-2 needs 100 impostor pairs" in capsys.readouterr().err
    assert not (tmp_path / "tiny").exists()


def test_without_evaluation_at_the_end_there_are_no_results(dataset: Path, tmp_path: Path):
    assert train.main(tiny_run(dataset, tmp_path, "eval.at_end=false", "eval.every=0", "train.max_steps=2")) == 0
    assert not (tmp_path / "tiny" / "results.json").exists() and len(list_checkpoints(tmp_path / "tiny")) == 1


def test_published_config_takes_three_steps_on_synthetic_data(tmp_path: Path):
    arguments = [
        str(ROOT / "configs" / "ms1mv2_r50.yaml"), "data.source=synthetic", "data.num_classes=500", "data.num_images=5000",
        f"run.output={tmp_path}", "train.max_steps=3", "train.batch_size=4", "train.precision=bf16", "backbone.width=0.125",
        "eval.targets=[]", "log.every=1", "run.device=cpu",
    ]  # fmt: skip
    assert train.main(arguments) == 0
    assert len(read_metrics(tmp_path / "ms1mv2_r50")) == 3


def test_print_config_prints_and_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = [str(ROOT / "configs" / "ms1mv3_r100.yaml"), "--print-config", f"run.output={tmp_path}"]
    assert train.main(arguments) == 0
    assert "name: r100" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
