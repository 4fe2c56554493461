"""Score a network on verification sets: find the sets, embed them on all ranks, compute the numbers."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from utils.distributed import World

from .embed import embed_images
from .pair_files import SUFFIXES, read_pairs
from .pairs import PairSet
from .verification import VerificationResult, fuse_views, mean_norm, pair_distances, row_norms, verify

NUM_FOLDS = 10


def load_pair_sets(folder: str | Path, targets: Iterable[str]) -> list[PairSet]:
    """Return the verification sets folder/TARGET.bin (or .safetensors, .csv), checked, so that none is found missing later.

    Raises:
        ValueError: a set is missing, is no verification set, or has fewer pairs than folds.
    """
    sets = []
    for name in targets:
        path = next((p for suffix in SUFFIXES if _is_set(p := Path(folder) / f"{name}{suffix}")), None)
        if path is None:
            present = sorted({p.stem for suffix in SUFFIXES if suffix for p in Path(folder).glob(f"*{suffix}")})
            near = difflib.get_close_matches(name, present, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else f"The folder has {', '.join(present)}. " if present else ""
            raise ValueError(
                f"eval.targets: no file {Path(folder) / name}.bin. {hint}Put it there, or drop {name!r} from eval.targets"
            )
        pair_set = read_pairs(path, name)
        if len(pair_set.same) < NUM_FOLDS:
            raise ValueError(
                f"eval.targets: {path} has {len(pair_set.same)} pairs; {NUM_FOLDS}-fold accuracy needs {NUM_FOLDS}"
            )
        sets.append(pair_set)
    return sets


def _is_set(path: Path) -> bool:
    """Return whether a verification set may lie here: a file, or for a name without an ending a folder."""
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
    """Return the mean over the sets of what checkpoints are chosen by; larger is better.

    Args:
        metric: accuracy, auc, eer (counted negative), or tar@FAR with a FAR of FAR_TARGETS.
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
        fused[first], fused[second], pair_set.same, NUM_FOLDS, xnorm=norm, plain_distances=distances, norms=row_norms(plain)
    )


def evaluate(
    model: nn.Module, sets: Iterable[PairSet], world: World, batch_size: int, autocast: torch.dtype | None, threads: int
) -> Iterator[tuple[str, VerificationResult]]:
    """Yield (name, result) of each set, the same on every rank.

    Raises:
        ValueError: on every rank, naming the set.
    """
    for pair_set in sets:
        try:
            plain, mirrored = embed_images(model, pair_set.decode, len(pair_set.images), world, batch_size, autocast, threads)
            yield pair_set.name, verify_views(pair_set, plain, mirrored)
        except ValueError as error:
            raise type(error)(f"evaluation of {pair_set.name}: {error}") from None
