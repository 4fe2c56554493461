"""Finds the weights of a network, and loads them."""

from pathlib import Path

from torch import Tensor, nn

from utils.optim import is_finite

from .format import find_checkpoint
from .reading import read_backbone
from .tensor_file import read_tensors


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the backbone's weights at path, which is a run folder (its newest checkpoint), a checkpoint, or a tensor file.

    Raises:
        ValueError: there are none.
    """
    if path.is_file():
        return read_tensors(path)
    if not path.is_dir():
        raise ValueError(f"no run folder, checkpoint or weights file at {path}")
    return read_backbone(find_checkpoint(path))


def load_weights(model: nn.Module, weights: dict[str, Tensor], source: str, hint: str) -> nn.Module:
    """Load the weights into the model. For another architecture, raise ValueError with the first difference and the hint."""
    expected = model.state_dict()
    weights = {name.removeprefix("module."): value for name, value in weights.items()}  # from a wrapped network
    for name in [*expected, *weights]:
        if name not in weights or name not in expected or weights[name].shape != expected[name].shape:
            here = tuple(weights[name].shape) if name in weights else "missing"
            wanted = tuple(expected[name].shape) if name in expected else "absent"
            raise ValueError(f"{source}: {name} is {here}, in this backbone it is {wanted}; {hint}")
    model.load_state_dict(weights)
    return model


def load_initial(backbone: nn.Module, path: Path, image_size: int) -> None:
    """Load the weights of another training run, which init.backbone names, into a network for images of this size.

    Raises:
        ValueError: the weights are missing, do not fit, or are not finite; the message names the key.
    """
    try:
        weights = read_weights(path)
    except ValueError as error:
        raise ValueError(f"init.backbone: {error}") from None
    hint = f"check the section backbone, and data.image_size (here {image_size}), on which the last layers depend"
    load_weights(backbone, weights, f"init.backbone {path}", hint)
    if not is_finite(backbone):
        raise ValueError(f"init.backbone: {path} holds numbers that are not finite; take an earlier checkpoint")
