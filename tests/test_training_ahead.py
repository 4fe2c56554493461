"""The next step is prepared while a step is computed, and what fails there is said when its turn comes."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import read_metrics, small_run
from torch import Tensor

import train
from data.loader import LoadedBatch
from partial_fc.sampling.planning import SharedLabels
from training.ahead import StepsAhead

LAST = 6


class _Loader:
    """Batches whose labels are the number of their step; that of step `broken` raises."""

    device = torch.device("cpu")

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __iter__(self) -> Iterator[LoadedBatch]:
        for step in range(LAST):
            if step == self.broken:
                raise ValueError(f"record {step} cannot be decoded")
            yield LoadedBatch(torch.zeros(4, 2, 2, 3), torch.full((4,), step), torch.zeros(4).bool(), torch.arange(4))


class _Head:
    """Remembers which steps it prepared; that of step `broken` raises."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken
        self.prepared = [threading.Event() for _ in range(LAST)]

    def prepare(self, labels: Tensor, step: int, flags: Sequence[bool]) -> SharedLabels:
        assert labels.unique().tolist() == [step] and threading.current_thread().name == "planner"
        if step == self.broken:
            raise RuntimeError(f"no plan for step {step}")
        self.prepared[step].set()
        return SharedLabels(step, labels.numpy(), labels.numpy(), flags)


def _steps(loader: _Loader, head: _Head, accumulation: int = 2) -> StepsAhead:
    return StepsAhead([loader], [head], 0, accumulation)  # type: ignore[list-item]


def test_the_next_step_is_prepared_while_a_step_is_computed():
    head, seen = _Head(), []
    for prepared in _steps(_Loader(), head):
        number = prepared.number
        (plan,) = prepared.plans
        assert isinstance(plan, SharedLabels) and (plan.step, plan.slots.shape) == (number, (2, 2))
        assert prepared.batches[0].labels.tolist() == 4 * [number]
        if number + 1 < LAST:  # a backbone that takes until the next plan is there would wait for ever, were it made later
            assert head.prepared[number + 1].wait(30), f"step {number + 1} was not prepared during step {number}"
        if number + 2 < LAST:
            assert not head.prepared[number + 2].is_set()  # and no further: the loader's buffers are two
        seen.append(number)
    assert seen == list(range(LAST))


@pytest.mark.parametrize(
    ("loader", "head", "error", "said"),
    [
        (_Loader(broken=3), _Head(), ValueError, "record 3 cannot be decoded"),
        (_Loader(), _Head(broken=3), RuntimeError, "no plan for step 3"),
    ],
)
def test_an_error_is_raised_when_its_step_is_asked_for(loader: _Loader, head: _Head, error: type[Exception], said: str):
    seen = []
    with pytest.raises(error, match=said):
        for prepared in _steps(loader, head):
            seen.append(prepared.number)
    assert seen == [0, 1, 2]


def test_flags_come_with_the_labels_of_the_next_step():
    numbers, steps = itertools.count(), _steps(_Loader(broken=4), _Head())
    steps.flags, seen = lambda: [next(numbers) == 2, True], []
    with pytest.raises(ValueError, match="record 4"):
        for _ in steps:
            seen.append(steps.shared_flags())
    assert seen == [[False, True], [True, True], [False, True]]


def test_a_consumer_that_stops_early_ends_the_thread():
    steps = iter(_steps(_Loader(), _Head()))
    next(steps)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "planner"]
    steps.close()
    assert not thread.is_alive()


@pytest.mark.parametrize("sampling", ["uniform", "neighbours"])
def test_training_draws_the_same_classes_ahead_as_in_the_main_thread(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: str
):
    """The graph of neighbours changes within the run, so with it the draw must wait for its step."""
    overrides = ["head.sample_rate=0.6", f"head.sampling={sampling}", "head.neighbours_every=2", "eval.targets=[]"]
    arguments = small_run(dataset, tmp_path, *overrides, "train.max_steps=7")
    assert train.main([*arguments, "run.name=ahead"]) == 0

    def now(steps: StepsAhead) -> Iterator[SimpleNamespace]:
        for number, batches in enumerate(zip(*steps.loaders, strict=True)):
            labels = [batch.labels.view(steps.accumulation, -1) for batch in batches]
            plans = [head.prepare(rows, number) for head, rows in zip(steps.heads, labels, strict=True)]
            yield SimpleNamespace(number=number, batches=batches, plans=plans)

    monkeypatch.setattr(StepsAhead, "__iter__", now)
    assert train.main([*arguments, "run.name=now"]) == 0
    losses = [[record["loss"] for record in read_metrics(tmp_path / name).values()] for name in ("ahead", "now")]
    assert losses[0] == losses[1] and len(losses[0]) == 7
