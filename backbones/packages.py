"""Networks of timm and of torchvision by name, such as timm:convnext_tiny, with an embedding layer like ours.

The package builds the network with fresh weights; nothing is downloaded. Its classifier is left out, and dropout, a linear
layer and a batch normalisation follow the features that it pooled. Images come as they do for all networks here,
(x - 127.5) / 127.5. The package's own mean and deviation belong to its trained weights; `adopt` puts them into these.
Shapes: b = images of this rank, H = W = image_size, F = pooled features, D = embedding size.
"""

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from utils.image import IMAGE_SIZE
from utils.text import did_you_mean, first_line, pip_install

from .foundations import translate
from .iresnet import autocast_off, check_head, check_image_size, check_images


class PackageNetwork(nn.Module):
    """Args:
    name: PACKAGE:NAME, the name as the package lists it.
    dropout: probability at the pooled features, while training.
    image_size: height and width of the images in pixels, a multiple of 16.

    Raises:
        ValueError: the package is not installed, or has no such network, or the network does not take these images.
    """

    def __init__(self, name: str, embedding_size: int = 512, dropout: float = 0.0, image_size: int = IMAGE_SIZE) -> None:
        super().__init__()
        check_head(embedding_size, dropout)
        check_image_size(image_size)
        self.image_size, self.of_timm = image_size, name.startswith("timm:")
        package, inner = check_package(name)
        try:
            self.network, features = _built(_BUILDERS[name.partition(":")[0]], package, inner, image_size)
        except Exception as error:  # of any kind: it is not our code
            reason = first_line(error)
            raise ValueError(f"name: {name} cannot be built for images of {image_size} x {image_size}: {reason:.300}") from None
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(features, embedding_size)
        self.features = nn.BatchNorm1d(embedding_size)
        self.features.weight.requires_grad = False  # redundant before the normalisation that follows, as in IResNet

    def adopt(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return weights to begin with as a state dict of this network: those of a run, or of a file for timm's network.

        A file for timm's network has no embedding layer, so the one here stays as it is.

        Raises:
            ValueError: they are not of this network.
        """
        if not self.of_timm:
            return weights
        weights = {name.removeprefix("module."): value for name, value in weights.items()}  # from a wrapped network
        inner = {name[8:]: value for name, value in weights.items() if name.startswith("network.")}
        others = weights if inner else self.state_dict()
        found = translate(self.network, inner or weights, fold=not inner)
        rest = {name: value for name, value in others.items() if not name.startswith("network.")}
        return {**{f"network.{name}": value for name, value in found.items()}, **rest}

    def forward(self, images: Tensor) -> Tensor:
        """Return the (b, D) raw embeddings of images (b, 3, H, W), in fp32 even under autocast."""
        check_images(images, self.image_size)
        x = self.dropout(self.network(images))
        with autocast_off(x.device.type):
            return self.features(self.fc(x.to(self.fc.weight.dtype)))


def _built(builder: "Builder", package: Any, inner: str, image_size: int) -> tuple[nn.Module, int]:
    """Return a network and its F. On the device meta it takes no memory, but for the few networks that cannot be there."""
    if torch.empty(0).is_meta:
        with contextlib.suppress(Exception):
            network = builder(package, inner, image_size)
            return network, _count_features(network, image_size)
    with torch.device("cpu"):
        network = builder(package, inner, image_size)
        return network, _count_features(network, image_size)


def _count_features(network: nn.Module, image_size: int) -> int:
    """Return F, from a forward pass of one black image."""
    first = next(network.parameters())
    network.eval()  # so that no statistics move, and no random number is drawn
    with torch.no_grad():
        out = network(torch.zeros(1, 3, image_size, image_size, dtype=first.dtype, device=first.device))
    network.train()
    if not isinstance(out, Tensor) or out.dim() != 2:
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"it must return pooled features (b, F), it returns {shape}")
    return out.shape[1]


def is_of_package(name: str) -> bool:
    """Return whether a name is of the form PACKAGE:NAME, with one of the packages known here."""
    package, colon, _ = name.partition(":")
    return bool(colon) and package in _BUILDERS


def check_package(name: str) -> tuple[Any, str]:
    """Return (package, name of the network in it). Builds no network.

    Raises:
        ValueError: the package is not installed, or has no such network.
    """
    title, _, inner = name.partition(":")
    try:
        package = importlib.import_module(title if title == "timm" else f"{title}.models")
    except ModuleNotFoundError as error:
        missing = (error.name or title).partition(".")[0]
        if missing != title:
            raise ValueError(f"name: {name} needs {title}, which needs {missing}: {pip_install(missing)}") from None
        raise ValueError(f"name: {name} needs the package {title}: {pip_install(title)}") from None
    except Exception as error:  # torchvision raises a RuntimeError beside a torch that it was not built for
        reason = first_line(error)
        raise ValueError(
            f"name: {name} needs {title}, which cannot be imported here: {reason:.300}. Install the torchvision that was "
            f"made for torch {torch.__version__}"
        ) from None
    known = package.list_models() if title == "timm" else package.list_models(module=package)
    if inner.partition(".")[0] not in known:  # timm: after the point stands whose weights it means, such as openai
        raise ValueError(f"name: {title} has no network {inner!r}.{did_you_mean(inner, known)}")
    return package, inner


def _of_timm(package: Any, name: str, image_size: int) -> nn.Module:
    """Return a network of timm without its classifier."""
    settings = package.get_pretrained_cfg(name)  # an error if nobody published such weights
    fixed = {"img_size": image_size} if settings is not None and settings.fixed_input_size else {}  # transformers
    return package.create_model(name, pretrained=False, num_classes=0, **fixed)


def _of_torchvision(package: Any, name: str, image_size: int) -> nn.Module:
    """Return a network of torchvision without its last linear layer, the classifier."""
    fixed = {"image_size": image_size} if name.startswith("vit_") else {}
    network = package.get_model(name, weights=None, **fixed)
    if getattr(network, "aux_logits", False):
        raise ValueError("it returns several outputs while it trains; take another network")
    linear = [path for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError("it has no linear layer that could be its classifier")
    network.set_submodule(linear[-1], nn.Identity())
    return network


Builder = Callable[[Any, str, int], nn.Module]  # of a package, a name and the size of images
_BUILDERS: Mapping[str, Builder] = {"timm": _of_timm, "torchvision": _of_torchvision}
