"""The demo dataset: deterministic, in the formats of real sets, identities apart, and not solved by colours alone."""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import cv2
import numpy as np
import pytest

from data.record_dataset import RecordDataset
from eval.pair_sets.bin_file import read_bin
from eval.verification import fold_accuracy, pair_distances
from scripts.demo import make_data as demo
from utils.image import decode_rgb

ROOT = Path(__file__).parent.parent
PAIRS = 10  # of a fold
SMALL = ["--identities", "5", "--images-per-identity", "3"]


@pytest.fixture(scope="module", autouse=True)
def small_folds() -> None:
    """Draw 270 faces instead of 1800 for the verification sets."""
    patch = pytest.MonkeyPatch()
    patch.setattr(demo, "IDENTITIES_PER_FOLD", 3)
    patch.setattr(demo, "IMAGES_PER_IDENTITY", 3)
    patch.setattr(demo, "PAIRS_PER_FOLD", PAIRS)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo")
    assert demo.main(["--out", str(out), "--processes", "1", *SMALL]) == 0
    return out


def _digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if path.suffix in (".rec", ".idx", ".bin", ".png")
    }


def test_the_training_set_reads_back_in_header_form(folder: Path):
    dataset = RecordDataset(folder)
    assert (dataset.num_images, dataset.num_classes) == (15, 5)
    assert "header" in dataset.describe()
    assert [dataset.label(index) for index in range(15)] == [index // 3 for index in range(15)]
    pixels = np.empty((112, 112, 3), np.uint8)
    assert dataset.decode_into(7, pixels) == 2
    assert np.array_equal(pixels, decode_rgb(demo.draw_jpeg(demo.DrawnPicture(1, "train", 2, 1))))


@pytest.mark.parametrize("kind", demo.SETS)
def test_a_set_has_balanced_folds_of_identities_that_no_other_fold_and_no_training_has(folder: Path, kind: str):
    pairs = read_bin(folder / f"{kind}.bin")
    assert pairs.same.reshape(10, PAIRS).sum(axis=1).tolist() == [PAIRS // 2] * 10
    chosen = demo.choose_pairs(kind, demo.FIRST_VERIFICATION_IDENTITY, 1, np.random.default_rng(0))
    people = [{side[0] for pair in chosen[fold * PAIRS : (fold + 1) * PAIRS] for side in pair[:2]} for fold in range(10)]
    assert all(not (a & b) for i, a in enumerate(people) for b in people[:i])
    assert min(min(fold) for fold in people) >= demo.FIRST_VERIFICATION_IDENTITY
    assert all((first[0] == second[0]) == same for first, second, same in chosen)
    assert len({frozenset(pair[:2]) for pair in chosen}) == len(chosen)
    if kind != "demo_wild":  # always one of either kind
        assert all(first[1] % 2 == 0 and second[1] % 2 == 1 for first, second, _ in chosen)


def test_people_to_search_are_neither_in_training_nor_their_pictures_in_a_verification_set(folder: Path, tmp_path: Path):
    people = sorted(path.relative_to(folder / "people").as_posix() for path in (folder / "people").rglob("*.jpg"))
    visitors = sorted(path.stem for path in (folder / "visitors").iterdir())
    assert people == [f"person_{person}/{number}.jpg" for person in range(1, 9) for number in range(1, 4)]
    assert visitors == sorted({name.partition("/")[0] for name in people} | {"stranger_1", "stranger_2"})
    drawn = {path.read_bytes() for path in [*folder.glob("people/*/*.jpg"), *folder.glob("visitors/*.jpg")]}
    pairs = read_bin(folder / "demo_wild.bin")
    assert len(drawn) == 34 and not drawn & {bytes(image) for image in pairs.images}
    first = demo.FIRST_VERIFICATION_IDENTITY
    assert (
        demo.draw_jpeg(demo.DrawnPicture(1, "demo_wild", first + 9, demo.IMAGES_PER_IDENTITY + 3))
        == (folder / "visitors" / "stranger_2.jpg").read_bytes()
    )
    shutil.copytree(folder, tmp_path / "demo")
    shutil.rmtree(tmp_path / "demo" / "people")  # as of a set that an earlier version drew
    assert demo.main(["--out", str(tmp_path / "demo"), "--processes", "1", *SMALL]) == 0
    assert sum(1 for _ in (tmp_path / "demo" / "people").rglob("*.jpg")) == 24


QUICKSTART = """#!/usr/bin/env bash
case $1 in
    train) step=work_dirs/demo_cpu/checkpoints/step_$STEP; [ -e $step ] || { mkdir -p $step; touch $step/manifest.json; } ;;
    enrol) touch "$3"; [ "$STOPS" = 0 ] || exit 1 ;;
esac
echo "face $*"
"""


def test_a_second_quickstart_makes_nothing_anew_until_the_network_has_changed(tmp_path: Path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "quickstart.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "environment.sh").write_text("make_environment() { PYTHON=python3; }\n")
    (tmp_path / "face").write_text(QUICKSTART)
    (tmp_path / "face").chmod(0o755)
    seen = []
    for step, stops in (("1", "1"), ("1", "0"), ("1", "0"), ("2", "0")):
        command = ["bash", str(tmp_path / "scripts" / "quickstart.sh")]
        done = subprocess.run(command, env=os.environ | {"STEP": step, "STOPS": stops}, capture_output=True, text=True)
        assert done.returncode == int(stops) and ("work_dirs/demo_cpu/search.png" in done.stdout) == (stops == "0"), done.stderr
        seen.append(re.findall("^face ([a-z_]+)", done.stdout, re.M))
        time.sleep(0.05)  # files are told apart by their times
    assert seen[1] == seen[3] == ["demo_data", "train", "eval", "compare", "enrol", "search"]
    assert seen[2] == ["demo_data", "train", "search"]


def test_the_same_arguments_draw_the_same_bytes_with_any_number_of_processes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(demo, "SETS", ())  # the verification sets: see the test with more identities
        assert demo.main(["--out", str(tmp_path), "--processes", "1", *SMALL]) == 0
    demo.write_preview(tmp_path / "preview.png", argparse.Namespace(seed=1, identities=5, images_per_identity=3))
    again, before = _digests(tmp_path), _digests(folder)
    assert again == {name: before[name] for name in again} and {"train.rec", "train.idx"} <= again.keys()
    pictures = [demo.DrawnPicture(1, "demo_wild", 7, number) for number in range(64)]
    assert list(demo.draw_all(pictures, 64, 2)) == [demo.draw_jpeg(picture) for picture in pictures]


def test_pictures_wait_for_the_caller_so_that_memory_does_not_grow_with_their_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "_AHEAD", 48)
    asked = []

    def endless() -> Iterator[demo.DrawnPicture]:
        for number in range(1_000_000_000):
            asked.append(number)
            yield demo.DrawnPicture(1, "train", number, 0)

    drawn = demo.draw_all(endless(), 1_000_000_000, 2)
    jpegs = [next(drawn) for _ in range(40)]
    assert len(asked) <= 40 + 48 + 1
    assert jpegs[39] == demo.draw_jpeg(demo.DrawnPicture(1, "train", 39, 0))
    drawn.close()


def test_more_identities_leave_the_first_ones_and_the_verification_sets_as_they_are(folder: Path, tmp_path: Path):
    more = ["--identities", "12", "--images-per-identity", "3", "--processes", "2"]
    assert demo.main(["--out", str(tmp_path), *more]) == 0
    dataset, few = RecordDataset(tmp_path), RecordDataset(folder)
    assert (dataset.num_images, dataset.num_classes) == (36, 12)
    ours, theirs = np.empty((2, 112, 112, 3), np.uint8)
    for index in range(15):
        assert dataset.decode_into(index, ours) == few.decode_into(index, theirs) and np.array_equal(ours, theirs)
    for kind in demo.SETS:
        assert (tmp_path / f"{kind}.bin").read_bytes() == (folder / f"{kind}.bin").read_bytes()


def test_another_seed_or_identity_or_number_is_another_picture():
    base = demo.DrawnPicture(1, "train", 3, 4)
    jpegs = {demo.draw_jpeg(base._replace(**change)) for change in ({}, {"seed": 2}, {"identity": 4}, {"number": 5})}
    assert len(jpegs) == 4


def test_what_is_there_is_kept_unless_overwritten(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert demo.main(["--out", str(folder), *SMALL]) == 0
    assert "there already" in capsys.readouterr().out
    assert demo.main(["--out", str(folder), "--identities", "6"]) == 1
    assert "add --overwrite" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    (tmp_path / "dataset.json").write_bytes(b"\xff")
    assert demo.main(["--out", str(tmp_path)]) == 1 and "add --overwrite" in capsys.readouterr().err


def test_an_interrupted_drawing_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arguments = ["--out", str(tmp_path), "--processes", "1", "--identities", "2", "--images-per-identity", "1"]
    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(demo, "write_verification_set", mock.Mock(side_effect=InterruptedError))
        demo.main(arguments)
    assert (tmp_path / "train.rec").is_file() and not (tmp_path / "dataset.json").is_file()
    monkeypatch.setattr(demo, "SETS", ("demo_wild",))
    assert demo.main(arguments) == 0
    assert (tmp_path / "dataset.json").is_file() and (tmp_path / "demo_wild.bin").is_file()


@pytest.mark.parametrize("kind", demo.SETS)
def test_an_8_by_8_pixel_vector_does_not_solve_a_set(folder: Path, kind: str):
    pairs = read_bin(folder / f"{kind}.bin")
    small = [cv2.resize(pairs.decode(i), (8, 8), interpolation=cv2.INTER_AREA).ravel() for i in range(len(pairs.images))]
    vectors = np.array(small, dtype=np.float64)
    vectors -= vectors.mean(axis=1, keepdims=True)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    distances = pair_distances(vectors[pairs.first], vectors[pairs.second])
    assert fold_accuracy(distances, pairs.same)[0].mean() < 0.80
