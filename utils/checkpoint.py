"""Checkpoints: one folder per step, complete or absent.

    checkpoints/step_00012000/
        backbone.safetensors                 parameters and buffers
        softmax_00003_of_00008.safetensors   a rank's class centres and their momentum, rows in slot order
        trainer.pt                           optimizer and loss scaler; tensors and plain values only
        manifest.json                        written last: step, slot ranges, what the run is, sizes and hashes

Everything is written into a hidden folder beside, flushed to the disk and renamed, so a folder with its final name is whole
whatever was killed when (checkpoint_writer.py). Reading checks the sizes of all files, and their hashes only on request.
"""

import errno
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .tensor_file import HASH, Planned, file_hash, flush, read_tensors, write_text

FORMAT = 1
ReadRows = Callable[[int, int], dict[str, Tensor]]  # (first slot, last slot) -> rows of each tensor by name
_ROWS_AT_ONCE = 8192  # 16 MiB of 512 numbers
_MANIFEST, BACKBONE, TRAINER = "manifest.json", "backbone.safetensors", "trainer.pt"


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a complete checkpoint itself."""
    return (path / _MANIFEST).is_file()


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    return [path for path in _step_folders(run_folder) if is_checkpoint(path)]


def list_without_manifest(run_folder: Path) -> list[Path]:
    """Return the folders with the name of a checkpoint that lost their manifest; no save leaves such a folder."""
    return [path for path in _step_folders(run_folder) if not (path / _MANIFEST).exists()]


def _step_folders(run_folder: Path) -> list[Path]:
    return sorted((run_folder / "checkpoints").glob(f"step_{'[0-9]' * 8}"))


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at path: itself, or the newest of the run folder it names.

    Raises:
        ValueError: there is none.
    """
    if is_checkpoint(path):
        return path
    found = list_checkpoints(path)
    if not found:
        raise ValueError(f"no complete checkpoint at {path}: expected a step_... folder with {_MANIFEST}, or a run folder")
    return found[-1]


def checkpoint_path(run_folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint after so many optimizer steps."""
    return run_folder / "checkpoints" / f"step_{step:08d}"


def partial_path(final: Path) -> Path:
    """Return the hidden folder in which the checkpoint `final` is written until it is complete."""
    return final.with_name(f".{final.name}.partial")


def step_of(checkpoint: Path) -> int:
    """Return the optimizer steps that the name of a checkpoint's folder tells."""
    return int(checkpoint.name.removeprefix("step_"))


def shard_name(rank: int, world_size: int) -> str:
    """Return the name of the file with a rank's class centres."""
    return f"softmax_{rank:05d}_of_{world_size:05d}.safetensors"


def seal(partial: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Make a complete checkpoint of a folder that holds all files the manifest names: write that, flush, rename.

    Raises:
        OSError: it cannot be written, a file is not there as it was written (by a machine that sees another folder under this
            path), or there is a checkpoint of that name, which is never overwritten.
    """
    for name, entry in manifest["files"].items():
        file = partial / name
        if not file.is_file() or file.stat().st_size != entry["size"]:
            raise FileNotFoundError(
                errno.ENOENT, "is not here as it was written; several machines need a shared folder", str(file)
            )
    write_text(partial / _MANIFEST, json.dumps({"format": FORMAT, **manifest}, indent=1))
    flush(partial)
    if final.exists():
        raise FileExistsError(errno.EEXIST, "is there already and is never overwritten", str(final))
    os.rename(partial, final)
    flush(final.parent)


def remove_unfinished(run_folder: Path) -> list[str]:
    """Delete what saves that were killed left behind; return a line about each. Only for who holds the run folder's lock."""
    lines = []
    for leftover in sorted((run_folder / "checkpoints").glob(".step_*")):
        try:
            shutil.rmtree(leftover)
        except OSError as error:  # another user's: it is in nobody's way but for its room, and that of a save at its step
            lines.append(f"checkpoint: the leftover {leftover} cannot be deleted: {error.strerror}; delete it by hand")
            continue
        if leftover.suffix == ".partial":
            lines.append(f"checkpoint {leftover.name[1:-8]} was not finished when the run ended; removed what there was of it")
    return lines


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest after checking that each file it names is there with the size it had.

    Raises:
        ValueError: naming the file and what is wrong, whatever is written in the manifest.
    """
    path = checkpoint / _MANIFEST
    try:
        manifest = json.loads(path.read_text())
        entries = {name: int(entry["size"]) for name, entry in manifest["files"].items()}
        found, _, _ = manifest["format"], int(manifest["step"]), float(manifest.get("score") or 0)
        dict(manifest.get("identity", {}))
        for name, entry in manifest["files"].items():
            if Path(name).name != name:  # nothing outside the checkpoint is ever read, or written by a copy
                raise ValueError(f"{name!r} is not the name of a file in it")
            if "slots" in entry:
                low, high = entry["slots"]
                if not 0 <= low < high:
                    raise ValueError(f"the slots of {name} are {low} to {high}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"checkpoint {checkpoint}: {_MANIFEST} cannot be read ({error!s})") from None
    if found != FORMAT:
        raise ValueError(f"checkpoint {checkpoint}: format {found}, this program reads {FORMAT}")
    for name, size in entries.items():
        file = checkpoint / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "missing" if actual is None else f"{actual} bytes, {size} were written"
            raise ValueError(f"checkpoint {checkpoint}: {name} is {state}")
    return dict(manifest)


def shards_of(checkpoint: Path, num_classes: int) -> list[tuple[tuple[int, int], str]]:
    """Return ((first slot, last slot), file name) of all files with class centres, in the order of the slots.

    Raises:
        ValueError: they do not hold each of num_classes slots once.
    """
    files = read_manifest(checkpoint)["files"].items()
    shards = sorted(((entry["slots"][0], entry["slots"][1]), name) for name, entry in files if "slots" in entry)
    reached = 0
    for (start, stop), _ in shards:
        reached = stop if start == reached else -1
    if reached != num_classes:
        raise ValueError(f"checkpoint {checkpoint}: its files do not hold each of the {num_classes} class centres once")
    return shards


def class_order(checkpoint: Path) -> tuple[int, int]:
    """Return (number of classes, seed), which say what slot a class has.

    Raises:
        ValueError: the manifest does not tell them.
    """
    try:
        identity = read_manifest(checkpoint)["identity"]
        return int(identity["num_classes"]), int(identity["seed"])
    except (KeyError, TypeError):
        raise ValueError(
            f"checkpoint {checkpoint}: {_MANIFEST} does not tell num_classes and seed of its training (identity), so its class "
            "centres have no labels"
        ) from None


def check_hashes(
    checkpoint: Path, share: int = 0, shares: int = 1, progress: Callable[[int], object] = lambda count: None
) -> list[str]:
    """Return a line for each file whose contents are not what was written.

    Args:
        share, shares: look only at this one of so many equal shares of the files, as several ranks do.
        progress: called with the number of bytes read since the last call.
    """
    lines = []
    for name, entry in sorted(read_manifest(checkpoint)["files"].items())[share::shares]:
        try:
            kind = HASH if HASH in entry else "sha256"
            if file_hash(checkpoint / name, kind, progress) != entry.get(kind):
                lines.append(f"checkpoint {checkpoint}: {name} is damaged: its hash differs from the manifest's")
        except OSError as error:  # as of a bad sector: damaged too
            lines.append(f"checkpoint {checkpoint}: {name} is damaged: it cannot be read ({error.strerror})")
    return lines


def read_backbone(checkpoint: Path) -> dict[str, Tensor]:
    """Return the backbone's state dict, on the CPU."""
    return read_tensors(_file(checkpoint, BACKBONE))


def read_trainer(checkpoint: Path) -> dict[str, Any]:
    """Return the optimizer's and scaler's state, on the CPU; only tensors and plain values are ever loaded."""
    try:
        state: dict[str, Any] = torch.load(_file(checkpoint, TRAINER), map_location="cpu", weights_only=True)
    except Exception as error:  # of a damaged file the unpickler raises nearly anything
        first_line = (str(error).splitlines() or [""])[0]
        raise ValueError(f"checkpoint {checkpoint}: {TRAINER} cannot be read: {type(error).__name__}: {first_line}") from None
    return state


def softmax_reader(checkpoint: Path) -> Callable[..., dict[str, Tensor]]:
    """Return read(start, stop[, name]): the rows of those slots, whatever number of ranks wrote them; no other rows are read.

    Raises:
        ValueError: by read, if the saved shards do not cover the range, or are damaged.
    """
    manifest = read_manifest(checkpoint)
    shards = {name: entry["slots"] for name, entry in manifest["files"].items() if "slots" in entry}

    def read(start: int, stop: int, only: str = "") -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        covered = start
        for name, (low, high) in sorted(shards.items(), key=lambda item: item[1]):
            first, last = max(low, start), min(high, stop)
            if first >= last:
                continue
            if first != covered:
                break
            covered = last
            try:
                with safe_open(checkpoint / name, framework="pt") as file:
                    for key in [only] if only else file.keys():
                        parts.setdefault(key, []).append(file.get_slice(key)[first - low : last - low])
            except (OSError, SafetensorError) as error:
                raise ValueError(f"checkpoint {checkpoint}: {name} cannot be read: {error}") from None
        if covered != stop:
            raise ValueError(f"checkpoint {checkpoint}: class slots {covered} to {stop} are in none of its softmax files")
        return {key: blocks[0] if len(blocks) == 1 else torch.cat(blocks) for key, blocks in parts.items()}

    return read


def planned_rows(
    read: Callable[..., dict[str, Tensor]], start: int, stop: int, progress: Callable[[int], object] = lambda count: None
) -> dict[str, Planned]:
    """Return what utils.tensor_file.write_planned needs to write the slots [start, stop), reading some rows at a time.

    Args:
        read: of softmax_reader.
        progress: called with the number of slots that were read since the last call, once for all tensors of a row.
    """

    def rows(name: str, counted: bool) -> Iterator[Tensor]:
        for first in range(start, stop, _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, stop)
            yield read(first, last, name)[name]
            progress((last - first) * counted)

    plans = {}
    for number, (name, row) in enumerate(read(start, start + 1).items()):
        shape = (stop - start, *row.shape[1:])
        plans[name] = Planned(row.dtype, shape, functools.partial(rows, name, number == 0))
    return plans


def _file(checkpoint: Path, name: str) -> Path:
    """Return the path of one of the checkpoint's files, after checking the sizes of all."""
    if name not in read_manifest(checkpoint)["files"]:
        raise ValueError(f"checkpoint {checkpoint}: its manifest names no {name}")
    return checkpoint / name
