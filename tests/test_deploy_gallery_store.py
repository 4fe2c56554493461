"""The gallery on disk: what is found, what survives, what is forgotten, what is refused."""

import errno
import os
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.multiprocessing as mp
from gallery_runs import DIM, FACTS, SIZE, new_images

from deploy.gallery import database as gallery_database
from deploy.gallery import store as gallery_store
from deploy.gallery.store import Gallery
from utils.cli import progress
from utils.image import to_png

PEOPLE = [f"p{number % 23:02d}" for number in range(150)]


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    return Gallery.create(tmp_path / "g" / "people.gallery", FACTS)


def _slow(gallery: Gallery, images: list, query: np.ndarray, k: int) -> list[tuple[str, float, int]]:
    """Return (person, cosine, image) by a loop in float64 over the stored vectors."""
    best: dict[str, tuple[float, int]] = {}
    for number, image in enumerate(images, 1):
        row, other = image.embedding.astype(np.float64), query.astype(np.float64)
        stored = (row / np.linalg.norm(row)).astype(np.float32).astype(np.float64)
        asked = (other / np.linalg.norm(other)).astype(np.float32).astype(np.float64)
        cosine = sum(float(a) * float(b) for a, b in zip(stored, asked, strict=True))
        if image.person not in best or cosine > best[image.person][0] + 1e-13:
            best[image.person] = cosine, number
    ranked = sorted(best.items(), key=lambda item: (-round(item[1][0], 12), item[1][1]))
    return [(person, *found) for person, found in ranked[:k]]


@pytest.mark.numeric
@pytest.mark.parametrize("cells", [1 << 22, 64])  # the second makes blocks that cut people in two
def test_search_finds_what_a_slow_loop_in_float64_finds(gallery: Gallery, cells: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("deploy.gallery.search._CELLS", cells)
    monkeypatch.setattr("deploy.gallery.search._EXACT_ROWS", 1 << 12 if cells > 64 else 5)
    rng = np.random.default_rng(0)
    images = new_images(rng, PEOPLE, pixels=False)
    for place in (40, 77, 149):  # equal vectors of several people: the image with the lowest number is first
        images[place] = images[place]._replace(embedding=images[12].embedding)
    gallery.add(images)
    queries = np.concatenate([rng.normal(size=(9, DIM)).astype(np.float32), images[12].embedding[None]])
    found = gallery.search(queries, k=6)
    for query, matches in zip(queries, found, strict=True):
        expected = _slow(gallery, images, query, 6)
        assert [(match.person, match.image) for match in matches] == [(person, image) for person, _, image in expected]
        np.testing.assert_allclose([match.cosine for match in matches], [one[1] for one in expected], atol=1e-13)
    assert [match.image for match in found[-1][:3]] == [13, 41, 78]
    assert found == [gallery.search(query[None], k=6)[0] for query in queries]  # whatever else is searched with it
    assert [len(matches) for matches in gallery.search(queries[:2], k=99)] == [23, 23]
    assert gallery.search(np.zeros((1, DIM), np.float32), 1)[0][0].cosine == 0


@pytest.mark.numeric
@pytest.mark.parametrize("weights", ["norm", "equal"])
def test_a_template_is_the_weighted_mean_of_a_persons_images(gallery: Gallery, weights: str):
    rng = np.random.default_rng(1)
    images = new_images(rng, PEOPLE, pixels=False)
    gallery.add(images)
    query = rng.normal(size=(1, DIM)).astype(np.float32)
    expected = {}
    for person in set(PEOPLE):
        total = np.zeros(DIM)
        for image in images:
            if image.person == person:
                raw = image.embedding.astype(np.float64)
                total += raw * image.quality if weights == "norm" else raw / np.linalg.norm(raw)
        expected[person] = float(total @ query[0] / np.linalg.norm(total) / np.linalg.norm(query))
    found = gallery.search(query, k=99, by="template", weights=weights)[0]
    assert [match.person for match in found] == sorted(expected, key=lambda person: -expected[person])
    # float32 sums of 7 images, and float32 rows
    np.testing.assert_allclose([match.cosine for match in found], [expected[match.person] for match in found], atol=3e-6)
    nearest = {match.person: match.image for match in gallery.search(query, k=99)[0]}
    assert all(match.image == nearest[match.person] for match in found)  # the picture that is shown


def test_a_search_follows_what_any_process_changes_and_reads_all_again_only_if_vectors_are_replaced(tmp_path: Path):
    rng, made, connect = np.random.default_rng(0), mock.Mock(side_effect=gallery_store.Searcher), Gallery
    path, anew = str(tmp_path / "g"), 0
    with mock.patch.object(gallery_store, "Searcher", made), Gallery.create(path, FACTS) as gallery, connect(path) as other:
        for step in range(40):
            for action in [*rng.permutation(["add", "add", "remove", "forget"])[: rng.integers(1, 4)], "reembed"]:
                writer = (gallery, other)[rng.integers(2)]
                people, images = list(gallery.people()), gallery.images()
                if action == "add":
                    names = [f"p{number}" for number in rng.integers(12, size=rng.integers(1, 40))]
                    writer.add(new_images(rng, names))
                elif action == "remove" and len(people) > 3:
                    writer.remove([people[rng.integers(len(people))]])
                elif action == "forget":
                    writer.remove(numbers=[images[k].number for k in rng.permutation(len(images))[: len(images) // 3]])
                elif action == "reembed" and step % 13 == 9:  # by the same network, on another machine
                    writer.reembed(FACTS, lambda crops: rng.normal(size=(len(crops), DIM)), lambda images, total: images)
                    anew += 1
            assert [gallery.count(what) for what in ("people", "images")] == [len(gallery.people()), len(gallery.images())]
            queries = rng.normal(size=(5, DIM))
            found, times = gallery.search(queries, 4), sum(call.args[2] == "image" for call in made.call_args_list)
            with connect(path) as opened:
                assert found == opened.search(queries, 4)
                assert gallery.search(queries, 4, "template") == opened.search(queries, 4, "template")
            assert times == 1 + step + anew  # one, and those of the galleries that were opened
    assert len(images) > 20 and anew == 3


def test_a_gallery_is_the_same_after_it_is_opened_again(gallery: Gallery):
    rng = np.random.default_rng(3)
    images = new_images(rng, PEOPLE[:30])
    numbers = gallery.add(images)
    assert numbers == list(range(1, 31)) and gallery.add(images) == [0] * 30
    with Gallery(gallery.path) as other:
        assert other.search(images[0].embedding[None]) == gallery.search(images[0].embedding[None])
        assert other.people() == gallery.people() and other.facts == FACTS
        for number, image in zip(numbers, images, strict=True):
            assert np.array_equal(other.picture(number), image.pixels)
        with Gallery.create(gallery.path, FACTS._replace(digest="other")) as third:
            assert third.facts == FACTS  # what is there is opened, not made anew
        gallery.add(new_images(rng, ["new"]))
        assert "new" in {match.person for match in other.search(images[0].embedding[None], 99)[0]}  # it is read again


def _everything(gallery: Gallery) -> bytes:
    return b"".join(path.read_bytes() for path in gallery.path.parent.iterdir())


def _traces(image: Any) -> list[bytes]:
    """Return what a gallery has of an image: name, picture, hash, vector, and a piece of the face."""
    raw = image.embedding.astype(np.float64)
    vector = (raw / np.linalg.norm(raw)).astype("<f4").tobytes()
    face = [] if image.pixels is None else [to_png(image.pixels)[at : at + 60] for at in (40, 5000)]
    return [image.person.encode(), image.picture.encode(), image.hash, vector, *face]


def _sure_images(seed: int, people: list[str]) -> list:
    images = new_images(np.random.default_rng(seed), people)
    return [image._replace(picture=f"secret{seed}-{number}.png") for number, image in enumerate(images)]


def test_nothing_of_a_removed_person_is_left_in_any_file(gallery: Gallery):
    images = _sure_images(4, ["Ada Lovelace", "Bob Byte", "Bob Byte", "Ada Lovelace"])
    gallery.add(images)
    assert all(trace in _everything(gallery) for image in images for trace in _traces(image))
    assert gallery.remove(people=["Ada Lovelace"]) == 2
    rest = _everything(gallery)
    assert not any(trace in rest for image in (images[0], images[3]) for trace in _traces(image))
    assert all(trace in rest for image in images[1:3] for trace in _traces(image))
    assert [path.name for path in gallery.path.parent.iterdir()] == ["people.gallery"]
    assert gallery.people() == {"Bob Byte": 2} and gallery.check() == 2
    assert gallery.search(images[1].embedding[None])[0][0].image == 2  # numbers stay
    for size in (3 * DIM, DIM // 2):  # and nothing of the vectors that a network of another size replaces
        vectors = [bytes(vector) for (vector,) in gallery._database.execute("SELECT vector FROM images")]
        assert len(vectors) == 2 and all(vector in _everything(gallery) for vector in vectors)
        facts = FACTS._replace(embedding_size=size, digest=f"of size {size}")
        with Gallery(gallery.path) as other:
            other.reembed(facts, lambda crops: crops.reshape(len(crops), -1)[:, :size] + 1.0, lambda images, total: images)  # noqa: B023
        assert not any(vector[:24] in _everything(gallery) for vector in vectors)


def test_the_old_contents_are_overwritten_before_the_journal_is_deleted(gallery: Gallery, monkeypatch: pytest.MonkeyPatch):
    images = _sure_images(4, ["Ada Lovelace", "Bob Byte"])
    gallery.add(images)
    seen: list[tuple[bytes, bytes]] = []
    overwrite = gallery_database.overwrite_journal

    def look(path: Path) -> None:
        before = gallery_database.journal_of(path).read_bytes()
        overwrite(path)
        seen.append((before, gallery_database.journal_of(path).read_bytes()))

    monkeypatch.setattr(gallery_database, "overwrite_journal", look)
    gallery.remove(people=["Ada Lovelace"])
    ((before, after),) = seen
    assert all(trace in before for trace in _traces(images[0])) and after == bytes(len(before))
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match=rf"Input/output error: '{gallery.path}'"):
        gallery.remove(people=["Bob Byte"])


def test_adapted_vectors_are_stored_by_blocks_and_what_takes_long_shows_it(gallery: Gallery, monkeypatch: pytest.MonkeyPatch):
    """A million vectors, their names and new ones would take gigabytes."""
    shown: list[str] = []
    for module in (gallery_store, gallery_database):
        monkeypatch.setattr(module, "progress", lambda *given, **more: shown.append(given[2]) or progress(*given, **more))
    gallery.add(new_images(np.random.default_rng(5), ["anna", "berta"] * 5))
    monkeypatch.setattr("deploy.gallery.store._ADAPTED", 4)
    stored: list[int] = []

    def mirrored(rows: np.ndarray) -> np.ndarray:
        stored.append(gallery._database.execute("SELECT count(*) FROM images WHERE norm > 1e6").fetchone()[0])
        return -rows

    before = gallery.images()
    assert gallery.adapt(FACTS._replace(digest="adapted"), mirrored, 1e9) == 10 and stored == [0, 4, 8]
    with Gallery(gallery.path) as other:
        assert [one.norm for one in other.images()] == [1e9 * one.norm for one in before]
        assert other.check() == 10
        other.reembed(FACTS, _other_network, lambda images, total: images)
        other.compact()
    reading, writing = {"reading the names", "checking the pages", "reading the faces"}, {"writing the file anew"}
    assert {*shown} == reading | writing | {"adapting", "writing the vectors"}


def test_a_check_of_very_many_faces_lets_others_enrol(gallery: Gallery, monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(5)
    gallery.add([*new_images(rng, ["anna", "anna"]), *new_images(rng, ["anna"], pixels=False)])

    def enrolling(numbers: list[int], total: None, what: str, *more: Any, **named: Any) -> Any:
        if what == "reading the faces":
            assert numbers == [1, 2]
            with Gallery(gallery.path, patience=0.0) as other:
                other.add(new_images(np.random.default_rng(6), ["berta"]))
                other.remove(numbers=[2])
        return progress(numbers, total, what, *more, **named)

    monkeypatch.setattr(gallery_store, "progress", enrolling)
    assert gallery.check() == 2 and gallery.people() == {"anna": 2, "berta": 1}


def test_an_interrupt_while_sqlite_is_at_work_is_no_damage(gallery: Gallery, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gallery_database, "progress", bar := mock.MagicMock())
    bar.return_value.__enter__.return_value.update.side_effect = KeyboardInterrupt
    count = "WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n LIMIT 100000) SELECT sum(i) FROM n"
    with pytest.raises(KeyboardInterrupt), gallery.reading(), gallery_database.showing(gallery._database, "counting"):
        gallery._database.execute(count)


def test_removal_of_somebody_who_is_not_there_removes_nobody(gallery: Gallery, monkeypatch: pytest.MonkeyPatch):
    gallery.add(new_images(np.random.default_rng(5), ["anna", "berta"]))
    with pytest.raises(ValueError, match=r"nobody is called 'bertha'. Did you mean berta\?"):
        gallery.remove(people=["anna", "bertha"])
    with pytest.raises(ValueError, match="has no image 9"):
        gallery.remove(numbers=[1, 9])
    monkeypatch.setattr("deploy.gallery.store._ALIKE", 1)  # others wait, so few of very many names are compared
    with pytest.raises(ValueError, match=r"nobody is called 'bertha'\.$"):
        gallery.remove(people=["bertha"])
    assert gallery.people() == {"anna": 1, "berta": 1}
    _sql("UPDATE people SET name = x'00ff' WHERE id = 1")(gallery.path)
    with pytest.raises(ValueError, match="has values of a wrong kind"):
        gallery.remove(people=["bertha"])


# ---- kills: a child dies of SIGKILL at its nth statement of SQL, or write or flush of the journal's zeros


def _die_at(moment: int, action: str, path: Path, seed: int) -> None:
    """Run an action on a gallery in a child, up to a moment; 0 = until it overwrites the journal."""
    count = 0

    def tick(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == moment:
            os.kill(os.getpid(), 9)

    for name in ("pwrite", "fsync"):
        original: Callable = getattr(os, name)

        def counted(*words: Any, _original: Callable = original, **more: Any) -> Any:
            if not moment:
                os.kill(os.getpid(), 9)
            tick()
            return _original(*words, **more)

        setattr(os, name, counted)
    gallery = Gallery.create(path, FACTS)
    gallery._database.set_trace_callback(tick)
    _act(gallery, action, seed)
    os._exit(7)  # the action was over before the moment


def _killed(moment: int, action: str, path: Path) -> int:
    process = mp.get_context("forkserver").Process(target=_die_at, args=(moment, action, path, 1))
    process.start()
    process.join(60)
    assert process.exitcode in (-9, 7)
    return process.exitcode


def test_what_a_killed_removal_did_not_overwrite_the_next_writer_does(gallery: Gallery):
    images = _sure_images(6, ["x", "berta"])
    gallery.add(images)
    assert _killed(0, "remove", gallery.path) == -9
    assert gallery.people() == {"berta": 1} and _traces(images[0])[3] in _everything(gallery)
    with Gallery(gallery.path) as other:
        other.add(new_images(np.random.default_rng(7), ["carla"]))
    rest = _everything(gallery)
    assert not any(trace in rest for trace in _traces(images[0])[1:]) and _traces(images[1])[3] in rest


def _act(gallery: Gallery, action: str, seed: int) -> None:
    if action == "add":
        gallery.add(new_images(np.random.default_rng(seed), ["x", "y"]))
    elif action == "remove":
        gallery.remove(people=["x"])
    elif action == "compact":
        gallery.compact()
    else:
        gallery.reembed(FACTS._replace(digest="new"), _other_network, lambda images, total: images)


def _other_network(crops: np.ndarray) -> np.ndarray:
    return crops.reshape(len(crops), -1)[:, :DIM].astype(np.float32) + 1


_MOMENTS = {"add": (12, 16), "remove": (9, 13), "reembed": (9, 12), "compact": (9, 12)}


@pytest.mark.parametrize("action", _MOMENTS)
def test_a_kill_at_any_moment_leaves_the_state_before_or_after(action: str, tmp_path: Path):
    """Some moments here; FACE_MOMENTS=all tries each."""
    every = os.environ.get("FACE_MOMENTS") == "all"
    survived = 0
    for moment in range(1, 200) if every else _MOMENTS[action]:
        path = tmp_path / f"g{moment}" / "people.gallery"
        with Gallery.create(path, FACTS) as gallery:
            gallery.add(new_images(np.random.default_rng(0), ["w", "x", "w"]))
            gallery.remove(numbers=[1])
            before = _state(gallery)
        exit_code = _killed(moment, action, path)
        with Gallery(path) as gallery:
            now = _state(gallery)
            gallery.add(new_images(np.random.default_rng(8), ["z"]))  # a writer goes on
            gallery.check()
            if action == "compact":
                assert now == before
            elif action == "reembed" and now != before:
                assert now[0] == before[0] and now[1] != before[1] and gallery.facts.digest == "new"
            else:
                people = {image[1] for image in now[0]}
                assert now == before or ("y" in people and len(now[0]) == 4) or people == {"w"}
            assert [one.name for one in path.parent.iterdir()] == ["people.gallery"]
        survived += exit_code == -9
        if exit_code == 7:
            break
    assert survived == (moment - 1 if every else len(_MOMENTS[action]))


def _state(gallery: Gallery) -> tuple[list[tuple], list]:
    """Return the images, and what a search finds."""
    images = [(image.number, image.person, image.hash, image.face_sum) for image in gallery.images()]
    return images, gallery.search(np.linspace(-1, 1, DIM, dtype=np.float32)[None], 9)


def _die_in_a_commit(path: Path) -> None:
    """Write pages of an unfinished transaction into the database, with their old contents in the journal, and die."""
    database = Gallery(path)._database
    for statement in ("PRAGMA query_only = OFF", "PRAGMA cache_size = 2", "BEGIN", "UPDATE people SET name = 'wrong' || id"):
        database.execute(statement)
    database.executemany("INSERT INTO people (name) VALUES (?)", ((f"{number:0100}",) for number in range(3000)))
    os.kill(os.getpid(), 9)


def test_a_reader_takes_back_what_a_killed_commit_wrote(gallery: Gallery):
    gallery.add(new_images(np.random.default_rng(0), ["a", "b"]))
    before = _state(gallery)
    gallery.close()
    size = gallery.path.stat().st_size
    process = mp.get_context("forkserver").Process(target=_die_in_a_commit, args=(gallery.path,))
    process.start()
    process.join(60)
    assert process.exitcode == -9 and gallery.path.stat().st_size > size  # it wrote into the database
    assert gallery_database.journal_of(gallery.path).exists()
    with Gallery(gallery.path) as other:
        assert _state(other) == before


# ---- several processes


def _write_for_a_while(path: Path, name: str) -> None:
    rng = np.random.default_rng(sum(name.encode()))
    with Gallery(path) as gallery:
        for round_number in range(6):
            gallery.add(new_images(rng, [f"{name}{round_number}"] * 3))
            if round_number % 2:
                gallery.remove(people=[f"{name}{round_number - 1}"])
    os._exit(0)


def test_two_writers_and_a_reader_at_once_see_whole_transactions(gallery: Gallery):
    query = np.ones((1, DIM), np.float32)
    gallery.add(new_images(np.random.default_rng(9), ["first"]))
    context = mp.get_context("forkserver")
    writers = [context.Process(target=_write_for_a_while, args=(gallery.path, name)) for name in ("a", "b")]
    for writer in writers:
        writer.start()
    looks = 0
    with Gallery(gallery.path) as reader:
        while any(writer.is_alive() for writer in writers):
            found = reader.search(query, 99)[0]
            assert "first" in {match.person for match in found} and not any(match.cosine == 0 for match in found)
            assert set(reader.people().values()) <= {1, 3}
            looks += 1
    assert looks and [writer.exitcode for writer in writers] == [0, 0]
    assert sorted(gallery.people()) == sorted(["first", *(f"{name}{number}" for name in "ab" for number in (1, 3, 5))])
    gallery.check()


def test_threads_share_one_gallery(gallery: Gallery):
    def work(number: int) -> None:
        for one in range(3):
            gallery.add(new_images(np.random.default_rng(10 * number + one), [f"t{number}"]))
            gallery.search(np.ones((1, DIM), np.float32))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert gallery.people() == {"t0": 3, "t1": 3, "t2": 3}


def test_a_process_that_waits_says_so_and_gives_up(gallery: Gallery, capsys: pytest.CaptureFixture[str]):
    other = Gallery(gallery.path, patience=0.3)
    with gallery._writing(), pytest.raises(ValueError, match="another process uses it; try again later"):
        other.add(new_images(np.random.default_rng(0), ["a"]))
    assert capsys.readouterr().err == f"waiting for another process, which uses {gallery.path}\n"
    other.add(new_images(np.random.default_rng(0), ["a"]))
    assert other.people() == {"a": 1}


@pytest.mark.parametrize("action", ["add", "remove", "compact"])
def test_who_changes_a_gallery_waits_for_those_who_read_it(action: str, gallery: Gallery, capsys: pytest.CaptureFixture[str]):
    gallery.add(new_images(np.random.default_rng(0), ["x", "y"]))
    there, read = threading.Event(), threading.Event()

    def hold() -> None:
        with Gallery(gallery.path) as reader, reader.reading():
            there.set()
            read.wait(30)

    reader = threading.Thread(target=hold)
    reader.start()
    there.wait(30)
    impatient = Gallery(gallery.path, patience=0.2)
    with pytest.raises(ValueError, match="another process uses it; try again later"):
        _act(impatient, action, 1)
    threading.Timer(gallery_store._SILENT + 0.7, read.set).start()
    _act(gallery, action, 1)  # after the second in which it says nothing
    reader.join()
    assert capsys.readouterr().err.splitlines() == [f"waiting for another process, which uses {gallery.path}"] * 2
    assert gallery.people() == {"add": {"x": 2, "y": 2}, "remove": {"y": 1}, "compact": {"x": 1, "y": 1}}[action]
    assert [impatient._database.execute(f"PRAGMA {key}").fetchone()[0] for key in ("temp_store", "query_only")] == [2, 1]


def test_a_search_or_enrolment_with_the_old_network_after_a_reembedding_is_refused(gallery: Gallery):
    gallery.add(new_images(np.random.default_rng(0), ["a"]))
    with Gallery(gallery.path) as other:
        other.reembed(FACTS._replace(digest="new", title="another"), _other_network, lambda images, total: images)
    with pytest.raises(ValueError, match="was embedded anew by another since it was opened"):
        gallery.search(np.ones((1, DIM), np.float32))
    with pytest.raises(ValueError, match="was embedded anew by another since it was opened"):
        gallery.add(new_images(np.random.default_rng(1), ["b"]))
    assert list(gallery.people()) == ["a"]


# ---- hostile galleries


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _other_database(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE t (x)")


def _sql(*statements: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        with sqlite3.connect(path) as database:
            for statement in statements:
                database.execute(statement)

    return run


def _super_journal(path: Path) -> None:
    victim = path.parent.parent / "victim"
    victim.write_text("mine")
    name = str(victim).encode()
    end = len(name).to_bytes(4, "big") + sum(name).to_bytes(4, "big") + bytes.fromhex("d9d505f920a163d7")
    gallery_database.journal_of(path).write_bytes(bytes(512) + (1).to_bytes(4, "big") + name + end)


def _link(path: Path) -> None:
    moved = path.parent.parent / "moved"
    path.rename(moved)
    path.symlink_to(moved)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


_DAMAGE: dict[str, Callable[[Path], None]] = {
    "is damaged|malformed": _cut,
    "is empty": lambda path: path.write_bytes(b""),
    "not a database": lambda path: path.write_bytes(b"\0" * 5000),
    "file is not a database": lambda path: path.write_bytes(b"hello" * 999),
    "a database of another program": _other_database,
    "format 9": _sql("PRAGMA user_version = 9"),
    "tables are not those": _sql("CREATE TRIGGER t AFTER INSERT ON people BEGIN DELETE FROM images; END"),
    "are not those of a gallery": _sql("CREATE VIEW v AS SELECT 1"),
    "write-ahead log": _sql("PRAGMA journal_mode = WAL"),
    "names another file": _super_journal,
    "is no link": _link,
    "link, folder or device": _pipe,
    "must be a regular file": _folder,
    "no such gallery": lambda path: path.unlink(),
    "facts are not": _sql("UPDATE facts SET embedding_size = 'many'"),
    "facts are": _sql("UPDATE facts SET embedding_size = 99999999"),
    "does not say which network": _sql("DELETE FROM facts"),
    r"row that begins with b'.x00.xff' has": _sql("UPDATE people SET name = x'00ff' WHERE id = 1"),
    "no number is left": _sql("UPDATE sqlite_sequence SET seq = 9223372036854775807"),
    "no number is left for": _sql(
        "INSERT INTO sqlite_sequence VALUES ('a', 1), ('b', 1), ('c', 1)", "INSERT INTO sqlite_sequence VALUES ('d', 1 << 60)"
    ),
    "no number is left for a": _sql("UPDATE images SET id = 1 << 60 WHERE id = 2", "UPDATE sqlite_sequence SET seq = 2"),
    "no number is left for a new": _sql("UPDATE people SET id = 1 << 60 WHERE id = 2", "UPDATE sqlite_sequence SET seq = 2"),
    "1 vector.* damaged, such as that of image 2": _sql("UPDATE images SET vector = substr(vector, 2) WHERE id = 2"),
    "2 vector.* damaged, such as that of image 1;": _sql("UPDATE images SET vector = zeroblob(64)"),
    "values of a wrong kind": _sql("UPDATE images SET norm = x'00' WHERE id = 1"),
    "length inf and its face": _sql("UPDATE images SET norm = 9e999 WHERE id = 1"),
    "a score of 1e\\+308; remove": _sql("UPDATE images SET quality = 1e308 WHERE id = 1"),
    "a score of -1; remove": _sql("UPDATE images SET quality = -1.0 WHERE id = 1"),
    "could not decode|Could not decode": _sql("UPDATE people SET name = CAST(x'ff' AS TEXT) WHERE id = 1"),
}


@pytest.mark.parametrize("says", _DAMAGE)
def test_a_hostile_database_ends_in_one_line_and_stays_as_it_was(says: str, gallery: Gallery, tmp_path: Path):
    gallery.add(new_images(np.random.default_rng(0), ["a", "b"]))
    gallery.close()
    path = gallery.path
    _DAMAGE[says](path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(ValueError, match=says) as caught, Gallery(gallery.path) as other:
        other.people()
        other.search(np.ones((1, DIM), np.float32))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    assert (path.read_bytes() if path.is_file() else b"") == before
    assert not (tmp_path / "victim").exists() or (tmp_path / "victim").read_text() == "mine"


def test_damaged_vectors_are_made_anew_from_the_faces(gallery: Gallery):
    gallery.add(new_images(np.random.default_rng(0), ["a", "b"]))
    nan = np.full(DIM, np.nan, "<f4").tobytes()
    with sqlite3.connect(gallery.path) as database:  # damage with the right checksum
        database.execute("UPDATE images SET vector = ?, vector_sum = ?", (nan, gallery_store._checksum(nan)))
    with Gallery(gallery.path) as other, pytest.raises(ValueError, match=r"2 vector.* damaged, .*face gallery reembed"):
        other.search(np.ones((1, DIM), np.float32))
    with Gallery(gallery.path) as other:
        other.reembed(FACTS, _other_network, lambda images, total: images)  # the same network
        assert len(other.search(np.ones((1, DIM), np.float32))[0]) == 2


def test_a_damaged_face_is_named(gallery: Gallery):
    gallery.add(new_images(np.random.default_rng(0), ["a"]))
    _sql("UPDATE faces SET png = substr(png, 2)")(gallery.path)
    for read in (lambda: gallery.picture(1), gallery.check):
        with pytest.raises(ValueError, match="the face of image 1 is damaged"):
            read()
    with pytest.raises(ValueError, match="the face of image 1 is damaged"):
        gallery.reembed(FACTS, _other_network, lambda images, total: images)
    assert gallery.search(np.ones((1, DIM), np.float32))[0][0].person == "a"  # as before


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\0b", "\x1b[2J", "x" * 10_000, "\udcff", "a\u202eb"])
def test_a_name_that_cannot_be_shown_is_refused_and_nobody_is_enrolled(gallery: Gallery, name: str):
    images = new_images(np.random.default_rng(0), ["a", name])
    with pytest.raises(ValueError, match="a person's name") as caught:
        gallery.add(images)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300 and gallery.people() == {}


@pytest.mark.parametrize("name", ["<b>x</b>", "..", "../../etc", "a/b", "'; DROP TABLE people; --", "%s{0}$x$", "Jose\u0301"])
def test_any_other_name_is_a_name(gallery: Gallery, name: str):
    numbers = gallery.add([new_images(np.random.default_rng(0), [name])[0]._replace(picture="\n" + "../" * 999)])
    assert numbers == [1] and list(gallery.people()) == [name.replace("e\u0301", "\xe9")]
    image = gallery.images()[0]
    assert image.picture.isprintable() and len(image.picture) <= 1000
    assert gallery.remove(people=gallery.people()) == 1 and gallery.people() == {}


def test_an_embedding_without_a_direction_is_refused_and_nobody_is_enrolled(gallery: Gallery):
    images = new_images(np.random.default_rng(0), ["a", "b"])
    for bad in (np.zeros(DIM), np.full(DIM, np.nan), np.full(DIM, np.inf), np.ones(DIM + 1)):
        with pytest.raises(ValueError, match="embedding"):
            gallery.add([images[0], images[1]._replace(embedding=bad.astype(np.float32))])
    assert gallery.people() == {}


def test_a_full_disk_names_the_gallery_and_loses_nothing(gallery: Gallery):
    images = new_images(np.random.default_rng(0), ["a", *"bbbbbbbb"])  # more than a page
    gallery.add(images[:1])
    pages = gallery._database.execute("PRAGMA page_count").fetchone()[0]
    gallery._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(ValueError, match=f"{gallery.path}: database or disk is full; make room"):
        gallery.add(images[1:])
    gallery._database.execute("PRAGMA max_page_count = 1000000")
    assert gallery.people() == {"a": 1} and gallery.add(images[1:]) == [*range(2, 10)] and gallery.check() == 9


def test_a_file_or_folder_of_others_is_no_place_for_a_gallery(tmp_path: Path):
    (tmp_path / "photo.jpg").write_bytes(b"x")
    for path, says in ((tmp_path, "must be a regular file"), (tmp_path / "photo.jpg", "is no gallery")):
        for make in (lambda: Gallery.create(path, FACTS), lambda: Gallery(path)):  # noqa: B023
            with pytest.raises(ValueError, match=says):
                make()
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"] and (tmp_path / "photo.jpg").read_bytes() == b"x"


def test_a_reader_needs_no_right_to_write(gallery: Gallery):
    gallery.add(new_images(np.random.default_rng(0), ["a"]))
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    gallery.path.chmod(0o444)
    gallery.path.parent.chmod(0o555)
    try:
        with Gallery(gallery.path) as other:
            assert other.search(np.ones((1, DIM), np.float32))[0][0].person == "a" and other.picture(1).shape == (SIZE, SIZE, 3)
    finally:
        gallery.path.parent.chmod(0o755)
