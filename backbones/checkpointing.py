"""Activation checkpointing: a block keeps only its input, and the backward pass computes the rest of the block again.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, https://arxiv.org/abs/1604.06174.
The second computation draws the same random numbers, and BatchNorm does not move its statistics again.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class CheckpointedBlock(nn.Module):
    """A block of a network that can be checkpointed. Subclasses have `compute` instead of `forward`.

    A BatchNorm in it has an attribute `recomputing`, and leaves its statistics as they are where that is true.
    """

    checkpointing = False  # see set_checkpointing
    norms: Sequence[nn.Module] = ()  # of the block, while it is checkpointed

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        """Return `compute` of x, and keep no more than its arguments for the backward pass if checkpointing is on."""
        if not self.checkpointing or not torch.is_grad_enabled():
            return self.compute(x, *more)
        if torch.compiler.is_compiling():  # the compiler changes the statistics once, and takes no other contexts
            return checkpoint(self.compute, x, *more, use_reentrant=False)
        return checkpoint(
            self.compute, x, *more, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), _recomputing(self.norms))
        )

    def compute(self, *x: Any, **more: Any) -> Tensor:
        """Return the output of the block."""
        raise NotImplementedError


def set_checkpointing(network: nn.Module) -> None:
    """Turn on the checkpointing of all blocks of a network; ValueError if it has no blocks that can be checkpointed."""
    blocks = [module for module in network.modules() if isinstance(module, CheckpointedBlock)]
    if not blocks:
        raise ValueError("this backbone has no blocks that can be computed again; set it to false")
    for block in blocks:
        norms = [module for module in block.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        assert all(hasattr(norm, "recomputing") for norm in norms), "would move its statistics twice"
        block.checkpointing, block.norms = True, tuple(norms)  # no list of modules, which would be registered


@contextlib.contextmanager
def _recomputing(norms: Sequence[Any]) -> Iterator[None]:
    for norm in norms:
        norm.recomputing = True
    try:
        yield
    finally:
        for norm in norms:
            norm.recomputing = False
