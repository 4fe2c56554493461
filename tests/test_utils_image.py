"""Decoding straight into a buffer against decoding by OpenCV, over kinds of files."""

import io
import mmap
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from pictures import png_of
from PIL import Image

from utils import image as module
from utils.image import MAX_PHOTO_PIXELS, MAX_PIXELS, decode_rgb, decode_rgb_into, image_size


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
def test_every_kind_of_file_decodes_into_the_buffer_as_opencv_does(name: str, fast: bool, monkeypatch: pytest.MonkeyPatch):
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


def test_images_that_are_too_large_leave_no_memory_behind():
    if not (memory := Path("/proc/self/statm")).is_file():
        pytest.skip("a program's memory is read from /proc")
    data, out, pages = FILES["420"](_pixels(160, 160)), np.empty((112, 112, 3), np.uint8), []
    for count in (500, 3000):
        for _ in range(count):
            decode_rgb_into(data, out)
        pages.append(int(memory.read_text().split()[1]))
    assert (pages[1] - pages[0]) * mmap.PAGESIZE < 3000 << 10


def test_damage_is_an_error_or_what_opencv_makes_of_it():
    data = FILES["420"](_pixels(112, 112))
    rng, refused = np.random.default_rng(0), 0
    for _ in range(200):
        damaged = bytearray(data if rng.random() < 0.7 else data[: int(rng.integers(1, len(data)))])
        for position in rng.integers(0, len(damaged), int(rng.integers(1, 4))).tolist():
            damaged[position] ^= int(rng.integers(1, 256))
        try:
            expected = decode_rgb(bytes(damaged))
        except ValueError:
            with pytest.raises(ValueError, match=r"cannot be decoded|empty"):
                decode_rgb_into(bytes(damaged), np.empty((112, 112, 3), np.uint8))
            refused += 1
            continue
        np.testing.assert_array_equal(decode_rgb_into(bytes(damaged), np.empty((112, 112, 3), np.uint8)), expected)
    assert 20 <= refused <= 180  # there is some of both


@pytest.mark.parametrize("kind", sorted(FILES))
@pytest.mark.parametrize(("height", "width"), [(112, 112), (3, 200), (130, 17)])
def test_the_size_is_read_from_the_header(kind: str, height: int, width: int):
    data = FILES[kind](_pixels(height, width))
    assert image_size(data) == decode_rgb(data).shape[:2] == (height, width)


@pytest.mark.parametrize("mode", ["lossy", "lossless"])
def test_the_size_of_a_webp_is_read_from_its_header(mode: str):
    quality = [cv2.IMWRITE_WEBP_QUALITY, 101 if mode == "lossless" else 80]
    data = cv2.imencode(".webp", _pixels(50, 70), quality)[1].tobytes()
    assert image_size(data) == decode_rgb(data).shape[:2] == (50, 70)


def test_what_claims_to_be_huge_is_refused_before_memory_is_asked_for():
    data = bytearray(FILES["420"](_pixels(112, 112)))
    place = data.index(b"\xff\xc0")
    data[place + 5 : place + 9] = b"\xff\xdc\xff\xdc"
    with pytest.raises(ValueError, match="65500 x 65500 pixels, more than"):
        decode_rgb(bytes(data))
    png = bytearray(cv2.imencode(".png", _pixels(112, 112))[1].tobytes())
    place = png.index(b"IDAT")
    png[place - 4 : place] = (1 << 30).to_bytes(4, "big")
    with pytest.raises(ValueError, match="truncated"):
        decode_rgb(bytes(png))
    with pytest.raises(ValueError, match="100 x 100 pixels, more than 9999"):
        decode_rgb(FILES["420"](_pixels(100, 100)), max_pixels=9999)


def _flat_png(width: int) -> bytes:
    """Return a PNG of width x 1 pixels, which has a few hundred bytes: one bit a pixel."""
    return png_of(width, 1, zlib.compress(bytes(1 + -(-width // 8)), 9), depth=1, colour=0)


@pytest.mark.parametrize(("width", "bound"), [(101, "100 times as long as wide"), (60_000, "32000 a side")])
def test_flat_pictures_are_refused_in_sets_and_as_photographs(width: int, bound: str):
    data = _flat_png(width)
    assert cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR).shape[:2] == (1, width)  # a sound picture
    for most in (MAX_PIXELS, MAX_PHOTO_PIXELS):
        with pytest.raises(ValueError, match=f"an image of {width} x 1 pixels, more than {bound}"):
            decode_rgb(data, most)
    assert decode_rgb(_flat_png(100)).shape == (1, 100, 3)


def _with_scans(size: int, more: int) -> bytes:
    """Return a progressive JPEG whose last scan, of a few bytes, stands there `more` times again."""
    values = [cv2.IMWRITE_JPEG_PROGRESSIVE, 1, cv2.IMWRITE_JPEG_QUALITY, 50]
    data = cv2.imencode(".jpg", np.zeros((size, size, 3), np.uint8), values)[1].tobytes()
    last, end = data.rfind(b"\xff\xda"), data.rfind(b"\xff\xd9")
    return data[:end] + more * data[last:end] + data[end:]


def test_a_progressive_jpeg_of_many_scans_is_refused_and_the_usual_number_is_not():
    usual = _with_scans(112, 0)
    assert 5 < usual.count(b"\xff\xda") < 15
    video = usual + 100 * b"\xff\xda\x00\x08\x01"  # what phones put behind the end of a picture is no scan
    np.testing.assert_array_equal(decode_rgb(video), decode_rgb(usual))
    for data in (_with_scans(2000, 40), _with_scans(112, 20_000)):
        with pytest.raises(ValueError, match="a progressive JPEG of more than 32 scans"):
            decode_rgb_into(data, np.empty((112, 112, 3), np.uint8))


def test_a_jpeg_of_countless_segments_is_refused():
    data = FILES["420"](_pixels(112, 112))
    with pytest.raises(ValueError, match="a JPEG of more than 10,000 segments"):
        decode_rgb(data[:2] + 20_000 * b"\xff\xfe\x00\x02" + data[2:])
