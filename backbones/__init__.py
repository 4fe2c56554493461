"""Backbones by name: aligned face images in, raw embeddings out.

Every network takes (b, 3, S, S), RGB, (x - 127.5) / 127.5, with S = 112 unless `image_size` says otherwise, and returns
(b, D) fp32 embeddings. The head and the evaluation normalise them. Names such as timm:NAME and torchvision:NAME stand for
the networks of these packages.
"""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from utils.image import IMAGE_SIZE
from utils.text import did_you_mean

from .edgeface import EdgeFace
from .ghostfacenet import GhostFaceNet
from .iresnet import IResNet, check_head, scale_channels
from .kprpe import KeypointTransformer
from .mobilefacenet import MobileFaceNet
from .packages import PackageNetwork, check_package, is_of_package
from .vit import Form, VisionTransformer, check_shares

BACKBONES: dict[str, partial[Any]] = {
    "r18": partial(IResNet, (2, 2, 2, 2)),
    "r34": partial(IResNet, (3, 4, 6, 3)),
    "r50": partial(IResNet, (3, 4, 14, 3)),
    "r100": partial(IResNet, (3, 13, 30, 3)),
    "r200": partial(IResNet, (6, 26, 60, 6)),
    "mbf": partial(MobileFaceNet, (1, 4, 6, 2), 2),
    "mbf_large": partial(MobileFaceNet, (2, 8, 12, 4), 4),
    "ghostfacenet_v1_1": partial(GhostFaceNet, 1, 1),
    "ghostfacenet_v1_2": partial(GhostFaceNet, 1, 2),
    "ghostfacenet_v2_1": partial(GhostFaceNet, 2, 1),
    "ghostfacenet_v2_2": partial(GhostFaceNet, 2, 2),
    "edgeface_xs": partial(EdgeFace, (32, 64, 100, 192), 4, gamma=0.6),
    "edgeface_s": partial(EdgeFace, (48, 96, 160, 304), 8, gamma=0.5),
    "vit_t": partial(VisionTransformer, Form(256, 12), drop_path=0.1, mask_ratio=0.1),
    "vit_s": partial(VisionTransformer, Form(512, 12), drop_path=0.1, mask_ratio=0.1),
    "vit_b": partial(VisionTransformer, Form(512, 24), drop_path=0.1, mask_ratio=0.1),
    "vit_l": partial(VisionTransformer, Form(768, 24), drop_path=0.05, mask_ratio=0.1),
    "vit_h": partial(VisionTransformer, Form(1024, 48), drop_path=0.1, mask_ratio=0.0),
    "vit_kprpe_s": partial(KeypointTransformer, Form(512, 12, times=5, patch=8), drop_path=0.1),
    "vit_kprpe_b": partial(KeypointTransformer, Form(512, 24, heads=16, times=3, patch=8), drop_path=0.1),
    # last, because weights are recognised by building one network after the other, and this one takes seconds
    "r2060": partial(IResNet, (3, 128, 896, 3)),
}


def list_backbones() -> list[str]:
    """Return the names that build_backbone knows, without those of packages."""
    return list(BACKBONES)


def backbone_arguments(name: str) -> dict[str, Any]:
    """Return the arguments of the network of that name, with their defaults; without image_size, which is one of the data.

    Raises:
        ValueError: no network has that name.
    """
    return {key: default for key, default in _arguments(name).items() if key != "image_size"}


def _constructor(name: str) -> Callable[..., nn.Module]:
    if is_of_package(name):
        return partial(PackageNetwork, name)
    if name not in BACKBONES:
        # others call them resnet50, iresnet50, ir_50
        usual = re.sub(r"^(i?resnet|ir(_?se)?)[_-]?(?=\d)", "r", name.casefold()).replace("mobilefacenet", "mbf")
        raise ValueError(f"name must be one of {', '.join(BACKBONES)}, got '{name}'.{did_you_mean(usual, BACKBONES)}")
    return BACKBONES[name]


def _arguments(name: str) -> dict[str, Any]:
    return {key: parameter.default for key, parameter in inspect.signature(_constructor(name)).parameters.items()}


def check_backbone(name: str, embedding_size: int, dropout: float, width: float = 1.0, **others: Any) -> None:
    """Raise ValueError unless these arguments are in their ranges, and the package of a name has it. Builds no network."""
    check_head(embedding_size, dropout)
    scale_channels(64, width)
    if is_of_package(name):
        check_package(name)
    if "drop_path" in others:
        check_shares(others["drop_path"], others.get("mask_ratio", 0.0))


def build_backbone(
    name: str,
    embedding_size: int = 512,
    width: float = 1.0,
    dropout: float = 0.0,
    image_size: int = IMAGE_SIZE,
    **arguments: Any,
) -> nn.Module:
    """Return a freshly initialised network from (b, 3, S, S) images to (b, embedding_size) fp32 embeddings.

    Args:
        width: factor on the channel counts, and on the numbers per token of a transformer, each rounded to a multiple of 8,
            16 at least; 1 is the published network, and the only value for networks of packages.
        dropout: probability before the last linear layer, while training.
        image_size: S, height and width of the images in pixels.
        arguments: further arguments of this network.

    Raises:
        ValueError: no network has that name, its package is not installed, or an argument is out of its range.
    """
    taken = _arguments(name)
    if "width" in taken:
        arguments["width"] = width
    elif width != 1.0:
        raise ValueError(f"width must be 1 for {name}, which has no such argument, got {width}")
    unknown = [key for key in arguments if key not in taken]
    if unknown:
        raise ValueError(f"{name} has no argument {unknown[0]!r}; it has {', '.join(backbone_arguments(name))}")
    if "image_size" in taken:
        arguments["image_size"] = image_size
    elif image_size != IMAGE_SIZE:
        raise ValueError(f"image_size must be {IMAGE_SIZE} for {name}, which takes no other images, got {image_size}")
    return _constructor(name)(embedding_size=embedding_size, dropout=dropout, **arguments)
