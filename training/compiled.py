"""torch.compile of the backbone, as train.compile says.

Only training runs the compiled network: its batches have one shape. Evaluation and checkpoints use the network itself, so the
names in its state dict do not change, and no other shape or mode has to be compiled.
"""

import torch
from torch import nn


def check_compile(mode: str, device: torch.device) -> None:
    """Compile a line of code if the run will compile its backbone, so that what is missing is reported before anything trains.

    Args:
        mode: train.compile, see configs/base.yaml.

    Raises:
        ValueError: this machine cannot.
    """
    if mode == "off":
        return
    if mode == "reduce-overhead" and device.type == "cpu":
        raise ValueError("train.compile=reduce-overhead records CUDA graphs, which a CPU has not; set train.compile=default")
    try:
        torch.compile(torch.neg)(torch.ones(2, device=device))
    except Exception as error:
        needs = "a C++ compiler (g++, or the one that CXX names)" if device.type == "cpu" else "Triton and a C compiler"
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"train.compile={mode} needs {needs}, and torch could not compile here: {reason}; "
            "install it, or set train.compile=off"
        ) from None


def compiled(backbone: nn.Module, mode: str) -> nn.Module:
    """Return what a training step calls: the backbone, or a compiled module over its parameters and buffers."""
    if mode == "off":
        return backbone
    # dropout, drop path and token masks are then those of the network itself; the compiler's own would be others
    torch._inductor.config.fallback_random = True
    module: nn.Module = torch.compile(backbone, mode=mode, dynamic=False)  # type: ignore[assignment]
    return module
