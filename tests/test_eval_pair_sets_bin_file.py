"""Verification sets: the files of many writers (tests/fixtures/bin), and the pixels of their images."""

import json
import os
import pickle
import struct
import sys
import types
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from test_data_recordio import _sha256

from data.datasets import FolderDataset
from eval.pair_sets.bin_file import PairSet, read_bin, write_bin
from utils.image import decode_rgb

FIXTURES = Path(__file__).parent / "fixtures" / "bin"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


def _jpeg(seed: int, height: int = 112, width: int = 112) -> bytes:
    tiles = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return cv2.imencode(".jpg", cv2.resize(tiles, (width, height)))[1].tobytes()


JPEGS = [_jpeg(seed) for seed in range(4)]
SAME = [True, False]


def _entries(pairs: PairSet) -> list[bytes]:
    return [pairs.images[i] for pair in zip(pairs.first, pairs.second, strict=True) for i in pair]


def _check_good(path: Path, entries_sha256: list[str], same: list[bool], rgb: list[Any] | None) -> None:
    pairs = read_bin(path)
    assert (pairs.name, pairs.same.tolist()) == (path.stem, same)
    assert [_sha256(entry) for entry in _entries(pairs)] == entries_sha256[: 2 * len(same)]
    assert len(set(pairs.images)) == len(pairs.images), "an image is stored twice"
    in_order = np.stack([pairs.first, pairs.second], 1).ravel()
    for index, (shape, start) in zip(in_order.tolist(), rgb or [], strict=False):
        if shape == [112, 112, 3]:
            assert _sha256(pairs.decode(index).tobytes()).startswith(start)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_sets_of_every_writer_hold_the_images_and_pairs_they_were_made_from(name: str) -> None:
    want = EXPECTED[name]
    _check_good(FIXTURES / f"{name}.bin", want["entries_sha256"], want["issame"], want["rgb"])


def test_every_oracle_set_is_read(face_oracle: Path) -> None:
    folder = face_oracle / "oracle" / "bin"
    for name, want in json.loads((folder / "expected.json").read_text())["files"].items():
        _check_good(folder / name, want["entries_sha256"], want["issame"], want["mx_imdecode"])
    london = read_bin(face_oracle / "london" / "london.bin")
    assert (len(_entries(london)), len(london.images), len(london.same)) == (400, 200, 200)
    assert all(london.decode(i).shape == (112, 112, 3) for i in range(200))


def _as_arrays(shape: tuple[int, ...]) -> list[np.ndarray]:
    return [np.frombuffer(jpeg, dtype=np.uint8).reshape(shape) for jpeg in JPEGS]


FORMS: dict[str, Any] = {
    "bytes": (JPEGS, SAME),
    "bytearrays": (list(map(bytearray, JPEGS)), SAME),
    "tuple": (tuple(JPEGS), tuple(SAME)),
    "list of two": [JPEGS, SAME],
    "arrays": (_as_arrays((-1,)), SAME),
    "columns": (_as_arrays((-1, 1)), SAME),
    "rows": (_as_arrays((1, -1)), SAME),
    "columns of Fortran": ([np.asfortranarray(array) for array in _as_arrays((-1, 1))], SAME),
    "array of objects": (np.array(JPEGS, dtype=object), SAME),
    "array of byte strings": (np.array(JPEGS), SAME),
    "more images than pairs": ([*JPEGS, b"not read", None], SAME),
    "int": (JPEGS, [1, 0]),
    "numpy bool": (JPEGS, [np.True_, np.False_]),
    "numpy int": (JPEGS, [np.int64(1), np.uint8(0)]),
    "array of bool": (JPEGS, np.array(SAME)),
    "array of int": (JPEGS, np.array([1, 0])),
    "array of big-endian int": (JPEGS, np.array([1, 0], dtype=">i4")),
    "array of bool objects": (JPEGS, np.array(SAME, dtype=object)),
}


@pytest.mark.parametrize("form", sorted(FORMS))
def test_every_form_is_read_at_every_protocol(form: str, tmp_path: Path) -> None:
    for protocol in range(6):
        (tmp_path / "set.bin").write_bytes(pickle.dumps(FORMS[form], protocol=protocol))
        pairs = read_bin(tmp_path / "set.bin")
        assert (_entries(pairs), pairs.same.tolist()) == (JPEGS, SAME), f"protocol {protocol}"


def test_strings_of_python_2_are_read_as_bytes(tmp_path: Path) -> None:
    in_text = b"".join(b"S" + repr(jpeg)[1:].encode() + b"\np%d\na" % i for i, jpeg in enumerate(JPEGS))
    in_binary = b"".join(b"T" + struct.pack("<i", len(jpeg)) + jpeg for jpeg in JPEGS)
    for data in [b"((lp9\n" + in_text + b"(lI01\naI00\nat.", b"(](" + in_binary + b"e](I01\nI00\net."]:
        assert pickle.loads(data, encoding="bytes") == (JPEGS, SAME)
        (tmp_path / "set.bin").write_bytes(data)
        assert _entries(read_bin(tmp_path / "set.bin")) == JPEGS


@pytest.mark.parametrize("magic", [0xF993FAC9, 0xF993FACA])
def test_mxnet_arrays_are_read(magic: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NDArray:
        def __init__(self, data: bytes) -> None:
            head = struct.pack("<IiiQiii", magic, 0, 1, len(data), 1, 0, 3)
            self.state = {"handle": bytearray(head + data)}

        def __reduce__(self) -> tuple[Any, ...]:
            return NDArray, (None,), self.state

    NDArray.__module__, NDArray.__qualname__ = "mxnet.ndarray.ndarray", "NDArray"
    module = types.ModuleType("mxnet.ndarray.ndarray")
    module.__dict__["NDArray"] = NDArray
    for name in ("mxnet", "mxnet.ndarray", "mxnet.ndarray.ndarray"):
        monkeypatch.setitem(sys.modules, name, module)
    for protocol in (2, 4, 5):
        (tmp_path / "set.bin").write_bytes(pickle.dumps(([NDArray(jpeg) for jpeg in JPEGS], SAME), protocol=protocol))
        assert _entries(read_bin(tmp_path / "set.bin")) == JPEGS


def test_equal_images_are_stored_once_and_pairs_keep_their_order(tmp_path: Path) -> None:
    write_bin(tmp_path / "set.bin", [JPEGS[i] for i in (2, 0, 0, 2, 1, 1)], [False, False, True])
    pairs = read_bin(tmp_path / "set.bin", "other name")
    assert pairs.name == "other name"
    assert pairs.images == [JPEGS[2], JPEGS[0], JPEGS[1]]
    assert (pairs.first.tolist(), pairs.second.tolist()) == ([0, 1, 2], [1, 0, 2])
    assert (pairs.first.dtype, pairs.second.dtype, pairs.same.dtype) == (np.int64, np.int64, np.bool_)


def test_written_sets_are_what_insightface_reads(tmp_path: Path) -> None:
    write_bin(tmp_path / "set.bin", JPEGS, SAME)
    data = (tmp_path / "set.bin").read_bytes()
    assert data == pickle.dumps((JPEGS, SAME), protocol=4)
    assert os.listdir(tmp_path) == ["set.bin"]


@pytest.mark.parametrize(
    ("images", "same", "reason"),
    [(JPEGS[:3], SAME, "got 3 for 2"), ([], [], "got 0 for 0"), ([*JPEGS[:3], b"text"], SAME, "image 3 must be")],
)
def test_writing_refuses_what_could_not_be_read(images: list[bytes], same: list[bool], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        write_bin(tmp_path / "set.bin", images, same)
    assert os.listdir(tmp_path) == []


def test_images_of_another_width_are_resized_as_mxnet_does(tmp_path: Path) -> None:
    images = [_jpeg(0, 224, 224), _jpeg(1, 56, 56), _jpeg(2, 112, 96), _jpeg(3, 96, 112)]
    write_bin(tmp_path / "set.bin", images, SAME)
    pairs = read_bin(tmp_path / "set.bin")
    for index in (0, 1):
        resized = cv2.resize(decode_rgb(images[index]), (112, 112), interpolation=cv2.INTER_CUBIC)
        np.testing.assert_array_equal(pairs.decode(index), resized)
    assert pairs.decode(0, size=224).shape == (224, 224, 3)
    for index, size in [(2, "112 x 96"), (3, "96 x 112")]:
        with pytest.raises(ValueError, match=f"^set: image {index} must be square, it is {size} pixels"):
            pairs.decode(index)


def test_for_another_size_images_are_resized_as_those_of_training_are(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (96, 96, 3)).astype(np.uint8)
    write_bin(tmp_path / "set.bin", [cv2.imencode(".png", image)[1].tobytes()] * 2, [True])
    (tmp_path / "a").mkdir()
    cv2.imwrite(str(tmp_path / "a" / "x.png"), image)
    pairs, dataset = read_bin(tmp_path / "set.bin"), FolderDataset(str(tmp_path))
    for size in (48, 96, 160):
        assert np.array_equal(pairs.decode(0, size), dataset.pixels_and_label(0, size)[0])


def test_an_image_that_cannot_be_decoded_is_an_error_that_names_set_and_image(tmp_path: Path) -> None:
    write_bin(tmp_path / "set.bin", [*JPEGS[:3], JPEGS[3][:300]], SAME)
    with pytest.raises(ValueError, match=r"^set: image 3: cannot be decoded"):
        read_bin(tmp_path / "set.bin").decode(3)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.bin: cannot be read: No such file"):
        read_bin(tmp_path / "none.bin")
