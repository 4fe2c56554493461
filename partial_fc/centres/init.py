"""Initialises class centres from another run, and new ones from the images of their classes.

Shapes: n = classes asked for, D = embedding size. Of sub-centers, rows (n, D) of centres are (n, K, D).
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from utils.text import prefix_errors

from ..head import PartialFC
from .source import open_centres, read_class_map

ClassMeans = Callable[[np.ndarray], tuple[Tensor, np.ndarray]]  # labels (n,) -> (n, D) directions, (n,) bool: has any image

_BLOCK = 65536  # centres read at once
_SAMPLE = 4096  # centres from which the mean norm is estimated


class InitCounts(NamedTuple):
    """How many of this rank's class centres came from each source."""

    kept: int
    from_images: int
    random: int

    def __str__(self) -> str:
        return f"{self.kept} kept, {self.from_images} from images, {self.random} at random"


@torch.no_grad()
def init_centres(head: PartialFC, source_path: str, class_map: str, class_means: ClassMeans | None) -> InitCounts:
    """Fill this rank's centres before the first step; the same centres on any number of ranks.

    Centres of the source keep their norm, which determines how fast they turn. New ones get the mean norm of the source's
    centres, or without a source the norm of a random start. Of several sub-centers, images give the first one its
    direction, so that it is the dominant one from the start, and the others stay random.

    Args:
        source_path: init.head, a path for open_centres; "" = every class is new.
        class_map: init.classes, a path for read_class_map; "" = the source has the same labels.
        class_means: returns the mean direction of images of new classes; None = they stay random.

    Raises:
        ValueError: the source does not fit.
    """
    source = old_of_new = None
    if source_path:
        with prefix_errors("init.head"):
            source = open_centres(Path(source_path))
        if class_map:
            with prefix_errors("init.classes"):
                old_of_new = read_class_map(Path(class_map), source.num_classes, head.num_classes)
    labels = head.shard_classes()
    old = np.full(len(labels), -1, dtype=np.int64)
    centres = head.centres
    norm = float(torch.linalg.vector_norm(torch.full((head.embedding_size,), 0.01)))  # that of a random start, see shard.py
    if source is not None:
        if source.embedding_size != head.embedding_size:
            raise ValueError(
                f"init.head: the class centres of {source.name} have {source.embedding_size} numbers, "
                f"backbone.embedding_size is {head.embedding_size}"
            )
        if old_of_new is None and source.num_classes != head.num_classes:
            raise ValueError(
                f"init.head: {source.name} has {source.num_classes} classes, the data {head.num_classes}; "
                "say with init.classes which label there is which label here"
            )
        if source.sub_centers != head.config.sub_centers:
            raise ValueError(
                f"init.head: {source.name} has {source.sub_centers} centres for each class, this run has head.sub_centers="
                f"{head.config.sub_centers}; set head.sub_centers={source.sub_centers}, or leave init.head empty"
            )
        old = labels if old_of_new is None else old_of_new[labels]
        used = np.arange(source.num_classes) if old_of_new is None else old_of_new[old_of_new >= 0]
        norm = float(source.read(used[:_SAMPLE]).norm(dim=-1).mean())
    kept = np.flatnonzero(old >= 0)
    for start in range(0, len(kept), _BLOCK):
        rows = kept[start : start + _BLOCK]
        assert source is not None
        values = source.read(old[rows])
        norms = values.norm(dim=-1).view(len(rows), -1)
        bad = np.flatnonzero(
            ~((norms > 0) & norms.isfinite()).all(dim=1).numpy()
        )  # without a direction it would turn without bound
        if len(bad):
            raise ValueError(
                f"init.head: in {source.name} the centre of label {old[rows[bad[0]]]} is zero or not finite; leave that label "
                "out of init.classes, so that its class counts as new, or take an earlier checkpoint"
            )
        centres[torch.from_numpy(rows)] = values.to(centres)
    new, filled = np.flatnonzero(old < 0), 0
    if source is not None:  # new centres keep their random directions but get the norm of the others
        _scale(head, new, norm)
    if class_means is not None:
        for start in range(0, len(new), _BLOCK):
            rows = new[start : start + _BLOCK]
            means, found = class_means(labels[rows])
            first = centres if centres.ndim == 2 else centres[:, 0]
            first[torch.from_numpy(rows[found])] = (means[torch.from_numpy(found)] * norm).to(centres)
            filled += int(found.sum())
    head.centre_store.refresh_norms()
    return InitCounts(len(kept), filled, len(new) - filled)


def _scale(head: PartialFC, rows: np.ndarray, norm: float) -> None:
    for start in range(0, len(rows), _BLOCK):
        part = torch.from_numpy(rows[start : start + _BLOCK])
        values = head.centres[part].float()
        head.centres[part] = (values * (norm / values.norm(dim=-1, keepdim=True).clamp_min(1e-12))).to(head.centres)
