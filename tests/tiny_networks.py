"""Networks of a few operations as ONNX files."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Operation = tuple[str, dict[str, Any]]  # with its attributes
MEAN_COLOUR: list[Operation] = [("GlobalAveragePool", {}), ("Flatten", {})]
TIMES_MATRIX: Operation = ("Gemm", {"transB": 1})


def write_onnx(
    path: Path, chain: list[Operation], dim: int, size: int = 112, batch: int | str = "n", **constants: np.ndarray
) -> str:
    """Write a network of operations, the last of which takes the constants too; return its path.

    It makes `embeddings` (batch, dim) float32 of `images` (batch, 3, size, size) float32.
    """
    names = ["images", *(f"step_{number}" for number in range(1, len(chain))), "embeddings"]
    nodes = [helper.make_node(kind, [names[k]], [names[k + 1]], **attributes) for k, (kind, attributes) in enumerate(chain)]
    nodes[-1].input.extend(constants)
    shapes = {"images": [batch, 3, size, size], "embeddings": [batch, dim]}
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)] for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "tiny", *ends, [numpy_helper.from_array(value, name) for name, value in constants.items()])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return str(path)
