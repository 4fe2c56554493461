"""From photographs to a gallery through the programs: detect, align again, embed, enrol, search, verify."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from gallery_runs import SIZE, write_network
from pictures import picture as drawn
from tiny_detectors import OFFSETS, picture, write_detector

from deploy.gallery.store import Gallery
from scripts.data import align
from scripts.deploy import detect, embed, enrol, search, verify
from utils.alignment import align as aligned

PEOPLE, PATCH = 4, 72  # the aligned face has 64 pixels of the photograph


def _photograph(person: int, x: int, y: int) -> np.ndarray:
    """Return a gray picture of a drawn face whose middle is in the cell (8, 8) at (x, y), where detectors see a red square."""
    pixels = picture(176, 240, (x, y))
    left, top = x + 4 - PATCH // 2, y + 4 - PATCH // 2
    square = pixels[y : y + 8, x : x + 8].copy()
    pixels[top : top + PATCH, left : left + PATCH] = drawn(person, PATCH)
    pixels[y : y + 8, x : x + 8] = square
    return pixels


@pytest.mark.parametrize("form", ["scrfd", "yunet", "centerface"])
def test_photographs_become_a_gallery_that_finds_their_people(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words, *more = write_network(tmp_path / "weights.pt")
    more += ["--detector", str(write_detector(tmp_path / "detector.onnx", form))]
    places = {"people": (80, 64), "queries": (136, 96)}
    for folder, (x, y) in places.items():
        for person in range(PEOPLE):
            path = tmp_path / folder / f"person {person}" / f"{folder}.png"
            path.parent.mkdir(parents=True)
            cv2.imwrite(str(path), _photograph(person, x, y)[:, :, ::-1])
    people, queries, gallery = (str(tmp_path / name) for name in ("people", "queries", "gallery"))

    assert detect.main([people, str(tmp_path / "crops"), *more[-2:], "--size", str(SIZE)]) == 0
    landmarks = str(tmp_path / "crops" / "landmarks.csv")
    assert align.main([people, landmarks, str(tmp_path / "again"), "--size", str(SIZE), "--upright", "--listed"]) == 0
    crops = sorted((tmp_path / "crops").rglob("*.jpg"))
    assert len(crops) == PEOPLE
    for path in crops:
        assert path.read_bytes() == (tmp_path / "again" / path.relative_to(tmp_path / "crops")).read_bytes()

    vectors = []
    for folder in (people, queries):
        assert embed.main([words, folder, *more, "--out", f"{folder}.npy", "--processes", "1"]) == 0
        vectors.append(np.load(f"{folder}.npy").astype(np.float64))
    assert enrol.main([words, gallery, people, *more]) == 0
    with Gallery(Path(gallery)) as opened:
        for image in opened.images():
            person = int(image.person.split()[1])
            middle = np.array(places["people"]) + 3.5
            expected = aligned(_photograph(person, *places["people"]), middle + OFFSETS, SIZE, smooth=True)
            stored = opened.picture(image.number)
            assert stored is not None and np.abs(stored.astype(int) - expected).max() <= 2

    found = tmp_path / "found.json"
    assert search.main([words, gallery, queries, *more, "--labelled", "--k", str(PEOPLE), "--json", str(found)]) == 0
    assert "rank 1                            100.00 %" in capsys.readouterr().out
    for number, query in enumerate(json.loads(found.read_text())["queries"]):
        assert query["matches"][0]["person"] == f"person {number}" == query["picture"].split("/")[0]
        cosines = {match["person"]: match["cosine"] for match in query["matches"]}
        expected = vectors[0] @ vectors[1][number]
        np.testing.assert_allclose([cosines[f"person {person}"] for person in range(PEOPLE)], expected, atol=1e-5)

    threshold = str((1 + np.sort((vectors[0] @ vectors[1].T).ravel())[-PEOPLE - 1]) / 2)  # all pairs of one person are above
    pictures = [f"{people}/person 0/people.png", f"{queries}/person 0/queries.png", f"{queries}/person 1/queries.png"]
    for second, status in ((1, 0), (2, verify.DIFFERENT)):
        assert verify.main([words, pictures[0], pictures[second], *more, "--threshold", threshold]) == status
