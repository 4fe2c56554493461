"""Partial FC: class centres sharded over the ranks, sampled, with a margin softmax whose logits never exist whole."""

from .head import PartialFC

__all__ = ["PartialFC"]
