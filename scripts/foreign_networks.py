"""Networks of others: ONNX graphs, programs of torch.export and TorchScript, each as a module from images to embeddings.

ONNX graphs are data. TorchScript and .pt2 files are programs, which can do whatever the user can, some of them already while
they are loaded; they are opened where the user trusts them.
"""

if __name__ == "__main__":
    raise SystemExit("error: scripts/foreign_networks.py is no program, but a part of programs; python -m scripts lists them")

import importlib
import struct
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

from utils.tensor_file import file_hash

_EXPORTED, _TORCHSCRIPT = "a .pt2 file of torch.export", "a TorchScript archive"  # the programs, in words


def open_foreign(path: Path, threads: int, trust_code: bool) -> "ForeignNetwork":
    """Return the network of a file that says itself what it is; programs only where they are trusted.

    Args:
        threads: CPU threads of onnxruntime; 0 = all.

    Raises:
        ValueError: a program without trust_code, a file of weights, or one that cannot be read.
    """
    kind = _program_kind(path)
    if kind and not trust_code:
        raise ValueError(
            f"{path} is {kind}: no weights but a program, which runs with your rights: it can read, change and send "
            "your files. If you trust its author, add --trust-code; to read weights from it and run nothing, name their "
            "network: --backbone NAME"
        )
    if trust_code and not kind:
        raise ValueError(f"--trust-code is for a TorchScript or .pt2 file; {path} is neither. Leave it out")
    if kind == _EXPORTED:
        return ForeignNetwork(ExportedNetwork(path), path)
    if kind == _TORCHSCRIPT:
        return ForeignNetwork(_torchscript(path), path)
    if path.suffix == ".onnx":
        return ForeignNetwork(OnnxNetwork(path, threads), path)
    raise ValueError(f"{path} is a weights file; say what it holds with --backbone NAME")


class ForeignNetwork(nn.Module):
    """A program of others: what it raises, or gives instead of embeddings, is an error that names its file."""

    def __init__(self, model: nn.Module, path: Path) -> None:
        super().__init__()
        self.model, self.path = model, path

    @property
    def hash(self) -> str:
        """Hash of the file; not all programs tell their weights."""
        return file_hash(self.path)

    def forward(self, images: Tensor) -> Tensor:
        try:
            output = self.model(images)
        except Exception as error:  # of any kind: it is not our code. TorchScript ends with what is wrong
            what = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise ValueError(f"{self.path}: it cannot run on images {tuple(images.shape)}: {what}") from None
        if not isinstance(output, Tensor):
            raise ValueError(f"{self.path}: it must give a tensor of embeddings, it gives {type(output).__name__}")
        if output.dim() != 2 or len(output) != len(images) or not output.shape[1] or not output.is_floating_point():
            raise ValueError(
                f"{self.path}: it must give embeddings (images, numbers per face) of floating point, it gives "
                f"{tuple(output.shape)} of {str(output.dtype).removeprefix('torch.')} for {len(images)} images"
            )
        return output


class OnnxNetwork(nn.Module):
    """An ONNX file as a network, run by onnxruntime on the CPU. A fixed batch size is met by padding the last batch."""

    def __init__(self, path: Path, threads: int) -> None:
        super().__init__()
        try:
            runtime = importlib.import_module("onnxruntime")
        except ImportError:
            raise ValueError(f"{path}: an ONNX file needs onnxruntime: pip install onnxruntime") from None
        settings = runtime.SessionOptions()
        settings.intra_op_num_threads = threads
        settings.log_severity_level = 4  # its warnings are in colour and for its makers; what is wrong is raised
        try:
            self.session = runtime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has its own exceptions for damage, all of them derived from this
            raise ValueError(f"{path}: onnxruntime cannot read it: {_first_line(error)}") from None
        entry = self.session.get_inputs()[0]
        if len(entry.shape) != 4 or list(entry.shape[1:]) not in ([3, 112, 112], [3, None, None]):
            raise ValueError(f"{path}: its input must be (batch, 3, 112, 112), it is {tuple(entry.shape)}")
        self.entry = entry.name
        self.batch = entry.shape[0] if isinstance(entry.shape[0], int) else 0

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.detach().float().cpu().contiguous()
        size = self.batch or len(pixels)
        blocks = []
        for part in pixels.split(size):
            padded = torch.cat([part, part.new_zeros(size - len(part), *part.shape[1:])]) if len(part) < size else part
            output = self.session.run(None, {self.entry: padded.numpy()})[0]
            blocks.append(torch.from_numpy(output)[: len(part)])
        return torch.cat(blocks).to(images.device)


class ExportedNetwork(nn.Module):
    """A program of torch.export (.pt2). It has no modes, so it is kept out of sight of eval() and train()."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{path}: not an exported program: no zip archive")
        try:
            self._program = [torch.export.load(str(path)).module()]
        except Exception as error:  # damage ends in exceptions of many kinds
            raise ValueError(f"{path}: not an exported program: {_first_line(error)}") from None

    def forward(self, images: Tensor) -> Tensor:
        return self._program[0](images)


def _program_kind(path: Path) -> str:
    """Return what kind of program a file is, "" for other files."""
    if path.suffix == ".pt2":
        return _EXPORTED
    try:
        with zipfile.ZipFile(path) as archive:  # TorchScript, whatever its name: a zip with code in it. Weights have none
            return _TORCHSCRIPT if any("/code/" in name for name in archive.namelist()) else ""
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error):
        return ""


def _torchscript(path: Path) -> nn.Module:
    try:
        return torch.jit.load(str(path), map_location="cpu")
    except Exception as error:  # damage ends in exceptions of many kinds
        raise ValueError(f"{path}: not a TorchScript program: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
