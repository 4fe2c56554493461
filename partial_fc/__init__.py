"""Partial FC: class centres sharded over the ranks and sampled, with a margin softmax that never holds all logits at once."""

from .build import build_head, check_head_fits, head_config
from .centres.row_optimizer import RowAdamW, RowSGD
from .config import HeadConfig
from .head import PartialFC
from .softmax.loss import check_loss

__all__ = ["HeadConfig", "PartialFC", "RowAdamW", "RowSGD", "build_head", "check_head_fits", "check_loss", "head_config"]
