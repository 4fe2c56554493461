"""The weights of a network: where they are found, and how they come into it."""

from pathlib import Path

from torch import Tensor, nn

from utils.optim import is_finite

from .format import find_checkpoint
from .reading import read_backbone
from .tensor_file import read_tensors


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the backbone's weights at path: a run folder's newest checkpoint, a checkpoint, or a file of tensors.

    Raises:
        ValueError: there are none.
    """
    if path.is_file():
        return read_tensors(path)
    if not path.is_dir():
        raise ValueError(f"no run folder, checkpoint or weights file at {path}")
    return read_backbone(find_checkpoint(path))


def load_weights(model: nn.Module, weights: dict[str, Tensor], source: str, hint: str) -> nn.Module:
    """Load the weights into the model; a wrong architecture is one line that names the first difference, and gives the hint."""
    expected = model.state_dict()
    weights = {name.removeprefix("module."): value for name, value in weights.items()}  # of a wrapped network
    for name in [*expected, *weights]:
        if name not in weights or name not in expected or weights[name].shape != expected[name].shape:
            here = tuple(weights[name].shape) if name in weights else "missing"
            wanted = tuple(expected[name].shape) if name in expected else "absent"
            raise ValueError(f"{source}: {name} is {here}, this backbone has it {wanted}; {hint}")
    model.load_state_dict(weights)
    return model


def load_initial(backbone: nn.Module, path: Path) -> None:
    """Load the weights of another training, which the key init.backbone names.

    Raises:
        ValueError: naming the key, if there are none, they do not fit, or they are not finite.
    """
    try:
        weights = read_weights(path)
    except ValueError as error:
        raise ValueError(f"init.backbone: {error}") from None
    load_weights(backbone, weights, f"init.backbone {path}", "check the section backbone")
    if not is_finite(backbone):
        raise ValueError(f"init.backbone: {path} holds numbers that are not finite; take an earlier checkpoint")
