"""Makes smaller files of an ONNX graph: 16-bit weights, or 8-bit weights and activations from the ranges on some images.

Shapes: n = images of a batch, S = image_size.
"""

import importlib
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.base import FaceDataset
from data.datasets import open_set
from eval.input_contract import InputContract
from utils.cli import progress
from utils.randomness import derive
from utils.text import one_line, prefix_errors

_LAYERS = ("Conv", "Gemm", "MatMul")
# what is computed in fp16, apart from the layers; all else stays in fp32: norms, means, softmax and quotients sum up many
# numbers, or overflow at 65,504
_IN_FP16 = (
    *("Add", "Clip", "Concat", "Flatten", "Mul", "PRelu", "Relu", "Reshape", "Sigmoid", "Slice", "Split", "Squeeze"),
    *("Transpose", "Unsqueeze"),
)
_BATCH = 8  # images per forward pass of the calibration


def to_fp16(model: Any) -> Any:
    """Return an onnx.ModelProto with 16-bit weights and activations; its input and output stay as they are.

    What comes before the first layer and behind the last stays in fp32: the scale of the input, and the length of embeddings.

    Raises:
        ValueError: a weight is too large for fp16.
    """
    onnx = importlib.import_module("onnx")
    graph = onnx.shape_inference.infer_shapes(model).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output, *graph.value_info)}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    types |= {name: tensor.data_type for name, tensor in weights.items()}
    floats = {name for name, kind in types.items() if kind == onnx.TensorProto.FLOAT}
    places = [place for place, node in enumerate(graph.node) if node.op_type in _LAYERS]
    inside = range(places[0], places[-1] + 1) if places else range(0)
    outputs = {value.name for value in graph.output}
    halves: set[str] = set()  # tensors that are computed in fp16
    copies: dict[tuple[str, bool], str] = {}  # (tensor, whether in fp16) -> its copy of that type
    nodes: list[Any] = []

    def converted(name: str, half: bool) -> str:
        """Return the name of a tensor in fp16 or fp32; it is converted once, whoever uses it."""
        if name not in floats or half == (name in halves):
            return name
        if (name, half) not in copies:
            copies[name, half] = f"{name}_{'fp16' if half else 'fp32'}"
            if half and name in weights:
                graph.initializer.append(_half_weight(onnx, weights[name], copies[name, half]))
            else:
                kind = onnx.TensorProto.FLOAT16 if half else onnx.TensorProto.FLOAT
                nodes.append(
                    onnx.helper.make_node("Cast", [name], [copies[name, half]], name=f"cast_{copies[name, half]}", to=kind)
                )
        return copies[name, half]

    for place, node in enumerate(graph.node):
        half = place in inside and node.op_type in (*_LAYERS, *_IN_FP16) and node.output[0] in floats
        node.input[:] = [converted(name, half) for name in node.input]
        nodes.append(node)
        for number, name in enumerate(node.output):
            if half and name in outputs:  # of the file, which stay in fp32
                node.output[number] = f"{name}_fp16"
                nodes.append(
                    onnx.helper.make_node("Cast", [f"{name}_fp16"], [name], name=f"cast_{name}", to=onnx.TensorProto.FLOAT)
                )
            elif half:
                halves.add(name)
    used = {name for node in nodes for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for field, values in (("node", nodes), ("initializer", kept), ("value_info", [])):
        result.graph.ClearField(field)
        getattr(result.graph, field).extend(values)
    return result


def _half_weight(onnx: Any, tensor: Any, name: str) -> Any:
    """Return a weight in fp16."""
    values = onnx.numpy_helper.to_array(tensor)
    largest = float(np.abs(values).max(initial=0.0))
    if not largest <= np.finfo(np.float16).max:
        raise ValueError(f"--precision fp16: a weight of {largest:.3g} is too large for 16 bits; take fp32")
    return onnx.numpy_helper.from_array(values.astype(np.float16), name)


def to_int8(model: Any, batches: Iterator[Mapping[str, np.ndarray]], folder: Path) -> Any:
    """Return an onnx.ModelProto whose convolutions and linear layers compute with 8 bits.

    Weights have a scale per channel, and 7 bits: products of 8-bit weights overflow the 16-bit sums of processors without VNNI,
    and the accuracy should not depend on the processor.

    Args:
        batches: inputs by name, for the ranges of the activations.
        folder: for temporary files.
    """
    quantization = importlib.import_module("onnxruntime.quantization")
    onnx = importlib.import_module("onnx")
    before = logging.root.manager.disable, tempfile.tempdir
    logging.disable(logging.WARNING)  # its advice on how to call it
    tempfile.tempdir = str(folder)  # where it writes the graph with further outputs
    try:
        path = folder / "int8.onnx"
        quantization.quantize_static(
            model,
            path,
            _Reader(batches),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=list(_LAYERS),
            per_channel=True,
            reduce_range=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            # products of two activations, as in attention, stay in fp32
            extra_options={"MatMulConstBOnly": True},
        )
        found = onnx.load(path)
        path.unlink()
        return found
    finally:
        logging.disable(before[0])
        tempfile.tempdir = before[1]


class _Reader:
    """Gives onnxruntime one batch after the other."""

    def __init__(self, batches: Iterator[Mapping[str, np.ndarray]]) -> None:
        self._batches = batches

    def get_next(self) -> Mapping[str, np.ndarray] | None:
        """Return the next batch, None at the end."""
        return next(self._batches, None)


def calibration_set(given: Path | None, config: Mapping[str, Any]) -> FaceDataset:
    """Return the set whose images give the ranges of the activations.

    Args:
        given: --calibrate; None = the training set of the run.
        config: of the run, or {}.

    Raises:
        ValueError: there is none, or it cannot be opened.
    """
    section = config.get("data")
    section = section if isinstance(section, dict) else {}
    path = given or section.get("path")
    if given is None and (not config or section.get("sources") or section.get("source") == "synthetic" or not path):
        raise ValueError(
            "--precision int8 needs images like those that the network will see, and this network names no set of its own. "
            "Give one with --calibrate SET: a folder with train.rec, *.tar or a sub-folder per person, or a list file"
        )
    with prefix_errors("--calibrate" if given else "--precision int8: the training set of the run, or name one by --calibrate"):
        if not isinstance(path, (str, Path)):
            raise ValueError(f"data.path must be a text, got {path!r:.80}")
        dataset = open_set(path)
    for line in dataset.warnings:
        print(f"warning: {one_line(line)}", file=sys.stderr)
    return dataset


def calibration_batches(dataset: FaceDataset, contract: InputContract, count: int) -> Iterator[Mapping[str, np.ndarray]]:
    """Yield the input of the network in batches, of `count` images drawn from a set, the same ones every time."""
    total = min(count, dataset.num_stored)
    chosen = np.random.default_rng(derive(0, "calibration")).choice(dataset.num_stored, total, replace=False)
    starts = range(0, total, _BATCH)
    for start in progress(starts, len(starts), "calibrating", "batch"):
        numbers = chosen[start : start + _BATCH].tolist()
        pixels = np.stack([dataset.pixels_and_label(number, contract.image_size)[0] for number in numbers])
        yield {"images": network_input(pixels, contract)}


def network_input(pixels: np.ndarray, contract: InputContract) -> np.ndarray:
    """Return what an exported network takes, of images (n, S, S, 3) uint8 RGB."""
    if contract.takes_bytes:
        return pixels
    ordered = pixels[..., ::-1] if contract.colour == "bgr" else pixels
    scaled = (ordered.astype(np.float32) - np.float32(contract.mean)) / np.float32(contract.std)
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))
