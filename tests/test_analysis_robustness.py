"""Hard versions of faces against slow formulas, and accuracy on them against sets that were degraded beforehand."""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from faulty_disk import interrupted
from tiny_runs import blank_pictures, face, write_bin

import analysis.robustness
from analysis.degrade import KINDS, degrade, parse_kinds
from backbones import build_backbone
from eval.__main__ import main as evaluate
from eval.pair_sets.bin_file import read_pairs
from scripts.analysis import robustness
from utils.alignment import TEMPLATE
from utils.checkpoint.tensor_file import read_tensors, write_tensors
from utils.image import to_png

RANDOM = ("masked", "occluded", "motion", "noise", "rotated", "shifted", "scaled")


def _picture(seed: int, side: int = 112) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return cv2.resize(rng.integers(60, 200, (9, 9, 3), dtype=np.uint8), (side, side), interpolation=cv2.INTER_CUBIC)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_a_function_of_picture_and_seed_and_loses_more_with_strength(kind: str):
    lost = np.zeros(len(KINDS[kind].strengths))
    for number in range(6):
        pixels, encoded = _picture(number), bytes([number])
        before = pixels.copy()
        assert np.array_equal(degrade(pixels, kind, 0, encoded), before)
        for place, strength in enumerate(KINDS[kind].strengths):
            found = degrade(pixels, kind, strength, encoded, 3)
            assert found.shape == pixels.shape and found.dtype == np.uint8 and np.array_equal(pixels, before)
            assert np.array_equal(degrade(pixels, kind, strength, encoded, 3), found)
            lost[place] += np.abs(found.astype(float) - pixels).mean()
    assert (np.diff(lost) > 0).all() and lost[0] > 0
    versions = {degrade(before, kind, KINDS[kind].strengths[-1], bytes([n]), n).tobytes() for n in range(12)}
    assert (len(versions) > 1) == (kind in RANDOM)


def _changed(kind: str, strength: float, point: np.ndarray) -> bool:
    pixels = np.full((112, 112, 3), 99, np.uint8)
    column, row = np.round(point).astype(int)
    return bool((degrade(pixels, kind, strength, b"")[row, column] != 99).all())


def test_masks_and_boxes_cover_the_landmarks_that_they_are_for():
    eyes, nose, mouth = TEMPLATE[:2], TEMPLATE[2:3], TEMPLATE[3:]
    covered = {
        ("masked", 1.0): (False, True, True),
        ("masked", 0.5): (False, False, True),
        ("eyes", 0.6): (True, False, False),
        ("mouth", 0.6): (False, False, True),
    }
    for (kind, strength), expected in covered.items():
        for points, is_covered in zip((eyes, nose, mouth), expected, strict=True):
            assert [_changed(kind, strength, point) for point in points] == [is_covered] * len(points), (kind, strength)


def test_low_resolution_light_and_compression_are_those_of_the_formulas():
    pixels = _picture(1)
    blocks = np.rint(pixels.reshape(14, 8, 14, 8, 3).mean(axis=(1, 3))).astype(np.uint8)
    expected = cv2.resize(blocks, (112, 112), interpolation=cv2.INTER_CUBIC)
    assert np.abs(degrade(pixels, "low_resolution", 14, b"").astype(int) - expected).max() <= 2  # means of x.5 round either way
    assert np.array_equal(degrade(pixels, "low_resolution", 112, b""), pixels)
    for kind, sign in (("dark", -1), ("bright", 1)):
        linear = (pixels / 255) ** 2.2 * 2.0 ** (sign * 1.5)
        found = degrade(pixels, kind, 1.5, b"").astype(float)
        assert np.abs(found - 255 * np.minimum(1, linear) ** (1 / 2.2)).max() <= 1.5
    jpeg = cv2.imencode(".jpg", pixels[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, 20])[1]
    assert np.array_equal(degrade(pixels, "jpeg", 20, b""), cv2.imdecode(jpeg, cv2.IMREAD_COLOR)[:, :, ::-1])
    flat = np.full((112, 112, 3), 128, np.uint8)
    noise = degrade(flat, "noise", 20, b"").astype(float) - 128
    assert abs(noise.mean()) < 5 * 20 / 37_632**0.5 and noise.std() == pytest.approx(20, rel=5 / (2 * 37_632) ** 0.5)


def test_noise_is_the_same_with_every_version_of_numpy():
    flat = np.full((112, 112, 3), 128, np.uint8)
    assert degrade(flat, "noise", 20, b"a", 3).ravel()[:8].tolist() == [114, 131, 154, 118, 140, 144, 193, 137]


@pytest.mark.parametrize("name", [b"a", b"b", b"c", b"d"])
def test_a_line_of_motion_and_a_rotation_are_as_long_as_they_say(name: bytes):
    point = np.zeros((112, 112, 3), np.uint8)
    point[55:57, 55:57] = 255
    line = degrade(point, "motion", 15, name).astype(float).sum(axis=2)
    rows, columns = np.nonzero(line > 0.2 * line.max())
    assert np.hypot(np.ptp(rows), np.ptp(columns)) == pytest.approx(15, abs=2.5)
    dot = np.zeros((112, 112, 3), np.uint8)
    dot[20:23, 55:57] = 255  # 34.5 pixels above the middle
    found = degrade(dot, "rotated", 30, name).astype(float).sum(axis=2)
    centre = (found.sum(axis=0) @ np.arange(112), found.sum(axis=1) @ np.arange(112)) / found.sum()
    assert np.hypot(*(centre - 55.5)) == pytest.approx(34.5, abs=0.5)
    angle = np.degrees(np.arctan2(centre[0] - 55.5, 55.5 - centre[1]))
    assert abs(angle) == pytest.approx(30, abs=1)
    moved = degrade(dot, "shifted", 0.1, name).astype(float).sum(axis=2)
    centre = (moved.sum(axis=0) @ np.arange(112), moved.sum(axis=1) @ np.arange(112)) / moved.sum()
    assert np.hypot(centre[0] - 55.5, centre[1] - 21) == pytest.approx(11.2, abs=0.5)


@pytest.mark.parametrize("sigma", [1, 2, 3])
def test_a_blur_is_the_sum_over_a_gaussian(sigma: int):
    pixels = np.random.default_rng(0).integers(60, 200, (112, 112, 3), dtype=np.uint8)
    weights = np.exp(-((np.arange(112)[:, None] - np.arange(112)) ** 2) / (2 * sigma**2))
    weights /= weights.sum(axis=1, keepdims=True)
    expected = np.einsum("yr,rxc,zx->yzc", weights, pixels.astype(float), weights, optimize=True)
    inner = slice(4 * sigma, -4 * sigma)  # away from the border, whose pixels are mirrored
    error = degrade(pixels, "blur", sigma, b"").astype(float)[inner, inner] - expected[inner, inner]
    # along each axis: weights of 8 fractional bits, and what a Gaussian has beyond three sigma; of half the range
    assert np.abs(error).max() <= 0.5 + 2 * 70 * ((6 * sigma + 1) / 512 + 2 * 0.0027)


def test_an_occlusion_is_a_gray_box_of_its_side_somewhere_inside():
    pixels, corners = np.full((112, 112, 3), 40, np.uint8), []
    for number in range(40):
        found = degrade(pixels, "occluded", 0.4, bytes([number]))
        rows, columns = np.nonzero((found == 127).all(axis=2))
        assert np.ptp(rows) == np.ptp(columns) == 44 and len(rows) == 45**2 and (found == 40).sum() == 3 * (112**2 - 45**2)
        corners.append((rows[0], columns[0]))
    assert (np.ptp(corners, axis=0) > 34).all()  # of 67; the chance that 40 places are in one half is below 1e-9


def test_a_scaled_face_is_larger_or_smaller_about_its_middle_and_black_around_it():
    dots, sizes = np.full((112, 112, 3), 30, np.uint8), set()
    dots[26:28, 55:57] = dots[84:86, 55:57] = 255  # 29 pixels above and below the middle
    for number in range(12):
        found = degrade(dots, "scaled", 0.25, bytes([number])).astype(float).sum(axis=2)
        rows = np.where(found > 200, found - 90, 0).sum(axis=1)
        above, below = (rows[half] @ np.arange(112)[half] / rows[half].sum() for half in (slice(56), slice(56, 112)))
        assert above + below == pytest.approx(111, abs=0.2)
        sizes.add(round((below - above) / 58, 2))
        assert (found[0] == 0).all() == (below - above < 58)
    assert sorted(sizes) == pytest.approx([1 / 1.25, 1.25], abs=0.01)


def test_a_shifted_face_leaves_black_behind():
    rows, columns = np.nonzero(degrade(np.full((112, 112, 3), 255, np.uint8), "shifted", 0.2, b"a").all(axis=2))
    moved = 111 - np.ptp(rows), 111 - np.ptp(columns)
    assert np.hypot(*moved) == pytest.approx(0.2 * 112, abs=1.5) and len(rows) == (112 - moved[0]) * (112 - moved[1])


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["fog"], "there is no kind 'fog'"),
        (["jpeg=x"], r"jpeg \(quality\) must be 0 or whole numbers from 1 to 95"),
        (["jpeg=96"], "from 1 to 95"),
        (["jpeg=5.9"], "whole numbers from 1 to 95, .*'jpeg=5.9'"),
        (["low_resolution=7.5"], "whole numbers from 1 to"),
        (["blur=nan"], "0 or from 0.2"),
    ],
)
def test_kinds_that_are_none_are_refused(texts: list[str], reason: str, capsys: pytest.CaptureFixture[str]):
    assert robustness.main(["net", "--targets", "lfw", "--out", "nowhere", "--kinds", *texts]) == 1
    assert re.fullmatch(f"error: --kinds: .*{reason}.*\n", capsys.readouterr().err)


def test_kinds_have_the_given_or_their_own_strengths():
    found = parse_kinds(["blur=1.5,2", "jpeg=0,5", "masked", "blur=4,2"])  # a kind that is named twice has all of its strengths
    assert found == {"blur": (1.5, 2.0, 4.0), "jpeg": (0.0, 5.0), "masked": KINDS["masked"].strengths}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a folder with weights and a set of pairs, `clean`, and the words of a command line that name the network."""
    folder = tmp_path_factory.mktemp("hard")
    torch.manual_seed(0)
    write_tensors(folder / "net.safetensors", build_backbone("shallow", 16, 0.125, image_size=48).state_dict())
    same = [bool(pair % 2) for pair in range(20)]
    images = [face(50 + pair + (side and not same[pair]), 2 * pair + side) for pair in range(20) for side in (0, 1)]
    write_bin(folder / "clean.bin", images, same)
    flags = ["--backbone=shallow", "--width=0.125", "--embedding-size=16", "--image-size=48", "--device=cpu"]
    return folder, [str(folder / "net.safetensors"), *flags]


def _distances(weights: Path, path: Path) -> list[float]:
    """Return the squared distance of each pair of a set, one picture after the other."""
    model, pairs = build_backbone("shallow", 16, 0.125, image_size=48).eval(), read_pairs(path)
    model.load_state_dict(read_tensors(weights))

    def embedded(index: int) -> torch.Tensor:
        pixels = torch.from_numpy((pairs.decode(index, 48).transpose(2, 0, 1) - 127.5) / 127.5)[None].float()
        return torch.nn.functional.normalize(model(torch.cat([pixels, pixels.flip(3)])).sum(0).double(), dim=0)

    with torch.inference_mode():
        return [float((embedded(a) - embedded(b)).square().sum()) for a, b in zip(pairs.first, pairs.second, strict=True)]


@pytest.mark.numeric
@pytest.mark.parametrize("both", [False, True])
def test_the_program_scores_as_sets_that_were_degraded_beforehand(place: tuple[Path, list[str]], tmp_path: Path, both: bool):
    folder, words = place
    pairs = read_pairs(folder / "clean.bin")
    more = ["--both"] if both else []
    kinds = ["--kinds", "noise=0,40", "masked=1", "--seed", "5"]
    targets = ["--targets", "clean", "--data", str(folder)]
    with blank_pictures() if both else nullcontext():
        assert robustness.main([*words, *targets, *kinds, *more, "--out", str(tmp_path / "out")]) == 0
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert [(row["kind"], row["strength"]) for row in rows] == [("clean", 0), ("noise", 0), ("noise", 40), ("masked", 1)]
    limit = 0.0
    for number, row in enumerate(rows):
        stored = []
        for index, encoded in enumerate(pairs.images):
            pixels = pairs.decode(index)
            if row["strength"] and (both or index % 2):
                pixels = degrade(pixels, row["kind"], row["strength"], encoded, 5)  # at 112, although the input is 48
            stored.append(to_png(pixels))
        write_bin(tmp_path / f"set{number}.bin", stored, [bool(pair % 2) for pair in range(20)])
        report = tmp_path / f"report{number}"
        words_of_eval = ["--targets", str(tmp_path / f"set{number}.bin"), "--report", str(report)]
        with blank_pictures():
            assert evaluate([*words, *words_of_eval]) == 0
        expected = json.loads((report / "results.json").read_text())[f"set{number}"]
        point = next(point for point in expected["operating_points"] if point["target"] == "1e-1")  # 10 impostor pairs
        limit = point["squared_distance_threshold"] if number == 0 else limit
        accepted = np.array(_distances(folder / "net.safetensors", tmp_path / f"set{number}.bin")) < limit
        genuine = np.arange(20) % 2 == 1
        for column, value in {
            "accuracy": expected["accuracy"],
            "accuracy_std": expected["accuracy_std"],
            "eer": expected["eer"],
            "tar": point["tar"],
            "tar_at_clean_threshold": accepted[genuine].mean(),
            "far_at_clean_threshold": accepted[~genuine].mean(),
        }.items():
            assert row[column] == pytest.approx(value, abs=1e-9), (number, column)
        assert row["far"] == "1e-1"
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"report.html", "results.json", "results.csv", "accuracy_clean.png", "pictures_clean.png"}


@pytest.mark.usefixtures("blank")
def test_a_run_that_was_stopped_goes_on_and_another_seed_does_not_take_its_rows(
    place: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, words = place
    words = [*words, "--targets", str(folder / "clean.bin"), "--kinds", "noise=40,60", "dark=4"]
    assert robustness.main([*words, "--out", str(tmp_path / "whole")]) == 0
    measured: list[float] = []

    def counted(pixels: np.ndarray, kind: str, strength: float, encoded: bytes, seed: int) -> np.ndarray:
        measured.append(strength)
        return degrade(pixels, kind, strength, encoded, seed)

    here = [*words, "--out", str(tmp_path / "part")]
    monkeypatch.setattr(analysis.robustness, "degrade", counted)
    with monkeypatch.context() as patch:
        interrupted(patch, [2])
        assert robustness.main(here) != 0
    assert set(measured) == {40} and [path.name for path in (tmp_path / "part").iterdir()] == ["unfinished"]
    shutil.copytree(tmp_path / "part", tmp_path / "seed")
    measured.clear()
    assert robustness.main(here) == 0 and set(measured[:40]) == {60, 4}  # the page has pictures of all
    whole, part = ((tmp_path / name / "results.json").read_text() for name in ("whole", "part"))
    assert part == whole and not (tmp_path / "part" / "unfinished").exists()
    measured.clear()
    assert robustness.main([*words, "--seed", "1", "--out", str(tmp_path / "seed")]) == 0 and measured[0] == 40
    assert robustness.main(here) == 1 and robustness.main([*here, "--again"]) == 0


@pytest.mark.usefixtures("blank")
def test_neither_the_order_of_kinds_nor_threads_change_a_row(place: tuple[Path, list[str]], tmp_path: Path):
    folder, words = place
    words = [*words, "--targets", str(folder / "clean.bin")]
    found = []
    for number, more in enumerate((["motion=9", "noise=40,20", "--threads=1"], ["noise=20,40", "motion=9", "--threads=5"])):
        assert robustness.main([*words, "--kinds", *more, "--out", str(tmp_path / str(number))]) == 0
        rows = json.loads((tmp_path / str(number) / "results.json").read_text())["results"]
        found.append({(row["kind"], row["strength"]): row for row in rows})
    assert len(found[0]) == 4 and found[0] == found[1]


def test_a_folder_with_files_is_refused(place: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, words = place
    (tmp_path / "mine.txt").write_text("mine")
    assert robustness.main([*words, "--targets", str(folder / "clean.bin"), "--out", str(tmp_path)]) == 1
    assert "--out must be a new or an empty folder" in capsys.readouterr().err
    assert robustness.main([words[0], *words, "--targets", str(folder / "clean.bin"), "--out", str(tmp_path / "new")]) == 1
    assert "a network is named twice" in capsys.readouterr().err
