"""Evaluation while a network trains: score all sets, log their numbers and curves, return what checkpoints are compared by."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from utils.distributed import World, all_gather_objects, broadcast_module
from utils.log import TRAINING, RunLog

from .evaluate import evaluate, selection_score
from .figures import overview
from .html_report import write_summary
from .pair_sets.bin_file import PairSet
from .report import format_table, scalars


def check_names(sets: Sequence[PairSet]) -> None:
    """Raise ValueError if a set has the name under which the log keeps the numbers of training."""
    for pair_set in sets:
        if pair_set.name == TRAINING:
            raise ValueError(
                f"eval.targets: {pair_set.path} may not be called {TRAINING!r}: the numbers of training have that name in "
                "metrics.jsonl and TensorBoard; rename it"
            )


def score_and_log(
    backbone: nn.Module,
    sets: Sequence[PairSet],
    world: World,
    settings: tuple[int, torch.dtype | None, int],
    metric: str,
    log: RunLog,
    step: int,
    title: str,
    summary_folder: Path | None = None,
) -> float | None:
    """Evaluate all sets after `step` optimizer steps; return their score in `metric`, equal on all ranks, None without sets.

    Args:
        settings: batch size per rank, autocast dtype, decoder threads.
        metric: as for `selection_score`.
        title: of the figures.
        summary_folder: where results.json, results.md and verification.png go; None = nowhere.

    Raises:
        ValueError: on every rank, naming the set that cannot be scored.
    """
    if not sets:
        return None
    started = time.perf_counter()
    broadcast_module(backbone, world)
    results = dict(evaluate(backbone, sets, world, *settings))
    for name, result in results.items():
        log.record(step, name, scalars(result))
    log.info(f"evaluation after step {step}, {time.perf_counter() - started:.1f} s\n{format_table(results)}")
    if world.rank == 0:
        picture = overview(results, title)
        log.picture(step, "verification", picture)
        if summary_folder is not None:
            with log.tolerant("the summary"):
                write_summary(summary_folder, picture, results)
    # processors of two kinds may round differently, and the ranks must agree on which checkpoint is the best
    return all_gather_objects(selection_score(results, metric), world)[0]
