"""Enrolment: who is enrolled, what is skipped and rejected, and that a kill loses nothing that was confirmed."""

import os
import random
import re
import shutil
import sqlite3
import struct
import time
from pathlib import Path

import cv2
import numpy as np
import onnx
import pictures
import pytest
from gallery_runs import DIM, SIZE, png, write_network, write_people
from test_scripts_deploy_card import _save
from tiny_detectors import picture, write_detector
from tiny_networks import TIMES_MATRIX, write_onnx
from tiny_runs import Started, error_of, one_line

from deploy.gallery import commands as gallery_enrol
from deploy.gallery.store import Gallery
from scripts.deploy import enrol, gallery, search

KILLS = int(os.environ.get("FACE_KILLS") or 6)
PEOPLE, PICTURES = 8, 5


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_network(tmp_path_factory.mktemp("network") / "weights.pt")


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_people(tmp_path_factory.mktemp("people"), PEOPLE, PICTURES)


def _words(network: list[str], gallery: Path, folder: Path, *more: str) -> list[str]:
    return [network[0], str(gallery), str(folder), *network[1:], *more]


def _content(path: Path) -> dict[tuple[str, str], tuple]:
    """Return what is enrolled by person and picture: hash of the picture, of the vector and of the face, and the norm."""
    with Gallery(path) as gallery:
        gallery.check()
        images = gallery.images()
    return {(one.person, one.picture): (one.hash, one.vector_sum, one.face_sum, one.norm, one.quality) for one in images}


@pytest.fixture(scope="module")
def unbroken(network: list[str], people: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gallery of all people, enrolled in one go."""
    path = tmp_path_factory.mktemp("unbroken") / "g"
    assert enrol.main(_words(network, path, people)) == 0
    return path


def test_each_picture_is_enrolled_once_and_skipped_the_second_time(
    network: list[str],
    people: Path,
    unbroken: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    assert set(_content(unbroken)) == {(f"person_{p}", f"person_{p}/{n}.png") for p in range(PEOPLE) for n in range(PICTURES)}
    shutil.copy(unbroken, tmp_path / "g")
    before = _content(tmp_path / "g")
    monkeypatch.setattr(gallery_enrol, "_enrol", lambda waiting, *rest: waiting and pytest.fail("it embedded them again"))
    assert enrol.main(_words(network, tmp_path / "g", people)) == 0
    assert "0 pictures enrolled, 40 were there already, 0 rejected; now 40 images of 8 people" in capsys.readouterr().out
    assert _content(tmp_path / "g") == before


def test_the_stored_face_is_the_picture(unbroken: Path, people: Path):
    with Gallery(unbroken) as gallery:
        for image in gallery.images()[::7]:
            expected = cv2.imread(str(people / image.picture))[:, :, ::-1]
            assert np.array_equal(gallery.picture(image.number), expected)


def test_kills_at_random_moments_lose_nothing_confirmed(network: list[str], people: Path, unbroken: Path, tmp_path: Path):
    """The number of kills is FACE_KILLS, 6 by default."""
    expected, rng = _content(unbroken), random.Random(os.environ.get("FACE_SEED") or time.time_ns())
    confirmed: set[tuple[str, str]] = set()
    path, whole, killed, in_the_middle = tmp_path / "g", 1.0, 0, 0
    while killed < KILLS:
        output, is_new = tmp_path / f"output{time.time_ns()}", not path.exists()
        output.mkdir()
        for name in ("out", "err"):
            (output / name).touch()
        started = Started(enrol.main, [_words(network, path, people, "--list", "--batch-size", "2")], output)
        # the clock starts with the gallery, or with the progress bar of a run that continues
        while started.is_alive() and not (path.exists() if is_new else (output / "err").stat().st_size):
            time.sleep(0.001)
        begin, moment = time.monotonic(), rng.uniform(0.0, whole)
        while started.is_alive() and time.monotonic() - begin < moment:
            time.sleep(0.001)
        ended = not started.is_alive()
        if not ended:
            started.send(9, 0)
        done = started.wait()
        killed += done.returncode == -9
        assert done.returncode in (0, -9), done.stderr
        said = re.findall(r"^enrolled: (.+) as (.+), image \d+, norm [\d.]+$", done.stdout, re.M)
        in_the_middle += done.returncode == -9 and bool(said)
        confirmed |= {(person, picture) for picture, person in said}
        try:
            now = _content(path) if path.exists() else {}
        except ValueError as error:
            assert "is empty" in str(error)  # to read it rolled its first transaction back
            now = {}
        assert confirmed <= set(now) and all(expected[key] == value for key, value in now.items())
        if ended:  # the next run makes a new gallery
            assert _content(path) == expected
            whole = time.monotonic() - begin if is_new else whole
            path.unlink()
            confirmed = set()
    assert enrol.main(_words(network, path, people)) == 0
    assert _content(path) == expected  # as if it had never been killed
    print(f"{killed} kills, {in_the_middle} of them after some pictures were confirmed")


def test_two_enrolments_at_once_enrol_each_picture_once(network: list[str], people: Path, unbroken: Path, tmp_path: Path):
    outputs = [tmp_path / name for name in "ab"]
    words = _words(network, tmp_path / "g", people, "--list", "--batch-size", "3")
    started = []
    for output in outputs:
        output.mkdir()
        started.append(Started(enrol.main, [words], output))
    done = [one.wait() for one in started]
    assert [one.returncode for one in done] == [0, 0], [one.stderr for one in done]
    assert _content(tmp_path / "g") == _content(unbroken)
    said = [line for one in done for line in one.stdout.splitlines() if line.startswith("enrolled: ")]
    assert len(said) == 40 == len({line.split(", image")[0] for line in said})


def test_what_cannot_be_enrolled_is_listed_with_reason(network: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    folder = write_people(tmp_path / "people", 1, 1)
    (folder / "person_0" / "large.png").write_bytes(png(7, 60))
    (folder / "person_0" / "broken.png").write_bytes(png(8)[:50])
    (folder / "person_0" / "many.jpg").write_bytes(b"\xff\xd8" + 10_001 * b"\xff\xfe\0\2" + b"\xff\xd9")
    (folder / "person_0" / "short.bmp").write_bytes(
        b"BM" + struct.pack("<12x5i", 40, SIZE, SIZE, 1 + (24 << 16), 0) + bytes(99)
    )
    (folder / "alone.png").write_bytes(png(9))
    for name in ("a\nb", "\x1b[2J", "y" * 250):
        (folder / name).mkdir()
        (folder / name / "1.png").write_bytes(png(10))
    os.mkfifo(folder / "person_0" / "pipe.png")
    assert enrol.main(_words(network, tmp_path / "g", folder)) == 0
    said, beside = capfd.readouterr()
    assert "OpenCV" not in beside  # which has lines of its own
    assert "2 pictures enrolled, 0 were there already, 8 rejected" in said  # y * 250 is a name
    for line in (
        "rejected: person_0/large.png: is 60 x 60 pixels, no aligned crop of 48 x 48",
        "rejected: person_0/broken.png: cannot be decoded",
        "rejected: person_0/many.jpg: cannot be decoded: a JPEG of more than 10,000 segments",
        "rejected: alone.png: lies in no sub-folder",
        r"rejected: a\nb/1.png: a person's name must be printable text without line ends, got 'a\\nb'",
        r"rejected: \x1b[2J/1.png: a person's name",
        "rejected: person_0/pipe.png: cannot be read: it is a pipe",
    ):
        assert line in said
    assert "\x1b" not in said


def test_short_embeddings_and_faces_cut_off_are_rejected_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    network, folder = write_network(tmp_path / "weights.pt", size=112), tmp_path / "people" / "ada"
    folder.mkdir(parents=True)
    for number, x in enumerate((8, 64, 112, 224)):  # the first and the last face are cut off by the border
        pixels = picture(200, 240, (x, 96))
        pixels[:60] = cv2.resize(pictures.picture(number), (240, 60))
        (folder / f"{number}.png").write_bytes(cv2.imencode(".png", pixels[..., ::-1])[1].tobytes())
    more = ["--detector", str(write_detector(tmp_path / "d.onnx", "scrfd")), "--list"]
    assert enrol.main(_words(network, tmp_path / "all", folder.parent, *more)) == 0
    norms = {
        name: float(norm) for name, norm in re.findall(r"enrolled: (\S+) as ada, image \d, norm (\S+)", capsys.readouterr().out)
    }
    stored = {picture: float(one[3]) for (_, picture), one in _content(tmp_path / "all").items()}
    assert len(norms) == 4 and all(abs(norms[name] / stored[name] - 1) < 1e-3 for name in stored)
    assert gallery.main(["show", str(tmp_path / "all"), "--images"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{name}  norm {norm:#.4g}  " in shown for name, norm in norms.items())
    limit = sorted(stored.values())[2]  # a face that has just this length is good
    assert enrol.main(_words(network, tmp_path / "norm", folder.parent, *more, "--min-norm", repr(limit))) == 0
    said = capsys.readouterr().out
    assert (
        {name for _, name in _content(tmp_path / "norm")} == {name for name in stored if stored[name] >= limit} != set(stored)
    )
    for name in (name for name in stored if stored[name] < limit):
        assert f"rejected: {name}: its embedding has length {norms[name]:#.4g}, and --min-norm is {limit:g}\n" in said
    assert enrol.main(_words(network, tmp_path / "padding", folder.parent, *more, "--max-padding", ".2")) == 0
    assert {name for _, name in _content(tmp_path / "padding")} == {"ada/1.png", "ada/2.png"}
    with Gallery(tmp_path / "all") as opened:
        faces = {image.picture: opened.picture(image.number) for image in opened.images()}
    for name, percent in re.findall(r"rejected: (\S+): (\S+) % of its crop are outside .* is 0.2", capsys.readouterr().out):
        black = (faces.pop(name) == 0).all(axis=2).mean()  # nothing in the pictures is black
        assert abs(float(percent) / 100 - black) < 0.02
    assert set(faces) == {"ada/1.png", "ada/2.png"}
    for length in ("nan", "inf", "-1", "x"):
        with pytest.raises(SystemExit):
            enrol.main(_words(network, tmp_path / "nan", folder.parent, "--min-norm", length, *more))
        assert f"must be a length from 0 on, got {length}" in capsys.readouterr().err


def test_the_rules_for_the_person(network: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, name in enumerate(("Ada_Lovelace_01", "Ada_Lovelace_02", "Bob_1", "nobody")):
        (flat / f"{name}.png").write_bytes(png(number))
    for rule, people in (
        (["--person-from", "name"], {"Ada_Lovelace": 2, "Bob": 1}),
        (["--person-from", "^([A-Za-z]+)_"], {"Ada": 2, "Bob": 1}),
        (["--person", "Carla"], {"Carla": 4}),
    ):
        gallery = tmp_path / f"g{len(rule[1])}"
        assert enrol.main(_words(network, gallery, flat, *rule)) == 0
        with Gallery(gallery) as opened:
            assert opened.people() == people
    assert "rejected: nobody.png: has no underscore in its name" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        enrol.main(_words(network, tmp_path / "g", flat, "--person-from", "[a-z]+"))
    assert "with a (group) for the person" in capsys.readouterr().err
    for flag, rule in (("--threads", "from 1 to 1024"), ("--batch-size", "of at least 1")):
        with pytest.raises(SystemExit):
            enrol.main(_words(network, tmp_path / "g", flat, flag, "0"))
        assert f"{flag}: must be a whole number {rule}, got 0" in capsys.readouterr().err
    assert enrol.main(_words(network, tmp_path / "none", flat)) == 1  # no sub-folders at all
    assert "none of 4 pictures could be enrolled" in capsys.readouterr().err


def test_another_network_or_detector_is_named(network: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_people(tmp_path / "people", 2, 1)
    assert enrol.main(_words(network, tmp_path / "g", folder, "--no-pictures")) == 0
    other = write_network(tmp_path / "other.pt", seed=1)
    capsys.readouterr()
    said = error_of(enrol.main(_words(other, tmp_path / "g", folder)), capsys)
    assert "another network" in said and "face gallery reembed" in said
    with Gallery(tmp_path / "g") as gallery:
        assert gallery.picture(1) is None  # --no-pictures
    assert enrol.main(_words(network, tmp_path / "new", folder / "person_0")) == 1  # in no folder of a person: none is enrolled
    assert enrol.main(_words(other, tmp_path / "new", folder)) == 0
    with Gallery(tmp_path / "new") as gallery, Gallery(tmp_path / "g") as before:
        assert len(gallery.images()) == 2 and gallery.facts.digest != before.facts.digest


def test_a_network_whose_weights_are_in_another_file_is_known_by_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Networks above 1.9 GB are exported so: FILE.onnx has the graph alone, and is the same for other weights."""
    folder = write_people(tmp_path / "people", 2, 1)

    def words(seed: int) -> list[str]:
        weights = np.random.default_rng(seed).normal(size=(DIM, 3 * SIZE * SIZE)).astype(np.float32)
        model = onnx.load(write_onnx(tmp_path / "n.onnx", [("Flatten", {}), TIMES_MATRIX], DIM, SIZE, w=weights))
        (tmp_path / "n.onnx.data").unlink(missing_ok=True)
        onnx.save(model, str(tmp_path / "n.onnx"), save_as_external_data=True, location="n.onnx.data", size_threshold=0)
        return [str(tmp_path / "n.onnx"), str(tmp_path / "g"), str(folder)]

    assert enrol.main(words(0)) == 0
    graph = (tmp_path / "n.onnx").read_bytes()
    assert enrol.main(words(0)) == 0
    capsys.readouterr()
    assert "another network" in error_of(enrol.main(words(1)), capsys) and (tmp_path / "n.onnx").read_bytes() == graph


def test_the_same_picture_under_two_names_is_a_warning(network: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_people(tmp_path / "people", 2, 1)
    shutil.copy(folder / "person_0" / "0.png", folder / "person_1" / "copy.png")
    assert enrol.main(_words(network, tmp_path / "g", folder)) == 0
    assert "warning: person_1/copy.png is enrolled as person_1, and the same picture as person_0\n" in capsys.readouterr().err


def test_a_missing_folder_makes_no_gallery(network: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert enrol.main(_words(network, tmp_path / "g", tmp_path / "nothing")) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'nothing'}: no such picture or folder\n"
    assert enrol.main(_words(network, tmp_path / "g", tmp_path, "--person", "a\nb")) == 1
    assert "a person's name must be" in capsys.readouterr().err and not (tmp_path / "g").exists()


def test_short_commands_take_the_newest_run_and_what_the_gallery_was_enrolled_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write_people(tmp_path / "people", 2, 2)
    weights = write_network(tmp_path / "weights.pt")
    query = str(tmp_path / "people" / "person_1" / "0.png")
    assert "people.gallery: no such gallery; `face enrol` makes one" in error_of(search.main([query]), capsys)
    monkeypatch.setattr("utils.checkpoint.format.newest_run", lambda: Path("weights.pt"))
    monkeypatch.setattr("deploy.gallery.commands.newest_run", lambda: Path("weights.pt"))
    assert enrol.main(["people", *weights[1:]]) == 0
    assert enrol.main(["our staff.gallery", "people", *weights[1:]]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr("deploy.gallery.commands.newest_run", lambda: pytest.fail("the gallery has its own network"))
    assert enrol.main(["../people.gallery", "../people"]) == 0
    moved = (tmp_path / "weights.pt").rename(tmp_path / "moved.pt")
    monkeypatch.setattr("deploy.gallery.commands.newest_run", lambda: moved)
    assert enrol.main(["../people.gallery", "../people", *weights[1:]]) == 0
    moved.rename(tmp_path / "weights.pt")
    for words in (["../people.gallery", query], ["../our staff.gallery", query, query]):
        capsys.readouterr()
        assert search.main(words) == 0
        assert "  1   1.0000  person_1" in capsys.readouterr().out
    assert search.main(["../people.gallery", query, "--input-mean", "100"]) == 1  # is not dropped
    assert "another network" in capsys.readouterr().err
    odd = ('{"path": "/", "trust_code": true}', '{"path": "/", "colour": "xyz"}', '{"path": "\\ud800"}', '{"path": ""}')
    for hostile in ("{", '{"path": 7}', "{}", '{"width":' * 9999, *odd):
        with sqlite3.connect("../people.gallery") as database:
            database.execute("UPDATE facts SET network_path = ?", (hostile,))
        assert search.main(["../people.gallery", query]) == 1
        assert capsys.readouterr().err.endswith("it does not say how its network is read; name that before the gallery\n")
    (tmp_path / "weights.pt").unlink()
    assert search.main(["../our staff.gallery", query]) == 1
    said = f"is not at {tmp_path / 'weights.pt'}; name it, as in face search NETWORK '../our staff.gallery' PICTURES or"
    assert said in one_line(capsys)
    with pytest.raises(SystemExit):
        enrol.main(["a.gallery", "people", "more", "most"])
    assert "one folder is enrolled at a time" in capsys.readouterr().err


def test_when_the_run_has_trained_on_the_error_says_how_its_gallery_is_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("ada").mkdir()
    Path("ada/0.png").write_bytes(png(0, 112))
    run = _save(Path("work_dirs/mine"))
    assert enrol.main([".", "--device", "cpu"]) == 0 and search.main(["ada"]) == 0
    _save(run, step=9, seed=1)
    capsys.readouterr()
    assert search.main(["ada"]) == 1
    said, old = capsys.readouterr().err, f"{run}/checkpoints/step_00000005"
    assert said.count("\n") == 1 and f"embedded by {old} (" in said and "name that one before the gallery, or " in said
    assert search.main([old, "people.gallery", "ada"]) == 0 and "anew: face gallery reembed people.gallery NETWORK" in said
    assert gallery.main(["reembed", "people.gallery", str(run)]) == 0 and search.main(["ada"]) == 0
