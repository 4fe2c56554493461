"""What the kernels must do with negatives of every kind: cases, float64 formulas, and how far fp32 may lie from them.

Cosines are exact in the dtype of the products, and 1 / norms are powers of two, so a cosine is on the same side of a limit or a
threshold in every precision.
Shapes: B = samples, c = classes.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from rounding import FP32_UNIT, rounding_bound
from torch import Tensor

from losses.negatives import COEFFICIENTS, KINDS, Negatives, negatives_of
from partial_fc.kernels.plain import Tile

INSIDE = torch.tensor(1 - 1e-5).item()  # in fp32: derivatives with respect to an angle are taken no nearer to a pole
NO_NEGATIVE = torch.tensor(-1e30).item()  # the largest logit of a sample without negatives
TINY = 1e-36  # exponentials below fp32's normal numbers may be zero, and are multiplied by a scale


@dataclass
class Case:
    kind: str
    link: str = "softmax"
    straight: bool = False
    dtype: torch.dtype = torch.float32
    shape: tuple[int, int] = (37, 300)  # c, B
    weighted: bool = False  # by classes
    normalised: bool = False  # no inverse norms
    limit: float | None = None
    less: bool = False
    constant_shift: bool = False
    scale: float = 0.0  # 0 = the usual one of the kind

    def __str__(self) -> str:
        usual = vars(Case(self.kind))
        return "-".join([self.kind, *(f"{key}={value}" for key, value in vars(self).items() if value != usual[key])])


def cases() -> list[Case]:
    """Return every kind with both links, and one by one what can be added to them."""
    found = [Case(kind, link, straight) for kind in KINDS for link in ("softmax", "sum") for straight in (False, True)]
    for kind in KINDS:
        all_at_once = Case(kind, weighted=True, limit=0.25, less=True)
        found += [Case(kind, weighted=True), Case(kind, limit=0.25), Case(kind, less=True), Case(kind, normalised=True)]
        found += [all_at_once, replace(all_at_once, dtype=torch.bfloat16), replace(all_at_once, shape=(5, 1))]
        found += [Case(kind, "sum", weighted=True, limit=0.25, shape=shape) for shape in ((1, 1), (3, 257))]
        found += [Case(kind, "sum", dtype=torch.bfloat16, weighted=True), Case(kind, constant_shift=True, shape=(301, 9))]
        found += [Case(kind, link, scale=400.0) for link in ("softmax", "sum")]
    return found


@dataclass
class Given:
    """The arguments of weights and maxima."""

    products: Tensor
    inverse_norms: Tensor | None
    places: Tensor
    begin: int
    function: Negatives
    row_weights: Tensor | None
    shift: float | Tensor
    less: Tensor | None
    case: Case

    def to(self, device: torch.device) -> "Given":
        moved: dict[str, Any] = {key: value.to(device) for key, value in vars(self).items() if isinstance(value, Tensor)}
        moved["function"] = self.function._replace(coefficients=self.function.coefficients.to(device))
        return replace(self, **moved)

    def tile(self, products: Tensor) -> Tile:
        """Return these products with what belongs to them."""
        limit = self.case.limit
        return Tile(products, self.inverse_norms, self.places, self.begin, limit, self.function, self.row_weights)


def given(case: Case) -> Given:
    """Return products with cosines all over [-1, 1], some at its ends, beyond them or at the threshold, and own classes."""
    classes, samples = case.shape
    generator = torch.Generator().manual_seed(1000 * classes + samples)
    cosine = (2.2 * torch.rand(classes, samples, generator=generator) - 1.1).to(torch.bfloat16).float()
    if case.dtype == torch.float32:  # 16 bits, so that a power of two is exact, too
        cosine = cosine + (torch.rand(classes, samples, generator=generator) - 0.5).to(torch.bfloat16).float() / 256
    cosine = cosine.clamp(-1 - 2**-6, 1 + 2**-6)
    for number, special in enumerate((1.0, -1.0, 0.0, 0.5, -0.5, 0.25)):
        cosine.view(-1)[5 * number + 2 :: 97] = special
    inverse = None if case.normalised else 2.0 ** (torch.arange(classes + 1)[1:] % 5 - 2)  # not at a multiple of 16 bytes
    products = (cosine if inverse is None else cosine / inverse[:, None]).to(case.dtype)
    begin = 40
    places = torch.randint(0, classes, (samples,), generator=generator)
    places[1::4], places[2::4], places[3::4] = -1 - begin, classes, classes + 7  # not in this chunk
    function = _function(case, generator)
    row_weights = 0.5 + 10 * torch.rand(classes, generator=generator) if case.weighted else None
    less = 0.01 * torch.rand(samples, generator=generator) if case.less else None
    made = Given(products, inverse, places + begin, begin, function, row_weights, 0.0, less, case)
    logits = formulas(made)[1]
    made.shift = logits.max().item() if case.constant_shift else (logits.amax(dim=0) + 0.25).float()
    return made


def _function(case: Case, generator: torch.Generator) -> Negatives:
    samples = case.shape[1]

    def around(middle: float, spread: float) -> Tensor:
        return middle + spread * (2 * torch.rand(samples, generator=generator) - 1)

    numbers: dict[str, dict[str, Any]] = {
        "linear": {"scale": around(40, 24), "offset": around(0, 5)},
        "hard": {
            "scale": 64.0, "quadratic": around(0.5, 0.5), "slope": around(0.8, 0.4), "constant": around(0.1, 0.1),
            "threshold": around(0.2, 0.5).to(torch.bfloat16).float(), "offset": around(0, 1),
        },
        "arcneg": {"scale": 64.0, "slope": 1.2, "threshold": around(0.1, 0.6), "constant": around(2, 1)},
        "circle": {"scale": 256.0, "constant": around(0.25, 0.1)},
        "angle": {"scale": 64.0},
        "angle_squared": {"scale": around(6, 1)},
        "power": {"scale": 40.0, "slope": around(3, 2), "constant": 0.4, "offset": around(-10, 5)},
    }  # fmt: skip
    chosen = numbers[case.kind]
    if case.scale:
        chosen["scale"] = case.scale / (40 if case.kind == "angle_squared" else 1)  # whose values go up to 4 pi^2
    return negatives_of(case.kind, torch.empty(samples), case.straight, **chosen)


def formulas(made: Given) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return cosines, logits and derivatives, which negatives count, and bounds of the errors of logits and derivatives.

    All (c, B), in float64. A bound has the unit of fp32 times the size of what is added, as often as there are roundings.
    """
    v = 1.0 if made.inverse_norms is None else made.inverse_norms.double()[:, None]
    cosine = made.products.double() * v
    inside = cosine.clamp(-INSIDE, INSIDE) if made.case.kind.startswith("angle") else cosine
    free = inside.clone().requires_grad_()
    value = _value(made, free)
    (derivative,) = torch.autograd.grad(value.sum(), free)
    value = _value(made, cosine.clamp(-1, 1) if made.case.kind.startswith("angle") else cosine)
    scale, quadratic, slope, constant, _, offset = made.function.coefficients.double()
    size = {
        "hard": quadratic + slope.abs() + constant + 1,
        "arcneg": 2 * slope + 1,
        "circle": (1 + constant) ** 2,
        "angle_squared": torch.full_like(scale, 4 * math.pi**2),
        "power": 3 + constant,
    }.get(made.case.kind, torch.ones_like(scale))
    unit = 16 * FP32_UNIT
    logit_error = unit * (scale * size + offset.abs()).expand_as(cosine)
    derivative_error = unit * scale * (derivative.abs() + (2 * quadratic + slope.abs() if made.case.kind == "hard" else 0))
    if made.case.kind == "power":  # x^p = exp(p log x): the error of the exponent is the relative one of the power
        half = ((cosine + 1) / 2).clamp(1e-37, 1)
        derivative_error = derivative_error * (1 + (slope - 1) * half.log().abs())
    if made.case.straight:
        derivative, derivative_error = torch.ones_like(cosine), torch.zeros_like(cosine)
    rows = made.places - made.begin
    counts = rows[None] != torch.arange(len(cosine))[:, None]
    if made.case.limit is not None:
        counts &= cosine <= made.case.limit
    return cosine, scale * value + offset, scale * derivative, counts, logit_error, derivative_error


def _value(made: Given, c: Tensor) -> Tensor:
    """Return the logits without scale and offset, (c, B), written down again from the table in losses/negatives.py."""
    of = dict(zip(COEFFICIENTS, made.function.coefficients.double(), strict=True))
    kind, p, k, h = made.case.kind, of["slope"], of["constant"], of["threshold"]
    if kind == "hard":
        return torch.where(c > h, of["quadratic"] * c**2 + p * c + k, c)
    if kind == "arcneg":
        w = p * torch.exp(-((c.detach() - h) ** 2) / k)
        return w * c + w - 1
    if kind == "circle":
        return (c.detach() + k).relu() * (c - k)
    if kind == "angle":
        return (math.pi - 2 * torch.acos(c)) / math.pi
    if kind == "angle_squared":
        return (2 * math.pi - torch.acos(c)) ** 2
    if kind == "power":
        half = (c + 1) / 2
        half = half + (half.clamp(0, 1) - half).detach()  # a cosine beyond +-1 has the value and the derivative of +-1
        return 2 * half**p - 1 + k
    return c


def assert_right_weights(made: Given, weights: Tensor, sums: Tensor) -> None:
    """Compare W v (c, B) and the sums (3, B), less those from before, with float64."""
    cosine, logit, derivative, counts, logit_error, derivative_error = formulas(made)
    v = torch.ones(1, 1) if made.inverse_norms is None else made.inverse_norms[:, None]
    r = torch.ones(1, 1) if made.row_weights is None else made.row_weights.double()[:, None]
    less = torch.zeros(1) if made.less is None else made.less.double()
    expected_sums = torch.zeros(3, cosine.shape[1], dtype=torch.float64)
    errors = torch.zeros_like(expected_sums)
    if made.case.link == "softmax":
        exponent = logit - torch.as_tensor(made.shift).double()
        terms = [torch.where(counts, r * torch.exp(exponent), 0.0)]
        errors[0] = (terms[0] * (logit_error + FP32_UNIT * (4 + exponent.abs()))).sum(dim=0)
        slope_error = terms[0] * (logit_error + FP32_UNIT * (4 + exponent.abs())) + 4 * FP32_UNIT * less
        each = terms[0] - less
        if made.case.kind == "hard":
            hard = counts & (cosine > made.function.coefficients[COEFFICIENTS.index("threshold")].double())
            terms += [hard.double(), hard * cosine]
    else:
        each = torch.where(counts, r * torch.sigmoid(logit), 0.0)
        terms = [torch.where(counts, r * torch.nn.functional.softplus(logit), 0.0), each]
        slope_error = each * (logit_error + FP32_UNIT * (4 + logit.abs()))
        errors[0] = (each * logit_error + 4 * FP32_UNIT * terms[0]).sum(dim=0)
        errors[1] = slope_error.sum(dim=0)
    expected = torch.where(counts, each * derivative, 0.0) * v
    bound = v * (slope_error * derivative.abs() + (each.abs() + less) * derivative_error + TINY * (1 + derivative.abs()))
    bound = bound + expected.abs() * (8 * FP32_UNIT + (0 if made.case.dtype == torch.float32 else 2.0**-7))
    _assert_within(weights.double().cpu(), expected, torch.where(counts, bound, 0.0))
    for row, term in enumerate(terms):
        expected_sums[row] = term.sum(dim=0)
        errors[row] += rounding_bound(torch.float32, len(cosine) + 1) * term.abs().sum(dim=0) + TINY
    _assert_within(sums.double().cpu(), expected_sums, errors)


def assert_right_maxima(made: Given, before: Tensor, maximum: Tensor) -> None:
    """Compare the largest logit plus the logarithm of its class's weight, and what it was before, with float64."""
    _, logit, _, counts, logit_error, _ = formulas(made)
    if made.row_weights is not None:
        logit = logit + made.row_weights.double().log()[:, None]
    expected = torch.maximum(before.double(), torch.where(counts, logit, NO_NEGATIVE).amax(dim=0))
    error = logit_error[0] + 4 * FP32_UNIT * (1 + logit.abs().amax(dim=0))
    _assert_within(maximum.double().cpu(), expected, torch.where(expected > before, error, 0.0))


def _assert_within(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    assert found.isfinite().all()
    excess = (found - expected).abs() - bound
    place = int(excess.argmax())
    assert excess.view(-1)[place] <= 0, (
        f"element {place}: {found.reshape(-1)[place]}, expected {expected.reshape(-1)[place]} +- {bound.reshape(-1)[place]}"
    )
