"""The networks that evaluation takes: a run, a checkpoint, bare weights, ONNX, a program of torch.export or TorchScript.

All see the input contract of this project: (b, 3, 112, 112) RGB, (x - 127.5) / 127.5. For a network that was trained otherwise,
--colour bgr and --input-mean, --input-std say how.

Weights and ONNX graphs are data: reading them runs nothing that stands in them. TorchScript and .pt2 files are programs, which
can do whatever the user can, some of them already while they are loaded; they are opened with --trust-code alone.
"""

if __name__ == "__main__":
    raise SystemExit("error: scripts/networks.py is no program, but a part of programs; python -m scripts lists them")

import argparse
import importlib
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from backbones import build_backbone
from utils.checkpoint import (
    find_checkpoint,
    is_checkpoint,
    list_checkpoints,
    read_backbone,
    read_manifest,
)
from utils.optim import AUTOCAST
from utils.randomness import derive
from utils.retention import best_checkpoint
from utils.tensor_file import read_tensors
from utils.weights import fill

_HINT = "check --backbone, --embedding-size, --width"
_EXPORTED, _TORCHSCRIPT = "a .pt2 file of torch.export", "a TorchScript archive"  # the programs, in words


class Network(NamedTuple):
    """A network and where it comes from."""

    model: nn.Module
    name: str  # path of the checkpoint or file
    config: dict[str, Any]  # of its run, or {}
    state: str = ""  # of a run's network: step and score of its checkpoint

    @property
    def title(self) -> str:
        """Name and state in one line."""
        return f"{self.name} ({self.state})" if self.state else self.name


def add_network_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `load_network` reads, and those of the forward pass."""
    parser.add_argument(
        "run", type=Path, help="run folder, checkpoint folder, weights (.safetensors, .pt, .pth), .onnx, .pt2, or TorchScript"
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--best", action="store_true", help="the run's best checkpoint instead of its newest")
    choice.add_argument("--untrained", action="store_true", help="the run's network before any training, for comparison")
    parser.add_argument("--backbone", metavar="NAME", help="for a weights file: r18, r34, r50, r100, r200 or mbf")
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="load a TorchScript or .pt2 file. Such a file is a program that runs with your rights: it can read, change and "
        "send your files. Only for files whose author you trust",
    )
    parser.add_argument("--embedding-size", type=int, default=512, metavar="D", help="for a weights file (default 512)")
    parser.add_argument("--width", type=float, default=1.0, help="for a weights file: factor on the channels (default 1)")
    parser.add_argument("--colour", choices=("rgb", "bgr"), default="rgb", help="order that the network was trained with")
    parser.add_argument("--input-mean", type=float, default=127.5, help="it was trained on (x - mean) / std (default 127.5)")
    parser.add_argument("--input-std", type=float, default=127.5, help="likewise (default 127.5)")
    parser.add_argument("--precision", choices=AUTOCAST, default="fp32", help="of the forward pass (default fp32)")
    parser.add_argument("--batch-size", type=int, default=256, help="images per forward pass and process (default 256)")
    parser.add_argument("--threads", type=int, default=2, help="decoder threads per process (default 2)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes CUDA where there is one")


def load_network(options: argparse.Namespace) -> Network:
    """Return the network that the command line names.

    Raises:
        ValueError: nothing there, weights that do not fit, or a file that cannot be read.
    """
    network = _load(options)
    if (options.colour, options.input_mean, options.input_std) == ("rgb", 127.5, 127.5):
        return network
    if options.input_std <= 0:
        raise ValueError(f"--input-std must be above 0, got {options.input_std}")
    return network._replace(model=OtherInput(network.model, options.colour == "bgr", options.input_mean, options.input_std))


def _load(options: argparse.Namespace) -> Network:
    path: Path = options.run
    if path.is_file():
        for flag in ("best", "untrained"):
            if getattr(options, flag):
                raise ValueError(f"--{flag} is for the folder of a run; {path} is a file, which holds one network")
        if options.backbone:  # weights, whatever the file says of itself: nothing in it is run
            if options.trust_code:
                raise ValueError(
                    f"--trust-code is for a program; with --backbone {path} is read as weights. Leave one of them out"
                )
            model = build_backbone(options.backbone, options.embedding_size, options.width)
            return Network(fill(model, read_tensors(path), str(path), _HINT), str(path), {})
        return Network(_from_file(path, options.threads, options.trust_code), str(path), {})
    if not path.exists():
        raise ValueError(f"no run folder, checkpoint or weights file at {path}")
    if options.backbone:
        raise ValueError(f"--backbone is for a weights file; {path} is a folder, whose configuration says what it holds")
    if options.trust_code:
        raise ValueError(f"--trust-code is for a TorchScript or .pt2 file; {path} is a folder, which holds no program")
    checkpoint = _find_best(path) if options.best else find_checkpoint(path)
    try:
        manifest = read_manifest(checkpoint)
    except ValueError as error:
        raise ValueError(f"{error}; name another checkpoint folder") from None
    config: dict[str, Any] = manifest.get("config", {})
    section, seed = config.get("backbone", {}), config.get("run", {}).get("seed", 0)
    size, width = section.get("embedding_size"), section.get("width")
    if type(size) is not int or not 1 <= size <= 65536 or type(width) not in (int, float) or not 0 < width <= 64:
        raise ValueError(f"checkpoint {checkpoint}: its configuration does not tell embedding_size and width of its backbone")
    if type(seed) is not int or not 0 <= seed <= 2**62:
        raise ValueError(f"checkpoint {checkpoint}: run.seed of its configuration must be a whole number, got {seed!r:.80}")
    torch.manual_seed(derive(seed, "backbone"))  # as train.py does before it builds
    model = build_backbone(str(section.get("name")), size, width)
    if options.untrained:
        return Network(model, f"{section['name']} before training", config)
    model = fill(model, read_backbone(checkpoint), str(checkpoint), _HINT)
    return Network(model, str(checkpoint), config, f"step {manifest['step']}, {_score_text(manifest)}")


def _from_file(path: Path, threads: int, trust_code: bool) -> nn.Module:
    """Return the network of a file that says itself what it is; programs only where they are trusted."""
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


def _find_best(run: Path) -> Path:
    """Return the checkpoint of a run with the highest score, in the metric that the run was scored by last.

    Raises:
        ValueError: it is no run folder, or none of its checkpoints has a score.
    """
    if is_checkpoint(run):
        raise ValueError(f"--best is for the folder of a run; {run} is one checkpoint")
    find_checkpoint(run)  # there is one at all
    checkpoints = list_checkpoints(run)
    best = best_checkpoint(checkpoints)
    if best is None:
        raise ValueError(
            f"--best: none of the {len(checkpoints)} checkpoint(s) of {run} has a score, no evaluation was saved with them. "
            "Leave --best out for the newest"
        )
    return best


def _metric(manifest: dict[str, Any]) -> str:
    """Return what the score of a checkpoint is."""
    return str(manifest.get("config", {}).get("eval", {}).get("metric", "accuracy"))


def _score_text(manifest: dict[str, Any]) -> str:
    """Return the score that a checkpoint was saved with, in words."""
    score, metric = manifest.get("score"), _metric(manifest)
    if score is None:
        return "saved without a score"
    return f"saved with a mean {metric} of {abs(score) if metric == 'eer' else score:.4f}"  # an EER counts negative


class OtherInput(nn.Module):
    """A network that was trained on other channels or another scale, behind the input of this project."""

    def __init__(self, model: nn.Module, bgr: bool, mean: float, std: float) -> None:
        super().__init__()
        self.model, self.bgr, self.mean, self.std = model, bgr, mean, std

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.flip(1) if self.bgr else images
        return self.model((pixels * 127.5 + (127.5 - self.mean)) / self.std)


class ForeignNetwork(nn.Module):
    """A program of others: what it raises, or gives instead of embeddings, is an error that names its file."""

    def __init__(self, model: nn.Module, path: Path) -> None:
        super().__init__()
        self.model, self.path = model, path

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
