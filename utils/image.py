"""Image decoding and the input contract of every network here: square, RGB, (x - 127.5) / 127.5.

Training and evaluation both decode, resize and normalise with this module, so that they cannot diverge.
Shapes: b = images, H = W = data.image_size, 112 unless said otherwise.
"""

import functools
import importlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

# mxnet ignores the EXIF orientation of a JPEG; face sets were made with mxnet, so a reader must do the same.
_DECODE_FLAGS = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION  # from OpenCV 4.11 on

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")  # of image files, in any case
IMAGE_STARTS = {b"\xff\xd8\xff": ".jpg", b"\x89PNG\r\n\x1a\n": ".png", b"BM": ".bmp", b"RIFF": ".webp"}  # first bytes: suffix
IMAGE_SIZE = 112  # pixels, height and width: that of published sets and networks, and the default everywhere
MAX_PIXELS = 1 << 22  # of an image in a set; far more than any face needs, and 12 MB
# of a photograph before cropping: the largest phone cameras have this many. OpenCV needs 6 bytes per pixel to decode one, or 9
# for a progressive JPEG without subsampling
MAX_PHOTO_PIXELS = 200_000_000
MAX_SIDE = 32_000  # pixels; OpenCV's warps take fewer than 32,767
MAX_RATIO = 100  # of the long side to the short one; a flat picture of few bytes becomes huge when its short side is scaled
MAX_SCANS = 32  # of a progressive JPEG, each of which costs a pass over the whole area; encoders write about 10
_PLAIN_JPEG_BYTES = 1 << 16  # a face of 112 x 112 pixels has about 5,000; larger ones have their scans counted first
_MAX_SEGMENTS = 10_000  # of a JPEG; pictures have some dozens
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_MARKER_IN_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # restart markers belong to the scan


def decode_rgb(
    encoded: bytes | bytearray | memoryview | np.ndarray, max_pixels: int = MAX_PIXELS, upright: bool = False
) -> np.ndarray:
    """Return the (H, W, 3) uint8 RGB pixels of an encoded JPEG, PNG, BMP or WebP, equal to mxnet's imdecode.

    Args:
        max_pixels: reject an image whose header declares more, before memory is allocated: a few damaged bytes may declare
            65,500 x 65,500.
        upright: turn the image as its EXIF orientation says, for photographs of phones; mxnet and face sets ignore it.

    Raises:
        ValueError: OpenCV cannot decode the image, it is truncated, or it exceeds the bounds of `check_size`.
    """
    data = np.frombuffer(encoded, dtype=np.uint8)
    if data.size == 0:
        raise ValueError("empty image (0 bytes)")
    size = image_size(data.data)
    if data[0] == 0xFF:
        _check_scans(data.data)
    if size is None or _is_cut_png(data.data):
        raise ValueError(f"cannot be decoded as an image ({data.size} bytes): truncated, or not JPEG, PNG, BMP or WebP")
    check_size(*size, max_pixels)
    try:
        image = cv2.imdecode(data, cv2.IMREAD_COLOR_RGB if upright else _DECODE_FLAGS)
    except cv2.error as error:
        raise ValueError(f"cannot be decoded as an image ({data.size} bytes): {error.err}") from None
    if image is None:
        raise ValueError(f"cannot be decoded as an image ({data.size} bytes): truncated, or not JPEG, PNG, BMP or WebP")
    return image


def image_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """Return (height, width) in pixels from the header of a JPEG, PNG, BMP or WebP; None for anything else."""
    start = bytes(data[:32])
    if start[:3] == b"\xff\xd8\xff":
        return _jpeg_size(data)
    if start[:8] == b"\x89PNG\r\n\x1a\n" and len(start) >= 24:
        return int.from_bytes(start[20:24], "big"), int.from_bytes(start[16:20], "big")
    if start[:2] == b"BM" and len(start) >= 26:
        old = start[14:18] == b"\x0c\0\0\0"  # OS/2: 16 bits each
        width, height = (start[18:20], start[20:22]) if old else (start[18:22], start[22:26])
        return abs(int.from_bytes(height, "little", signed=not old)), abs(int.from_bytes(width, "little", signed=not old))
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP" and len(start) >= 30:
        return _webp_size(start)
    return None


def check_size(height: int, width: int, max_pixels: int) -> None:
    """Raise ValueError unless the area, the sides, and the ratio of the sides of an image are within the limits."""
    short, long = sorted((height, width))
    why = ""
    if height * width > max_pixels:
        why = f"more than {max_pixels}"
    elif long > MAX_SIDE:
        why = f"more than {MAX_SIDE} a side"
    elif long > MAX_RATIO * short:
        why = f"more than {MAX_RATIO} times as long as wide"
    if why:
        raise ValueError(f"cannot be decoded: an image of {width} x {height} pixels, {why}")


def _jpeg_segments(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """Yield (marker, place) of each segment; like libjpeg, skip bytes that belong to no segment."""
    pattern, place = _MARKER, 2
    for _ in range(_MAX_SEGMENTS):
        found = pattern.search(data, place)
        if found is None or found.start() + 4 > len(data):
            return
        place, marker = found.start(), data[found.start() + 1]
        yield marker, place
        if marker == 0xD9:  # the end; what follows, such as the video in a phone's picture, is not part of the image
            return
        alone = marker == 0x01 or 0xD0 <= marker <= 0xD8  # markers without a length
        place += 2 if alone else 2 + max(2, int.from_bytes(data[place + 2 : place + 4], "big"))
        pattern = _MARKER_IN_SCAN if marker == 0xDA else _MARKER
    raise ValueError(f"cannot be decoded: a JPEG of more than {_MAX_SEGMENTS:,} segments")


def _jpeg_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """Return (height, width) from the first frame header."""
    for marker, place in itertools.islice(_jpeg_segments(data), _MAX_SEGMENTS):  # decode_rgb tells of more
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if place + 9 > len(data):
                return None
            return int.from_bytes(data[place + 5 : place + 7], "big"), int.from_bytes(data[place + 7 : place + 9], "big")
    return None


def _check_scans(data: memoryview) -> None:
    """Raise ValueError if a JPEG has more scans than encoders write: each has few bytes but costs a pass over all pixels."""
    scans = 0
    for marker, _ in _jpeg_segments(data):
        scans += marker == 0xDA
        if scans > MAX_SCANS:
            raise ValueError(f"cannot be decoded: a progressive JPEG of more than {MAX_SCANS} scans")


def _is_cut_png(data: memoryview) -> bool:
    """Return whether a chunk of a PNG reaches beyond the end: OpenCV allocates a chunk's declared size, up to 2 GB."""
    if data[:4] != b"\x89PNG":
        return False
    place = 8
    while place + 8 <= len(data):
        if data[place + 4 : place + 8] == b"IEND":
            return False
        place += 12 + int.from_bytes(data[place : place + 4], "big")
    return place > len(data)


def _webp_size(start: bytes) -> tuple[int, int] | None:
    """Return the size in a WebP's first chunk: lossy, lossless or extended. Source: RFC 9649, section 2."""
    if start[12:16] == b"VP8 ":
        return int.from_bytes(start[28:30], "little") & 0x3FFF, int.from_bytes(start[26:28], "little") & 0x3FFF
    if start[12:16] == b"VP8L":
        bits = int.from_bytes(start[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if start[12:16] == b"VP8X":
        return int.from_bytes(start[27:30], "little") + 1, int.from_bytes(start[24:27], "little") + 1
    return None


def decode_rgb_into(encoded: bytes | memoryview, out: np.ndarray) -> np.ndarray:
    """Decode an image into `out` (H, W, 3) uint8 and return it, or return the pixels of an image of another size.

    simplejpeg writes into a given buffer, so a JPEG of the right size costs no copy. Images that it rejects (another format,
    four channels, another size, damage) go to `decode_rgb`. For all others the two agree to the last bit.
    """
    decoder = _simplejpeg()
    if decoder is not None and encoded[:2] == b"\xff\xd8" and len(encoded) <= _PLAIN_JPEG_BYTES:
        try:
            # simplejpeg 1.9 leaks memory where the buffer is too small
            if image_size(encoded) == out.shape[:2] and decoder.decode_jpeg(encoded, "RGB", buffer=out).shape == out.shape:
                return out
        except ValueError:
            pass
    pixels = decode_rgb(encoded)
    if pixels.shape == out.shape:
        out[...] = pixels
        return out
    return pixels


def resize_square(pixels: np.ndarray, size: int) -> np.ndarray:
    """Return pixels (H, W, 3) uint8, mostly square, as (size, size, 3): means over areas to shrink, bilinear to enlarge."""
    interpolation = cv2.INTER_AREA if size < len(pixels) else cv2.INTER_LINEAR
    return cv2.resize(pixels, (size, size), interpolation=interpolation)


def to_png(pixels: np.ndarray) -> bytes:
    """Return (H, W, 3) uint8 RGB as a PNG, which is lossless."""
    return cv2.imencode(".png", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR))[1].tobytes()


@functools.cache
def _simplejpeg() -> Any:
    """Return the module simplejpeg, or None if it is not installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def normalise(images: Tensor) -> Tensor:
    """Return (b, 3, H, W) float32 in [-1, 1], channels_last in memory, from (b, H, W, 3) uint8."""
    return images.permute(0, 3, 1, 2).to(torch.float32).sub_(127.5).div_(127.5)
