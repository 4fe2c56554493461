"""Writes a checkpoint as the files of arcface_torch, in the layout of any of its years."""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from partial_fc.centres.shard import shard_range, slots_of_classes
from utils.checkpoint.format import BACKBONE, find_checkpoint, read_manifest
from utils.checkpoint.reading import class_order, read_backbone, read_trainer, shards_of
from utils.checkpoint.tensor_file import write_object
from utils.cli import progress
from utils.files import unfinished_folder
from utils.image import IMAGE_SIZE
from utils.optim import freeze

from .checkpoint_files import HEAD_NAMES, Rows
from .network import kind_of, own, recognise, their_optimizer, whole_lr


def convert(options: argparse.Namespace) -> None:
    """Read, write into a hidden folder, rename it, and report."""
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ValueError(f"{options.out}: exists already; choose another folder, nothing is overwritten")
    checkpoint = find_checkpoint(options.checkpoint)
    with unfinished_folder(options.out) as unfinished:
        notes = write_files(checkpoint, unfinished, options.era, options.ranks)
        os.rename(unfinished, options.out)
    print(f"{checkpoint} -> {options.out}: {', '.join(sorted(path.name for path in options.out.iterdir())[:4])} ...")
    for note in notes:
        print(f"note: {note}")


def write_files(checkpoint: Path, out: Path, era: str, ranks: int) -> list[str]:
    """Write all files of an era; return notes for the user."""
    manifest = read_manifest(checkpoint)
    step = int(manifest["step"])
    classes, seed = class_order(checkpoint)
    if ranks > classes:
        raise ValueError(f"--ranks must be at most the number of classes, {classes}, got {ranks}")
    config = manifest.get("config", {})
    _check_counterpart(checkpoint, config)
    model = recognise(read_backbone(checkpoint), checkpoint / BACKBONE).model
    backbone = {name: own(value) for name, value in model.state_dict().items()}
    rows = SavedRows(checkpoint, classes)
    trainer = read_trainer(checkpoint)
    optimizer = trainer["optimizer"]
    lr, notes = whole_lr(optimizer), []
    frozen = _names(checkpoint, config, "backbone", "freeze")
    freeze(model, frozen)
    if era == "checkpoint_gpu" and (frozen or len(optimizer["param_groups"]) > 1):
        notes.append("backbone.freeze and optimizer.rules have no counterpart there: all modules train at the same rate")
    initial_lr = config.get("optimizer", {}).get("lr")
    if initial_lr is not None and (type(initial_lr) not in (int, float) or not 0 <= initial_lr < 1e30):
        raise ValueError(f"checkpoint {checkpoint}: optimizer.lr of its configuration must be a rate, got {initial_lr!r:.80}")
    if era == "checkpoint_gpu" and ("variance" in rows.tensors) != (kind_of(optimizer) == "adamw"):
        notes.append("backbone and class centres have different optimizers here; moments of the centres are left out")
    epoch = epochs_done(manifest["run_signature"], step)
    if era == "checkpoint_gpu" and epoch is None:
        notes.append("the checkpoint does not say how long an epoch is; epoch is 0, so arcface_torch runs all epochs again")
    write_object(out / ("backbone.pth" if era == "backbone.pth" else "model.pt"), backbone)
    uneven = False
    for rank in progress(range(ranks), ranks, "class centres", "rank"):
        start, stop = shard_range(classes, rank, ranks)
        slots = slots_of_classes(np.arange(start, stop), classes, seed)
        weight, name = rows.take("centres", slots), HEAD_NAMES[era].format(rank)
        if era == "softmax_fc_gpu":
            write_object(out / name, {"weight": weight})
        elif era == "backbone.pth":
            write_object(out / name, weight)
            if "variance" not in rows.tensors:
                write_object(out / name.replace("_weight.pt", "_weight_mom.pt"), rows.take("momentum", slots))
        else:
            moments: dict[str, Tensor] = {
                name: rows.take(name, slots) for name in ("momentum", "variance") if name in rows.tensors
            }
            updates = rows.take("updates", slots) if "updates" in rows.tensors else torch.zeros(1)
            uneven |= int(updates.min()) != int(updates.max())
            full = {
                "epoch": epoch or 0,  # the next one
                "global_step": step,
                "state_dict_backbone": backbone,
                "state_dict_softmax_fc": {"weight": weight},
                "state_optimizer": their_optimizer(model, trainer, moments, int(updates.max()), initial_lr),
                # only the position; length and shape come from its own configuration
                "state_lr_scheduler": {"last_epoch": step, "_step_count": step + 1, "_last_lr": [lr, lr]},
            }
            write_object(out / name, full)
    if uneven:
        notes.append("the centres have different numbers of updates; arcface_torch has one for all, so the largest is stored")
    return notes


def _check_counterpart(checkpoint: Path, config: dict[str, Any]) -> None:
    """Raise ValueError if the network differs from all of arcface_torch's by its input or its blocks."""
    size, se = config.get("data", {}).get("image_size", IMAGE_SIZE), config.get("backbone", {}).get("se", False)
    if size != IMAGE_SIZE:
        found = f"takes images of {size!r:.80} x {size!r:.80} pixels, and those of arcface_torch {IMAGE_SIZE} x {IMAGE_SIZE}"
    elif se:
        found = "has squeeze-and-excitation, and those of arcface_torch have none"
    else:
        return
    raise ValueError(f"checkpoint {checkpoint}: its network {found}. Use its {BACKBONE} with this project")


def _names(checkpoint: Path, config: dict[str, Any], section: str, key: str) -> list[str]:
    """Return a list of texts from the configuration of a checkpoint."""
    found = config.get(section, {}).get(key, [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ValueError(
            f"checkpoint {checkpoint}: {section}.{key} of its configuration must be a list of names, got {found!r:.80}"
        )
    return found


def epochs_done(run_signature: dict[str, Any], step: int) -> int | None:
    """Return the number of finished epochs after `step` steps, None if the length of an epoch is unknown."""
    try:
        return step // max(1, int(run_signature["num_images"]) // int(run_signature["batch_size"]))
    except KeyError:
        return None


class SavedRows:
    """The class centres and moments of a checkpoint by slot, memory-mapped, in any format."""

    def __init__(self, checkpoint: Path, num_classes: int) -> None:
        files = shards_of(checkpoint, num_classes)
        shards: list[dict[str, Tensor]] = []
        lengths = [stop - start for (start, stop), _ in files]
        for (_, name), length in zip(files, lengths, strict=True):
            try:
                with safe_open(checkpoint / name, framework="pt") as file:
                    shard = {key: file.get_tensor(key) for key in file.keys() if key != "neighbours"}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise ValueError(f"checkpoint {checkpoint}: {name} cannot be read: {error}") from None
            shapes = {key: tuple(value.shape) for key, value in shard.items()}
            like = {key: tuple(value.shape) for key, value in shards[0].items()} if shards else shapes
            if "centres" not in shapes or any(shape[:1] != (length,) for shape in shapes.values()):
                raise ValueError(
                    f"checkpoint {checkpoint}: {name} must hold {length} rows of centres and of every other tensor"
                )
            if len(shapes["centres"]) > 2:
                raise ValueError(
                    f"checkpoint {checkpoint}: has {shapes['centres'][1]} centres for each class (head.sub_centers), and the "
                    "head of arcface_torch only one. Its network alone is backbone.safetensors"
                )
            if {key: shape[1:] for key, shape in shapes.items()} != {key: shape[1:] for key, shape in like.items()}:
                raise ValueError(f"checkpoint {checkpoint}: {name} holds other tensors than {files[0][1]}")
            shards.append(shard)
        self.tensors = {
            name: Rows([shard[name] for shard in shards], lengths, tuple(first.shape[1:]), torch.float32)
            for name, first in shards[0].items()
        }

    def take(self, name: str, slots: np.ndarray) -> Tensor:
        """Return rows in fp32."""
        rows = self.tensors[name].take(slots)
        scale = self.tensors.get(f"{name}_scale")
        return rows if scale is None else rows.mul_(scale.take(slots)[:, None])
