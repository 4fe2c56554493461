"""Augmentations against slow references in plain numpy, and what may not change them: threads, processes, a resume."""

import itertools
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml
from pictures import picture

from data.augment import OPERATIONS, Augment
from data.datasets import SyntheticDataset
from data.loader import Loader
from data.sampler import SampleOrder

BASE = yaml.safe_load((Path(__file__).parent.parent / "configs" / "base.yaml").read_text())["augment"]
CPU = torch.device("cpu")


def _apply(name: str, pixels: np.ndarray, numbers: list[float], **section: float) -> np.ndarray:
    changed = pixels.copy()
    OPERATIONS[name](changed, np.array(numbers), {**BASE, **section})
    return changed


def test_everything_is_off_by_default_and_every_operation_has_its_keys():
    assert not Augment(BASE, 0)
    assert {name for name in BASE if name in OPERATIONS} == set(OPERATIONS)
    assert all(BASE[name] == 0 for name in OPERATIONS)


@pytest.mark.parametrize("seed", range(6))
def test_photometric_is_three_blends_in_any_order(seed: int):
    pixels, numbers = picture(seed), np.random.default_rng(seed).random(5)
    brightness, contrast, saturation = 1 + 0.3 * (2 * numbers[:3] - 1)
    weights = np.array([0.299, 0.587, 0.114])
    steps = (
        lambda x: brightness * x,
        lambda x: contrast * x + (1 - contrast) * (x @ weights).mean(),
        lambda x: saturation * x + (1 - saturation) * (x @ weights)[:, :, None],
    )
    found = _apply("photometric", pixels, numbers.tolist(), photometric_strength=0.3)
    for order in itertools.permutations(steps):
        expected = pixels.astype(np.float64)
        for step in order:
            expected = step(expected)
        assert np.abs(found - expected.clip(0, 255)).max() < 1  # OpenCV multiplies bytes in fixed point


@pytest.mark.parametrize("seed", range(20))
def test_crop_keeps_a_rectangle_where_it_is(seed: int):
    pixels = picture(seed) // 2 + 64  # nothing black
    found = _apply("crop", pixels, np.random.default_rng(seed).random(5).tolist())
    kept = found.any(axis=2)
    rows, columns = np.flatnonzero(kept.any(axis=1)), np.flatnonzero(kept.any(axis=0))
    inside = (slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
    assert kept[inside].all() and kept.sum() == kept[inside].size
    np.testing.assert_array_equal(found[inside], pixels[inside])
    height, width = kept[inside].shape
    assert height * width >= 0.19 * 112 * 112
    assert max(width / height, height / width) <= 1.36 or 112 in (height, width)


def test_crop_of_everything_changes_nothing():
    np.testing.assert_array_equal(_apply("crop", picture(0), [1 - 1e-9, 0.5, 0.3, 0.3, 0]), picture(0))


@pytest.mark.parametrize("down", range(5))
@pytest.mark.parametrize("up", range(5))
def test_low_resolution_goes_through_a_small_picture(down: int, up: int):
    found = _apply("low_resolution", picture(3), [0.0, (down + 0.5) / 5, (up + 0.5) / 5], low_resolution_side=0.25)
    kinds = (cv2.INTER_NEAREST, cv2.INTER_LINEAR, cv2.INTER_AREA, cv2.INTER_CUBIC, cv2.INTER_LANCZOS4)
    small = cv2.resize(picture(3), (28, 28), interpolation=kinds[down])
    np.testing.assert_array_equal(found, cv2.resize(small, (112, 112), interpolation=kinds[up]))


@pytest.mark.parametrize("number", [0.0, 0.4, 0.99])
def test_blur_is_a_gaussian(number: float):
    sigma = 0.2 + 1.8 * number
    pixels = np.zeros((112, 112, 3), np.uint8)
    pixels[56, 56] = 255
    steps = np.arange(112) - 56.0
    line = np.exp(-(steps**2) / (2 * sigma**2))
    line /= line.sum()
    expected = 255 * np.outer(line, line)[:, :, None]
    assert np.abs(_apply("blur", pixels, [number], blur_sigma=2.0) - expected).max() <= 3.0  # OpenCV cuts the tails off


def _moved(points: np.ndarray, numbers: np.ndarray, side: float) -> np.ndarray:
    """Return where `affine` moves points (n, 2) of a picture of this side, whose corner is the origin; y goes down."""
    angle, scale = np.radians(30.0 * (2 * numbers[0] - 1)), 1 + 0.3 * (2 * numbers[1] - 1)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])  # against the clock
    return (points - side / 2) @ (scale * turn).T + side / 2 + 0.2 * side * (2 * numbers[2:4] - 1)


@pytest.mark.parametrize("seed", range(5))
def test_affine_moves_every_point_as_its_numbers_say(seed: int):
    numbers, side, sigma = np.random.default_rng(seed).random(5), 96, 4.0
    centres = np.stack(np.meshgrid(*[np.arange(side) + 0.5] * 2), -1)  # of pixels: x, y
    given = np.array([[40.0, 50.0], [60.0, 45.0], [48.0, 62.0]])  # the spot of each channel
    bell = np.exp(-((centres[..., None, :] - given) ** 2).sum(-1) / (2 * sigma**2))
    keys = {"affine_degrees": 30, "affine_scale": 0.3, "affine_shift": 0.2}
    found = _apply("affine", (255 * bell).round().astype(np.uint8), numbers.tolist(), **keys)
    width = sigma * (1 + 0.3 * (2 * numbers[1] - 1))
    expected = 255 * np.exp(-((centres[..., None, :] - _moved(given, numbers, side)) ** 2).sum(-1) / (2 * width**2))
    # a bell is steepest at its sigma, 0.61 of its height a sigma; OpenCV rounds places to 1/32 of a pixel, and interpolates
    # linearly between pixels: an eighth of the largest second derivative, its height by sigma squared, along either axis
    assert np.abs(found - expected).max() <= 255 * (0.61 / width / 32 + 2 / 8 / sigma**2) + 1


class _Spots(SyntheticDataset):
    """Images of one white spot each, on which all five landmarks lie."""

    landmarks = np.random.default_rng(0).uniform(0.4, 0.6, (50, 1, 2)).repeat(5, axis=1).astype(np.float16)

    def decode_into(self, index: int, out: np.ndarray) -> int:
        side = len(out)
        steps = (np.arange(side) + 0.5) / side
        x, y = self.landmarks[index, 0].astype(np.float64)
        out[...] = (255 * np.exp(-((steps - x) ** 2 + (steps[:, None] - y) ** 2) / (2 * 0.05**2)))[..., None].round()
        return 0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_landmarks_go_where_affine_and_the_flip_put_them(share: float):
    augment = Augment({**BASE, "affine": share}, seed=2)
    order = SampleOrder(50, 24, 1, True)
    for batch in Loader(_Spots(10, 50, 0), order.samples, 0, 4, 2, 2, CPU, augment=augment):
        images = torch.where(batch.mirrored[:, None, None, None], batch.images.flip(2), batch.images)[..., 0].double()
        places = (torch.arange(112).double() + 0.5) / 112
        weights = images / images.sum((1, 2), keepdim=True)
        spots = torch.stack([(weights.sum(1) * places).sum(1), (weights.sum(2) * places).sum(1)], 1)
        assert (batch.landmarks - spots[:, None]).abs().max() < 1 / 32 / 112  # of which OpenCV rounds places to a half
        unmoved = torch.from_numpy(_Spots.landmarks[batch.indices, 0].astype(np.float64))
        unmoved[batch.mirrored, 0] = 1 - unmoved[batch.mirrored, 0]
        moved = ((unmoved - spots).abs() > 0.01).any(1).double().mean()
        assert share == 0.5 or moved == pytest.approx(share, abs=0.1)


def test_grayscale_has_equal_channels_and_cutout_covers_its_square():
    pixels = picture(2)
    gray = _apply("grayscale", pixels, [])
    assert (gray == gray[:, :, :1]).all()
    assert np.abs(gray[:, :, 0] - pixels @ np.array([0.299, 0.587, 0.114])).max() <= 0.6
    covered = _apply("cutout", pixels, [0.5, 0.99, 0.0, 1 - 1e-9, 0], cutout_side=0.5)
    expected = pixels.copy()
    expected[:28, 112 - 55 :] = 127
    np.testing.assert_array_equal(covered, expected)


def test_jpeg_is_that_of_the_quality_drawn():
    pixels = picture(4)
    for number, quality in ((0.0, 30), (0.5, 63), (1 - 1e-9, 95)):
        encoded = cv2.imencode(".jpg", pixels[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
        expected = cv2.imdecode(encoded, cv2.IMREAD_COLOR)[:, :, ::-1]
        np.testing.assert_array_equal(_apply("jpeg", pixels, [number], jpeg_quality=30), expected)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_it_happens_to_its_share_of_the_images_and_to_each_differently(name: str):
    augment = Augment({**BASE, name: 0.25}, seed=3)
    numbers = augment.draw(np.arange(2000))
    assert numbers.shape == (2000, 1, 6) and numbers.min() >= 0 and numbers.max() < 1
    results, original = [], picture(5)
    for row in numbers:
        augment.apply(pixels := original.copy(), row)
        if not np.array_equal(pixels, original):
            results.append(pixels.tobytes())
    assert abs(len(results) - 500) < 5 * np.sqrt(2000 * 0.25 * 0.75)
    assert name == "grayscale" or len(set(results)) > 40


def test_probabilities_are_independent_of_each_other_and_of_flips():
    augment = Augment({**BASE, "blur": 0.5, "jpeg": 0.5}, seed=0)
    happens = augment.draw(np.arange(4000))[:, :, 0] < 0.5
    flips = SampleOrder(4000, 4000, 0, True).samples(0).mirrored
    for one, other in ((happens[:, 0], happens[:, 1]), (happens[:, 0], flips), (happens[:, 1], flips)):
        assert abs((one & other).sum() - 1000) < 5 * np.sqrt(4000 * 0.25 * 0.75)


def _batches(threads: int, first: int, rank: int = 0, world_size: int = 1) -> list[np.ndarray]:
    dataset = _Spots(10, 50, 0)
    order = SampleOrder(50, 24, 1, True)
    augment = Augment({**BASE, **dict.fromkeys(OPERATIONS, 0.5)}, seed=9)
    loader = Loader(dataset, lambda s: order.samples(s, rank, world_size), first, 6, threads, 3, CPU, augment=augment)
    return [np.concatenate([batch.images.flatten(1), batch.landmarks.flatten(1)], axis=1) for batch in loader]


def test_threads_processes_and_a_resume_change_nothing():
    whole = _batches(1, 0)
    assert all(np.array_equal(a, b) for a, b in zip(whole, _batches(3, 0), strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(whole[4:], _batches(2, 4), strict=True))
    parts = [_batches(1, 0, rank, 3) for rank in range(3)]
    assert all(np.array_equal(a, np.concatenate(b)) for a, b in zip(whole, zip(*parts, strict=True), strict=True))


def test_an_image_is_changed_in_another_way_in_each_epoch():
    augment = Augment({**BASE, "photometric": 1.0}, seed=0)
    first, second = augment.draw(np.array([7])), augment.draw(np.array([7 + 50]))
    assert not np.array_equal(first, second)


def test_without_augmentation_the_bytes_are_those_of_the_dataset():
    dataset = SyntheticDataset(10, 50, 0)
    order = SampleOrder(50, 24, 1, True)
    batch = next(iter(Loader(dataset, order.samples, 0, 1, 2, 1, CPU, augment=Augment(BASE, 0))))
    for image, index in zip(batch.images.numpy(), order.samples(0).indices.tolist(), strict=True):
        np.testing.assert_array_equal(image, dataset.sample(index)[0])
