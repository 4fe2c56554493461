"""Checkpoints: one folder per step, complete or absent.

    checkpoints/step_00012000/
        backbone.safetensors                 parameters and buffers
        softmax_00003_of_00008.safetensors   a rank's class centres and their momentum, rows in slot order
        trainer.pt                           optimizer and loss scaler; tensors and plain values only
        manifest.json                        written last: step, slot ranges, what the run is, sizes and hashes

Everything is written into a hidden folder beside, flushed to the disk and renamed, so a folder with its final name is whole
whatever was killed when. Saving and pruning are collective; reading is not.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .distributed import World, all_gather_objects, together

FORMAT = 1
_MANIFEST, _BACKBONE, _TRAINER = "manifest.json", "backbone.safetensors", "trainer.pt"


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    return sorted(path for path in (run_folder / "checkpoints").glob("step_????????") if (path / _MANIFEST).is_file())


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at path: itself, or the newest of the run folder it names.

    Raises:
        ValueError: there is none.
    """
    if (path / _MANIFEST).is_file():
        return path
    found = list_checkpoints(path)
    if not found:
        raise ValueError(f"no complete checkpoint at {path}: expected a step_... folder with {_MANIFEST}, or a run folder")
    return found[-1]


def save_checkpoint(
    run_folder: Path,
    step: int,
    backbone: dict[str, Tensor],
    softmax: dict[str, Tensor],
    slots: tuple[int, int],
    trainer: dict[str, Any],
    facts: dict[str, Any],
    world: World,
) -> Path:
    """Write one checkpoint; collective. Return its folder.

    Args:
        backbone: names to tensors, equal on all ranks; rank 0 writes them.
        softmax: this rank's rows, (n_r, ...) each, of the slots [start, stop) in `slots`.
        trainer: tensors and plain values, equal on all ranks.
        facts: what a resuming run must share (classes, embedding size, ...), and what people want to know (score).

    Raises:
        ValueError: on every rank, if any rank could not write; the checkpoints there before are untouched.
    """
    final = run_folder / "checkpoints" / f"step_{step:08d}"
    partial = final.with_name(f".{final.name}.partial")
    with together(world):
        if world.rank == 0:
            _as_value_error(lambda: _make_empty(final, partial))
    shard = f"softmax_{world.rank:05d}_of_{world.world_size:05d}.safetensors"
    mine: dict[str, Any] = {}

    def write() -> None:
        mine[shard] = _write(partial / shard, lambda path: save_file(_on_cpu(softmax), path)) | {"slots": list(slots)}
        if world.rank == 0:
            mine[_BACKBONE] = _write(partial / _BACKBONE, lambda path: save_file(_on_cpu(backbone), path))
            mine[_TRAINER] = _write(partial / _TRAINER, lambda path: torch.save(trainer, path))

    with together(world):
        _as_value_error(write)
    files = {name: entry for part in all_gather_objects(mine, world) for name, entry in part.items()}
    manifest = {"format": FORMAT, "step": step, "world_size": world.world_size, **facts, "files": files}

    def finish() -> None:
        _write(partial / _MANIFEST, lambda path: path.write_text(json.dumps(manifest, indent=1)))
        _flush(partial)
        partial.rename(final)
        _flush(final.parent)

    with together(world):
        if world.rank == 0:
            _as_value_error(finish)
    return final


def prune_checkpoints(run_folder: Path, keep_last: int, world: World, keep_every: int = 0) -> None:
    """Delete all but the newest keep_last checkpoints, the best, and those of every keep_every-th step; rank 0 acts, all wait.

    Args:
        keep_every: optimizer steps; 0 = none is kept for its step.
    """

    def prune() -> None:
        found = list_checkpoints(run_folder)
        best = best_checkpoint(found)
        for path in found[:-keep_last]:
            kept = keep_every > 0 and int(path.name.removeprefix("step_")) % keep_every == 0
            if path != best and not kept:
                # out of sight first: a kill in the middle must not leave half a checkpoint under a final name
                hidden = path.with_name(f".{path.name}.deleted")
                path.rename(hidden)
                shutil.rmtree(hidden)

    with together(world):
        if world.rank == 0:
            _as_value_error(prune)


def best_checkpoint(checkpoints: list[Path]) -> Path | None:
    """Return the checkpoint with the highest score (the newest of equals), None if none was scored."""
    scored = [(score, path) for path in checkpoints if (score := read_manifest(path).get("score")) is not None]
    return max(scored)[1] if scored else None


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest after checking that each file it names is there with the size it had.

    Raises:
        ValueError: naming the file and what is wrong.
    """
    path = checkpoint / _MANIFEST
    try:
        manifest = json.loads(path.read_text())
        entries = {name: int(entry["size"]) for name, entry in manifest["files"].items()}
        found = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"checkpoint {checkpoint}: {_MANIFEST} cannot be read ({error!s}); remove that folder to resume from the one before"
        ) from None
    if found != FORMAT:
        raise ValueError(f"checkpoint {checkpoint}: format {found}, this program reads {FORMAT}")
    for name, size in entries.items():
        file = checkpoint / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "missing" if actual is None else f"{actual} bytes, {size} were written"
            raise ValueError(f"checkpoint {checkpoint}: {name} is {state}; name another one with checkpoint.resume=PATH")
    return dict(manifest)


def read_backbone(checkpoint: Path) -> dict[str, Tensor]:
    """Return the backbone's state dict, on the CPU."""
    return read_tensors(_verified(checkpoint, _BACKBONE))


def read_trainer(checkpoint: Path) -> dict[str, Any]:
    """Return the optimizer's and scaler's state, on the CPU; only tensors and plain values are ever loaded."""
    state: dict[str, Any] = torch.load(_verified(checkpoint, _TRAINER), map_location="cpu", weights_only=True)
    return state


def softmax_reader(checkpoint: Path) -> Callable[[int, int], dict[str, Tensor]]:
    """Return read(start, stop): the rows of those slots, whatever number of ranks wrote them; no other rows are read.

    A file's hash is verified once, when it is first read.

    Raises:
        ValueError: by read, if the saved shards do not cover the range, or are damaged.
    """
    manifest = read_manifest(checkpoint)
    shards = {name: entry["slots"] for name, entry in manifest["files"].items() if "slots" in entry}
    verified: dict[str, Path] = {}

    def read(start: int, stop: int) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        covered = start
        for name, (low, high) in sorted(shards.items(), key=lambda item: item[1]):
            first, last = max(low, start), min(high, stop)
            if first >= last:
                continue
            if first != covered:
                break
            covered = last
            if name not in verified:
                verified[name] = _verified(checkpoint, name)
            with safe_open(verified[name], framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  (no mapping)
                    parts.setdefault(key, []).append(file.get_slice(key)[first - low : last - low])
        if covered != stop:
            raise ValueError(f"checkpoint {checkpoint}: class slots {covered} to {stop} are in none of its softmax files")
        return {key: torch.cat(blocks) for key, blocks in parts.items()}

    return read


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file, or of a .pt/.pth file that holds nothing but tensors in a flat dict."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, SafetensorError, EOFError, ValueError, KeyError) as error:
        raise ValueError(f"weights {path}: cannot be read: {str(error).splitlines()[0]}") from None
    except Exception as error:  # weights_only refuses pickled code with pickle.UnpicklingError
        raise ValueError(f"weights {path}: refused, it holds more than tensors ({type(error).__name__})") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"weights {path}: must be a state dict, names to tensors, got {type(state).__name__}")
    return state


def _make_empty(final: Path, partial: Path) -> None:
    if final.exists():
        raise ValueError(f"checkpoint {final} is there already and is never overwritten; choose another run.name or delete it")
    for leftover in final.parent.glob(".step_*"):
        shutil.rmtree(leftover)
    partial.mkdir(parents=True)


def _as_value_error(act: Callable[[], None]) -> None:
    """Run act; a full disk or a missing right becomes a ValueError, which `together` shows on every rank."""
    try:
        act()
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(f"checkpoint: cannot be written: {error}") from None


def _on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _write(path: Path, write: Callable[[Path], Any]) -> dict[str, Any]:
    """Write one file through to the disk; return its size and sha256."""
    write(path)
    _flush(path)
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def _verified(checkpoint: Path, name: str) -> Path:
    """Return the path of one of the checkpoint's files after comparing its hash with the manifest's."""
    entry = read_manifest(checkpoint)["files"].get(name)
    if entry is None:
        raise ValueError(f"checkpoint {checkpoint}: its manifest names no {name}")
    if _sha256(checkpoint / name) != entry["sha256"]:
        raise ValueError(
            f"checkpoint {checkpoint}: {name} is damaged (its sha256 differs); name another one with checkpoint.resume=PATH"
        )
    return checkpoint / name
