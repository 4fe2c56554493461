"""Slow references of the losses with drawn or per-class margins, and of the two without a softmax. See loss_references.py."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from loss_references import Composition, State, cos_of_sum, cosines, softmax_loss
from torch import Tensor


def elasticface(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, draws: Tensor, kind: str = "arc", plus: bool = False,
    scale: float = 64.0, **composition: Any
) -> tuple[Tensor, State]:  # fmt: skip
    """s cos(theta_y + m_i) or s (c_y - m_i), with draws (B,) of m_i from a normal distribution.

    Boutros et al., "ElasticFace", https://arxiv.org/abs/2109.09416. With `plus` the sample with the k-th largest target
    cosine has the k-th smallest draw, so that samples far from their centre have large margins, as the paper says.
    """
    cosine = cosines(embeddings, centres)
    margins = draws.tolist()
    if plus:
        nearest_first = sorted(range(len(labels)), key=lambda i: -cosine[i, labels[i]].item())
        for i, m in zip(nearest_first, sorted(draws.tolist()), strict=True):
            margins[i] = m

    def target(i: int, c: Tensor) -> Tensor:
        return scale * (cos_of_sum(c, margins[i]) if kind == "arc" else c - margins[i])

    return softmax_loss(cosine, labels, target, scale, Composition(**composition)), {}


def adaptiveface(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, margins: Tensor, scale: float = 30.0, weight: float = 70.0,
    **composition: Any
) -> tuple[Tensor, State]:  # fmt: skip
    """s (c_y - m_y) with learnable m (C,) in [0, 1], plus weight (1 - mean m) over all classes. State: the clipped margins.

    Liu et al., "AdaptiveFace", CVPR 2019. Margins beyond [0, 1] are clipped before the step; their gradient is that at the
    clipped value.
    """
    m = margins.double() + (margins.clamp(0, 1) - margins).detach().double()

    def target(i: int, c: Tensor) -> Tensor:
        return scale * (c - m[labels[i]])

    loss = softmax_loss(cosines(embeddings, centres), labels, target, scale, Composition(**composition))
    return loss + weight * (1 - m.mean()), {"margins": m.detach()}


def kappaface(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, psi: Tensor, sums: Tensor, counts: Tensor, scale: float = 64.0,
    margin: float = 0.8, **composition: Any
) -> tuple[Tensor, State]:  # fmt: skip
    """s cos(theta_y + psi_y m), psi (C,) from `kappaface_psi`. State: sums (C, D), counts (C,) of unit embeddings.

    Oinar et al., "KappaFace", https://arxiv.org/abs/2201.07394. psi is constant within an epoch, so this batch changes only
    the state.
    """
    new_sums, new_counts = sums.double().clone(), counts.clone()
    for x, y in zip(embeddings.detach().double(), labels.tolist(), strict=True):
        new_sums[y] += x / x.norm()
        new_counts[y] += 1

    def target(i: int, c: Tensor) -> Tensor:
        return scale * cos_of_sum(c, margin * psi[labels[i]].item())

    loss = softmax_loss(cosines(embeddings, centres), labels, target, scale, Composition(**composition))
    return loss, {"sums": new_sums, "counts": new_counts}


def kappaface_psi(
    lengths: Tensor, sizes: Tensor, dim: int, *, temperature: float = 0.4, gamma: float = 0.7, largest: float = 1.05,
    unbiased: bool = True
) -> Tensor:  # fmt: skip
    """Return psi (C,) = gamma w_k + (1 - gamma) w_s, from r (C,) = |mean unit embedding| and n (C,) images of each class.

    kappa = r (d - r^2) / (1 - r^2), w_k = 1 - sigmoid(T (kappa - mean) / std), w_s = (cos(pi n / K) + 1) / 2, and
    K = largest * max n. The defaults are those of the authors' program. Their paper has K = max n, the standard deviation
    of all C classes without the correction of one, and gamma on w_s: gamma=0.3, largest=1.0, unbiased=False.
    """
    kappas = [r * (dim - r**2) / (1 - r**2) for r in lengths.tolist()]
    mean = sum(kappas) / len(kappas)
    std = math.sqrt(sum((kappa - mean) ** 2 for kappa in kappas) / (len(kappas) - int(unbiased)))
    psi = []
    for kappa, n in zip(kappas, sizes.tolist(), strict=True):
        of_concentration = 1 - 1 / (1 + math.exp(-temperature * (kappa - mean) / std))
        of_size = (math.cos(math.pi * n / (largest * max(sizes.tolist()))) + 1) / 2
        psi.append(gamma * of_concentration + (1 - gamma) * of_size)
    return torch.tensor(psi, dtype=torch.float64)


def _sum_loss(cosine: Tensor, labels: Tensor, terms: Any, composition: Composition) -> Tensor:
    """Return the mean over samples of positive(c_y) + sum_j exp(log_weight_j) negative(c_j)."""
    if composition.focal or composition.label_smoothing:
        raise ValueError("focal weights and label smoothing belong to a softmax")
    positive, negative = terms
    losses = []
    for i, y in enumerate(labels.tolist()):
        loss = positive(cosine[i, y])
        for j in composition.negatives(cosine[i], y):
            loss = loss + math.exp(composition.log_weight(j)) * negative(cosine[i, j])
        losses.append(loss)
    return torch.stack(losses).mean()


def sphereface2(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, bias: Tensor, scale: float = 40.0, margin: float = 0.4,
    t: float = 3.0, balance: float = 0.7, straight_through: bool = False, **composition: Any
) -> tuple[Tensor, State]:  # fmt: skip
    """l softplus(-s (g(c_y) - m) - b) + (1 - l) sum_j softplus(s (g(c_j) + m) + b), g(z) = 2 ((z + 1) / 2)^t - 1.

    b is learnable. Wen et al., "SphereFace2", https://arxiv.org/abs/2108.01513. Straight through means that g has the
    derivative 1, as in OpenSphere, which also multiplies the whole loss by 50 / 40.
    """

    def g(c: Tensor) -> Tensor:
        value = 2 * ((c + 1) / 2) ** t - 1
        return value.detach() + c - c.detach() if straight_through else value

    def positive(c: Tensor) -> Tensor:
        return balance * F.softplus(-scale * (g(c) - margin) - bias)

    def negative(c: Tensor) -> Tensor:
        return (1 - balance) * F.softplus(scale * (g(c) + margin) + bias)

    return _sum_loss(cosines(embeddings, centres), labels, (positive, negative), Composition(**composition)), {}


def sphereface2_bias(
    num_classes: int, *, scale: float = 40.0, margin: float = 0.4, t: float = 3.0, balance: float = 0.7
) -> float:
    """Return the b for which positive and negatives pull equally on it where all cosines are 0, by bisection."""
    g = 2 * 0.5**t - 1

    def pull(b: float) -> float:
        positive = balance / (1 + math.exp(scale * (g - margin) + b))
        return positive - (1 - balance) * (num_classes - 1) / (1 + math.exp(-scale * (g + margin) - b))

    low, high = -100.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if pull(middle) > 0 else (low, middle)
    return low


def uniface(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, bias: Tensor, scale: float = 64.0, margin: float = 0.4,
    weight: float = 1.0, **composition: Any
) -> tuple[Tensor, State]:  # fmt: skip
    """softplus(-(s (c_y - m) - b)) + l sum_j softplus(s c_j - b), b learnable, at first ln(10 C rate) for C classes.

    Zhou et al., "UniFace", ICCV 2023. The authors' program clips s c - b to [-s, s], which stops gradients beyond; this
    does not.
    """

    def positive(c: Tensor) -> Tensor:
        return F.softplus(-(scale * (c - margin) - bias))

    def negative(c: Tensor) -> Tensor:
        return weight * F.softplus(scale * c - bias)

    return _sum_loss(cosines(embeddings, centres), labels, (positive, negative), Composition(**composition)), {}
