"""Videos: what is read of a file or camera, who is followed, whom a track resembles, and that a hostile file is one line."""

import itertools
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from gallery_runs import write_network
from pictures import picture
from tiny_detectors import OFFSETS, RED, write_detector

from deploy import FaceNetwork
from deploy.faces import tracks, video
from deploy.faces.detector import Face
from deploy.gallery.store import Gallery
from scripts.deploy import enrol, search
from utils.alignment import align

FPS, PEOPLE = 10, {"ann": 71, "bob": 72}
# stands for OpenCV in the process that reads: camera 7, and files of frames in one colour each
FAKE = """
import os, time, numpy as np
CAP_ANY, CAP_FFMPEG, COLOR_BGR2RGB = 0, 1900, 4
CAP_PROP_FRAME_HEIGHT, CAP_PROP_FRAME_WIDTH, CAP_PROP_FPS, CAP_PROP_FRAME_COUNT, CAP_PROP_POS_MSEC = range(5)
head, times, sizes, fault = eval(PLAN, dict(nan=float("nan"), inf=float("inf")))
cvtColor = lambda frame, how: np.ascontiguousarray(frame[..., ::-1])
class VideoCapture:
    def __init__(self, source, how):
        self.at, self.isOpened = -1, lambda: how == (CAP_ANY if source == 7 else CAP_FFMPEG)
    def get(self, what):
        return times[self.at] * 1000 if what == CAP_PROP_POS_MSEC else head[what]
    def grab(self):
        self.at += 1
        return self.at < len(times)
    def retrieve(self):
        exec(fault if self.at == 1 else "")
        return True, np.broadcast_to(np.array([0, 0, self.at], dtype=np.uint8), (*sizes[self.at % len(sizes)], 3))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the frames are that are read through the stand-in."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def read(source: int = 0, every: int = 1, **plan: Any) -> list[video.Frame]:
        plan = {"head": (4, 4, 10, 3), "times": (0, 1, 2), "sizes": ((4, 6),), "fault": ""} | plan
        (tmp_path / "cv2.py").write_text(FAKE.replace("PLAN", repr(repr((*plan.values(),)))))
        return list(video.read_frames(source or tmp_path / "cv2.py", every))

    return read


def _draw(seed: int, faces: dict[str, int]) -> np.ndarray:
    """Return a frame (128, 384, 3) with faces, each a patch around the red square at (x, 56) that the detector finds."""
    pixels = cv2.resize(picture(seed), (384, 128))
    for name, x in faces.items():
        pixels[28:92, x - 28 : x + 36] = picture(PEOPLE[name], 64)
        pixels[56:64, x : x + 8] = np.array(RED) - ((x + 24) // 24 % 3 * 5, 0, 0)  # so the scores of the detector differ
    return pixels


def _write(path: Path, frames: list[np.ndarray]) -> Path:
    """Write a video without loss."""
    writer = cv2.VideoWriter(str(path), cv2.CAP_FFMPEG, cv2.VideoWriter_fourcc(*"FFV1"), FPS, frames[0].shape[1::-1])
    if not writer.isOpened():
        pytest.skip("this OpenCV has no FFmpeg that writes FFV1")
    for frame in frames:
        writer.write(np.ascontiguousarray(frame[..., ::-1]))
    writer.release()
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], Path]:
    """A folder with a gallery of two people, the words of its network, and its detector."""
    folder = tmp_path_factory.mktemp("place")
    network, detector = write_network(folder / "weights.pt", size=112), write_detector(folder / "d.onnx", "scrfd")
    for name in PEOPLE:
        (folder / "people" / name).mkdir(parents=True)
        cv2.imwrite(str(folder / "people" / name / "0.png"), _draw(9, {name: 160})[..., ::-1])
    words = [network[0], str(folder / "p.gallery"), str(folder / "people"), *network[1:], "--detector", str(detector)]
    assert enrol.main(words) == 0
    return folder, network, detector


# ann and bob cross, and he covers her; the scene is cut, with bob where he was; he leaves, and is back after a second
STORY = [(1, {"ann": 32 + 8 * i, "bob": 336 - 8 * i}) for i in range(30)]
STORY += [(2, {"bob": 104})] * 6 + [(2, {})] * 12 + [(2, {"bob": 104})] * 5
TRACKS = [("bob", [*range(30)]), ("ann", [i for i in range(30) if abs(304 - 16 * i) >= 36])]
TRACKS += [("bob", [*range(30, 36)]), ("bob", [*range(48, 53)])]


def test_tracks_and_answers_are_those_of_a_slow_search(
    place: tuple[Path, list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, network, detector = place
    frames, outs = [_draw(*one) for one in STORY], [tmp_path / f"{number}.json" for number in range(3)]
    clip, sheets = _write(tmp_path / "a.avi", frames), [tmp_path / f"{number}.png" for number in range(3)]
    for out, sheet, words in zip(outs, sheets, (["--threads", "1"], ["--threads", "3"], ["--every", "2"]), strict=True):
        words += ["--threshold", "0.5", "--sheet", str(sheet), "--json", str(out)]
        assert search.main([str(folder / "p.gallery"), str(clip), *words]) == 0
    said = capsys.readouterr()
    assert outs[0].read_bytes() == outs[1].read_bytes() and "53/53" in said.err
    sizes = {"backbone": "shallow", "width": 0.125, "embedding_size": 16, "image_size": 112}
    reference = FaceNetwork(network[0], **sizes, device="cpu", detector=detector)
    with Gallery(folder / "p.gallery") as gallery, gallery.reading():
        rows = np.concatenate(list(gallery.searcher().vectors())).astype(float)
        people = {one.person: row for one, row in zip(gallery.images(), rows, strict=True)}
    found = json.loads(outs[0].read_text())["queries"]
    for number, (query, (name, seen)) in enumerate(zip(found, TRACKS, strict=True)):
        assert (query["first"], query["last"], query["faces"]) == (seen[0] / FPS, seen[-1] / FPS, len(seen)) and query["known"]
        best: dict[int, tuple[Face, int]] = {}  # by quarter of a second; all are of one size and wholly inside
        for i in seen:
            faces, middle = reference._detector.detect(frames[i]), STORY[i][1][name] + 3.5
            face = next(face for face in faces if abs(face.points[:, 0].mean() - middle) < 1)
            if (quarter := int(i / FPS * 4)) not in best or face.score > best[quarter][0].score:
                best[quarter] = face, i
        kept = sorted(best.values(), key=lambda one: -one[0].score)[: tracks.KEPT]
        crops = [align(frames[i], face.points, 112, True) for face, i in kept]
        raw = [reference._embedder.embed(crop[None])[0].astype(float) for crop in crops]
        pooled = np.sum([face.score * row for (face, _), row in zip(kept, raw, strict=True)], axis=0)
        cosines = {who: row @ pooled / np.linalg.norm(row) / np.linalg.norm(pooled) for who, row in people.items()}
        assert query["picture"] == "a.avi" and query["matches"][0]["person"] == name
        assert all(abs(one["cosine"] - cosines[one["person"]]) < 1e-6 for one in query["matches"])
        row = np.split(cv2.imread(str(sheets[0]))[..., ::-1], 4)[number][:112]
        assert np.array_equal(row[:, 4:116], crops[0]) and (row[:, 144:147] == (0, 200, 0)).all()
    assert "a.avi, 0:00:00-0:00:02, 30 faces: match: bob\n" in said.out
    half = [query["faces"] for query in json.loads(outs[2].read_text())["queries"]]
    assert half == [sum(i % 2 == 0 for i in seen) for _, seen in TRACKS]


def test_faces_are_followed_as_by_trying_all_assignments(monkeypatch: pytest.MonkeyPatch):
    """A face is (x, y, look), its box has 40 pixels; a track is [first, last, count, number, place, speed, look]."""
    monkeypatch.setattr(tracks, "_look", lambda pixels, box: 1000 * np.eye(4)[looks.get(float(box[0]), 0)])
    rng, looks, total = np.random.default_rng(0), {}, 0

    def gain(track: list, face: tuple[np.ndarray, int], number: int) -> float:
        shared = np.maximum(0, 40 - abs(track[4] + track[5] * (number - track[3]) - face[0])).prod()
        overlap = shared / (2 * 1600 - shared)
        return overlap + 1 if overlap >= 0.2 and track[6] == face[1] else 0

    for _ in range(5):
        starts, speeds = rng.uniform(60, 120, (4, 2)), rng.uniform(-4, 4, (4, 2))
        times = np.cumsum(rng.choice([0.04, 0.2, 1.1], 60, p=[0.6, 0.37, 0.03])).tolist()
        going, ended, tracker, found = [], [], tracks.Tracker(8), []
        for number, time in enumerate(times):
            seen = [(starts[who] + number * speeds[who], who % 2) for who in rng.permutation(4) if rng.random() < 0.8]
            ended += [track for track in going if time - track[1] > 1]
            going = [track for track in going if time - track[1] <= 1]
            choices = itertools.permutations([*range(len(seen)), *[-1] * len(going)], len(going))
            gains = [[gain(track, face, number) for face in seen] + [0] for track in going]
            best = max(set(choices), key=lambda chosen: sum(row[face] for row, face in zip(gains, chosen, strict=True)))
            used = {face for row, face in zip(gains, best, strict=True) if row[face]}
            for track, which in zip(going, best, strict=True):
                if which in used:
                    moved = (seen[which][0] - track[4]) / (number - track[3])
                    speed = moved if track[2] == 1 else (track[5] + moved) / 2
                    track[1:6] = [time, track[2] + 1, number, seen[which][0], speed]
            going += [[time, time, 1, number, place, 0, look] for i, (place, look) in enumerate(seen) if i not in used]
            looks |= {float(place[0] - 20): look for place, look in seen}
            faces = [Face(np.array([*(at - 20), *(at + 20)]), OFFSETS + at, 0.9) for at, _ in seen]
            found += tracker.update(video.Frame(number, time, np.zeros((4, 4, 3), dtype=np.uint8), 0), faces)
        assert [tuple(one.span) for one in found + tracker.tracks] == [tuple(one[:3]) for one in ended + going]
        total += len(found)
    assert total > 10


def test_the_best_face_of_each_quarter_of_a_second_is_kept_and_memory_is_bounded():
    rng, pixels, peaks = np.random.default_rng(0), np.zeros((100, 100, 3), dtype=np.uint8), []
    for count in (200, 800):
        scores, frames = rng.integers(1, 30, count) / 30, [video.Frame(i, i * 0.03, pixels, 0) for i in range(count)]
        tracemalloc.start()
        tracker = tracks.Tracker(112)
        for frame, score in zip(frames, scores, strict=True):
            x = 50 if count == 200 else 40 + 20 * (frame.number // 40 % 2)  # the second time it jumps, and tracks end
            tracker.update(frame, [Face(np.array([x - 5, 45, x + 5, 55]), OFFSETS + np.array([x, 50.0]), float(score))])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        if count == 200:
            best = [max(scores[i] for i in range(count) if int(frames[i].time * 4) == part) for part in range(24)]
            kept = [score for track in tracker.tracks for _, score, _ in track.kept.values()]
            assert sorted(kept) == sorted(best)[-tracks.KEPT :]
    assert peaks[1] < 3 * peaks[0]


def test_times_rise_whatever_the_file_says(fake: Any):
    nan, inf = float("nan"), float("inf")
    for rate, step in ((10, 0.1), (0, 0.04), (nan, 0.04), (-5, 0.04), (1e9, 0.04)):
        frames = fake(head=(4, 4, rate, 1e18), times=(nan, 0.0, -7.0, 1e300, 9.0, 8.0, inf))
        expected = [0, step, 2 * step, 3 * step, 9, 9 + step, 9 + 2 * step]
        assert [round(frame.time, 9) for frame in frames] == [round(time, 9) for time in expected]
        assert {frame.claimed for frame in frames} == {0}
    frames = fake(every=2, times=(0.0,) * 5, sizes=((4, 6), (1, 1), (9, 2)))
    assert [(frame.number, frame.time, frame.claimed) for frame in frames] == [(0, 0.0, 3), (2, 0.2, 3), (4, 0.4, 3)]
    assert [frame.pixels.shape for frame in frames] == [(4, 6, 3), (9, 2, 3), (1, 1, 3)]
    assert [frame.pixels[0, 0].tolist() for frame in frames] == [[number, 0, 0] for number in (0, 2, 4)]  # red comes first


def test_whatever_the_decoder_does_is_one_error(fake: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(video, "_READER", video._READER.replace(f"alarm({video._PATIENCE})", "alarm(3)"))
    for plan, says in (
        ({"head": (60000, 60000, 10, 10**6)}, "a frame may have 36,000,000 pixels"),
        ({"head": (float("nan"), 4, 10, 3)}, "a frame may have 36,000,000 pixels"),
        ({"sizes": ((4, 4), (60000, 60000))}, "a frame may have 36,000,000 pixels|OpenCV fails on it"),
        ({"fault": "os.kill(os.getpid(), 11)"}, r"OpenCV fails on it \(SIGSEGV\); it is damaged"),
        ({"fault": "bytearray(9 << 30)"}, r"OpenCV fails on it \(exit status 1\)"),  # more than it may have
        ({"fault": "time.sleep(60)"}, "no frame came within 120 seconds; it is damaged"),
        ({"source": 6}, "cannot be opened: damaged, or neither a camera"),
    ):
        with pytest.raises(ValueError, match=says):
            fake(**plan)
    assert [frame.number for frame in fake(source=7)] == [0, 1, 2]


def test_hostile_files_are_rejected_beside_a_good_one_and_ctrl_c_ends_a_camera(
    place: tuple[Path, list[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    start, out, still = [str(place[0] / "p.gallery")], tmp_path / "out.json", place[0] / "people" / "ann" / "0.png"
    good = _write(tmp_path / "ann.avi", [_draw(1, {"ann": 80 + 8 * i}) for i in range(12)])
    (tmp_path / "ann.png").write_bytes(still.read_bytes())
    data, names = good.read_bytes(), f"ffconcat version 1.0\nfile {good.name}\n".encode()  # a file that names another one
    closed = {"empty.avi": b"", "noise.mp4": data[::-1], "still.mp4": still.read_bytes(), "names.mp4": names}
    reasons = dict.fromkeys(closed, "cannot be opened") | {"ann.cut.avi": "of its 12 frames can", "no.avi": "no face found"}
    for name, content in (closed | {"ann.cut.avi": data[: len(data) // 2]}).items():
        (tmp_path / name).write_bytes(content)
    _write(tmp_path / "no.avi", [_draw(1, {})] * 3)
    files = [good, tmp_path / "ann.png", *(tmp_path / name for name in reasons)]
    words = [*map(str, files), "--labelled", "--person-from", "^([a-z]+)", "--json", str(out)]
    assert search.main([*start, *words]) == 0
    found = json.loads(out.read_text())
    for one, (name, reason) in zip(found["rejected"], reasons.items(), strict=True):
        assert one["picture"] == str(tmp_path / name) and reason in one["reason"]
    assert found["rates"]["queries_of_enrolled_people"] == 3 and found["rates"]["rank_1"] == 1.0  # the half of a clip is one
    said = capfd.readouterr()
    assert "OpenCV" not in said.err and said.out.count("rejected: ") == 6  # three, one line for the fourth like them, and two
    for more in (["--which", "only", str(good)], [str(tmp_path / "none.avi")], [str(tmp_path / "no.avi")]):
        assert search.main([*start, *more]) == 1 and capfd.readouterr().err.count("error: ") == 1

    update, frames = tracks.Tracker.update, []

    def interrupt(self: tracks.Tracker, frame: video.Frame, faces: list[Face]) -> list[tracks.Track]:
        frames.append(frame)
        if len(frames) % 5 == 0:
            raise KeyboardInterrupt
        return update(self, frame, faces)

    monkeypatch.setattr(tracks.Tracker, "update", interrupt)
    monkeypatch.setattr("deploy.gallery.report.read_frames", lambda source, every: video.read_frames(good))
    for camera, status in (([str(good)], 130), (["--camera", "7"], 0)):
        assert search.main([*start, *camera, "--json", str(out)]) == status
    assert [query["faces"] for query in json.loads(out.read_text())["queries"]] == [4]
    assert capfd.readouterr().out.count("camera 7, 0:00:00-0:00:00, 4 faces\n") == 1
    with pytest.raises(SystemExit):
        search.main([])
