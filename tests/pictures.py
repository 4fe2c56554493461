"""Pictures for tests: smooth random colour fields with some shapes, each seed another one."""

import struct
import zlib
from pathlib import Path

import cv2
import numpy as np


def picture(seed: int, size: int = 112) -> np.ndarray:
    """Return (size, size, 3) uint8 RGB."""
    rng = np.random.default_rng(seed)
    pixels = cv2.resize(rng.integers(0, 256, (7, 7, 3), dtype=np.uint8), (size, size), interpolation=cv2.INTER_CUBIC)
    for _ in range(12):
        centre, axes = rng.integers(0, size, 2).tolist(), rng.integers(3, size // 5, 2).tolist()
        cv2.ellipse(pixels, centre, axes, float(rng.uniform(0, 180)), 0, 360, rng.integers(0, 256, 3).tolist(), -1)
    return pixels


def jpeg(pixels: np.ndarray, quality: int = 95) -> bytes:
    return cv2.imencode(".jpg", pixels[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()


def png_of(width: int, height: int, packed: bytes, depth: int = 8, colour: int = 2) -> bytes:
    """Return a PNG with valid checksums that declares this size, with any rows, packed by zlib."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(png_chunk, (b"IHDR", b"IDAT", b"IEND"), (header, packed, b"")))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def folder_of_people(root: Path, counts: list[int]) -> Path:
    """Write counts[i] pictures of person i as root/person_i/j.jpg, picture seed 100 i + j; return root."""
    for person, count in enumerate(counts):
        folder = root / f"person_{person}"
        folder.mkdir(parents=True)
        for number in range(count):
            (folder / f"{number}.jpg").write_bytes(jpeg(picture(100 * person + number)))
    return root
