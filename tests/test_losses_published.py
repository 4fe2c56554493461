"""The slow references of the losses, and the losses themselves, against the numbers of published programs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_margin import DenseMargin
from loss_references import normface
from loss_references_other import kappaface_psi, sphereface2_bias
from published_losses import (
    DIM,
    KAPPA_LENGTHS,
    KAPPA_PSI,
    KAPPA_SIZES,
    NUM_CLASSES,
    PUBLISHED,
    SPHEREFACE2_BIAS,
    Published,
    make_inputs,
)
from torch import Tensor

from losses import build_margin

pytestmark = pytest.mark.numeric

CASES = [(case, name) for case in PUBLISHED for name in case.numbers]


def _id(value: Published | str) -> str:
    return value if isinstance(value, str) else f"{value.loss.func.__name__}-{value.source.split(' ')[0]}"


@pytest.mark.parametrize(("case", "name"), CASES, ids=_id)
def test_reference_equals_published_program(case: Published, name: str) -> None:
    embeddings, centres, labels = make_inputs(name)
    embeddings, centres = embeddings.double().requires_grad_(), centres.double().requires_grad_()
    loss, state = case.loss(embeddings, centres, labels)
    of_embeddings, of_centres = torch.autograd.grad(loss, (embeddings, centres), retain_graph=True)
    found = [loss, of_embeddings.norm(), of_embeddings[1, 5], of_centres.norm(), of_centres[3, 7]]
    for key in case.more:
        learned = case.loss.keywords.get(key)
        if isinstance(learned, Tensor):
            found.append(torch.autograd.grad(loss, learned, retain_graph=True)[0].norm())
        else:
            found.append(torch.as_tensor(state[key]))
    for value, expected in zip(found, case.numbers[name], strict=True):
        assert expected is None or value.item() == pytest.approx(expected, rel=1e-6)  # of 9 digits; some clip at 1e-3


def test_smoothing_and_focal_of_the_reference_are_those_of_torchs_cross_entropy() -> None:
    """Over the classes that are active and not filtered; the head itself is compared with the reference elsewhere."""
    embeddings, centres, labels = make_inputs("mixed")
    classes = len(centres)
    active, weights = torch.arange(classes) % 3 > 0, torch.linspace(-0.5, 1.0, classes, dtype=torch.float64)
    active[labels] = True
    cosine = F.normalize(embeddings.double()) @ F.normalize(centres.double()).t()
    is_target = F.one_hot(labels, classes).bool()
    limit = cosine[~is_target].median().item() + 1e-9
    kept = is_target | (active & (cosine <= limit))
    losses = []
    for row, keep, label in zip(4 * cosine + weights * ~is_target, kept, labels, strict=True):
        target = keep[:label].sum()[None]
        p = row[keep].softmax(0)[target]
        losses.append(F.cross_entropy(row[keep][None], target, label_smoothing=0.2) * (1 - p) ** 1.5)
    composition = {"active": active, "limit": limit, "log_weights": weights, "focal": 1.5, "label_smoothing": 0.2}
    loss, _ = normface(embeddings, centres, labels, scale=4.0, **composition)
    assert 1 < kept.sum(dim=1).min() < kept.sum(dim=1).max() <= active.sum()
    torch.testing.assert_close(loss.detach(), torch.cat(losses).mean())


BUFFERS = {"curricularface": ("t",), "adaface": ("mean", "std"), "adacos": ("running_scale",)}


@pytest.mark.parametrize(("case", "name"), CASES, ids=_id)
def test_loss_in_fp32_equals_published_program(case: Published, name: str) -> None:
    given, loss_name = dict(case.loss.keywords), case.loss.func.__name__
    if given.pop("straight_through", False):
        given["gradient"] = "straight_through"
    steps, active, draws = given.pop("steps", 0), given.pop("active", None), given.pop("draws", None)
    given.pop("bias", None)  # the one with which ours begins
    of_class = {ours: given.pop(key) for key, ours in (("margins", "margin"), ("psi", "psi")) if key in given}
    given = {key: value for key, value in given.items() if key not in ("sums", "counts")}
    buffers = BUFFERS.get(loss_name, ())
    begins: dict[str, Any] = {key: given.pop(key) for key in buffers if key in given}
    margin = build_margin(loss_name, **given)
    dense = DenseMargin(margin, NUM_CLASSES, DIM)
    dense.steps = steps
    for key, values in of_class.items():
        dense.numbers[key].data.copy_(values)
    for key, value in begins.items():
        getattr(margin, key).fill_(value)
    if draws is not None:
        margin.observe = lambda *_: {"margin": draws.float()}  # type: ignore[method-assign]
    embeddings, centres, labels = make_inputs(name)
    embeddings, centres = embeddings.requires_grad_(), centres.requires_grad_()
    if loss_name == "adacos":  # its scale holds from the next step on
        dense.step([(embeddings, labels)], centres)
        loss = dense.step([(embeddings, labels)], centres, torch.tensor(False))
    else:
        loss = dense.step([(embeddings, labels)], centres, active=active)
    trained = [*margin.parameters(), *(value for value in dense.numbers.values() if value.requires_grad)]
    of_embeddings, of_centres, *of_trained = torch.autograd.grad(loss, [embeddings, centres, *trained])
    found = [loss, of_embeddings.norm(), of_embeddings[1, 5], of_centres.norm(), of_centres[3, 7]]
    found += [gradient.norm() for gradient in of_trained] + [getattr(margin, key) for key in buffers]
    sizes = [loss, of_embeddings.norm(), of_embeddings.norm(), of_centres.norm(), of_centres.norm(), *found[5:]]
    expected = case.numbers[name]
    assert len(found) >= len(expected)
    for value, other, size in zip(found, expected, sizes, strict=False):  # states that a program does not show are left
        assert other is None or abs(value.item() - other) <= 1e-5 * size.item()


def test_kappaface_has_the_weights_of_its_program() -> None:
    """Leminhbinh0209/KappaFace at 5158b2f0, momentum_head.py; it computes the part of the sizes in fp32."""
    psi = kappaface_psi(KAPPA_LENGTHS, KAPPA_SIZES, DIM, temperature=0.4, gamma=0.7)
    assert psi.tolist() == pytest.approx(KAPPA_PSI.tolist(), rel=1e-6)


def test_sphereface2_begins_with_the_bias_of_its_program() -> None:
    assert sphereface2_bias(NUM_CLASSES) == pytest.approx(SPHEREFACE2_BIAS.item())
