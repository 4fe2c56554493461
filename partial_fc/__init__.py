"""Partial FC: class centres sharded over the ranks, sampled, with a margin softmax whose logits never exist whole."""

from .build import build_head, check_head_fits, head_config
from .config import HeadConfig
from .head import PartialFC
from .row_optimizer import RowAdamW, RowSGD

__all__ = ["HeadConfig", "PartialFC", "RowAdamW", "RowSGD", "build_head", "check_head_fits", "head_config"]
