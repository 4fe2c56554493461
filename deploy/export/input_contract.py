"""Says what the user of an exported network must know, and stores it in the file: ONNX metadata, or an extra file of .pt2.

eval/input_contract.py has the facts, their texts, and their reading.
"""

import json
import re
from pathlib import Path
from typing import Any

from eval.foreign_networks import ForeignNetwork
from eval.input_contract import CONTRACT_FILE, InputContract, contract_of_texts
from eval.networks import Network, OtherInput
from utils.alignment import TEMPLATE
from utils.distributed.agreement import digest_tensors
from utils.files import shown
from utils.image import IMAGE_SIZE
from utils.text import prefix_errors


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
        ValueError: a value is out of the bounds of a contract, so that python -m eval could not read the file.
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
    with prefix_errors("a file that python -m eval could not read is not written"):
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


def extra_files(contract: InputContract) -> dict[str, str]:
    """Return the extra files of a .pt2 file."""
    return {CONTRACT_FILE: json.dumps(contract.as_texts())}
