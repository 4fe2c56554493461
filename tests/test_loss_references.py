"""The slow references of the losses against numbers worked out by hand, finite differences, and torch's cross entropy."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loss_references import arcface, circle, combined, cosface, cosines, li_arcface, normface, qamface, sphereface, sphereface_r
from loss_references_adaptive import adacos, adaface, arcnegface, curricularface, magface, mv_softmax, npcface
from loss_references_other import adaptiveface, elasticface, kappaface, kappaface_psi, sphereface2, sphereface2_bias, uniface
from torch import Tensor

pytestmark = pytest.mark.numeric

CENTRES = (0.0, 1.2, 2.9)  # angles in the plane
NEAR, FAR = 0.7, 2.8  # a sample at angle 0.7 is 0.7, 0.5 and 2.2 from them, one at 2.8 is 2.8, 1.6 and 0.1


def _plane(angles: tuple[float, ...], lengths: tuple[float, ...]) -> Tensor:
    rows = [[a * math.cos(angle), a * math.sin(angle)] for angle, a in zip(angles, lengths, strict=True)]
    return torch.tensor(rows, dtype=torch.float64)


def _loss(function: Callable, angles: tuple[float, ...], lengths: tuple[float, ...], **arguments: Any) -> tuple[float, dict]:
    """Return loss and state; all samples are of class 0."""
    labels = torch.zeros(len(angles), dtype=torch.long)
    loss, state = function(_plane(angles, lengths), _plane(CENTRES, (0.5, 2.0, 1.0)), labels, **arguments)
    return loss.item(), state


def _ce(target: float, *negatives: float) -> float:
    return math.log(sum(math.exp(z - target) for z in (target, *negatives)))


def _softplus(z: float) -> float:
    return math.log1p(math.exp(z))


C = math.cos
T = 0.1 * (C(0.7) + C(2.8)) / 2 + 0.9 * 0.5  # CurricularFace's t after a batch, from 0.5
M = 0.4 + 0.1 * (C(1.6) + C(0.1))  # NPCFace's margin of the sample far
DRAWS = torch.tensor([0.6, 0.3], dtype=torch.float64)
PLAIN = (4 * C(0.5), 4 * C(2.2)), (4 * C(1.6), 4 * C(0.1))  # negatives of the sample near and of the one far
FIXED = {  # function, arguments, logits of the two samples' class (theta = 0.7 and 2.8), their negatives
    "normface": (normface, {}, (4 * C(0.7), 4 * C(2.8)), PLAIN),
    "cosface": (cosface, {"margin": 0.4}, (4 * C(0.7) - 1.6, 4 * C(2.8) - 1.6), PLAIN),
    "arcface": (arcface, {"margin": 0.5}, (4 * C(1.2), 4 * (C(2.8) - 0.5 * math.sin(0.5))), PLAIN),  # 2.8 + 0.5 > pi
    "combined": (  # 1.5 x 2.8 + 0.1 = 4.3 is between pi and 2 pi
        combined,
        {"m1": 1.5, "m2": 0.1, "m3": 0.2},
        (4 * (C(1.15) - 0.2), 4 * (-C(4.3) - 2 - 0.2)),
        PLAIN,
    ),
    "sphereface": (  # norms 4 and 4; 4 x 2.8 = 11.2 is between 3 pi and 4 pi; lambda = 1000 / 1.12 in the first step
        sphereface,
        {},
        (4 * (1000 / 1.12 * C(0.7) + C(2.8)) / (1 + 1000 / 1.12), 4 * (1000 / 1.12 * C(2.8) - C(11.2) - 6) / (1 + 1000 / 1.12)),
        PLAIN,
    ),
    "sphereface, lambda 5": (
        sphereface,
        {"steps": 9999},
        (4 * (5 * C(0.7) + C(2.8)) / 6, 4 * (5 * C(2.8) - C(11.2) - 6) / 6),
        PLAIN,
    ),
    "sphereface, not annealed": (sphereface, {"annealed": False}, (4 * C(2.8), 4 * (-C(11.2) - 6)), PLAIN),
    "sphereface_r": (sphereface_r, {}, (4 * C(1.19), 4 * (-C(4.76) - 2)), PLAIN),
    "circle": (  # cos 2.2 = -0.59 is below -0.25, so its bracket is 0
        circle,
        {"margin": 0.25},
        (4 * (1.25 - C(0.7)) * (C(0.7) - 0.75), 4 * (1.25 - C(2.8)) * (C(2.8) - 0.75)),
        ((4 * (C(0.5) ** 2 - 1 / 16), 0.0), (4 * (C(1.6) ** 2 - 1 / 16), 4 * (C(0.1) ** 2 - 1 / 16))),
    ),
    "li_arcface": (
        li_arcface,
        {"margin": 0.45},
        (4 * (1 - 2.3 / math.pi), 4 * (1 - 6.5 / math.pi)),
        ((4 * (1 - 1.0 / math.pi), 4 * (1 - 4.4 / math.pi)), (4 * (1 - 3.2 / math.pi), 4 * (1 - 0.2 / math.pi))),
    ),
    "qamface": (
        qamface,
        {"margin": 0.5},
        (4 * (2 * math.pi - 1.2) ** 2, 4 * (2 * math.pi - 3.3) ** 2),
        (
            (4 * (2 * math.pi - 0.5) ** 2, 4 * (2 * math.pi - 2.2) ** 2),
            (4 * (2 * math.pi - 1.6) ** 2, 4 * (2 * math.pi - 0.1) ** 2),
        ),
    ),
    "mv_softmax, am": (  # near: cos 0.5 is above cos 0.7 - 0.35 = 0.41, cos 2.2 is not; far: both are above
        mv_softmax,
        {"margin": 0.35, "t": 0.2},
        (4 * C(0.7) - 1.4, 4 * C(2.8) - 1.4),
        ((4.8 * C(0.5) + 0.8, 4 * C(2.2)), (4.8 * C(1.6) + 0.8, 4.8 * C(0.1) + 0.8)),
    ),
    "mv_softmax, arc": (
        mv_softmax,
        {"kind": "arc", "margin": 0.5, "t": 0.2},
        (4 * C(1.2), 4 * (C(2.8) - 0.5 * math.sin(0.5))),
        ((4.8 * C(0.5) + 0.8, 4 * C(2.2)), (4.8 * C(1.6) + 0.8, 4.8 * C(0.1) + 0.8)),
    ),
    "curricularface": (
        curricularface,
        {"margin": 0.5, "alpha": 0.1, "t": 0.5},
        (4 * C(1.2), 4 * (C(2.8) - 0.5 * math.sin(0.5))),
        ((4 * C(0.5) * (T + C(0.5)), 4 * C(2.2)), (4 * C(1.6) * (T + C(1.6)), 4 * C(0.1) * (T + C(0.1)))),
    ),
    "npcface": (  # margins 0.4 + 0.2 mean of the hard cosines: cos 0.5 | cos 1.6 and cos 0.1; 2.8 + 0.5 > pi
        npcface,
        {},
        (4 * C(1.1 + 0.2 * C(0.5)), 4 * (C(2.8) - M * math.sin(M))),
        ((4.4 * C(0.5) + 0.8, 4 * C(2.2)), (4.4 * C(1.6) + 0.8, 4.4 * C(0.1) + 0.8)),
    ),
    "elasticface": (elasticface, {"draws": DRAWS, "kind": "cos"}, (4 * C(0.7) - 2.4, 4 * C(2.8) - 1.2), PLAIN),
    "elasticface, plus": (  # the far sample gets the larger draw
        elasticface,
        {"draws": DRAWS, "plus": True},
        (4 * C(1.0), 4 * (C(2.8) - 0.6 * math.sin(0.6))),
        PLAIN,
    ),
    "kappaface": (
        kappaface,
        {"psi": torch.tensor([0.25, 0.5, 1.0]), "sums": torch.zeros(3, 2), "counts": torch.zeros(3)},
        (4 * C(0.9), 4 * C(3.0)),
        PLAIN,
    ),
}


@pytest.mark.parametrize("case", FIXED)
def test_softmax_losses_have_the_logits_worked_out_by_hand(case: str) -> None:
    function, arguments, targets, negatives = FIXED[case]
    scale = {} if function is sphereface else {"scale": 4.0}
    loss, _ = _loss(function, (NEAR, FAR), (4.0, 4.0), **scale, **arguments)
    assert loss == pytest.approx((_ce(targets[0], *negatives[0]) + _ce(targets[1], *negatives[1])) / 2)


def test_arcnegface_weighs_negatives_by_their_distance_from_the_target() -> None:
    logits = [4 * C(1.2)]
    for c in (C(0.5), C(2.2)):
        q = 1.2 * math.exp(-((c - C(1.2)) ** 2) / 2)
        logits.append(4 * (q * c + q - 1))
    assert _loss(arcnegface, (NEAR,), (3.0,), scale=4.0)[0] == pytest.approx(_ce(*logits))


def test_adacos_takes_its_scale_from_the_batch() -> None:
    s = math.sqrt(2) * math.log(2)
    assert _loss(adacos, (NEAR,), (3.0,), dynamic=False)[0] == pytest.approx(_ce(s * C(0.7), s * C(0.5), s * C(2.2)))
    average = (math.exp(s * C(0.5)) + math.exp(s * C(2.2)) + math.exp(s * C(1.6)) + math.exp(s * C(0.1))) / 2
    new = math.log(average) / C(0.7)  # the lower median of 0.7 and 2.8, below pi / 4
    loss, state = _loss(adacos, (NEAR, FAR), (3.0, 5.0))
    expected = _ce(new * C(0.7), new * C(0.5), new * C(2.2)), _ce(new * C(2.8), new * C(1.6), new * C(0.1))
    assert (loss, state["scale"]) == pytest.approx((sum(expected) / 2, new))
    assert _loss(adacos, (FAR,), (5.0,), scale=new)[1]["scale"] == pytest.approx(
        math.log(math.exp(new * C(1.6)) + math.exp(new * C(0.1))) / C(math.pi / 4)
    )


def test_adaface_turns_norms_into_margins() -> None:
    mean, std = 0.1 * 30 + 0.9 * 20, 0.1 * math.sqrt(200) + 0.9 * 10  # of norms 20 and 40, and of the state 20 and 10
    near, far = (max(-1, min(1, 0.333 * (a - mean) / (std + 1e-3))) for a in (20, 40))
    expected = (
        _ce(4 * (C(0.7 - 0.4 * near) - 0.4 - 0.4 * near), 4 * C(0.5), 4 * C(2.2)),
        _ce(4 * (C(2.8 - 0.4 * far) - 0.4 - 0.4 * far), 4 * C(1.6), 4 * C(0.1)),
    )
    loss, state = _loss(adaface, (NEAR, FAR), (20.0, 40.0), scale=4.0, alpha=0.1, std=10.0)
    assert (loss, state["mean"], state["std"]) == pytest.approx((sum(expected) / 2, mean, std))


def test_adaface_clips_norms_and_angles() -> None:
    loss, state = _loss(adaface, (0.1, FAR), (500.0, 1e-5), scale=4.0, alpha=1.0, h=10.0)
    expected = _ce(4 * (1 - 0.8), 4 * C(1.1), 4 * C(2.8)), _ce(4 * (C(2.8) - 0.4 * math.sin(0.4)), 4 * C(1.6), 4 * C(0.1))
    assert loss == pytest.approx(sum(expected) / 2)
    assert state["mean"] == pytest.approx((100 + 1e-3) / 2)


def test_magface_gives_long_embeddings_a_larger_margin_and_a_smaller_penalty() -> None:
    for length, a in ((60.0, 60.0), (1.0, 10.0), (1000.0, 110.0)):
        m = 0.45 + 0.35 * (a - 10) / 100
        expected = _ce(4 * C(0.7 + m), 4 * C(0.5), 4 * C(2.2)) + 35 * (1 / a + a / 110**2)
        assert _loss(magface, (NEAR,), (length,), scale=4.0)[0] == pytest.approx(expected)


def test_adaptiveface_rewards_large_margins_of_all_classes_and_clips_them() -> None:
    loss, state = _loss(adaptiveface, (NEAR,), (3.0,), margins=torch.tensor([0.25, -0.5, 1.5]), scale=4.0)
    assert loss == pytest.approx(_ce(4 * (C(0.7) - 0.25), 4 * C(0.5), 4 * C(2.2)) + 70 * (1 - 1.25 / 3))
    assert state["margins"].tolist() == [0.25, 0.0, 1.0]


def test_kappaface_gives_loose_and_small_classes_a_larger_margin() -> None:
    kappas = [r * (2 - r**2) / (1 - r**2) for r in (0.5, 0.8)]
    mean = sum(kappas) / 2
    deviation = math.sqrt(sum((kappa - mean) ** 2 for kappa in kappas))  # over C - 1 = 1
    expected = [
        0.7 * (1 - 1 / (1 + math.exp(-0.4 * (kappa - mean) / deviation))) + 0.3 * (C(math.pi * n / 10.5) + 1) / 2
        for kappa, n in zip(kappas, (4, 10), strict=True)
    ]
    psi = kappaface_psi(torch.tensor([0.5, 0.8], dtype=torch.float64), torch.tensor([4, 10]), 2)
    assert psi.tolist() == pytest.approx(expected)
    assert psi[0] > psi[1]
    _, state = _loss(
        kappaface, (NEAR, FAR), (3.0, 5.0), psi=torch.ones(3), sums=torch.full((3, 2), 0.5), counts=torch.tensor([2, 3, 4])
    )
    assert state["sums"][0].tolist() == pytest.approx([0.5 + C(0.7) + C(2.8), 0.5 + math.sin(0.7) + math.sin(2.8)])
    assert state["sums"][1:].unique().tolist() == [0.5] and state["counts"].tolist() == [4, 3, 4]


def test_losses_without_a_softmax_are_sums_of_logistic_losses() -> None:
    def g(angle: float) -> float:
        return 2 * ((C(angle) + 1) / 2) ** 3 - 1

    bias = torch.tensor(0.5, dtype=torch.float64)
    expected = 0.7 * _softplus(-4 * (g(0.7) - 0.4) - 0.5)
    expected += 0.3 * (_softplus(4 * (g(0.5) + 0.4) + 0.5) + _softplus(4 * (g(2.2) + 0.4) + 0.5))
    assert _loss(sphereface2, (NEAR,), (3.0,), scale=4.0, bias=bias)[0] == pytest.approx(expected)
    weights = torch.tensor([0.0, math.log(3), 0.0], dtype=torch.float64)
    expected = _softplus(-4 * (C(0.7) - 0.4) + 0.5) + 3 * _softplus(4 * C(0.5) - 0.5) + _softplus(4 * C(2.2) - 0.5)
    assert _loss(uniface, (NEAR,), (3.0,), scale=4.0, bias=bias, log_weights=weights)[0] == pytest.approx(expected)


@pytest.mark.parametrize("num_classes", [3, 1000, 10_000_000])
def test_first_bias_of_sphereface2_solves_its_quadratic_equation(num_classes: int) -> None:
    z = 0.7 / (0.3 * (num_classes - 1))
    positive, negative = 40 * (2 * 0.5**3 - 1 - 0.4), 40 * (2 * 0.5**3 - 1 + 0.4)
    beta = 2 * z * math.exp(-negative) / (1 - z + math.sqrt((1 - z) ** 2 + 4 * z * math.exp(positive - negative)))
    assert sphereface2_bias(num_classes) == pytest.approx(math.log(beta))


def test_sub_centres_give_the_largest_cosine_and_only_it_has_a_gradient() -> None:
    centres = torch.stack([_plane((0.0, 2.0), (1.0, 2.0)), _plane((1.2, -2.5), (3.0, 1.0))]).requires_grad_()
    embedding = _plane((NEAR,), (3.0,))
    torch.testing.assert_close(cosines(embedding, centres).detach(), torch.tensor([[C(0.7), C(0.5)]], dtype=torch.float64))
    loss, _ = arcface(embedding, centres, torch.tensor([0]), scale=4.0)
    assert loss.item() == pytest.approx(_ce(4 * C(1.2), 4 * C(0.5)))
    (gradient,) = torch.autograd.grad(loss, centres)
    assert (gradient[:, 0] != 0).all() and (gradient[:, 1] == 0).all()


def _problem() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    embeddings = 4 * torch.randn(4, 4, generator=generator, dtype=torch.float64)
    centres = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    return embeddings.requires_grad_(), centres.requires_grad_(), torch.tensor([0, 2, 3, 2])


SMOOTH = {  # nothing is held constant in the derivative
    "normface": (normface, {"scale": 4.0}),
    "cosface": (cosface, {"scale": 4.0}),
    "arcface": (arcface, {"scale": 4.0}),
    "combined": (combined, {"scale": 4.0, "m1": 1.35}),
    "sphereface": (sphereface, {"steps": 10**6}),
    "magface": (magface, {"scale": 4.0, "l_a": 2.0, "u_a": 50.0}),
    "mv_softmax": (mv_softmax, {"scale": 4.0, "kind": "arc"}),
    "curricularface, t constant": (curricularface, {"scale": 4.0, "t": 0.3, "alpha": 0.0}),
    "li_arcface": (li_arcface, {"scale": 4.0}),
    "qamface": (qamface, {"scale": 0.5}),
    "sphereface2": (sphereface2, {"scale": 4.0, "bias": torch.tensor(0.3, dtype=torch.float64, requires_grad=True)}),
    "uniface": (uniface, {"scale": 4.0, "bias": torch.tensor(1.3, dtype=torch.float64, requires_grad=True)}),
    "adaptiveface": (adaptiveface, {"margins": torch.linspace(0.1, 0.5, 4, dtype=torch.float64).requires_grad_()}),
    "focal": (cosface, {"scale": 4.0, "focal": 2.0, "label_smoothing": 0.1}),
}


@pytest.mark.parametrize("case", SMOOTH)
def test_gradients_equal_finite_differences(case: str) -> None:
    function, arguments = SMOOTH[case]
    embeddings, centres, labels = _problem()
    learned = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}

    def loss(x: Tensor, w: Tensor, *parameters: Tensor) -> Tensor:
        return function(x, w, labels, **{**arguments, **dict(zip(learned, parameters, strict=True))})[0]

    assert torch.autograd.gradcheck(loss, (embeddings, centres, *learned.values()))


def test_adaface_has_no_gradient_along_an_embedding_and_magface_has() -> None:
    embeddings, centres, labels = _problem()
    for function, arguments, along in ((adaface, {"std": 2.0, "alpha": 0.5}, False), (magface, {"l_a": 2.0}, True)):
        (gradient,) = torch.autograd.grad(function(embeddings, centres, labels, **arguments)[0], embeddings)
        radial = (gradient * embeddings.detach()).sum(dim=1) / embeddings.detach().norm(dim=1)
        assert bool((radial.abs() > 1e-6).all()) is along and bool((radial.abs() < 1e-12).all()) is not along


@pytest.mark.parametrize("function", [arcface, combined, sphereface_r])
def test_straight_through_gives_every_logit_the_derivative_of_the_scaled_cosine(function: Callable) -> None:
    embeddings, centres, labels = _problem()
    cosine = F.normalize(embeddings) @ F.normalize(centres).t()
    surrogate, exact = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for i, y in enumerate(labels.tolist()):
        sample = embeddings[i : i + 1], centres, labels[i : i + 1]
        exact = exact + function(*sample, scale=4.0, straight_through=False)[0] / len(labels)
        p = torch.exp(-function(*sample, scale=4.0, straight_through=False)[0].detach())
        others = torch.arange(len(centres)) != y
        q = (1 - p) * (4 * cosine[i, others].detach()).softmax(0)
        surrogate = surrogate + 4 * ((p - 1) * cosine[i, y] + (q * cosine[i, others]).sum()) / len(labels)
    loss, _ = function(embeddings, centres, labels, scale=4.0, straight_through=True)
    torch.testing.assert_close(loss, exact)
    for leaf in (embeddings, centres):
        gradient, expected, other = (
            torch.autograd.grad(value, leaf, retain_graph=True)[0] for value in (loss, surrogate, exact)
        )
        torch.testing.assert_close(gradient, expected)
        assert (gradient - other).abs().max() > 1e-3


def test_compositions_are_those_of_torchs_cross_entropy() -> None:
    embeddings, centres, labels = _problem()
    active = torch.tensor([True, False, True, True])
    weights = torch.tensor([0.5, 0.0, -0.25, 1.0], dtype=torch.float64)
    cosine = (F.normalize(embeddings) @ F.normalize(centres).t()).detach()
    is_target = F.one_hot(labels, 4).bool()
    limit = cosine[~is_target].quantile(0.5).item()  # halfway between two of the 12
    kept = is_target | (active & (cosine <= limit))
    assert (kept.sum(dim=1) < active.sum()).any() and (kept.sum(dim=1) > 1).any()
    logits = 4 * cosine + weights * ~is_target
    losses = []
    for row, keep, y in zip(logits, kept, labels, strict=True):
        target = keep[:y].sum()[None]
        p = row[keep].softmax(0)[target]
        losses.append(F.cross_entropy(row[keep][None], target, label_smoothing=0.2) * (1 - p) ** 1.5)
    composition = {"active": active, "limit": limit, "log_weights": weights, "focal": 1.5, "label_smoothing": 0.2}
    loss, _ = normface(embeddings, centres, labels, scale=4.0, **composition)
    torch.testing.assert_close(loss.detach(), torch.cat(losses).mean())
