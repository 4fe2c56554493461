"""Data of strangers: what a picture, a link, a pipe or a name may not do to a training or a tool."""

import errno
import os
import sys
from pathlib import Path
from unittest import mock

import cv2
import numpy as np
import pytest
from pictures import folder_of_people
from tiny_runs import error_of, face, tiny_run, write_dataset

import train
from data.datasets import FolderDataset
from eval.pair_sets.bin_file import write_bin
from scripts.data import folder_to_rec
from scripts.data import inspect as inspect_data
from utils import files
from utils.checkpoint.format import list_checkpoints
from utils.files import find_files


def _png(height: int, width: int) -> bytes:
    return cv2.imencode(".png", np.zeros((height, width), np.uint8))[1].tobytes()


def _bin_with(path: Path, image: bytes) -> None:
    """Write a verification set of 20 pairs, one image of which is this one."""
    same = [bool(pair % 2) for pair in range(20)]
    images = [face(50 + number, number) for number in range(40)]
    write_bin(path, [*images[:3], image, *images[4:]], same)


def test_a_flat_picture_in_a_verification_set_is_named_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_dataset(tmp_path)
    _bin_with(tmp_path / "tiny.bin", _png(1, 1_000_000))
    said = error_of(train.main(tiny_run(tmp_path, tmp_path)), capsys)
    assert "tiny: image 3: cannot be decoded: an image of 1000000 x 1 pixels, more than 32000 a side" in said


def test_a_picture_in_a_verification_set_that_is_not_square_does_not_cost_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_dataset(tmp_path)
    _bin_with(tmp_path / "tiny.bin", _png(30, 3000))
    assert train.main(tiny_run(tmp_path, tmp_path, "train.max_steps=8")) == 1
    assert "tiny: image 3 must be square, it is 30 x 3000 pixels" in capsys.readouterr().err
    assert [path.name for path in list_checkpoints(tmp_path / "tiny")][-1] == "step_00000008"


def _files_of(dataset: FolderDataset) -> list[str]:
    return [dataset.key(index).removeprefix(f"{dataset.root}/") for index in range(dataset.num_images)]


_LOOPS = {
    "to itself": [("p0/loop", ".")],
    "to the set": [("p0/up", "..")],
    "two": [("p0/a", "."), ("p0/b", ".")],
    "to the root": [("p0/all", "/")],
    "to one another": [("p0/x", "../p1"), ("p1/y", "../p0")],
    "at the top": [("q", "p0"), ("r", ".")],
}


@pytest.mark.parametrize("links", _LOOPS.values(), ids=_LOOPS.keys())
def test_links_within_a_set_add_no_image_to_it_and_are_named(tmp_path: Path, links: list[tuple[str, str]]):
    root = folder_of_people(tmp_path / "set", [3, 2]).rename(tmp_path / "people")
    for person in (0, 1):
        (root / f"person_{person}").rename(root / f"p{person}")
    plain = _files_of(FolderDataset(str(root)))
    assert plain == ["p0/0.jpg", "p0/1.jpg", "p0/2.jpg", "p1/0.jpg", "p1/1.jpg"]
    for name, target in links:
        (root / name).symlink_to(target)
    dataset = FolderDataset(str(root))
    assert (_files_of(dataset), dataset.classes, dataset.labels().tolist()) == (plain, ["p0", "p1"], [0, 0, 0, 1, 1])
    (warning,) = dataset.warnings
    assert f"{len(links)} folder(s) below it were not entered: {min(links)[0]}: a link to " in warning


def test_a_link_to_itself_costs_no_other_picture(tmp_path: Path):
    root = folder_of_people(tmp_path / "set", [1])
    for link in (root / "self", root / "person_0" / "self.jpg"):
        link.symlink_to(link.name)
    dataset = FolderDataset(str(root))
    assert _files_of(dataset) == ["person_0/0.jpg", "person_0/self.jpg"]  # who reads that says what is wrong
    assert dataset.warnings[0].endswith("1 folder(s) below it were not entered: self: Too many levels of symbolic links")


def test_links_to_other_places_are_followed_once(tmp_path: Path):
    elsewhere = folder_of_people(tmp_path / "elsewhere", [2, 1])
    root = folder_of_people(tmp_path / "set", [1])
    (root / "x").symlink_to(elsewhere / "person_0")
    (root / "y").symlink_to(elsewhere)  # holds person_0 as well, which is x by now
    (root / "person_0" / "more.jpg").symlink_to(elsewhere / "person_1" / "0.jpg")
    (elsewhere / "person_1" / "back").symlink_to(root)
    dataset = FolderDataset(str(root))
    assert _files_of(dataset) == ["person_0/0.jpg", "person_0/more.jpg", "x/0.jpg", "x/1.jpg", "y/person_1/0.jpg"]
    assert dataset.pixels_and_label(1)[1] == 0


def test_a_folder_of_many_links_is_not_sorted_for_each(tmp_path: Path):
    root = folder_of_people(tmp_path / "set", [1] * 9)
    for number in range(9):
        (root / f"link_{number}").symlink_to(folder_of_people(tmp_path / f"{number}", [1]) / "person_0")
    called = list[str]()
    sys.setprofile(lambda frame, event, what: called.append(what.__name__) if event == "c_call" else None)
    try:
        found = find_files(root, (".jpg",))
    finally:
        sys.setprofile(None)
    assert len(found.folders) == 18 and len([name for name in called if name in ("sort", "sorted")]) < 4


@pytest.mark.parametrize("process", ["0", "1"])
def test_a_long_listing_shows_how_far_it_is_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: str):
    monkeypatch.setenv("LOCAL_RANK", process)
    monkeypatch.setattr(files, "progress", bar := mock.MagicMock())
    find_files(folder_of_people(tmp_path / "set", [2, 3]), (".jpg",))
    told = bar().__enter__().update.call_args_list
    assert sum(call.args[0] for call in told) == 2 + 5 and bar.call_args_list[0].kwargs["shown"] == (process == "0")


def test_a_training_says_which_folders_it_did_not_enter(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root = folder_of_people(tmp_path / "set", [2, 2])
    (root / "person_0" / "loop").symlink_to(".")
    assert train.main([*tiny_run(root, tmp_path), "data.source=folder", "eval.targets=[]", "--check"]) == 0
    said = capsys.readouterr().out
    assert "4 images, 2 classes" in said and "person_0/loop: a link to " in said


def test_folders_in_one_another_without_end_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root = folder_of_people(tmp_path / "set", [2])
    deep = root / "person_0" / Path(*40 * ["d"])
    deep.mkdir(parents=True)
    assert "lies more than 32 folders deep" in error_of(folder_to_rec.main([str(root), str(tmp_path / "out")]), capsys)


def _reading_fails(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError as error:
        return error.errno == errno.EIO
    return False


@pytest.mark.parametrize("what", ["pipe", "device", "folder", "huge", "broken"])
@pytest.mark.parametrize("place", ["list", "listed", "pairs", "paired", "config", "idx", "property", "labels", "tar"])
def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str, place: str):
    if (what, place) == ("huge", "tar"):
        pytest.skip("shards may have any size; their members are bounded")
    if what == "broken" and not _reading_fails(Path("/proc/self/mem")):
        pytest.skip("this system has no file whose reading fails")
    folder_of_people(tmp_path, [4])
    bad = tmp_path / {"pairs": "bad.csv", "idx": "train.idx", "property": "property", "tar": "bad.tar"}.get(place, "bad.jpg")
    write_dataset(tmp_path)
    bad.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(bad)
    elif what == "folder":
        bad.mkdir()
    elif what == "device":
        bad.symlink_to("/dev/zero")
    elif what == "broken":  # a regular file whose reading fails, as on a broken disk
        bad.symlink_to("/proc/self/mem")
    else:
        with open(bad, "wb") as file:
            file.truncate(1 << 40)
    listed = tmp_path / "list.txt"
    listed.write_text("person_0/0.jpg 0\n" + "".join(f"bad.jpg {label}\n" for label in range(12)))
    (tmp_path / "in.csv").write_text("person_0/0.jpg,bad.jpg,1\n")
    overrides = {
        "list": ["data.source=list", f"data.path={bad}", "eval.targets=[]"],
        "listed": ["data.source=list", f"data.path={listed}", "eval.targets=[]"],
        "pairs": [f"eval.targets=[{bad}]"],
        "paired": [f"eval.targets=[{tmp_path / 'in.csv'}]"],
        "labels": [f"data.sources=[{{path: {tmp_path}}}]", f"data.labels={bad}", "data.path=", f"eval.path={tmp_path}"],
        "tar": ["data.source=tar", "eval.targets=[]"],
    }
    arguments = tiny_run(tmp_path, tmp_path, *overrides.get(place, []))
    if place == "config":
        arguments[0] = str(bad)
    assert train.main(arguments) == 1
    said = capsys.readouterr().err
    reason = {"huge": "it has 1,099,511,627,776 bytes, and may have"}.get(what, f"it is a {what}, and must be a regular file")
    if place in ("pairs", "labels") and what not in ("huge", "broken"):
        reason = "no file"
    if what == "broken":
        reason = "Input/output error"
    assert said.count("\n") == 1 and bad.name in said and reason in said, said


def test_names_that_are_no_utf8_are_skipped_by_rule_and_named_in_plain_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root = folder_of_people(tmp_path / "set", [8, 8])
    (root / "person_0" / os.fsdecode(b"bad\xff\x1b[2J.jpg")).write_bytes(b"no image")
    overrides = ["data.source=folder", "data.on_bad_record=skip", "data.max_bad_fraction=0.2", "eval.targets=[]"]
    assert train.main([*tiny_run(root, tmp_path), *overrides, "train.max_steps=3"]) == 0
    named = "bad\\xff\\x1b[2J.jpg: cannot be decoded"
    assert named in capsys.readouterr().out and named in (tmp_path / "tiny" / "train.log").read_text()
    assert inspect_data.main([str(root), "--out", str(tmp_path / "report")]) == 0
    assert "bad\\xff" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
