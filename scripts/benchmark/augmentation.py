"""Measures the cost of each augmentation in a decoder thread, and in kornia if it is installed: the part "augment"."""

if __name__ == "__main__":
    raise SystemExit("error: scripts/benchmark/augmentation.py is no program; python -m scripts lists them")

import importlib
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from configs import load_config
from data.augment import OPERATIONS, Augment
from data.record_dataset import RecordDataset
from utils.image import IMAGE_SIZE

_BATCH = 128


def measure_augment(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Return microseconds per image for decoding, each operation, AdaFace's shares of them, and kornia's batches."""
    section = dict(load_config(Path(__file__).parents[2] / "configs" / "base.yaml").augment)
    dataset = RecordDataset(folder)
    count = min(_BATCH, dataset.num_images)
    pixels = np.empty((count, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    for index in range(count):
        dataset.decode_into(index, pixels[index])
    adaface = {**section, "crop": 0.2, "low_resolution": 0.2, "photometric": 0.2}
    ways: dict[str, Callable[[], object]] = {
        "decoding": lambda: [dataset.decode_into(index, pixels[index]) for index in range(count)],
        "AdaFace's three, a fifth each": lambda: _apply(pixels, adaface),
        **{name: _one(pixels, section, name) for name in OPERATIONS},
        **_kornia(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255),
    }
    threads = (cv2.getNumThreads(), torch.get_num_threads())
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            found[name].append(1e6 * (time.perf_counter() - begun) / count)
    cv2.setNumThreads(threads[0])
    torch.set_num_threads(threads[1])
    print(f"\n{'augmentation, one core':<52}us / image")
    for name, values in found.items():
        print(f"  {name:<50}{statistics.median(values):11.1f}")
    return [{"way": name, "microseconds": statistics.median(values)} for name, values in found.items()]


def _one(pixels: np.ndarray, section: Mapping[str, float], name: str) -> Callable[[], object]:
    alone = {**section, **dict.fromkeys(OPERATIONS, 0.0), name: 1.0}
    return lambda: _apply(pixels, alone)


def _apply(pixels: np.ndarray, section: Mapping[str, float]) -> None:
    augment = Augment(section, 0)
    for picture, numbers in zip(pixels.copy(), augment.draw(np.arange(len(pixels))), strict=True):
        augment.apply(picture, numbers)


def _kornia(images: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return kornia's operations on a batch (n, 3, H, W) float32 with a strength for each image."""
    try:
        enhance, filters = importlib.import_module("kornia.enhance"), importlib.import_module("kornia.filters")
    except ImportError:
        return {}
    factors = torch.linspace(0.5, 1.5, len(images))
    sigmas = torch.stack([factors, factors], dim=1)

    def photometric() -> torch.Tensor:
        brighter = enhance.adjust_brightness(images, factors - 1)
        return enhance.adjust_saturation(enhance.adjust_contrast(brighter, factors), factors)

    return {
        "photometric, kornia on the batch": photometric,
        "blur, kornia on the batch": lambda: filters.gaussian_blur2d(images, (9, 9), sigmas),
        "jpeg, kornia on the batch": lambda: enhance.jpeg_codec_differentiable(images, 60 * factors),
    }
