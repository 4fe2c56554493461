"""Two GPUs: two ranks train as one, and a rank whose peer is killed ends in time; NCCL in place of the CPU tests' gloo."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import network_bound
from tiny_runs import IRESNET, Started, ended_well, read_metrics, run_train, tiny_run

import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

STEPS = 20


@pytest.mark.numeric
def test_two_ranks_have_the_losses_of_one(dataset: Path, tmp_path: Path):
    losses = []
    for ranks in (1, 2):
        # frozen statistics, which two ranks share; a small rate, because these normalise nothing and amplify rounding errors
        fixed = ["run.device=cuda", "backbone.freeze_norm=true", "optimizer.lr=1e-3", IRESNET, f"run.name=n{ranks}"]
        ended_well(run_train(ranks, tiny_run(dataset, tmp_path, *fixed, f"train.max_steps={STEPS}", "eval.targets=[]")))
        losses.append([record["loss"] for record in read_metrics(tmp_path / f"n{ranks}").values()])
    assert len(losses[0]) == STEPS
    assert losses[0] == pytest.approx(losses[1], abs=STEPS**0.5 * 16 * network_bound())  # 16 is loss.scale


def _die_in_step_5(arguments: list[str]) -> int:
    """Train; rank 1 is killed in the middle of a step, while rank 0 goes on into the collectives of that step."""
    whole = train.train_step

    def train_step(config: Any, tasks: Any, model: Any, parallel: Any, prepared: Any, *more: Any) -> Any:
        if prepared.number == 5 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(config, tasks, model, parallel, prepared, *more)

    train.train_step = train_step
    return train.main(arguments)


def test_a_killed_rank_ends_the_other_within_a_minute_with_its_rank_and_step(dataset: Path, tmp_path: Path):
    arguments = tiny_run(dataset, tmp_path, "run.device=cuda", "eval.targets=[]", "train.epochs=400", "checkpoint.every=0")
    started = Started(_die_in_step_5, [arguments] * 2, tmp_path)
    started.processes[1].join(300)  # killed
    begun = time.monotonic()
    assert started.processes[1].exitcode == -signal.SIGKILL
    ended = started.wait(60)
    assert time.monotonic() - begun < 60 and started.processes[0].exitcode not in (0, None)
    said = r"error: rank 0 in step \d+, .*: (rank 1 has been silent for \d+ s|another process ended)"
    assert re.search(said, ended.stderr), ended.stderr
