"""data.image_size: a run at another size than 112 trains, resumes and is evaluated; what does not fit it is one line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_networks import TIMES_MATRIX, write_onnx
from tiny_runs import IRESNET, ended_well, equal_weights, error_of, face, read_metrics, run_train, tiny_run, write_dataset

import train
from backbones import build_backbone
from eval.__main__ import main as evaluate
from scripts.arcface_torch import export_checkpoint
from scripts.benchmark import capacity
from utils.checkpoint.format import list_checkpoints, read_manifest
from utils.checkpoint.reading import read_backbone

SIZE = 64
AUGMENTED = [f"augment.{name}=0.5" for name in ("crop", "low_resolution", "photometric", "blur", "jpeg", "cutout")]


def _train(source: Path, name: str, *overrides: str) -> int:
    few = ["train.max_steps=4", "eval.every=0", "checkpoint.every=2", "schedule.power=0"]
    network = [IRESNET, "backbone.se=true", f"data.image_size={SIZE}"]
    return train.main(tiny_run(source / "data", source, f"run.name={name}", *network, *few, *AUGMENTED, *overrides))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `data`, faces of 112 x 112, and a run `small` on them at 64 x 64."""
    folder = tmp_path_factory.mktemp("sizes")
    write_dataset(folder / "data")
    assert _train(folder, "small") == 0
    return folder


def test_the_network_is_one_for_that_size_with_squeeze_and_excitation(source: Path):
    weights = read_backbone(list_checkpoints(source / "small")[-1])
    with torch.device("meta"):
        expected = build_backbone("r18", 16, 0.125, image_size=SIZE, se=True).state_dict()
    assert {name: value.shape for name, value in weights.items()} == {name: value.shape for name, value in expected.items()}
    assert weights["fc.weight"].shape == (16, 64 * 4 * 4)
    assert read_manifest(list_checkpoints(source / "small")[-1])["run_signature"]["image_size"] == SIZE


def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(source: Path):
    assert _train(source, "halves", "train.max_steps=2") == 0
    assert _train(source, "halves") == 0
    equal_weights(source / "small", source / "halves")


def test_the_evaluation_takes_the_size_of_the_run_and_a_file_of_weights_a_flag(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run, report = source / "small", tmp_path / "report"
    capsys.readouterr()
    assert evaluate([str(run), "--device", "cpu", "--report", str(report)]) == 0
    scored, last = json.loads((report / "results.json").read_text()), read_metrics(run, "tiny")[4]
    assert scored["tiny"]["accuracy"] == last["accuracy"] and scored["tiny"]["auc"] == pytest.approx(last["auc"], abs=1e-3)
    assert f"{SIZE} x {SIZE} pixels" in (report / "report.html").read_text()
    plain = build_backbone("r18", 16, 0.125, image_size=SIZE)
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    small = ["--backbone", "r18", "--embedding-size", "16", "--width", "0.125", "--device", "cpu"]
    sets = ["--targets", str(source / "data" / "tiny.bin")]
    assert evaluate([str(tmp_path / "plain.pt"), *small, *sets, "--image-size", str(SIZE)]) == 0
    for arguments, said in [
        ([str(tmp_path / "plain.pt"), *small, *sets], "check --backbone, --embedding-size, --width, --image-size"),
        ([str(tmp_path / "plain.pt"), *small, *sets, "--image-size", "100"], "image_size must be a multiple of 16"),
        ([str(run), "--image-size", "112"], "--image-size is for a file"),
    ]:
        capsys.readouterr()
        assert said in error_of(evaluate(arguments), capsys)


def test_an_onnx_graph_gets_images_of_the_size_of_its_input(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    matrix = np.random.default_rng(0).normal(size=(4, 3 * SIZE * SIZE)).astype(np.float32)
    write_onnx(tmp_path / "flat.onnx", [("Flatten", {}), TIMES_MATRIX], 4, SIZE, matrix=matrix)
    sets = ["--targets", str(source / "data" / "tiny.bin"), "--device", "cpu"]
    assert evaluate([str(tmp_path / "flat.onnx"), *sets]) == 0  # its matrix fits no other size
    capsys.readouterr()
    assert evaluate([str(tmp_path / "flat.onnx"), *sets, "--image-size", "112"]) == 1
    assert f"--image-size must be {SIZE}, the input of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["run.name=small", "data.image_size=112"], "image_size was 64, this run has 112; use the same value"),
        (["data.image_size=80", "init.backbone=SMALL"], r"init\.backbone .*small: fc\.weight .* data\.image_size \(here 80\)"),
        (["data.image_size=100"], r"data\.image_size must be a multiple of 16, got 100; the nearest is 96"),
        (["data.image_size=464"], r"data\.image_size must be from 48 to 448, got 464"),
    ],
)
def test_a_size_that_cannot_be_is_one_line(source: Path, overrides: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    changes = [text.replace("SMALL", str(source / "small")) for text in overrides]
    assert re.search(said, error_of(_train(source, "other", *changes, "train.max_steps=6"), capsys))


def test_arcface_torch_has_no_network_for_another_size(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert export_checkpoint.main([str(source / "small"), str(tmp_path / "theirs"), "--ranks", "2"]) == 1
    assert "takes images of 64 x 64 pixels, and those of arcface_torch 112 x 112" in capsys.readouterr().err


def test_galleries_and_the_memory_of_a_network_have_its_size(source: Path, tmp_path: Path):
    for name, numbers in (("gallery", range(6)), ("probes", range(6, 12))):
        for number in numbers:
            (tmp_path / f"{number}.jpg").write_bytes(face(number % 6, number))
        lines = [f"{number}.jpg {number % 6}" for number in numbers]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    words = ["--targets", f"identify:{tmp_path}", "--report", str(tmp_path / "report"), "--device", "cpu"]
    assert evaluate([str(source / "small"), *words]) == 0
    (found,) = json.loads((tmp_path / "report" / "results.json").read_text()).values()
    assert found["gallery_images"] == 6 and found["probes_with_mate"] == 6 and found["rank_5"] > 0
    network = [
        "--memory", "1", "--backbone", "mbf", "--width", "0.125", "--embedding-size", "16", "--batch", "64", "--device", "cpu",
    ]  # fmt: skip
    file, needed = tmp_path / "capacity.json", {}
    for size in ("64", "112"):
        assert capacity.main([*network, "--image-size", size, "--json", str(file)]) == 0
        needed[size] = json.loads(file.read_text())["backbone_bytes"]
    assert needed["64"] / needed["112"] == pytest.approx((64 / 112) ** 2, rel=0.15)  # activations, but for the last layers


def test_two_processes_begin_with_another_run_of_that_size_and_see_new_people_at_it(source: Path, tmp_path: Path):
    (tmp_path / "map.txt").write_text("".join(f"{label} {label}\n" for label in range(6)))  # the others are new
    init = [f"init.{key}={source / 'small'}" for key in ("backbone", "head")] + [f"init.classes={tmp_path / 'map.txt'}"]
    few = ["train.max_steps=1", "eval.targets=[]", f"data.image_size={SIZE}", "run.name=tuned", "backbone.se=true"]
    ended_well(run_train(2, tiny_run(source / "data", tmp_path, IRESNET, *init, *few)))
    assert "class centres: 6 kept, 6 from images" in (tmp_path / "tuned" / "train.log").read_text()


MADE = ["data.source=synthetic", "data.path=", "data.num_classes=3", "data.num_images=6", "eval.targets=[]"]
MADE += ["train.max_steps=1"]


@pytest.mark.parametrize("name", ["mbf_large", "ghostfacenet_v2_2"])
def test_generated_images_train_at_that_size(name: str, tmp_path: Path):
    assert train.main(tiny_run(Path(), tmp_path, *MADE, f"backbone.name={name}", "data.image_size=48")) == 0


def test_a_network_of_no_fixed_size_begins_with_weights_of_another_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for size, more in ((48, []), (64, [f"init.backbone={tmp_path / 'at_48'}"])):
        names = ["backbone.name=edgeface_xs", f"run.name=at_{size}", f"data.image_size={size}", "optimizer.name=adamw"]
        assert train.main(tiny_run(Path(), tmp_path, *MADE, *names, *more)) == 0
    capsys.readouterr()
    assert train.main(tiny_run(Path(), tmp_path, *MADE, *names[:2], "data.image_size=48")) == 1
    assert "image_size was 64, this run has 48" in capsys.readouterr().err
