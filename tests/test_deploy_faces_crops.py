"""Crops of pictures: which face, which way up, and what is rejected with a reason."""

import struct
import zlib
from pathlib import Path
from unittest import mock

import cv2
import numpy as np
import pytest
from pictures import png_of
from tiny_detectors import OFFSETS, RED

from deploy.faces.detector import Detector, Face
from deploy.faces.pictures import Crop, Rejected, crops_of, read_crops
from utils.alignment import TEMPLATE, align
from utils.image import decode_rgb, to_png


class Fixed(Detector):
    """Finds given faces, and keeps the picture that it got."""

    def __init__(self, *faces: Face) -> None:
        self.faces, self.seen = list(faces), np.zeros(0)

    def detect(self, pixels: np.ndarray) -> list[Face]:
        self.seen = pixels
        return self.faces


def _face(x: float, y: float, size: float = 30.0, score: float = 0.9) -> Face:
    box = np.array([x - size, y - size, x + size, y + size])
    return Face(box, np.array([x, y]) + OFFSETS * size / 30, score)


def _scene(height: int = 160, width: int = 240) -> np.ndarray:
    rng = np.random.default_rng(height)
    return cv2.resize(rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8), (width, height))


def _jpeg(pixels: np.ndarray, orientation: int = 1) -> bytes:
    """Return a JPEG with an EXIF orientation: a TIFF of one entry, tag 0x112, in the first segment."""
    how = [cv2.IMWRITE_JPEG_QUALITY, 100, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444]
    data = cv2.imencode(".jpg", pixels[:, :, ::-1], how)[1].tobytes()
    tiff = b"MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x112, 3, 1, orientation, 0, 0)
    body = b"Exif\0\0" + tiff
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + data[2:]


def _only(found: list[Crop] | Rejected) -> Crop:
    assert isinstance(found, list) and len(found) == 1
    return found[0]


def test_a_face_of_a_photograph_is_aligned_by_its_points():
    pixels, face = _scene(), _face(120, 80)
    crop = _only(crops_of(to_png(pixels), "a/b.png", Fixed(face), 112, "largest"))
    assert crop.name == "a/b.png" and crop.number == 0 and crop.face is face and crop.padding == 0
    assert np.array_equal(crop.pixels, align(pixels, face.points, 112, smooth=True))
    assert _only(crops_of(to_png(pixels), "x", Fixed(_face(5, 5)), 112, "largest")).padding > 0.2


# what a viewer does to the stored pixels, by the definition of the tag (EXIF 2.3, table of Orientation)
_TURNED = {
    1: lambda p: p, 2: lambda p: p[:, ::-1], 3: lambda p: p[::-1, ::-1], 4: lambda p: p[::-1],
    5: lambda p: p.transpose(1, 0, 2), 6: lambda p: p.transpose(1, 0, 2)[:, ::-1],
    7: lambda p: p.transpose(1, 0, 2)[::-1, ::-1], 8: lambda p: p.transpose(1, 0, 2)[::-1],
}  # fmt: skip


@pytest.mark.parametrize("orientation", _TURNED)
def test_a_photograph_is_turned_as_its_exif_orientation_says_and_an_aligned_crop_is_not(orientation: int):
    data = _jpeg(_scene(), orientation)
    stored, detector = decode_rgb(data), Fixed(_face(80, 80))
    crop = _only(crops_of(data, "x", detector, 112, "largest"))
    upright = _TURNED[orientation](stored)
    assert np.array_equal(detector.seen, upright)
    assert np.array_equal(crop.pixels, align(np.ascontiguousarray(upright), _face(80, 80).points, 112, smooth=True))
    aligned = _jpeg(_scene(112, 112), orientation)
    assert np.array_equal(_only(crops_of(aligned, "x", None, 112, "largest")).pixels, decode_rgb(aligned))


def test_which_face_counts():
    small, large = _face(120, 80, 20, 0.99), _face(60, 60, 40, 0.8)
    detector, data = Fixed(small, large), to_png(_scene())
    assert _only(crops_of(data, "x", detector, 112, "largest")).number == 1
    assert _only(crops_of(data, "x", detector, 112, "central")).number == 0
    both = crops_of(data, "x", detector, 112, "all")
    assert isinstance(both, list) and [crop.number for crop in both] == [0, 1]
    assert crops_of(data, "x", detector, 112, "only") == Rejected("x", "2 faces found, and with --which only there must be one")
    assert _only(crops_of(data, "x", Fixed(large), 112, "only")).number == 0
    assert crops_of(data, "x", Fixed(), 112, "only") == Rejected("x", "no face found")


def test_without_a_detector_only_crops_of_the_size_pass():
    pixels = _scene(112, 112)
    crop = _only(crops_of(to_png(pixels), "x", None, 112, "all"))
    assert crop.face is None and np.array_equal(crop.pixels, pixels)
    found = crops_of(to_png(_scene(112, 120)), "x", None, 112, "all")
    assert isinstance(found, Rejected)
    assert found.reason.startswith("is 120 x 112 pixels, no aligned crop of 112 x 112: name a detector")


def test_landmarks_that_are_no_face_reject_the_picture_unless_another_face_is_sound():
    far = Face(np.array([0, 0, 50, 50.0]), OFFSETS + 5000, 0.9)
    swapped = Face(np.array([0, 0, 50, 50.0]), OFFSETS[[4, 2, 0, 3, 1]] + 60, 0.9)
    for bad, said in ((far, "must lie in the picture of 240 x 160"), (swapped, "landmarks are no face")):
        found = crops_of(to_png(_scene()), "x", Fixed(bad), 112, "largest")
        assert isinstance(found, Rejected) and found.reason.startswith("the detector found no face that can be aligned: ")
        assert said in found.reason and "\n" not in found.reason
        assert _only(crops_of(to_png(_scene()), "x", Fixed(bad, _face(120, 80)), 112, "all")).number == 1


@pytest.mark.parametrize(
    ("data", "said"),
    [
        # some bytes whose header declares an enormous picture
        (png_of(30_000, 30_000, zlib.compress(bytes(1000))), "an image of 30000 x 30000 pixels, more than 200000000"),
        (b"", "empty image (0 bytes)"),
        (b"no picture", "not JPEG, PNG, BMP or WebP"),
        (to_png(_scene())[:700], "truncated"),
    ],
)
def test_what_is_no_picture_is_rejected_with_the_reason(data: bytes, said: str):
    found = crops_of(data, "x", Fixed(_face(80, 80)), 112, "largest")
    assert isinstance(found, Rejected) and said in found.reason


def test_a_detector_that_fails_on_a_picture_rejects_that_picture():
    failing = mock.Mock(Detector, detect=mock.Mock(side_effect=ValueError("det.onnx: it fails\n\x1b[2J")))
    assert crops_of(to_png(_scene()), "x", failing, 112, "all") == Rejected("x", "det.onnx: it fails\\n\\x1b[2J")


def test_files_that_cannot_be_read_are_rejected(tmp_path: Path):
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "link.jpg").symlink_to("nowhere")
    for name, said in (("folder.jpg", "it is a folder"), ("link.jpg", "No such file"), ("none.jpg", "No such file")):
        found = read_crops(tmp_path, name, None, 112, "all")
        assert isinstance(found, Rejected) and found.name == name and said in found.reason


def test_a_photograph_of_many_pixels_is_shrunk_without_aliasing():
    """Stripes of one pixel become their mean: grey."""
    pixels = np.zeros((1600, 1600, 3), dtype=np.uint8)
    pixels[:, ::2] = RED
    points = (TEMPLATE - 55.5) * 12 + 800
    crop = _only(crops_of(to_png(pixels), "x", Fixed(Face(np.array([0, 0, 1600, 1600.0]), points, 1.0)), 112, "largest"))
    assert np.abs(crop.pixels[20:90, 20:90].astype(float) - [127.5, 0, 0]).max() <= 8
