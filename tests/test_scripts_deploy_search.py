"""Searches through the program: what is printed, the threshold, the rates, the sheet and the JSON."""

import json
import types
from pathlib import Path

import cv2
import numpy as np
import pytest
from gallery_runs import png, write_network, write_people
from tqdm import tqdm

from deploy.embed.embedder import Embedder
from deploy.gallery import search as gallery_search
from deploy.gallery.report import draw_sheet
from deploy.gallery.search import Match
from deploy.gallery.store import Gallery
from scripts.deploy import enrol, search


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The words of a network, and a folder with a gallery of two of three people, and queries."""
    folder = tmp_path_factory.mktemp("place")
    network = write_network(folder / "weights.pt")
    write_people(folder / "people", 3, 2)
    for person in range(3):  # queries are the enrolled pictures, a little darker; person_2 is a stranger
        target = folder / "queries" / f"person_{person}"
        target.mkdir(parents=True)
        for number in (0, 1):
            pixels = cv2.imread(str(folder / "people" / f"person_{person}" / f"{number}.png"))
            cv2.imwrite(str(target / f"{number + 2}.png"), (pixels * 0.8).astype(np.uint8))
    for number in (0, 1):
        (folder / "people" / "person_2" / f"{number}.png").unlink()
    (folder / "people" / "person_2").rmdir()
    assert enrol.main([network[0], str(folder / "g"), str(folder / "people"), *network[1:]]) == 0
    return network, folder


def _words(place: tuple[list[str], Path], *more: str, queries: str = "queries") -> list[str]:
    network, folder = place
    return [network[0], str(folder / "g"), str(folder / queries), *network[1:], *more]


def test_json_screen_and_gallery_agree(place: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    more = ["--json", str(tmp_path / "found.json"), "--sheet", str(tmp_path / "s.png")]
    assert search.main(_words(place, "--k", "2", *more)) == 0
    said = capsys.readouterr().out
    assert "no threshold: the people are only ranked" in said and "unknown" not in said and "match" not in said
    found = json.loads((tmp_path / "found.json").read_text())
    assert [query["picture"] for query in found["queries"]] == [f"person_{p}/{n}.png" for p in range(3) for n in (2, 3)]
    with Gallery(place[1] / "g") as gallery:
        people = {image.number: image.person for image in gallery.images()}
    for query in found["queries"]:
        assert query["known"] is None and len(query["matches"]) == 2
        assert [people[match["image"]] for match in query["matches"]] == [match["person"] for match in query["matches"]]
        assert query["matches"][0]["cosine"] >= query["matches"][1]["cosine"]
        lines = said[said.index(query["picture"]) :].splitlines()[1:3]
        assert [line.split() for line in lines] == [
            [str(place_), f"{match['cosine']:.4f}", match["person"]] for place_, match in enumerate(query["matches"], 1)
        ]
    sheet = cv2.imread(str(tmp_path / "s.png"))
    assert sheet.shape[0] > 6 * 112 and sheet.shape[1] > 3 * 112  # a row for each query: the face and two people
    drawn = cv2.resize(cv2.imread(str(place[1] / "queries" / "person_0" / "2.png")), (112, 112))
    assert np.array_equal(sheet[:112, 4:116], drawn)


def test_pictures_of_folders_are_told_apart(place: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    network, folder = place
    given = [str(folder / "queries" / f"person_{person}" / "2.png") for person in (0, 1)]
    bad = tmp_path / "2.png"
    bad.write_bytes(b"none")
    words = [network[0], str(folder / "g"), *given, str(bad), *network[1:], "--json", str(tmp_path / "a.json")]
    for more in ([], ["--labelled", "--person-from", "^([0-9])"]):
        assert search.main([*words, *more, "--sheet", str(tmp_path / "s.png")]) == 0
        said, found = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())
        assert [query["picture"] for query in found["queries"]] == given
        assert [one["picture"] for one in found["rejected"]] == [str(bad)]
        assert [line for line in said.splitlines() if line.endswith(".png")][:2] == given
    sheet = cv2.imread(str(tmp_path / "s.png"), cv2.IMREAD_GRAYSCALE)
    names = [sheet[top + 112 : top + 130, :118] for top in (0, sheet.shape[0] // 2)]
    assert not np.array_equal(*names)


def test_reading_a_large_gallery_shows_its_progress(
    place: tuple[list[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for long, shows in ((1 << 18, False), (4, True)):
        monkeypatch.setattr(gallery_search, "_LONG", long)
        assert search.main(_words(place)) == 0
        assert ("reading the gallery: 100%" in capsys.readouterr().err) == shows


def test_a_sheet_has_ten_people_at_most_beside_a_face():
    nobody = types.SimpleNamespace(picture=lambda number: None)
    matches = [Match("a", 0.5, 1)] * 1000  # --k 1000
    data = draw_sheet([(np.zeros((48, 48, 3), dtype=np.uint8), "x", matches)], nobody, None)
    assert 11 * 112 < cv2.imdecode(np.frombuffer(data, np.uint8), 1).shape[1] < 12 * 116 + 28


def test_first_comes_the_answer_and_the_sheet_frames_the_person_above_the_threshold(
    place: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert search.main(_words(place, "--json", str(tmp_path / "a.json"))) == 0
    best = sorted(query["matches"][0]["cosine"] for query in json.loads((tmp_path / "a.json").read_text())["queries"])
    threshold = (best[2] + best[3]) / 2
    capsys.readouterr()
    more = ["--json", str(tmp_path / "b.json"), "--sheet", str(tmp_path / "s.png")]
    assert search.main(_words(place, "--threshold", repr(threshold), *more)) == 0
    said, sheet = capsys.readouterr().out.splitlines(), cv2.imread(str(tmp_path / "s.png"))
    queries = json.loads((tmp_path / "b.json").read_text())["queries"]
    assert [query["known"] for query in queries].count(True) == 3
    for query, row in zip(queries, np.split(sheet, len(queries)), strict=True):
        answer = f"match: {query['matches'][0]['person']}" if query["known"] else "unknown"
        assert f"{query['picture']}: {answer}" in said
        for left, framed in ((144, query["known"]), (4, False), (260, False)):  # the first person, the query, the second person
            assert (row[:112, left : left + 3] == (0, 200, 0)).all() == framed


def test_rates_are_those_of_a_count_by_hand(place: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for by in ("image", "template"):
        words = _words(place, "--labelled", "--by", by, "--k", "9", "--json", str(tmp_path / "a.json"))
        assert search.main(words) == 0
        queries = json.loads((tmp_path / "a.json").read_text())["queries"]
        cosines = sorted(match["cosine"] for query in queries for match in query["matches"])
        for threshold in (cosines[5] + 1e-6, max(query["matches"][0]["cosine"] for query in queries) + 1e-6):
            assert search.main([*words, "--threshold", repr(threshold)]) == 0
            rates = json.loads((tmp_path / "a.json").read_text())["rates"]
            right = misses = alarms = 0
            for query in queries:
                first, person = query["matches"][0], query["picture"].split("/")[0]
                right += first["person"] == person
                misses += person != "person_2" and not (first["person"] == person and first["cosine"] > threshold)
                alarms += person == "person_2" and first["cosine"] > threshold
            assert right and rates == {
                "queries_of_enrolled_people": 4, "queries_of_others": 2, "rank_1": right / 4, "rank_5": 1.0,
                "fnir_at_the_threshold": misses / 4, "fpir_at_the_threshold": alarms / 2,
            }  # fmt: skip
    assert "warning" not in capsys.readouterr().err
    assert search.main(_words(place, "--labelled", "--quiet", queries="people")) == 0
    captured = capsys.readouterr()
    assert "4 of the 4 queries are enrolled pictures themselves" in captured.err and "rank 1" in captured.out


def test_the_bar_counts_what_is_embedded_and_many_equal_rejections_are_three_and_a_count(
    place: tuple[list[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "many" / "a").mkdir(parents=True)
    for number in range(45):  # 25 crops, and 20 photographs of several sizes
        (tmp_path / "many" / "a" / f"{number:02}.png").write_bytes(png(number, 48 if number % 9 < 5 else 50 + number))
    embed, seen = Embedder.embed, []  # how many are embedded at once, when how many are done

    def note(self: Embedder, crops: np.ndarray) -> np.ndarray:
        seen.append((len(crops), *(bar.n for bar in tqdm._instances)))
        return embed(self, crops)

    monkeypatch.setattr(Embedder, "embed", note)
    for program, gallery, *more in ((search, place[1] / "g"), (enrol, tmp_path / "a"), (enrol, tmp_path / "b", "--list")):
        seen.clear()
        assert program.main([place[0][0], str(gallery), str(tmp_path / "many"), *place[0][1:], *more]) == 0
        captured = capsys.readouterr()
        lines = [line for line in captured.out.splitlines() if line.startswith("rejected: ")]
        assert lines[0].startswith("rejected: a/05.png: is 55 x 55 pixels, no") and "a/07.png: is 57 x 57" in lines[2]
        assert len(lines) == 20 if more else lines[3:] == ["rejected: 17 more for the same reason"]
        assert seen == [(16, 0), (9, 28)] and "45/45" in captured.err


def test_a_threshold_at_a_far_says_what_to_expect_in_a_gallery(
    place: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    point = {"target": "1e-3", "cosine_threshold": 0.25, "tar": 0.9}
    (tmp_path / "results.json").write_text(json.dumps({"a|set": {"operating_points": [point], "num_impostor": 5000}}))
    results = ["--results", str(tmp_path / "results.json")]
    assert search.main(_words(place, "--far", "1e-3", *results)) == 0
    said = capsys.readouterr().out
    assert "above the cosine 0.2500: FAR 1e-3 on the set a|set, where 90.00 % of the genuine pairs are accepted" in said
    assert "compared with 4 images, so expect about 0.004 false matches per search of a stranger" in said
    assert search.main(_words(place, "--far", "1e-3", "--by", "template", *results)) == 0
    assert "compared with 2 templates, so expect about 0.002" in capsys.readouterr().out
    assert search.main(_words(place, "--far", "1e-4", *results)) == 1
    assert "no threshold for FAR 1e-4: it needs 10,000 impostor pairs" in capsys.readouterr().err


def test_errors_are_one_line(place: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    network, folder = place
    other = write_network(tmp_path / "other.pt", seed=1)
    (tmp_path / "large.png").write_bytes(png(1, 60))
    query, start = str(folder / "queries"), [network[0], str(folder / "g")]
    for words, says in (
        ([other[0], str(folder / "g"), query, *other[1:]], "another network"),
        ([network[0], str(tmp_path / "none.gallery"), query, *network[1:]], "no such gallery"),
        ([*start, str(tmp_path / "x.png"), *network[1:]], "no such picture or folder"),
        ([*start, str(tmp_path / "large.png"), *network[1:]], "none of 1 pictures has a face to search"),
        ([*start, query, *network[1:], "--far", "1e-3"], "name others with --results"),
        ([*start, query, *network[1:], "--sheet", str(tmp_path / "no" / "s.png")], "--sheet: there is no folder"),
        ([*start, query, *network[1:], "--json", str(tmp_path / "no" / "s.json")], "--json: there is no folder"),
    ):
        capsys.readouterr()
        assert search.main(words) == 1, words
        out, err = capsys.readouterr()
        said = [line for line in err.splitlines() if line and "picture/s" not in line]
        assert len(said) == 1 and says in said[0] and ("no folder" in says) <= (out == "" and len(err.splitlines()) == 1)
