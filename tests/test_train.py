"""The trainer end to end on tiny data: it learns, it survives SIGKILL to the last bit, and says what is wrong in one line."""

import fcntl
import functools
import json
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from pictures import jpeg, picture
from rounding import network_bound
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import (
    FEW_IMAGES,
    IRESNET,
    NUM_CLASSES,
    ROOT,
    Started,
    ended_well,
    equal_weights,
    error_of,
    face,
    one_line,
    read_metrics,
    run_program,
    run_train,
    small_run,
)

import train
from data.recordio.image_record import RecordWriter, pack
from eval import monitor
from eval.pair_sets.bin_file import write_bin
from training import model
from utils.checkpoint.format import list_checkpoints, read_manifest, step_of
from utils.checkpoint.reading import read_backbone
from utils.distributed import World
from utils.memory import available_bytes
from utils.precision import LossScaler

LOSS_BOUND = 16.0 * network_bound()  # of one step: loss.scale times the error of the embeddings; those of steps are independent


def test_training_learns_evaluates_and_leaves_a_complete_run_folder(dataset: Path, tmp_path: Path):
    learning = ["train.batch_size=8", "train.epochs=12", "schedule.warmup_epochs=1", "data.image_size=64"]
    assert train.main(small_run(dataset, tmp_path, *learning)) == 0
    run = tmp_path / "tiny"
    losses = [record["loss"] for record in read_metrics(run).values()]
    assert len(losses) == 12 * FEW_IMAGES // 8
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    scored = read_metrics(run, "tiny")[45]  # a coin reaches 0.85 in one of 776 sets of 20 pairs
    assert scored["accuracy"] >= 0.85 and scored["auc"] >= 0.9
    for name in ("config.yaml", "train.log", "results.json", "results.md", "verification.png", "tensorboard"):
        assert (run / name).exists(), name
    assert [int(path.name[5:]) for path in list_checkpoints(run)][-2:] == [44, 45]
    assert train.main(small_run(dataset, tmp_path, *learning)) == 0  # nothing left to do


def _train_and_look_for_the_compiler(arguments: list[str]) -> int:
    """Train in a process that has imported nothing but what a training needs."""
    status = train.main(arguments)
    return status or int(any(name in sys.modules for name in ("torch._dynamo", "torch._inductor", "sympy")))


@pytest.mark.parametrize(
    ("num_processes", "settings"),
    [(2, "optimizer.name=sgd"), (1, "optimizer.name=adamw backbone.name=vit_kprpe_shallow data.landmarks=POINTS")],
)
def test_no_process_imports_the_compiler_of_torch(dataset: Path, tmp_path: Path, num_processes: int, settings: str):
    np.save(points := tmp_path / "points.npy", np.full((FEW_IMAGES, 5, 2), 0.5, dtype=np.float16))
    settings = settings.replace("POINTS", str(points))
    overrides = [*settings.split(), "optimizer.lr=1e-3", "train.max_steps=3", "eval.every=2", "checkpoint.every=2"]
    arguments = small_run(dataset, tmp_path, *overrides)
    ended_well(run_program(_train_and_look_for_the_compiler, [arguments] * num_processes))


def _moved(run: Path) -> torch.Tensor:
    """Return by how much the weights of the backbone moved from the first checkpoint to the last."""
    first, last = (read_backbone(list_checkpoints(run)[place]) for place in (0, -1))
    return torch.cat([(last[name] - first[name]).reshape(-1) for name in first if name.endswith((".weight", ".bias"))])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_goes_the_way_of_fp32(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str):
    monkeypatch.setattr(model, "LossScaler", functools.partial(LossScaler, initial=256.0))  # no step overflows, all are taken
    overrides = ["train.max_steps=4", "eval.targets=[]", "optimizer.lr=2e-3", "checkpoint.every=1", "checkpoint.keep_last=9"]
    for name in ("fp32", precision):
        assert train.main(small_run(dataset, tmp_path, *overrides, f"train.precision={name}", f"run.name={name}")) == 0
    exact, half = (read_metrics(tmp_path / name) for name in ("fp32", precision))
    unit = {"bf16": 2**-8, "fp16": 2**-11}[precision]
    # loss.scale times the error of a cosine after some 50 layers
    assert 0 < abs(half[1]["loss"] - exact[1]["loss"]) < 16.0 * unit * 50**0.5
    assert half[1]["grad_norm"] == pytest.approx(exact[1]["grad_norm"], rel=0.25)  # the loss scale is taken out: no factor 256
    assert [record.get("loss_scale") for record in half.values()] == [256.0 if precision == "fp16" else None] * 4
    # in 40,000 dimensions two ways that have nothing to do with each other are orthogonal
    assert torch.cosine_similarity(_moved(tmp_path / precision), _moved(tmp_path / "fp32"), dim=0) > 0.5


@pytest.mark.numeric
@pytest.mark.parametrize(("num_processes", "accumulation", "lr", "steps"), [(1, 2, 1e-2, 4), (2, 1, 1e-3, 4)])
def test_losses_are_those_of_one_process_and_one_batch_with_frozen_statistics(
    dataset: Path, tmp_path: Path, num_processes: int, accumulation: int, lr: float, steps: int
):
    # a small rate: frozen statistics of an untrained network normalise nothing, and large steps would amplify rounding errors
    overrides = [f"train.max_steps={steps}", "eval.targets=[]", "backbone.freeze_norm=true", f"optimizer.lr={lr}", IRESNET]
    losses = []
    for name, processes, micro_batches in (("one", 1, 1), ("other", num_processes, accumulation)):
        more = [f"run.name={name}", f"train.accumulation={micro_batches}"]
        ended_well(run_train(processes, small_run(dataset, tmp_path, *overrides, *more)))
        losses.append([record["loss"] for record in read_metrics(tmp_path / name).values()])
    assert len(losses[0]) == steps
    assert losses[0] == pytest.approx(losses[1], abs=steps**0.5 * LOSS_BOUND)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.path="], "data.path"),
        (["data.path=/nowhere"], "/nowhere"),
        (["data.num_classes=13"], "data.num_classes is 13"),
        (["eval.targets=[tinny]"], "tinny.bin. Did you mean 'tiny'?"),
        (["eval.targets=[text]"], "text.bin: not a verification set"),
        (["train.batch_size=7", "train.accumulation=7"], "train.batch_size"),
        ([f"train.batch_size={2**31}", f"train.accumulation={2**31}"], "accumulation: 67108864, 134217728, 268435456, "),
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
    begin = time.process_time()
    assert train.main(small_run(dataset, tmp_path, *overrides)) == 1
    assert time.process_time() - begin < 60
    assert message in one_line(capsys)
    assert not list_checkpoints(tmp_path / "tiny")


def test_a_broken_record_ends_all_processes_with_its_key(tmp_path: Path):
    folder = tmp_path / "broken_data"
    folder.mkdir()
    with RecordWriter(folder / "train.rec", folder / "train.idx") as writer:
        for key in range(FEW_IMAGES):
            payload = face(key % NUM_CLASSES, key)
            writer.write(key, pack(float(key % NUM_CLASSES), key, 0, payload[:500] if key == 17 else payload))
    done = run_train(2, small_run(folder, tmp_path, "eval.targets=[]"))  # a process that lived on would be an error here
    assert done.returncode == 1
    assert re.search(rf"^error: .*record 17 of {folder}/train\.rec: .*cannot be decoded", done.stderr, re.M), done.stderr


def test_a_failed_evaluation_names_its_set_and_loses_nothing(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    overrides = ["eval.every=6", "checkpoint.every=0"]
    (tmp_path / "other").mkdir()
    other = small_run(dataset, tmp_path / "other", "eval.every=0", "checkpoint.every=0")  # which fails at the end
    with mock.patch.object(monitor, "evaluate", side_effect=ValueError("evaluation of tiny: image 3: cannot be decoded")):
        for run in (small_run(dataset, tmp_path, *overrides), small_run(dataset, tmp_path, *overrides), other):
            said = error_of(train.main(run), capsys)  # the second run begins with the evaluation
            assert "evaluation of tiny: image 3" in said and "take it out of eval.targets; the run then goes on" in said
    assert [path.name for path in list_checkpoints(tmp_path / "tiny")] == ["step_00000006"]
    assert train.main(small_run(dataset, tmp_path, *overrides)) == 0
    assert train.main(other) == 0 and list(read_metrics(tmp_path / "other" / "tiny", "tiny")) == [15]
    metrics = (tmp_path / "other" / "tiny" / "metrics.jsonl").read_bytes()
    assert train.main(other) == 0 and (tmp_path / "other" / "tiny" / "metrics.jsonl").read_bytes() == metrics
    equal_weights(tmp_path / "tiny", tmp_path / "other" / "tiny")


def test_figures_that_cannot_be_drawn_cost_no_training(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(monitor, "draw_overview", mock.Mock(side_effect=ValueError("no font has this letter")))
    assert train.main(small_run(dataset, tmp_path, "eval.every=6", "checkpoint.every=0")) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("WARNING: the figures")]
    assert len(warnings) == 1 and "no font has this letter" in warnings[0] and "training goes on" in warnings[0]
    assert list(read_metrics(tmp_path / "tiny", "tiny")) == [6, 12, 15]


def test_a_new_best_evaluation_is_saved_whatever_checkpoint_every_says(dataset: Path, tmp_path: Path):
    """Best in what was asked; on two processes, and with one in the next test. The pairs are of nobody, so that EERs differ."""
    write_bin(tmp_path / "odd.bin", [face(image * image, image) for image in range(80)], [bool(pair % 2) for pair in range(40)])
    overrides = ["eval.metric=eer", "eval.every=3", "checkpoint.every=0", "checkpoint.keep_last=99", "optimizer.lr=0.2"]
    ended_well(run_train(2, small_run(dataset, tmp_path, *overrides, f"eval.targets=[{tmp_path / 'odd.bin'}]")))
    errors = {step: record["eer"] for step, record in read_metrics(tmp_path / "tiny", "odd").items()}
    steps = sorted(errors)
    new_best = [step for place, step in enumerate(steps) if all(errors[step] < errors[other] for other in steps[:place])]
    assert new_best[0] < 15  # so that the end of the run is not what saves it
    scores = {step_of(path): read_manifest(path)["score"] for path in list_checkpoints(tmp_path / "tiny")}
    assert scores == {step: -errors[step] for step in sorted({*new_best, 15})}, errors


def test_a_resumed_run_knows_the_best_evaluation_so_far(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scores = iter([0.5, 0.9, 0.7, 0.8, 0.85, 0.95, 0.6])
    monkeypatch.setattr(monitor, "selection_score", lambda results, metric: next(scores))
    overrides = ["eval.every=1", "checkpoint.every=3", "checkpoint.keep_last=99"]
    assert train.main(small_run(dataset, tmp_path, *overrides, "train.max_steps=3")) == 0
    assert [step_of(path) for path in list_checkpoints(tmp_path / "tiny")] == [1, 2, 3]
    overrides[1] = "checkpoint.every=7"
    assert train.main(small_run(dataset, tmp_path, *overrides, "train.max_steps=7")) == 0
    assert [step_of(path) for path in list_checkpoints(tmp_path / "tiny")] == [1, 2, 3, 6, 7]


def test_scores_in_another_metric_are_not_compared(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scores = iter([0.9, -0.3, -0.2])
    monkeypatch.setattr(monitor, "selection_score", lambda results, metric: next(scores))
    overrides = ["eval.every=2", "checkpoint.every=0", "checkpoint.keep_last=1"]
    assert train.main(small_run(dataset, tmp_path, *overrides, "train.max_steps=2")) == 0
    assert train.main(small_run(dataset, tmp_path, *overrides, "train.max_steps=6", "eval.metric=eer")) == 0
    kept = {step_of(path): read_manifest(path)["score"] for path in list_checkpoints(tmp_path / "tiny")}
    assert kept == {2: 0.9, 6: -0.2}  # the best in accuracy, and the best in EER


def test_metrics_and_tensorboard_hold_every_number_of_the_table_at_the_end(dataset: Path, tmp_path: Path):
    assert train.main(small_run(dataset, tmp_path, "train.max_steps=4", "eval.metric=tar@1e-1")) == 0
    run = tmp_path / "tiny"
    shown = read_metrics(run, "tiny")[4]
    cells = [line.strip("|").split("|") for line in (run / "results.md").read_text().splitlines() if line.startswith("|")]
    header, _, row = [[cell.strip() for cell in line] for line in cells]
    table = dict(zip(header, row, strict=True))
    accuracy, deviation = table["accuracy %"].split(" +- ")
    assert f"{100 * shown['accuracy']:.2f}" == accuracy and f"{100 * shown['accuracy_std']:.2f}" == deviation
    assert f"{shown['cosine_threshold']:.4f}" == table["cosine threshold"]
    assert (shown["tar@1e-2"], table["TAR@FAR=1e-2"]) == (None, "n/a") and shown["tar@1e-1"] is not None  # 10 impostor pairs
    assert (f"{100 * shown['eer']:.2f}", f"{shown['auc']:.4f}") == (table["EER %"], table["AUC"])
    assert f"{shown['xnorm']:.2f}" == table["XNorm"]
    final = json.loads((run / "results.json").read_text())["tiny"]
    assert {name: shown[name] for name in final if name in shown} == {name: final[name] for name in shown if name in final}
    assert read_manifest(list_checkpoints(run)[-1])["score"] == shown["tar@1e-1"]
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    numbers = {name for name, value in shown.items() if isinstance(value, float)}
    assert numbers == {tag.split("/")[1] for tag in board.Tags()["scalars"] if tag.startswith("tiny/")}


def test_a_set_that_is_called_as_training_is_in_the_metrics_is_refused_by_its_file(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    taken, free = tmp_path / "train.bin", tmp_path / "trained.bin"
    taken.write_bytes((dataset / "tiny.bin").read_bytes())
    error = error_of(train.main(small_run(dataset, tmp_path, f"eval.targets=[tiny, {taken}]", "train.max_steps=1")), capsys)
    assert error.startswith(f"error: eval.targets: {taken} must not be called 'train'") and error.endswith("; rename it")
    assert not (tmp_path / "tiny").exists()
    taken.rename(free)
    assert train.main(small_run(dataset, tmp_path, f"eval.targets=[tiny, {free}]", "train.max_steps=1")) == 0
    assert "accuracy" in read_metrics(tmp_path / "tiny", "trained")[1] and "loss" in read_metrics(tmp_path / "tiny")[1]


def test_without_evaluation_at_the_end_there_are_no_results(dataset: Path, tmp_path: Path):
    assert train.main(small_run(dataset, tmp_path, "eval.at_end=false", "eval.every=0", "train.max_steps=2")) == 0
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


BYTES_PER_CLASS = 16 * 4 * 2 + 4  # of the tiny run: fp32 centre and momentum, one norm


def _classes(number: int) -> list[str]:
    counts = [f"data.num_classes={number}", f"data.num_images={number}", "train.max_steps=1"]
    return ["data.source=synthetic", "data.path=", "eval.targets=[]", *counts]


def test_a_head_that_does_not_fit_ends_before_training_with_what_would(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    free = available_bytes(World(0, 1, 0, 1, torch.device("cpu")))
    said = error_of(train.main(small_run(dataset, tmp_path, *_classes(int(1.3 * free / BYTES_PER_CLASS)))), capsys)
    assert said.startswith("error: head: ") and re.search(
        r"in head.storage=exact need [\d.]+ GiB each beside [\d.]+ GiB of the backbone, but [\d.]+ GiB are free", said
    )
    assert "What would fit: head.storage=lean" in said and "or 2 processes instead of 1" in said
    assert train.main(small_run(dataset, tmp_path, *_classes(10**12))) == 1  # lean would not do either
    said = capsys.readouterr().err
    assert re.search(r"What would fit: \d+ processes instead of 1$", said.strip())


def test_all_ranks_end_together_where_the_head_does_not_fit(dataset: Path, tmp_path: Path):
    done = run_train(2, small_run(dataset, tmp_path, *_classes(10**12)))  # a process that lived on would be an error here
    assert done.returncode == 1
    # one rank speaks for all
    assert done.stderr.count("error: head: 1000000000000 classes over 2 process(es)") == 1, done.stderr
    assert "RuntimeError" not in done.stderr and "MemoryError" not in done.stderr


def test_check_finds_what_is_wrong_and_trains_nothing(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model, "available_bytes", lambda world: 2 << 30)
    assert train.main([*small_run(dataset, tmp_path), "--check"]) == 0
    said = capsys.readouterr().out
    assert "30 images" in said and "tiny: 20 pairs" in said and "nothing wrong was found" in said
    for person in "ab":
        (tmp_path / "set" / person).mkdir(parents=True)
        (tmp_path / "set" / person / "0.jpg").write_bytes(jpeg(picture(1, 256)))
    photographs = f"data.source=folder data.path={tmp_path / 'set'} data.image_size=112 eval.targets=[]"
    sources = f"data.sources=[{{path: {dataset}}}, {{path: {tmp_path / 'set'}, source: folder}}]"
    (tmp_path / "file").touch()
    for overrides, words in (
        ("data.path=/nowhere", "data.path: no file /nowhere/train.rec"),
        ("eval.targets=[tinny]", "tinny"),
        ("eval.metric=tar@1e-2", "eval.metric=tar@1e-2 needs 100 impostor pairs"),
        ("train.batch_size=7 train.accumulation=7", "train.batch_size"),
        (photographs, "0.jpg: an image must be 112 x 112 pixels (height x width), got 256 x 256"),
        (f"{sources} data.path= data.image_size=112 eval.targets=[]", "0.jpg: an image must be 112 x 112 pixels"),
        ("run.device=cuda", "run.device=cuda, but torch sees no CUDA device"),
        (f"run.output={tmp_path / 'file'}", "run.output: the run folder"),
        ("train.max_steps=0 schedule.warmup_steps=99", "schedule.warmup_steps must be below the 15 steps"),
        ("backbone.freeze=[layer99]", "backbone.freeze: "),
        ("init.backbone=/nowhere", "init.backbone: no run folder, checkpoint or weights file at /nowhere"),
        (
            "backbone.width=1000",
            "GiB with gradients and moments, 2.0 are free; 179 M would fit: set a smaller backbone.width or",
        ),
        ("train.batch_size=100000", "train.batch_size=100000: the backbone needs "),
    ):
        assert train.main([*small_run(dataset, tmp_path, *re.split(r" (?=[a-z]+\.)", overrides)), "--check"]) == 1, overrides
        said = capsys.readouterr()
        assert said.err.startswith("error: ") and len(said.err.splitlines()) == 1 and "nothing wrong" not in said.out
        assert words in said.err, said.err
    would_fit = r"for 100000 images in one process, 2.0 are free; (\d+) would fit, or train.accumulation=(\d+)$"
    found = re.search(would_fit, said.err)
    assert found
    for fix in (f"train.batch_size={found[1]}", f"train.batch_size=100000 train.accumulation={found[2]}"):
        assert train.main([*small_run(dataset, tmp_path, *fix.split()), "--check"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "index_cache", "set", "tiny.yaml"]


def test_check_says_what_a_resume_would_and_changes_nothing(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert train.main(small_run(dataset, tmp_path, "train.max_steps=4", "checkpoint.every=2", "eval.targets=[]")) == 0
    run = tmp_path / "tiny"
    older, weights = run / "checkpoints" / "step_00000002", run / "checkpoints" / "step_00000004" / "backbone.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    files = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    for overrides, words in (
        ("train.batch_size=6", "batch_size was 4, this run has 6"),
        ("head.sub_centers=3", "softmax does not fit this run"),
        ("checkpoint.resume=never", "checkpoint.resume=never, but"),
        (f"run.name=other init.backbone={older} init.head={tmp_path}", "init.head: no complete checkpoint"),
        (f"run.name=other init.backbone={older} backbone.width=0.25", "check the section backbone"),
        (f"run.name=other checkpoint.resume={run}", "backbone.safetensors is"),
    ):
        assert train.main([*small_run(dataset, tmp_path, *overrides.split()), "--check"]) == 1, overrides
        assert words in capsys.readouterr().err, overrides
    assert train.main([*small_run(dataset, tmp_path), "--check"]) == 0
    said = capsys.readouterr().out
    assert "checkpoint step_00000004 is damaged; a training puts it aside" in said and "resuming from step_00000002" in said
    assert files == {path: path.stat().st_mtime_ns for path in run.rglob("*")} and not (tmp_path / "other").exists()


def test_the_log_shows_units_and_the_epoch(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model, "LossScaler", functools.partial(LossScaler, initial=256.0))  # no step overflows
    assert train.main(small_run(dataset, tmp_path, "train.precision=fp16", "train.max_steps=6", "train.batch_size=8")) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 6/6")]
    numbers = read_metrics(tmp_path / "tiny")[6]
    speed, memory = f"{numbers['images_per_second']:.3g} img/s", f"{numbers['memory_gib']:.2f} GiB"
    loss, rate, gradient = f"loss {numbers['loss']:.3f}", f"lr {numbers['lr']:.3g}", f"grad {numbers['grad_norm']:.3g}"
    cosine, wait = f"cos+ {numbers['positive_cosine']:.3f}", f"data {100 * numbers['data_wait']:.1f} %"
    expected = ["step 6/6", "epoch 1.60/1.6", loss, rate, gradient, cosine, speed, wait, memory]
    expected += [f"scale {numbers['loss_scale']:.0f}", "eta 0:00"]
    assert line.split("  ") == expected
    assert numbers["epoch"] == pytest.approx(6 * 8 / FEW_IMAGES)
    assert line in (tmp_path / "tiny" / "train.log").read_text()
    monkeypatch.setattr(model, "LossScaler", functools.partial(LossScaler, initial=2.0**60))
    assert train.main(small_run(dataset, tmp_path, "train.precision=fp16", "train.max_steps=1", "run.name=far")) == 0
    assert "  lr 0.05  overflow, step skipped  cos+ " in capsys.readouterr().out


def _train_at_a_terminal(arguments: list[str]) -> int:
    """Train where all output goes to the terminal that the first argument names."""
    terminal = os.open(arguments[0], os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(terminal, number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    return train.main(arguments[1:])


def test_a_terminal_shows_rate_speed_and_data_wait_as_well(dataset: Path, tmp_path: Path):
    shown, hidden = pty.openpty()
    fcntl.ioctl(hidden, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    arguments = small_run(dataset, tmp_path, "train.max_steps=6", "eval.targets=[]", "log.every=2")
    started, text = Started(_train_at_a_terminal, [[os.ttyname(hidden), *arguments]], tmp_path), b""
    while select.select([shown], [], [], 0.1)[0] or started.is_alive():
        text += os.read(shown, 65536) if select.select([shown], [], [], 0)[0] else b""
    os.close(shown)
    os.close(hidden)
    assert started.wait().returncode == 0, text
    bars = [line for line in text.decode().replace("\r", "\n").splitlines() if "step 6/6" in line]
    assert bars, text
    assert re.search(
        r"100% \|.+\| step 6/6, epoch 0.80/0.8  loss [\d.]+  lr [\d.e-]+  [\d.]+ img/s  data [\d.]+ %  eta 0:00", bars[-1]
    )
