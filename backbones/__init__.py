"""Backbones by name: aligned face images in, raw embeddings out.

Every network takes (b, 3, 112, 112), RGB, (x - 127.5) / 127.5, and returns (b, D) fp32 embeddings. The head and the
evaluation normalise them.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from utils.suggest import did_you_mean

from .iresnet import IResNet, check_head, scale_channels
from .mobilefacenet import MobileFaceNet

BACKBONES: dict[str, Callable[..., nn.Module]] = {
    "r18": partial(IResNet, (2, 2, 2, 2)),
    "r34": partial(IResNet, (3, 4, 6, 3)),
    "r50": partial(IResNet, (3, 4, 14, 3)),
    "r100": partial(IResNet, (3, 13, 30, 3)),
    "r200": partial(IResNet, (6, 26, 60, 6)),
    "mbf": MobileFaceNet,
}


def list_backbones() -> list[str]:
    """Return the names that build_backbone knows."""
    return list(BACKBONES)


def backbone_arguments(name: str) -> dict[str, Any]:
    """Return the arguments of the network of that name, with their defaults.

    Raises:
        ValueError: no network has that name.
    """
    if name not in BACKBONES:
        raise ValueError(f"name must be one of {', '.join(BACKBONES)}, got '{name}'.{did_you_mean(name, BACKBONES)}")
    return {key: parameter.default for key, parameter in inspect.signature(BACKBONES[name]).parameters.items()}


def check_backbone(name: str, embedding_size: int, width: float, dropout: float, **others: Any) -> None:
    """Raise ValueError unless these arguments, which all networks share, are in their ranges. Builds no network."""
    check_head(embedding_size, dropout)
    scale_channels(64, width)


def build_backbone(
    name: str, embedding_size: int = 512, width: float = 1.0, dropout: float = 0.0, **arguments: Any
) -> nn.Module:
    """Return a freshly initialised network from (b, 3, 112, 112) images to (b, embedding_size) fp32 embeddings.

    Args:
        width: factor on the channel counts, each rounded to a multiple of 8, 16 at least; 1 is the published network.
        dropout: probability before the last linear layer, while training.
        arguments: further arguments of this network.

    Raises:
        ValueError: no network has that name, or an argument is out of its range.
    """
    taken = backbone_arguments(name)
    unknown = [key for key in arguments if key not in taken]
    if unknown:
        raise ValueError(f"{name} has no argument {unknown[0]!r}; it has {', '.join(taken)}")
    return BACKBONES[name](embedding_size=embedding_size, width=width, dropout=dropout, **arguments)
