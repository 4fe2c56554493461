"""Partial FC: class centres sharded over the ranks, sampled, with a margin softmax whose logits never exist whole."""

from .build import build_head, check_head_fits
from .head import PartialFC
from .row_optimizer import RowAdamW, RowSGD

__all__ = ["PartialFC", "RowAdamW", "RowSGD", "build_head", "check_head_fits"]
