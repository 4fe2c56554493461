"""The curves of the losses over the angle are those of the slow references, value and derivative."""

import math
from pathlib import Path
from typing import Any

import cv2
import loss_references
import loss_references_adaptive
import loss_references_other
import pytest
import torch
from torch import Tensor

from losses import MARGINS
from scripts.benchmark import losses as benchmark
from scripts.benchmark.losses import SETTINGS, chosen_settings

# of no two conditions' border: theta + m = pi, hard negatives at 90 degrees, multiples of pi / 4
THETA = torch.tensor([0.2, 0.6, 0.95, 1.3, 1.6, 2.0, 2.5, 2.9], dtype=torch.float64)
OTHERS = benchmark.NUM_CLASSES - 1
LATE = benchmark.LATE
LARGE = 400.0  # a weight of exp(400) of the negative: the loss is then 400 + its logit - the target's, to the last digit
# what a reference has no default for, or what the curves fix
ARGUMENTS: dict[str, dict[str, Any]] = {
    "sphereface": {"steps": LATE - 1},
    "adacos": {"dynamic": False, "scale": math.sqrt(2) * math.log(OTHERS)},
    "elasticface": {"draws": torch.full((2,), 0.5)},
    "adaptiveface": {"margins": torch.tensor([0.35, 0.35], dtype=torch.float64), "weight": 0.0},
    "kappaface": {"psi": torch.full((2,), 0.5), "sums": torch.zeros(2, 3), "counts": torch.zeros(2)},
    "magface": {"weight": 0.0},
    "adaface": {"alpha": 0.0},
    "sphereface2": {"bias": torch.tensor(0.0)},
    "uniface": {"bias": torch.tensor(math.log(10.0 * benchmark.NUM_CLASSES), dtype=torch.float64)},
}


def _reference(name: str, theta: float, negative: float, log_weight: float, **more: Any) -> tuple[float, float]:
    """Return the loss, and its derivative with respect to theta, of a batch that has one sample twice.

    There is one other class, at the angle `negative`, pi or pi / 2, which counts exp(log_weight) times.
    """
    angle = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    embedding = benchmark.NORM * torch.stack([angle.cos(), angle.sin(), torch.zeros_like(angle)]).expand(2, 3)
    other = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    if negative == math.pi:
        other = -embedding.detach()[0]
    centres = torch.stack([torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64), other])
    modules = (loss_references, loss_references_adaptive, loss_references_other)
    function = next(getattr(module, name) for module in modules if hasattr(module, name))
    log_weights = torch.tensor([0.0, log_weight], dtype=torch.float64)
    loss, _ = function(embedding, centres, torch.zeros(2, dtype=torch.long), log_weights=log_weights, **more)
    (gradient,) = torch.autograd.grad(loss, angle)
    return loss.item(), gradient.item()


def _of_row(name: str) -> tuple[str, dict[str, Any]]:
    """Return the loss of a row, and the arguments of its reference."""
    setting = SETTINGS[name]
    return setting.loss, {**setting.row.arguments, **ARGUMENTS.get(setting.loss, {})}


ROWS = chosen_settings(None)
SOFTMAX = [name for name in ROWS if SETTINGS[name].loss not in ("sphereface2", "uniface")]


@pytest.mark.numeric
@pytest.mark.parametrize("name", SOFTMAX)
def test_logit_and_slope_are_those_of_the_reference(name: str):
    loss, arguments = _of_row(name)
    logits, slopes, _ = benchmark.curve(benchmark.first_step_margin(name), THETA)
    angle, of_negative = _far_negative(loss, benchmark.first_step_margin(name))
    for number, theta in enumerate(THETA.tolist()):
        expected, derivative = _reference(loss, theta, angle, LARGE, **arguments)
        size = logits.abs().max().item()
        _close(logits[number], LARGE + of_negative - expected, size)
        _close(slopes[number], derivative, size)  # d loss / d theta = - d logit / d theta, since 1 - p is 1


def _far_negative(loss: str, margin: Any) -> tuple[float, float]:
    """Return an angle at which a negative is never hard and does not move with the sample, and its logit there."""
    if loss == "li_arcface":
        return math.pi / 2, 0.0
    if loss == "qamface":
        return math.pi / 2, margin.scale * (1.5 * math.pi) ** 2
    return math.pi, 0.0 if loss == "circle" else -benchmark.unit_of(margin)


def _close(found: Tensor, expected: float | Tensor, size: float) -> None:
    """Compare up to a few roundings to fp32, which the coefficients of the negatives and running values are kept in."""
    bound = 8 * torch.finfo(torch.float32).eps * size
    torch.testing.assert_close(found.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=bound)


@pytest.mark.numeric
@pytest.mark.parametrize("name", ROWS)
def test_the_loss_is_that_of_the_reference(name: str):
    loss, arguments = _of_row(name)
    margin = benchmark.first_step_margin(name)
    if loss == "sphereface2":
        arguments["bias"] = torch.tensor(loss_references_other.sphereface2_bias(benchmark.NUM_CLASSES), dtype=torch.float64)
    logits, _, losses = benchmark.curve(margin, THETA)
    for number, theta in enumerate(THETA.tolist()):
        expected, _ = _reference(loss, theta, math.pi / 2, math.log(OTHERS), **arguments)
        _close(losses[number], expected, logits.abs().max().item())


@pytest.mark.numeric
def test_a_negative_is_that_of_the_reference():
    """A reference has no logits, so these are the formulas of the papers, written down once more."""
    theta = torch.linspace(0.1, 3.0, 30, dtype=torch.float64)
    c, own = theta.cos(), math.cos(benchmark.NEGATIVE_AT)
    hard = c > math.cos(benchmark.NEGATIVE_AT + 0.5)
    weight = 1.2 * torch.exp(-((c - math.cos(benchmark.NEGATIVE_AT + 0.5)) ** 2) / 2.0)
    bias = loss_references_other.sphereface2_bias(benchmark.NUM_CLASSES)
    t = 0.01 * own  # of CurricularFace, after a batch of this sample alone
    expected = {
        "arcface": 64 * c,
        "curricularface": torch.where(hard, 64 * c * (t + c), 64 * c),
        "mv_softmax": torch.where(c > own - 0.35, 32 * (1.2 * c + 0.2), 32 * c),
        "npcface": torch.where(hard, 64 * (1.1 * c + 0.2), 64 * c),
        "arcnegface": 64 * (weight * c + weight - 1),
        "circle": 256 * (c + 0.25).clamp_min(0) * (c - 0.25),
        "li_arcface": 64 * (math.pi - 2 * theta) / math.pi,
        "sphereface2": 40 * (2 * ((c + 1) / 2) ** 3 - 1 + 0.4) + bias,
    }
    assert set(expected) == set(benchmark.NEGATIVES)
    for name, logit in expected.items():
        found, slope = benchmark.negative_curve(benchmark.first_step_margin(name), theta)
        _close(found, logit, logit.abs().max().item())
        # finite differences of the detached weights would be another derivative: that of training holds them
        held = {"arcnegface": 64 * weight * theta.sin(), "circle": 256 * (c + 0.25).clamp_min(0) * theta.sin()}
        if name in held:
            _close(slope, held[name], logit.abs().max().item())


def test_every_loss_is_in_a_picture_and_each_picture_can_be_read(tmp_path: Path):
    drawn = {SETTINGS[name].loss for names in benchmark.GROUPS.values() for name in names}
    assert drawn == set(list(MARGINS)) and all(len(names) <= 7 for names in benchmark.GROUPS.values())
    for path in benchmark.draw_curves(tmp_path):
        picture = cv2.imread(str(path))
        colours = {tuple(pixel) for pixel in picture.reshape(-1, 3)[::7].tolist()}
        assert picture.shape[0] > 400 and len(colours) > 20
