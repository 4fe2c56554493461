"""The elementwise work of the two passes, in three equivalent implementations: plain torch, C on the CPU, Triton on CUDA.

Plain torch runs anywhere. It is the reference of the other two (tests/test_partial_fc_kernels.py and
test_partial_fc_kernels_triton.py), which fuse its sweeps over memory into one. A fourth implementation needs a class, and a
line in choose_kernels and in build_kernels.
Shapes: c = classes of one chunk, B = samples of the global (micro-)batch, D = embedding size.
"""

import functools
import importlib
import re

import torch

from ..workspace import Workspace
from . import cpu
from .plain import LONGEST_ROW, PlainKernels

KERNELS = ("auto", "plain")
_OLDEST_TRITON = (3, 5)  # the interpreter of 3.2 gives wrong numbers where the kernels round stochastically


def choose_kernels(wanted: str, device: torch.device, dim: int) -> str:
    """Return "c", "triton" or "plain": the fastest that the device supports, unless wanted is "plain"."""
    fastest = {"cuda": "triton", "cpu": "c"}.get(device.type, "plain")
    return "plain" if wanted == "plain" or why_plain(wanted, device, dim) else fastest


def build_kernels(name: str, workspace: Workspace) -> PlainKernels:
    """Return the kernels of this name, one of those that choose_kernels returns, with buffers of this workspace."""
    if name == "triton":
        from .cuda import TritonKernels  # Triton is not installed on every machine

        return TritonKernels(workspace)
    return cpu.CKernels(workspace) if name == "c" else PlainKernels(workspace)


def why_plain(wanted: str, device: torch.device, dim: int) -> str:
    """Return why plain torch replaces the faster kernels that were wanted, "" if it does not."""
    if wanted == "plain":
        return ""
    if device.type == "cuda":
        return f"rows of {dim} numbers are longer than {LONGEST_ROW}" if dim > LONGEST_ROW else _why_no_triton()
    return cpu.why_unsuited(dim) if device.type == "cpu" else ""


@functools.cache
def _why_no_triton() -> str:
    """Return why Triton cannot be used, "" if it can; it comes with every CUDA build of torch."""
    try:
        found = str(importlib.import_module("triton").__version__)
    except ImportError:
        return "Triton is not installed"
    if tuple(int(number) for number in re.findall(r"\d+", found)[:2]) < _OLDEST_TRITON:
        return f"Triton {found} is older than {'.'.join(map(str, _OLDEST_TRITON))}; a newer torch brings a newer one"
    if not torch.cuda.is_available():  # a GPU elsewhere is planned for
        return ""
    try:  # what can fail has many kinds: no C compiler for its launcher, no headers of Python, a GPU that it does not know
        importlib.import_module(".cuda", __name__).try_kernel(torch.device("cuda"))
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"Triton {found} cannot run a kernel here: {lines[-1].strip() if lines else type(error).__name__}"
    return ""
