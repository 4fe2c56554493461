"""Decoding straight into a buffer against decoding by OpenCV, over kinds of files."""

import io

import cv2
import numpy as np
import pytest
from PIL import Image

from utils import image as module
from utils.image import decode_rgb, decode_rgb_into


def _pixels(height: int, width: int, seed: int = 0) -> np.ndarray:
    small = np.random.default_rng(seed).integers(0, 256, (7, 7, 3)).astype(np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)


def _save(pixels: np.ndarray, kind: str, mode: str = "RGB", **options: object) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, kind, **options)
    return out.getvalue()


def _rotated(pixels: np.ndarray) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return _save(pixels, "JPEG", exif=exif)


FILES = {
    "420": lambda p: _save(p, "JPEG", quality=95, subsampling=2),
    "444": lambda p: _save(p, "JPEG", quality=80, subsampling=0),
    "progressive": lambda p: _save(p, "JPEG", progressive=True),
    "gray": lambda p: _save(p, "JPEG", mode="L"),
    "cmyk": lambda p: _save(p, "JPEG", mode="CMYK"),
    "rotated by exif": _rotated,
    "trailing bytes": lambda p: _save(p, "JPEG") + b"rubbish",
    "png": lambda p: _save(p, "PNG"),
    "png with alpha": lambda p: _save(p, "PNG", mode="RGBA"),
    "bmp": lambda p: _save(p, "BMP"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("fast", [True, False])
def test_every_kind_of_file_decodes_into_the_buffer_as_opencv_decodes_it(
    name: str, fast: bool, monkeypatch: pytest.MonkeyPatch
):
    if not fast:
        monkeypatch.setattr(module, "_simplejpeg", lambda: None)
    else:
        pytest.importorskip("simplejpeg")
    for seed in range(3):
        data = FILES[name](_pixels(112, 112, seed))
        out = np.full((112, 112, 3), 77, np.uint8)
        assert decode_rgb_into(memoryview(data), out) is out
        np.testing.assert_array_equal(out, decode_rgb(data))


@pytest.mark.parametrize(("height", "width"), [(112, 96), (96, 112), (224, 224), (56, 56), (1, 1), (56, 224)])
def test_another_size_comes_back_whole(height: int, width: int):
    data = FILES["420"](_pixels(height, width))
    pixels = decode_rgb_into(data, np.empty((112, 112, 3), np.uint8))
    assert pixels.shape == (height, width, 3)
    np.testing.assert_array_equal(pixels, decode_rgb(data))


def test_damage_is_an_error_or_what_opencv_makes_of_it():
    data = FILES["420"](_pixels(112, 112))
    rng = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(data[: int(rng.integers(1, len(data) + 1))])
        for position in rng.integers(0, len(damaged), int(rng.integers(0, 4))).tolist():
            damaged[position] ^= int(rng.integers(1, 256))
        try:
            expected = decode_rgb(bytes(damaged))
        except ValueError:
            with pytest.raises(ValueError, match=r"cannot be decoded|empty"):
                decode_rgb_into(bytes(damaged), np.empty((112, 112, 3), np.uint8))
            continue
        np.testing.assert_array_equal(decode_rgb_into(bytes(damaged), np.empty((112, 112, 3), np.uint8)), expected)
