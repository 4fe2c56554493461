"""Turns a network into a graph for deployment: traced with a dynamic batch, batch normalisations folded, ONNX or .pt2 bytes.

A file says what its user must know; eval/networks.py has the facts, their texts, and their reading.
Shapes: b = images, S = image_size, D = embedding size.
"""

import importlib
import json
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from eval.embed import inference_mode
from eval.foreign_networks import CONTRACT_FILE, ForeignNetwork, InputContract, contract_of_texts
from eval.networks import Network, OtherInput
from utils.alignment import TEMPLATE
from utils.checkpoint.tensor_file import NewFile, flush
from utils.distributed.agreement import digest_tensors
from utils.files import shown
from utils.image import IMAGE_SIZE
from utils.text import first_line, pip_install, prefix_errors


def describe(
    network: Network, backbone: str, embedding_size: int, with_preprocess: bool, mirrored: bool, precision: str
) -> InputContract:
    """Return the contract of an exported network.

    Args:
        network: of this project, as eval.networks.load_network returns it.
        backbone: its name, where the network comes from a file of weights.
        with_preprocess: the exported network takes bytes, and returns unit vectors.
        mirrored: it adds the embedding of the mirror image.
        precision: fp32, fp16 or int8.

    Raises:
        ValueError: a value is out of the bounds of a contract, so that face eval could not read the file.
    """
    model: Any = network.model
    colour, mean, std = "rgb", 127.5, 127.5
    if isinstance(model, OtherInput):
        colour, mean, std, model = "bgr" if model.bgr else "rgb", model.mean, model.std, model.model
    assert not isinstance(model, ForeignNetwork), "is exported already"
    scale = network.image_size / IMAGE_SIZE
    step = re.search(r"\bstep (\d+)", network.state)
    contract = InputContract(
        image_size=network.image_size,
        layout="NHWC" if with_preprocess else "NCHW",
        colour="rgb" if with_preprocess else colour,
        mean=0.0 if with_preprocess else mean,
        std=1.0 if with_preprocess else std,
        dtype="uint8" if with_preprocess else "float32",
        points=tuple((round(scale * x, 4), round(scale * y, 4)) for x, y in TEMPLATE.tolist()),
        embedding_size=embedding_size,
        normalised=with_preprocess,
        mirrored=mirrored,
        precision=precision,
        run=_name_of(network),
        step=step[1] + (" (moving average)" if network.state.startswith("moving average") else "") if step else "",
        backbone=str(network.config.get("backbone", {}).get("name") or backbone or ""),
        weights=digest_tensors(model.state_dict()),
    )
    with prefix_errors("a file that face eval could not read is not written"):
        contract_of_texts(contract.as_texts())
    return contract


def _name_of(network: Network) -> str:
    """Return the name of a run, or of a file of weights, without its folders, which say more than a user wants to publish."""
    path = Path(network.name)
    if network.config and path.absolute().parent.name == "checkpoints":
        path = path.absolute().parents[1]
    return shown(path.name)


def write_metadata(model: Any, contract: InputContract) -> None:
    """Put the contract into the metadata of an onnx.ModelProto, in place of what is there."""
    del model.metadata_props[:]
    for key, value in contract.as_texts().items():
        model.metadata_props.add(key=key, value=value)


ONNX_OPSET = 18  # the oldest that the exporter writes without converting: more runtimes read it
LARGEST_FILE = 1_900_000_000  # bytes of weights inside an ONNX file; protobuf ends at 2^31
_SMALL = 1024  # bytes of a tensor that stays in the ONNX file, where onnxruntime needs shapes
OUTPUTS = ("embeddings", "norms")
_LAYERS = (torch.ops.aten.conv2d.default, torch.ops.aten.linear.default)
_NORM = torch.ops.aten.batch_norm.default


class Deployed(nn.Module):
    """A network with what surrounds it in an exported file.

    Args:
        network: of this project; (b, 3, S, S) in its own scale and colour order -> (b, D).
        with_preprocess: take (b, S, S, 3) uint8 RGB, and return unit vectors (b, D) and the lengths (b,) that they had.
        mirrored: add the embedding of the mirror image.
    """

    def __init__(self, network: Network, with_preprocess: bool, mirrored: bool) -> None:
        super().__init__()
        self.model, self.with_preprocess, self.mirrored = network.model, with_preprocess, mirrored
        self.bgr, self.mean, self.std = False, 127.5, 127.5  # the input of the model, which is made here from bytes
        if isinstance(other := network.model, OtherInput):  # no adapter of eval.networks is in the graph
            self.model, self.bgr, self.mean, self.std = other.model, other.bgr, other.mean, other.std

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return embeddings (b, D), with their lengths (b,) if they are unit vectors."""
        x = images
        if self.with_preprocess:
            x = x.permute(0, 3, 1, 2).to(torch.float32)
            x = ((x.flip(1) if self.bgr else x) - self.mean) / self.std
        if self.mirrored:
            both = self.model(torch.cat([x, x.flip(3)]))
            count = images.shape[0]  # not len, which would be the number of the traced batch
            embeddings = both[:count] + both[count:]
        else:
            embeddings = self.model(x)
        if not self.with_preprocess:
            return embeddings
        norms = torch.linalg.vector_norm(embeddings, dim=1)
        # an embedding of zeros stays one: its direction is unknown
        return embeddings / norms.clamp(min=torch.finfo(torch.float32).tiny)[:, None], norms


def trace(module: Deployed, image_size: int) -> tuple[ExportedProgram, int, int]:
    """Return the graph of a network for any batch, its batch normalisations folded where that changes no result.

    Then how many are folded, and how many there are in all.

    Raises:
        ValueError: torch.export cannot trace it; the message has its reason.
    """
    shape = (2, image_size, image_size, 3) if module.with_preprocess else (2, 3, image_size, image_size)
    images = torch.zeros(shape, dtype=torch.uint8 if module.with_preprocess else torch.float32)
    # at least 1: traced at 2, which no other size of the graph is, and nothing here depends on the number of images
    batch = ({0: Dim("batch", min=1)},)
    with inference_mode(module), torch.inference_mode(False), torch.no_grad(), _quiet():
        try:
            program = torch.export.export(module, (images,), dynamic_shapes=batch)
        except Exception as error:  # of torch's compiler, which has many kinds
            raise ValueError(f"torch.export cannot trace this network: {first_line(error):.300}") from None
        return program, *fold_norms(program)


def fold_norms(program: ExportedProgram) -> tuple[int, int]:
    """Fold each batch normalisation behind a convolution or linear layer into it; return how many were folded, of how many.

    One before a convolution stays: its shift would have to be added to the zeros of the padding, too. So does one whose layer
    has another user. Weights are computed in float64 and rounded once. The parameters of the network itself stay as they are.
    """
    graph, state = program.graph, program.state_dict
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}  # placeholder -> name in the state

    def value(argument: Any) -> Tensor | None:
        return state[names[argument.name]].detach().double() if isinstance(argument, Node) and argument.name in names else None

    norms = [node for node in graph.nodes if node.target == _NORM]
    folded = 0
    for norm in norms:
        arguments: Sequence[Any] = norm.args
        layer, gain, shift, mean, variance, training, _, eps = arguments[:8]
        if not (isinstance(layer, Node) and layer.target in _LAYERS and len(layer.users) == 1) or training:
            continue
        of_layer: Sequence[Any] = layer.args
        weight_node, bias_node = of_layer[1], of_layer[2] if len(of_layer) > 2 else None
        target = bias_node or shift  # a layer without a bias takes over that of its normalisation
        values = [value(argument) for argument in (weight_node, gain, shift, mean, variance)]
        changed = [node for node in (weight_node, target) if isinstance(node, Node)]
        if any(found is None for found in values) or any(len(node.users) != 1 for node in changed):
            continue
        weight, gains, shifts, means, variances = cast(list[Tensor], values)
        scale = gains / (variances + eps).sqrt()
        old_bias = value(bias_node)
        bias = ((0.0 if old_bias is None else old_bias) - means) * scale + shifts
        for node, new in ((weight_node, weight * scale.reshape(-1, *[1] * (weight.dim() - 1))), (target, bias)):
            name = names[node.name]
            state[name] = nn.Parameter(new.to(state[name].dtype), requires_grad=False)
        # the normalisation becomes the layer, so that an output of the network keeps its name
        norm.target, norm.args = layer.target, (layer.args[0], weight_node, target, *layer.args[3:])
        graph.erase_node(layer)
        folded += 1
    program.graph_module.recompile()
    return folded, len(norms)


def to_onnx(program: ExportedProgram, contract: InputContract, given: str = "images") -> Any:
    """Return the onnx.ModelProto of a graph, its input called `given`, without texts that name files of this machine.

    Raises:
        ValueError: a package is missing, or the exporter cannot translate the graph.
    """
    require_onnx()
    with _quiet():
        try:
            found = torch.onnx.export(
                program,
                input_names=[given],
                output_names=list(OUTPUTS[: 1 + contract.normalised]),
                opset_version=ONNX_OPSET,
                dynamo=True,
                verbose=False,
            )
        except Exception as error:
            reason: BaseException = error
            while reason.__cause__:  # the last names the operation
                reason = reason.__cause__
            raise ValueError(f"torch.onnx cannot translate this network: {first_line(reason):.300}") from None
    assert found is not None
    model = found.model_proto
    graph = model.graph
    model.doc_string = graph.doc_string = ""
    for entry in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del entry.metadata_props[:]
        entry.doc_string = ""
    for number, node in enumerate(graph.node):
        node.name = node.name or f"node_{number}"
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    write_metadata(model, contract)
    return model


def require_onnx(form: str = "onnx") -> None:
    """Raise ValueError unless the packages that write and run ONNX files, or OpenVINO files made of them, are installed."""
    needed = ("onnx", "onnxruntime", "onnxscript", *(["openvino"] if form == "openvino" else []))
    for name in needed:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing = error.name or name
            raise ValueError(
                f"--to {form} needs {missing}: {pip_install(*needed)}; or take --to pt2, which needs nothing"
            ) from None


def write_onnx(model: Any, path: Path) -> Sequence[Path]:
    """Write an ONNX file, and one of its weights beside it, NAME.onnx.data, if they exceed LARGEST_FILE; return the files."""
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    files = [path]
    if size > LARGEST_FILE:
        files.append(path.with_name(f"{path.name}.data"))
        _write_weights(model, files[1])
    with NewFile(path) as file:
        file.write(model.SerializeToString())
        file.close()
    return files


def write_openvino(model: Any, path: Path) -> Sequence[Path]:
    """Write NAME.xml and its weights NAME.bin, with the metadata of an onnx.ModelProto in `framework` of its rt_info."""
    openvino = importlib.import_module("openvino")
    sources = write_onnx(model, path.with_suffix(".onnx"))
    # not convert_model, which reports its use to its developers
    openvino.save_model(openvino.Core().read_model(sources[0]), path, compress_to_fp16=False)
    files = [path, path.with_suffix(".bin")]
    for file in files:
        flush(file)
    return files


def _write_weights(model: Any, path: Path) -> None:
    """Move the weights of an onnx.ModelProto into a file."""
    with NewFile(path) as file:
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) < _SMALL:
                continue
            entries = {"location": path.name, "offset": str(file.size), "length": str(len(tensor.raw_data))}
            file.write(tensor.raw_data)
            for key, value in entries.items():
                tensor.external_data.add(key=key, value=value)
            tensor.data_location = type(tensor).EXTERNAL
            tensor.ClearField("raw_data")
        file.close()


def write_pt2(program: ExportedProgram, path: Path, contract: InputContract) -> None:
    """Write a .pt2 file of torch.export."""
    for node in program.graph.nodes:  # they name files of this machine
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            node.meta.pop(key, None)
    with NewFile(path) as file:
        try:
            with _quiet():
                extra = {CONTRACT_FILE: json.dumps(contract.as_texts())}
                torch.export.save(program, cast(IO[bytes], file), extra_files=extra)
        except RuntimeError as error:  # torch has words of its own for a full disk
            raise file.failure or error from None
        file.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of exporters, which are for their developers; errors are raised."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
