"""A run's folder, the checkpoint it goes on from, and going on.

Rank 0 looks and decides; all ranks check that they see what it sees, and take the same checkpoint.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from utils.distributed import World, all_gather_objects, raise_on_all_ranks

from . import format as ckpt
from .reading import check_hashes, read_file
from .tensor_file import flush

_HOLDER = ".holder"  # names the job that has the lock


class ResumePlan(NamedTuple):
    """Where a run begins."""

    checkpoint: Path | None  # to resume from, None = anew
    warnings: list[str]  # what a user should know: leftovers removed, damaged checkpoints put aside


def prepare_run_folder(folder: Path, saving: Any, config_text: str, run_signature: dict[str, Any], world: World) -> ResumePlan:
    """Lock and make the run folder with its config.yaml, and choose the checkpoint to resume from; the same on all ranks.

    Args:
        saving: the section `checkpoint` of the configuration: resume says auto, never, or the path of a checkpoint or run
            folder; verify, to also compare the hashes of the chosen checkpoint's files, which the ranks share.
        run_signature: what the checkpoint must agree with.

    Raises:
        SharedError: on every rank.
    """
    start, holder = ResumePlan(None, []), ""
    with raise_on_all_ranks(world):
        if world.rank == 0:
            holder = _hold(folder)
            start.warnings.extend(ckpt.remove_unfinished(folder))
            start = start._replace(checkpoint=choose_checkpoint(folder, saving.resume, run_signature, start.warnings))
    start, holder = all_gather_objects((start, holder), world)[0]
    while saving.verify and start.checkpoint is not None:
        found = check_hashes(start.checkpoint, world.rank, world.world_size)
        faults = [line for lines in all_gather_objects(found, world) for line in lines]
        if not faults:
            break
        with raise_on_all_ranks(world):
            if saving.resume != "auto":
                raise ValueError("; ".join(faults))
            if world.rank == 0:
                start.warnings.extend(faults)
                start = start._replace(checkpoint=_next_older(folder, start.checkpoint, start.warnings, run_signature))
        start = all_gather_objects(start, world)[0]
    with raise_on_all_ranks(world):
        if world.rank == 0:
            _write_config(folder, config_text, start.checkpoint)
    with raise_on_all_ranks(world):
        if not (folder / _HOLDER).is_file() or (folder / _HOLDER).read_text() != holder:
            raise ValueError(f"run.output: {folder} is another one here than on rank 0; several machines need a shared folder")
        if start.checkpoint is not None:
            ckpt.read_manifest(start.checkpoint)  # the sizes, as this machine sees them
    return start


def _hold(folder: Path) -> str:
    """Lock the run folder until this process ends, however it ends, so that two jobs never write into it; return who it is.

    torchrun killed by SIGKILL leaves its workers running for a moment, so a resumed run may well meet them.
    """
    holder = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)  # never opened again: closing that would unlock it
    except OSError as error:
        raise ValueError(f"run.output: the run folder {folder} cannot be written: {error.strerror}") from None
    try:
        _lock(handle)
    except (BlockingIOError, PermissionError):
        other = (folder / _HOLDER).read_text(errors="replace") if (folder / _HOLDER).is_file() else "unknown"
        raise ValueError(
            f"run.output: {folder} is in use by another job that still runs ({other}); wait for it, end it, or choose another "
            "run.name"
        ) from None
    except OSError:
        pass  # a file system without locks
    try:
        written = folder / f"{_HOLDER}.unfinished"
        written.write_text(holder)
        flush(written)
        written.replace(folder / _HOLDER)
    except OSError as error:
        raise ValueError(f"run.output: the run folder {folder} cannot be written: {error.strerror}") from None
    return holder


def _lock(handle: int) -> None:
    """Lock an open file. Processes that torchrun starts again wait, for the ones before them may not have ended quite yet."""
    patience = time.monotonic() + (30 if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else 0)
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= patience:
                raise
            time.sleep(0.2)


def choose_checkpoint(folder: Path, resume: str, run_signature: dict[str, Any], warnings: list[str]) -> Path | None:
    """Return the checkpoint that checkpoint.resume means for this run, after checking that it fits; None = start anew.

    A path begins a run; once that has checkpoints of its own, the same path means the same as `auto`.
    With `auto`, checkpoints that are not whole are passed over and put aside under another name, which `warnings` then tells.

    Raises:
        ValueError: there is none that can be used, or it is of another run.
    """
    found = ckpt.list_checkpoints(folder)
    if any(_began_with(path, resume) for path in found):  # the same command again, after the run that it began was stopped
        resume = "auto"
    if resume == "auto":
        for path in ckpt.list_without_manifest(folder):  # or the save at this step would find the name taken, in every attempt
            warnings.append(f"checkpoint {path.name} has no manifest.json any more")
            _put_aside(path, warnings)
    if resume == "never" and found:
        raise ValueError(
            f"checkpoint.resume=never, but {folder} holds {len(found)} checkpoint(s), which would mix with new ones; "
            "choose another run.name, delete the folder, or resume with checkpoint.resume=auto"
        )
    if resume in ("never", "auto"):
        if not found:
            return None
        try:
            ckpt.read_manifest(found[-1])
        except ValueError as error:
            warnings.append(str(error))
            return _next_older(folder, found[-1], warnings, run_signature)
        chosen = found[-1]
    else:
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


def _next_older(folder: Path, damaged: Path, warnings: list[str], run_signature: dict[str, Any]) -> Path:
    """Return the newest checkpoint before a damaged one that is whole; the damaged ones are put aside, not deleted."""
    aside = [damaged]
    for path in reversed([path for path in ckpt.list_checkpoints(folder) if path.name < damaged.name]):
        try:
            ckpt.read_manifest(path)
        except ValueError as error:
            warnings.append(str(error))
            aside.append(path)
            continue
        _check_signature(path, run_signature)
        for bad in aside:
            _put_aside(bad, warnings)
        warnings.append(f"resuming from {path.name}, an older one: the steps since are trained again")
        return path
    raise ValueError(
        f"no checkpoint of {folder} is whole: {'; '.join(warnings)}. Restore one from a copy, or start anew by another run.name"
    )


def _began_with(checkpoint: Path, resume: str) -> bool:
    """Return whether a checkpoint is of a run with this path in checkpoint.resume."""
    if resume in ("never", "auto"):
        return False
    try:
        config = ckpt.read_manifest(checkpoint)["config"]
        return bool(config["checkpoint"]["resume"] == resume)
    except (ValueError, KeyError, TypeError):
        return False


def _put_aside(checkpoint: Path, warnings: list[str]) -> None:
    try:
        aside = checkpoint.rename(checkpoint.with_name(f"damaged_{checkpoint.name}_{time.strftime('%Y%m%d_%H%M%S')}"))
    except OSError as error:
        warnings.append(f"checkpoint {checkpoint} is damaged and cannot be put aside: {error.strerror}; move it away by hand")
        return
    warnings.append(f"checkpoint {checkpoint.name} is damaged and was put aside as {aside}")


def _check_signature(chosen: Path, run_signature: dict[str, Any]) -> None:
    saved = ckpt.read_manifest(chosen).get("run_signature", {})
    for key, value in run_signature.items():
        if key in saved and saved[key] != value:  # a checkpoint that was imported does not know all
            if key == "labels":  # hashes, which tell a reader nothing
                raise ValueError(
                    f"checkpoint {chosen}: the labels of the data (their values or their order) have changed since it was "
                    "saved; train on the data as it was, or start anew under another run.name, with its weights in "
                    "init.backbone and init.head"
                )
            raise ValueError(
                f"checkpoint {chosen}: {key} was {saved[key]!s:.200}, this run has {value}; use the same, start anew under "
                "another run.name, or take its weights alone with init.backbone and init.head"
            )


def changed_keys(checkpoint: Path, config: dict[str, Any]) -> list[str]:
    """Return a line for each key whose value differs from the checkpoint's configuration.

    Keys that only one of the two has, as between versions of this program, are left out.
    """
    saved = ckpt.read_manifest(checkpoint).get("config")
    lines = []
    for section, values in (saved if isinstance(saved, dict) else {}).items():
        here = config.get(section)
        if section == "run" or not (isinstance(values, dict) and isinstance(here, dict)):
            continue
        for key, was in values.items():
            if key in here and here[key] != was and (section, key) != ("checkpoint", "resume"):
                lines.append(f"changed since that checkpoint: {section}.{key} was {was!r:.200}, is {here[key]!r}")
    return lines


def _write_config(folder: Path, text: str, resumed: Path | None) -> None:
    """Save the merged configuration; an earlier one that differs is kept beside it."""
    path, written = folder / "config.yaml", folder / ".config.yaml.unfinished"
    try:
        if path.is_file():
            if path.read_text() == text:
                return
            until = f"{resumed.name}_" if resumed else ""
            path.rename(folder / f"config_until_{until}{time.strftime('%Y%m%d_%H%M%S')}.yaml")
        written.write_text(text)
        written.replace(path)
    except OSError as error:
        raise ValueError(f"run.output: the run folder {folder} cannot be written: {error.strerror}") from None


class SavedState(NamedTuple):
    """A part of a checkpoint: how its state is had, and how it is taken up again."""

    state: Callable[[], Any]  # what CheckpointWriter.save is given
    load: Callable[[Any], object]  # takes what read_file returns


def restore(path: Path, parts: Mapping[str, SavedState]) -> int:
    """Load every part from a checkpoint; return the optimizer steps it had finished.

    Raises:
        ValueError: a part is not there, cannot be read, or does not fit.
    """
    try:
        states = {name: read_file(path, name) for name in parts}
    except ValueError as error:
        raise ValueError(f"{error}. With checkpoint.verify=true a damaged checkpoint is put aside for the one before") from None
    for name, part in parts.items():
        try:
            part.load(states.pop(name))
        except (ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
            words = f"it has no {error}" if isinstance(error, KeyError) else (str(error).splitlines() or [""])[-1].strip()
            if words.startswith("checkpoint "):
                raise
            raise ValueError(f"checkpoint {path}: its {name} does not fit this run: {words}") from None
    return int(ckpt.read_manifest(path)["step"])
