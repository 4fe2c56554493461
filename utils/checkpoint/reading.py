"""Reads checkpoints: files by name, class centres by slot, for any number of ranks that wrote them, and weights of networks.

Opening a file checks the sizes of all files of its checkpoint. Hashes are compared only on request.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from utils.cli import Advance
from utils.optim import is_finite
from utils.text import prefix_errors

from .format import BACKBONE, SOFTMAX, TRAINER, find_checkpoint, read_manifest, slots_by_head
from .tensor_file import HASH, file_hash, load_plain, read_part, read_tensors, tensor_places


def read_file(checkpoint: Path, name: str) -> Any:
    """Return a part of a checkpoint as it was passed to CheckpointWriter.save, on the CPU.

    Args:
        name: `NAME.safetensors` for tensors by name, `NAME.pt` for plain values, or the name of a head. For a head, the result
            is a function read(start, stop) that reads the rows of these slots.

    Raises:
        ValueError: the checkpoint has no such part, or it cannot be read.
    """
    if name.endswith(".safetensors"):
        return read_tensors(_file(checkpoint, name))
    return _read_plain(checkpoint, name) if name.endswith(".pt") else shard_reader(checkpoint, name)


def read_backbone(checkpoint: Path) -> dict[str, Tensor]:
    """Return the backbone's state dict, on the CPU, with LoRA merged."""
    return merged(read_tensors(_file(checkpoint, BACKBONE)))


def read_trainer(checkpoint: Path) -> dict[str, Any]:
    """Return the optimizer's and scaler's state, on the CPU; only tensors and plain values are ever loaded."""
    return dict(_read_plain(checkpoint, TRAINER))


def _read_plain(checkpoint: Path, name: str) -> Any:
    try:
        value = load_plain(_file(checkpoint, name))
        if name == TRAINER and not (isinstance(value, dict) and isinstance(value.get("optimizer"), dict)):
            raise ValueError("it has no state of an optimizer")
        return value
    except Exception as error:  # the unpickler raises nearly anything for a damaged file
        first_line = (str(error).splitlines() or [""])[0]
        raise ValueError(f"checkpoint {checkpoint}: {name} cannot be read: {type(error).__name__}: {first_line}") from None


def shards_of(checkpoint: Path, num_classes: int, head: str = SOFTMAX) -> list[tuple[tuple[int, int], str]]:
    """Return ((first slot, last slot), file name) of all files with class centres of a head, in slot order.

    Raises:
        ValueError: the files do not hold each of the num_classes slots exactly once.
    """
    files = slots_by_head(read_manifest(checkpoint)).get(head, {})
    if slot_faults(files.values(), 0, num_classes):
        raise ValueError(f"checkpoint {checkpoint}: its files do not hold each of the {num_classes} class centres once")
    return [(slots, name) for name, slots in files.items()]


def slot_faults(ranges: Iterable[tuple[int, int]], start: int, stop: int) -> list[str]:
    """Return a line for each run of slots in none or several of the sorted `ranges` [first, last), or beyond [start, stop)."""
    lines, reached = [], start
    for low, high in ranges:
        if low != reached:
            where = "no file" if low > reached else "two files"
            lines.append(f"class slots {min(low, reached)} to {max(low, reached) - 1} are in {where}")
        reached = high
    if reached < stop:
        lines.append(f"class slots {reached} to {stop - 1} are in no file")
    elif reached > stop:
        lines.append(f"class slots {stop} to {reached - 1} belong to no class")
    return lines


def head_named(checkpoint: Path, name: str = "") -> str:
    """Return the name of the head of a checkpoint that belongs to the task `name`: its own, or the main one.

    Raises:
        ValueError: there are several, and none has that name.
    """
    heads = sorted(slots_by_head(read_manifest(checkpoint)))
    found = next((wanted for wanted in (name, SOFTMAX) if wanted in heads), "")
    if found or len(heads) <= 1:
        return found or (heads or [SOFTMAX])[0]
    what = f"it has the heads {', '.join(heads)}, got {name or 'no name'}"
    raise ValueError(f"checkpoint {checkpoint}: {what}. face checkpoint merge --head NAME writes one, for init.head")


def class_order(checkpoint: Path, head: str = SOFTMAX) -> tuple[int, int]:
    """Return (number of classes, seed) of a head, which determine each class's slot; ValueError if the manifest lacks them."""
    try:
        signature = read_manifest(checkpoint)["run_signature"]
        signature = signature.get("tasks", {}).get(head, signature)
        return int(signature["num_classes"]), int(signature["seed"])
    except (KeyError, TypeError):
        raise ValueError(
            f"checkpoint {checkpoint}: manifest.json has no num_classes and seed (run_signature), so the labels of its class "
            "centres are unknown"
        ) from None


def shard_reader(checkpoint: Path, head: str = SOFTMAX) -> Callable[..., dict[str, Tensor]]:
    """Return read(start, stop[, name]), which reads only a head's rows of these slots, from any number of shards.

    Raises:
        ValueError: from read, if the saved shards do not cover the range, or are damaged.
    """
    shards = slots_by_head(read_manifest(checkpoint)).get(head, {})

    def read(start: int, stop: int, only: str = "") -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        wanted = {name: (low, high) for name, (low, high) in shards.items() if max(low, start) < min(high, stop)}
        clipped = [(max(low, start), min(high, stop)) for low, high in wanted.values()]
        if faults := slot_faults(clipped, start, stop):
            raise ValueError(f"checkpoint {checkpoint}: {head}: {faults[0]}")
        for (name, slots), (first, last) in zip(wanted.items(), clipped, strict=True):
            for key, rows in _read_rows(checkpoint, name, slots, first, last, only).items():
                parts.setdefault(key, []).append(rows)
        unlike = [key for key, blocks in parts.items() if len({(block.dtype, block.shape[1:]) for block in blocks}) > 1]
        if unlike:
            raise ValueError(f"checkpoint {checkpoint}: {unlike[0]} differs in dtype or width between the files of {head}")
        return {key: blocks[0] if len(blocks) == 1 else torch.cat(blocks) for key, blocks in parts.items()}

    return read


def _read_rows(checkpoint: Path, name: str, slots: tuple[int, int], first: int, last: int, only: str = "") -> dict[str, Tensor]:
    """Return the rows of the slots [first, last) from one file, which holds `slots`; of all its tensors, or only of `only`."""
    low, high = slots
    found = {}
    try:
        places = tensor_places(checkpoint / name)
        for key in [only] if only else sorted(places):
            shape = places[key].shape if key in places else ()
            if shape[:1] != (high - low,):
                raise ValueError(
                    f"checkpoint {checkpoint}: {name} is damaged: its {key} must have {high - low} rows, got the shape {shape}"
                )
            found[key] = read_part(checkpoint / name, places[key], first - low, last - low)
    except OSError as error:
        raise ValueError(f"checkpoint {checkpoint}: {name} cannot be read: {error}") from None
    return found


def check_hashes(checkpoint: Path, share: int = 0, shares: int = 1, progress: Advance = int) -> list[str]:
    """Return a line for each file whose hash differs from the manifest's.

    Args:
        share, shares: check only the share number `share` of `shares` equal shares of the files, so that ranks can divide them.
        progress: called with the number of bytes read since the last call.
    """
    lines = []
    for name, entry in sorted(read_manifest(checkpoint)["files"].items())[share::shares]:
        try:
            kind = HASH if HASH in entry else "sha256"
            if file_hash(checkpoint / name, kind, progress) != entry.get(kind):
                lines.append(f"checkpoint {checkpoint}: {name} is damaged: its hash differs from the manifest's")
        except OSError as error:  # a bad sector, for example
            lines.append(f"checkpoint {checkpoint}: {name} is damaged: it cannot be read ({error.strerror})")
    return lines


def _file(checkpoint: Path, name: str) -> Path:
    """Return the path of one of the checkpoint's files, after checking the sizes of all files."""
    if name not in read_manifest(checkpoint)["files"]:
        raise ValueError(f"checkpoint {checkpoint}: its manifest does not list {name}")
    return checkpoint / name


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return a backbone's weights, with LoRA merged, of a run folder (its newest checkpoint), a checkpoint, or a tensor file.

    Raises:
        ValueError: there are none.
    """
    if path.is_file():
        return merged(read_tensors(path))
    if not path.is_dir():
        raise ValueError(f"no run folder, checkpoint or weights file at {path}")
    return read_backbone(find_checkpoint(path))


def load_weights(model: nn.Module, weights: dict[str, Tensor], source: str, hint: str) -> nn.Module:
    """Load the weights into the model, unless it is on meta; if one does not fit, raise ValueError with it and the hint.

    LoRA in the weights is merged, that of the model stays as it is.
    """
    expected = {name: value for name, value in model.state_dict().items() if ".lora_" not in name}
    weights = merged({name.removeprefix("module."): value for name, value in weights.items()})  # from a wrapped network
    for name in [*expected, *weights]:
        if name not in weights or name not in expected or weights[name].shape != expected[name].shape:
            here = tuple(weights[name].shape) if name in weights else "missing"
            wanted = tuple(expected[name].shape) if name in expected else "absent"
            raise ValueError(f"{source}: {name} is {here}, in this backbone it is {wanted}; {hint}")
    if not any(value.is_meta for value in expected.values()):
        model.load_state_dict(weights, strict=False)
    return model


def merged(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of a network with LoRA as those of the plain network that computes the same: W + (alpha / r) B A.

    Others are returned as they are; so are layers whose parts do not fit together, which no network takes then.
    """
    plain = dict(weights)
    for layer in [name[:-6] for name in weights if name.endswith(".lora_a")]:
        a, b, scale = (plain.pop(f"{layer}lora_{part}", None) for part in ("a", "b", "scale"))
        weight = plain.get(f"{layer}weight")
        if a is None or b is None or scale is None or scale.numel() != 1 or weight is None:
            return weights
        if not a.dim() == b.dim() == 2 or b.shape[1] != a.shape[0] or (b.shape[0], a.shape[1]) != weight.shape:
            return weights
        plain[f"{layer}weight"] = (weight.double() + scale.double() * (b.double() @ a.double())).to(weight.dtype)
    return plain


def load_initial(backbone: nn.Module, path: Path, image_size: int) -> None:
    """Load the weights of another training run, which init.backbone names, into a network for images of this size.

    Raises:
        ValueError: the weights are missing, do not fit, or are not finite; the message names the key.
    """
    with prefix_errors("init.backbone"):
        weights = read_weights(path)
    if hasattr(backbone, "adopt"):  # a network of a package takes files for that network, too
        with prefix_errors(f"init.backbone {path}"):
            adopt: Any = backbone.adopt
            weights = adopt(weights)
    hint = f"check the section backbone, and data.image_size (here {image_size}), on which the last layers depend"
    load_weights(backbone, weights, f"init.backbone {path}", hint)
    if not is_finite(backbone):
        raise ValueError(f"init.backbone: {path} holds numbers that are not finite; take an earlier checkpoint")
