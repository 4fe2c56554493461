"""The programs about the head: the plain heads compute what ours does, and the programs run end to end at small sizes."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from dense_reference import DenseHead, all_centres, dense_loss, near_their_centres, relative
from rounding import head_bounds
from tiny_runs import error_of, tiny_run

import train
from losses import build_margin
from partial_fc import PartialFC, RowSGD
from partial_fc.centres.store import FORMATS, CentreStore
from scripts.benchmark import capacity
from scripts.benchmark import head as benchmark_head
from scripts.benchmark import numerics as compare_head_numerics
from scripts.benchmark.plain import KINDS, PlainHead
from training import model

NUM_CLASSES, D, ROWS = 60, 24, 12


@pytest.fixture(autouse=True)
def _few_bare_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the bare products have 1,000 classes, not 100,000: a second of a processor."""
    run, fewer = benchmark_head._run, {"bare": {"classes": 1000}}
    monkeypatch.setattr(benchmark_head, "_run", lambda case: run(case | fewer.get(case["head"], {})))


def _plain_equals_dense(rank: int, world_size: int) -> None:
    margin, centres = build_margin("arcface", scale=64.0, margin=0.5), all_centres(NUM_CLASSES, D, 0)
    embeddings, labels = (part[2:] for part in near_their_centres(centres, ROWS + 2))  # at cosine 1 the tutorials' is NaN
    share, rows = NUM_CLASSES // world_size, slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    x, w = embeddings.double().requires_grad_(), centres.double().requires_grad_()
    dense_loss(margin, x, w, labels).backward()
    assert x.grad is not None and w.grad is not None
    mine = slice(rank * share, (rank + 1) * share)
    bound = head_bounds(64.0, D, ROWS)[1]
    for kind in KINDS:
        head = PlainHead(kind, share, D, rank * share, world_size, 1.0, torch.device("cpu"))
        with torch.no_grad():
            head.weight.copy_(centres[mine])
        gradient = head.step(embeddings[rows], labels[rows])
        assert relative(gradient, x.grad[rows]) < bound, kind
        assert head.weight.grad is not None
        assert relative(head.weight.grad, w.grad[mine]) < bound, kind


@pytest.mark.numeric
@pytest.mark.parametrize("world_size", [1, 2])
def test_plain_heads_compute_the_same_gradients(run_ranks: Callable[..., None], world_size: int):
    run_ranks(_plain_equals_dense, world_size)


def test_it_measures_draws_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    file, early, draw = tmp_path / "result.json", [], benchmark_head.draw
    monkeypatch.setattr(benchmark_head, "draw", lambda *of: early.append(json.loads(file.read_text())["rows"]) or draw(*of))
    small = ["--quick", "--classes", "700", "--batch", "16", "--sample-rate", "1", "--storage", "lean", "--matmul", "fp32"]
    assert benchmark_head.main([*small, "--json", str(file), "--plot", str(tmp_path)]) == 0
    result = json.loads(file.read_text())
    plain, leaner, ours = result["rows"]
    assert (plain["head"], leaner["head"], ours["head"], ours["storage"]) == ("tutorial", "target-only", "ours", "lean")
    assert ours["time_ratio"] == pytest.approx(plain["step_ms"] / ours["step_ms"])
    assert ours["memory_ratio_target_only"] == pytest.approx(leaner["bytes_per_identity"] / ours["bytes_per_identity"])
    assert {path.name for path in tmp_path.glob("*.png")} == {"head_time.png", "head_memory.png"}
    said = capsys.readouterr().out
    assert "ours lean fp32" in said and early == [result["rows"]]  # which a deadline would not have taken
    least, most = ours["step_ms_range"]
    assert least <= ours["step_ms"] <= most and f"{ours['step_ms']:.2f} {f'{least:.2f} to {most:.2f}':>18}" in said


def test_the_benchmark_measures_other_losses_beside_arcface(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "result.json"
    small = ["--quick", "--classes", "700", "--batch", "16", "--sample-rate", "0.5", "--storage", "exact"]
    assert benchmark_head.main([*small, "--matmul", "fp32", "--json", str(file), "--loss", "circle", "sphereface2"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["head"], row["loss"]) for row in rows] == [("ours", "circle"), ("ours", "sphereface2")]
    assert all(row["arcface_ratio"] > 0 and "time_ratio" not in row for row in rows)
    said = capsys.readouterr().out
    assert "circle exact fp32" in said and f"{rows[1]['arcface_ratio']:.2f}" in said
    arguments = [*small, "--matmul", "fp32", "--json", str(file), "--no-plain", "--placement", "disk"]
    assert benchmark_head.main(arguments) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["device_ratio"] > 0 and "on the disk" in row["described"] and "arcface_ratio" not in row
    assert benchmark_head.main([*arguments, "--alone"]) == 0
    assert "device_ratio" not in json.loads(file.read_text())["rows"][0]


def test_capacity_agrees_with_what_is_found_here(tmp_path: Path):
    file = tmp_path / "capacity.json"
    arguments = "--memory 0.2 --backbone none --batch 16 --embedding-size 64 --storage exact --device cpu --precision fp32"
    assert capacity.main([*arguments.split(), "--find", "--quick", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["found_per_process"] == pytest.approx(row["identities"], rel=0.35)  # the libraries' own share is large here


def test_a_probe_draws_no_centres_which_takes_minutes_for_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CentreStore, "fill_initial", mock.Mock(side_effect=AssertionError))
    of_step = {"batch": 4, "gpus": 1, "embedding_size": 16, "backbone": "none", "precision": "fp32", "sample_rate": 1.0}
    options = argparse.Namespace(**of_step, device="cpu", card=None, placement="device", checkpointing=False)
    for storage in FORMATS:
        with mock.patch.object(PartialFC, "_update", autospec=True) as update:
            assert capacity._peak_of_a_step(0, options, storage, 50, torch.device("cpu")) >= 0
        assert bool(update.call_args.args[3])  # the loss is finite: the step is a whole one


def test_capacity_says_what_moves_in_a_step_where_the_centres_lie_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "capacity.json"
    shared = ["--backbone", "none", "--batch", "8", "--storage", "tiny", "--sample-rate", "0.1", "--json", str(file)]
    given = ["--room", "0.1", "--bandwidth", "2", "--placement"]
    assert capacity.main([*shared, *given, "disk", "--memory", "1", "--device", "cpu"]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    classes = row["identities"]
    assert classes == int(0.1 * 2**30) // (512 * 3) and row["copy_bytes"] == 0  # bf16 and int8
    active = round(0.1 * classes)  # read once for the products and once with the momentum for the update, which writes both
    assert (row["read_bytes"], row["written_bytes"]) == (active * 512 * 5, active * 512 * 3)
    assert row["seconds"] == pytest.approx(active * 512 * 8 / 2e9)
    assert capacity.main([*shared, *given, "host", "--gpus", "8", "--card", "h100"]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["identities"] == 8 * classes and row["copy_bytes"] == classes * row["bytes_per_identity"]
    monkeypatch.setattr(capacity, "_PROBE", 1 << 20)
    assert capacity.main([*shared, "--placement", "disk", "--memory", "1", "--device", "cpu", "--folder", str(tmp_path)]) == 0
    assert "GB/s from it" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]
    for wrong, words in (
        (["--placement", "host", "--card", "h100"], "--bandwidth is needed"),
        (["--placement", "disk", "--card", "h100"], "--placement disk is for --device cpu"),
        (["--placement", "disk", "--memory", "1", "--find"], "--find measures --placement device"),
    ):
        assert words in error_of(capacity.main([*shared, *wrong]), capsys)


@pytest.mark.parametrize(
    ("precision", "backbone", "checkpointing"), [("fp32", "mbf", False), ("bf16", "mbf", False), ("bf16", "vit_t", True)]
)
def test_capacity_and_the_check_before_training_know_the_same_limit(
    precision: str,
    backbone: str,
    checkpointing: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    file, memory = tmp_path / "capacity.json", 0.15
    network = ["--backbone", backbone, "--width", "0.125", "--embedding-size", "16", "--batch", "8", "--precision", precision]
    network += ["--checkpointing"] * checkpointing
    assert capacity.main(["--memory", str(memory), *network, "--device", "cpu", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    monkeypatch.setattr(model, "available_bytes", lambda world: int(memory * 2**30))
    monkeypatch.setattr(model, "PartialFC", mock.Mock(side_effect=ValueError("the head fits")))
    capsys.readouterr()
    assert [row["storage"] for row in rows] == list(FORMATS)
    for row in rows:
        for more, said in ((0, "error: the head fits"), (1, f"error: head: {row['identities'] + 1} classes over 1 process")):
            classes = row["identities"] + more
            of_data = ["data.source=synthetic", "data.path=", f"data.num_classes={classes}", f"data.num_images={classes}"]
            of_run = ["eval.targets=[]", "head.chunk=0", f"head.storage={row['storage']}", f"train.precision={precision}"]
            of_run += [f"backbone.name={backbone}", f"backbone.checkpointing={checkpointing}"]
            assert error_of(train.main(tiny_run(tmp_path, tmp_path, *of_data, *of_run)), capsys).startswith(said)


def test_blocks_that_are_computed_again_keep_less():
    of_network = {"backbone": "vit_t", "width": 0.125, "embedding_size": 16, "image_size": 112}
    options = argparse.Namespace(**of_network, precision="fp32")
    found = []
    for options.checkpointing in (False, True):
        found.append(capacity._backbone(options, torch.device("cpu")))
    assert found[1].per_image < 0.4 * found[0].per_image and found[1].parameters == found[0].parameters


def test_capacity_says_when_nothing_fits(capsys: pytest.CaptureFixture[str]):
    assert capacity.main(["--memory", "0.05", "--backbone", "mbf", "--batch", "64", "--device", "cpu"]) == 0
    assert "or use a smaller backbone\n" in capsys.readouterr().out
    assert capacity.main(["--memory", "0.7", "--backbone", "none", "--batch", "64"]) == 0
    assert "--device cpu counts no libraries of CUDA" in capsys.readouterr().out
    for option, value in (("memory", "-1"), ("memory", "inf"), ("room", "0"), ("bandwidth", "nan")):
        with pytest.raises(SystemExit):
            capacity.main([f"--{option}={value}"])
        assert f"argument --{option}: must be a number from 0.001 to 1e+06, got {value}" in capsys.readouterr().err


def test_a_card_gives_its_memory_and_its_limits(capsys: pytest.CaptureFixture[str]):
    arguments = ["--backbone", "none", "--embedding-size", "64", "--storage", "exact"]
    assert capacity.main([*arguments, "--card", "rtx4090"]) == 0
    assert "1 process(es) of 23.5 GiB" in capsys.readouterr().out
    for more, said in [(["--card", "v100"], "--card v100 has no bf16"), ([], "--memory is needed")]:
        assert said in error_of(capacity.main([*arguments, *more]), capsys)
    assert capacity.main([*arguments, "--card", "v100", "--precision", "fp16"]) == 0


@pytest.mark.numeric
def test_the_comparison_scores_a_head_as_the_dense_softmax_does():
    means = compare_head_numerics.class_means(96)
    embeddings, labels = compare_head_numerics.draw(means, torch.Generator().manual_seed(0), 64)
    margin = build_margin("arcface", scale=64.0, margin=0.5)
    found = compare_head_numerics.score(PartialFC(margin, 96, means.shape[1], seed=3), embeddings, labels)
    centres = all_centres(96, means.shape[1], 3).double()
    cosine = F.normalize(embeddings.double()) @ F.normalize(centres).t()
    nearest = [max(cosine[i, k].item() for k in range(96) if k != label) for i, label in enumerate(labels.tolist())]
    loss_bound, _ = head_bounds(64.0, means.shape[1], 64)
    assert found["loss"] == pytest.approx(dense_loss(margin, embeddings.double(), centres, labels).item(), abs=loss_bound)
    assert found["positive_cosine"] == pytest.approx(cosine[torch.arange(64), labels].mean().item(), abs=loss_bound / 64)
    assert found["hardest_negative"] == pytest.approx(sum(nearest) / 64, abs=loss_bound / 64)


@pytest.mark.numeric
def test_the_comparison_trains_every_format_as_the_dense_head_and_sampled_classes_less(tmp_path: Path):
    file, classes, steps = tmp_path / "numerics.json", 1024, 3
    arguments = ["--classes", str(classes), "--steps", str(steps), "--seeds", "1", "--json", str(file)]
    assert compare_head_numerics.main(arguments) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"] for row in rows] == list(compare_head_numerics.CASES)
    means = compare_head_numerics.class_means(classes)
    centres = all_centres(classes, means.shape[1], 0)
    dense = DenseHead(build_margin("arcface", scale=64.0, margin=0.5), centres, RowSGD(0.9, 5e-4))
    generator = torch.Generator().manual_seed(3)
    for step in range(steps):
        dense.step(*compare_head_numerics.draw(means, generator, 512), 0.02 * (1 - step / steps))
    embeddings, labels = compare_head_numerics.draw(means, torch.Generator().manual_seed(77), 2048)
    before, after = (
        dense_loss(dense.margin, embeddings.double(), weight, labels).item() for weight in (centres.double(), dense.centres)
    )
    loss = {row["case"]: row["loss"] for row in rows}
    assert loss["exact"] == pytest.approx(after, abs=steps**0.5 * head_bounds(64.0, 256, 512)[0])
    # each rounds every number of a centre by 2^-8 of it at most
    for case in ("lean", "tiny", "mini", "bf16, round to nearest"):
        assert loss[case] == pytest.approx(after, abs=64.0 * 2**-8) and loss[case] != loss["exact"]
    for case in ("uniform, rate 0.2", "neighbours, rate 0.2"):  # a class that is not drawn does not move
        assert after + 64.0 * 2**-8 < loss[case] < before - 64.0 * 2**-8
    assert [row["relative_to_exact"] for row in rows] == pytest.approx([value / loss["exact"] - 1 for value in loss.values()])
