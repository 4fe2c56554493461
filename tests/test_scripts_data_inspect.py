"""The tools that look into sets and cut them, on a set with known damage, copies and overlaps."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from pictures import folder_of_people, jpeg, picture

from data.record_dataset import RecordDataset
from data.scan import MAX_DISTANCE, candidates, copy_set, correlation, dhash
from eval.pair_sets.bin_file import read_bin, write_bin
from scripts.data import convert_bin, folder_to_rec, show_augmentation
from scripts.data import filter as filter_data
from scripts.data import inspect as inspect_data
from scripts.data import merge as merge_data
from scripts.data import repair as repair_data
from scripts.data import shuffle as shuffle_data
from scripts.data import split as split_data
from scripts.data import verify as verify_data


@pytest.fixture
def people(tmp_path: Path) -> Path:
    return folder_of_people(tmp_path / "people", [3, 3, 2, 4])


def _table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_what_is_wrong_with_a_set_is_found(tmp_path: Path, people: Path, capsys: pytest.CaptureFixture[str]):
    (people / "person_0" / "9.jpg").write_bytes((people / "person_0" / "1.jpg").read_bytes())  # index 3: a copy of 1
    (people / "person_2" / "7.jpg").write_bytes(jpeg(picture(101), 50))  # index 9: person 1's picture 1, compressed again
    (people / "person_3" / "0.jpg").write_bytes(jpeg(picture(300))[:500])  # index 10: truncated
    (people / "person_3" / "1.jpg").write_bytes(jpeg(picture(301, 100)))  # index 11: another size
    small = cv2.resize(picture(303), (64, 64), interpolation=cv2.INTER_AREA)
    test_images = [jpeg(picture(900)), jpeg(picture(901)), jpeg(cv2.resize(small, (112, 112))), jpeg(picture(902))]
    write_bin(tmp_path / "held.bin", test_images, [True, False])  # its image 2 is person 3's picture 3, index 13
    out = tmp_path / "report"
    assert inspect_data.main([str(people), "--out", str(out), "--bins", str(tmp_path / "held.bin")]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["images"] == 14 and report["images_bad"] == 1 and report["images_not_112_x_112"] == 1
    assert report["copies_of_a_file"] == 1 and report["copies_of_a_picture"] == 1 and report["copies_across_identities"] == 1
    assert report["overlap"] == {"held": {"pictures": 1, "identities": 1}}
    assert [row["index"] for row in _table(out / "bad.csv")] == ["10"]
    copies = {(row["index"], row["other_index"], row["kind"]) for row in _table(out / "duplicates.csv")}
    assert copies == {("1", "3", "equal"), ("5", "9", "near")}
    assert [(row["index"], row["test_image"], row["kind"]) for row in _table(out / "overlap.csv")] == [("13", "2", "near")]
    assert [row["index"] for row in _table(out / "drop.csv")] == ["3", "5", "9", "10", "13"]
    write_bin(tmp_path / "many.bin", [test_images[0], b"\xff\xd8" + 10_001 * b"\xff\xfe\0\2" + b"\xff\xd9"], [True])
    assert inspect_data.main([str(people), "--out", str(tmp_path / "no"), "--bins", str(tmp_path / "many.bin")]) == 1
    assert "many: image 1: cannot be decoded: a JPEG of more than" in capsys.readouterr().err
    page = (out / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 5 and "<script" not in page
    # and without what it says, the set is clean
    (people / "person_3" / "1.jpg").write_bytes(jpeg(picture(301)))
    assert filter_data.main([str(people), str(tmp_path / "clean"), "--drop", str(out / "drop.csv")]) == 0
    assert verify_data.main([str(tmp_path / "clean"), str(tmp_path / "held.bin")]) == 0
    assert convert_bin.main([str(tmp_path / "held.bin")]) == 0
    arguments = [str(tmp_path / "clean"), "--out", str(tmp_path / "again"), "--bins", str(tmp_path / "held.safetensors")]
    assert inspect_data.main(arguments) == 0
    assert not _table(tmp_path / "again" / "drop.csv")


def test_a_picture_that_everybody_has_is_found_in_time_that_grows_as_the_set(
    tmp_path: Path, people: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of 100,000 people with one picture the page took hours: it looked for the copies across identities for each copy."""
    for number in range(20):
        (people / f"person_{number + 4}").mkdir()
        (people / f"person_{number + 4}" / "0.jpg").write_bytes((people / "person_0" / "0.jpg").read_bytes())
    calls, whole = [], inspect_data.Findings.across
    monkeypatch.setattr(inspect_data.Findings, "across", lambda found: calls.append(1) or whole(found))
    assert inspect_data.main([str(people), "--out", str(tmp_path / "report")]) == 0
    assert json.loads((tmp_path / "report" / "report.json").read_text())["copies_across_identities"] == 20 > len(calls)


def test_the_page_tells_the_worst_first_by_the_names_of_files_and_folders(
    tmp_path: Path, people: Path, capsys: pytest.CaptureFixture[str]
):
    (people / "person_0" / "9.jpg").write_bytes((people / "person_0" / "1.jpg").read_bytes())
    (people / "person_2" / "7.jpg").write_bytes(jpeg(picture(101), 50))
    black = np.zeros((112, 112, 3), np.uint8)
    for name, gray in (("person_1/8.jpg", 0), ("person_2/8.jpg", 0), ("person_3/8.jpg", 200)):
        flat = black + np.uint8(gray)
        flat[:8, :8] = 255 - gray  # a corner of the picture still shows
        (people / name).write_bytes(jpeg(flat))
    assert folder_to_rec.main([str(people), str(tmp_path / "set")]) == 0
    (people / "person_3" / "0.jpg").write_bytes(b"\xff\xd8\xff no more")
    write_bin(tmp_path / "held.bin", [jpeg(picture(900)), jpeg(picture(303))], [False])
    for source, broken in ((people, 1), (tmp_path / "set", 0)):
        out = tmp_path / f"report_{source.name}"
        capsys.readouterr()
        assert inspect_data.main([str(source), "--out", str(out), "--bins", str(tmp_path / "held.bin")]) == 0
        faults = [line.split("BAD  ")[1] for line in capsys.readouterr().out.splitlines() if "BAD" in line]
        assert faults == [
            "pictures that are also in the test set held: 1, of 1 identities",
            "copies across identities: 1",
            "images of one colour: 3",
            *["images that do not decode: 1"] * broken,
            "copies within an identity: 1",
        ]
        page = (out / "report.html").read_text()
        headings = re.findall("<h2[^>]*>(.*?)</h2>", page)
        assert headings == [
            "What is wrong", "Shared with the test set held", "Copies across identities", "Images of one colour",
            *["Images that do not decode"] * broken, "Copies within an identity", "Some identities, drawn at random",
            "Images per identity, and their size", "All numbers",
        ]  # fmt: skip
        assert all(f"<td>person_{number}/8.jpg</td>" in page for number in (1, 2, 3))
        assert {row["key"] for row in _table(out / "bad.csv")} >= {f"person_{number}/8.jpg" for number in (1, 2, 3)}
        assert [(row["key"], row["other_key"]) for row in _table(out / "duplicates.csv")] == [
            ("person_1/1.jpg", "person_2/7.jpg"),
            ("person_0/1.jpg", "person_0/9.jpg"),
        ]
        assert sorted(row["why"] for row in _table(out / "drop.csv")).count("one colour") == 3


def test_verify_names_images_of_one_colour(tmp_path: Path, people: Path, capsys: pytest.CaptureFixture[str]):
    for number, gray in enumerate((0, 130)):
        noise = np.random.default_rng(number).integers(0, 4, (112, 112, 3))
        (people / f"person_{number}" / "2.jpg").write_bytes(jpeg((noise + gray).astype(np.uint8)))
    assert verify_data.main([str(people), "--bad", str(tmp_path / "bad.csv")]) == 1
    assert [row["index"] for row in _table(tmp_path / "bad.csv")] == ["2", "5"]
    assert "person_1/2.jpg: is of one colour" in capsys.readouterr().out
    write_bin(tmp_path / "held.bin", [jpeg(np.zeros((112, 112, 3), np.uint8)), jpeg(picture(303))], [False])
    assert verify_data.main([str(tmp_path / "held.bin")]) == 1
    assert "held.bin: image 0 is of one colour" in capsys.readouterr().out


def test_an_empty_folder_is_a_warning_in_every_tool(tmp_path: Path, people: Path, capsys: pytest.CaptureFixture[str]):
    (people / "person_1x").mkdir()
    for program, arguments in (
        (inspect_data, [people, "--out", tmp_path / "report"]),
        (verify_data, [people]),
        (filter_data, [people, tmp_path / "filtered"]),
        (merge_data, [people, people, "--out", tmp_path / "merged"]),
        (show_augmentation, [people, tmp_path / "sheet.png"]),
    ):
        assert program.main([str(argument) for argument in arguments]) == 0
        assert "1 of 5 sub-folders hold no image and are not counted as identities: person_1x" in capsys.readouterr().err


def test_merge_names_its_own_flag(tmp_path: Path, people: Path, capsys: pytest.CaptureFixture[str]):
    assert merge_data.main([str(people), "--out", str(tmp_path / "out"), "--labels", "ofset"]) == 1
    assert "error: --labels: labels must be offset, same, or a file" in capsys.readouterr().err


def test_split_without_flags_suits_small_sets_and_says_when_it_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    people = folder_of_people(tmp_path / "people", [2] * 102)
    assert split_data.main([str(people), str(tmp_path / "cut")]) == 0
    train, held = RecordDataset(tmp_path / "cut" / "train"), RecordDataset(tmp_path / "cut" / "held_out")
    assert (train.num_classes, held.num_classes) == (72, 30)
    assert len(read_bin(tmp_path / "cut" / "held_out.bin").same) == 60  # 3 people in each fold, one genuine pair each
    assert split_data._how_many(None, 2000) == 40
    capsys.readouterr()
    assert split_data.main([str(people), str(tmp_path / "more"), "--pairs", "80"]) == 1
    assert "give at most 60 pairs" in (said := capsys.readouterr().err) and "--pairs 60 or fewer" in said
    for wrong in ("5", "25.5"):
        assert split_data.main([str(people), str(tmp_path / "more"), "--held-out", wrong]) == 1
        said = capsys.readouterr().err
        assert f"a share below 1, or a whole number from 20 (two for each of 10 folds) to 101, got {wrong}" in said
    few = folder_of_people(tmp_path / "few", [2] * 9)
    assert split_data.main([str(few), str(tmp_path / "more")]) == 1
    assert "9 identities are too few: 10 folds of pairs need 20" in capsys.readouterr().err
    alone = folder_of_people(tmp_path / "alone", [1] * 40)
    assert split_data.main([str(alone), str(tmp_path / "more")]) == 1
    assert "(0 of them with several images) give at most 0 pairs" in (said := capsys.readouterr().err)
    assert "--held-out N" in said
    assert not (tmp_path / "more").exists()


def test_a_set_of_another_size_is_whole_and_so_is_a_copy_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    people = folder_of_people(tmp_path / "people", [2, 2])
    assert folder_to_rec.main([str(people), str(tmp_path / "set"), "--resize", "--size", "96"]) == 0
    assert filter_data.main([str(tmp_path / "set"), str(tmp_path / "copy")]) == 0
    assert (tmp_path / "copy" / "property").read_text() == "2,96,96"
    assert verify_data.main([str(tmp_path / "copy")]) == 0
    assert inspect_data.main([str(tmp_path / "copy"), "--out", str(tmp_path / "report")]) == 0
    assert json.loads((tmp_path / "report" / "report.json").read_text())["images_not_96_x_96"] == 0
    with pytest.raises(ValueError, match=r"got 96 x 96\. Align the faces to that size first, or set data\.image_size=96"):
        RecordDataset(tmp_path / "copy").decode_into(0, np.zeros((112, 112, 3), dtype=np.uint8))


def test_verify_says_what_is_bad_and_ends_with_1(tmp_path: Path, people: Path, capsys: pytest.CaptureFixture[str]):
    assert verify_data.main([str(people)]) == 0
    (people / "person_1" / "2.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more")
    (people / "person_2" / "0.jpg").write_bytes(jpeg(picture(1, 80)))
    assert verify_data.main([str(people), "--bad", str(tmp_path / "bad.csv")]) == 1
    said = capsys.readouterr()
    assert "person_1/2.jpg: cannot be decoded" in said.out and "80 x 80" in said.out and "2 bad image(s)" in said.err
    assert [row["index"] for row in _table(tmp_path / "bad.csv")] == ["5", "6"]
    (tmp_path / "broken.bin").write_bytes(b"not a set")
    assert verify_data.main([str(tmp_path / "broken.bin")]) == 1


def test_candidates_are_those_of_a_slow_search():
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, 300, dtype=np.uint64)
    hashes[100:200] = hashes[:100] ^ (np.uint64(1) << rng.integers(0, 64, 100).astype(np.uint64))  # one bit differs
    hashes[200:250] = hashes[:50]
    slow = {
        (i, j) for i in range(300) for j in range(i + 1, 300) if bin(int(hashes[i]) ^ int(hashes[j])).count("1") <= MAX_DISTANCE
    }
    found = candidates(hashes)
    assert {tuple(pair) for pair in found.tolist()} <= slow
    sure = {(i, j) for i, j in slow if bin(int(hashes[i]) ^ int(hashes[j])).count("1") <= 1}
    assert sure and sure <= {tuple(pair) for pair in found.tolist()}
    crossed = candidates(hashes[:100], hashes[100:])
    assert {(i, j + 100) for i, j in crossed.tolist()} >= {(i, j) for i, j in sure if i < 100 <= j}


def test_of_too_many_candidates_the_nearest_are_compared(monkeypatch: pytest.MonkeyPatch):
    """Not the first: of a set of millions, these are all of its first identities."""
    monkeypatch.setattr(inspect_data, "_COMPARED", 2)
    pairs, apart = np.arange(10).reshape(5, 2), np.array([3, 0, 2, 0, 1], dtype=np.uint8)
    found, left = inspect_data._compared(pairs, apart, lambda pair: inspect_data.Copy(*pair.tolist(), "near", 1.0), "x", 1)
    assert [(copy.first, copy.second) for copy in found] == [(2, 3), (6, 7)] and left == 3


def test_a_set_of_one_colour_does_not_explode():
    assert len(candidates(np.zeros(20_000, dtype=np.uint64))) <= 20_000 * 8


def test_of_very_many_copies_one_of_each_hash_stays(tmp_path: Path, people: Path):
    noise = np.random.default_rng(1).integers(-3, 4, (150, 112, 112, 3))
    for number, moved in enumerate(noise):
        (people / "person_1" / f"copy{number:03d}.jpg").write_bytes(jpeg(np.clip(picture(7) + moved, 0, 255).astype(np.uint8)))
    assert inspect_data.main([str(people), "--out", str(tmp_path / "report")]) == 0
    assert len(_table(tmp_path / "report" / "drop.csv")) >= 150 - 3


def test_a_page_without_faults_says_how_much_was_not_compared(tmp_path: Path, people: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inspect_data, "_COMPARED", 0)
    (people / "person_1" / "copy.jpg").write_bytes(jpeg(picture(7)))
    (people / "person_1" / "other.jpg").write_bytes(jpeg(picture(7), 40))
    assert inspect_data.main([str(people), "--out", str(tmp_path / "report")]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "No faults: " in page and "; 1 pairs of similar pictures were not compared." in page


def test_likeness_tells_copies_from_other_pictures():
    one = picture(5)
    for changed in (jpeg(one, 40), jpeg(np.clip(one * 1.1 + 5, 0, 255).astype(np.uint8))):
        again = cv2.cvtColor(cv2.imdecode(np.frombuffer(changed, np.uint8), 1), cv2.COLOR_BGR2RGB)
        assert correlation(one, again) > 0.985 and bin(dhash(one) ^ dhash(again)).count("1") <= MAX_DISTANCE
    assert correlation(one, picture(6)) < 0.5
    flat = np.full((112, 112, 3), 9, np.uint8)
    assert correlation(flat, flat) == 1.0 and correlation(flat, flat + 1) == 0.0


@pytest.mark.parametrize(
    "arguments, kept",
    [
        (["--min-images", "3"], [(0, 3), (1, 3), (3, 4)]),
        (["--max-images", "2"], [(0, 2), (1, 2), (2, 2), (3, 2)]),
        (["--classes", "1:3"], [(1, 3), (2, 2)]),
    ],
)
def test_filter_keeps_what_is_asked(tmp_path: Path, people: Path, arguments: list[str], kept: list[tuple[int, int]]):
    assert filter_data.main([str(people), str(tmp_path / "out"), *arguments]) == 0
    dataset = RecordDataset(tmp_path / "out")
    assert np.bincount(dataset.labels()).tolist() == [count for _, count in kept]
    rows = _table(tmp_path / "out" / "classes.csv")
    assert [(int(row["identity"]), int(row["old_identity"])) for row in rows] == [(i, old) for i, (old, _) in enumerate(kept)]
    for index in range(dataset.num_images):
        image, label = dataset.sample(index)
        assert bytes(image) in {path.read_bytes() for path in (people / f"person_{kept[label][0]}").iterdir()}


def test_of_a_replaced_set_nothing_is_left(tmp_path: Path, people: Path, capsys: pytest.CaptureFixture[str]):
    out, one, more = tmp_path / "out", tmp_path / "one set", ["--overwrite"]
    (people / "person_0" / "9.jpg").write_bytes(b"no picture")
    out.mkdir()
    (out / "classes.csv").write_text("mine")  # not of a set
    assert folder_to_rec.main([str(people), str(out), "--skip-bad"]) == 0
    assert (out / "classes.csv").read_text() == "mine" and (out / "skipped.txt").exists()
    (people / "person_0" / "9.jpg").unlink()
    (out / "padding.csv").touch()
    assert filter_data.main([str(people), str(out), "--max-images", "1", *more]) == 0
    assert {path.name for path in out.iterdir()} == {"classes.csv", "property", "train.idx", "train.rec"}
    assert len(_table(out / "classes.csv")) == 4
    assert folder_to_rec.main([str(people), str(one)]) == 0
    assert repair_data.main([str(one), "--out", str(out), *more]) == 0
    assert {path.name for path in out.iterdir()} == {"left_out.csv", "property", "train.idx", "train.rec"}
    assert shuffle_data.main([str(one), str(out), *more]) == 0
    assert {path.name for path in out.iterdir()} == {"property", "train.idx", "train.rec"}
    (one / "train.idx").unlink()
    assert filter_data.main([str(one), str(out), *more]) == 0
    assert f"there is no train.idx; face data repair '{one}' rebuilds it\n" in capsys.readouterr().err


def test_filter_refuses_what_it_cannot_do(tmp_path: Path, people: Path, capsys: pytest.CaptureFixture[str]):
    assert filter_data.main([str(people), str(tmp_path / "out"), "--min-images", "9"]) == 1
    assert "no image is left" in capsys.readouterr().err
    (tmp_path / "drop.txt").write_text("3\n99\n")
    assert filter_data.main([str(people), str(tmp_path / "out"), "--drop", str(tmp_path / "drop.txt")]) == 1
    assert "line 2" in capsys.readouterr().err
    assert filter_data.main([str(people), str(people)]) == 1
    assert not (people / "train.rec").exists()


def test_split_parts_share_no_one_and_lose_no_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    people = folder_of_people(tmp_path / "people", [3, 2, 2, 3, 1, 2, 4, 2] * 3)
    assert folder_to_rec.main([str(people), str(tmp_path / "set")]) == 0
    arguments = [str(tmp_path / "set"), str(tmp_path / "cut"), "--held-out", "20", "--pairs", "20"]
    assert split_data.main(arguments) == 0
    train, held = RecordDataset(tmp_path / "cut" / "train"), RecordDataset(tmp_path / "cut" / "held_out")
    whole = RecordDataset(tmp_path / "set")
    assert (train.num_classes, held.num_classes) == (4, 20)
    images = [{bytes(part.sample(i)[0]) for i in range(part.num_images)} for part in (train, held, whole)]
    assert not images[0] & images[1] and images[0] | images[1] == images[2]
    pairs = read_bin(tmp_path / "cut" / "held_out.bin")
    assert set(pairs.images) <= images[1] and pairs.same.sum() == 10
    assert split_data.main(arguments) == 1  # never over what is there
    (tmp_path / "half" / "held_out").mkdir(parents=True)
    (tmp_path / "half" / "held_out" / "train.rec").touch()
    assert split_data.main([arguments[0], str(tmp_path / "half"), *arguments[2:]]) == 1
    assert not (tmp_path / "half" / "train").exists()
    assert split_data.main([*arguments[:2], "--held-out", "24", "--overwrite"]) == 1
    assert folder_to_rec.main([str(people), str(tmp_path / "in" / "train")]) == 0
    assert split_data.main([str(tmp_path / "in" / "train"), str(tmp_path / "in"), *arguments[2:], "--overwrite"]) == 1
    assert RecordDataset(tmp_path / "in" / "train").num_images == whole.num_images  # nor over its source

    def found() -> list[str]:
        paths = (path for pattern in ("*.rec", "*.bin") for path in (tmp_path / "cut").rglob(pattern))
        return sorted(str(path.relative_to(tmp_path / "cut")) for path in paths)

    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "train.rec").symlink_to(tmp_path / "cut" / "train" / "train.rec")
    (tmp_path / "link" / "train.idx").symlink_to(tmp_path / "cut" / "train" / "train.idx")
    assert split_data.main([str(tmp_path / "link"), arguments[1], "--held-out", "4", "--pairs", "2", "--overwrite"]) == 1
    whole_cut = found()
    assert whole_cut == ["held_out.bin", "held_out/train.rec", "train/train.rec"]
    for name, there in (("held_out", ["train/train.rec"]), ("train", [])):  # no old one is beside a new one

        def interrupted(*args: Any, stop: str = name) -> None:
            if args[2].name == stop:
                raise KeyboardInterrupt
            copy_set(*args)

        with monkeypatch.context() as patch:
            patch.setattr(split_data, "copy_set", interrupted)
            assert split_data.main([*arguments, "--seed", "1", "--overwrite"]) == 130
        assert found() == there
    (tmp_path / "cut" / "train" / "skipped.txt").touch()
    assert split_data.main([*arguments, "--seed", "1", "--overwrite"]) == 0 and found() == whole_cut
    assert not (tmp_path / "cut" / "train" / "skipped.txt").exists()


def test_merged_sets_number_their_people_one_after_another_or_share_them(tmp_path: Path, people: Path):
    other = folder_of_people(tmp_path / "other", [2, 1])
    assert merge_data.main([str(people), str(other), "--out", str(tmp_path / "offset")]) == 0
    assert np.bincount(RecordDataset(tmp_path / "offset").labels()).tolist() == [3, 3, 2, 4, 2, 1]
    assert merge_data.main([str(people), str(other), "--out", str(tmp_path / "same"), "--labels", "same"]) == 0
    assert np.bincount(RecordDataset(tmp_path / "same").labels()).tolist() == [5, 4, 2, 4]


def test_the_sheet_of_augmentations_has_a_row_for_each(tmp_path: Path, people: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "sheet.png"
    assert show_augmentation.main([str(people), str(out), "--columns", "5", "augment.blur=0.5", "augment.blur_sigma=4"]) == 0
    assert "5 pictures, 11 rows" in capsys.readouterr().out
    sheet = cv2.imread(str(out))
    assert sheet.shape == (11 * 134 + 4, 5 * 116 + 4, 3)
    shown = sheet[18:130, 4:116, ::-1]
    assert any(np.array_equal(shown, cv2.imread(str(path))[:, :, ::-1]) for path in people.rglob("*.jpg"))
    assert show_augmentation.main([str(people), str(out), "augment.blurr=0.5"]) == 1
    assert "augment.blur" in capsys.readouterr().err
