"""Face detectors: what they find is where it was drawn, decoding is that of the definition, and odd files end in one line."""

import argparse
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tiny_detectors import FORMS, HALF, OFFSETS, STRIDES, picture, write_detector

from deploy.faces import detector
from deploy.faces.detector import Candidates, Detector, add_detector_arguments, letterbox, open_detector, strongest, suppress


def _open(path: Path, *words: str) -> Detector:
    parser = argparse.ArgumentParser()
    add_detector_arguments(parser)
    detector = open_detector(parser.parse_args(["--detector", str(path), *words]))
    assert detector is not None
    return detector


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """Return a detector of each form, of any and of a fixed input size."""
    folder = tmp_path_factory.mktemp("detectors")
    return {
        (form, fixed): write_detector(folder / f"{form}{fixed}.onnx", form, (96, 160) if fixed else None)
        for form in FORMS
        for fixed in (False, True)
    }


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_face_is_found_where_it_was_drawn_and_blue_is_none(files: dict[Any, Path], form: str, fixed: bool):
    detector = _open(files[form, fixed])
    (face,) = detector.detect(picture(90, 150, (64, 40)))
    middle = np.array([67.5, 43.5])  # of pixels 64 to 71 and 40 to 47
    assert np.abs(face.points - (middle + OFFSETS)).max() < 2e-3  # three digits are kept, and the file has float32
    assert np.abs(face.box - [*(middle - HALF), *(middle + HALF)]).max() < 2e-3
    assert abs(face.score - 0.95) < 1e-3
    assert detector.detect(picture(90, 150, (64, 40), colour=(0, 0, 255))) == []


@pytest.mark.parametrize("form", FORMS)
def test_coordinates_of_a_shrunk_picture_are_those_of_the_whole_one(files: dict[Any, Path], form: str):
    detector = _open(files[form, False], "--longest-side", "160")
    (face,) = detector.detect(picture(360, 640, (256, 160), side=32))  # a quarter of the size: 8 x 8 red pixels
    assert np.abs(face.points - (np.array([271.5, 175.5]) + 4 * OFFSETS)).max() < 8e-3
    if form == "centerface":
        return  # whose file names a size that means nothing
    (fitted,) = _open(files[form, True]).detect(picture(192, 320, (64, 80), side=16))  # into 96 x 160
    assert np.abs(fitted.points - (np.array([71.5, 87.5]) + 2 * OFFSETS)).max() < 4e-3


def test_faces_come_in_order_and_boxes_end_at_the_border(files: dict[Any, Path]):
    detector = _open(files["scrfd", False])
    pixels = picture(128, 256, (8, 8), (160, 64))
    pixels[64, 160] = (250, 0, 0)  # not so red: a lower score
    first, second = detector.detect(pixels)
    assert first.score > second.score and first.box.tolist() == [-0.5, -0.5, 39.5, 39.5]
    assert np.abs(second.points.mean(axis=0) - [163.5, 67.5]).max() < 2e-3


def test_small_and_weak_faces_do_not_count(files: dict[Any, Path]):
    pixels = picture(128, 256, (8, 8), (160, 64))
    assert len(_open(files["scrfd", False], "--min-size", "40").detect(pixels)) == 2
    assert len(_open(files["scrfd", False], "--min-size", "41").detect(pixels)) == 1  # the other is cut by the border
    assert len(_open(files["scrfd", False], "--min-score", "0.96").detect(pixels)) == 0
    near = picture(128, 256, (80, 64), (96, 64))  # boxes of 56 pixels, 16 apart: 40 / 72 of their union is shared
    assert len(_open(files["scrfd", False], "--overlap", "0.6").detect(near)) == 2
    assert len(_open(files["scrfd", False], "--overlap", "0.5").detect(near)) == 1


@pytest.mark.parametrize("form", FORMS)
def test_threads_find_what_one_finds(files: dict[Any, Path], form: str):
    detector = _open(files[form, False])
    pictures = [picture(96 + 8 * n, 96 + 16 * (n % 3), (8 * n, 32)) for n in range(8)]
    expected = [detector.detect(pixels)[0].points for pixels in pictures]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(detector.detect, pictures * 3))
    assert all(np.array_equal(faces[0].points, points) for faces, points in zip(found, expected * 3, strict=True))


@pytest.mark.parametrize(
    ("height", "width", "fixed"), [(333, 517, None), (517, 333, (96, 160)), (64, 64, (96, 160)), (1, 90, None)]
)
def test_a_point_of_the_canvas_maps_back_to_its_place_in_the_picture(height: int, width: int, fixed: tuple[int, int] | None):
    """The reference is a ramp: its value at a point is the point's own coordinate, shrunk by averages over areas."""
    for axis in (0, 1):
        size = (height, width)[axis]
        ramp = np.linspace(0, 255, size) if size > 1 else np.full(1, 128.0)
        pixels = np.broadcast_to(ramp[:, None, None] if axis == 0 else ramp[None, :, None], (height, width, 3))
        canvas, factor = letterbox(np.round(pixels).astype(np.uint8), fixed, 100)
        inner = (round(height * factor[1]), round(width * factor[0]))
        assert canvas[inner[0] :].max(initial=0) == 0 and canvas[:, inner[1] :].max(initial=0) == 0
        assert fixed == canvas.shape[:2] if fixed else all(side % 32 == 0 for side in canvas.shape[:2])
        if size == 1:
            continue
        line = canvas[: inner[0], 0, 0] if axis == 0 else canvas[0, : inner[1], 0]
        places = (np.arange(len(line)) + 0.5) / factor[1 - axis] - 0.5
        # rounded once in the picture and once in the canvas; so many levels are a pixel
        assert np.abs(line - places * 255 / (size - 1)).max() <= 1.0 + 1e-6


def test_a_picture_is_never_enlarged():
    canvas, factor = letterbox(np.full((40, 50, 3), 7, dtype=np.uint8), (640, 640), 640)
    assert factor.tolist() == [1, 1] and (canvas[:40, :50] == 7).all() and canvas.sum() == 7 * 40 * 50 * 3


@pytest.mark.numeric
def test_scrfd_is_decoded_as_it_is_defined():
    rng = np.random.default_rng(1)
    for stride, rows, columns in ((8, 3, 5), (16, 2, 3), (32, 1, 2)):
        count = rows * columns * 2
        distances, offsets = rng.normal(size=(count, 4)), rng.normal(size=(count, 10))
        centres = detector.anchor_centres(rows, columns, stride, 2)
        boxes, points = detector.decode_distances(centres, distances * stride, offsets * stride)
        anchor = 0
        for row in range(rows):
            for column in range(columns):
                for _ in range(2):
                    x, y = column * stride, row * stride
                    left, top, right, bottom = distances[anchor] * stride
                    assert np.allclose(boxes[anchor], [x - left, y - top, x + right, y + bottom], atol=1e-9)
                    for point in range(5):
                        dx, dy = offsets[anchor, 2 * point : 2 * point + 2] * stride
                        assert np.allclose(points[anchor, point], [x + dx, y + dy], atol=1e-9)
                    anchor += 1
        assert anchor == count


@pytest.mark.numeric
def test_retinaface_is_decoded_as_it_is_defined():
    rng = np.random.default_rng(2)
    height, width = 96, 150  # not a multiple of the strides: grids are rounded up
    priors = detector.prior_boxes(height, width)
    offsets, landmarks = rng.normal(size=(len(priors), 4)), rng.normal(size=(len(priors), 10))
    boxes, points = detector.decode_priors(priors, offsets, landmarks)
    anchor = 0
    for stride, sides in zip(STRIDES, ((16, 32), (64, 128), (256, 512)), strict=True):
        for row in range(math.ceil(height / stride)):
            for column in range(math.ceil(width / stride)):
                for side in sides:
                    x, y = (column + 0.5) * stride, (row + 0.5) * stride
                    a, b, c, d = offsets[anchor]
                    cx, cy = x + 0.1 * a * side, y + 0.1 * b * side
                    w, h = side * math.exp(0.2 * c), side * math.exp(0.2 * d)
                    assert np.allclose(boxes[anchor], [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], atol=1e-9)
                    for point in range(5):
                        u, v = landmarks[anchor, 2 * point : 2 * point + 2]
                        assert np.allclose(points[anchor, point], [x + 0.1 * u * side, y + 0.1 * v * side], atol=1e-9)
                    anchor += 1
    assert anchor == len(priors)


@pytest.mark.numeric
def test_centerface_is_decoded_as_it_is_defined():
    generator = np.random.default_rng(3)
    h, w = 8, 16
    scores, sizes, offsets, landmarks = (generator.normal(0, 0.5, (1, k, h, w)).astype(np.float32) for k in (1, 2, 2, 10))
    made = object.__new__(detector.CenterFace)
    made.path = Path("x")
    made._session = argparse.Namespace(run=lambda images: [scores, sizes, offsets, landmarks])
    found = made.candidates(np.zeros((4 * h, 4 * w, 3), dtype=np.uint8), 0.2)
    number = 0
    for row in range(h):
        for column in range(w):
            if scores[0, 0, row, column] < 0.2:
                continue
            high, wide = (4 * math.exp(sizes[0, k, row, column]) for k in (0, 1))
            top = 4 * (row + float(offsets[0, 0, row, column]) + 0.5) - high / 2
            left = 4 * (column + float(offsets[0, 1, row, column]) + 0.5) - wide / 2
            assert np.allclose(found.boxes[number], [left, top, left + wide, top + high], atol=1e-4)
            for k in range(5):
                y, x = (float(landmarks[0, 2 * k + part, row, column]) for part in (0, 1))
                assert np.allclose(found.points[number, k], [left + wide * x, top + high * y], atol=1e-4)
            number += 1
    assert number == len(found.scores) > 20


@pytest.mark.numeric
@pytest.mark.parametrize("fixed", [False, True])
def test_yunet_finds_what_opencv_finds(tmp_path: Path, fixed: bool):
    """Among random numbers of all cells, down to weak scores: cv2.FaceDetectorYN is the reference."""
    rng = np.random.default_rng(4)

    def change(constants: dict[str, np.ndarray]) -> None:
        for name, value in constants.items():
            if name[:2] in ("w_", "b_"):
                value[...] = rng.normal(0, 3e-3 if name[0] == "w" else 0.3, value.shape)

    path = write_detector(tmp_path / "x.onnx", "yunet", (96, 160) if fixed else None, change)
    pixels = rng.integers(0, 256, (96, 160, 3), dtype=np.uint8)
    theirs = cv2.FaceDetectorYN.create(str(path), "", (160, 96), 0.3, 1.0, 5000).detect(pixels[:, :, ::-1].copy())[1]
    ours = _open(path).candidates(pixels, 0.3)
    assert len(ours.scores) == len(theirs) > 100
    order, other = np.argsort(ours.points[:, 0, 0]), np.argsort(theirs[:, 4])
    mine = np.concatenate([ours.boxes[:, :2], ours.boxes[:, 2:] - ours.boxes[:, :2], ours.points.reshape(-1, 10)], axis=1)
    np.testing.assert_allclose(mine[order], theirs[other, :14], rtol=1e-4, atol=1e-3)  # float32, pixels
    np.testing.assert_allclose(ours.scores[order], theirs[other, 14], atol=1e-5)


@pytest.mark.numeric
def test_retinaface_takes_probabilities_and_logits():
    logits = np.random.default_rng(3).normal(size=(50, 2)).astype(np.float32) * 4
    share = np.exp(logits.astype(np.float64))
    share /= share.sum(axis=1, keepdims=True)
    assert np.allclose(detector.face_scores(logits), share[:, 1], atol=1e-6)
    assert np.allclose(detector.face_scores(share.astype(np.float32)), share[:, 1], atol=1e-6)


def test_double_boxes_are_dropped_as_in_a_loop_over_pairs():
    rng = np.random.default_rng(4)
    for overlap in (0.0, 0.3, 0.7, 1.0):
        corners = rng.integers(0, 40, (60, 2))
        boxes = np.concatenate([corners, corners + rng.integers(1, 30, (60, 2))], axis=1).astype(np.float64)
        scores = rng.integers(0, 12, 60) / 12  # with ties
        kept: list[int] = []
        for number in sorted(range(60), key=lambda number: (-scores[number], number)):
            if all(_iou(boxes[number], boxes[other]) <= overlap for other in kept):
                kept.append(number)
        assert suppress(boxes, scores, overlap).tolist() == kept


def _iou(a: np.ndarray, b: np.ndarray) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return width * height / (areas - width * height)


def test_a_file_that_returns_a_million_boxes_is_bounded():
    count = 1_000_000
    places = np.stack([np.arange(count), np.zeros(count)], axis=1)
    found = Candidates(np.linspace(0.5, 1, count), np.concatenate([places, places + 0.5], axis=1), np.zeros((count, 5, 2)))
    best = strongest(found, 0.1, Path("x"))
    assert len(best.scores) == 5000 and best.scores[0] == 1
    assert len(suppress(best.boxes, best.scores, 0.4)) == 1000


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["b_score_8", "b_box_8", "b_points_8"])
def test_numbers_that_are_not_finite_are_an_error(tmp_path: Path, form: str, name: str):
    def change(constants: dict[str, np.ndarray]) -> None:
        constants[name][0] = np.nan

    path = write_detector(tmp_path / "nan.onnx", form, change=change)
    with pytest.raises(ValueError, match=r"nan\.onnx: the detector returns .* that are no finite numbers"):
        _open(path).detect(picture(96, 96, (32, 32)))


@pytest.mark.parametrize("form", FORMS)
def test_boxes_without_area_are_no_faces(tmp_path: Path, form: str):
    def change(constants: dict[str, np.ndarray]) -> None:
        if form == "scrfd":
            constants["b_box_8"][:] = -1.0
        else:
            constants["b_box_8"].reshape(-1, 2 if form == "centerface" else 4)[:, -2:] = -1e4

    assert _open(write_detector(tmp_path / "flat.onnx", form, change=change)).detect(picture(96, 96, (32, 32))) == []


@pytest.mark.parametrize(
    ("form", "drop", "said"),
    [
        ("scrfd", 3, "a detector without landmarks"),
        ("scrfd", 1, "no detector that is known here"),
        ("retinaface", 1, "no detector that is known here"),
        ("yunet", 3, "SCRFD detector returns"),  # nine outputs, but of other widths
        ("yunet", 8, "CenterFace detector returns"),
        ("centerface", 1, "RetinaFace detector returns"),
    ],
)
def test_a_file_with_other_outputs_is_refused(tmp_path: Path, form: str, drop: int, said: str):
    with pytest.raises(ValueError, match=said):
        _open(write_detector(tmp_path / "other.onnx", form, drop=drop))


def test_outputs_without_numbers_are_named_with_the_file():
    with pytest.raises(ValueError, match=r"x\.onnx: an SCRFD detector returns"):
        detector.by_stride([np.zeros((1, 0), dtype=np.float32)] * 9, Path("x.onnx"))


@pytest.mark.parametrize("form", FORMS[:3])
def test_a_file_whose_grids_do_not_fit_is_refused_when_it_is_opened(tmp_path: Path, form: str):
    def change(constants: dict[str, np.ndarray]) -> None:
        for name in list(constants):  # the coarsest grid is twice as wide as the strides say
            if name.endswith("_32") and name.startswith("s_"):
                constants[name] = constants[name.replace("_32", "_16")]
            elif name.endswith("_32"):
                constants[name] = np.concatenate([constants[name]] * 2) if name[:2] in ("w_", "b_") else constants[name]

    with pytest.raises(ValueError, match=r"detector (returns|has|must have)"):
        _open(write_detector(tmp_path / "wide.onnx", form, change=change))


@pytest.mark.parametrize("form", FORMS[:3])
@pytest.mark.parametrize("size", [(32, 8224), (1 << 33, 32), (40_000, 40_000)])
def test_a_file_with_a_huge_input_is_refused_before_it_takes_memory(tmp_path: Path, form: str, size: tuple[int, int]):
    path = write_detector(tmp_path / "huge.onnx", form, size)
    with pytest.raises(ValueError, match=rf"huge\.onnx: its input has {size[1]} x {size[0]} pixels, and a side may have 8,192"):
        _open(path)


def _one_node(path: Path, shape: list[Any], outputs: int = 9, kind: int = TensorProto.FLOAT) -> Path:
    names = [f"o{number}" for number in range(outputs)]
    nodes = [helper.make_node("Identity", ["x"], [name]) for name in names]
    values = [helper.make_tensor_value_info(name, kind, None) for name in names]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", kind, shape)], values)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    return path


@pytest.mark.parametrize(
    ("shape", "kind", "said"),
    [
        ([1, 3, 64], TensorProto.FLOAT, "one input"),
        ([1, 4, 64, 64], TensorProto.FLOAT, "one input"),
        ([1, 3, 64, "w"], TensorProto.FLOAT, "one input"),
        ([1, 3, 64, 64], TensorProto.FLOAT, "SCRFD detector returns"),
        ([1, 3, 64, 64], TensorProto.INT64, "cannot run on an image"),
        ([2, 3, 64, 64], TensorProto.FLOAT, "cannot run on an image"),
    ],
)
def test_a_graph_of_another_kind_is_refused(tmp_path: Path, shape: list[Any], kind: int, said: str):
    with pytest.raises(ValueError, match=said) as error:
        _open(_one_node(tmp_path / "other.onnx", shape, kind=kind))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [b"", b"no onnx file", b"\x3a\xff\xff\xff\x7f", "cut"])
def test_a_damaged_file_is_refused(tmp_path: Path, data: bytes | str):
    path = write_detector(tmp_path / "x.onnx", "yunet")
    path.write_bytes(path.read_bytes()[:3000] if isinstance(data, str) else data)
    with pytest.raises(ValueError, match=r"x\.onnx"):
        _open(path)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_whose_tensors_lie_outside_its_folder_is_refused(tmp_path: Path, form: str):
    (tmp_path / "net").mkdir()
    path = write_detector(tmp_path / "net" / "x.onnx", form)
    model = onnx.load(str(path))
    tensor = model.graph.initializer[0]
    (tmp_path / "secret").write_bytes(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match=r"not a file in its own folder"):
        _open(path)


@pytest.mark.parametrize("what", ["folder", "missing"])
def test_what_is_no_file_is_an_error_with_words(tmp_path: Path, what: str):
    with pytest.raises(OSError, match=r"folder|No such file"):
        _open(tmp_path if what == "folder" else tmp_path / "missing.onnx")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="onnxruntime 1.23, the last for Python 3.10, is ended by it")
def test_a_convolution_that_moves_by_nothing_is_refused(tmp_path: Path):
    """Who divides by it is ended by the processor."""
    path = write_detector(tmp_path / "x.onnx", "yunet", (64, 96))
    model = onnx.load(str(path))
    for attribute in model.graph.node[0].attribute:
        if attribute.name == "strides":
            attribute.ints[:] = [0, 0]
    onnx.save(model, str(path))
    with pytest.raises(ValueError, match=r"x\.onnx: ") as error:
        _open(path)
    assert "\n" not in str(error.value)
