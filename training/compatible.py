"""Backward-compatible training (BCT): new embeddings are comparable with those of an old network, whose galleries stay valid.

The embeddings are also classified against the class centres of the old network, which never change, with the loss of the run
(the "influence loss"). A class that the old network did not know has the mean of its embeddings of some images as a centre.
These centres are saved with each checkpoint, so that a run resumes to the same bits on any number of ranks.
Source: Shen et al., "Towards Backward-Compatible Representation Learning", CVPR 2020, https://arxiv.org/abs/2003.11942.

Shapes: n = new classes, D = embedding size.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.base import FaceDataset
from eval.embed import EmbedSettings, class_means
from eval.networks import Network
from partial_fc import PartialFC
from partial_fc.init import init_centres, open_centres, read_class_map
from utils.checkpoint.format import BACKBONE, find_checkpoint, read_manifest
from utils.files import HASH
from utils.text import prefix_errors

from .teachers import read_network

COMPATIBLE = "compatible"  # the name of the head with the old centres


def old_network(path: str) -> dict[str, str]:
    """Return what a run's signature has of compatible.path: the hash of the weights; ValueError if there is no checkpoint."""
    if not path:
        return {}
    with prefix_errors("compatible.path"):
        entry = read_manifest(find_checkpoint(Path(path)))["files"].get(BACKBONE, {})
    return {"weights of compatible.path": entry.get(HASH) or entry.get("sha256", "")}


def fill_old_centres(head: PartialFC, config: Any, dataset: FaceDataset, device: torch.device, images: bool) -> None:
    """Fill this rank's part of the frozen head before the first step, as the section `compatible` says.

    Args:
        dataset: with the people of the head.
        images: without them, as for --check, the centres of classes that the old network did not know are random.

    Raises:
        ValueError: the old network does not fit.
    """
    old, keys = config.compatible, ("compatible.path", "compatible.classes")

    @functools.cache
    def network() -> Network:
        found = read_network(old.path, "", config.run.threads)
        return found._replace(model=found.model.to(device))

    def means(labels: np.ndarray) -> tuple[Tensor, np.ndarray]:
        size = network().image_size
        read = functools.partial(dataset.pixels_and_label, size=size)
        settings = EmbedSettings(config.eval.batch_size, None, config.data.threads, size)
        return class_means(network().model, read, dataset.labels(), labels, config.init.images_per_class, device, settings)

    with torch.random.fork_rng(devices=[]):  # the old network is built with its run's seed
        init_centres(head, old.path, old.classes, means if images else None, keys=keys)
    known = head.num_classes
    if old.classes:
        known = int((read_class_map(Path(old.classes), open_centres(Path(old.path)).num_classes, known) >= 0).sum())
    head.news = (
        f"compatible with {old.path}: {known} of its class centres, and means of its embeddings for {head.num_classes - known} "
        "other classes"
    )
