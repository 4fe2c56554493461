"""Completes a folder for a model hub: beside the ONNX file the weights, the card, what a reader needs, and two programs.

The metadata on top of README.md are those of the Hugging Face Hub: https://huggingface.co/docs/hub/model-cards.
"""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.foreign_networks import InputContract
from eval.networks import Network
from utils.checkpoint.tensor_file import NETWORK, flush, read_metadata, write_tensors
from utils.files import write_file

from ..card.card import FIELDS, FoundResults, document_of, find_results, read_fields

ONNX = "model.onnx"
_WEIGHTS = "model.safetensors"
_FILES = {
    _WEIGHTS: "the weights, with the name of their network",
    ONNX: "the same network for onnxruntime, with its input and output in the metadata",
    "config.json": "the network, its input and its output",
    "example.py": "prints the embedding of an aligned face, by the project that trained the network",
    "example_onnx.py": "prints the same embedding, by numpy, opencv-python and onnxruntime alone",
}


def check_hub(contract: InputContract) -> None:
    """Raise ValueError unless weights without further words, and the examples, compute what the ONNX file does."""
    given = (contract.dtype, contract.colour, contract.mean, contract.std, contract.mirrored, contract.precision)
    if given != ("float32", "rgb", 127.5, 127.5, False, "fp32"):
        raise ValueError(
            "--pack hub: its ONNX file has the numbers of its weights, and takes (x - 127.5) / 127.5 of RGB. Leave out "
            "--with-preprocess, --flip, --precision, --colour, --input-mean and --input-std"
        )


# of a network: its results; texts of a person; JSON in the metadata of its weights, "" without
Known = tuple[FoundResults, Mapping[str, str], str]


def read_known(options: argparse.Namespace) -> Known:
    """Return what files say of a network, before it is opened; ValueError if one cannot be read."""
    text = read_metadata(options.run).get(NETWORK, "") if options.run.is_file() and not options.backbone else ""
    fields = read_fields(options.fields) if options.fields else {}
    return find_results(options), fields, text


def complete(folder: Path, options: argparse.Namespace, network: Network, contract: Mapping[str, Any], known: Known) -> None:
    """Write all files but the ONNX file; the network loses its weights."""
    found, fields, text = known
    given = {"name": options.backbone, "embedding_size": options.embedding_size, "width": options.width}
    said = {"backbone": network.config.get("backbone") or given, "image_size": network.image_size}
    said = json.loads(text) if text else said
    write_tensors(folder / _WEIGHTS, network.model.state_dict(), {NETWORK: json.dumps(said)})
    write_file(folder / "config.json", json.dumps({NETWORK: said, **contract}, indent=1) + "\n")
    for template in Path(__file__).parent.glob("*.in"):
        text = template.read_text("utf-8").replace("SIZE", str(contract["image_size"]))
        write_file(folder / template.stem, text)
    document = document_of(network, found, fields, options, _metadata(fields))
    document.section("Files")
    document.table(("file", "contents"), _FILES.items())
    document.write(folder / "README.md")
    flush(folder)
    missing = [key for key in FIELDS if key not in fields]
    if missing:
        print(f"to be filled in, in README.md, or in the card.yaml of face card, for --fields: {', '.join(missing)}")


def _metadata(fields: Mapping[str, str]) -> str:
    """Return the YAML on top of README.md; the licence is there if it is the name of one, which the hub knows."""
    name = fields.get("weights_licence", "").strip()
    known = re.fullmatch("[a-z][a-z0-9.-]*", name)
    lines = ["library_name: face-training", "pipeline_tag: image-feature-extraction", "tags:"]
    lines += [f"- {tag}" for tag in ("face-recognition", "face-verification", "onnx")]
    lines.append(f'license: "{name}"' if known else "# license: only you can say which")
    return "\n".join(["---", *lines, "---"])
