"""One table of the losses for all tests: how each margin is built, its slow reference, and what the reference begins with."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from loss_references import State, arcface, circle, combined, cosface, li_arcface, normface, qamface, sphereface, sphereface_r
from loss_references_adaptive import adacos, adaface, arcnegface, curricularface, magface, mv_softmax, npcface
from loss_references_other import adaptiveface, elasticface, kappaface, sphereface2, uniface
from torch import Tensor

from losses import Margin

Reference = Callable[..., tuple[Tensor, State]]


def _adacos(*inputs: Tensor, scale: float | None = None, **composition: Any) -> tuple[Tensor, State]:
    """The scale that a batch gives holds from the next step on."""
    loss, _ = adacos(*inputs, dynamic=False, scale=scale, **composition)
    return loss, adacos(*inputs, scale=scale, **composition)[1]


class Case(NamedTuple):
    """A loss: its reference, arguments of the margin, and how much steeper than its scale a logit may be."""

    reference: Reference
    arguments: dict[str, Any] = {}  # noqa: RUF012
    steep: float = 2.0


def _same(reference: Reference, steep: float = 2.0, **arguments: Any) -> Case:
    """Return the case of a reference that takes the same arguments as the margin."""
    return Case(partial(reference, **arguments), arguments, steep)


CASES = {  # a comma follows the name of a loss that has several
    "normface": _same(normface, 1.0, scale=30.0),
    "cosface": _same(cosface, 1.0),
    "cosface, am-softmax": _same(cosface, 1.0, scale=30.0, margin=0.35),
    "cosface, wide": _same(cosface, 1.0, scale=300.0),
    "arcface": _same(arcface),
    "arcface, straight": Case(partial(arcface, straight_through=True), {"gradient": "straight_through"}),
    "combined": _same(combined, m1=1.35, m2=0.2, m3=0.1),
    "sphereface": _same(sphereface, 120.0),
    "sphereface, not annealed": _same(sphereface, 120.0, annealed=False),
    "sphereface_r": _same(sphereface_r, 1.0),
    "sphereface_r, exact": Case(partial(sphereface_r, straight_through=False), {"gradient": "exact"}),
    "circle": _same(circle, 1.25),
    "li_arcface": _same(li_arcface),
    "qamface": _same(qamface, 4 * math.pi),
    "curricularface": _same(curricularface, 3.0, alpha=0.3),
    "mv_softmax": _same(mv_softmax, 1.2),
    "mv_softmax, arc": _same(mv_softmax, kind="arc", margin=0.5),
    "arcnegface": _same(arcnegface),
    "npcface": _same(npcface),
    "adacos": Case(_adacos),
    "adacos, fixed": Case(partial(adacos, dynamic=False), {"dynamic": False}),
    "adaface": _same(adaface, alpha=0.5),
    "magface": _same(magface),
    "elasticface": _same(elasticface, kind="arc", plus=False),
    "elasticface, plus": _same(elasticface, kind="arc", plus=True),
    "elasticface, cos": _same(elasticface, kind="cos", plus=False),
    "elasticface, cos plus": _same(elasticface, kind="cos", plus=True),
    "sphereface2": _same(sphereface2, 3.0),
    "sphereface2, straight": Case(partial(sphereface2, straight_through=True), {"gradient": "straight_through"}, 3.0),
    "adaptiveface": _same(adaptiveface, 1.0, weight=7.0),
    "kappaface": _same(kappaface),
    "uniface": _same(uniface, 1.0, weight=0.5),
}
STATES = {"t": "t", "mean": "mean", "std": "std", "scale": "running_scale"}  # of the reference: the margin's buffers
ONE_REDUCTION = {  # one scale on all cosines, and sums that stay in the range of fp32
    *("normface", "cosface", "arcface", "combined", "sphereface_r", "adaface", "magface", "elasticface", "adaptiveface"),
    "kappaface",
}
SUMS = ("sphereface2", "uniface")


def first_known(case: str, margin: Margin, num_classes: int, dim: int) -> dict[str, Any]:
    """Return what the reference needs beside the arguments of the margin, which has been prepared."""
    name = case.partition(",")[0]
    if name == "adaptiveface":
        return {"margins": torch.full((num_classes,), 0.35, dtype=torch.float64, requires_grad=True)}
    if name == "kappaface":
        counts = torch.zeros(num_classes, dtype=torch.float64)
        return {"psi": torch.full((num_classes,), 0.5), "sums": torch.zeros(num_classes, dim), "counts": counts}
    return {"bias": next(margin.parameters()).detach().double().requires_grad_()} if name in SUMS else {}
