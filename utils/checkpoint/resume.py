"""Prepares a run's folder, chooses the checkpoint to resume from, and restores it.

Rank 0 decides. All ranks check that they see the same folder as rank 0, and use the same checkpoint.
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from utils.distributed import World, all_gather_objects, lone_tasks, raise_on_all_ranks
from utils.distributed.patience import patiently

from ..files import check_own, open_own, write_file
from . import format as ckpt
from .reading import check_hashes, read_file

_HOLDER = ".holder"  # names the job that holds the lock


class ResumePlan(NamedTuple):
    """Where a run begins."""

    checkpoint: Path | None  # to resume from; None = start a new run
    warnings: list[str]  # for the user: leftovers removed, damaged checkpoints set aside


def prepare_run_folder(folder: Path, saving: Any, look: bool, run_signature: dict[str, Any], world: World) -> ResumePlan:
    """Create and lock the run folder, and choose the checkpoint to resume from, equal on all ranks.

    Args:
        saving: the section `checkpoint` of the configuration. `resume` is auto, never, or the path of a checkpoint or run
            folder. `verify` also compares the hashes of the chosen checkpoint's files, which are divided among the ranks.
        look: only look, and change nothing on the disk.
        run_signature: must equal the checkpoint's.

    Raises:
        SharedError: on every rank.
    """
    start, holder = ResumePlan(None, []), ""
    with raise_on_all_ranks(world):
        if world.rank == 0:
            holder = _check_place(folder) if look else _hold(folder)
            start.warnings.extend([] if look else ckpt.remove_unfinished(folder))
            start = start._replace(checkpoint=choose_checkpoint(folder, saving.resume, run_signature, start.warnings, look))
    start, holder = all_gather_objects((start, holder), world)[0]
    while saving.verify and start.checkpoint is not None:
        with patiently(world, "comparing hashes"):
            found = check_hashes(start.checkpoint, world.rank, world.world_size)
        faults = [line for lines in all_gather_objects(found, world) for line in lines]
        if not faults:
            break
        with raise_on_all_ranks(world):
            if saving.resume != "auto":
                raise ValueError("; ".join(faults))
            if world.rank == 0:
                start.warnings.extend(faults)
                older = [path for path in ckpt.list_checkpoints(folder) if path.name < start.checkpoint.name]
                chosen = _newest_sound(folder, older, [start.checkpoint], start.warnings, run_signature, look)
                start = start._replace(checkpoint=chosen)
        start = all_gather_objects(start, world)[0]
    if look:
        return start
    with raise_on_all_ranks(world):
        if not (folder / _HOLDER).is_file() or (folder / _HOLDER).read_text() != holder:
            raise ValueError(f"run.output: {folder} is not the same folder as on rank 0; several machines need a shared folder")
        if start.checkpoint is not None:
            ckpt.read_manifest(start.checkpoint)  # the sizes, as this machine sees them
    return start


def _check_place(folder: Path) -> str:
    """Return "", or raise ValueError if a run folder neither is nor can be made where it belongs."""
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        with _writing(folder):
            check_own(folder)
        return ""
    raise ValueError(f"run.output: the run folder {folder} cannot be written: {place} is no folder of yours")


def _hold(folder: Path) -> str:
    """Lock the run folder until this process ends, so that two jobs never write into it; return the text of _HOLDER.

    The kernel releases the lock however the process ends. If torchrun is killed by SIGKILL, its workers run on for a moment, so
    a resumed run may find them still there.
    """
    holder = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        check_own(folder)
        handle = open_own(folder / ".lock", os.O_RDWR)  # never opened again: closing that would unlock it
    try:
        _lock(handle)
    except (BlockingIOError, PermissionError):
        other = (folder / _HOLDER).read_text(errors="replace") if (folder / _HOLDER).is_file() else "unknown"
        raise ValueError(
            f"run.output: {folder} is in use by another job that is still running ({other}); "
            f"{lone_tasks() or 'wait for it, end it, or choose another run.name'}"
        ) from None
    except OSError:
        pass  # a file system without locks
    with _writing(folder):
        write_file(folder / _HOLDER, holder)
    return holder


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn an error of the system into a ValueError that names the run folder and its key."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"run.output: the run folder {folder} cannot be written: {error.strerror}") from None


def _lock(handle: int) -> None:
    """Lock an open file. Processes that torchrun has restarted wait, because the previous ones may still be ending."""
    patience = time.monotonic() + (30 if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else 0)
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= patience:
                raise
            time.sleep(0.2)


def choose_checkpoint(folder: Path, resume: str, run_signature: dict[str, Any], warnings: list[str], look: bool) -> Path | None:
    """Return the checkpoint that checkpoint.resume selects for this run, after checking that it fits; None = a new run.

    A path only starts a run. Once the run has checkpoints of its own, the same path means `auto`.
    With `auto`, damaged checkpoints are skipped and renamed, unless `look`; `warnings` then has a line about each.

    Raises:
        ValueError: no checkpoint can be used, or it belongs to another run.
    """
    found = ckpt.list_checkpoints(folder)
    if any(_began_with(path, resume) for path in found):  # the same command again, after its run was stopped
        resume = "auto"
    if resume == "auto":
        torn = ckpt.list_without_manifest(folder)
        warnings += [f"checkpoint {path.name} has no manifest.json any more" for path in torn]
        if torn and not found:
            raise _all_are_damaged(folder, warnings)
        for path in torn:  # otherwise every save at this step would fail: the name is taken
            _put_aside(path, warnings, look)
    if resume == "never" and found:
        raise ValueError(
            f"checkpoint.resume=never, but {folder} holds {len(found)} checkpoint(s), which would mix with new ones; "
            "choose another run.name, delete the folder, or resume with checkpoint.resume=auto"
        )
    if resume in ("never", "auto"):
        return _newest_sound(folder, found, [], warnings, run_signature, look) if found else None
    try:
        chosen = ckpt.find_checkpoint(Path(resume))
        step = int(ckpt.read_manifest(chosen)["step"])
    except ValueError as error:
        raise ValueError(f"checkpoint.resume={resume}: {error}; name another checkpoint, or resume with auto") from None
    newer = [path for path in found if ckpt.step_of(path) > step]
    if newer:
        raise ValueError(
            f"checkpoint.resume={resume} is step {step}, but {folder} holds later checkpoints up to "
            f"{newer[-1].name}, which would be overwritten; choose another run.name"
        )
    _check_signature(chosen, run_signature)
    return chosen


def _newest_sound(
    folder: Path, found: list[Path], damaged: list[Path], warnings: list[str], run_signature: dict[str, Any], look: bool
) -> Path:
    """Return the newest undamaged checkpoint of `found`; the damaged ones, also those given, are set aside, not deleted."""
    for path in reversed(found):
        if any(file.exists() and not os.access(file, os.R_OK) for file in path.iterdir()):  # which is no damage
            raise ValueError(f"checkpoint {path}: no right to read its files; give it, or start as the user who saved them")
        try:
            ckpt.read_manifest(path)
        except ValueError as error:
            warnings.append(str(error))
            damaged.append(path)
            continue
        _check_signature(path, run_signature)
        for bad in damaged:
            _put_aside(bad, warnings, look)
        if damaged:
            warnings.append(f"resuming from {path.name}, an older one: the steps after it are trained again")
        return path
    raise _all_are_damaged(folder, warnings)


def _all_are_damaged(folder: Path, warnings: list[str]) -> ValueError:
    advice = "Restore one from a copy, or start a new run with another run.name"
    return ValueError(f"every checkpoint of {folder} is damaged: {'; '.join(warnings)}. {advice}")


def _began_with(checkpoint: Path, resume: str) -> bool:
    """Return whether the run of a checkpoint had this path in checkpoint.resume."""
    if resume in ("never", "auto"):
        return False
    try:
        return bool(ckpt.read_manifest(checkpoint)["config"]["checkpoint"]["resume"] == resume)
    except (ValueError, KeyError, TypeError):
        return False


def _put_aside(checkpoint: Path, warnings: list[str], look: bool) -> None:
    if look:
        warnings.append(f"checkpoint {checkpoint.name} is damaged; a training puts it aside")
        return
    try:
        aside = checkpoint.rename(checkpoint.with_name(f"damaged_{checkpoint.name}_{time.strftime('%Y%m%d_%H%M%S')}"))
    except OSError as error:
        warnings.append(f"checkpoint {checkpoint} is damaged and cannot be put aside: {error.strerror}; move it away by hand")
        return
    warnings.append(f"checkpoint {checkpoint.name} is damaged and was put aside as {aside}")


def _check_signature(chosen: Path, run_signature: dict[str, Any]) -> None:
    saved = ckpt.read_manifest(chosen).get("run_signature", {})
    for key, value in run_signature.items():
        if key in saved and saved[key] != value:  # an imported checkpoint does not have all keys
            if key == "labels":  # hashes, which would tell the user nothing
                raise ValueError(
                    f"checkpoint {chosen}: the labels of the data (their values or their order) have changed since it was "
                    "saved; train on the original data, or start a new run with another run.name, with the checkpoint's "
                    "weights in init.backbone and init.head"
                )
            was, now = ckpt.in_words(key, saved[key]), ckpt.in_words(key, value)
            raise ValueError(
                f"checkpoint {chosen}: {key} was {was:.200}, this run has {now}; use the same value, start a new "
                "run with another run.name, or load only its weights with init.backbone and init.head"
            )


def changed_keys(checkpoint: Path, config: dict[str, Any]) -> list[str]:
    """Return a line for each key whose value differs from the checkpoint's configuration.

    Keys that only one of the two has, such as new keys of a later version, are left out.
    """
    now, lines = ckpt.sections(config), []
    for section, values in ckpt.sections(ckpt.read_manifest(checkpoint).get("config", {})).items():
        here = now.get(section)
        if section == "run" or here is None:
            continue
        for key, was in values.items():
            if key in here and here[key] != was and (section, key) != ("checkpoint", "resume"):
                lines.append(f"changed since that checkpoint: {section}.{key} was {was!r:.200}, is {here[key]!r}")
    return lines


def write_config(folder: Path, text: str, resumed: Path | None, world: World) -> None:
    """Save the merged configuration on rank 0. An earlier one that differs is kept under another name."""
    path = folder / "config.yaml"
    with raise_on_all_ranks(world), _writing(folder):
        if world.rank or (path.is_file() and path.read_bytes() == text.encode()):
            return
        if path.is_file():
            until = f"{resumed.name}_" if resumed else ""
            path.rename(folder / f"config_until_{until}{time.strftime('%Y%m%d_%H%M%S')}.yaml")
        write_file(path, text)


class SavedState(NamedTuple):
    """The two functions that save and restore a part of a checkpoint."""

    state: Callable[[], Any]  # returns what CheckpointWriter.save writes
    load: Callable[[Any], object]  # takes what read_file returns
    begin: Callable[[], object] | None = None  # called instead of `load` if the checkpoint has no such part; None = an error


def restore(path: Path, parts: Mapping[str, SavedState]) -> int:
    """Load each part of a checkpoint; return its number of steps; ValueError if one is missing, unreadable or does not fit."""
    try:
        files = ckpt.read_manifest(path)["files"]
        states = {name: read_file(path, name) for name, part in parts.items() if name in files or part.begin is None}
    except ValueError as error:
        raise ValueError(
            f"{error}. With checkpoint.verify=true a damaged checkpoint is set aside, and the one before it is used"
        ) from None
    for name, part in parts.items():
        try:
            if name in states:
                part.load(states.pop(name))
            elif part.begin is not None:
                part.begin()
        except (ValueError, LookupError, RuntimeError, TypeError, AttributeError) as error:
            words = f"it has no {error}" if isinstance(error, KeyError) else (str(error).splitlines() or [""])[-1].strip()
            if words.startswith("checkpoint "):
                raise
            raise ValueError(f"checkpoint {path}: its {name} does not fit this run: {words:.300}") from None
    return int(ckpt.read_manifest(path)["step"])
