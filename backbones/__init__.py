"""Backbones by name: aligned face images in, raw embeddings out.

Every network takes (b, 3, 112, 112), RGB, (x - 127.5) / 127.5, and returns (b, D) fp32 embeddings that are not
normalised: the head and the evaluation do that.
"""

from collections.abc import Callable
from functools import partial

from torch import nn

from utils.suggest import did_you_mean

from .iresnet import IResNet
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


def build_backbone(name: str, embedding_size: int = 512, width: float = 1.0, dropout: float = 0.0) -> nn.Module:
    """Return a freshly initialised network from (b, 3, 112, 112) images to (b, embedding_size) fp32 embeddings.

    Args:
        width: factor on the channel counts, each rounded to a multiple of 8, 16 at least; 1 is the published network.
        dropout: probability before the last linear layer, while training.
    """
    if name not in BACKBONES:
        hint = did_you_mean(name, BACKBONES)
        raise ValueError(f"backbone.name must be one of {', '.join(BACKBONES)}, got '{name}'.{hint}")
    return BACKBONES[name](embedding_size=embedding_size, width=width, dropout=dropout)
