"""Face detectors of a few convolutions as ONNX files, in the forms that are read here: a face is a red square.

Each cell of the finest grid that is pure red is a face of fixed box and landmarks around it, so that what is found, and where,
can be read off the picture. The coarser grids find nothing.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from utils.alignment import TEMPLATE

STRIDES = (8, 16, 32)
HALF = 28.0  # pixels of the detector's input: half the side of a box
# of the five points from the middle of the face, with eyes 20 pixels apart
OFFSETS = (TEMPLATE - TEMPLATE.mean(axis=0)) * (20 / (TEMPLATE[1, 0] - TEMPLATE[0, 0]))
RED = (255, 0, 0)
FORMS = ("scrfd", "retinaface", "yunet", "centerface")
_SCORE = {
    "centerface": (RED, 0, 1),
    "scrfd": (RED, 127.5, 128.0),
    "retinaface": (RED[::-1], np.array([104, 117, 123]), 1.0),
    "yunet": (RED[::-1], 0, 1),
}


def picture(
    height: int, width: int, *places: tuple[float, float], colour: tuple[int, int, int] = RED, side: int = 8
) -> np.ndarray:
    """Return a grey picture (H, W, 3) uint8 RGB with squares of a colour, whose top left corners are at (x, y)."""
    pixels = np.full((height, width, 3), 90, dtype=np.uint8)
    for x, y in places:
        pixels[round(y) : round(y) + side, round(x) : round(x) + side] = colour
    return pixels


def write_detector(
    path: Path,
    form: str,
    size: tuple[int, int] | None = None,
    change: Callable[[dict[str, np.ndarray]], None] = lambda constants: None,
    points: np.ndarray = OFFSETS,
    drop: int = 0,
    best: float = 0.95,
) -> Path:
    """Write a detector of one of FORMS, whose faces have the score `best`, without the last `drop` outputs.

    size: fixed (height, width) of the input; None = any. change: may change the numbers of the file, by their name.
    points: (5, 2), of the landmarks from the middle of the face, in pixels of the input.
    """
    colour, mean, scale = _SCORE[form]
    seen = (np.array(colour, dtype=np.float64) - mean) / scale  # a red pixel as the network gets it
    nodes, constants, outputs = [], {}, []
    anchors = {"scrfd": 2, "retinaface": 2}.get(form, 1)
    for stride in STRIDES[: 1 if form == "centerface" else None]:
        # the score falls by `slope` for a mean distance to red of one level
        direction = np.where(np.array(colour) > 0, 1.0, -1.0)
        slope = 0.2 * scale
        bias = np.log(best / (1 - best)) - slope * float(direction @ seen) if stride == 8 else -100.0
        weight = np.broadcast_to(direction[None, :, None, None] * slope / stride**2, (anchors, 3, stride, stride))
        weight = weight if stride == 8 else np.zeros_like(weight)
        heads = _heads(form, stride, anchors, points)
        made = {"score": (weight, np.array([bias, -100.0][:anchors]))}
        for kind, values in heads.items():
            made[kind] = (np.zeros((len(values), 3, stride, stride)), values)
        for kind, (kernel, offset) in made.items():
            name = f"{kind}_{stride}"
            constants[f"w_{name}"] = np.ascontiguousarray(kernel, dtype=np.float32)
            constants[f"b_{name}"] = np.asarray(offset, dtype=np.float32)
            width = len(offset) // anchors
            if form == "centerface":  # one grid of 4 pixels, of which each cell sees 8
                sizes = {"strides": [4, 4], "kernel_shape": [8, 8], "pads": [0, 0, 4, 4]}
                nodes.append(helper.make_node("Conv", ["image", f"w_{name}", f"b_{name}"], [name], **sizes))
                continue
            constants[f"s_{name}"] = np.array([-1, width] if form == "scrfd" else [1, -1, width], dtype=np.int64)
            inputs = ["image", f"w_{name}", f"b_{name}"]
            nodes += [
                helper.make_node("Conv", inputs, [f"c_{name}"], strides=[stride, stride], kernel_shape=[stride, stride]),
                helper.make_node("Transpose", [f"c_{name}"], [f"t_{name}"], perm=[0, 2, 3, 1]),
                helper.make_node("Reshape", [f"t_{name}", f"s_{name}"], [f"r_{name}"]),
            ]
    if form == "centerface":
        nodes.append(helper.make_node("Sigmoid", ["score_8"], ["scores"]))
        outputs = ["scores", "box_8", "offset_8", "points_8"]
    elif form == "scrfd":
        for kind in ("score", "box", "points"):
            for stride in STRIDES:
                if kind == "score":
                    nodes.append(helper.make_node("Sigmoid", [f"r_score_{stride}"], [f"p_{stride}"]))
                outputs.append(f"p_{stride}" if kind == "score" else f"r_{kind}_{stride}")
    elif form == "retinaface":
        for kind in ("box", "score", "points"):
            nodes.append(helper.make_node("Concat", [f"r_{kind}_{stride}" for stride in STRIDES], [kind], axis=1))
        constants["zero"] = np.zeros(1, dtype=np.float32)
        nodes.append(helper.make_node("Mul", ["score", "zero"], ["other"]))
        nodes.append(helper.make_node("Concat", ["other", "score"], ["logits"], axis=2))
        nodes.append(helper.make_node("Softmax", ["logits"], ["conf"], axis=2))
        outputs = ["box", "conf", "points"]
    else:
        for kind, source in (("cls", "score"), ("obj", "score"), ("bbox", "box"), ("kps", "points")):
            for stride in STRIDES:
                operation = "Sigmoid" if source == "score" else "Identity"
                nodes.append(helper.make_node(operation, [f"r_{source}_{stride}"], [f"{kind}_{stride}"]))
                outputs.append(f"{kind}_{stride}")
    change(constants)
    shape = [1, 3, *(size or ("height", "width"))]
    graph = helper.make_graph(
        nodes,
        form,
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, _shape(name, form)) for name in outputs[: len(outputs) - drop]],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), str(path))
    return path


def _heads(form: str, stride: int, anchors: int, points: np.ndarray) -> dict[str, np.ndarray]:
    """Return the constant numbers of boxes and landmarks of a cell: the face lies around the middle of the cell."""
    middle = stride / 2 - 0.5
    if form == "centerface":  # from the top left corner of the box, in its sizes, y first
        offset = np.full(2, middle / 4 - 0.5)
        points = (points[:, ::-1] + HALF) / (2 * HALF)
        return {"box": np.full(2, np.log(2 * HALF / 4)), "offset": offset, "points": points.ravel()}
    if form == "scrfd":  # from the corner of the cell, in strides
        box = np.array([HALF - middle, HALF - middle, HALF + middle, HALF + middle]) / stride
        return {"box": np.tile(box, anchors), "points": np.tile((points + middle).ravel() / stride, anchors)}
    if form == "retinaface":  # from the prior box, whose centre lies half a pixel from that middle
        sizes = {8: (16, 32), 16: (64, 128), 32: (256, 512)}[stride]
        box = [[-0.5 / 0.1 / s, -0.5 / 0.1 / s, *[np.log(2 * HALF / s) / 0.2] * 2] for s in sizes]
        return {"box": np.ravel(box), "points": np.ravel([((points - 0.5) / 0.1 / s).ravel() for s in sizes])}
    # YuNet: centre from the corner, size as logarithm
    box = [middle / stride, middle / stride, *[np.log(2 * HALF / stride)] * 2]
    return {"box": np.array(box), "points": (points + middle).ravel() / stride}


def _shape(name: str, form: str) -> list[str | int] | None:
    """Return the declared shape of an output, which OpenCV wants to see; onnxruntime does not need it."""
    return [1, f"cells_{name}", {"cls": 1, "obj": 1, "bbox": 4, "kps": 10}[name.split("_")[0]]] if form == "yunet" else None
