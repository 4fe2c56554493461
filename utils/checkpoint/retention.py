"""Deletes old checkpoints of a run, and finds the best one."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from .format import list_checkpoints, read_manifest, step_of


def prune(run_folder: Path, keep_last: int, keep_every: int = 0, keep_best: int = 1) -> list[str]:
    """Delete old checkpoints. Damaged ones are neither deleted nor counted; return a line about each.

    Args:
        keep_last: keep this many of the newest checkpoints, at least 1.
        keep_every: also keep the checkpoint of every N-th optimizer step; 0 disables.
        keep_best: also keep this many with the highest scores, for each metric and choice of sets that scored the run.
    """
    whole, lines = {}, []
    for path in list_checkpoints(run_folder):
        try:
            whole[path] = read_manifest(path)
        except ValueError as error:
            lines.append(str(error))
    kept = set(list(whole)[-keep_last:])
    ranked: dict[str, list[tuple[float, Path]]] = {}  # scores of different metrics or sets are not comparable
    for path, manifest in whole.items():
        if manifest.get("score") is not None:
            ranked.setdefault(_scored_by(manifest), []).append((manifest["score"], path))
    kept |= {path for scores in ranked.values() for _, path in sorted(scores)[-keep_best:] if keep_best}
    kept |= {path for path in whole if keep_every and step_of(path) % keep_every == 0}
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

    If the run changed its metric or its sets, only the scores that are comparable with the newest one count.

    Args:
        checkpoints: of one run, oldest first.
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
