"""The expected loss of an untrained network. Comparing with it finds a wrong number of classes, scale or margin.

The embeddings and centres of the first step are independent directions in D dimensions. So a cosine is approximately normal
with standard deviation 1 / sqrt(D), and the loss of a sample has two parts: that of the negatives, log sum exp(logits) or a
sum of softplus, and that of the target class, minus its logit or its softplus. For many classes and linear negatives the first
is about ln(classes) + s^2 / (2 D) if s^2 / D <= 2 ln(classes) (Derrida, "Random-energy model", 1981). For up to 200,000 classes
it is sampled, which is always right; for more classes and other functions of the cosine, the sum is extrapolated.

The tolerance is three standard deviations of the mean over the batch. The target cosines of images of different people are
independent, so their contribution falls with the batch size. That of the negatives does not fall: an untrained network gives
all images nearly the same embedding, so all of them have nearly the same sum. Some losses depend on the length of the
embeddings. Behind a batch normalisation it is about sqrt(D); the tolerance covers lengths from sqrt(D / 2) to sqrt(2 D).

If a class has K sub-centers, its cosine is the largest of K such numbers. A normal number x becomes one of these as the number
below which x lies in the K-th root of the share of all numbers: Phi^-1(Phi(x)^(1/K)).
"""

import copy
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .margin import Margin

_LEAST_TOLERANCE = 0.3  # for effects outside the model: embeddings that are not quite normal, augmentation, dropout
_DRAWS = 64
_DRAWN_CLASSES = 200_000  # at most; 64 x 200,000 numbers are 51 MB
_TARGETS = 4096
_LENGTHS = (1.0, math.sqrt(0.5), math.sqrt(2.0))  # of the embeddings, as multiples of sqrt(D)


class FirstLoss(NamedTuple):
    """The expected loss of the first step, and its tolerance."""

    expected: float
    tolerance: float


class FirstStep(NamedTuple):
    """What the first loss depends on, beside the margin."""

    num_active: int  # classes in the loss, over all ranks
    embedding_size: int
    num_people: int  # different classes among the images of the batch
    num_counted: int | None = None  # classes that they stand for (head.logit_correction); None = themselves
    prepared: tuple[int, int] | None = None  # with what the head prepared the margin; None = the margin is as it should be
    focal: float = 0.0  # gamma
    label_smoothing: float = 0.0
    sub_centers: int = 1

    @property
    def negatives(self) -> int:
        """How many negatives the sum stands for."""
        return max(1, (self.num_counted or self.num_active) - 1)


def _nearest(normal: Tensor, sub_centers: int) -> Tensor:
    """Return normal numbers turned into the largest of so many each."""
    if sub_centers == 1:
        return normal
    return torch.special.ndtri(torch.special.ndtr(normal.double()) ** (1.0 / sub_centers)).to(normal.dtype)


def _moments(deviation: float, sub_centers: int) -> tuple[float, float]:
    """Return log E exp(z) and Var exp(z) / (E exp(z))^2 of a logit z, deviation times the largest of sub_centers normals."""
    if sub_centers == 1:
        return deviation**2 / 2, math.expm1(deviation**2)
    x = torch.linspace(-12.0, 12.0 + 2 * deviation, 100_001, dtype=torch.float64)
    density = torch.special.log_ndtr(x) * (sub_centers - 1) - x.square() / 2 + math.log(sub_centers / math.sqrt(2 * math.pi))
    first, second = (float((density + p * deviation * x + math.log(float(x[1] - x[0]))).logsumexp(0)) for p in (1, 2))
    return first, math.expm1(second - 2 * first)


class _Parts(NamedTuple):
    """The parts of the loss of some samples, (k,) each."""

    negatives: Tensor  # log of the sum of exp(logit), or the sum of softplus
    target: Tensor  # the logit
    mean_logit: Tensor  # of the negatives


def _parts(margin: Margin, cosine: Tensor, own: Tensor, length: float, count: int) -> _Parts:
    """Return the parts for k samples with target cosines own (k,).

    Args:
        cosine: (n, k) of negatives; each stands for count / n of them.
    """
    norm = torch.full_like(own, length)
    state = margin.observe(own, norm)
    negatives = margin.negatives(own, norm, state)
    logits, _ = negatives.logits(cosine)
    hard = (cosine > negatives.coefficients[4]).float()
    weight = count / len(cosine)
    log_z = logits.logsumexp(0) + math.log(weight)
    state = margin.complete(state, log_z, weight * torch.stack([hard.sum(0), (hard * cosine).sum(0)]))
    target = margin.target(own, norm, state)
    of_negatives = log_z if margin.link == "softmax" else weight * F.softplus(logits).sum(0)
    return _Parts(of_negatives, target, logits.mean(0))


def _linear_sum(scale: float, step: FirstStep, at_zero: float, generator: torch.Generator) -> tuple[float, float]:
    """Return mean and deviation of log sum exp over all classes, for logits of negatives that are scale * cosine."""
    deviation = scale / math.sqrt(step.embedding_size)
    count = step.negatives
    if step.num_active > _DRAWN_CLASSES and deviation**2 <= math.log(step.num_active):
        log_mean, variance = _moments(deviation, step.sub_centers)
        return math.log(count) + log_mean, math.sqrt(variance / step.num_active)
    drawn = max(1, min(step.num_active, _DRAWN_CLASSES) - 1)
    logits = _nearest(torch.randn(_DRAWS, drawn, generator=generator), step.sub_centers) * deviation
    weight = math.log(count / drawn) if step.num_active <= _DRAWN_CLASSES else 0.0  # few of many dominate such a sum
    sums = torch.logaddexp(torch.logsumexp(logits, dim=1) + weight, torch.tensor(at_zero))
    return float(sums.mean()), float(sums.std())


def _sum(margin: Margin, step: FirstStep, at_zero: float, length: float, seed: torch.Generator) -> tuple[float, float]:
    """Return mean and deviation of the negatives' part, for target cosines of 0."""
    deviation, zero = 1.0 / math.sqrt(step.embedding_size), torch.zeros(1)
    drawn = max(1, min(step.num_active, _DRAWN_CLASSES) - 1)
    sums = []
    for _ in range(_DRAWS):
        cosine = _nearest(torch.randn(drawn, 1, generator=seed), step.sub_centers) * deviation
        sums.append(_parts(margin, cosine, zero, length, step.negatives).negatives)
    found = torch.cat(sums)
    if margin.link == "softmax":
        found = torch.logaddexp(found, torch.tensor(at_zero))
    return float(found.mean()), float(found.std())


def _at_length(margin: Margin, step: FirstStep, length: float) -> FirstLoss:
    """Return the expected loss, and three standard deviations, for embeddings of this length."""
    generator = torch.Generator().manual_seed(0)
    deviation, zero = 1.0 / math.sqrt(step.embedding_size), torch.zeros(1)
    quantiles = (torch.arange(_TARGETS, dtype=torch.float64) + 0.5) / _TARGETS
    own = (_nearest(torch.erfinv(2.0 * quantiles - 1.0) * math.sqrt(2.0), step.sub_centers) * deviation).float()
    own = own if margin.linear_negatives else own[8::16].contiguous()
    few = torch.randn(1 if margin.linear_negatives else max(1, min(step.num_active, 8192) - 1), 1, generator=generator)
    few = _nearest(few, step.sub_centers).mul_(deviation)
    parts = _parts(margin, few.expand(-1, len(own)), own, length, step.negatives)
    at_zero = _parts(margin, few, zero, length, step.negatives)
    if margin.linear_negatives:
        norm = torch.full((1,), length)
        scale = float(margin.negative_scale(norm, margin.observe(zero, norm)))
        mean, spread = _linear_sum(scale, step, float(at_zero.target), generator)
        changes, mean_logit = torch.zeros_like(own), scale * own.mean()  # 0 if a class has one centre
    else:
        mean, spread = _sum(margin, step, float(at_zero.target), length, generator)
        changes, mean_logit = parts.negatives - at_zero.negatives, parts.mean_logit
    if margin.link == "softmax":
        smoothing = step.label_smoothing
        of_own = changes - (1.0 - smoothing) * parts.target - smoothing * mean_logit
        unsmoothed = mean + float((changes - parts.target).mean())
        factor = (1.0 - math.exp(-max(0.0, unsmoothed))) ** step.focal
    else:
        mean, spread, factor = margin.negative_weight * mean, margin.negative_weight * spread, 1.0
        of_own = margin.negative_weight * changes + margin.target_weight * F.softplus(-parts.target)
    penalty = margin.penalty(torch.full((1,), length))
    expected = factor * (mean + float(of_own.mean())) + (0.0 if penalty is None else float(penalty))
    expected += _class_penalty(margin, step.embedding_size)
    return FirstLoss(expected, 3 * math.hypot(spread, float(of_own.std()) / math.sqrt(max(1, step.num_people))))


def _class_penalty(margin: Margin, dim: int) -> float:
    """Return what the loss has of all classes while their numbers are equal, which is that of a single one."""
    numbers = {name: torch.full((1, *number.shape), number.first) for name, number in margin.class_numbers(dim).items()}
    found = margin.class_penalty(numbers, 1)
    return 0.0 if found is None else float(found[0])


def _depends_on_length(margin: Margin) -> bool:
    own, results = torch.tensor([-0.25, 0.0, 0.25]), []
    for length in (10.0, 30.0):
        norm = torch.full_like(own, length)
        penalty = margin.penalty(norm)
        parts = _parts(margin, own[:, None].expand(3, 3), own, length, 3)
        results.append(torch.stack([*parts, own if penalty is None else penalty]))
    return not torch.equal(*results)


@torch.no_grad()
def expected_first_loss(margin: Margin, step: FirstStep) -> FirstLoss:
    """Return the expected mean loss of the first step."""
    margin = copy.deepcopy(margin).cpu()  # its statistics may be on the GPU
    if step.prepared is not None:  # what is trained has moved in the step whose loss is judged
        margin.prepare(*step.prepared)
        margin.at_step(1)
    lengths = _LENGTHS if _depends_on_length(margin) else _LENGTHS[:1]
    usual, *others = (_at_length(margin, step, factor * math.sqrt(step.embedding_size)) for factor in lengths)
    change = max((abs(other.expected - usual.expected) for other in others), default=0.0)
    return FirstLoss(usual.expected, max(_LEAST_TOLERANCE, usual.tolerance) + change)


def judge_first_loss(
    loss: float,
    margin: Margin,
    num_active: int,
    embedding_size: int,
    num_people: int,
    num_counted: int | None = None,
    prepared: tuple[int, int] | None = None,
    focal: float = 0.0,
    label_smoothing: float = 0.0,
    sub_centers: int = 1,
) -> tuple[str, bool]:
    """Return a line that compares the first loss with that of an untrained network, and whether they agree.

    Args:
        margin: in its first step, or, with prepared, in any: its first numbers are computed again.
        num_active: classes in the loss, over all ranks.
        num_people: different classes among the images of the batch.
        num_counted: classes that those stand for (head.logit_correction); None = themselves.
        prepared: what the head handed to margin.prepare.
        focal: gamma of the focal factor.
        sub_centers: centres of each class, of which the nearest counts.
    """
    step = FirstStep(num_active, embedding_size, num_people, num_counted, prepared, focal, label_smoothing, sub_centers)
    expected, tolerance = expected_first_loss(margin, step)
    if not (math.isfinite(expected) and math.isfinite(tolerance)):
        name = type(margin).__name__
        return f"first loss {loss:.3f} for {num_active} active classes; what to expect of {name} is not known", True
    text = f"first loss {loss:.3f}, expected {expected:.2f} +- {tolerance:.2f} for {num_active} active classes"
    if abs(loss - expected) <= tolerance:
        return text, True
    return f"{text}: check labels, number of classes and loss.scale", False
