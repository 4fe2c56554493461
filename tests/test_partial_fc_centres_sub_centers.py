"""Several centres for each class: the head against the slow references, which take the nearest of each class themselves."""

from collections.abc import Callable

import pytest
import torch
from head_losses import CASES, D, Setting, compare_steps

from losses import build_margin

THREE = Setting(sub_centers=3)
SETTINGS = {
    "sampled": THREE._replace(rate=0.6),
    "as many as a chunk, without a cache": THREE._replace(sub_centers=5, cache_mb=0),
    "more than a chunk": THREE._replace(sub_centers=7),
    "filtered": THREE._replace(limit=0.1),
    "weighted": THREE._replace(rate=0.6, correction="log_r", cache_mb=0),
    "plain torch": THREE._replace(kernels="plain", rate=0.3),
    "two micro-batches": THREE._replace(accumulation=2, sub_centers=2),
    "lean": THREE._replace(storage="lean", rate=0.6),
    "tiny": THREE._replace(storage="tiny"),
    "bf16 products": THREE._replace(dtype=torch.bfloat16, rate=0.6),
}
SMOOTHED = {
    "smoothed": THREE._replace(smoothing=0.1),
    "smoothed and sampled": THREE._replace(smoothing=0.1, rate=0.6, correction="log_r"),
    "smoothed and filtered": THREE._replace(smoothing=0.1, limit=0.1, accumulation=2),
    "focal": THREE._replace(focal=2.0, smoothing=0.1),
}


def steps_of(case: str) -> int:
    """Return how many steps show all that a loss does: two if it keeps numbers from one to the next."""
    margin = build_margin(case.partition(",")[0], **CASES[case].arguments)
    return 2 if margin.state_dict() or margin.class_numbers(D) else 1


@pytest.mark.parametrize("case", CASES)
def test_the_nearest_centre_of_each_class_alone_counts_and_moves(case: str):
    compare_steps(0, 1, case, THREE, steps_of(case))


# every setting with one loss: linear negatives, hard ones, or a sum over the classes
PAIRS = [(("arcface", "curricularface", "sphereface2")[number % 3], setting) for number, setting in enumerate(SETTINGS)]


@pytest.mark.parametrize(("case", "setting"), PAIRS)
def test_whatever_the_head_does_besides(case: str, setting: str):
    compare_steps(0, 1, case, SETTINGS[setting])


@pytest.mark.parametrize("setting", SMOOTHED)
@pytest.mark.parametrize("case", ["arcface", "circle", "adaface"])
def test_label_smoothing_pulls_at_the_nearest_centres(case: str, setting: str):
    compare_steps(0, 1, case, SMOOTHED[setting], steps_of(case))


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks(run_ranks: Callable[..., None], world_size: int):
    run_ranks(_compare_all, world_size)


def _compare_all(rank: int, world_size: int) -> None:
    for case in ("arcface", "curricularface", "sphereface2", "adaptiveface", "kappaface"):
        compare_steps(rank, world_size, case, SETTINGS["sampled"])
    compare_steps(rank, world_size, "arcface", SMOOTHED["focal"])
