"""Networks from other projects: ONNX graphs, torch.export programs and TorchScript, as modules from images to embeddings.

ONNX graphs are data. TorchScript and .pt2 files are programs, which can do whatever the user can, even while they are loaded.
They are opened only if the user trusts them.

A file that face export wrote says what its input and output are; it is fed accordingly."""

import importlib
import json
import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from utils.checkpoint.tensor_file import BLOCK, file_hash
from utils.files import read_bytes
from utils.text import first_line, pip_install, prefix_errors, printable

PREFIX = "face."  # of the keys in a file's metadata
CONTRACT_FILE = "face_contract.json"  # of a .pt2 file
MAX_BYTES = 1 << 16  # of all texts of a contract together
_VERSION = "1"
_LONGEST = 1000  # characters of a value
_PADDING = 1 << 16  # bytes between two tensors
_CHOICES = {
    "layout": ("NCHW", "NHWC"),
    "colour": ("rgb", "bgr"),
    "dtype": ("float32", "uint8"),
    "normalised": ("true", "false"),
    "mirrored": ("true", "false"),
    "precision": ("fp32", "fp16", "int8"),
}
_WHOLE = {"image_size": (16, 1024), "embedding_size": (1, 65536)}


class InputContract(NamedTuple):
    """The input and output of an exported network, and its origin."""

    image_size: int  # height and width of the images, in pixels
    layout: str  # order of the axes: NCHW = (batch, 3, S, S), NHWC = (batch, S, S, 3)
    colour: str  # order of the channels
    mean: float  # the network takes (x - mean) / std of x from 0 to 255; 0 and 1 if it takes the bytes
    std: float
    dtype: str  # of the images
    points: tuple[tuple[float, float], ...]  # x and y in an aligned image, in pixels: eyes, nose, corners of the mouth, as seen
    embedding_size: int  # numbers per face
    normalised: bool  # the embeddings have length 1, and a second output has their lengths before
    mirrored: bool  # the embedding is the sum of those of the image and of its mirror image
    precision: str  # of the weights and the arithmetic
    run: str  # name of the run or file
    step: str  # of its checkpoint
    backbone: str  # name of the network
    weights: str  # their hash

    @property
    def takes_bytes(self) -> bool:
        """Whether the network takes (batch, S, S, 3) uint8."""
        return self.dtype == "uint8"

    def as_texts(self) -> dict[str, str]:
        """Return the metadata of a file: texts by key."""
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self._asdict().items()}
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
    for key in InputContract._fields:
        text = texts.get(PREFIX + key)
        if not isinstance(text, str):
            raise ValueError(f"its metadata lacks {PREFIX}{key}, which face export writes")
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


_IN_MEMORY = "_ORT_MEM_ADDR_"  # onnxruntime takes a location of this name as an address in memory
_EXPORTED, _TORCHSCRIPT = "a .pt2 file of torch.export", "a TorchScript archive"  # the programs, in words


def open_foreign(path: Path, threads: int, trust_code: bool) -> "ForeignNetwork":
    """Return the network of a file that describes itself, a program only if it is trusted; onnxruntime has `threads`, 0 = all.

    Raises:
        ValueError: a program without trust_code, a file of weights, or one that cannot be read.
    """
    kind = _program_kind(path)
    if kind and not trust_code:
        raise ValueError(
            f"{path} is {kind}: not weights but a program, which runs with your rights: it can read, change and send "
            "your files. If you trust its author, add --trust-code, or ask for its weights alone"
        )
    if trust_code and not kind:
        raise ValueError(f"--trust-code is for a TorchScript or .pt2 file; {path} is neither. Leave it out")
    if kind == _EXPORTED:
        return ForeignNetwork(ExportedNetwork(path), path)
    if kind == _TORCHSCRIPT:
        return ForeignNetwork(_torchscript(path), path)
    if path.suffix == ".onnx":
        return ForeignNetwork(OnnxNetwork(path, threads), path)
    raise ValueError(f"{path} is a weights file; name its network with --backbone NAME")


class ForeignNetwork(nn.Module):
    """A network from another project. If it raises, or does not return embeddings, the error names its file.

    One that takes bytes gets them: images of this project are bytes in another scale, so rounding finds each byte again.
    """

    def __init__(self, model: nn.Module, path: Path) -> None:
        super().__init__()
        self.model, self.path = model, path
        self.contract = model.contract if isinstance(model, OnnxNetwork | ExportedNetwork) else None
        self.image_size = model.image_size if isinstance(model, OnnxNetwork) else None  # None = the file does not say
        if self.contract is not None:
            self.image_size = self.contract.image_size

    @property
    def hash(self) -> str:
        """Hash of the file, because not all programs expose their weights; of an ONNX file with that of its tensors' files."""
        return onnx_hash(self.path) if isinstance(self.model, OnnxNetwork) else file_hash(self.path)

    def forward(self, images: Tensor) -> Tensor:
        """Return (b, D) fp32 embeddings of (b, 3, S, S) images."""
        given = images
        if self.contract is not None and self.contract.takes_bytes:
            given = (images.permute(0, 2, 3, 1) * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
        try:
            output = self.model(given)
        except Exception as error:  # of any kind: it is not our code. TorchScript's last line has the reason
            what = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise ValueError(f"{self.path}: it cannot run on images {tuple(images.shape)}: {what}") from None
        if not isinstance(output, Tensor):
            raise ValueError(f"{self.path}: it must return a tensor of embeddings, it returns {type(output).__name__}")
        if output.dim() != 2 or len(output) != len(images) or not output.shape[1] or not output.is_floating_point():
            raise ValueError(
                f"{self.path}: it must return floating-point embeddings (images, numbers per face), it returns "
                f"{tuple(output.shape)} of {str(output.dtype).removeprefix('torch.')} for {len(images)} images"
            )
        if self.contract is not None and output.shape[1] != self.contract.embedding_size:
            raise ValueError(
                f"{self.path}: its embeddings have {output.shape[1]} numbers, but its metadata says "
                f"{self.contract.embedding_size}; export it again"
            )
        return output


def open_session(path: Path, threads: int, model: bytes | None = None) -> Any:
    """Return the session of onnxruntime for an ONNX file, on the CPU; `model` is run instead of the file's contents.

    Raises:
        ValueError: onnxruntime is not installed, or cannot read the file, or it refers to files elsewhere.
    """
    try:
        runtime = importlib.import_module("onnxruntime")
    except ImportError:
        raise ValueError(f"{path}: an ONNX file needs onnxruntime: {pip_install('onnx', 'onnxruntime')}") from None
    check_outside_data(path)
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.log_severity_level = 4  # its warnings are for its developers; errors are raised
    try:
        # without the second attempt of onnxruntime, which is the same and prints a box of stars
        return runtime.InferenceSession(model or str(path), settings, providers=["CPUExecutionProvider"], enable_fallback=0)
    except Exception as error:  # onnxruntime has its own exceptions for damage, all of them derived from this
        raise ValueError(f"{path}: onnxruntime cannot read it: {first_line(error)}") from None


class OnnxNetwork(nn.Module):
    """An ONNX file as a network, run by onnxruntime on the CPU. For a fixed batch size the last batch is padded.

    Its input is (b, 3, S, S) float32, or (b, S, S, 3) uint8 if its metadata says so.
    """

    def __init__(self, path: Path, threads: int) -> None:
        super().__init__()
        self.session = open_session(path, threads)
        self.contract = _contract(lambda: self.session.get_modelmeta().custom_metadata_map, path)
        entry = self.session.get_inputs()[0]
        takes_bytes = self.contract is not None and self.contract.takes_bytes
        channels, *sides = entry.shape[1:] if len(entry.shape) == 4 else (0, 0, 0)
        if takes_bytes and len(entry.shape) == 4:
            *sides, channels = entry.shape[1:]
        given = [side if isinstance(side, int) else None for side in sides]  # an axis of any size has a name, or none
        if channels != 3 or given[0] != given[1] or not 16 <= (given[0] or 16) <= 1024:
            raise ValueError(f"{path}: its input must be (batch, 3, S, S), S from 16 to 1024, it is {tuple(entry.shape)}")
        if self.contract is not None and (given[0], entry.type == "tensor(uint8)") != (self.contract.image_size, takes_bytes):
            raise ValueError(
                f"{path}: its input is {tuple(entry.shape)} of {entry.type}, but its metadata says {self.contract.dtype} and "
                f"{self.contract.image_size} x {self.contract.image_size} pixels; export it again"
            )
        self.entry, self.image_size = entry.name, given[0]
        self.batch = entry.shape[0] if isinstance(entry.shape[0], int) else 0

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.detach().cpu().contiguous()
        if pixels.is_floating_point():
            pixels = pixels.float()
        size = self.batch or len(pixels)
        blocks = []
        for part in pixels.split(size):
            padded = torch.cat([part, part.new_zeros(size - len(part), *part.shape[1:])]) if len(part) < size else part
            outputs = self.session.run(None, {self.entry: padded.numpy()})
            # of a file of others only the first is read; another may be what torch has no type for
            tensors = [torch.from_numpy(output) for output in outputs[: 1 if self.contract is None else 2]]
            blocks.append(_raw_embeddings(tensors, self.contract)[: len(part)])
        return torch.cat(blocks).to(images.device)


def _contract(read: Callable[[], Mapping[str, str]], path: Path) -> InputContract | None:
    """Return the contract in the texts that a file stores; ValueError names the file."""
    try:
        texts = read()
    except Exception as error:  # the texts are no UTF-8, or the archive is damaged
        raise ValueError(f"{path}: its metadata cannot be read: {first_line(error)}") from None
    with prefix_errors(str(path)):
        return contract_of_texts(texts)


def _raw_embeddings(outputs: Sequence[Tensor], contract: InputContract | None) -> Tensor:
    """Return the first output, or with the lengths in the second one the embeddings as they were before they got length 1."""
    if contract is None or not contract.normalised or len(outputs) < 2:
        return outputs[0]
    return outputs[0] * outputs[1].reshape(-1, 1)


def parse_onnx(path: Path) -> Any:
    """Return the onnx.ModelProto in a file, without the tensors that it keeps in other files.

    Raises:
        ValueError: onnx is not installed, or the file is none of ONNX.
    """
    try:
        onnx = importlib.import_module("onnx")
    except ImportError:
        raise ValueError(f"{path}: an ONNX file needs the package onnx: {pip_install('onnx', 'onnxruntime')}") from None
    model, data = onnx.ModelProto(), read_bytes(path, 1 << 31)
    try:
        model.ParseFromString(data)
    except Exception:  # protobuf has its own exceptions for damage, and reads 2 GiB at most
        model = None
    if model is None or not model.HasField("graph"):
        raise ValueError(f"{path}: not an ONNX file, or a damaged one")
    return model


def check_outside_data(path: Path) -> dict[Path, list[tuple[int, int]]]:
    """Return the files beside an ONNX file that have tensors of it, with the first byte and the end of each of these tensors.

    Raises:
        ValueError: it is no ONNX file, or refers to a file outside its folder, which onnxruntime 1.23 would read.
    """
    folder = path.parent.resolve()
    model, parts = parse_onnx(path), dict[str, list[tuple[int, int]]]()
    with prefix_errors(str(path)):
        for tensor in _tensors(model):
            given = {entry.key: entry.value for entry in tensor.external_data}
            most, start = 16 * math.prod(tensor.dims), int(given.get("offset", 0))  # no number has more bytes
            for name in {entry.value for entry in tensor.external_data if entry.key == "location"}:
                parts.setdefault(name, []).append((start, start + min(most, int(given.get("length", most)))))
    found: dict[Path, list[tuple[int, int]]] = {}
    for name in sorted(parts):
        try:
            file = (folder / name).resolve(strict=True)
            inside = file.is_relative_to(folder) and file.is_file()
        except (OSError, ValueError, RuntimeError):  # not there, a zero byte, a link to itself
            inside = False
        if not inside or _IN_MEMORY in name or Path(name).is_absolute():
            raise ValueError(f"{path}: its tensors are in {name!r:.200}, not a file in its own folder; no other file is read")
        found.setdefault(file, []).extend(parts[name])
    return found


def _tensors(message: Any) -> Iterator[Any]:
    """Yield every TensorProto inside a message of ONNX, wherever the format allows one; ValueError if a field is unknown."""
    if len(importlib.import_module("google.protobuf.unknown_fields").UnknownFieldSet(message)):
        raise ValueError("has fields that the package onnx does not know; update it, or export the network again")
    if message.DESCRIPTOR.name == "TensorProto":
        yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in [value] if field.message_type is getattr(value, "DESCRIPTOR", None) else value:
                yield from _tensors(inner)


def onnx_hash(path: Path) -> str:
    """Return the hash of an ONNX file and of its tensors in other files; without such files it is that of the file."""
    hashes = [file_hash(path), *(_hash_of_parts(file, parts) for file, parts in check_outside_data(path).items())]
    return hashes[0] if len(hashes) == 1 else xxhash.xxh3_128_hexdigest(" ".join(hashes).encode())


def _hash_of_parts(file: Path, parts: list[tuple[int, int]]) -> str:
    """Return the hash of the parts of a file, and of the padding between them and at its end, but of no other gap."""
    size, at, digest = file.stat().st_size, 0, xxhash.xxh3_128()
    with file.open("rb") as opened:
        for start, stop in [*sorted(parts), (size, size)]:
            opened.seek(at if start <= at + _PADDING else min(start, size))
            while opened.tell() < stop and (block := opened.read(min(BLOCK, stop - opened.tell()))):
                digest.update(block)
            at = opened.tell()
    return digest.hexdigest()


class ExportedNetwork(nn.Module):
    """A program of torch.export (.pt2). It has no train and eval modes, so it is hidden from eval() and train()."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{path}: not an exported program: it is not a zip archive")
        self.contract = _contract(lambda: _texts_of_archive(path), path)
        try:
            self._exported = torch.export.load(str(path))
            self._program = [self._exported.module()]
        except Exception as error:  # damage ends in exceptions of many kinds
            raise ValueError(f"{path}: not an exported program: {first_line(error)}") from None
        self._device = next((tensor.device for tensor in self._exported.state_dict.values()), torch.device("cpu"))

    def forward(self, images: Tensor) -> Tensor:
        if images.device != self._device:  # it names the device where it was exported, and has weights that no `to` reaches
            from torch.export.passes import move_to_device_pass

            self._program, self._device = [move_to_device_pass(self._exported, images.device).module()], images.device
        output = self._program[0](images)
        if self.contract is None or not isinstance(output, tuple | list) or not output:
            return output
        return _raw_embeddings(output, self.contract)


def _texts_of_archive(path: Path) -> Mapping[str, str]:
    """Return what face export wrote about its network into a .pt2 file, {} if it did not write that file."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.rpartition("/extra/")[2] == CONTRACT_FILE]
        if not names:
            return {}
        with archive.open(names[0]) as file:
            text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise ValueError(f"{CONTRACT_FILE} has more than {MAX_BYTES} bytes")
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{CONTRACT_FILE} must be an object of texts")
    return found


def _program_kind(path: Path) -> str:
    """Return the kind of program that a file contains, "" for other files."""
    if path.suffix == ".pt2":
        return _EXPORTED
    try:
        with zipfile.ZipFile(path) as archive:  # TorchScript is a zip with code in it, whatever its name; weights have no code
            return _TORCHSCRIPT if any("/code/" in name for name in archive.namelist()) else ""
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error):
        return ""


def _torchscript(path: Path) -> nn.Module:
    try:
        return torch.jit.load(str(path), map_location="cpu")
    except Exception as error:  # damage ends in exceptions of many kinds
        raise ValueError(f"{path}: not a TorchScript program: {first_line(error)}") from None
