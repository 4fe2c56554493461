"""The tools between folders of pictures, record sets and pair files, as a user calls them."""

import csv
import errno
import os
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
from faulty_disk import Disk, faulty
from pictures import folder_of_people, jpeg, picture
from test_deploy_faces_crops import _jpeg as turned_jpeg

from data.record_dataset import RecordDataset
from data.recordio.image_record import RecordSetWriter
from deploy.faces.landmarks import read_landmarks
from eval.pair_sets.bin_file import read_bin
from scripts.data import align as align_faces
from scripts.data import folder_to_rec, pairs_to_bin, rec_to_folder
from scripts.data import shuffle as shuffle_rec
from utils.alignment import TEMPLATE, align
from utils.image import decode_rgb


def _fails(capsys: pytest.CaptureFixture[str], program: object, *arguments: object) -> str:
    """Run a program that must end with status 1 and one line; return the line."""
    assert program.main([str(argument) for argument in arguments]) == 1  # type: ignore[attr-defined]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    return lines[0]


def _runs(program: object, *arguments: object) -> None:
    assert program.main([str(argument) for argument in arguments]) == 0  # type: ignore[attr-defined]


# ---- folder_to_rec


@pytest.mark.parametrize("threads", [1, 3])
def test_pictures_of_the_right_size_go_in_byte_for_byte(tmp_path: Path, threads: int):
    people = folder_of_people(tmp_path / "people", [3, 1, 2])
    (people / "person_1" / "more").mkdir()
    (people / "person_1" / "more" / "x.png").write_bytes(cv2.imencode(".png", picture(7))[1].tobytes())
    _runs(folder_to_rec, people, tmp_path / "set", "--threads", threads)
    dataset = RecordDataset(tmp_path / "set")
    names = ("0/0.jpg", "0/1.jpg", "0/2.jpg", "1/0.jpg", "1/more/x.png", "2/0.jpg", "2/1.jpg")
    files = [f"person_{name}" for name in names]
    assert [bytes(dataset.sample(i)[0]) for i in range(7)] == [(people / name).read_bytes() for name in files]
    assert dataset.labels().tolist() == [0, 0, 0, 1, 1, 2, 2]
    lines = (tmp_path / "set" / "train.lst").read_text().splitlines()
    assert lines == [f"1\t{name}\t{label}" for name, label in zip(files, dataset.labels(), strict=True)]


def test_min_images_leaves_people_out_and_numbers_the_rest_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    people = folder_of_people(tmp_path / "people", [3, 1, 2])
    (people / "person_1" / "IMG_1.HEIC").write_bytes(b"x")
    (people / "IMG_2.JPG").write_bytes(jpeg(picture(0)))
    (people / "nobody").mkdir()
    _runs(folder_to_rec, people, tmp_path / "set", "--min-images", 2)
    assert RecordDataset(tmp_path / "set").labels().tolist() == [0, 0, 0, 1, 1]
    said = capsys.readouterr()
    assert "pictures that cannot be read were passed over: 1 .heic; convert them" in said.err
    assert f"{people}: 1 picture(s) in the folder itself belong to no identity and were passed over" in said.err
    assert "1 of 4 sub-folders hold no image" in said.err and "1 identities have fewer than 2 pictures" in said.out
    (people / "some.lst").write_text("1\tperson_0/0.jpg\t0\n1\tperson_2/0.jpg\t2\n1\tperson_2/1.jpg\t2\n")
    _runs(folder_to_rec, people / "some.lst", some := tmp_path / "so me", "--min-images", 2)
    assert RecordDataset(some).labels().tolist() == [0, 0]
    assert f"next: face data inspect '{some}' --out report\n" in capsys.readouterr().out
    (tmp_path / "loose" / "nobody").mkdir(parents=True)
    (tmp_path / "loose" / "1.jpg").write_bytes(jpeg(picture(0)))
    assert "belong to no identity and were passed over" in _fails(capsys, folder_to_rec, tmp_path / "loose", tmp_path / "no")
    for pictures, count, most in ((people, 4, 3), (people / "some.lst", 3, 2)):
        line = _fails(capsys, folder_to_rec, pictures, tmp_path / "no", "--min-images", count)
        assert f"no identity has {count} pictures, the largest has {most}; lower --min-images" in line


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    people = folder_of_people(tmp_path / "people", [2, 2])
    _runs(folder_to_rec, folder_of_people(tmp_path / "old_people", [3]), tmp_path / "old")
    old = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    left = -1

    def full(name: str) -> None:
        nonlocal left
        is_full = name in ("write", "fsync") and left == 0
        left -= name in ("write", "fsync")
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for number in range(4 * 3 + 2 * 2 + 2 + 1 + 3):  # parts and lines of images, identities and the header, property, flushes
        left = number
        with faulty(Disk(before=full)):
            said = _fails(capsys, folder_to_rec, people, tmp_path / "set")
        assert re.fullmatch(r"error: .*/set/(train\.(rec|idx|lst)|property): No space left on device", said), said
        assert not list((tmp_path / "set").iterdir())
        left = number
        with faulty(Disk(before=full)):
            _fails(capsys, folder_to_rec, people, tmp_path / "old", "--overwrite")
        assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == old


def test_a_set_that_is_found_is_whole_whenever_its_writing_was_interrupted(tmp_path: Path):
    for name, counts in (("old", [2, 2]), ("new", [2, 3])):
        _runs(folder_to_rec, folder_of_people(tmp_path / f"people_{name}", counts), tmp_path / name)
    (tmp_path / "new" / "property").write_text("9,112,112")
    out, left = tmp_path / "set", 0

    def interrupt(name: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    found, status = [], 130
    while status:
        _runs(folder_to_rec, tmp_path / "people_old", out, "--overwrite")
        left = len(found) + 1
        with faulty(Disk(before=interrupt)):
            status = shuffle_rec.main([str(tmp_path / "new"), str(out), "--overwrite"])
        is_set = (out / "train.rec").exists()
        found.append((RecordDataset(out).num_classes, (out / "train.lst").exists()) if is_set else None)
    assert list(dict.fromkeys(found)) == [(2, True), None, (9, False)]


def test_of_two_that_write_one_set_the_first_fails_and_none_is_torn(tmp_path: Path):
    (tmp_path / "property").write_text("9,112,112")  # of a set that is replaced
    first, second = RecordSetWriter(tmp_path), RecordSetWriter(tmp_path)
    for writer, image in ((first, b"first"), (second, b"second")):
        writer.add(0, image)
    with pytest.raises(OSError, match="another program is writing it"):
        first.close()
    assert not (tmp_path / "train.rec").exists() and (tmp_path / "property").read_text() == "9,112,112"
    second.close()
    assert bytes(RecordDataset(tmp_path).sample(0)[0]) == b"second"


def test_a_shuffled_set_holds_the_same_in_another_order(tmp_path: Path):
    people = folder_of_people(tmp_path / "people", [6, 6, 6])
    _runs(folder_to_rec, people, tmp_path / "set")
    _runs(shuffle_rec, tmp_path / "set", tmp_path / "copy", "--seed", 4)
    grouped, dataset = RecordDataset(tmp_path / "set"), RecordDataset(tmp_path / "copy")
    expected = sorted((label, bytes(image)) for image, label in map(grouped.sample, range(18)))
    found = [(label, bytes(image)) for image, label in map(dataset.sample, range(18))]
    assert sorted(found) == expected and found != expected
    assert "no header record" in dataset.describe()


def test_landmarks_align_and_other_sizes_need_a_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    people = tmp_path / "people" / "a"
    people.mkdir(parents=True)
    large = picture(3, 300)
    (people / "one.png").write_bytes(cv2.imencode(".png", large[:, :, ::-1])[1].tobytes())
    points = (TEMPLATE * 1.5 + (40, 30)).round(3)
    (tmp_path / "points.csv").write_text("a/one.png," + ",".join(f"{v:.3f}" for v in points.ravel()) + "\n")
    said = _fails(capsys, folder_to_rec, tmp_path / "people", tmp_path / "set")
    assert "300 x 300 pixels, not 112 x 112" in said and "--landmarks" in said and "--resize" in said
    assert not list((tmp_path / "set").iterdir())
    _runs(folder_to_rec, tmp_path / "people", tmp_path / "set", "--landmarks", tmp_path / "points.csv", "--quality", 100)
    assert bytes(RecordDataset(tmp_path / "set").sample(0)[0]) == jpeg(align(large, points, smooth=True), 100)
    (people / "two.jpg").write_bytes(turned_jpeg(large, 6))
    row = ",".join(map(str, points.ravel()))
    (tmp_path / "points.csv").write_text(f"a/one,{row}\na/two,{row}\n")
    aligns = (align_faces, tmp_path / "people", tmp_path / "points.csv", tmp_path / "crops")
    writes = (folder_to_rec, tmp_path / "people", tmp_path / "set", "--landmarks", tmp_path / "points.csv")
    for command in (aligns, writes):
        _runs(*command, "--overwrite")
        assert "1 pictures, such as a/two.jpg, were aligned as they are stored, and EXIF turns" in capsys.readouterr().out
        _runs(*command, "--overwrite", "--upright")
        assert "EXIF" not in capsys.readouterr().out
    upright = align(decode_rgb(turned_jpeg(large, 6), upright=True), points, smooth=True)
    assert bytes(RecordDataset(tmp_path / "set").sample(1)[0]) == jpeg(upright)
    for command in (aligns, writes):
        _runs(*command, "--overwrite", "--plain-warp")
    plain = jpeg(align(large, points))
    assert bytes(RecordDataset(tmp_path / "set").sample(0)[0]) == (tmp_path / "crops" / "a" / "one.jpg").read_bytes() == plain
    (people / "two.jpg").write_bytes(jpeg(picture(3, 300)[:200]))
    assert "300 x 200 pixels, and to resize it would distort it" in _fails(
        capsys, folder_to_rec, tmp_path / "people", tmp_path / "resized", "--resize"
    )
    (people / "two.jpg").unlink()
    _runs(folder_to_rec, tmp_path / "people", tmp_path / "resized", "--resize")
    assert decode_rgb(RecordDataset(tmp_path / "resized").sample(0)[0]).shape == (112, 112, 3)


def test_bad_pictures_stop_or_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    people = folder_of_people(tmp_path / "people", [2, 1, 2])
    (people / "person_1" / "0.jpg").write_bytes(b"no picture")
    assert "person_1/0.jpg: cannot be decoded" in _fails(capsys, folder_to_rec, people, tmp_path / "set")
    assert not (tmp_path / "set" / "train.rec").exists()
    _runs(folder_to_rec, people, tmp_path / "set", "--skip-bad")
    assert RecordDataset(tmp_path / "set").labels().tolist() == [0, 0, 1, 1]  # no gap where a person has nothing left
    assert (tmp_path / "set" / "skipped.txt").read_text().startswith("person_1/0.jpg\tcannot be decoded")
    assert "--overwrite" in _fails(capsys, folder_to_rec, people, tmp_path / "set", "--skip-bad")


def test_both_kinds_of_lst_files_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    people = folder_of_people(tmp_path / "people", [2, 2])
    names = ["person_0/0.jpg", "person_0/1.jpg", "person_1/0.jpg", "person_1/1.jpg"]
    (people / "aligned.lst").write_text("".join(f"1\t{name}\t{i // 2}\n" for i, name in enumerate(names)))
    (people / "im2rec.lst").write_text("".join(f"{i}\t{i // 2}.000000\t{name}\n" for i, name in enumerate(names)))
    sets = []
    for kind in ("aligned", "im2rec"):
        _runs(folder_to_rec, people / f"{kind}.lst", tmp_path / kind)
        dataset = RecordDataset(tmp_path / kind)
        sets.append([(bytes(dataset.sample(i)[0]), dataset.label(i)) for i in range(4)])
    assert sets[0] == sets[1] == [((people / name).read_bytes(), i // 2) for i, name in enumerate(names)]
    large, points = picture(9, 200), (TEMPLATE * 1.2 + 20).round(2)
    (people / "raw.png").write_bytes(cv2.imencode(".png", large[:, :, ::-1])[1].tobytes())
    line = ["0", "raw.png", "0", "1", "1", "9", "9", *(f"{v:.2f}" for v in points.T.ravel())]  # five x, then five y
    (people / "raw.lst").write_text("\t".join(line) + "\n")
    _runs(folder_to_rec, people / "raw.lst", tmp_path / "raw", "--quality", 100)
    assert bytes(RecordDataset(tmp_path / "raw").sample(0)[0]) == jpeg(align(large, points, smooth=True), 100)
    (people / "odd.lst").write_text("what is this\n")
    assert "odd.lst: line 1" in _fails(capsys, folder_to_rec, people / "odd.lst", tmp_path / "odd")


# ---- align_faces


def test_align_faces_goes_on_where_it_was_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "in" / "a").mkdir(parents=True)
    with open(tmp_path / "points.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["name", *(f"{axis}{i}" for axis in "xy" for i in range(1, 6))])  # columns in another order
        for number in range(3):
            (tmp_path / "in" / "a" / f"{number}.jpg").write_bytes(jpeg(picture(number, 200)))
            table.writerow([f"a/{number}", *(TEMPLATE * 1.4 + number).T.ravel()])
    arguments = (tmp_path / "in", tmp_path / "points.csv", tmp_path / "out", "--png")
    _runs(align_faces, *arguments)
    for number in range(3):
        expected = align(decode_rgb(jpeg(picture(number, 200))), TEMPLATE * 1.4 + number, smooth=True)
        np.testing.assert_array_equal(decode_rgb((tmp_path / "out" / "a" / f"{number}.png").read_bytes()), expected)
    (tmp_path / "out" / "a" / "1.png").unlink()
    capsys.readouterr()
    _runs(align_faces, *arguments)
    assert "1 faces aligned" in capsys.readouterr().out
    for more, new in ((["--size", "96"], 3), (["--size", "96"], 0), (["--size", "96", "--overwrite"], 3)):
        _runs(align_faces, *arguments, *more)
        assert f"{new} faces aligned to 96 x 96, {3 - new} were there" in capsys.readouterr().out
    assert "must not be below" in _fails(capsys, align_faces, *arguments[:2], tmp_path / "in")
    (tmp_path / "in" / "a" / "3.jpg").write_bytes(jpeg(picture(3)))
    assert "a/3.jpg: has no landmarks" in _fails(capsys, align_faces, *arguments)


@pytest.mark.parametrize(
    "text, said",
    [
        ("a,1,2,3\n", "line 1"),
        ("a,1,2,3,4,5,6,7,8,9,10\na,1,2,3,4,5,6,7,8,9,10\n", "line 2: a has landmarks already"),
        ("name,x1,y1,x2,y2\na,1,2,3,4\n", "header must name five"),
        ("a,1,2,3,4,5,6,7,8,9,ten\n", "line 1"),
    ],
)
def test_landmark_files_that_say_too_little_are_refused_with_their_line(tmp_path: Path, text: str, said: str):
    (tmp_path / "points.csv").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_landmarks(tmp_path / "points.csv")


def _one_face(tmp_path: Path, points: np.ndarray, width: int = 200, height: int = 160) -> tuple[Path, Path]:
    """Write a picture of width x height and its landmarks; return the folder and the CSV file."""
    (tmp_path / "in" / "ann").mkdir(parents=True)
    pixels = picture(1, 200)[:height, :width]
    (tmp_path / "in" / "ann" / "one.png").write_bytes(cv2.imencode(".png", pixels)[1].tobytes())
    (tmp_path / "points.csv").write_text("ann/one.png," + ",".join(f"{value:.3f}" for value in points.ravel()) + "\n")
    return tmp_path / "in", tmp_path / "points.csv"


_INSIDE = TEMPLATE * 1.2 + (30, 10)  # a face of 134 pixels


@pytest.mark.parametrize(
    ("points", "said"),
    [
        (_INSIDE * 2.6, "the left corner of the mouth is at (207.634, 314.18). Are they of another resolution"),
        (_INSIDE + np.array([0, 300]), "(up to 20 outside, for a face that is cut off), but the left corner of the mouth"),
        (_INSIDE * 1e4, "Are they of another resolution"),
        (_INSIDE + 1e4, "Are they of another resolution"),
        (_INSIDE / (200, 160), "as shares of the picture do: multiply them by its width and height"),
        (_INSIDE / 100, "must be in pixels, but these make a face of 1.3 pixels in a picture of 200 x 160"),
        ((_INSIDE + np.array([80, 0]))[:, ::-1], "Are x and y swapped?"),
        (_INSIDE[:, ::-1], "x before y"),
        (_INSIDE - np.array([1000, 0]), "Are they of another resolution"),
    ],
)
@pytest.mark.parametrize("program", [align_faces, folder_to_rec])
def test_landmarks_that_are_not_in_the_picture_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], program: object, points: np.ndarray, said: str
):
    folder, table = _one_face(tmp_path, points)
    flags = (table, tmp_path / "out") if program is align_faces else (tmp_path / "out", "--landmarks", table)
    line = _fails(capsys, program, folder, *flags)
    assert said in line and "ann/one.png" in line
    assert not list((tmp_path / "out").rglob("*.*"))


@pytest.mark.parametrize("program", [align_faces, folder_to_rec])
@pytest.mark.parametrize(("shift", "listed"), [(0, True), (-30, False), (-94, True)])
def test_faces_at_the_border_are_aligned_and_those_of_much_padding_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], program: object, shift: int, listed: bool
):
    points = TEMPLATE * 1.2 + (30 + shift, 10)
    folder, table = _one_face(tmp_path, points, width=100)  # of a face that is 134 wide
    white = align(np.full((160, 100, 3), 255, np.uint8), points)
    share = float((white < 128).mean())  # what the warp itself leaves black
    flags = (table, tmp_path / "out") if program is align_faces else (tmp_path / "out", "--landmarks", table)
    for _ in range(2 if program is align_faces else 1):  # again, when the face is there already
        _runs(program, folder, *flags)
        said = capsys.readouterr().out
        assert ("1 of 1 faces are largely padding" in said) == (share > 0.4) == listed
    path = tmp_path / "out" / "padding.csv"
    assert path.exists() == listed
    if listed:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["name"] for row in rows] == ["ann/one.png"]
        assert abs(float(rows[0]["share_outside"]) - share) < 0.01


def test_two_pictures_of_one_name_or_one_line_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, table = _one_face(tmp_path, _INSIDE)
    table.write_text(table.read_text() + table.read_text().replace("one.png", "one.jpg"))
    (folder / "ann" / "one.jpg").write_bytes(jpeg(picture(2, 200)))
    said = _fails(capsys, align_faces, folder, table, tmp_path / "out")
    assert "ann/one.png" in said and "ann/one.jpg" in said and "rename one of them" in said
    (folder / "ben").mkdir()
    (folder / "ann" / "one.jpg").rename(folder / "ben" / "one.jpg")
    table.write_text(table.read_text().splitlines()[0].replace("ann/one.png", "one"))
    for program, flags in ((align_faces, (table, tmp_path / "out")), (folder_to_rec, (tmp_path / "set", "--landmarks", table))):
        said = _fails(capsys, program, folder, *flags)
        assert "ben/one.jpg: the landmarks named 'one' already belong to ann/one.png" in said


@pytest.mark.parametrize("program", [align_faces, folder_to_rec, pairs_to_bin])
def test_a_folder_without_known_endings_says_which_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str], program: object):
    for name in ("ann/1.pgm", "ann/2.PGM", "ben/1.pgm", "ben/notes.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"P5 1 1 255 x")
    (tmp_path / "ben").mkdir()
    (tmp_path / "ben" / "3.ppm").write_bytes(b"P6 1 1 255 xxx")
    (tmp_path / "in" / "cy").symlink_to(tmp_path / "ben")  # searched for images, so its endings count as well
    (tmp_path / "points.csv").write_text("a,1,2,3,4,5,6,7,8,9,10\n")
    arguments = {
        align_faces: (tmp_path / "in", tmp_path / "points.csv", tmp_path / "out"),
        folder_to_rec: (tmp_path / "in", tmp_path / "out"),
        pairs_to_bin: ("sample", tmp_path / "in", tmp_path / "out.bin"),
    }[program]  # type: ignore[index]
    said = _fails(capsys, program, *arguments)
    assert ".pgm (3), .txt (1), .ppm (1)" in said and ".jpg" in said and ".webp" in said and str(tmp_path / "in") in said


# ---- rec_to_folder


def test_a_set_becomes_files_and_the_files_the_same_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    people = folder_of_people(tmp_path / "people", [3, 2, 4])
    _runs(folder_to_rec, people, tmp_path / "set")
    _runs(rec_to_folder, tmp_path / "set", tmp_path / "files")
    _runs(rec_to_folder, tmp_path / "set", tmp_path / "some", "--classes", "1:3")
    assert len(list((tmp_path / "files").glob("*/*.jpg"))) == 9
    assert sorted(path.parent.name for path in (tmp_path / "some").glob("*/*")) == ["000001"] * 2 + ["000002"] * 4
    _runs(rec_to_folder, tmp_path / "set", tmp_path / "files")
    (kept := tmp_path / "files" / "000000" / "1.jpg").write_bytes(whole := bytes(len(first := kept.read_bytes())))
    assert "1.jpg: is another picture than the set's" in _fails(capsys, rec_to_folder, tmp_path / "set", tmp_path / "files")
    assert kept.read_bytes() == whole and kept.write_bytes(first[:-9])  # as after a loss of power
    _runs(rec_to_folder, tmp_path / "set", tmp_path / "files")
    assert kept.read_bytes() == first
    _runs(folder_to_rec, tmp_path / "files", tmp_path / "again")
    one, other = RecordDataset(tmp_path / "set"), RecordDataset(tmp_path / "again")
    assert one.labels().tolist() == other.labels().tolist()
    assert [bytes(one.sample(i)[0]) for i in range(9)] == [bytes(other.sample(i)[0]) for i in range(9)]


@pytest.mark.parametrize("classes", ["9", "-1", "a:b", "1,x", "5:5"])
def test_classes_that_do_not_exist_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], classes: str):
    _runs(folder_to_rec, folder_of_people(tmp_path / "people", [1, 1]), tmp_path / "set")
    assert "--classes" in _fails(capsys, rec_to_folder, tmp_path / "set", tmp_path / "out", f"--classes={classes}")


# ---- pairs_to_bin


def _lfw(root: Path) -> Path:
    for name, count in (("Ann_B", 4), ("Cy_D", 2)):
        (root / name).mkdir(parents=True)
        for number in range(1, count + 1):
            (root / name / f"{name}_{number:04d}.jpg").write_bytes(jpeg(picture(number + 10 * count)))
    (root / "pairs.txt").write_text("1\t2\nAnn_B\t1\t4\nCy_D\t1\t2\nAnn_B\t2\tCy_D\t1\nCy_D\t2\tAnn_B\t3\n")
    return root


def test_pairs_of_lfw_are_the_lines_of_pairs_txt_and_a_wrong_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root = _lfw(tmp_path / "lfw")
    _runs(pairs_to_bin, "lfw", root, root / "pairs.txt", tmp_path / "lfw.bin")
    pairs = read_bin(tmp_path / "lfw.bin")
    assert pairs.same.tolist() == [True, True, False, False]
    assert pairs.images[pairs.first[2]] == (root / "Ann_B/Ann_B_0002.jpg").read_bytes()
    assert pairs.images[pairs.second[3]] == (root / "Ann_B/Ann_B_0003.jpg").read_bytes()
    assert "--overwrite" in _fails(capsys, pairs_to_bin, "lfw", root, root / "pairs.txt", tmp_path / "lfw.bin")
    (root / "pairs.txt").write_text("10\t300\nAnn_B\t1\t4\n")
    assert "6000 pairs, but 1 follow" in _fails(capsys, pairs_to_bin, "lfw", root, root / "pairs.txt", tmp_path / "b.bin")
    (root / "pairs.txt").write_text("1\t1\nAnn_B\t1\t9\nAnn_B\t1\tCy_D\t1\n")
    assert "Ann_B_0009.jpg: no such file" in _fails(capsys, pairs_to_bin, "lfw", root, root / "pairs.txt", tmp_path / "b.bin")


def test_pairs_of_cfp_are_those_of_its_lists(tmp_path: Path):
    root = tmp_path / "cfp"
    for letter in "FP":
        lines = []
        for number in range(1, 5):
            path = root / "Data" / letter / f"{number:02d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(picture(number + 50 * (letter == "P"))))
            lines.append(f"{number} ../Data/{letter}/{number:02d}.jpg\n")
        (root / "Protocol").mkdir(exist_ok=True)
        (root / "Protocol" / f"Pair_list_{letter}.txt").write_text("".join(lines))
    for split in ("01", "02"):
        folder = root / "Protocol" / "Split" / "FP" / split
        folder.mkdir(parents=True)
        (folder / "same.txt").write_text("1,2\n3,4\n")
        (folder / "diff.txt").write_text("1,4\n")
    _runs(pairs_to_bin, "cfp", root, tmp_path / "cfp_fp.bin")
    pairs = read_bin(tmp_path / "cfp_fp.bin")
    assert pairs.same.tolist() == [True, True, False] * 2
    assert pairs.images[pairs.first[1]] == (root / "Data/F/03.jpg").read_bytes()
    assert pairs.images[pairs.second[2]] == (root / "Data/P/04.jpg").read_bytes()


def test_pairs_of_a_csv_file_are_its_lines_and_a_wrong_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    people = folder_of_people(tmp_path / "people", [2, 2])
    (tmp_path / "pairs.csv").write_text("first,second,same\nperson_0/0.jpg,person_0/1.jpg,1\nperson_0/0.jpg,person_1/1.jpg,0\n")
    _runs(pairs_to_bin, "csv", people, tmp_path / "pairs.csv", tmp_path / "own.bin")
    pairs = read_bin(tmp_path / "own.bin")
    assert pairs.same.tolist() == [True, False] and len(pairs.images) == 3
    (people / "person_0").rename(people / 'A, "B"')
    lines = re.sub("person_0/(..jpg)", r'"A, ""B""/\1"', (tmp_path / "pairs.csv").read_text())
    (tmp_path / "quoted.csv").write_text(lines)
    _runs(pairs_to_bin, "csv", people, tmp_path / "quoted.csv", tmp_path / "quoted.bin")
    assert (tmp_path / "quoted.bin").read_bytes() == (tmp_path / "own.bin").read_bytes()
    (tmp_path / "quoted.csv").write_text(lines + "a" * 140_000 + ",b,1\n")
    assert "line 4 must be" in _fails(capsys, pairs_to_bin, "csv", people, tmp_path / "quoted.csv", tmp_path / "b.bin")
    (people / 'A, "B"').rename(people / "person_0")
    (people / "person_0" / "0.jpg").write_bytes(jpeg(picture(1, 100)))
    said = _fails(capsys, pairs_to_bin, "csv", people, tmp_path / "pairs.csv", tmp_path / "b.bin")
    assert "person_0/0.jpg: is 100 x 100 pixels" in said
    (tmp_path / "pairs.csv").write_text("person_0/0.jpg,person_0/1.jpg,yes\n")
    assert "same" in _fails(capsys, pairs_to_bin, "csv", people, tmp_path / "pairs.csv", tmp_path / "b.bin")


def test_sampled_pairs_of_a_folder_and_of_its_set_are_the_same(tmp_path: Path):
    people = folder_of_people(tmp_path / "people", [3] * 20)
    _runs(folder_to_rec, people, tmp_path / "set")
    for source, name in ((people, "a"), (tmp_path / "set", "b")):
        _runs(pairs_to_bin, "sample", source, tmp_path / f"{name}.bin")
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    label_of = {(people / f"person_{p}" / f"{i}.jpg").read_bytes(): p for p in range(20) for i in range(3)}
    pairs = read_bin(tmp_path / "a.bin")
    labels = np.array([label_of[image] for image in pairs.images])
    np.testing.assert_array_equal(labels[pairs.first] == labels[pairs.second], pairs.same)


@pytest.mark.parametrize("argument", ["--threads=0", "--size=0", "--quality=101", "--min-images=0", "--threads=two"])
def test_numbers_out_of_range_are_refused_before_all_else(tmp_path: Path, capsys: pytest.CaptureFixture[str], argument: str):
    with pytest.raises(SystemExit) as refused:
        folder_to_rec.main([str(tmp_path), str(tmp_path / "out"), argument])
    assert refused.value.code == 2
    assert f"argument {argument.split('=')[0]}: must be a whole number" in capsys.readouterr().err
