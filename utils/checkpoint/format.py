"""Checkpoints: one folder per step, complete or absent.

    checkpoints/step_00012000/
        backbone.safetensors                 parameters and buffers
        ema.safetensors                      their moving average, of a run with train.ema
        softmax_00003_of_00008.safetensors   a rank's class centres and their momentum, rows in slot order; a head has its name
        trainer.pt                           optimizer and loss scaler; tensors and plain values only
        manifest.json                        written last: step, slot ranges, the run's signature, sizes and hashes

All files are written into a hidden folder and flushed to the disk, then the folder is renamed (writer.py). So a folder with its
final name is complete, whenever any process was killed. reading.py reads the files.
Old ones are deleted, and the best is found, here.
"""

import contextlib
import errno
import itertools
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from utils.files import HASH, check_file, write_file

from .tensor_file import flush

FORMAT = 2  # of the manifest; format 1 had "identity" for run_signature, and head.state for head.storage
_LARGEST_MANIFEST = 64 << 20  # bytes; the manifest of 10,000 ranks has 2 MB
_MANIFEST, BACKBONE, TRAINER = "manifest.json", "backbone.safetensors", "trainer.pt"
EMA = "ema.safetensors"  # the moving average of the backbone, of a run with train.ema
SOFTMAX = "softmax"  # the name of the head in a run with a single head


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is itself a complete checkpoint."""
    return (path / _MANIFEST).is_file()


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    return [path for path in _step_folders(run_folder) if is_checkpoint(path)]


def list_without_manifest(run_folder: Path) -> list[Path]:
    """Return the folders that are named like a checkpoint but have no manifest; no save leaves such a folder."""
    return [path for path in _step_folders(run_folder) if not (path / _MANIFEST).exists()]


def _step_folders(run_folder: Path) -> list[Path]:
    try:
        names = os.listdir(run_folder / "checkpoints")  # glob takes a folder that cannot be read for an empty one
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [run_folder / "checkpoints" / name for name in sorted(names) if re.fullmatch(r"step_\d{8}", name, re.ASCII)]


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint at path: path itself, or the newest one if path is a run folder; ValueError if there is none."""
    if is_checkpoint(path):
        return path
    found = list_checkpoints(path)
    if not found:
        raise ValueError(f"no complete checkpoint at {path}: expected a step_... folder with {_MANIFEST}, or a run folder")
    return found[-1]


def newest_run(folder: Path = Path("work_dirs")) -> Path:
    """Return the run folder in `folder` whose newest checkpoint was written last; ValueError if there is none."""
    runs = [run for run in folder.glob("*") if os.access(run / "checkpoints", os.R_OK) and list_checkpoints(run)]
    if not runs:
        raise ValueError(f"no run with a checkpoint in {folder}; name a run folder")
    return max(runs, key=lambda run: (list_checkpoints(run)[-1] / _MANIFEST).stat().st_mtime)


def checkpoint_path(run_folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` optimizer steps."""
    return run_folder / "checkpoints" / f"step_{step:08d}"


def partial_path(final: Path) -> Path:
    """Return the hidden folder that holds the checkpoint `final` until it is complete."""
    return final.with_name(f".{final.name}.partial")


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps from the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step_"))


def shard_name(rank: int, world_size: int, head: str = SOFTMAX) -> str:
    """Return the name of the file that holds a rank's class centres of a head."""
    return f"{head}_{rank:05d}_of_{world_size:05d}.safetensors"


def in_words(key: str, value: Any) -> str:
    """Return a value of a run's signature for people: its backbone is [name, embedding size, width]."""
    named = key == "backbone" and isinstance(value, list) and len(value) == 3
    return f"{value[0]}, {value[1]}-d, width {value[2]}" if named else "none" if value == [] else str(value)


def sections(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of a configuration by name; those of a task as, for example, `tasks.asia.head`."""
    found = {name: values for name, values in config.items() if isinstance(values, dict)}
    for task in config.get("tasks", ()):
        name = f"tasks.{task['name']}"
        found |= {f"{name}.{key}": values for key, values in task.items() if isinstance(values, dict)}
        found[name] = {key: value for key, value in task.items() if not isinstance(value, dict)}
    return found


def slots_by_head(manifest: dict[str, Any]) -> dict[str, dict[str, tuple[int, int]]]:
    """Return for each head of a checkpoint its files, and the slots [start, stop) of each file, in slot order."""
    heads: dict[str, dict[str, tuple[int, int]]] = {}
    for name, entry in sorted(manifest["files"].items(), key=lambda item: item[1].get("slots", [])):
        found = re.fullmatch(r"(.+)_\d{5,}_of_\d{5,}\.safetensors", name)
        if found and "slots" in entry:
            heads.setdefault(found[1], {})[name] = (entry["slots"][0], entry["slots"][1])
    return heads


def commit(partial: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Complete a checkpoint whose folder holds all files of the manifest: write the manifest, flush, rename.

    Raises:
        OSError: it cannot be written; or a file is missing or has another size (another machine wrote it, and the path is a
            different folder there); or a checkpoint of that name exists, which is never overwritten.
    """
    for name, entry in manifest["files"].items():
        file = partial / name
        if not file.is_file() or file.stat().st_size != entry["size"]:
            raise FileNotFoundError(
                errno.ENOENT, "is missing or not the file that was written; several machines need a shared folder", str(file)
            )
    _write_manifest(partial, manifest)
    flush(partial)
    if final.exists():
        raise FileExistsError(errno.EEXIST, "exists already and is never overwritten", str(final))
    os.rename(partial, final)
    flush(final.parent)


def _write_manifest(checkpoint: Path, manifest: dict[str, Any]) -> None:
    if not math.isfinite(manifest.get("score") or 0.0):
        manifest = {**manifest, "score": None}  # JSON has no nan, and no checkpoint is better than it
    write_file(checkpoint / _MANIFEST, json.dumps({"format": FORMAT, **manifest}, indent=1))


def note_score(checkpoint: Path, score: float, config: dict[str, Any]) -> None:
    """Give a checkpoint that was saved without a score the one that a run with this configuration found later.

    It gets none if it has a moving average, which the run no longer keeps: the score is that of the weights.
    """
    manifest = read_manifest(checkpoint)
    if has_average(manifest) and not has_average({"config": config}):
        return
    config = {**manifest.get("config", {}), "eval": config["eval"]}
    _write_manifest(checkpoint, {**manifest, "score": score, "config": config})


def remove_unfinished(run_folder: Path) -> list[str]:
    """Delete partial checkpoints of killed saves; return a line about each. The caller must hold the run folder's lock."""
    lines = []
    for leftover in sorted((run_folder / "checkpoints").glob(".step_*")):
        try:
            shutil.rmtree(leftover)
        except OSError as error:  # it belongs to another user: it takes space, but blocks only a save at the same step
            lines.append(f"checkpoint: the leftover {leftover} cannot be deleted: {error.strerror}; delete it by hand")
            continue
        if leftover.suffix == ".partial":
            lines.append(f"checkpoint {leftover.name[1:-8]} was not finished when the run ended; deleted its partial files")
    return lines


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest, after checking that each file it lists exists and has its size.

    Raises:
        ValueError: naming the file and the fault, even if the manifest holds arbitrary data.
    """
    path = checkpoint / _MANIFEST
    try:
        check_file(path, _LARGEST_MANIFEST)
        manifest = _upgrade(json.loads(path.read_text(encoding="utf-8")))
        fault = _manifest_fault(manifest)
    except (OSError, ValueError, RecursionError) as error:
        fault = str(error)
    if fault:
        raise ValueError(f"checkpoint {checkpoint}: {_MANIFEST} cannot be read ({fault:.300})")
    found, entries = manifest["format"], {name: entry["size"] for name, entry in manifest["files"].items()}
    if found != FORMAT:
        raise ValueError(f"checkpoint {checkpoint}: format {found}, this program reads {FORMAT}")
    for name, size in entries.items():
        file = checkpoint / name
        actual = file.stat().st_size if file.is_file() else None
        if actual != size:
            state = "missing" if actual is None else f"{actual} bytes, {size} were written"
            raise ValueError(f"checkpoint {checkpoint}: {name} is {state}")
    return dict(manifest)


def _upgrade(manifest: Any) -> Any:
    """Return a manifest of format 1 in the current format, so that old runs can resume. Other manifests stay unchanged."""
    if not isinstance(manifest, dict) or manifest.get("format") != 1 or type(manifest["format"]) is not int:
        return manifest
    upgraded = {{"identity": "run_signature"}.get(key, key): value for key, value in manifest.items()} | {"format": FORMAT}
    config = upgraded.get("config")
    if isinstance(config, dict) and isinstance(config.get("head"), dict):
        head = {{"state": "storage"}.get(key, key): value for key, value in config["head"].items()}
        upgraded["config"] = {**config, "head": head}
    return upgraded


def _manifest_fault(manifest: Any) -> str:
    """Return the first fault in the fields of a manifest that programs rely on, "" if there is none."""

    def whole(value: Any, low: int, high: int) -> bool:
        return type(value) is int and low <= value <= high

    if not isinstance(manifest, dict):
        return f"it must be an object, got {type(manifest).__name__}"
    for key, high in (("format", 1000), ("step", 99_999_999)):  # the name of a folder has eight digits
        if not whole(manifest.get(key), 0, high):
            return f"{key} must be a whole number up to {high}, got {manifest.get(key)!r:.80}"
    score = manifest.get("score")
    if score is not None and not (type(score) in (int, float) and abs(score) < 1e300):  # false for nan too
        return f"score must be a number or null, got {score!r:.80}"
    if not whole(manifest.get("world_size", 1), 1, 10**6):
        return f"world_size must be a whole number above 0, got {manifest['world_size']!r:.80}"
    for key in ("files", "run_signature", "config"):
        if not isinstance(manifest.get(key, {} if key != "files" else None), dict):
            return f"{key} must be an object, got {manifest.get(key)!r:.80}"
    signature = manifest.get("run_signature", {})
    tasks = signature.get("tasks", {})
    if not (isinstance(tasks, dict) and all(isinstance(task, dict) for task in tasks.values())):
        return f"run_signature.tasks must be an object of objects, got {tasks!r:.80}"
    for key, value in itertools.chain(signature.items(), *(task.items() for task in tasks.values())):
        if key in ("num_classes", "num_images", "batch_size", "seed") and not whole(value, 0, 2**63 - 1):
            return f"run_signature.{key} must be a whole number from 0, got {value!r:.80}"
    for key, section in manifest.get("config", {}).items():
        if key == "tasks":
            if not (isinstance(section, list) and all(isinstance(task, dict) and _is_task(task) for task in section)):
                return f"config.tasks must be a list of objects with name, data, head and loss, got {section!r:.80}"
            continue
        if not isinstance(section, dict):
            return f"config.{key} must be an object, got {section!r:.80}"
        for name in {"eval": ("path", "metric"), "data": ("path",), "backbone": ("name",)}.get(key, ()):
            if not isinstance(section.get(name, ""), str):
                return f"config.{key}.{name} must be text, got {section[name]!r:.80}"
        targets = section.get("targets", []) if key == "eval" else []
        if not (isinstance(targets, list) and all(isinstance(name, str) for name in targets)):
            return f"config.eval.targets must be a list of names, got {targets!r:.80}"
    for name, entry in manifest["files"].items():
        if Path(name).name != name or "\0" in name:  # so that nothing outside the checkpoint is read, or written by a copy
            return f"{name!r} is not the name of a file in the checkpoint"
        if not isinstance(entry, dict) or not whole(entry.get("size"), 0, 2**62):
            return f"the size of {name} must be a whole number from 0, got {entry!r:.80}"
        if not all(isinstance(entry.get(kind, ""), str) for kind in (HASH, "sha256")):
            return f"the hash of {name} must be text"
        slots = entry.get("slots", [0, 1])
        if not (isinstance(slots, list) and len(slots) == 2 and all(whole(slot, 0, 2**62) for slot in slots)):
            return f"the slots of {name} must be two whole numbers from 0, got {slots!r:.80}"
        if slots[0] >= slots[1]:
            return f"the slots of {name} are {slots[0]} to {slots[1]}"
    return ""


def _is_task(task: dict[str, Any]) -> bool:
    parts = [task.get(key) for key in ("data", "head", "loss")]
    return isinstance(task.get("name"), str) and all(isinstance(part, dict) for part in parts)


class RetentionPolicy(NamedTuple):
    """Which checkpoints stay when a new one is complete."""

    last: int = 2  # so many newest, at least 1
    every: int = 0  # also every N-th optimizer step; 0 disables
    best: int = 1  # also so many with the highest scores, for each metric and choice of sets that scored the run


def prune(run_folder: Path, keep: RetentionPolicy) -> list[str]:
    """Delete old checkpoints. Damaged ones are neither deleted nor counted; return a line about each."""
    whole, lines = {}, []
    for path in list_checkpoints(run_folder):
        try:
            whole[path] = read_manifest(path)
        except ValueError as error:
            lines.append(str(error))
    kept = set(list(whole)[-keep.last :])
    ranked: dict[str, list[tuple[float, Path]]] = {}  # scores of different metrics or sets are not comparable
    for path, manifest in whole.items():
        if manifest.get("score") is not None:
            ranked.setdefault(_scored_by(manifest), []).append((manifest["score"], path))
    kept |= {path for scores in ranked.values() for _, path in sorted(scores)[-keep.best :] if keep.best}
    kept |= {path for path in whole if keep.every and step_of(path) % keep.every == 0}
    for path in whole:
        if path not in kept:
            # rename first: a kill during the deletion must not leave half a checkpoint under a final name
            hidden = path.with_name(f".{path.name}.deleted")
            try:
                os.rename(path, hidden)
                shutil.rmtree(hidden)
            except OSError as error:
                lines.append(f"checkpoint: the old {path} cannot be deleted: {error.strerror}; delete it by hand")
    return lines


def best_checkpoint(checkpoints: list[Path]) -> Path | None:
    """Return the checkpoint with the highest score (the newest if several are equal), None if none has a score.

    They are of one run, oldest first. If it changed its metric or its sets, only scores comparable with the newest one count.
    """
    scored = [(path, manifest) for path in checkpoints if (manifest := read_manifest(path)).get("score") is not None]
    if not scored:
        return None
    newest = _scored_by(scored[-1][1])
    return max((manifest["score"], path) for path, manifest in scored if _scored_by(manifest) == newest)[1]


def best_score(run_folder: Path, like: dict[str, Any]) -> float | None:
    """Return the highest score of a run's undamaged checkpoints, None if none has a score.

    Args:
        like: a manifest, or a part of one; only scores with its metric and sets count.
    """
    scores = []
    for path in list_checkpoints(run_folder):
        with contextlib.suppress(ValueError):
            manifest = read_manifest(path)
            if manifest.get("score") is not None and _scored_by(manifest) == _scored_by(like):
                scores.append(float(manifest["score"]))
    return max(scores, default=None)


def has_average(manifest: dict[str, Any]) -> bool:
    """Return whether the run kept a moving average of its weights, which then is what a score belongs to."""
    section = manifest.get("config", {}).get("train")
    return isinstance(section, dict) and isinstance(section.get("ema"), float) and section["ema"] > 0


def _scored_by(manifest: dict[str, Any]) -> str:
    """Return what the score of a checkpoint measures: the metric, the sets whose mean it is, and weights or moving average."""
    try:
        settings = manifest["config"]["eval"]
        return json.dumps([settings["metric"], sorted(settings["targets"]), has_average(manifest)])
    except (KeyError, TypeError, ValueError):  # an imported checkpoint, or one with an unusual configuration
        return ""
