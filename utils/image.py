"""The input contract of every network here: 112 x 112, RGB, (x - 127.5) / 127.5.

Training and evaluation both decode and normalise through this module, so that they cannot drift apart.
Shapes: b = images, H = W = 112.
"""

import functools
import importlib
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

# mxnet ignores the EXIF orientation of a JPEG; face sets were made with it, so a reader must do the same.
_DECODE_FLAGS = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION

IMAGE_SIZE = 112  # pixels, height and width


def decode_rgb(encoded: bytes | bytearray | memoryview | np.ndarray) -> np.ndarray:
    """Return the (H, W, 3) uint8 RGB pixels of an encoded JPEG, PNG, BMP or WebP, equal to mxnet's imdecode.

    Raises:
        ValueError: the bytes are no image that OpenCV decodes, or a truncated one.
    """
    data = np.frombuffer(encoded, dtype=np.uint8)
    if data.size == 0:
        raise ValueError("empty image (0 bytes)")
    try:
        image = cv2.imdecode(data, _DECODE_FLAGS)
    except cv2.error as error:
        raise ValueError(f"cannot be decoded as an image ({data.size} bytes): {error.err}") from None
    if image is None:
        raise ValueError(f"cannot be decoded as an image ({data.size} bytes): truncated, or not JPEG, PNG, BMP or WebP")
    return image


def decode_rgb_into(encoded: bytes | memoryview, out: np.ndarray) -> np.ndarray:
    """Decode an image into `out` (H, W, 3) uint8 and return it, or return the pixels of an image of another size.

    simplejpeg writes where it is told to, so a JPEG of the right size costs no copy. Whatever it does not take (another
    format, four channels, another size, damage) goes to `decode_rgb`; on all else the two agree to the last bit.
    """
    decoder = _simplejpeg()
    if decoder is not None and encoded[:2] == b"\xff\xd8":
        try:
            if decoder.decode_jpeg(encoded, "RGB", buffer=out).shape == out.shape:
                return out
        except ValueError:
            pass
    pixels = decode_rgb(encoded)
    if pixels.shape == out.shape:
        out[...] = pixels
        return out
    return pixels


@functools.cache
def _simplejpeg() -> Any:
    """Return the module simplejpeg, or None where it is not installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def normalise(images: Tensor) -> Tensor:
    """Return (b, 3, H, W) float32 in [-1, 1], channels_last in memory, from (b, H, W, 3) uint8."""
    return images.permute(0, 3, 1, 2).to(torch.float32).sub_(127.5).div_(127.5)
