"""What a user of an exported network must know: its input, its output and its origin, as texts beside the graph.

An ONNX file has them as metadata, a .pt2 file as the extra file CONTRACT_FILE. scripts.deploy.export writes them. A file of
others has none. Files come from anywhere, so all values are bounded and checked, and no text is shown unescaped.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from utils.text import printable

PREFIX = "face."  # of the keys in a file's metadata
CONTRACT_FILE = "face_contract.json"  # of a .pt2 file
MAX_BYTES = 1 << 16  # of all texts of a contract together
_VERSION = "1"
_LONGEST = 1000  # characters of a value
_CHOICES = {
    "layout": ("NCHW", "NHWC"),
    "colour": ("rgb", "bgr"),
    "dtype": ("float32", "uint8"),
    "normalised": ("true", "false"),
    "mirrored": ("true", "false"),
    "precision": ("fp32", "fp16", "int8"),
}
_WHOLE = {"image_size": (16, 1024), "embedding_size": (1, 65536)}


@dataclass(frozen=True)
class InputContract:
    """The input and output of an exported network.

    Args:
        image_size: height and width of the images, in pixels.
        layout: order of the axes: NCHW = (batch, 3, S, S), NHWC = (batch, S, S, 3).
        colour: order of the channels.
        mean, std: the network takes (x - mean) / std of x from 0 to 255; 0 and 1 if it takes the bytes.
        dtype: of the images.
        points: x and y of the five landmarks in an aligned image, in pixels: eyes, nose, corners of the mouth, as seen.
        embedding_size: numbers per face.
        normalised: the embeddings have length 1, and a second output has their lengths before.
        mirrored: the embedding is the sum of those of the image and of its mirror image.
        precision: of the weights and the arithmetic.
        run, step, backbone, weights: origin: name of the run or file, step of its checkpoint, network, hash of its weights.
    """

    image_size: int
    layout: str
    colour: str
    mean: float
    std: float
    dtype: str
    points: tuple[tuple[float, float], ...]
    embedding_size: int
    normalised: bool
    mirrored: bool
    precision: str
    run: str
    step: str
    backbone: str
    weights: str

    @property
    def takes_bytes(self) -> bool:
        """Whether the network takes (batch, S, S, 3) uint8."""
        return self.dtype == "uint8"

    def as_texts(self) -> dict[str, str]:
        """Return the metadata of a file: texts by key."""
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in asdict(self).items()}
        return {f"{PREFIX}contract": _VERSION} | {f"{PREFIX}{key}": value[:_LONGEST] for key, value in values.items()}


def contract_of_texts(texts: Mapping[str, str]) -> InputContract | None:
    """Return the contract in the metadata of a file, None if it has none.

    Raises:
        ValueError: a value is missing, too long, or not of its kind; the message names its key.
    """
    if f"{PREFIX}contract" not in texts:
        return None
    version = texts[f"{PREFIX}contract"]
    if version != _VERSION:
        raise ValueError(f"{PREFIX}contract of its metadata must be {_VERSION}, got {_shown(version)}")
    values: dict[str, Any] = {}
    for key in InputContract.__dataclass_fields__:
        text = texts.get(PREFIX + key)
        if not isinstance(text, str):
            raise ValueError(f"its metadata lacks {PREFIX}{key}, which scripts.deploy.export writes")
        try:
            values[key] = _value(key, text)
        except ValueError as error:
            raise ValueError(f"{PREFIX}{key} of its metadata must be {error}, got {_shown(text)}") from None
    contract = InputContract(**values)
    if (contract.dtype == "uint8") != (contract.layout == "NHWC"):
        raise ValueError(f"{PREFIX}layout and {PREFIX}dtype of its metadata must be NCHW, float32 or NHWC, uint8")
    if contract.takes_bytes and (contract.colour, contract.mean, contract.std) != ("rgb", 0, 1):
        raise ValueError(f"{PREFIX}colour, mean and std of its metadata must be rgb, 0 and 1 for a network that takes bytes")
    return contract


def _value(key: str, text: str) -> Any:
    """Return a value from its text; ValueError says what it must be."""
    if len(text) > _LONGEST:
        raise ValueError(f"a text of at most {_LONGEST} characters")
    if key in _CHOICES:
        if text not in _CHOICES[key]:
            raise ValueError(f"one of {', '.join(_CHOICES[key])}")
        return text == "true" if _CHOICES[key] == ("true", "false") else text
    if key in _WHOLE:
        low, high = _WHOLE[key]
        if not re.fullmatch("[0-9]{1,6}", text) or not low <= int(text) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text)
    if key in ("mean", "std"):
        number = float(text) if re.fullmatch(r"-?[0-9]{1,9}(\.[0-9]{1,25})?(e-?[0-9]{1,2})?", text) else math.nan
        if not abs(number) <= 1e6 or (key == "std" and number <= 0):
            raise ValueError("a number above 0" if key == "std" else "a number")
        return number
    return _points(text) if key == "points" else text


def _points(text: str) -> tuple[tuple[float, float], ...]:
    numbers = re.findall(r"-?[0-9]{1,4}(?:\.[0-9]{1,17})?", text)
    if len(numbers) != 10 or re.sub(r"[-0-9., \[\]]", "", text):
        raise ValueError("x and y of five points in pixels, as [[x, y], ...]")
    values = list(map(float, numbers))
    return tuple(zip(values[::2], values[1::2], strict=True))


def _shown(text: object) -> str:
    return repr(printable(str(text)[:80]))
