"""Folders of photographs become aligned crops: the lists, the way back through scripts.data.align, resumption, odd inputs."""

import csv
import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
from faulty_disk import Disk, faulty
from test_deploy_faces_crops import _jpeg
from tiny_detectors import picture, write_detector
from tiny_runs import error_of, one_line

from deploy.faces.landmarks import read_landmarks
from scripts.data.align import main as align_faces
from scripts.deploy.detect import main
from utils.image import decode_rgb, to_png


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_detector(tmp_path_factory.mktemp("detector") / "face.onnx", "scrfd")


def _photograph(path: Path, *places: tuple[float, float], orientation: int = 1) -> None:
    """Write a photograph whose faces are red squares on coloured tiles without red."""
    rng = np.random.default_rng(len(path.name))
    tiles = rng.integers(60, 140, (14, 20, 3), dtype=np.uint8)
    pixels = cv2.resize(tiles, (160, 112), interpolation=cv2.INTER_CUBIC)
    marked = picture(112, 160, *places)
    pixels[(marked != 90).any(axis=2)] = (255, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        path.write_bytes(to_png(pixels))
        return
    # stored so that a viewer which turns it clockwise shows it upright
    path.write_bytes(_jpeg(np.ascontiguousarray(np.rot90(pixels)) if orientation == 6 else pixels, orientation))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of four photographs, with one face, two, none, and one that lies on its side."""
    root = tmp_path / "photographs"
    _photograph(root / "anna" / "one.png", (64, 40))
    _photograph(root / "anna" / "two.png", (32, 40), (104, 56))
    _photograph(root / "none.png")
    _photograph(root / "ben, jr" / "turned.jpg", (80, 48), orientation=6)
    return root


def _run(*words: object) -> int:
    return main([str(word) for word in (*words, "--threads", "2")])


def _rows(path: Path) -> list[list[str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def _crops(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*.jpg")}


def test_crops_lists_and_counts(folder: Path, detector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    assert _run(folder, out, "--detector", detector, "--sheet", tmp_path / "sheet.png") == 0
    said = capsys.readouterr().out
    assert "3 faces of 3 pictures, 112 x 112, 1 rejected, listed in" in said and "0 pictures were done already" in said
    assert set(_crops(out)) == {"anna/one.jpg", "anna/two.jpg", "ben, jr/turned.jpg"}
    assert all(decode_rgb(data).shape == (112, 112, 3) for data in _crops(out).values())
    assert _rows(out / "rejected.csv") == [["picture", "reason"], ["none.png", "no face found"]]
    points = read_landmarks(out / "landmarks.csv")
    assert set(points) == {"anna/one.png", "anna/two.png", "ben, jr/turned.jpg"}
    assert np.abs(points["anna/one.png"].mean(axis=0) - [67.5, 43.5]).max() < 2e-3
    assert np.abs(points["ben, jr/turned.jpg"].mean(axis=0) - [83.5, 51.5]).max() < 2e-3
    sheet = cv2.imread(str(tmp_path / "sheet.png"))
    assert sheet.shape[1] > 900 and (sheet == (0, 200, 0)).all(axis=2).any() and (sheet == (60, 60, 255)).all(axis=2).any()
    assert not [path for path in out.rglob("*") if "unfinished" in path.name]


def test_its_landmarks_give_the_same_crops_through_align(folder: Path, detector: Path, tmp_path: Path):
    out, again = tmp_path / "out", tmp_path / "again"
    assert _run(folder, out, "--detector", detector) == 0
    arguments = [str(folder), str(out / "landmarks.csv"), str(again), "--upright", "--listed", "--threads", "2"]
    assert align_faces(arguments) == 0
    assert _crops(again) == _crops(out) and len(_crops(out)) == 3
    assert align_faces(arguments) == 0  # all are there already, also the one that is turned
    assert align_faces([*arguments[:3], "--listed"]) == 0  # without --upright the turned one is there already
    shutil.rmtree(again)
    assert align_faces([*arguments[:3], "--listed"]) == 0
    different = [name for name, data in _crops(again).items() if data != _crops(out)[name]]
    assert different == ["ben, jr/turned.jpg"]


def test_all_faces_are_numbered_and_only_rejects_pictures_with_several(folder: Path, detector: Path, tmp_path: Path):
    assert _run(folder, tmp_path / "all", "--detector", detector, "--which", "all") == 0
    assert set(_crops(tmp_path / "all")) == {"anna/one_1.jpg", "anna/two_1.jpg", "anna/two_2.jpg", "ben, jr/turned_1.jpg"}
    assert {"anna/two_1.jpg", "anna/two_2.jpg"} < set(read_landmarks(tmp_path / "all" / "landmarks.csv"))
    assert _run(folder, tmp_path / "only", "--detector", detector, "--which", "only") == 0
    reasons = dict(_rows(tmp_path / "only" / "rejected.csv"))
    assert reasons["anna/two.png"] == "2 faces found, and with --which only there must be one"
    assert _run(folder, tmp_path / "central", "--detector", detector, "--which", "central") == 0
    points = read_landmarks(tmp_path / "central" / "landmarks.csv")["anna/two.png"]
    assert np.abs(points.mean(axis=0) - [107.5, 59.5]).max() < 2e-3  # the centre of the picture is at 79.5, 55.5


def test_faces_with_too_much_outside_their_picture_are_left_out(
    folder: Path, detector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _photograph(folder / "edge.png", (8, 8))
    _photograph(folder / "both.png", (8, 8), (88, 40))
    words = (folder, "--detector", detector, "--which", "all")
    assert _run(words[0], tmp_path / "every", *words[1:]) == 0
    lines = [json.loads(line) for line in (tmp_path / "every" / "detect.jsonl").read_text().splitlines()[1:]]
    shares = {line["name"]: sorted(face["padding"] for face in line["faces"]) for line in lines}
    assert shares["edge.png"][0] > 0.2 and len(shares["both.png"]) == 2 and shares["both.png"][0] < 0.2 < shares["both.png"][1]
    assert _run(words[0], tmp_path / "gate", *words[1:], "--max-padding", ".2") == 0
    reasons = dict(_rows(tmp_path / "gate" / "rejected.csv"))
    assert reasons["edge.png"].endswith("outside the picture, and --max-padding is 0.2") and "both.png" not in reasons
    crops = _crops(tmp_path / "gate")
    assert "edge_1.jpg" not in crops and "both_1.jpg" in crops and "both_2.jpg" not in crops
    for more in ([], ["--max-padding", ".3"]):
        assert _run(words[0], tmp_path / "gate", *words[1:], *more) == 1
        assert "made with another max padding; go on with that one" in one_line(capsys, "detecting")
    assert crops["both_1.jpg"] in {data for name, data in _crops(tmp_path / "every").items() if name.startswith("both")}


def test_a_run_goes_on_where_it_was(folder: Path, detector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert _run(folder, whole, "--detector", detector) == 0
    assert _run(folder, out, "--detector", detector) == 0
    lists = {name: (whole / name).read_bytes() for name in ("landmarks.csv", "rejected.csv")}
    journal = (out / "detect.jsonl").read_bytes()
    capsys.readouterr()
    begin = journal.index(b"\n") + 1  # this line is on the disk before the first crop
    for length in (begin, begin + 10, len(journal) // 2, len(journal) - 1, len(journal)):  # killed while it wrote
        (out / "detect.jsonl").write_bytes(journal[:length])
        (out / "landmarks.csv").unlink()
        assert _run(folder, out, "--detector", detector) == 0
        done = max(0, journal[:length].count(b"\n") - 1)
        assert f"{done} pictures were done already" in capsys.readouterr().out
        assert _crops(out) == _crops(whole) and {name: (out / name).read_bytes() for name in lists} == lists
    (out / "anna" / "one.jpg").unlink()
    _photograph(folder / "none.png", (72, 40))
    assert _run(folder, out, "--detector", detector) == 0
    assert "4 faces of 4 pictures, 112 x 112; 2 pictures were done already" in capsys.readouterr().out
    assert not (out / "rejected.csv").exists()


def test_a_picture_that_has_fewer_faces_now_leaves_no_old_crop(folder: Path, detector: Path, tmp_path: Path):
    out = tmp_path / "out"
    assert _run(folder, out, "--detector", detector, "--which", "all") == 0
    _photograph(folder / "anna" / "two.png", (104, 56))
    assert _run(folder, out, "--detector", detector, "--which", "all") == 0
    assert "anna/two_2.jpg" not in _crops(out) and "anna/two_1.jpg" in _crops(out)


def test_a_journal_that_was_tampered_with_writes_and_removes_nothing_outside(
    folder: Path, detector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert _run(folder, out, "--detector", detector) == 0
    before = _crops(out)
    victim = tmp_path / "victim.jpg"
    victim.write_text("mine")
    facts, first, *rest = (out / "detect.jsonl").read_text().splitlines()
    lines = [{**json.loads(first), "name": "../victim.png", "stamp": [0, 0]}, {"name": 3}, [], 7, None, "x"]
    lines += [{**json.loads(first), "stamp": "ab"}, {**json.loads(first), "faces": [{"box": [1]}]}]
    nested = "[" * 100_000
    (out / "detect.jsonl").write_text("\n".join([facts, *map(json.dumps, lines), nested, *rest]) + "\n")
    assert _run(folder, out, "--detector", detector) == 0
    assert victim.read_text() == "mine" and _crops(out) == before
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--size", "96"], "size"),
        (["--which", "all"], "which"),
        (["--min-score", "0.4"], "min score"),
        ([], "detector"),
        (["--threads", "2"], "folder"),
    ],
)
def test_crops_of_other_settings_are_not_mixed(
    folder: Path, detector: Path, tmp_path: Path, words: list[str], what: str, capsys: pytest.CaptureFixture[str]
):
    out, other = tmp_path / "out", tmp_path / "other.onnx"
    assert _run(folder, out, "--detector", detector) == 0
    write_detector(other, "scrfd", best=0.9)
    capsys.readouterr()
    there = shutil.copytree(folder, tmp_path / "there") if what == "folder" else folder
    arguments = (there, out, "--detector", detector if words else other, *words)
    assert _run(*arguments) == 1
    assert f"were made with another {what}; go on with that one, choose another --out, or add --again" in one_line(capsys)
    assert _run(*arguments, "--again") == 0


def test_files_of_others_are_not_overwritten(folder: Path, detector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "mine"
    (out / "anna").mkdir(parents=True)
    (out / "anna" / "one.jpg").write_text("mine")
    for again in ([], ["--again"]):
        assert _run(folder, out, "--detector", detector, *again) == 1
        assert "holds anna and no detect.jsonl" in one_line(capsys, "detecting")
    assert [path.relative_to(out).as_posix() for path in sorted(out.rglob("*"))] == ["anna", "anna/one.jpg"]
    assert (out / "anna" / "one.jpg").read_text() == "mine"


def test_again_leaves_no_crop_of_before_and_removes_nothing_else(folder: Path, detector: Path, tmp_path: Path):
    out = tmp_path / "out"
    assert _run(folder, out, "--detector", detector, "--which", "all") == 0
    assert "anna/two_2.jpg" in _crops(out)
    (tmp_path / "victim_1.jpg").write_text("mine")
    (out / "up").symlink_to("..")
    lines = (out / "detect.jsonl").read_text().splitlines()
    first = json.loads(lines[1])
    elsewhere = ("../victim.png", "up/victim.png", str(tmp_path / "victim.png"), "a\0")
    lines += [json.dumps({**first, "name": name}) for name in elsewhere]
    (out / "detect.jsonl").write_text("\n".join(lines) + "\n")
    assert _run(folder, out, "--detector", detector, "--which", "only", "--again") == 0
    (out / "up").unlink()
    assert _run(folder, tmp_path / "fresh", "--detector", detector, "--which", "only") == 0
    assert _crops(out) == _crops(tmp_path / "fresh")
    assert (tmp_path / "victim_1.jpg").read_text() == "mine"


def test_the_crop_of_a_deleted_photograph_stays_until_again(
    folder: Path, detector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert _run(folder, out, "--detector", detector) == 0
    (folder / "anna" / "one.png").unlink()
    for more, stays in (([], True), (["--again"], False)):
        assert _run(folder, out, "--detector", detector, *more) == 0
        assert ("anna/one.jpg" in _crops(out)) == stays
        assert ("warning: 1 pictures of before are gone, such as anna/one.png" in capsys.readouterr().out) == stays
        assert "anna/one.png" not in read_landmarks(out / "landmarks.csv")


def test_names_that_attack_are_shown_escaped_or_rejected(detector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, out = tmp_path / "photographs", tmp_path / "out"
    names = ["a\nb.png", "\x1b[2J.png", "<img src=x>.png", "..png", "tab\t.png", 'quo"te.png', "=1+1.png", "x" * 251 + ".png"]
    for name in names:
        _photograph(folder / name, (64, 40))
    _photograph(folder / os.fsdecode(b"\xff\xfe.png"), (64, 40))
    (folder / "up").symlink_to("..")
    assert _run(folder, out, "--detector", detector, "--which", "all") == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err and "were not entered" in said.err
    rejected = {name for name, _ in csv.reader((out / "rejected.csv").read_text(errors="surrogateescape").splitlines(True))}
    assert rejected - {"picture"} >= {"tab\t.png", os.fsdecode(b"\xff\xfe.png"), "x" * 251 + ".png", "a\nb.png"}
    assert {'quo"te_1.jpg', "<img src=x>_1.jpg", "=1+1_1.jpg"} <= set(read_landmarks(out / "landmarks.csv"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "photographs"]


def test_folders_that_cannot_be_meant(folder: Path, detector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty").mkdir()
    for first, second, said in (
        (folder, folder, "must not be below"),
        (folder, folder / "crops", "must not be below"),
        (tmp_path / "empty", tmp_path / "out", "no image in it"),
        (tmp_path / "missing", tmp_path / "out", "no such folder"),
        (folder, detector, "File exists"),
    ):
        assert said in error_of(_run(first, second, "--detector", detector), capsys, "detecting")
    _photograph(folder / "none.jpg")
    assert _run(folder, tmp_path / "out", "--detector", detector) == 1
    assert "its face and the face of none.jpg would be the same file" in one_line(capsys, "detecting")
    (folder / "none.jpg").unlink()
    for sheet, said in ((tmp_path / "out" / "s.png", "must not be below"), (tmp_path / "no" / "s.png", "a folder that exists")):
        assert _run(folder, tmp_path / "out", "--detector", detector, "--sheet", sheet) == 1
        assert "--sheet: must" in (line := one_line(capsys, "detecting")) and said in line
    assert not (tmp_path / "out").exists()


def test_no_face_anywhere_is_an_error_that_names_the_list(detector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _photograph(tmp_path / "in" / "a.png")
    assert _run(tmp_path / "in", tmp_path / "out", "--detector", detector, "--sheet", tmp_path / "s.png") == 1
    assert "no face in any of 1 pictures; the first, a.png, no face found; all are in" in one_line(capsys, "detecting")
    assert _rows(tmp_path / "out" / "rejected.csv")[1] == ["a.png", "no face found"]


def test_a_second_run_in_a_folder_is_refused(folder: Path, detector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / "detect.jsonl", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert _run(folder, tmp_path / "out", "--detector", detector) == 1
        assert "out is in use by another run" in one_line(capsys, "detecting")
    assert _run(folder, tmp_path / "out", "--detector", detector) == 0


def test_a_full_disk_ends_in_one_line_and_the_run_can_go_on(
    folder: Path, detector: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    whole = tmp_path / "whole"
    with faulty(Disk()) as disk:
        assert _run(folder, whole, "--detector", detector) == 0
    expected = (_crops(whole), (whole / "landmarks.csv").read_bytes())
    capsys.readouterr()
    for number in range(0, len(disk.done), 3):
        out = tmp_path / str(number)
        with faulty(Disk(number, errno.ENOSPC)) as broken:
            status = _run(folder, out, "--detector", detector)
        if len(broken.done) > number and status:
            assert "No space left on device" in one_line(capsys, "detecting")
        assert _run(folder, out, "--detector", detector) == 0
        assert (_crops(out), (out / "landmarks.csv").read_bytes()) == expected
        assert not [path for path in out.rglob("*") if "unfinished" in path.name]
        capsys.readouterr()
