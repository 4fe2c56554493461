"""Evaluation during training: the numbers and curves of the sets, and the score that ranks checkpoints."""

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
from .verification import VerificationResult

_AVERAGE = "ema/"  # no set has this in its name, which is that of a file


def check_names(sets: Sequence[PairSet]) -> None:
    """Raise ValueError if a set has the name under which the log keeps the numbers of training."""
    for pair_set in sets:
        if pair_set.name == TRAINING:
            raise ValueError(
                f"eval.targets: {pair_set.path} must not be called {TRAINING!r}: the numbers of training have that name in "
                "metrics.jsonl and TensorBoard; rename it"
            )


class Evaluator:
    """Scores a backbone on all sets during training.

    Args:
        settings: batch size per rank, autocast dtype, decoder threads, height and width of the images in pixels.
        metric: as for `selection_score`.
        name: of the run, for the title of the figures.
        last_step: the step after which results.json, results.md and verification.png are written to `folder`.
        average: moving average of the backbone's weights, scored beside it; its results have the name of the set after `ema/`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        sets: Sequence[PairSet],
        world: World,
        settings: tuple[int, torch.dtype | None, int, int],
        metric: str,
        log: RunLog,
        name: str,
        last_step: int,
        folder: Path,
        average: nn.Module | None = None,
    ) -> None:
        self.networks = {"": backbone} if average is None else {"": backbone, _AVERAGE: average}
        self.sets, self.world, self.settings = sets, world, settings
        self.metric, self.log, self.name, self.last_step, self.folder = metric, log, name, last_step, folder

    def score(self, step: int) -> float | None:
        """Evaluate all sets after `step` optimizer steps; return their score, equal on all ranks, or None without sets.

        The score is that of the moving average, if there is one.

        Raises:
            ValueError: on every rank, naming the set that cannot be scored.
        """
        if not self.sets:
            return None
        started = time.perf_counter()
        results: dict[str, VerificationResult] = {}
        for prefix, network in self.networks.items():
            broadcast_module(network, self.world)
            ranking = {f"{prefix}{name}": r for name, r in evaluate(network, self.sets, self.world, *self.settings)}
            results |= ranking
        for name, result in results.items():
            self.log.record(step, name, scalars(result))
        self.log.info(f"evaluation after step {step}, {time.perf_counter() - started:.1f} s\n{format_table(results)}")
        if self.world.rank == 0:
            # no other rank draws, so an error here must not look like one of the evaluation, which all ranks have
            with self.log.tolerant("the figures of an evaluation", ValueError, RuntimeError):
                picture = overview(results, f"{self.name} after step {step}")
                self.log.picture(step, "verification", picture)
                if step == self.last_step:
                    write_summary(self.folder, picture, results)
        # different processors may round differently, but the ranks must agree on the best checkpoint
        return all_gather_objects(selection_score(ranking, self.metric), self.world)[0]
