"""Evaluation during training: the figures of all protocols, curves, and the score that ranks checkpoints."""

import time
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from utils.distributed import World, all_gather_objects, broadcast_module
from utils.log import TRAINING, RunLog

from .embed import EmbedSettings
from .evaluate import evaluate, selection_score
from .protocol import Protocol, Result
from .report import draw_overview, format_table, pair_results, write_summary

_AVERAGE = "ema/"  # no set has this in its name, which is that of a file


def check_names(protocols: Sequence[Protocol[Result]]) -> None:
    """Raise ValueError if a set has the name under which the log keeps the numbers of training."""
    for protocol in protocols:
        if protocol.name == TRAINING:
            raise ValueError(
                f"eval.targets: {protocol.path} must not be called {TRAINING!r}: the numbers of training have that name in "
                "metrics.jsonl and TensorBoard; rename it"
            )


class Evaluator:
    """Scores a backbone by all protocols during training.

    Args:
        metric: as for `selection_score`.
        name: of the run, for the title of the figures.
        last_step: the step after which results.json, results.md and verification.png are written to `folder`.
        average: moving average of the backbone's weights, scored beside it; its results have the name of the set after `ema/`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        protocols: Sequence[Protocol[Result]],
        world: World,
        settings: EmbedSettings,
        metric: str,
        log: RunLog,
        name: str,
        last_step: int,
        folder: Path,
        average: nn.Module | None = None,
    ) -> None:
        self.networks = {"": backbone} if average is None else {"": backbone, _AVERAGE: average}
        self.protocols, self.world, self.settings = protocols, world, settings
        self.metric, self.log, self.name, self.last_step, self.folder = metric, log, name, last_step, folder

    def score(self, step: int) -> float | None:
        """Evaluate after `step` optimizer steps; return the score, equal on all ranks, or None without protocols.

        The score is that of the moving average, if there is one.

        Raises:
            ValueError: on every rank, naming the set that cannot be scored.
        """
        if not self.protocols:
            return None
        started = time.perf_counter()
        results: dict[str, Result] = {}
        for prefix, network in self.networks.items():
            broadcast_module(network, self.world)
            found = evaluate(network, self.protocols, self.world, self.settings)
            ranking = {f"{prefix}{name}": result for name, result in found}
            results |= ranking
        for name, result in results.items():
            self.log.record(step, name, dict(result.figures))
        self.log.info(f"evaluation after step {step}, {time.perf_counter() - started:.1f} s\n{format_table(results)}")
        if self.world.rank == 0:
            # no other rank draws, so an error here must not look like one of the evaluation, which all ranks have
            with self.log.tolerant("the figures of an evaluation", ValueError, RuntimeError):
                self._draw(step, results)
        # different processors may round differently, but the ranks must agree on the best checkpoint
        return all_gather_objects(selection_score(ranking, self.metric), self.world)[0]

    def _draw(self, step: int, results: dict[str, Result]) -> None:
        pairs = pair_results(results)
        picture = draw_overview(pairs, f"{self.name} after step {step}") if pairs else b""
        if picture:
            self.log.picture(step, "verification", picture)
        if step == self.last_step:
            write_summary(self.folder, picture, results)
