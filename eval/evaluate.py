"""Scores a network on verification sets: finds the sets, embeds them on all ranks, computes the numbers."""

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from utils.distributed import World
from utils.image import IMAGE_SIZE

from .embed import embed_images
from .pair_sets.bin_file import PairSet
from .pair_sets.csv_and_folders import SUFFIXES, read_pairs
from .verification import FOLDS, VerificationResult, fuse_views, mean_norm, pair_distances, row_norms, verify


def load_pair_sets(
    folder: str | Path, targets: Iterable[str], setting: str = "eval.targets", folder_setting: str = "eval.path"
) -> list[PairSet]:
    """Return the verification sets, all read and checked, so that no error comes later.

    A target is a name, of folder/NAME.bin (or .safetensors, .csv, or a folder of people), or a path, with or without the
    extension. A target with a slash or an extension is first relative to the current folder, then to `folder`. A set is named
    after its file without the extension; if two files have the same name, it begins with the folders in which they differ.

    Args:
        folder: "" if all targets are paths.
        setting, folder_setting: the settings that name the targets and their folder, for error messages: keys of the
            configuration, or "--targets" and "--data".

    Raises:
        ValueError: a set is missing, named twice, not a verification set, or has fewer pairs than folds.
    """
    target_of: dict[Path, str] = {}
    paths = []
    for target in targets:
        path = _find_set(str(folder), target, setting, folder_setting)
        if path.resolve() in target_of:
            raise ValueError(f"{setting} names a set twice: {target_of[path.resolve()]} and {target} are both {path}")
        target_of[path.resolve()] = target
        paths.append(path)
    sets = []
    for name, path in zip(_distinct_names(paths), paths, strict=True):
        pair_set = dataclasses.replace(read_pairs(path, name), path=str(path))
        if len(pair_set.same) < FOLDS:
            raise ValueError(f"{setting}: {path} has {len(pair_set.same)} pairs; {FOLDS}-fold accuracy needs {FOLDS}")
        sets.append(pair_set)
    return sets


def _find_set(folder: str, target: str, setting: str, folder_setting: str) -> Path:
    """Return the file or folder that a target means; raise ValueError if there is none."""
    is_path = "/" in target or Path(target).suffix in SUFFIXES[:-1]
    if not folder and not is_path:
        raise ValueError(f"{setting}: {target!r} is the name of a set; give its folder with {folder_setting}, or give a path")
    bases = ([Path(target)] if is_path else []) + ([Path(folder) / target] if folder else [])
    for base in bases:
        endings = ("",) if base.suffix in SUFFIXES[:-1] else SUFFIXES
        path = next((p for ending in endings if _is_set(p := Path(f"{base}{ending}"))), None)
        if path is not None:
            return path
    where = bases[0]
    present = sorted({p.stem for ending in SUFFIXES if ending for p in where.parent.glob(f"*{ending}")})
    near = difflib.get_close_matches(where.stem, present, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else f"The folder has {', '.join(present)}. " if present else ""
    shown = " or ".join(dict.fromkeys(str(base) if base.suffix in SUFFIXES[:-1] else f"{base}.bin" for base in bases))
    raise ValueError(f"{setting}: no file {shown}. {hint}Put it there, or drop {target!r} from {setting}")


def _distinct_names(paths: list[Path]) -> list[str]:
    """Return a distinct name for each file: its stem, and if that is not enough its folders too, joined by _."""
    parts = [(*p.resolve().parts[1:-1], p.stem if p.suffix in SUFFIXES[:-1] else p.name) for p in paths]
    names = ["_".join(part[-1:]) for part in parts]
    depth = 1
    while len(set(names)) < len(names) and depth < max(map(len, parts)):
        depth += 1
        names = ["_".join(p[-depth:]) if names.count(name) > 1 else name for p, name in zip(parts, names, strict=True)]
    if len(set(names)) < len(names):  # a.bin and a.csv of one folder
        names = [
            f"{name}_{path.suffix[1:]}" if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)
        ]
    return names


def _is_set(path: Path) -> bool:
    """Return whether path can be a verification set: a file, or a folder if the name has no extension."""
    return path.is_file() if path.suffix in SUFFIXES[:-1] else path.is_dir()


def check_metric(sets: Iterable[PairSet], metric: str) -> None:
    """Raise ValueError if a set has too few pairs for `metric` (see `selection_score`)."""
    for pair_set in sets:
        impostor = int(np.count_nonzero(~pair_set.same))
        genuine = len(pair_set.same) - impostor
        needed = round(1 / float(metric.split("@")[1])) if "@" in metric else int(metric != "accuracy")
        if impostor < needed or (needed and not genuine):
            raise ValueError(
                f"eval.metric={metric} needs {needed} impostor pairs and a genuine one in each set; {pair_set.name} has "
                f"{impostor} and {genuine}. Choose another metric, or leave the set out"
            )


def selection_score(results: Mapping[str, VerificationResult], metric: str) -> float:
    """Return the mean over the sets of the metric that ranks checkpoints; larger is better.

    Args:
        metric: accuracy, auc, eer (with a negative sign), or tar@FAR with a FAR of FAR_TARGETS.
    """
    values = []
    for result in results.values():
        if "@" in metric:
            value = result.tar_at_far[metric.split("@")[1]]
        else:
            value = {"accuracy": result.accuracy, "auc": result.auc, "eer": None if result.eer is None else -result.eer}[metric]
        if value is None:
            raise ValueError(f"eval.metric={metric} cannot be measured with so few pairs")
        values.append(value)
    return sum(values) / len(values)


def verify_views(pair_set: PairSet, plain: np.ndarray, mirrored: np.ndarray) -> VerificationResult:
    """Return the numbers of a set from the raw embeddings (N, D) of its images and of their mirror images."""
    first, second = pair_set.first, pair_set.second
    fused, alone = fuse_views(plain, mirrored), fuse_views(plain, np.zeros_like(plain))
    distances = pair_distances(alone[first], alone[second])
    norm = mean_norm(plain, mirrored)
    return verify(
        fused[first], fused[second], pair_set.same, FOLDS, xnorm=norm, plain_distances=distances, norms=row_norms(plain)
    )


def evaluate(
    model: nn.Module,
    sets: Iterable[PairSet],
    world: World,
    batch_size: int,
    autocast: torch.dtype | None,
    threads: int,
    image_size: int = IMAGE_SIZE,
) -> Iterator[tuple[str, VerificationResult]]:
    """Yield (name, result) of each set, the same on every rank. Images are resized to image_size x image_size.

    Raises:
        ValueError: on every rank, naming the set.
    """
    for pair_set in sets:
        try:
            decode, settings = functools.partial(pair_set.decode, size=image_size), (batch_size, autocast, threads, image_size)
            plain, mirrored = embed_images(model, decode, len(pair_set.images), world, *settings)
            yield pair_set.name, verify_views(pair_set, plain, mirrored)
        except ValueError as error:
            raise type(error)(f"evaluation of {pair_set.name}: {error}") from None
