"""Checkpoints of arcface_torch, of any of its years: read and written as ones of this project, block by block, and back."""

import argparse
import os
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partial_fc.centres.shard import classes_of_slots, initial_centres, shard_range, slots_of_classes
from utils.checkpoint import format as ckpt
from utils.checkpoint.reading import class_order, read_backbone, read_trainer, shards_of
from utils.checkpoint.tensor_file import Planned, mapped_tensor, tensor_places, write_object, write_planned, write_tensors
from utils.cli import Advance, progress
from utils.files import unfinished_folder
from utils.image import IMAGE_SIZE
from utils.optim import freeze
from utils.precision import LossScaler

from .checkpoint_files import HEAD_NAMES, ArcfaceCheckpoint, Rows, check_split, missing_ranks, read_arcface_checkpoint
from .network import RecognisedBackbone, kind_of, our_optimizer, own, recognise, their_optimizer, whole_lr

_ROWS_AT_ONCE = 1 << 14  # class centres


def import_checkpoint(options: argparse.Namespace) -> None:
    """Read, check, write, and print the next command."""
    source = read_arcface_checkpoint(options.source, options.era)
    network = recognise(source.backbone, source.backbone_path)
    found = check_split(source, network.embedding_size)
    num_classes = options.num_classes or found
    check_counts(source, found, num_classes, options)
    optimizer, line = our_optimizer(network, source.optimizer, source.backbone, source.backbone_path)
    step = options.step if options.step is not None else source.step or 0
    kind = kind_of(optimizer.state_dict())
    print(f"found {source.backbone_path}: {network.name}, {network.embedding_size} numbers per face, width {network.width:g}")
    print(f"found {len(source.shards)} file(s) with {found} class centres; {line}")
    for note in source.notes:
        print(f"note: {note}")
    if num_classes > found:
        print(f"note: classes {found} to {num_classes - 1} have no centre; theirs start as in a new run")
    if options.step is None:
        print(
            f"note: step {step}; arcface_torch counts micro-batches, so with gradient_acc above 1 divide it and give --step"
            if source.step
            else "note: these files do not contain the step; 0 starts the schedule from the beginning, --step N continues it"
        )
    centres = Centres(source, num_classes, network.embedding_size, options.seed, kind == "adamw")
    trainer = {"optimizer": optimizer.state_dict(), "scaler": LossScaler(enabled=True).state_dict(), "margin": {}}
    sections = {"name": network.name, "embedding_size": network.embedding_size, "width": network.width}
    run_signature = {"backbone": list(sections.values()), "num_classes": num_classes, "seed": options.seed}
    facts: dict[str, Any] = {"step": step, "world_size": options.ranks, "run_signature": run_signature, "score": None}
    facts["config"] = {"backbone": sections, "run": {"seed": options.seed}}  # all that evaluation needs
    final = write(options.run, network, centres, trainer, facts)
    print(f"wrote {final}: {num_classes} classes, step {step}, seed {options.seed}")
    newer = [path for path in ckpt.list_checkpoints(options.run) if ckpt.step_of(path) > step]
    if newer:
        print(f"note: {options.run} also has {newer[-1].name}, which training would resume from instead of this one")
    print(f"next: {command(options.run, network, num_classes, options.seed, kind)}")


def check_counts(source: ArcfaceCheckpoint, found: int, num_classes: int, options: argparse.Namespace) -> None:
    """Raise ValueError unless there is a centre for every class, or --fill handles the others."""
    if found > num_classes:
        raise ValueError(f"{options.source}: holds {found} class centres, more than --num-classes {num_classes}; correct that")
    if options.fill:
        if options.num_classes is None:
            raise ValueError("--fill random needs --num-classes N, of the training set")
        return
    if not source.shards:
        raise ValueError(
            f"{options.source / HEAD_NAMES[source.era].format(0)}: is missing, like all class centres; copy them, or add "
            "--num-classes N --fill random to start with new ones"
        )
    if found < num_classes:
        gone = missing_ranks(source, num_classes)
        reason = f"{gone} is missing" if gone else "the files are of another training set"
        raise ValueError(
            f"{options.source}: holds {found} class centres, --num-classes is {num_classes}: {reason}. "
            "--fill random starts the others as in a new run"
        )


class Centres:
    """The saved state of each class, by slot; of `adamw` also a second moment and the number of updates of each row."""

    def __init__(self, source: ArcfaceCheckpoint, num_classes: int, dim: int, seed: int, adamw: bool) -> None:
        shards = source.shards
        self.num_classes, self.dim, self.seed = num_classes, dim, seed
        self.found = sum(len(shard.weight) for shard in shards)
        lengths = [len(shard.weight) for shard in shards]
        self._weight = Rows([shard.weight for shard in shards], lengths, (dim,), torch.float32)
        names = ("momentum", "variance")[: 1 + adamw]
        moments = [shard.moments if set(names) <= set(shard.moments) else {} for shard in shards]
        self.others = {name: Rows([m.get(name) for m in moments], lengths, (dim,), torch.float32) for name in names}
        if adamw:
            counts = [torch.full((len(shard.weight),), shard.updates, dtype=torch.int32) for shard in shards]
            self.others["updates"] = Rows(counts, lengths, (), torch.int32)
        self._length = self._mean_length() if self.found < num_classes else 0.0

    def planned(self, start: int, stop: int, advance: Advance) -> dict[str, Planned]:
        """Return the tensors of the slots [start, stop); `advance` is called with the rows done."""

        def blocks(read: Callable[[int, int], Tensor]) -> Iterator[Tensor]:
            for low in range(start, stop, _ROWS_AT_ONCE):
                high = min(low + _ROWS_AT_ONCE, stop)
                yield read(low, high)
                advance(high - low)

        plans = {"centres": Planned(torch.float32, (stop - start, self.dim), partial(blocks, self._centres))}
        for name, rows in self.others.items():
            shape, dtype = ((stop - start,), torch.int32) if name == "updates" else ((stop - start, self.dim), torch.float32)
            plans[name] = Planned(dtype, shape, partial(blocks, partial(_finite_rows, rows, name, self._classes)))
        return plans

    def _classes(self, low: int, high: int) -> np.ndarray:
        return classes_of_slots(np.arange(low, high), self.num_classes, self.seed)

    def _centres(self, low: int, high: int) -> Tensor:
        classes = self._classes(low, high)
        rows = _finite_rows(self._weight, "centre", self._classes, low, high)
        fresh = torch.from_numpy(classes >= self.found)
        if bool(fresh.any()):
            values = initial_centres(low, high, self.dim, self.seed)[fresh]
            rows[fresh] = values * (self._length / values.norm(dim=1, keepdim=True)) if self._length else values
        return rows

    def _mean_length(self) -> float:
        """Return the mean norm of the existing centres, 0 if there are none."""
        total = 0.0
        for low in range(0, self.found, _ROWS_AT_ONCE):
            rows = self._weight.take(np.arange(low, min(low + _ROWS_AT_ONCE, self.found)))
            total += float(rows.norm(dim=1).double().sum())
        return total / max(1, self.found)


def _finite_rows(rows: Rows, name: str, classes_of: Callable[[int, int], np.ndarray], low: int, high: int) -> Tensor:
    """Return the rows of the classes in the slots [low, high), after checking that they are finite."""
    classes = classes_of(low, high)
    values = rows.take(classes)
    bad = (~values.isfinite()).reshape(len(values), -1).any(dim=1)
    if bool(bad.any()):
        label = classes[int(bad.nonzero()[0])]
        raise ValueError(f"the {name} of class {label} is not finite; that training had diverged. Take an earlier checkpoint")
    return values


def write(run: Path, network: RecognisedBackbone, centres: Centres, trainer: dict[str, Any], facts: dict[str, Any]) -> Path:
    """Write the checkpoint; return its folder, which gets its name only when it is complete."""
    final = ckpt.checkpoint_path(run, facts["step"])
    if final.exists():
        raise ValueError(f"{final}: exists already and is never overwritten; choose another run folder, or --step")
    ranks, files = facts["world_size"], {}
    with unfinished_folder(final) as folder:
        with progress([], centres.num_classes * (1 + len(centres.others)), "class centres", "row") as bar:
            for rank in range(ranks):
                slots = shard_range(centres.num_classes, rank, ranks)
                name = ckpt.shard_name(rank, ranks)
                files[name] = {**write_planned(folder / name, centres.planned(*slots, bar.update)), "slots": list(slots)}
        files[ckpt.BACKBONE] = write_tensors(folder / ckpt.BACKBONE, network.model.state_dict())
        files[ckpt.TRAINER] = write_object(folder / ckpt.TRAINER, trainer)
        ckpt.commit(folder, final, {**facts, "files": files})
    return final


def command(run: Path, network: RecognisedBackbone, num_classes: int, seed: int, kind: str) -> str:
    """Return the command that continues from the new checkpoint; CONFIG stands for the run's configuration."""
    settings = {
        "run.output": (str(run.parent), "work_dirs"),
        "run.name": (run.name, ""),
        "run.seed": (seed, 2048),
        "data.num_classes": (num_classes, 0),
        "backbone.name": (network.name, ""),
        "backbone.embedding_size": (network.embedding_size, 512),
        "backbone.width": (network.width, 1.0),
        "optimizer.name": (kind, "sgd"),
    }
    changed = [f"{key}={value}" for key, (value, default) in settings.items() if value != default]
    return f"./face train CONFIG {shlex.join(changed)}"


def export_checkpoint(options: argparse.Namespace) -> None:
    """Read, write into a hidden folder, rename it, and report."""
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ValueError(f"{options.out}: exists already; choose another folder, nothing is overwritten")
    checkpoint = ckpt.find_checkpoint(options.checkpoint)
    with unfinished_folder(options.out) as unfinished:
        notes = write_files(checkpoint, unfinished, options.era, options.ranks)
        os.rename(unfinished, options.out)
    print(f"{checkpoint} -> {options.out}: {', '.join(sorted(path.name for path in options.out.iterdir())[:4])} ...")
    for note in notes:
        print(f"note: {note}")


def write_files(checkpoint: Path, out: Path, era: str, ranks: int) -> list[str]:
    """Write all files of an era; return notes for the user."""
    manifest = ckpt.read_manifest(checkpoint)
    step = int(manifest["step"])
    config = manifest.get("config", {})
    _check_counterpart(checkpoint, config)
    classes, seed = class_order(checkpoint)
    if ranks > classes:
        raise ValueError(f"--ranks must be at most the number of classes, {classes}, got {ranks}")
    model = recognise(read_backbone(checkpoint), checkpoint / ckpt.BACKBONE).model
    backbone = {name: own(value) for name, value in model.state_dict().items()}
    rows = SavedRows(checkpoint, classes)
    trainer = read_trainer(checkpoint)
    optimizer = trainer["optimizer"]
    lr, notes = whole_lr(optimizer), []
    frozen = _names(checkpoint, config, "backbone", "freeze")
    freeze(model, frozen)
    if era == "checkpoint_gpu" and (frozen or len(optimizer["param_groups"]) > 1):
        notes.append("backbone.freeze and optimizer.rules have no counterpart there: all modules train at the same rate")
    if config.get("backbone", {}).get("trained_scale"):
        notes.append("backbone.trained_scale has no counterpart there: the last scale stays as it is")
    if era == "checkpoint_gpu" and config.get("optimizer", {}).get("name") == "lamb":
        notes.append("optimizer.name=lamb has no counterpart there: its moments go on as AdamW's, which needs another rate")
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
    own = config.get("backbone", {})
    size, se = config.get("data", {}).get("image_size", IMAGE_SIZE), own.get("se", False)
    if config.get("tasks"):
        found = "was trained with tasks, and arcface_torch has one head"
    elif size != IMAGE_SIZE:
        found = f"takes images of {size!r:.80} x {size!r:.80} pixels, and those of arcface_torch {IMAGE_SIZE} x {IMAGE_SIZE}"
    elif se:
        found = "has squeeze-and-excitation, and those of arcface_torch have none"
    elif own.get("lora_rank") or own.get("train_last"):
        found = "was tuned in part (backbone.lora_rank or backbone.train_last), and arcface_torch trains the whole"
    else:
        return
    raise ValueError(f"checkpoint {checkpoint}: its network {found}. Use its {ckpt.BACKBONE} with this project")


def _names(checkpoint: Path, config: dict[str, Any], section: str, key: str) -> list[str]:
    """Return a list of texts from the configuration of a checkpoint."""
    found = config.get(section, {}).get(key, [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"checkpoint {checkpoint}: {section}.{key} of its configuration must be names, got {found!r:.80}")
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
            path = checkpoint / name
            shard = {key: mapped_tensor(path, key) for key in tensor_places(path) if key != "neighbours"}
            shapes = {key: tuple(value.shape) for key, value in shard.items()}
            like = {key: tuple(value.shape) for key, value in shards[0].items()} if shards else shapes
            if "centres" not in shapes or any(shape[:1] != (length,) for shape in shapes.values()):
                raise ValueError(f"checkpoint {checkpoint}: {name} must hold {length} rows of centres and of each other tensor")
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
