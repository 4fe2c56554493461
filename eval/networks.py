"""Loads the network for an evaluation: a run, a checkpoint, a weights file, ONNX, a torch.export program or TorchScript.

All get the input of this project: (b, 3, S, S) RGB, (x - 127.5) / 127.5. --colour bgr, --input-mean and --input-std convert it
for networks that were trained on other inputs; a file of face export says itself what it takes. S is 112, that of the
run's configuration or the ONNX graph, or --image-size.

Weights and ONNX graphs are data: reading them executes nothing. TorchScript and .pt2 files are programs; they are opened only
with --trust-code (eval/foreign_networks.py).
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from utils import distributed
from utils.checkpoint import format as ckpt
from utils.checkpoint.reading import load_weights, read_file
from utils.checkpoint.tensor_file import NETWORK, read_metadata, read_tensors
from utils.cli import int_in_range, warn
from utils.distributed import World, raise_on_all_ranks
from utils.distributed.agreement import digest_tensors, require_equal, require_same_program
from utils.image import IMAGE_SIZE
from utils.memory import Undrawn
from utils.precision import AUTOCAST, PRECISIONS, agreed_precision, slow_precision
from utils.randomness import derive
from utils.text import prefix_errors

from .embed import EmbedSettings
from .foreign_networks import ForeignNetwork, open_foreign
from .protocol import Protocol, Result

Read = TypeVar("Read", bound=Sequence[Protocol[Result]])
BuildBackbone = Callable[..., nn.Module]
_HINT = "check --backbone, --embedding-size, --width, --image-size"
# others are of one backbone alone
_COMMON_KEYS = (
    "name", "embedding_size", "width", "dropout", "freeze", "freeze_norm", "sync_norm", "checkpointing", "train_last",
    "lora_rank", "lora_alpha",
)  # fmt: skip


class Network(NamedTuple):
    """A network and its origin."""

    model: nn.Module
    name: str  # path of the checkpoint or file
    config: dict[str, Any]  # of its run, or {}
    state: str = ""  # of a run's network: step and score of its checkpoint
    image_size: int = IMAGE_SIZE  # height and width of the images that it takes, in pixels
    run: Path | None = None  # the run folder of its checkpoint

    @property
    def title(self) -> str:
        """Name and state in one line."""
        return f"{self.name} ({self.state})" if self.state else self.name

    @property
    def own(self) -> nn.Module:
        """The network itself, without the conversion of its input."""
        return self.model.model if isinstance(self.model, OtherInput) else self.model

    @property
    def identity(self) -> str:
        """What tells one network from another: the hash of its weights, or of its file, and the input that it was made for."""
        other, own = self.model, self.own
        words = f" bgr={other.bgr} mean={other.mean} std={other.std}" if isinstance(other, OtherInput) else ""
        return (own.hash if isinstance(own, ForeignNetwork) else digest_tensors(own.state_dict())) + words


def add_network_arguments(parser: argparse.ArgumentParser, newest: bool = False, positional: bool = True) -> None:
    """Add the arguments that `load_network` reads, and those of the forward pass; see `add_choice_of_network`."""
    add_choice_of_network(parser, newest, positional)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="default fp32; auto: bf16 where that is fast")
    parser.add_argument("--batch-size", type=int_in_range(1), default=256, help="images per forward pass and process")
    parser.add_argument("--threads", type=int_in_range(1, 1024), default=2, help="decoder threads per process")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes CUDA if there is one")


def add_choice_of_network(parser: argparse.ArgumentParser, newest: bool = False, positional: bool = True) -> None:
    """Add the arguments that `load_network` reads, but for --threads.

    Args:
        newest: the network may be left out: it is then that of the newest run in work_dirs.
        positional: False: the caller sets `run`.
    """
    what = "run folder, checkpoint folder, weights (.safetensors, .pt, .pth), .onnx, .pt2, or TorchScript"
    if newest:
        parser.add_argument("run", type=Path, nargs="?", help=f"{what} (default: the newest run in work_dirs)")
    elif positional:
        parser.add_argument("run", type=Path, help=what)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--best", action="store_true", help="the run's best checkpoint instead of its newest")
    choice.add_argument("--untrained", action="store_true", help="the run's network before any training, for comparison")
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights, of a run with train.ema")
    parser.add_argument("--backbone", metavar="NAME", help="for a weights file: its network, such as r50 or vit_t")
    trust = "load a TorchScript or .pt2 file. Such a file is a program that runs with your rights: it can read, change and "
    trust += "send your files. Use this only for files whose author you trust"
    parser.add_argument("--trust-code", action="store_true", help=trust)
    parser.add_argument("--embedding-size", type=int, default=512, metavar="D", help="for a weights file")
    parser.add_argument("--width", type=float, default=1.0, help="for a weights file: its backbone.width")
    parser.add_argument("--image-size", type=int_in_range(16, 1024), help=f"if a file does not say (default {IMAGE_SIZE})")
    parser.add_argument("--colour", choices=("rgb", "bgr"), help="order of the channels (default: what the file says, or rgb)")
    parser.add_argument("--input-mean", type=float, help="trained on (x - mean) / std (default: what the file says, or 127.5)")
    parser.add_argument("--input-std", type=float, help="the std of this formula (default: what the file says, or 127.5)")


def open_network(
    options: argparse.Namespace, build_backbone: BuildBackbone, read: Callable[["Network"], Read]
) -> tuple[World, "Network", Read]:
    """Join the processes and read what a program evaluates: return (world, network on its device, the protocols of `read`).

    Args:
        options: with those of `add_network_arguments`.
        build_backbone: see `load_network`.
        read: returns the protocols by which the network is scored.

    Raises:
        ValueError: the path does not exist, or a file does not fit or cannot be read.
        SharedError: on every rank, if options, networks or sets differ between the processes.
    """
    world = distributed.init_distributed(options.device, setting="--device ")
    _require_same_options(options, world)
    options.precision = agreed_precision(options.precision, world)
    if world.rank == 0:
        warn(*slow_precision("--precision ", options.precision, world.device))
    with raise_on_all_ranks(world):
        network = load_network(options, build_backbone)
        found = read(network)
    _require_same_files(network, found, world)
    model = network.model.to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return world, network._replace(model=model), found


def embed_settings(options: argparse.Namespace, network: "Network") -> EmbedSettings:
    """Return the settings of the command line for a network that `open_network` returned."""
    return EmbedSettings(options.batch_size, AUTOCAST[options.precision], options.threads, network.image_size)


def _require_same_options(options: argparse.Namespace, world: World) -> None:
    """Compare the options, by flag, and this program over all processes. Another version of torch is only a warning.

    Paths and machine-specific options may differ. SharedError names each flag, value and rank.
    """
    own = {"run", "data", "report", "device", "threads"}
    shared = {f"--{name.replace('_', '-')}": value for name, value in vars(options).items() if name not in own}
    shared["--targets"] = [Path(target).stem for target in options.targets or ()]
    lines = require_same_program(shared, world)
    warn(*lines if world.rank == 0 else ())


def _require_same_files(network: "Network", protocols: Sequence[Protocol[Result]], world: World) -> None:
    """Compare the network and the sets over all processes; SharedError names each that differs."""
    if world.world_size == 1:
        return
    with raise_on_all_ranks(world):
        found = {"hash of the network": network.identity}
        for protocol in protocols:
            found |= protocol.fingerprint()
    require_equal(found, world, "the network and the sets must be the same files for all processes; copy them again")


def load_network(options: argparse.Namespace, build_backbone: BuildBackbone) -> Network:
    """Return the network that the command line names.

    Args:
        build_backbone: returns a new backbone, given its name, embedding size, width and the arguments it alone has.

    Raises:
        ValueError: the path does not exist, the weights do not fit, or a file cannot be read.
    """
    network = _load(options, build_backbone)
    contract = network.model.contract if isinstance(network.model, ForeignNetwork) else None
    given = {"--colour": options.colour, "--input-mean": options.input_mean, "--input-std": options.input_std}
    usual: dict[str, Any] = {"--colour": "rgb", "--input-mean": 127.5, "--input-std": 127.5}
    if contract is not None:
        usual = {"--colour": contract.colour, "--input-mean": contract.mean, "--input-std": contract.std}
    for flag, value in given.items():
        if contract is not None and value not in (None, usual[flag]):
            raise ValueError(f"{flag} must be {usual[flag]}, which {network.name} says of itself, got {value}; or leave it out")
    colour, mean, std = (usual[flag] if value is None else value for flag, value in given.items())
    if (colour, mean, std) == ("rgb", 127.5, 127.5) or (contract is not None and contract.takes_bytes):
        return network
    if not 0 < std < math.inf or not math.isfinite(mean):
        raise ValueError(f"--input-std must be above 0, and --input-mean finite, got {std} and {mean}")
    return network._replace(model=OtherInput(network.model, colour == "bgr", mean, std))


def _load(options: argparse.Namespace, build_backbone: BuildBackbone) -> Network:
    path: Path = options.run or ckpt.newest_run()
    if path.is_file():
        for flag in ("best", "untrained", "ema"):
            if getattr(options, flag):
                raise ValueError(f"--{flag} is for the folder of a run; {path} is a file, which holds one network")
        if options.backbone:  # read as weights, whatever the file claims to be; nothing in it is executed
            if options.trust_code:
                raise ValueError(f"--trust-code is for a program, but --backbone reads {path} as weights. Leave one out")
            size = options.image_size or IMAGE_SIZE
            given = (options.backbone, options.embedding_size, options.width)
            build = prefix_errors("--backbone, --embedding-size, --width, --image-size")(build_backbone)
            model, weights = _fitting(partial(build, *given, image_size=size), partial(read_tensors, path), str(path))
            return Network(load_weights(model, weights, str(path), _HINT), str(path), {}, image_size=size)
        text = read_metadata(path).get(NETWORK, "") if path.suffix == ".safetensors" and not options.trust_code else ""
        if text:
            network = _described(path, text, options, build_backbone)
        else:
            foreign = open_foreign(path, options.threads, options.trust_code)
            network = Network(foreign, str(path), {}, image_size=foreign.image_size or options.image_size or IMAGE_SIZE)
        if options.image_size not in (None, size := network.image_size):
            raise ValueError(f"--image-size must be {size}, the input of {path}, got {options.image_size}; or leave it out")
        return network
    if not path.exists():
        raise ValueError(f"no run folder, checkpoint or weights file at {path}")
    if options.ema and options.untrained:
        raise ValueError("--ema is the average of a training, --untrained the network before it. Leave one of them out")
    if options.backbone:
        raise ValueError(f"--backbone is for a weights file; {path} is a folder, whose configuration names its backbone")
    if options.image_size:
        raise ValueError(f"--image-size is for a file; {path} is a folder, whose configuration has the size of the images")
    if options.trust_code:
        raise ValueError(f"--trust-code is for a TorchScript or .pt2 file; {path} is a folder, which holds no program")
    checkpoint = _find_best(path) if options.best else ckpt.find_checkpoint(path)
    try:
        manifest = ckpt.read_manifest(checkpoint)
    except ValueError as error:
        raise ValueError(f"{error}; name another checkpoint folder") from None
    config: dict[str, Any] = manifest.get("config", {})
    section, seed = config.get("backbone", {}), config.get("run", {}).get("seed", 0)
    if type(seed) is not int or not 0 <= seed <= 2**62:
        raise ValueError(f"checkpoint {checkpoint}: run.seed of its configuration must be a whole number, got {seed!r:.80}")
    image_size = config.get("data", {}).get("image_size", IMAGE_SIZE)  # earlier versions had no such key
    if options.ema and ckpt.EMA not in manifest["files"]:
        raise ValueError(f"--ema: {checkpoint} has no moving average, because the run had train.ema=0; leave out --ema")
    read = partial(read_file, checkpoint, ckpt.EMA if options.ema else ckpt.BACKBONE)
    torch.manual_seed(derive(seed, "backbone"))  # as train.py does before it builds
    build = partial(_build, section, image_size, f"checkpoint {checkpoint}", build_backbone)
    model, weights = _fitting(build, read, str(checkpoint))
    if options.untrained:
        return Network(model, f"{section['name']} before training", config, image_size=image_size)
    model, which = load_weights(model, weights, str(checkpoint), _HINT), "moving average, " if options.ema else ""
    details = f"{which}step {manifest['step']}, {_score_text(manifest)}"
    run = checkpoint.parents[1] if checkpoint.parent.name == "checkpoints" else None
    return Network(model, str(checkpoint), config, details, image_size, run)


def _build(section: dict[str, Any], image_size: Any, source: str, build_backbone: BuildBackbone) -> nn.Module:
    """Return the backbone that a section of a configuration describes, after checking it; `source` is for errors."""
    size, width = section.get("embedding_size"), section.get("width", 1.0)
    if type(size) is not int or not 1 <= size <= 65536 or type(width) not in (int, float) or not 0 < width <= 64:
        raise ValueError(f"{source}: its configuration lacks a valid embedding_size or width of the backbone")
    if type(image_size) is not int or not 16 <= image_size <= 1024:
        raise ValueError(f"{source}: data.image_size must be a whole number from 16 to 1024, got {image_size!r:.80}")
    more = {key: value for key, value in section.items() if key not in _COMMON_KEYS}
    with prefix_errors(f"{source}: the backbone of its configuration"):
        return build_backbone(str(section.get("name")), size, width, image_size=image_size, **more)


def _fitting(build: Callable[[], nn.Module], read: Callable[[], Any], source: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return what `build` and `read` return; if network and weights do not fit, raise ValueError before it takes memory."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"), Undrawn():  # networks of packages draw, too
        empty = build()
    load_weights(empty, weights := read(), source, _HINT)
    del empty  # some networks of packages take memory even so
    return build(), weights


def _described(path: Path, text: str, options: argparse.Namespace, build_backbone: BuildBackbone) -> Network:
    """Return the network of weights with this NETWORK in their metadata; the options then say the same."""
    weights = read_tensors(path)
    try:
        said = json.loads(text[: 1 << 16])
        section, size = dict(said["backbone"]), said["image_size"]
        model, _ = _fitting(partial(_build, section, size, str(path), build_backbone), lambda: weights, str(path))
        options.backbone, options.embedding_size, options.width = section["name"], section["embedding_size"], section["width"]
    except Exception as error:
        raise ValueError(f"{path}: its metadata describe no network of its weights ({error!s:.200}); use --backbone") from None
    return Network(load_weights(model, weights, str(path), _HINT), str(path), {}, image_size=size)


def _find_best(run: Path) -> Path:
    """Return the checkpoint of a run with the highest score in the run's latest metric.

    Raises:
        ValueError: it is not a run folder, or none of its checkpoints has a score.
    """
    if ckpt.is_checkpoint(run):
        raise ValueError(f"--best is for the folder of a run; {run} is one checkpoint")
    ckpt.find_checkpoint(run)  # raises if there is none
    checkpoints = ckpt.list_checkpoints(run)
    best = ckpt.best_checkpoint(checkpoints)
    if best is None:
        raise ValueError(
            f"--best: none of the {len(checkpoints)} checkpoint(s) of {run} has a score, because no evaluation was saved with "
            "them. Leave out --best to take the newest"
        )
    return best


def _score_text(manifest: dict[str, Any]) -> str:
    """Return the score that a checkpoint was saved with, in words."""
    score, metric = manifest.get("score"), str(manifest.get("config", {}).get("eval", {}).get("metric", "accuracy"))
    if score is None:
        return "saved without a score"
    whose = " of the moving average" if ckpt.has_average(manifest) else ""
    return f"saved with a mean {metric}{whose} of {abs(score) if metric == 'eer' else score:.4f}"  # an EER counts negative


class OtherInput(nn.Module):
    """Adapts a network that was trained with another channel order or scale to the input of this project."""

    def __init__(self, model: nn.Module, bgr: bool, mean: float, std: float) -> None:
        super().__init__()
        self.model, self.bgr, self.mean, self.std = model, bgr, mean, std

    def forward(self, images: Tensor) -> Tensor:
        """Return (b, D) embeddings of (b, 3, S, S) images in this project's scale."""
        pixels = images.flip(1) if self.bgr else images
        return self.model((pixels * 127.5 + (127.5 - self.mean)) / self.std)
