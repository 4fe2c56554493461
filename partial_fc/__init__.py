"""Partial FC: class centres sharded over the ranks and sampled, with a margin softmax that never holds all logits at once.

Files and rooms import downwards only:

    init                    centres from another run, or from images
    memory, head            what a head takes of the memory; the head itself
    softmax/                the forward pass of a micro-batch, and the gradients of the centres
    sampling/               which classes are active in a step, and the search for neighbours
    config                  the settings of a head
    kernels/                the elementwise work, in plain torch, C and Triton
    centres/                how class centres are stored, sharded and updated
    workspace, collectives  buffers, the cache and a stream on the device; the exchange between ranks

The type of a margin is that of losses/margin.py. It is imported for type checks alone.
"""

from .centres.row_optimizer import RowAdamW, RowSGD
from .config import HeadConfig, head_config
from .head import PartialFC
from .memory import check_head_fits
from .softmax.loss import check_loss

__all__ = ["HeadConfig", "PartialFC", "RowAdamW", "RowSGD", "check_head_fits", "check_loss", "head_config"]
