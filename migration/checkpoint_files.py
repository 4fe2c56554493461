"""Reads checkpoints of arcface_torch: finds the files of a folder and checks their contents. No file is trusted.

    era               backbone                                class centres of rank r
    backbone.pth      backbone.pth, {epoch}backbone.pth       rank_{r}_softmax_weight.pt, rank_{r}_softmax_weight_mom.pt
    softmax_fc_gpu    model.pt, model_epoch_{n}.pt            softmax_fc_gpu_{r}.pt
    checkpoint_gpu    inside                                  checkpoint_gpu_{r}.pt, with the optimizer's moments

Rank r of W has the classes [start, stop) of partial_fc.centres.shard.shard_range for C classes, in the order of the labels.
Shapes: n = rows of a shard, D = embedding size.
"""

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from partial_fc.centres.shard import shard_range
from utils.checkpoint.tensor_file import RefusedError, is_plain, load_plain

HEADS = {
    "backbone.pth": r"rank[_:](\d+)_softmax_weight\.pt",  # the colon until 2021-05
    "softmax_fc_gpu": r"softmax_fc_gpu_(\d+)\.pt",
    "checkpoint_gpu": r"checkpoint_gpu_(\d+)\.pt",
}
HEAD_NAMES = {
    "backbone.pth": "rank_{}_softmax_weight.pt",
    "softmax_fc_gpu": "softmax_fc_gpu_{}.pt",
    "checkpoint_gpu": "checkpoint_gpu_{}.pt",
}
_BACKBONES = {  # the first one found is used
    "backbone.pth": (r"backbone\.pth", r"(\d+)backbone\.pth"),
    "softmax_fc_gpu": (r"model\.pt", r"model_epoch_(\d+)\.pt", r"(\d+)backbone\.pth"),
    "checkpoint_gpu": (r"checkpoint_gpu_0\.pt",),
}
MOMENTS = {"sgd": {"momentum_buffer": "momentum"}, "adamw": {"exp_avg": "momentum", "exp_avg_sq": "variance"}}  # theirs: ours

LAST_STEP = 99_999_999  # the largest that the name of a checkpoint's folder can hold


class Shard(NamedTuple):
    """The class centres of one rank, memory-mapped if the file allows it."""

    path: Path
    weight: Tensor  # (n, D)
    moments: dict[str, Tensor]  # momentum and variance, (n, D) each, if they were saved and are usable
    updates: int = 0  # of AdamW


class ArcfaceCheckpoint(NamedTuple):
    """The contents of a folder."""

    era: str
    backbone: dict[str, Tensor]  # names without "module.", fp32
    backbone_path: Path
    shards: list[Shard]
    optimizer: dict[str, Any] | None  # its state dict, of rank 0
    step: int | None
    notes: list[str]  # for the user


class Rows:
    """The rows of several tensors, one after the other; None stands for rows of zeros."""

    def __init__(
        self, parts: Sequence[Tensor | None], lengths: Sequence[int], shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self._parts, self._shape, self._dtype = parts, shape, dtype
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def take(self, index: np.ndarray) -> Tensor:
        """Return the rows (len(index), *shape) at these indices; rows beyond the end are zeros."""
        out = torch.zeros(len(index), *self._shape, dtype=self._dtype)
        order = np.argsort(index)  # so that a mapped file is read from front to back
        cuts = np.searchsorted(index[order], self._starts)
        for part, start, low, high in zip(self._parts, self._starts[:-1], cuts[:-1], cuts[1:], strict=True):
            if part is not None and low < high:
                here = order[low:high]
                out[torch.from_numpy(here)] = part[torch.from_numpy(index[here] - start)].to(self._dtype)
        return out


def load(path: Path) -> Any:
    """Return what torch.save wrote, on the CPU: only tensors and plain values, so nothing in the file is executed.

    Raises:
        ValueError: the file is truncated, of another kind, or contains other objects.
    """
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    try:
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()  # torch.load does not check the checksums
        else:
            damaged = None  # torch's format before 1.6 has none
        value = load_plain(path, mmap=is_zip)
    except RefusedError as error:
        raise ValueError(f"{path}: {error}") from None
    except Exception as error:  # damage raises many kinds: BadZipFile, struct.error, KeyError, RuntimeError, UnpicklingError
        if "GLOBAL " in str(error) or "TorchScript" in str(error):
            reason = "holds more than tensors and plain values, which could run code; refused"
        elif is_zip and isinstance(error, zipfile.BadZipFile):
            reason = "is cut short or damaged; copy it again"
        else:
            reason = f"is damaged, or was not written by torch.save ({type(error).__name__})"
        raise ValueError(f"{path}: {reason}") from None
    if damaged:
        raise ValueError(f"{path}: is damaged: {damaged!a} has another checksum than when it was written; copy it again")
    return value


def read_arcface_checkpoint(folder: Path, era: str | None) -> ArcfaceCheckpoint:
    """Return the contents of a folder; with `era`, only files of that kind are read.

    Raises:
        ValueError: there are no such files, or several kinds, a rank is missing, or a file does not match its name.
    """
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    chosen = _choose_era(folder, names, era)
    heads = _heads(folder, names, chosen)
    backbone_path, notes = _backbone_file(folder, names, chosen)
    if chosen == "checkpoint_gpu":
        return _read_full(backbone_path, heads, names, notes)
    shards = []
    for path in heads:
        weight = _weight(load(path), path)
        moments = {}
        momentum_path = path.with_name(path.name.replace("_weight.pt", "_weight_mom.pt"))
        if chosen == "backbone.pth" and momentum_path.is_file():
            momentum = _weight(load(momentum_path), momentum_path)
            if momentum.shape != weight.shape:
                raise ValueError(
                    f"{momentum_path}: is {tuple(momentum.shape)}, {path.name} is {tuple(weight.shape)}; "
                    "the files are of different runs"
                )
            moments["momentum"] = momentum
        shards.append(Shard(path, weight, moments))
    if shards and not all(shard.moments for shard in shards):
        notes.append("no momentum was saved for the class centres of some ranks; theirs starts at zero")
    return ArcfaceCheckpoint(chosen, state_dict(load(backbone_path), backbone_path), backbone_path, shards, None, None, notes)


def _read_full(first: Path, heads: list[Path], names: list[str], notes: list[str]) -> ArcfaceCheckpoint:
    """Return the contents of checkpoint_gpu_{r}.pt files."""
    shards, steps, optimizer, backbone = [], [], None, None
    for path in heads:
        value = load(path)
        if not isinstance(value, dict) or not {"state_dict_backbone", "state_dict_softmax_fc"} <= set(value):
            raise ValueError(f"{path}: must hold state_dict_backbone and state_dict_softmax_fc, as save_all_states writes them")
        step = value.get("global_step", 0)
        if not isinstance(step, int) or not 0 <= step <= LAST_STEP:
            raise ValueError(f"{path}: its global_step must be a whole number up to {LAST_STEP}, got {step!a}")
        steps.append(step)
        weight = _weight(value["state_dict_softmax_fc"], path)
        saved = value.get("state_optimizer")
        moments, updates, note = _head_moments(saved, weight, path)
        shards.append(Shard(path, weight, moments, updates))
        notes += [note] if note else []
        if path == first:
            backbone, optimizer = state_dict(value["state_dict_backbone"], path), saved
    odd = next((path for path, step in zip(heads, steps, strict=True) if step != steps[0]), None)
    if odd is not None:
        raise ValueError(
            f"{odd}: its global_step is {steps[heads.index(odd)]}, that of {heads[0].name} is {steps[0]}; mixed files"
        )
    if "model.pt" in names:
        notes.append(f"the backbone is that of {first.name}; model.pt is not read")
    assert backbone is not None
    return ArcfaceCheckpoint("checkpoint_gpu", backbone, first, shards, optimizer, steps[0], notes)


def _head_moments(saved: Any, weight: Tensor, path: Path) -> tuple[dict[str, Tensor], int, str]:
    """Return the moments of the class centres in a saved optimizer, AdamW's steps, and a reason if there are no moments."""
    try:
        entry = dict(saved["state"].get(saved["param_groups"][-1]["params"][-1], {}))
        updates = int(entry.get("step", 0))
    except (TypeError, KeyError, IndexError, AttributeError, ValueError, RuntimeError):
        return {}, 0, f"{path.name} holds no optimizer; moments of its class centres start at zero"
    for kind in MOMENTS.values():
        if all(_is_plain(entry.get(name)) for name in kind):
            if any(entry[name].shape != weight.shape for name in kind):
                shape = tuple(entry[next(iter(kind))].shape)
                return {}, 0, f"{path.name}: moments {shape} are those of the sampled class centres only; all start at zero"
            return {ours: entry[name] for name, ours in kind.items()}, updates, ""
    return {}, 0, f"{path.name} has no moments of its class centres; they start at zero"


def state_dict(value: Any, path: Path) -> dict[str, Tensor]:
    """Return a network's state dict, fp32, without the "module." that data parallelism puts before its names."""
    if not isinstance(value, dict) or not value or not all(isinstance(k, str) and _is_plain(v) for k, v in value.items()):
        raise ValueError(f"{path}: must be a state dict, names to tensors, got {type(value).__name__}")
    prefix = "module." if all(name.startswith("module.") for name in value) else ""
    return {name.removeprefix(prefix): v.float() if v.is_floating_point() else v for name, v in value.items()}


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and is_plain(value)


def _weight(value: Any, path: Path) -> Tensor:
    """Return the matrix of class centres, bare or under the key weight."""
    weight = value.get("weight") if isinstance(value, dict) else value
    if not _is_plain(weight) or weight.dim() != 2 or not weight.is_floating_point() or not weight.numel():
        raise ValueError(f"{path}: must hold a matrix of class centres, (classes of the rank, D)")
    return weight.detach()


def check_split(source: ArcfaceCheckpoint, embedding_size: int) -> int:
    """Return the number of classes of all shards, after checking that they belong to one run.

    Raises:
        ValueError: naming the file that does not belong to the run.
    """
    lengths = [len(shard.weight) for shard in source.shards]
    total, usual = sum(lengths), sorted(lengths)[len(lengths) // 2] if lengths else 0
    shares = [stop - start for start, stop in (shard_range(total, rank, len(lengths)) for rank in range(len(lengths)))]
    wrong = [rank for rank, share in enumerate(shares) if lengths[rank] != share]
    if wrong:
        rank = max(wrong, key=lambda rank: abs(lengths[rank] - usual))
        listed = ", ".join(map(str, lengths[:8]))
        raise ValueError(
            f"{source.shards[rank].path}: has {lengths[rank]} class centres, but rank {rank} of {len(lengths)} has "
            f"{shares[rank]} of {total} classes (the ranks here: {listed}); files of several runs, or some are missing"
        )
    for shard in source.shards:
        if shard.weight.shape[1] != embedding_size:
            raise ValueError(
                f"{shard.path}: its class centres have {shard.weight.shape[1]} numbers, the embeddings of "
                f"{source.backbone_path.name} {embedding_size}; the files are of different runs"
            )
    return sum(lengths)


def missing_ranks(source: ArcfaceCheckpoint, num_classes: int) -> str:
    """Return the name of the first missing file if the shards are the first ones of more ranks, else ""."""
    lengths = [len(shard.weight) for shard in source.shards]
    for world_size in range(len(lengths) + 1, num_classes // max(lengths, default=num_classes) + 2):
        ranges = [shard_range(num_classes, rank, world_size) for rank in range(len(lengths))]
        if [stop - start for start, stop in ranges] == lengths:
            return HEAD_NAMES[source.era].format(len(lengths))
    return ""


def _choose_era(folder: Path, names: list[str], era: str | None) -> str:
    found = {kind for kind, pattern in HEADS.items() if any(re.fullmatch(pattern, name) for name in names)}

    def has(pattern: str) -> bool:
        return any(re.fullmatch(pattern, name) for name in names)

    if has(r"backbone\.pth") or (has(r"\d+backbone\.pth") and "softmax_fc_gpu" not in found):
        found.add("backbone.pth")
    if has(r"model\.pt|model_epoch_\d+\.pt") and "checkpoint_gpu" not in found:
        found.add("softmax_fc_gpu")
    if not found or (era is not None and era not in found):
        kind = "" if era is None else f" of the kind {era}"
        raise ValueError(f"{folder}: no arcface_torch checkpoint{kind} (backbone.pth, model.pt, checkpoint_gpu_0.pt ...)")
    if era is None and len(found) > 1:
        raise ValueError(f"{folder}: holds files of several kinds; choose one with --era {'|'.join(sorted(found))}")
    return era or found.pop()


def _heads(folder: Path, names: list[str], era: str) -> list[Path]:
    """Return the files with class centres, by rank, without a gap."""
    by_rank: dict[int, str] = {}
    for name in names:
        if match := re.fullmatch(HEADS[era], name):
            if int(match[1]) in by_rank:
                raise ValueError(f"{folder / name}: rank {int(match[1])} is there twice, as {by_rank[int(match[1])]}; keep one")
            by_rank[int(match[1])] = name
    for rank in range(max(by_rank, default=-1)):
        if rank not in by_rank:
            raise ValueError(f"{folder / HEAD_NAMES[era].format(rank)}: is missing; ranks up to {max(by_rank)} are there")
    return [folder / by_rank[rank] for rank in range(len(by_rank))]


def _backbone_file(folder: Path, names: list[str], era: str) -> tuple[Path, list[str]]:
    """Return the file with the backbone, the last one of several epochs, and notes."""
    for pattern in _BACKBONES[era]:
        found = [(int(match[1]) if match.lastindex else 0, name) for name in names if (match := re.fullmatch(pattern, name))]
        if found:
            name = max(found)[1]
            notes = [f"{len(found)} files have a backbone; the last is taken, {name}"] if len(found) > 1 else []
            return folder / name, notes
    raise ValueError(
        f"{folder}: has class centres of the kind {era}, but no backbone ({_BACKBONES[era][0].replace(chr(92), '')})"
    )
