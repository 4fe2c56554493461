"""Slow references of the losses, written from the papers: float64, one sample and one class at a time from the cosines on.

They share no code with losses/ or partial_fc/. Each returns (mean loss, state of the next step). Autograd gives the
gradients for the raw embeddings (B, D), the centres (C, D) of any length, and the learnable parameters. What a paper holds
constant in the derivative is detached here and named. Losses with fixed margins are here, those that depend on the batch in
loss_references_adaptive.py, and those with drawn or per-class margins or without a softmax in loss_references_other.py.

The derivative of the angle is infinite at |cosine| = 1, and a margin on the angle has a kink there, so these references
give no gradient at the poles. Their values are right there, too.

Where theta + m exceeds pi, cos(theta + m) would rise again. All losses with an added angle continue with cos theta - m sin
m, as the authors of ArcFace do in their first code, and losses with a multiplied angle with psi of SphereFace.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = dict[str, Any]
Number = Tensor | float
OfPair = Callable[[int, Tensor], Tensor]  # (sample, cosine) -> logit, both of no dimension


@dataclass(frozen=True)
class Composition:
    """What every softmax loss is combined with. The losses take these as keyword arguments.

    active: (C,) bool, the classes in the sum. The classes of the batch must be among them.
    limit: negatives with a larger cosine are left out (interclass filtering).
    log_weights: (C,), added to the logits of the negatives: a negative counts exp(log_weight) times.
    focal: gamma of (1 - p)^gamma for each sample (Lin et al., "Focal Loss", https://arxiv.org/abs/1708.02002, Eq. 4). p is
    the
        softmax probability of the sample's class, and the factor has a gradient, too.
    label_smoothing: eps. The label is 1 - eps + eps / N for the sample's class and eps / N for the others, over the N classes
        in the sample's sum: active, and not left out by the limit. This is the convention of torch's cross entropy.
    entropy: samples are weighed by `entropy_weights`.
    """

    active: Tensor | None = None
    limit: float | None = None
    log_weights: Tensor | None = None
    focal: float = 0.0
    label_smoothing: float = 0.0
    entropy: bool = False

    def negatives(self, cosine: Tensor, label: int) -> list[int]:
        """Return the other classes in the sum of a sample with these cosines (C,)."""
        active, limit = self.active, self.limit
        classes = (j for j in range(len(cosine)) if j != label and (active is None or active[j]))
        return [j for j in classes if limit is None or cosine[j] <= limit]

    def log_weight(self, j: int) -> float:
        """Return what is added to the logit of class j where it is a negative."""
        return 0.0 if self.log_weights is None else float(self.log_weights[j])

    def cross_entropy(self, target: Tensor, negatives: list[Tensor]) -> Tensor:
        """Return the loss of one sample from its logits."""
        logits = torch.stack([target, *negatives])
        log_sum = logits.logsumexp(0)
        loss = log_sum - target
        p = torch.exp(-loss)
        if self.label_smoothing:
            uniform = (log_sum - logits).mean()
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * uniform
        return loss * (1 - p) ** self.focal if self.focal else loss


def cosines(embeddings: Tensor, centres: Tensor) -> Tensor:
    """Return the (B, C) cosines in float64; of sub-centres (C, K, D) the largest of the K of each class."""
    x, w = embeddings.double(), centres.double().view(len(centres), -1, centres.shape[-1])
    return (torch.einsum("bd,ckd->bck", x, w) / (x.norm(dim=-1)[:, None, None] * w.norm(dim=-1))).amax(-1)


def softmax_loss(
    cosine: Tensor,
    labels: Tensor,
    target: OfPair | float,
    negative: OfPair | float,
    composition: Composition,
    penalty: list[Tensor] | None = None,
) -> Tensor:
    """Return the mean cross entropy; `penalty` is added to each sample's loss; a number for a logit scales the cosine."""
    target, negative = (f if callable(f) else lambda i, c, f=f: f * c for f in (target, negative))
    losses, entropies = [], []
    for i, y in enumerate(labels.tolist()):
        others = [negative(i, cosine[i, j]) + composition.log_weight(j) for j in composition.negatives(cosine[i], y)]
        own = target(i, cosine[i, y])
        losses.append(composition.cross_entropy(own, others))
        entropies.append(torch.distributions.Categorical(logits=torch.stack([own, *others]).detach()).entropy())
    weights = entropy_weights(np.array(entropies)) if composition.entropy else np.ones(len(losses))
    added = 0.0 if penalty is None else torch.stack(penalty)
    return (torch.from_numpy(weights) * torch.stack(losses) + added).mean()


def entropy_weights(entropy: np.ndarray) -> np.ndarray:
    """Return 2 - g (B,), g from the mixture of a normal and a uniform density of TopoFR, of entropies with both signs."""
    x = np.concatenate([entropy, -entropy])
    x = x / x.std()
    share, variance, density = 0.1, 1.0, 0.2
    for _ in range(1000):
        wide = variance + 1e-3
        normal = share * np.exp(-(x**2) / (2 * wide)) / np.sqrt(2 * np.pi * wide)
        normal = normal / (normal + (1.0 - share) * density)
        count = normal.sum()
        variance, share = (normal * x**2).sum() / count, min(count / len(x), 0.5)
        first, second = (((1.0 - normal) * x**k).sum() / (1.0 - share) / count for k in (1, 2))
        spread = 3.0 * second - first**2
        density = 0.001 if spread < 0.001 else 1.0 / (2.0 * np.sqrt(spread))
    return 2.0 - normal[: len(entropy)]


def cos_of_sum(c: Tensor, margin: Number) -> Tensor:
    """Return cos(theta + m); beyond theta + m = pi, c - m sin m; below theta + m = 0 (m is negative), 1 without gradient."""
    m = torch.as_tensor(margin, dtype=torch.float64)
    theta = torch.acos(c)
    if theta + m > math.pi:
        return c - m * torch.sin(m)
    if theta + m < 0:
        return torch.ones_like(c)
    return torch.cos(theta + m)


def psi(x: Tensor) -> Tensor:
    """Return (-1)^k cos(x) - 2k for k pi <= x <= (k + 1) pi (Liu et al., "SphereFace", Section 3.3)."""
    k = 0
    while x > (k + 1) * math.pi:
        k += 1
    return (-1) ** k * torch.cos(x) - 2 * k


def straight(value: Tensor, slope: Tensor) -> Tensor:
    """Return value with the derivative of slope: characteristic gradient detachment, or a margin applied without autograd."""
    return value.detach() + slope - slope.detach()


def normface(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, scale: float = 64.0, **composition: Any
) -> tuple[Tensor, State]:
    """s cos theta for all classes. Wang et al., "NormFace", https://arxiv.org/abs/1704.06369; "COCO", 1710.00870."""
    return softmax_loss(cosines(embeddings, centres), labels, scale, scale, Composition(**composition)), {}


def cosface(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, scale: float = 64.0, margin: float = 0.4, **composition: Any
) -> tuple[Tensor, State]:
    """s (cos theta_y - m). Wang et al., "CosFace", https://arxiv.org/abs/1801.09414, Eq. 4; "AM-Softmax", 1801.05599."""

    def target(i: int, c: Tensor) -> Tensor:
        return scale * (c - margin)

    return softmax_loss(cosines(embeddings, centres), labels, target, scale, Composition(**composition)), {}


def arcface(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, scale: float = 64.0, margin: float = 0.5,
    straight_through: bool = False, **composition: Any
) -> tuple[Tensor, State]:  # fmt: skip
    """s cos(theta_y + m). Deng et al., "ArcFace", https://arxiv.org/abs/1801.07698, Eq. 3.

    With centres (C, K, D) this is Sub-center ArcFace (ECCV 2020): the K sub-centres of a class give one cosine, their
    largest.
    """

    def target(i: int, c: Tensor) -> Tensor:
        value = scale * cos_of_sum(c, margin)
        return straight(value, scale * c) if straight_through else value

    return softmax_loss(cosines(embeddings, centres), labels, target, scale, Composition(**composition)), {}


def combined(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, scale: float = 64.0, m1: float = 1.0, m2: float = 0.3,
    m3: float = 0.2, straight_through: bool = False, **composition: Any
) -> tuple[Tensor, State]:  # fmt: skip
    """s (cos(m1 theta_y + m2) - m3), with psi for the cosine. "ArcFace", https://arxiv.org/abs/1801.07698, Eq. 4."""

    def target(i: int, c: Tensor) -> Tensor:
        value = scale * (psi(m1 * torch.acos(c) + m2) - m3)
        return straight(value, scale * c) if straight_through else value

    return softmax_loss(cosines(embeddings, centres), labels, target, scale, Composition(**composition)), {}


def sphereface(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, margin: float = 4.0, annealed: bool = True, steps: int = 0,
    straight_through: bool = False, **composition: Any
) -> tuple[Tensor, State]:  # fmt: skip
    """a (lambda cos theta_y + psi(m theta_y)) / (1 + lambda), and a cos theta_j; a = |x| has a gradient.

    Liu et al., "SphereFace", https://arxiv.org/abs/1704.08063, Eq. 7. lambda = max(5, 1000 / (1 + 0.12 n)) in the n-th
    step, counted from 1, is in the authors' settings for training; not annealed means lambda = 0. State: `steps` done.
    """
    norm = embeddings.double().norm(dim=1)
    weight = max(5.0, 1000.0 / (1.0 + 0.12 * (steps + 1))) if annealed else 0.0

    def target(i: int, c: Tensor) -> Tensor:
        value = psi(margin * torch.acos(c))
        value = straight(value, c) if straight_through else value
        return norm[i] * (weight * c + value) / (1 + weight)

    def negative(i: int, c: Tensor) -> Tensor:
        return norm[i] * c

    loss = softmax_loss(cosines(embeddings, centres), labels, target, negative, Composition(**composition))
    return loss, {"steps": steps + 1}


def sphereface_r(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, scale: float = 30.0, margin: float = 1.7,
    straight_through: bool = True, **composition: Any
) -> tuple[Tensor, State]:  # fmt: skip
    """s psi(m theta_y) with the derivative s: Liu et al., "SphereFace Revived", https://arxiv.org/abs/2109.05565.

    Characteristic gradient detachment holds psi(m theta_y) - cos theta_y constant.
    """
    arguments = {"scale": scale, "m1": margin, "m2": 0.0, "m3": 0.0, "straight_through": straight_through}
    return combined(embeddings, centres, labels, **arguments, **composition)


def circle(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, scale: float = 256.0, margin: float = 0.25, **composition: Any
) -> tuple[Tensor, State]:
    """s [1 + m - c_y]_+ (c_y - (1 - m)) and s [c_j + m]_+ (c_j - m), the brackets detached.

    Sun et al., "Circle Loss", https://arxiv.org/abs/2002.10857, with one positive a sample, its centre, in cross entropy.
    """

    def target(i: int, c: Tensor) -> Tensor:
        return scale * max(0.0, 1 + margin - c.item()) * (c - (1 - margin))

    def negative(i: int, c: Tensor) -> Tensor:
        return scale * max(0.0, c.item() + margin) * (c - margin)

    return softmax_loss(cosines(embeddings, centres), labels, target, negative, Composition(**composition)), {}


def li_arcface(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, scale: float = 64.0, margin: float = 0.45, **composition: Any
) -> tuple[Tensor, State]:
    """s (pi - 2 (theta_y + m)) / pi and s (pi - 2 theta_j) / pi. Li et al., "AirFace", https://arxiv.org/abs/1907.12256."""

    def target(i: int, c: Tensor) -> Tensor:
        return scale * (math.pi - 2 * (torch.acos(c) + margin)) / math.pi

    def negative(i: int, c: Tensor) -> Tensor:
        return scale * (math.pi - 2 * torch.acos(c)) / math.pi

    return softmax_loss(cosines(embeddings, centres), labels, target, negative, Composition(**composition)), {}


def qamface(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, scale: float = 6.0, margin: float = 0.5, **composition: Any
) -> tuple[Tensor, State]:
    """s (2 pi - (theta_y + m))^2 and s (2 pi - theta_j)^2: quadratic additive angular margin, known from its code alone."""

    def target(i: int, c: Tensor) -> Tensor:
        return scale * (2 * math.pi - (torch.acos(c) + margin)) ** 2

    def negative(i: int, c: Tensor) -> Tensor:
        return scale * (2 * math.pi - torch.acos(c)) ** 2

    return softmax_loss(cosines(embeddings, centres), labels, target, negative, Composition(**composition)), {}
