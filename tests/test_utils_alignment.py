"""Alignment against transforms that are known, a least squares solver, and a slow warp."""

import csv
import os
from pathlib import Path

import cv2
import numpy as np
import pytest

from utils.alignment import TEMPLATE, align, similarity_transform

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("seed", range(5))
def test_a_known_similarity_is_found_exactly(seed: int):
    rng = np.random.default_rng(seed)
    angle, scale, shift = rng.uniform(-3, 3), rng.uniform(0.1, 10), rng.uniform(-100, 100, 2)
    rotation = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    points = rng.uniform(0, 300, (5, 2))
    found = similarity_transform(points, points @ rotation.T + shift)
    np.testing.assert_allclose(found, np.column_stack([rotation, shift]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_noisy_points_get_the_least_squares_solution(seed: int):
    points = np.random.default_rng(seed).uniform(0, 112, (5, 2))
    rows, values = [], []
    for (x, y), (u, v) in zip(points, TEMPLATE, strict=True):  # u = a x - b y + c, v = b x + a y + d
        rows += [[x, -y, 1, 0], [y, x, 0, 1]]
        values += [u, v]
    a, b, c, d = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0]
    np.testing.assert_allclose(similarity_transform(points, TEMPLATE), [[a, -b, c], [b, a, d]], rtol=1e-8, atol=1e-8)


def test_a_face_that_is_aligned_stays_as_it_is():
    image = np.random.default_rng(0).integers(0, 256, (112, 112, 3)).astype(np.uint8)
    for smooth in (False, True):
        np.testing.assert_array_equal(align(image, TEMPLATE, smooth=smooth), image)


@pytest.mark.parametrize("shrink", [1.7, 2.0, 4.3, 9.0])
def test_smooth_shrinking_averages_what_falls_together(shrink: float):
    size = int(112 * shrink)
    y, x = np.mgrid[:size, :size]
    waves = 127 + 90 * np.sin(x / size * 40) * np.cos(y / size * 31)
    stripes = 30 * ((x + y) % 2 * 2 - 1)  # finer than the result can show: they must vanish
    image = np.repeat((waves + stripes).clip(0, 255).astype(np.uint8)[:, :, None], 3, axis=2)
    points = (TEMPLATE + 0.5) * (size / 112) - 0.5
    expected = cv2.resize(waves.astype(np.float32), (112, 112), interpolation=cv2.INTER_AREA)
    smooth, plain = (align(image, points, smooth=flag)[4:-4, 4:-4, 0] for flag in (True, False))
    error = np.abs(smooth - expected[4:-4, 4:-4]).mean()
    assert error < 2.5
    assert error < np.abs(plain - expected[4:-4, 4:-4]).mean() + 0.1  # at 2.0 the four nearest are all there are


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (np.full((5, 2), 7.0), "must differ, but all lie at"),
        (np.full((5, 2), np.nan), "finite"),
        (TEMPLATE[[3, 4, 2, 0, 1]], "no face"),
        (TEMPLATE[:, ::-1], "no face"),
    ],
)
def test_points_that_are_no_face_are_refused(points: np.ndarray, message: str):
    with pytest.raises(ValueError, match=message):
        align(np.zeros((200, 200, 3), np.uint8), points)


def test_real_photographs_align_as_their_publisher_aligned_them():
    folder = Path(os.environ.get("FACE_ORACLE", "/none")) / "london"
    if not folder.is_dir():
        pytest.skip("FACE_ORACLE does not name a folder with the London set")
    differences = []
    for row in list(csv.reader((folder / "landmarks5_loose.csv").read_text().splitlines()))[1:]:
        name = f"{row[0]}_{row[1]}.jpg"
        loose, points = cv2.imread(str(folder / "loose" / name)), np.array(row[2:], float).reshape(5, 2)
        face = align(loose, points, smooth=True)
        inside = align(np.full_like(loose, 255), points)[:, :, 0] == 255  # the loose crop may end before the face does
        written = cv2.imdecode(cv2.imencode(".jpg", face, [cv2.IMWRITE_JPEG_QUALITY, 95])[1], cv2.IMREAD_GRAYSCALE)
        published = cv2.imread(str(folder / "aligned112" / name), cv2.IMREAD_GRAYSCALE)
        differences.append(np.abs(written.astype(int) - published)[inside].mean())
    assert len(differences) == 204
    assert np.mean(differences) < 1.0, np.mean(differences)
