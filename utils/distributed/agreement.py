"""Compares what all processes of a run must have in common: settings, data, and the version of this program.

Each of these determines the shape of messages or the arithmetic of a step. Processes that disagree would wait for each other
until a timeout, or silently train meaningless weights. So they compare at the start, and stop with one line.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from . import SharedError, World, all_gather_objects

_NAMED = 8  # differences listed in a message
_WIDTH = 80  # characters of a value shown in a message
_CHUNK = 1 << 20  # numbers hashed at once
_SOURCES = ("*.py", "*.c", "*.cpp", "*.cu")


def digest(parts: Iterable[np.ndarray | bytes]) -> str:
    """Return a hash of byte strings and integer arrays (n,) of any dtype, including the length of each."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        if isinstance(part, np.ndarray):
            for begin in range(0, len(part), _CHUNK):
                state.update(part[begin : begin + _CHUNK].astype("<i8", copy=False).tobytes())
        else:
            state.update(part)
    return state.hexdigest()


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of named tensors: names, types, shapes and values."""
    state = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        values = tensor.detach().cpu().contiguous().reshape(-1)
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        state.update(values.view(torch.uint8).numpy().tobytes())  # numpy has no bfloat16, but its bytes
    return state.hexdigest()


def require_same_program(settings: Mapping[str, Any], world: World) -> list[str]:
    """Compare settings, by names that the user knows, and this program's source files over all processes; return warnings.

    Raises:
        SharedError: on every rank, with each name, value and rank.
    """
    if world.world_size == 1:
        return []
    fix = "start all processes with the same settings and the same version of this program"
    require_equal({**_source_files(Path(__file__).parents[2]), **settings}, world, fix)
    versions = _differences(all_gather_objects({"torch": str(torch.__version__)}, world))
    return [f"{line}; the processes may round differently" for line in versions]


def require_equal(values: Mapping[str, Any], world: World, fix: str) -> None:
    """Compare values, by name and of types that JSON supports, over all processes; `fix` says what to do if they differ.

    Raises:
        SharedError: on every rank, with each name, value and rank.
    """
    if world.world_size == 1:
        return
    text = json.dumps(values, sort_keys=True, default=str)
    if len(set(all_gather_objects(digest([text.encode()]), world))) == 1:  # the usual case needs no more than this
        return
    found = _differences([json.loads(text) for text in all_gather_objects(text, world)])
    more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    raise SharedError(f"the processes disagree: {'; '.join(found[:_NAMED])}{more}. Fix: {fix}")


def _differences(values: list[dict[str, Any]]) -> list[str]:
    """Return a line for each name whose values (one dict for each rank) differ."""
    lines = []
    for name in dict.fromkeys(name for one in values for name in one):
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(values):
            ranks.setdefault(json.dumps(one[name]) if name in one else "missing", []).append(rank)
        if len(ranks) > 1:
            shown = (f"{value[:_WIDTH].strip(chr(34))} on rank {_short(those)}" for value, those in ranks.items())
            lines.append(f"{name} is {', '.join(shown)}")
    return lines


def _short(ranks: list[int]) -> str:
    """Return ascending ranks as text, such as 0-2, 5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _source_files(root: Path) -> dict[str, str]:
    """Return a hash of each source file of this program by its path below the root, without tests and other folders."""
    folders = sorted(folder for folder in root.iterdir() if (folder / "__init__.py").is_file())
    files = [*root.glob("*.py"), *(path for folder in folders for suffix in _SOURCES for path in folder.rglob(suffix))]
    return {path.relative_to(root).as_posix(): xxhash.xxh3_64(path.read_bytes()).hexdigest() for path in sorted(files)}
