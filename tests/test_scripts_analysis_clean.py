"""`face clean` and `face data filter` on a set whose wrong labels are planted: the truth comes out."""

import csv
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from pictures import folder_of_people, jpeg
from test_analysis_cleaning import EACH, PEOPLE, SIZE, Planted, planted

from analysis.cleaning import clean
from analysis.cleaning_report import _Pictures
from data import scan
from data.datasets import open_set
from data.decisions import Decision, apply_decisions, read_decisions
from data.recordio.image_record import RecordSetWriter
from scripts import face
from utils.files import write_csv


def _image(number: int) -> bytes:
    """Return a JPEG whose colour is a number below 2 ** 15."""
    digits = [number >> shift & 31 for shift in (0, 5, 10)]
    return jpeg(np.full((112, 112, 3), [8 * digit + 4 for digit in digits], dtype=np.uint8))


def _number(dataset: object, index: int) -> int:
    colour = dataset.pixels_and_label(index)[0][56, 56].astype(int) // 8  # type: ignore[attr-defined]
    return int(colour[0] | colour[1] << 5 | colour[2] << 10)


def _write(folder: Path, made: Planted) -> np.ndarray:
    """Write set and table; return the (n,) rows of the vectors in the order of the set."""
    order = np.argsort(made.labels, kind="stable")
    with RecordSetWriter(folder / "set") as writer:
        for row in order.tolist():
            writer.add(int(made.labels[row]), _image(row))
    _write_table(folder / "set.npy", made.vectors[order], range(len(order)), made.labels[order])
    return order


def _write_table(path: Path, vectors: np.ndarray, names: object, people: object) -> None:
    np.save(path, vectors)
    write_csv(path.with_suffix(".csv"), ("name", "person"), zip(names, people, strict=True))  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Planted, np.ndarray]:
    """Return a folder with a set and its table, of which 30 % of the labels are wrong."""
    folder, made = tmp_path_factory.mktemp("clean"), planted(0.3)
    return folder, made, _write(folder, made)


def _run(*words: object) -> int:
    return face.main([str(word) for word in words])


def test_a_noisy_set_becomes_clean(there: tuple[Path, Planted, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, made, _ = there
    strangers = np.random.default_rng(8).normal(size=(120, SIZE))
    vectors = np.concatenate([made.vectors[made.people == 44], strangers / np.linalg.norm(strangers, axis=1, keepdims=True)])
    known = len(vectors) - 120
    names = [f"{k}.jpg" for k in range(len(vectors))]
    _write_table(tmp_path / "lfw.npy", vectors.astype(np.float32), names, ["anna"] * known + [f"s{k // 3}" for k in range(120)])
    out, second = tmp_path / "the report", tmp_path / "other" / "lfw.npy"
    second.parent.mkdir()
    _write_table(second, vectors[known:].astype(np.float32), names[known:], [f"s{k // 3}" for k in range(120)])
    tests = (tmp_path / "lfw.npy", second)  # of one name
    words = ("clean", folder / "set.npy", folder / "set", "--out", out, "--tests", *tests, "--move", 0.5)
    assert _run(*words) == 0
    assert f"next: face data filter {folder / 'set'} OUT --decisions '{out / 'decisions.csv'}'\n" in capsys.readouterr().out
    page = (out / "report.html").read_text()
    for heading in ("in a test set", "are one person", "Images of another identity", "Images of nobody here"):
        assert re.search(f"<h2[^>]*>[^<]*{heading}", page), heading
    assert page.count("data:image/png") >= 5
    rows = _lines(out)
    assert [(row[2], row[5].split(",")[0]) for row in rows if row[:2] == ["drop", ""]] == [("44", "anna of lfw")]
    assert {(row[3], row[2]) for row in rows if row[0] == "merge"} == {("0", "60"), ("1", "61")}

    assert _run("data", "filter", folder / "set", tmp_path / "cleaned", "--decisions", out / "decisions.csv") == 0
    cleaned = open_set(tmp_path / "cleaned")
    numbers = np.array([_number(cleaned, index) for index in range(cleaned.num_images)])
    people, labels = made.people[numbers], np.asarray(cleaned.labels())
    assert len(np.unique(numbers)) == len(numbers)
    assert cleaned.num_classes == PEOPLE - 1 and 44 not in people  # the merged ones are one, and 44 is in the test set
    owner = np.array([np.bincount(people[labels == label]).argmax() for label in range(cleaned.num_classes)])
    assert sorted(owner) == [person for person in range(PEOPLE) if person != 44]
    assert (people == owner[labels]).mean() >= 0.99
    right = (made.people < PEOPLE) & (made.people != 44)
    assert len(numbers) >= 0.97 * np.count_nonzero(right)  # flips moved to their identity, but for the least sure

    # what a person has edited is not replaced; a run that ended before the page was written has no such file
    assert _run(*words) == 1
    assert "exists, and may have been edited; add --overwrite" in capsys.readouterr().err
    assert _run(*words, "--overwrite") == 0
    (tmp_path / "full" / "report.html").mkdir(parents=True)
    assert _run(*words[:4], tmp_path / "full") == 1 and not (tmp_path / "full" / "decisions.csv").exists()


def test_a_row_of_the_page_copies_no_label_of_all_images_and_their_names_are_found_under_a_bar(
    there: tuple[Path, Planted, np.ndarray], monkeypatch: pytest.MonkeyPatch
):
    folder, made, order = there
    shown: list[str] = []
    monkeypatch.setattr(scan, "progress", lambda items, total, what, *_, **__: shown.append(what) or items)
    dataset, labels = open_set(folder / "set"), made.labels[order]
    assert scan.indices_of(list(map(str, range(len(labels)))), dataset).tolist() == list(range(len(labels)))
    assert shown == ["finding images"]
    found = clean(np.load(folder / "set.npy"), labels)
    pictures = _Pictures(dataset, found, np.arange(len(labels)))
    sizes, place = [0], np.searchsorted
    monkeypatch.setattr(np, "searchsorted", lambda sorted_, *values: sizes.append(len(sorted_)) or place(sorted_, *values))
    one = Decision("move", int(found.wrong[0]), int(labels[found.wrong[0]]), str(found.other[0]))
    cells = [texts[0] for _, texts in pictures.row("move", one)]
    assert cells == [f"image {one.image}", *[f"identity {one.identity}"] * 3, *[f"identity {one.to}"] * 3]
    assert max(sizes) <= len(found.wrong)
    alone = found._replace(centres=found.centres._replace(size=np.zeros(len(found.centres.size))))
    assert _Pictures(dataset, alone, np.arange(len(labels))).row("move", one)[1][1][1] == "no two agree"  # no cosine of -1


def test_the_page_of_a_clean_set_says_that_nothing_was_found(tmp_path: Path):
    made = planted(0.0, twice=0, two=0)
    centres = np.eye(PEOPLE, SIZE)[made.people] + 0.01 * made.vectors
    _write(tmp_path, made._replace(vectors=(centres / np.linalg.norm(centres, axis=1, keepdims=True)).astype(np.float32)))
    assert _run("clean", tmp_path / "set.npy", tmp_path / "set", "--out", tmp_path / "report") == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<img" not in page and "nearer than any other" not in page and len(_lines(tmp_path / "report")) == 0


def test_a_second_person_under_a_label_gets_an_identity_and_images_stay_if_nothing_moves(tmp_path: Path):
    made = planted(0.0, twice=0, two=0)
    joined = np.where(made.labels == 10, 20, made.labels)
    made = made._replace(labels=np.unique(joined, return_inverse=True)[1])
    _write(tmp_path, made)
    assert _run("clean", tmp_path / "set.npy", tmp_path / "set", "--out", tmp_path / "report") == 0
    shutil.copytree(tmp_path / "set", tmp_path / "damaged")
    records = tmp_path / "damaged" / "train.rec"
    records.write_bytes(records.read_bytes().replace(b"\xff\xd8\xff", b"not"))
    assert _run("clean", tmp_path / "set.npy", tmp_path / "damaged", "--out", tmp_path / "seen") == 0
    assert "<img" in (tmp_path / "seen" / "report.html").read_text()
    assert _run("data", "filter", tmp_path / "set", tmp_path / "cut", "--decisions", tmp_path / "report" / "decisions.csv") == 0
    cut = open_set(tmp_path / "cut")
    people = made.people[[_number(cut, index) for index in range(cut.num_images)]]
    assert cut.num_classes == PEOPLE and cut.num_images >= PEOPLE * EACH - 3
    for label in range(PEOPLE):
        assert len(np.unique(people[np.asarray(cut.labels()) == label])) == 1
    assert (tmp_path / "cut" / "classes.csv").read_text().splitlines()[-1].endswith("19+1")


def test_a_table_of_another_set_is_refused(
    there: tuple[Path, Planted, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, made, order = there
    labels = made.labels[order].tolist()
    assert labels[17] == 1
    labels[17] = 2
    _write_table(tmp_path / "other.npy", made.vectors[order], range(len(order)), labels)
    assert _run("clean", tmp_path / "other.npy", folder / "set", "--out", tmp_path / "report") == 1
    assert "with its label; row 17 is 17 of 2" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(("columns", "person", "reason"), [(SIZE, "", "has no person"), (SIZE - 1, "p", "network of TABLE")])
def test_a_test_table_that_does_not_fit_is_refused_before_the_work(
    columns: int,
    person: str,
    reason: str,
    there: tuple[Path, Planted, np.ndarray],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("scripts.analysis.clean.clean", lambda *arguments: pytest.fail("worked"))
    _write_table(tmp_path / "t.npy", np.eye(3, columns, dtype=np.float32), range(3), [person] * 3)
    words = ("clean", there[0] / "set.npy", there[0] / "set", "--out", tmp_path / "report", "--tests", tmp_path / "t.npy")
    assert _run(*words) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: --tests: t: ") and reason in said


def test_labels_that_say_nothing_of_the_vectors_are_one_line(
    there: tuple[Path, Planted, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, made, order = there
    noise = np.random.default_rng(3).normal(size=made.vectors.shape)
    noise = (noise / np.linalg.norm(noise, axis=1, keepdims=True)).astype(np.float32)
    for number, vectors in enumerate((noise, np.repeat(noise[:1], len(noise), axis=0))):
        _write_table(tmp_path / "t.npy", vectors, range(len(order)), made.labels[order])
        assert _run("clean", tmp_path / "t.npy", folder / "set", "--out", tmp_path / str(number)) == 1
        assert "are no more alike than others" in capsys.readouterr().err
        assert not (tmp_path / str(number)).exists()


def _lines(out: Path) -> list[list[str]]:
    with open(out / "decisions.csv", newline="") as file:
        return list(csv.reader(file))[1:]


def test_a_share_of_impostors_replaces_the_border_and_none_moves_at_1(there: tuple[Path, Planted, np.ndarray], tmp_path: Path):
    folder, made, order = there
    dropped = []
    for far in (0.5, 0.05):
        words = ("clean", folder / "set.npy", folder / "set", "--out", tmp_path / str(far), "--far", far, "--move", 1)
        assert _run(*words) == 0
        lines = [line for line in _lines(tmp_path / str(far)) if line[0] in ("drop", "move")]
        assert {line[0] for line in lines} == {"drop"}
        dropped.append({int(line[1]) for line in lines})
    outliers = set(np.flatnonzero(made.people[order] >= PEOPLE).tolist())
    assert dropped[0] < dropped[1]
    # images of nobody here are impostors under each label
    for far, found in zip((0.5, 0.05), dropped, strict=True):
        error = 4 * np.sqrt(far * (1 - far) / len(outliers))
        assert abs(len(outliers - found) / len(outliers) - far) < error


def test_a_folder_of_pictures_is_cleaned_under_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    people = folder_of_people(tmp_path / "people", [6] * 20)
    rng = np.random.default_rng(9)
    names = [path.relative_to(people).as_posix() for path in sorted(people.rglob("*.jpg"))]
    owners = [name.partition("/")[0] for name in names]
    vectors = rng.normal(size=(20, SIZE))[np.unique(owners, return_inverse=True)[1]] + 0.5 * rng.normal(size=(120, SIZE))
    wrong = rng.permutation(120)[:12]
    vectors[wrong] = rng.normal(size=(12, SIZE))
    order = rng.permutation(120)
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    twice = [*order[:9], order[5], *order[9:]]
    _write_table(tmp_path / "t.npy", vectors[twice], [names[k] for k in twice], [owners[k] for k in twice])
    assert _run("clean", tmp_path / "t.npy", people, "--out", tmp_path / "report") == 1
    assert f"row 9 is {names[order[5]]} of" in capsys.readouterr().err
    _write_table(tmp_path / "t.npy", vectors[order], [names[k] for k in order], [owners[k] for k in order])
    assert _run("clean", tmp_path / "t.npy", people, "--out", tmp_path / "report") == 0
    dataset = open_set(people)
    found = {dataset.key(int(line[1])) for line in _lines(tmp_path / "report") if line[0] == "drop"}
    assert found == {str(people / names[k]) for k in wrong}


def test_decisions_are_transitive_and_follow_what_they_meet(tmp_path: Path):
    labels = np.repeat(np.arange(8), 3)
    lines = [
        "action,image,identity,to,sure,why",
        "merge,,4,2,,",
        "merge,,6,4,,",  # 2, 4 and 6 are one
        "drop,0,0,,,",
        "move,1,0,6,,",  # to the merged one
        "merge,,5,3,,",
        "drop,,5,,,",  # takes 3 with it
        "move,3,1,5,,",  # goes with it
        "split,21,7,7+1,,",
        "split,22,7,7+1,,",
    ]
    (tmp_path / "d.csv").write_text("\n".join(lines))
    new, names = apply_decisions(read_decisions(tmp_path / "d.csv", labels, 8), labels, 8)
    assert names == ["7+1"]
    assert new.tolist() == [-1, 2, 0, -1, 1, 1, 2, 2, 2, -1, -1, -1, 2, 2, 2, -1, -1, -1, 2, 2, 2, 8, 8, 7]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("remove,1,0,,,", "must begin with drop, move, merge, split"),
        ("drop,x,0,,,", "must be action,image,identity,to with whole numbers"),
        ("drop,1", "must be action,image,identity,to"),
        ("drop,24,7,,,", "must have an image from 0 to 23"),
        ("drop,1,8,,,", "must name an identity from 0 to 7"),
        ("move,1,0,8,,", "must have an identity from 0 to 7 in the column to"),
        ("merge,1,0,2,,", "must leave image empty"),
        ("split,1,0,3,,", "must have a word that is no number"),
        ("split,,0,new,,", "must have an image"),
        ("drop,5,0,,,", "is of another set: image 5 has the label 1 here"),
        ("drop,1,0,,,\nmove,1,0,2,,", "line 2 is the second about image 1; keep one"),
    ],
)
def test_lines_that_do_not_fit_are_refused(line: str, message: str, tmp_path: Path):
    (tmp_path / "d.csv").write_text(line)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_decisions(tmp_path / "d.csv", np.repeat(np.arange(8), 3), 8)
