"""What a head may rely on, for every margin, and the errors of build_margin."""

import math
from typing import Any

import pytest
import torch
from rounding import FP32_UNIT
from torch import Tensor

from losses import MARGINS, Margin, build_margin, list_margins, margin_arguments

pytestmark = pytest.mark.numeric

DEFAULTS = {"scale": 64.0, "margin": 0.4, "m1": 1.35, "m2": 0.2, "m3": 0.1, "gradient": "exact"}
BEYOND = 1.0 + 2.4e-7  # how far fp32 rounding puts the cosine of two equal unit vectors
NAMES = list_margins()


def _build(name: str, **changes: Any) -> Margin:
    known = margin_arguments(name)
    return build_margin(name, **{key: value for key, value in {**DEFAULTS, **changes}.items() if key in known})


def _value_and_slope(margin: Margin, cosine: Tensor) -> tuple[Tensor, Tensor]:
    leaf = cosine.clone().requires_grad_()
    state = margin.observe(cosine.float(), torch.ones(len(cosine))) if len(cosine) else None
    logits = margin.target(leaf, torch.ones_like(leaf), state)
    (slope,) = torch.autograd.grad(logits.sum(), leaf)
    return logits.detach(), slope


@pytest.mark.parametrize("name", NAMES)
def test_values_and_slopes_are_finite_at_the_poles_and_beyond(name: str) -> None:
    cosine = torch.tensor([1.0, -1.0, BEYOND, -BEYOND, 1.0 - 6e-8, -1.0 + 6e-8])
    assert (cosine.abs() > 1).sum() == 2
    logits, slope = _value_and_slope(_build(name), cosine)
    assert torch.isfinite(logits).all()
    assert torch.isfinite(slope).all()
    assert (slope > 0).all()
    assert slope.max() < 64.0 * 1.35 * 224.0  # scale x m1 x d theta / d cosine at 1 - 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_target_never_falls_when_the_cosine_rises(name: str) -> None:
    cosine = torch.linspace(-1.0, 1.0, 20001, dtype=torch.float64)
    logits, slope = _value_and_slope(_build(name), cosine)
    assert (logits.diff() > 0).all()
    assert (slope >= 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_exact_slope_equals_finite_differences(name: str) -> None:
    margin = _build(name)
    theta = torch.linspace(0.05, 3.09, 400, dtype=torch.float64)
    # away from where the formula changes: theta + m = pi, m1 theta + m2 = k pi
    kinks = {"cosface": [], "combined": [(math.pi - 0.2) / 1.35]}.get(name, [math.pi - 0.4])
    for kink in kinks:
        theta = theta[(theta - kink).abs() > 1e-3]
    cosine, step = theta.cos(), 1e-6
    _, slope = _value_and_slope(margin, cosine)
    norm = torch.ones_like(cosine)
    state = margin.observe(cosine.float(), norm.float())
    expected = (margin.target(cosine + step, norm, state) - margin.target(cosine - step, norm, state)) / (2 * step)
    torch.testing.assert_close(
        slope, expected, rtol=1e-5, atol=1e-4
    )  # truncation; rounding of logits of size 64: 64 x 2^-53 / step = 7e-9


@pytest.mark.parametrize("name", NAMES)
def test_straight_through_has_the_same_values_and_the_slope_of_the_scale(name: str) -> None:
    cosine = torch.linspace(-BEYOND, BEYOND, 101)
    exact, _ = _value_and_slope(_build(name), cosine)
    straight, slope = _value_and_slope(_build(name, gradient="straight_through"), cosine)
    assert torch.equal(straight, exact)
    assert torch.equal(slope, torch.full_like(slope, 64.0))


@pytest.mark.parametrize("name", NAMES)
def test_margin_of_zero_is_the_scaled_cosine(name: str) -> None:
    cosine = torch.linspace(-0.999, 0.999, 101, dtype=torch.float64)
    margin = _build(name, scale=30.0, margin=0.0, m1=1.0, m2=0.0, m3=0.0)
    logits, slope = _value_and_slope(margin, cosine)
    torch.testing.assert_close(logits, 30.0 * cosine)
    torch.testing.assert_close(slope, torch.full_like(slope, 30.0))


@pytest.mark.parametrize("name", NAMES)
def test_no_logit_exceeds_the_declared_bound(name: str) -> None:
    margin = _build(name)
    cosine = torch.linspace(-1.0, 1.0, 1001)
    state = margin.observe(cosine, torch.ones_like(cosine))
    negatives = margin.negatives(cosine.view(1, -1), torch.zeros(1, 1), state)
    assert negatives.abs().max() <= margin.logit_bound
    for same_bound in (margin, _build(name, margin=0.0, m1=1.0, m2=0.0, m3=0.0)):
        assert same_bound.target(cosine, torch.ones_like(cosine), state).max() <= margin.logit_bound * (1 + 8 * FP32_UNIT)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_target_computes_in_fp32_whatever_comes_in(name: str, dtype: torch.dtype) -> None:
    cosine = torch.linspace(-1.0, 1.0, 33).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        logits, slope = _value_and_slope(_build(name), cosine)
    expected, _ = _value_and_slope(_build(name), cosine.float())
    assert logits.dtype == torch.float32
    assert slope.dtype == dtype
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", NAMES)
def test_target_of_no_rows_is_empty(name: str) -> None:
    logits, slope = _value_and_slope(_build(name), torch.empty(0))
    assert logits.shape == slope.shape == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_negatives_are_linear_where_a_margin_says_so_and_only_what_observes_keeps_statistics(name: str) -> None:
    margin = _build(name)
    cosine = torch.randn(3, 5, dtype=torch.float64)
    if name in ("arcface", "cosface", "combined"):
        assert margin.linear_negatives and not margin.observes
    if margin.linear_negatives:
        assert torch.equal(margin.negatives(cosine, cosine[:, :1]), 64.0 * cosine)
    assert margin.observes or not margin.state_dict()


def test_margin_that_bends_negatives_is_not_linear() -> None:
    class Bent(Margin):
        def negatives(self, cosine: Tensor, target_cosine: Tensor) -> Tensor:
            return self.scale * (cosine + target_cosine)

    assert not Bent().linear_negatives
    with pytest.raises(NotImplementedError, match="Bent must define target"):
        Bent().target(torch.zeros(1), torch.ones(1))


@pytest.mark.parametrize("name", NAMES)
def test_build_margin_hands_every_argument_over(name: str) -> None:
    margin = _build(name, scale=10.0, gradient="straight_through")
    assert type(margin) is MARGINS[name]
    assert (margin.scale, margin.gradient) == (10.0, "straight_through")
    own = set(margin_arguments(name)) - {"scale", "gradient"}
    assert own and {key: getattr(margin, key) for key in own} == {
        key: DEFAULTS.get(key, margin_arguments(name)[key]) for key in own
    }


def test_unknown_name_is_refused_with_the_nearest_and_the_list() -> None:
    rule = rf"^name must be one of {', '.join(NAMES)}, got 'arc_face'. Did you mean arcface\?"
    with pytest.raises(ValueError, match=rule):
        _build("arc_face")
    for far in ("adaface", "sphereface", "softmax"):
        with pytest.raises(ValueError, match=rf"got '{far}'\.$"):
            _build(far)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("arcface", "scale", 0.0),
        ("cosface", "scale", math.inf),
        ("combined", "scale", math.nan),
        ("arcface", "margin", 28.6),
        ("arcface", "margin", -0.1),
        ("cosface", "margin", 1.0),
        ("cosface", "margin", math.nan),
        ("combined", "m1", 0.9),
        ("combined", "m1", math.inf),
        ("combined", "m2", 2.0),
        ("combined", "m3", -0.1),
    ],
)
def test_impossible_number_is_refused_with_key_and_value(name: str, key: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{key} must be .*, got {value}"):
        _build(name, **{key: value})


def test_unknown_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gradient must be one of exact, straight_through, got 'detached'"):
        _build("arcface", gradient="detached")
