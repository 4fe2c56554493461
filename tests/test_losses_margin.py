"""What a head may rely on, for every margin, and the errors of build_margin."""

import copy
import math
from typing import Any

import pytest
import torch
from rounding import FP32_UNIT
from torch import Tensor
from waiting import Syncs

from losses import MARGINS, Margin, build_margin, margin_arguments
from losses.margin import State

pytestmark = pytest.mark.numeric

DEFAULTS = {"scale": 64.0, "margin": 0.4, "m1": 1.35, "m2": 0.2, "m3": 0.1, "std": 0.0, "l_m": 0.4, "gradient": "exact"}
OF_NAME = {  # what differs from DEFAULTS
    "sphereface": {"margin": 1.35},
    "sphereface_r": {"margin": 1.35},
    "qamface": {"scale": 6.0},
    "npcface": {"m1": 0.2},
}
NO_MARGIN = {"margin": 0.0, "m0": 0.0, "m1": 0.0, "m2": 0.0, "m3": 0.0, "l_m": 0.0, "u_m": 0.0}
NONE_OF_NAME = {"sphereface": {"margin": 1.0}, "sphereface_r": {"margin": 1.0}, "combined": {**NO_MARGIN, "m1": 1.0}}
SCALED_COSINE = {  # without a margin, the target logit is the scaled cosine
    "arcface", "cosface", "combined", "normface", "sphereface", "sphereface_r", "curricularface", "mv_softmax", "arcnegface",
    "npcface", "adacos", "adaface", "magface", "elasticface", "uniface", "adaptiveface", "kappaface",
}  # fmt: skip
BEYOND = 1.0 + 2.4e-7  # how far fp32 rounding puts the cosine of two equal unit vectors
NAMES = list(MARGINS)
WITH_GRADIENT = [name for name in NAMES if "gradient" in margin_arguments(name)]
SCHEDULED = [name for name in NAMES if "margin_steps" in margin_arguments(name)]


def _build(name: str, **changes: Any) -> Margin:
    known = margin_arguments(name)
    given = {**DEFAULTS, **OF_NAME.get(name, {}), **changes}
    return build_margin(name, **{key: value for key, value in given.items() if key in known})


def _state(margin: Margin, cosine: Tensor, norm: Tensor) -> State:
    """Return the state of samples whose negatives are all far away."""
    state = margin.observe(cosine.detach(), norm.detach(), 1)
    return margin.complete(state, torch.zeros_like(cosine), cosine.new_zeros(2, len(cosine)))


def _value_and_slope(margin: Margin, cosine: Tensor) -> tuple[Tensor, Tensor]:
    leaf, norm = cosine.clone().requires_grad_(), torch.ones_like(cosine)
    logits = margin.target(leaf, norm, _state(margin, cosine.float(), norm.float()))
    (slope,) = torch.autograd.grad(logits.sum(), leaf)
    return logits.detach(), slope


@pytest.mark.parametrize("name", NAMES)
def test_values_and_slopes_are_finite_at_the_poles_and_beyond(name: str) -> None:
    cosine = torch.tensor([1.0, -1.0, BEYOND, -BEYOND, 1.0 - 6e-8, -1.0 + 6e-8])
    assert (cosine.abs() > 1).sum() == 2
    margin = _build(name)
    logits, slope = _value_and_slope(margin, cosine)
    assert torch.isfinite(logits).all()
    assert torch.isfinite(slope).all()
    assert (slope >= 0).all() and (slope[[0, 2, 4]] > 0).all()
    assert slope.max() < 64.0 * 1.35 * 224.0  # scale x m1 x d theta / d cosine at 1 - 1e-5
    negatives = margin.negatives(cosine, torch.ones(6), _state(margin, cosine, torch.ones(6)))
    for part in negatives.logits(cosine[:, None].expand(6, 6)):
        assert part.dtype == torch.float32 and torch.isfinite(part).all()


@pytest.mark.parametrize("name", NAMES)
def test_target_never_falls_when_the_cosine_rises(name: str) -> None:
    cosine = torch.linspace(-1.0, 1.0, 20001, dtype=torch.float64)
    logits, slope = _value_and_slope(_build(name).double(), cosine)
    assert (logits.diff() >= 0).all() and (logits[::100].diff() > 0).all()
    assert (slope >= 0).all()


def _kinks(name: str) -> list[float]:
    """Return the angles at which the formula of the target logit changes."""
    if name in ("combined", "sphereface", "sphereface_r"):  # m1 theta + m2 = pi
        return [(math.pi - (0.2 if name == "combined" else 0.0)) / 1.35]
    return [math.pi - (0.2 if name == "kappaface" else 0.4)]  # theta + m = pi; kappaface begins with half of m


@pytest.mark.parametrize("name", [name for name in NAMES if name != "circle"])  # its weight has no derivative
def test_exact_slope_equals_finite_differences(name: str) -> None:
    margin = _build(name).double()
    theta = torch.linspace(0.05, 3.09, 400, dtype=torch.float64)
    for kink in _kinks(name):
        theta = theta[(theta - kink).abs() > 1e-3]
    cosine, step, norm = theta.cos(), 1e-6, torch.ones_like(theta)
    _, slope = _value_and_slope(margin, cosine)
    state = _state(margin, cosine, norm)
    with torch.no_grad():
        expected = (margin.target(cosine + step, norm, state) - margin.target(cosine - step, norm, state)) / (2 * step)
    # truncation; rounding of logits of size 64: 64 x 2^-53 / step = 7e-9
    torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("circle", "arcnegface")])
def test_derivatives_of_negatives_equal_finite_differences(name: str) -> None:
    margin = _build(name).double()
    own = torch.linspace(-0.99, 0.99, 23, dtype=torch.float64)
    norm = torch.linspace(0.5, 3.0, 23, dtype=torch.float64)
    negatives = margin.negatives(own, norm, _state(margin, own, norm))
    cosine, step = torch.linspace(-0.999, 0.999, 301, dtype=torch.float64)[:, None].expand(301, 23), 1e-6
    _, derivative = negatives.logits(cosine)
    expected = (negatives.logits(cosine + step)[0] - negatives.logits(cosine - step)[0]) / (2 * step)
    smooth = (cosine - negatives.coefficients[4]).abs() > 1e-5  # the function jumps at the threshold
    torch.testing.assert_close(derivative[smooth], expected[smooth], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_straight_through_has_the_same_values_and_the_slope_of_the_scale(name: str) -> None:
    cosine = torch.linspace(-BEYOND, BEYOND, 101)
    scale = 1.0 if name == "sphereface" else 64.0  # the norm, which is 1
    exact, _ = _value_and_slope(_build(name), cosine)
    straight, slope = _value_and_slope(_build(name, gradient="straight_through"), cosine)
    assert torch.equal(straight, exact)
    torch.testing.assert_close(slope, torch.full_like(slope, scale), rtol=4 * FP32_UNIT, atol=0.0)


@pytest.mark.parametrize("name", sorted(SCALED_COSINE))
def test_margin_of_zero_is_the_scaled_cosine(name: str) -> None:
    cosine = torch.linspace(-0.999, 0.999, 101, dtype=torch.float64)
    margin = _build(name, **{**NO_MARGIN, **NONE_OF_NAME.get(name, {})}, scale=30.0)
    scale = 1.0 if name in ("sphereface", "adacos") else 30.0  # the norm; no class known yet
    logits, slope = _value_and_slope(margin.double(), cosine)
    torch.testing.assert_close(logits, scale * cosine)
    torch.testing.assert_close(slope, torch.full_like(slope, scale))


def _logits_of_all(margin: Margin) -> tuple[Tensor, Tensor]:
    """Return the logits of negatives and of targets, for cosines all over [-1, 1]."""
    cosine, norm = torch.linspace(-1.0, 1.0, 401), torch.linspace(0.5, 60.0, 401)
    state = _state(margin, cosine, norm)
    negatives, _ = margin.negatives(cosine, norm, state).logits(cosine[:, None].expand(401, 401))
    return negatives, margin.target(cosine, norm, state).detach()


@pytest.mark.parametrize("name", NAMES)
def test_no_logit_exceeds_the_declared_bounds(name: str) -> None:
    for margin in (_build(name), build_margin(name), _build(name, **{**NO_MARGIN, **NONE_OF_NAME.get(name, {})})):
        margin.prepare(1000, 1000)
        if math.isfinite(margin.logit_bound):
            slack = 8 * FP32_UNIT * margin.logit_bound
            negatives, targets = _logits_of_all(margin)
            assert max(negatives.max(), targets.max()) <= margin.logit_bound + slack
            assert negatives.min() >= margin.lowest_negative - slack
        else:
            assert margin.link == "sum" or name in ("sphereface", "adacos")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("sphereface", "adacos", "sphereface2", "uniface")])
def test_bounds_are_reached_without_a_margin(name: str) -> None:
    """So they are as tight as they can be without knowledge of the batch."""
    margin = _build(name, **{**NO_MARGIN, **NONE_OF_NAME.get(name, {})}, alpha=1.2 if name == "arcnegface" else 0.0)
    if name == "curricularface":
        margin.t.fill_(1.0)
    negatives, targets = _logits_of_all(margin)
    assert max(negatives.max(), targets.max()) == pytest.approx(margin.logit_bound, rel=8 * FP32_UNIT)
    assert negatives.min() == pytest.approx(margin.lowest_negative, rel=8 * FP32_UNIT, abs=8 * FP32_UNIT * margin.scale)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_margins_compute_in_fp32_whatever_comes_in(name: str, dtype: torch.dtype) -> None:
    cosine, norm = torch.linspace(-1.0, 1.0, 33).to(dtype), torch.linspace(0.5, 60.0, 33).to(dtype)
    margin = _build(name)
    with torch.autocast("cpu", torch.bfloat16):
        logits, slope = _value_and_slope(margin, cosine)
        state = _state(margin, cosine, norm)
        negatives = margin.negatives(cosine, norm, state).logits(cosine[:, None].expand(33, 33))
    expected, _ = _value_and_slope(margin, cosine.float())
    assert logits.dtype == torch.float32
    assert slope.dtype == dtype
    assert torch.equal(logits, expected)
    state = _state(margin, cosine.float(), norm.float())
    whole = margin.negatives(cosine.float(), norm.float(), state).logits(cosine.float()[:, None].expand(33, 33))
    assert all(torch.equal(part, other) for part, other in zip(negatives, whole, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_give_no_logits(name: str) -> None:
    margin, none = _build(name), torch.empty(0)
    state = _state(margin, none, none)
    assert margin.target(none, none, state).shape == (0,)
    assert margin.negatives(none, none, state).logits(torch.empty(3, 0))[0].shape == (3, 0)


@pytest.mark.parametrize("name", NAMES)
def test_no_method_makes_the_host_wait_for_the_device(name: str) -> None:
    margin, cosine = _build(name), torch.linspace(-0.9, 0.9, 9).requires_grad_()
    norm = torch.linspace(0.5, 60.0, 9).requires_grad_()
    margin.prepare(100, 100)
    with Syncs() as syncs:
        margin.at_step(2)
        state = _state(margin, cosine, norm)
        margin.negatives(cosine.detach(), norm.detach(), state).logits(cosine.detach()[:, None].expand(9, 9))
        total = margin.target(cosine, norm, state).sum()
        for more in (margin.penalty(norm), margin.negative_offset(state), margin.negative_scale(norm, state)):
            total = total + more.sum() if isinstance(more, Tensor) else total
        total.backward()
        margin.commit([state, state], torch.tensor(True))
        assert syncs.found == []
        cosine.detach()[0].item()
    assert len(syncs.found) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_not_good_leaves_all_buffers_as_they_are(name: str) -> None:
    margin, cosine, norm = _build(name), torch.linspace(-0.5, 0.9, 9), torch.linspace(5.0, 60.0, 9)
    margin.prepare(100, 100)
    before = copy.deepcopy(margin.state_dict())
    state = margin.complete(margin.observe(cosine, norm, 1), torch.full((9,), 30.0), torch.ones(2, 9))
    assert all(torch.equal(value, before[key]) for key, value in margin.state_dict().items())  # observe changes nothing
    margin.commit([state], torch.tensor(False))
    assert all(torch.equal(value, before[key]) for key, value in margin.state_dict().items())
    other = copy.deepcopy(margin)
    margin.commit([state], torch.tensor(True))
    other.commit([state])
    buffers = dict(margin.named_buffers())
    assert all(not torch.equal(value, before[key]) for key, value in buffers.items())
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in margin.state_dict().items())
    assert set(buffers) == {"curricularface": {"t"}, "adacos": {"running_scale"}, "adaface": {"mean", "std"}}.get(name, set())


@pytest.mark.parametrize("name", SCHEDULED)
def test_a_schedule_raises_the_margin_linearly(name: str) -> None:
    cosine = torch.linspace(-0.9, 0.9, 21)
    margin, constant = _build(name, margin_start=0.25, margin_steps=4), _build(name)
    logits = []
    for step in range(7):
        margin.at_step(step)
        assert margin.share == pytest.approx((0.25, 0.4375, 0.625, 0.8125, 1.0, 1.0, 1.0)[step])
        if name == "sphereface":
            constant.at_step(step)
        logits.append(_value_and_slope(margin, cosine)[0])
    if name == "sphereface":
        return
    full, _ = _value_and_slope(constant, cosine)
    assert torch.equal(logits[5], full) and torch.equal(logits[4], full)
    arguments = {**DEFAULTS, **OF_NAME.get(name, {})}
    begin = {key: 0.25 * arguments.get(key, margin_arguments(name).get(key, 0.0)) for key in NO_MARGIN}
    for key in {"combined": ["m1"], "sphereface_r": ["margin"]}.get(name, []):
        begin[key] = 1.0 + 0.25 * 0.35
    first, norm = _build(name, **begin), torch.ones_like(cosine)
    torch.testing.assert_close(logits[0], _value_and_slope(first, cosine)[0])
    assert not torch.equal(logits[0], full)
    margin.at_step(0)
    negatives, expected = (one.negatives(cosine, norm, _state(one, cosine, norm)) for one in (margin, first))
    torch.testing.assert_close(negatives.coefficients, expected.coefficients)


def test_sphereface_begins_with_the_cosine_and_anneals_by_the_steps_number() -> None:
    margin, cosine, norm = _build("sphereface", margin=4.0), torch.linspace(-0.9, 0.9, 9), torch.full((9,), 3.0)
    psi = build_margin("combined", scale=3.0, m1=4.0, m2=0.0, m3=0.0).target(cosine, norm)
    for step, weight in ((1, 1000 / 1.12), (100, 1000 / 13), (10_000, 5.0)):
        margin.at_step(step)
        torch.testing.assert_close(margin.target(cosine, norm, {}), (weight * 3 * cosine + psi) / (1 + weight))
    torch.testing.assert_close(_build("sphereface", margin=4.0, annealed=False).target(cosine, norm, {}), psi)


def test_elasticface_draws_by_the_seed_from_the_normal_distribution() -> None:
    many, norm = torch.zeros(100_000), torch.ones(100_000)
    for arguments, mean, std in (({}, 0.5, 0.05), ({"kind": "cos"}, 0.35, 0.05), ({"margin": 0.2, "std": 0.01}, 0.2, 0.01)):
        margin = build_margin("elasticface", **arguments)
        draws = margin.observe(many, norm, 7)["margin"]
        assert draws.mean() == pytest.approx(mean, abs=4 * std / math.sqrt(100_000))
        assert draws.std() == pytest.approx(std, rel=4 / math.sqrt(200_000))
        assert ((draws - mean).abs() < 2 * std).float().mean() == pytest.approx(0.9545, abs=0.003)
        assert torch.equal(draws, margin.observe(many, norm, 7)["margin"])
        assert not torch.equal(draws, margin.observe(many, norm, 8)["margin"])
    wide = build_margin("elasticface", margin=0.1, std=0.5).observe(many, norm, 7)["margin"]
    assert (wide == 0).any() and (wide == torch.tensor(math.pi / 2)).any()
    assert build_margin("elasticface", plus=True).std == 0.0175
    assert build_margin("elasticface", kind="cos", plus=True).std == 0.02


@pytest.mark.parametrize("name", NAMES)
def test_margins_without_a_function_of_their_own_have_linear_negatives(name: str) -> None:
    margin, own, norm = _build(name), torch.linspace(-0.5, 0.9, 5), torch.linspace(1.0, 2.0, 5)
    state = _state(margin, own, norm)
    negatives = margin.negatives(own, norm, state)
    assert margin.linear_negatives is (negatives.kind == "linear" and name != "uniface")
    assert margin.constant_scale is (name not in ("sphereface", "adacos"))
    if margin.linear_negatives:
        cosine = torch.randn(3, 5)
        assert torch.equal(negatives.logits(cosine)[0], margin.negative_scale(norm, state) * cosine)


def test_the_scale_of_adacos_is_constant_only_if_it_is_fixed() -> None:
    fixed = build_margin("adacos", dynamic=False)
    fixed.prepare(1000, 1000)
    assert fixed.constant_scale and fixed.logit_bound == fixed.negative_scale(torch.ones(1), {}) == fixed.scale
    assert not fixed.state_dict()


def test_margin_that_bends_negatives_is_not_linear() -> None:
    class Bent(Margin):
        def negatives(self, cosine: Tensor, norm: Tensor, state: State) -> Any:
            return super().negatives(cosine, norm, state)

    assert not Bent().linear_negatives
    with pytest.raises(NotImplementedError, match="Bent must define target"):
        Bent().target(torch.zeros(1), torch.ones(1))
