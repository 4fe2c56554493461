"""The commands that look after a gallery."""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from gallery_runs import FACTS, png, write_network, write_people
from tiny_runs import error_of, one_line

from deploy.gallery.store import Gallery, _checksum
from scripts.deploy import enrol, gallery, search


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    folder = tmp_path_factory.mktemp("place")
    network = write_network(folder / "weights.pt")
    write_people(folder / "people", 3, 2)
    assert enrol.main([network[0], str(folder / "g"), str(folder / "people"), *network[1:]]) == 0
    return network, folder


@pytest.fixture
def copied(place: tuple[list[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copy(place[1] / "g", tmp_path / "g"))


def test_show_says_what_is_there(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert gallery.main(["show", str(copied), "--people", "--images", "--json", str(tmp_path / "a.json")]) == 0
    said = capsys.readouterr().out
    assert "people                3\n" in said and "images                6, 6 with their face" in said
    assert "       2  person_1\n" in said and "  person_2  person_2/1.png  norm " in said
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["people"] == {f"person_{number}": 2 for number in range(3)} and len(found["images"]) == 6


def test_names_of_a_hostile_gallery_stay_in_their_lines(
    place: tuple[list[str], Path], copied: Path, capsys: pytest.CaptureFixture[str]
):
    with sqlite3.connect(copied) as database:
        database.execute("UPDATE people SET name = name || char(13) || '    1   0.9999  Alice' || char(10) || char(27)")
        database.execute("UPDATE images SET picture = char(13) || char(10) || picture")
    assert gallery.main(["show", str(copied), "--people", "--images"]) == 0
    network = place[0]
    assert search.main([network[0], str(copied), str(place[1] / "people" / "person_0"), *network[1:]]) == 0
    said = capsys.readouterr().out
    assert "\r" not in said and "\x1b" not in said and not [line for line in said.splitlines() if line.startswith("person_0/")]
    assert said.count("person_0\\r    1   0.9999  Alice\\n\\x1b") == 1 + 2 + 2


def test_compact_leaves_nothing_in_the_unused_bytes_of_a_page(copied: Path, capsys: pytest.CaptureFixture[str]):
    assert gallery.main(["remove", str(copied), "--person", "person_1"]) == 0
    data, size = bytearray(copied.read_bytes()), copied.stat().st_size
    page = next(at for at in range(4096, size, 4096) if data[at] == 13)  # a leaf of a table; its rows are at its end
    data[page + 100 : page + 106] = b"Alice!"
    copied.write_bytes(data)
    assert gallery.main(["check", str(copied)]) == 0 and b"Alice!" in copied.read_bytes()
    assert gallery.main(["compact", str(copied)]) == 0
    assert f" {size / 1e6:.1f} MB before, now {copied.stat().st_size / 1e6:.1f} MB" in capsys.readouterr().out
    assert b"Alice!" not in copied.read_bytes() and copied.stat().st_size < size
    assert gallery.main(["show", str(copied)]) == 0 and "4, 4 with their face" in capsys.readouterr().out


def test_remove_and_check(copied: Path, capsys: pytest.CaptureFixture[str]):
    assert gallery.main(["remove", str(copied), "--person", "person_1", "--image", "1"]) == 0
    assert "3 image(s) removed and overwritten; 3 images of 2 people are left" in capsys.readouterr().out
    assert gallery.main(["check", str(copied)]) == 0
    assert "3 vectors and 3 faces are sound" in capsys.readouterr().out
    for words, says in (([], "name whom to forget"), (["--person", "person_7"], "nobody is called 'person_7'")):
        assert says in error_of(gallery.main(["remove", str(copied), *words]), capsys)


def test_reembed_gives_what_enrolling_with_the_new_network_gives(
    place: tuple[list[str], Path], copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = write_network(tmp_path / "other.pt", seed=1)
    query = str(place[1] / "people" / "person_0")
    assert search.main([other[0], str(copied), query, *other[1:]]) == 1
    with Gallery(copied) as reader:
        assert gallery.main(["reembed", str(copied), *other]) == 0
        assert "6 images embedded by" in capsys.readouterr().out
        assert enrol.main([other[0], str(tmp_path / "new"), str(place[1] / "people"), *other[1:]]) == 0
        with Gallery(tmp_path / "new") as new:
            assert [(one.norm, one.vector_sum) for one in reader.images()] == [(o.norm, o.vector_sum) for o in new.images()]
            assert reader.facts == new.facts  # a gallery that was open sees the new state
    assert search.main([other[0], str(copied), query, *other[1:]]) == 0


def test_reembed_that_cannot_be_done_changes_nothing(
    place: tuple[list[str], Path], copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    network, folder = place
    (folder / "more.png").write_bytes(png(77))
    words = [str(folder / "more.png"), "--person", "new", "--no-pictures", *network[1:]]
    assert enrol.main([network[0], str(copied), *words]) == 0
    before = copied.read_bytes()
    larger = write_network(tmp_path / "larger.pt", size=64)
    for words, says in (
        (network, "has no face of image 7, which was enrolled with --no-pictures"),
        (larger, "its faces have 48 x 48 pixels, and the network takes 64 x 64"),
    ):
        capsys.readouterr()
        assert says in error_of(gallery.main(["reembed", str(copied), *words]), capsys)
        assert copied.read_bytes() == before and [path.name for path in tmp_path.iterdir() if "-" in path.name] == []


@pytest.mark.parametrize(
    ("data", "says"), [(png(1, 20), "has 20 x 20 pixels, must have 48 x 48; enrol"), (png(1)[:50], "cannot be decoded")]
)
def test_a_face_that_is_none_names_gallery_and_image(
    place: tuple[list[str], Path], copied: Path, capsys: pytest.CaptureFixture[str], data: bytes, says: str
):
    with sqlite3.connect(copied) as database:  # with the right checksum
        database.execute("UPDATE faces SET png = ?, face_sum = ? WHERE image = 2", (data, _checksum(data)))
    for command in (["check", str(copied)], ["reembed", str(copied), *place[0]]):
        assert f"error: {copied}: the face of image 2: {says}" in error_of(gallery.main(command), capsys, "embedding: ")


def test_an_empty_or_missing_gallery_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    Gallery.create(tmp_path / "g", FACTS).close()
    assert gallery.main(["show", str(tmp_path / "g")]) == 0 and gallery.main(["check", str(tmp_path / "g")]) == 0
    (tmp_path / "g").write_bytes(b"")
    for command in (["show"], ["check"], ["remove", "--image", "1"]):
        capsys.readouterr()
        assert gallery.main([command[0], str(tmp_path / "g"), *command[1:]]) == 1
        assert "is empty; `face enrol` makes a gallery" in one_line(capsys)
