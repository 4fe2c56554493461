"""Makes smaller files of an ONNX graph, 16-bit or 8-bit, and compares a file with its network: numbers, accuracy, time, size.

The network itself is run as the evaluation runs it, without anything that the export added.
Shapes: n = images of a batch, S = image_size, D = embedding size.
"""

import importlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from data.base import FaceDataset
from data.datasets import SyntheticDataset
from data.scan import open_set_of
from eval import protocol
from eval.embed import EmbedSettings, inference_mode
from eval.foreign_networks import InputContract
from eval.monitor import evaluate
from eval.pair_sets.bin_file import PairSet
from utils.cli import progress
from utils.distributed import World
from utils.image import IMAGE_SIZE, normalise
from utils.parallel import torch_threads
from utils.randomness import derive
from utils.text import prefix_errors

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

    def cast(name: str, result: str, kind: int) -> None:
        nodes.append(onnx.helper.make_node("Cast", [name], [result], name=f"cast_{result}", to=kind))

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
                cast(name, copies[name, half], kind)
        return copies[name, half]

    for place, node in enumerate(graph.node):
        half = place in inside and node.op_type in (*_LAYERS, *_IN_FP16) and node.output[0] in floats
        node.input[:] = [converted(name, half) for name in node.input]
        nodes.append(node)
        for number, name in enumerate(node.output):
            if half and name in outputs:  # of the file, which stay in fp32
                node.output[number] = f"{name}_fp16"
                cast(f"{name}_fp16", name, onnx.TensorProto.FLOAT)
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
            SimpleNamespace(get_next=lambda: next(batches, None)),  # one batch after the other, None at the end
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


def check_insightface(contract: InputContract) -> None:
    """Raise ValueError unless insightface gives a recognition network what it takes.

    Its programs (release 2.1) feed RGB, know what a network is for by the size of its images and the number of its outputs,
    and align faces as this project does for multiples of 112 pixels.
    """
    size, given = contract.image_size, (contract.dtype, contract.colour, contract.mean, contract.std)
    if size % IMAGE_SIZE:
        raise ValueError(f"--pack insightface: images must have 112, 224, 336, ... pixels, those of this network have {size}")
    if given != ("float32", "rgb", 127.5, 127.5):
        raise ValueError(
            f"--pack insightface: its programs give a network (x - 127.5) / 127.5 of RGB; this one takes {given[1].upper()} in "
            f"{given[0]}, (x - {given[2]:g}) / {given[3]:g}. Leave out --with-preprocess, or --pack"
        )


def check_insightface_nodes(path: Path) -> None:
    """Raise ValueError if insightface, which guesses mean and std from the first eight names of an ONNX file, guesses wrong."""
    graph = importlib.import_module("onnx").load(path, load_external_data=False).graph
    names = [node.name for node in graph.node[:8]]
    if all(any(name.startswith(kind) for name in names) for kind in (("Sub", "_minus"), ("Mul", "_mul"))):
        raise ValueError(f"--pack insightface: it would take this network for one that scales pixels itself, by {names}")


def calibration_set(given: Path | None, config: Mapping[str, Any]) -> FaceDataset:
    """Return the set whose images give the ranges of the activations: --calibrate, or the training set of the run's config.

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
        return open_set_of(path)


def calibration_batches(
    dataset: FaceDataset, contract: InputContract, count: int, entry: str
) -> Iterator[Mapping[str, np.ndarray]]:
    """Yield the input of the network, `entry`, in batches, of `count` images drawn from a set, the same ones every time."""
    total = min(count, dataset.num_stored)
    chosen = np.random.default_rng(derive(0, "calibration")).choice(dataset.num_stored, total, replace=False)
    starts = range(0, total, _BATCH)
    for start in progress(starts, len(starts), "calibrating", "batch"):
        numbers = chosen[start : start + _BATCH].tolist()
        pixels = np.stack([dataset.pixels_and_label(number, contract.image_size)[0] for number in numbers])
        yield {entry: network_input(pixels, contract)}


def network_input(pixels: np.ndarray, contract: InputContract) -> np.ndarray:
    """Return what an exported network takes, of images (n, S, S, 3) uint8 RGB."""
    if contract.takes_bytes:
        return pixels
    ordered = pixels[..., ::-1] if contract.colour == "bgr" else pixels
    scaled = (ordered.astype(np.float32) - np.float32(contract.mean)) / np.float32(contract.std)
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


PARITY = 1e-4  # largest difference of an fp32 embedding, relative to its length
BATCHES = (1, 2, 7)
_ROUNDS, _FEWEST, _SECONDS = 40, 5, 60.0  # of a measurement: runs of each network, at least, and where the others end

Embed = Callable[[np.ndarray], Sequence[np.ndarray]]  # images (n, S, S, 3) uint8 RGB -> what the network returns


def images_to_compare(sets: Sequence[PairSet], image_size: int) -> np.ndarray:
    """Return images for all batches, (n, S, S, 3) uint8 RGB: of the first set, or drawn ones where there is none."""
    total = sum(BATCHES)
    if not sets:
        drawn = SyntheticDataset(total, total, seed=0, image_size=image_size)
        return np.stack([drawn.pixels_and_label(number, image_size)[0] for number in range(total)])
    count = len(sets[0].images)
    return np.stack([sets[0].decode(number * count // total, image_size) for number in range(total)])


def embeddings_of(model: nn.Module, pixels: np.ndarray, mirrored: bool) -> np.ndarray:
    """Return the raw embeddings (n, D) of a network that takes the input of this project, in batches of BATCHES.

    With `mirrored` those of the mirror images are added.
    """
    blocks = []
    with inference_mode(model):
        for part in _split(pixels):
            images = normalise(torch.from_numpy(part)).contiguous()
            found = model(images).float()
            blocks.append(found + model(images.flip(3)).float() if mirrored else found)
    return torch.cat(blocks).numpy()


def open_file(path: Path, contract: InputContract, threads: int) -> Embed:
    """Return an exported file as a function, run as any program of others would run it."""
    if path.suffix == ".pt2":
        program = torch.export.load(str(path)).module()

        def run_program(pixels: np.ndarray) -> Sequence[np.ndarray]:
            with torch.no_grad():
                found = program(torch.from_numpy(network_input(pixels, contract)))
            return [output.numpy() for output in (found if isinstance(found, tuple | list) else [found])]

        return run_program
    if path.suffix == ".xml":
        core = importlib.import_module("openvino").Core()
        # f32, because processors with bf16 would compute in that
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
        compiled = core.compile_model(path, "CPU", settings)
        return lambda pixels: list(compiled([network_input(pixels, contract)]).values())
    runtime = importlib.import_module("onnxruntime")
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = threads, 4
    session = runtime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    entry = session.get_inputs()[0].name
    return lambda pixels: session.run(None, {entry: network_input(pixels, contract)})


def compare(run: Embed, pixels: np.ndarray, reference: np.ndarray, contract: InputContract) -> tuple[float, float]:
    """Return how far a file is from its network, whose raw embeddings are `reference` (n, D), over batches of BATCHES.

    The largest difference of an embedding, relative to its length, inf if a number is not finite; and the smallest cosine
    between an embedding and that of the network.
    """
    outputs = [run(part) for part in _split(pixels)]
    shapes = [output[0].shape for output in outputs]
    expected = [(count, reference.shape[1]) for count in BATCHES]
    if shapes != expected:
        raise ValueError(f"the exported file returns {shapes} for batches of {BATCHES}, and must return {expected}")
    found = np.concatenate([output[0] for output in outputs]).astype(np.float64)
    exact = reference.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1, keepdims=True)
    safe = np.maximum(lengths, np.finfo(np.float32).tiny)
    if not contract.normalised:
        differences = [(found - exact) / safe]
    else:
        norms = np.concatenate([output[1] for output in outputs]).astype(np.float64)[:, None]
        differences = [found - exact / safe, (norms - lengths) / safe]
    # one array, because Python's max of several numbers loses one that is not a number
    largest = float(np.concatenate([np.linalg.norm(values, axis=1) for values in differences]).max())
    of_found = np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    cosines = (found / of_found * exact / safe).sum(1)
    return largest if np.isfinite(largest) else np.inf, float(cosines.min())


def _split(pixels: np.ndarray) -> Sequence[np.ndarray]:
    return np.split(pixels, np.cumsum(BATCHES)[:-1])


def accuracies(
    model: nn.Module, sets: Sequence[PairSet], image_size: int, batch_size: int, threads: int
) -> Iterator[tuple[str, float]]:
    """Yield (name of the set, accuracy) of a network that takes the input of this project."""
    settings = EmbedSettings(batch_size, None, threads, image_size)
    for name, result in evaluate(protocol.Embed(model, World(0, 1, 0, 1, torch.device("cpu")), settings, True), sets):
        yield name, result.accuracy


def measure(
    runs: Mapping[str, Callable[[np.ndarray], object]], pixels: np.ndarray, threads: int
) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a forward pass of each network: median, low and high (quartiles), and the number of runs.

    The networks run in turn, so that what else runs here slows all of them alike. The batch is (n, S, S, 3) uint8 RGB;
    `threads` are torch's, the others have theirs.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with torch_threads(threads):
        for run in runs.values():  # the first run allocates
            run(pixels)
        begin = time.perf_counter()
        for number in progress(range(_ROUNDS), _ROUNDS, f"measuring, batch {len(pixels)}", "round"):
            if number >= _FEWEST and time.perf_counter() - begin > _SECONDS:
                break
            for name, run in runs.items():
                start = time.perf_counter()
                run(pixels)
                seconds[name].append(time.perf_counter() - start)
    found = {}
    for name, values in seconds.items():
        low, median, high = (1000 * np.quantile(values, [0.25, 0.5, 0.75])).tolist()
        found[name] = {"median": median, "low": low, "high": high, "runs": len(values)}
    return found
