"""What a run trains: backbone, margin, head and their optimizers, built, and resumed or begun with other weights."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
from easydict import EasyDict
from torch import nn

from backbones import backbone_arguments, build_backbone
from eval.embed import class_means
from losses import build_margin
from losses.margin import Margin
from partial_fc import PartialFC, build_head, check_head_fits, head_config
from partial_fc.init_centres import InitCounts, init_centres
from utils.checkpoint.resume import restore, trainer_state
from utils.checkpoint.weights import load_initial
from utils.distributed import all_gather_objects, raise_on_all_ranks
from utils.memory import available_bytes, backbone_memory
from utils.optim import build_optimizer, freeze
from utils.precision import AUTOCAST, LossScaler
from utils.randomness import derive

from .setup import Setup


class Model(NamedTuple):
    """All that training changes."""

    backbone: nn.Module
    margin: Margin
    optimizer: torch.optim.Optimizer
    head: PartialFC
    scaler: LossScaler
    autocast: torch.dtype | None

    def trainer_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides backbone and class centres."""
        return trainer_state(self.backbone, self.margin, self.optimizer, self.scaler)


def build_model(config: EasyDict, setup: Setup) -> Model:
    """Return the model of a run from scratch.

    Raises:
        SharedError: on every rank, if the head does not fit into the memory, with what would.
    """
    world, autocast, seed = setup.world, AUTOCAST[config.train.precision], config.run.seed
    torch.manual_seed(derive(seed, "backbone"))
    backbone = build_backbone(**{key: config.backbone[key] for key in ("name", *backbone_arguments(config.backbone.name))})
    backbone = backbone.to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    margin = build_margin(**config.loss)
    classes, dim = setup.dataset.num_classes, config.backbone.embedding_size
    settings = ("name", "lr", "momentum", "weight_decay", "beta2", "eps", "lr_factors")
    of_head = head_config(config.head, config.optimizer, autocast, world.device)
    free = min(all_gather_objects(available_bytes(world), world))  # so that all ranks say the same
    with raise_on_all_ranks(world):
        freeze(backbone, config.backbone.freeze)
        optimizer = build_optimizer(backbone, **{key: config.optimizer[key] for key in settings})
        moments, samples = 2 if config.optimizer.name == "adamw" else 1, config.train.batch_size // config.train.accumulation
        beside = backbone_memory(backbone, autocast, moments).total(samples // world.world_size)
        check_head_fits(classes, dim, world, of_head, samples, config.train.accumulation, beside, free)
    head = build_head(margin, classes, dim, world, seed, of_head)
    return Model(backbone, margin, optimizer, head, LossScaler(enabled=autocast is torch.float16), autocast)


def resume_or_init(config: EasyDict, setup: Setup, model: Model) -> tuple[int, InitCounts]:
    """Load the checkpoint to resume, or the weights to begin with; return the steps done, and whence this rank has its centres.

    Raises:
        SharedError: on every rank, if they do not fit.
    """
    with raise_on_all_ranks(setup.world):
        if setup.resume_from is not None:
            parts = (model.backbone, model.margin, model.optimizer, model.scaler, model.head.load_rows)
            return restore(setup.resume_from, *parts), InitCounts(0, 0, 0)
        if config.init.backbone:
            return 0, _init(config, setup, model)
    return 0, InitCounts(0, 0, 0)


def _init(config: EasyDict, setup: Setup, model: Model) -> InitCounts:
    """Fill backbone and class centres from another training, as the section `init` says."""
    init, dataset = config.init, setup.dataset
    load_initial(model.backbone, Path(init.backbone))
    means = functools.partial(
        class_means,
        model.backbone,
        dataset.pixels_and_label,
        dataset.labels(),
        per_class=init.images_per_class,
        device=setup.world.device,
        batch_size=config.eval.batch_size,
        autocast=model.autocast,
        threads=config.data.threads,
    )
    return init_centres(model.head, init.head, init.classes, means if init.new_classes == "images" else None)
