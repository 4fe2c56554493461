"""A counter of what would make the host wait for a CUDA device, on the CPU."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Syncs(TorchDispatchMode):
    """Counts the operations after which the host would wait for a CUDA device."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        indices = args[1] if name.startswith("index") and len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
        masks = [item for item in indices if isinstance(item, Tensor)]
        if name in self.WAITING or any(item.dtype in (torch.bool, torch.uint8) for item in masks):
            self.found.append(name)
        return function(*args, **(kwargs or {}))
