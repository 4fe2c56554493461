"""Every loss by its name: the errors of its arguments, and values, gradients and states against the slow references."""

import math
from typing import Any

import pytest
import torch
from dense_margin import DenseMargin
from loss_cases import CASES, STATES, first_known
from loss_references_other import sphereface2_bias
from published_losses import DIM, LABELS, NUM_CLASSES, make_inputs
from rounding import FP32_UNIT, head_bounds, rounding_bound

from losses import MARGINS, build_margin, margin_arguments
from losses.elasticface import ElasticFace

pytestmark = pytest.mark.numeric


def _composition(name: str) -> dict[str, Any]:
    """Return what a head may leave out and weigh."""
    if name == "whole":
        return {}
    active = torch.ones(NUM_CLASSES, dtype=torch.bool)
    active[[1, 8]] = False
    weights = torch.linspace(-0.5, 1.5, NUM_CLASSES, dtype=torch.float64)
    return {"active": active, "limit": 0.35, "log_weights": weights}


@pytest.mark.parametrize("composed", ["whole", "composed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_state_equal_the_reference_over_three_steps(case: str, dtype: torch.dtype, composed: str) -> None:
    reference, arguments, steep = CASES[case]
    margin = build_margin(case.partition(",")[0], **arguments).to(dtype)
    dense, composition = DenseMargin(margin, NUM_CLASSES, DIM, dtype), _composition(composed)
    known = first_known(case, margin, NUM_CLASSES, DIM)
    if case == "adaptiveface":  # margins of their own, which the reference shares
        with torch.no_grad():
            dense.numbers["margin"].copy_(torch.linspace(0.1, 0.6, NUM_CLASSES))
        known["margins"] = dense.numbers["margin"].detach().double().requires_grad_()
    for inputs in ("easy", "mixed", "beyond"):
        embeddings, centres, labels = make_inputs(inputs)
        leaves = [embeddings.to(dtype).requires_grad_(), centres.to(dtype).requires_grad_()]
        of_reference_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
        loss = dense.step([(leaves[0], labels)], leaves[1], **composition)
        if isinstance(margin, ElasticFace):  # the seed that the emulator hands on; the reference puts the draws into order
            drawn = margin.observe(torch.zeros(len(labels)), torch.ones(len(labels)), 1000 * (dense.steps))["margin"]
            known["draws"] = drawn.double()
        expected, state = reference(*of_reference_leaves, labels, **known, **composition)
        known.update({key: value for key, value in state.items() if key != "margins"})
        # coefficients of negatives and trained numbers are fp32 in either case
        of_loss, of_gradient = head_bounds(max(steep, 2.0) * margin.scale, DIM if dtype == torch.float32 else 1, len(LABELS))
        assert abs(loss.item() - expected.item()) <= of_loss
        trained = [known[key] for key in ("bias", "margins") if key in known]
        of_classes = [value for value in dense.numbers.values() if value.requires_grad]
        gradients = torch.autograd.grad(loss, [*leaves, *margin.parameters(), *of_classes])
        expected_gradients = torch.autograd.grad(expected, [*of_reference_leaves, *trained])
        for gradient, other in zip(gradients, expected_gradients, strict=True):
            assert (gradient.double() - other).norm() <= of_gradient * other.norm()
        for key, buffer in STATES.items():
            if key in state and case != "adacos, fixed":
                assert getattr(margin, buffer).item() == pytest.approx(state[key], rel=max(1e-7, of_loss / 4))
        for key in {"sums", "counts"} & set(state):
            bound = rounding_bound(torch.float32, DIM, len(LABELS))
            torch.testing.assert_close(dense.numbers[key].double(), state[key], rtol=0.0, atol=bound)
    assert len(list(margin.buffers())) == len([key for key in state if key in STATES and case != "adacos, fixed"])


@pytest.mark.parametrize("name", ["curricularface", "adaface", "adacos"])
def test_accumulation_stores_the_one_update_of_all_its_samples(name: str) -> None:
    """The mean of two halves' standard deviations is not that of the whole; everything else is as of the whole batch."""
    embeddings, centres, labels = make_inputs("easy")
    whole, halves = (build_margin(name).double() for _ in range(2))
    DenseMargin(whole, NUM_CLASSES).step([(embeddings.double(), labels)], centres.double())
    parts = list(zip(embeddings.double().split(4), labels.split(4), strict=True))
    DenseMargin(halves, NUM_CLASSES).step(parts, centres.double())
    expected = whole.state_dict()
    if name == "adaface":
        of_halves = torch.stack([part.norm(dim=1).clamp(1e-3, 100.0).std() for part, _ in parts])
        expected["std"] = 0.01 * of_halves.mean() + 0.99 * 100.0
    for key, value in halves.state_dict().items():
        torch.testing.assert_close(value, expected[key])


@pytest.mark.parametrize("num_classes", [1, 2, 3, 1000, 10_000_000])
def test_first_numbers_follow_from_the_number_of_classes(num_classes: int) -> None:
    uniform, adaptive, binary = (build_margin(name) for name in ("uniface", "adacos", "sphereface2"))
    for margin in (uniform, adaptive, binary):
        margin.prepare(10 * num_classes, num_classes)
    assert uniform.threshold.item() == pytest.approx(math.log(10 * num_classes))
    assert adaptive.scale == pytest.approx(math.sqrt(2) * math.log(10 * num_classes - 1))
    assert adaptive.running_scale.item() == pytest.approx(adaptive.scale)
    if num_classes > 1:
        assert binary.bias.item() == pytest.approx(sphereface2_bias(num_classes), rel=1e-6)
    for few in (1, 2):
        adaptive.prepare(few, few)
        assert adaptive.scale == 1.0


@pytest.mark.parametrize("balance", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("margin", [0.0, 0.6])  # near 1 the two pulls are equal, to rounding, over a range of b
def test_first_bias_of_sphereface2_balances_target_and_negatives(balance: float, margin: float) -> None:
    loss = build_margin("sphereface2", balance=balance, margin=margin)
    for num_active in (2, 3, 20, 100_000):
        loss.prepare(10**9, num_active)
        expected = sphereface2_bias(num_active, margin=margin, balance=balance)
        assert loss.bias.item() == pytest.approx(expected, rel=4 * FP32_UNIT, abs=1e-5)


def test_adacos_never_turns_its_scale_around() -> None:
    margin = build_margin("adacos")
    margin.prepare(3, 3)
    cosine = torch.full((4,), 0.9)
    state = margin.complete(margin.observe(cosine, cosine), torch.full((4,), -5.0), torch.zeros(2, 4))
    margin.commit([state])
    assert margin.running_scale.item() == 1.0
    state = margin.complete(margin.observe(cosine, cosine), torch.full((4,), -torch.inf), torch.zeros(2, 4))
    margin.commit([state])
    assert margin.running_scale.item() == 1.0


def test_adaface_takes_no_deviation_from_one_sample() -> None:
    margin = build_margin("adaface", alpha=0.5)
    margin.commit([margin.observe(torch.zeros(1), torch.tensor([30.0]))])
    assert (margin.mean.item(), margin.std.item()) == (25.0, 100.0)


@pytest.mark.parametrize("name", list(MARGINS))
def test_build_margin_hands_every_argument_over(name: str) -> None:
    given: dict[str, Any] = {}
    for key, default in margin_arguments(name).items():
        if isinstance(default, float):
            given[key] = {"u_m": 0.9, "u_a": 90.0, "margin_start": 0.5, "weight": 2.0}.get(key, abs(default) * 1.0625)
        elif isinstance(default, bool):
            given[key] = not default
    if "margin_steps" in margin_arguments(name):
        given["margin_steps"] = 7
    given |= {"margin": 0.25, "std": 0.125} if name == "elasticface" else {}
    margin = build_margin(name, **given)
    assert type(margin) is MARGINS[name]
    assert {key: getattr(margin, key) for key in given} == pytest.approx(given)
    assert all(not math.isnan(value.item()) for value in margin.state_dict().values())


def test_unknown_name_is_refused_with_the_nearest_and_the_list() -> None:
    rule = rf"^name must be one of {', '.join(list(MARGINS))}, got 'arc_face'. Did you mean arcface\?"
    with pytest.raises(ValueError, match=rule):
        build_margin("arc_face")
    with pytest.raises(ValueError, match=r"got 'triplet'\.$"):
        build_margin("triplet")


WRONG = [
    ("arcface", "scale", 0.0), ("cosface", "scale", math.inf), ("combined", "scale", math.nan), ("arcface", "margin", 28.6),
    ("arcface", "margin", -0.1), ("cosface", "margin", 1.0), ("cosface", "margin", math.nan), ("combined", "m1", 0.9),
    ("combined", "m1", math.inf), ("combined", "m2", 2.0), ("combined", "m3", -0.1), ("sphereface", "margin", 0.5),
    ("sphereface_r", "margin", 11.0), ("curricularface", "margin", 28.6), ("curricularface", "alpha", 1.5),
    ("mv_softmax", "t", -0.1), ("mv_softmax", "margin", 1.0), ("npcface", "margin", 2.0), ("npcface", "m0", 2.0),
    ("npcface", "m1", 1.3), ("npcface", "t", math.inf), ("npcface", "a", 1.5), ("arcnegface", "margin", -1.0),
    ("arcnegface", "alpha", 0.0), ("arcnegface", "sigma", 0.0), ("circle", "margin", 1.0), ("adaface", "margin", 1.0),
    ("adaface", "h", -1.0), ("adaface", "alpha", math.nan), ("magface", "l_a", 0.0), ("magface", "u_a", 10.0),
    ("magface", "l_m", 2.0), ("magface", "u_m", 0.4), ("magface", "weight", -1.0), ("elasticface", "margin", 28.6),
    ("elasticface", "std", 0.6), ("li_arcface", "margin", 28.6), ("qamface", "margin", 28.6), ("sphereface2", "margin", 1.0),
    ("sphereface2", "t", 0.5), ("sphereface2", "balance", 1.0), ("uniface", "margin", 1.0), ("uniface", "weight", 0.0),
    ("arcface", "margin_start", 1.5), ("circle", "margin_steps", 10),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "value"), WRONG)
def test_impossible_number_is_refused_with_key_and_value(name: str, key: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{key} must be .*, got {value}"):
        build_margin(name, **{key: value})


def test_rules_name_the_loss_its_kind_and_the_other_key() -> None:
    for name, arguments, rule in (
        ("cosface", {"margin": 2}, r"margin must be in \[0, 1\) for cosface \(a cosine, not an angle\), got 2"),
        ("mv_softmax", {"kind": "arc", "margin": 20}, r"in \[0, pi / 2\] for mv_softmax of kind arc \(radians, not degrees\)"),
        ("mv_softmax", {"kind": "cos"}, "kind must be one of am, arc, got 'cos'"),
        ("elasticface", {"kind": "am"}, "kind must be one of arc, cos, got 'am'"),
        ("elasticface", {"kind": "cos", "margin": -0.5}, "for elasticface of kind cos, or -1 for the published one"),
        ("magface", {"u_a": 5}, "u_a must be a number above 10, which is l_a, got 5"),
        ("magface", {"u_m": 0.2}, "u_m must be l_m or more .*, got 0.2 with l_m=0.45"),
        ("npcface", {"m1": 1.4}, r"m1 must be in \[0, pi / 2 - m0\] for npcface .*, got 1.4 with m0=0.4"),
        ("arcface", {"margin_start": 0.5}, "margin_steps must be 1 or more where margin_start is below 1, got 0; set in how"),
        ("arcface", {"margin_steps": 5}, "margin_steps must be 0 where margin_start is 1, got 5; set with which share"),
        ("arcface", {"gradient": "detached"}, r"gradient must be one of exact, straight_through, got 'detached'"),
    ):
        with pytest.raises(ValueError, match=rule):
            build_margin(name, **arguments)


def test_bounds_that_are_asked_for_once_hold_in_every_step_of_a_schedule() -> None:
    margin = build_margin("circle", scale=150.0, margin=0.9, margin_start=0.0, margin_steps=4)
    highest, lowest, cosine = margin.logit_bound, margin.lowest_negative, torch.linspace(-1.0, 1.0, 201)
    for step in range(6):
        margin.at_step(step)
        negatives, _ = margin.negatives(cosine, cosine, {}).logits(cosine[:, None].expand(201, 201))
        slack = 8 * FP32_UNIT * highest
        assert max(negatives.max(), margin.target(cosine, cosine, {}).max()) <= highest + slack
        assert negatives.min() >= lowest - slack


def test_first_bias_of_sphereface2_is_half_way_if_both_sides_weigh_the_same() -> None:
    loss = build_margin("sphereface2", scale=1e4, balance=0.5, t=1.0)
    loss.prepare(2, 2)
    assert loss.bias.item() == 0.0
