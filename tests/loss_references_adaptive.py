"""Slow references of the losses whose margins, negatives or scale depend on the batch.

See loss_references.py. Running statistics include the present batch, as in the published programs: what is returned as the
next state is what this step's loss was computed with, unless a docstring says otherwise.
"""

import math
from typing import Any

from loss_references import Composition, State, cos_of_sum, cosines, softmax_loss
from torch import Tensor


def target_cosines(cosine: Tensor, labels: Tensor) -> list[float]:
    """Return the cosine of each sample and its class, as numbers."""
    return [cosine[i, y].item() for i, y in enumerate(labels.tolist())]


def curricularface(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, scale: float = 64.0, margin: float = 0.5, alpha: float = 0.01,
    t: float = 0.0, **composition: Any
) -> tuple[Tensor, State]:  # fmt: skip
    """s cos(theta_y + m); s c_j (t + c_j) for hard negatives, c_j > cos(theta_y + m). State: t, the mean target cosine.

    Huang et al., "CurricularFace", https://arxiv.org/abs/2004.00288. The comparison takes cos(theta_y + m) without the
    continuation beyond pi, as the authors' code does. t and the comparison are detached. alpha is the weight of the batch.
    """
    cosine = cosines(embeddings, centres)
    own = target_cosines(cosine, labels)
    t = alpha * sum(own) / len(own) + (1 - alpha) * t

    def target(i: int, c: Tensor) -> Tensor:
        return scale * cos_of_sum(c, margin)

    def negative(i: int, c: Tensor) -> Tensor:
        hard = c.item() > math.cos(math.acos(own[i]) + margin)
        return scale * c * (t + c) if hard else scale * c

    return softmax_loss(cosine, labels, target, negative, Composition(**composition)), {"t": t}


def mv_softmax(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, kind: str = "am", scale: float = 32.0, margin: float = 0.35,
    t: float = 0.2, **composition: Any
) -> tuple[Tensor, State]:  # fmt: skip
    """Hard negatives become s ((t + 1) c_j + t). Wang et al., "Mis-classified Vector Guided Softmax", 1912.00833.

    Kind "am": target s (c_y - m), hard c_j > c_y - m. Kind "arc": target s cos(theta_y + m), hard c_j > cos(theta_y + m).
    """
    cosine = cosines(embeddings, centres)
    own = target_cosines(cosine, labels)

    def target(i: int, c: Tensor) -> Tensor:
        return scale * (c - margin if kind == "am" else cos_of_sum(c, margin))

    def negative(i: int, c: Tensor) -> Tensor:
        limit = own[i] - margin if kind == "am" else math.cos(math.acos(own[i]) + margin)
        return scale * ((t + 1) * c + t) if c.item() > limit else scale * c

    return softmax_loss(cosine, labels, target, negative, Composition(**composition)), {}


def arcnegface(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, scale: float = 64.0, margin: float = 0.5, alpha: float = 1.2,
    sigma: float = 2.0, **composition: Any
) -> tuple[Tensor, State]:  # fmt: skip
    """s (q c_j + q - 1) with q = alpha exp(-(c_j - cos(theta_y + m))^2 / sigma), detached.

    Liu et al., "Towards Flops-constrained Face Recognition", https://arxiv.org/abs/1909.00632. The cosine in q is that of
    the target logit, so it has the continuation beyond pi, as in the published programs.
    """
    cosine = cosines(embeddings, centres)
    own = [cosine[i, y].detach() for i, y in enumerate(labels.tolist())]

    def target(i: int, c: Tensor) -> Tensor:
        return scale * cos_of_sum(c, margin)

    def negative(i: int, c: Tensor) -> Tensor:
        q = alpha * math.exp(-((c.item() - cos_of_sum(own[i], margin).item()) ** 2) / sigma)
        return scale * (q * c + q - 1)

    return softmax_loss(cosine, labels, target, negative, Composition(**composition)), {}


def npcface(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, scale: float = 64.0, margin: float = 0.5, m0: float = 0.4,
    m1: float = 0.2, t: float = 1.1, a: float = 0.2, **composition: Any
) -> tuple[Tensor, State]:  # fmt: skip
    """s cos(theta_y + m_i), m_i = m0 + m1 mean(c_j of hard j), detached; s (t c_j + a) for hard j, c_j > cos(theta_y + m).

    Zeng et al., "NPCFace", https://arxiv.org/abs/2007.10172. Without hard negatives the mean is 0. It is over the negatives
    that are in the sample's sum.
    """
    cosine, composed = cosines(embeddings, centres), Composition(**composition)
    own = target_cosines(cosine, labels)

    def is_hard(i: int, c: float) -> bool:
        return c > math.cos(math.acos(own[i]) + margin)

    def target(i: int, c: Tensor) -> Tensor:
        negatives = [cosine[i, j].item() for j in composed.negatives(cosine[i], int(labels[i]))]
        hard = [value for value in negatives if is_hard(i, value)]
        return scale * cos_of_sum(c, m0 + m1 * (sum(hard) / len(hard) if hard else 0.0))

    def negative(i: int, c: Tensor) -> Tensor:
        return scale * (t * c + a) if is_hard(i, c.item()) else scale * c

    return softmax_loss(cosine, labels, target, negative, composed), {}


def adacos(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, dynamic: bool = True, scale: float | None = None, **composition: Any
) -> tuple[Tensor, State]:
    """s cos theta for all classes; s = ln(B_avg) / cos(min(pi / 4, median theta_y)), all detached. State: scale.

    Zhang et al., "AdaCos", https://arxiv.org/abs/1905.00292. B_avg = mean over samples of sum_{j != y} exp(s c_j) with the
    last s, which begins as sqrt(2) ln(C - 1) and stays so if not dynamic. The median of an even number is the lower one, as
    torch's. The weights of the negatives count in B_avg, so with log(1 / rate) it estimates that of all classes.
    """
    cosine, composed = cosines(embeddings, centres), Composition(**composition)
    s = math.sqrt(2) * math.log(len(centres) - 1) if scale is None else scale
    if dynamic:
        total = 0.0
        for i, y in enumerate(labels.tolist()):
            total += sum(math.exp(s * cosine[i, j].item() + composed.log_weight(j)) for j in composed.negatives(cosine[i], y))
        angles = sorted(math.acos(c) for c in target_cosines(cosine, labels))
        s = math.log(total / len(labels)) / math.cos(min(math.pi / 4, angles[(len(angles) - 1) // 2]))
    return softmax_loss(cosine, labels, s, s, composed), {"scale": s}


def adaface(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, scale: float = 64.0, margin: float = 0.4, h: float = 0.333,
    alpha: float = 0.01, mean: float = 20.0, std: float = 100.0, eps: float = 1e-3, **composition: Any
) -> tuple[Tensor, State]:  # fmt: skip
    """s (cos(theta_y - m z) - (m + m z)), z = clip(h (a - mean) / (std + eps), -1, 1).

    a = |x| clipped to [0.001, 100], detached. Kim et al., "AdaFace", https://arxiv.org/abs/2204.00964. State: mean and std
    (of B - 1) of a, averaged with weight alpha of the batch. theta_y - m z below 0 is clipped to 0, as in the authors'
    code; beyond pi their code clips, too, and this continues as ArcFace.
    """
    norms = [min(max(x.norm().item(), 1e-3), 100.0) for x in embeddings.detach().double()]
    of_batch = sum(norms) / len(norms)
    variance = sum((a - of_batch) ** 2 for a in norms) / (len(norms) - 1)
    mean = alpha * of_batch + (1 - alpha) * mean
    std = alpha * math.sqrt(variance) + (1 - alpha) * std

    def target(i: int, c: Tensor) -> Tensor:
        z = min(max(h * (norms[i] - mean) / (std + eps), -1.0), 1.0)
        return scale * (cos_of_sum(c, -margin * z) - (margin + margin * z))

    loss = softmax_loss(cosines(embeddings, centres), labels, target, scale, Composition(**composition))
    return loss, {"mean": mean, "std": std}


def magface(
    embeddings: Tensor, centres: Tensor, labels: Tensor, *, scale: float = 64.0, l_a: float = 10.0, u_a: float = 110.0,
    l_m: float = 0.45, u_m: float = 0.8, weight: float = 35.0, **composition: Any
) -> tuple[Tensor, State]:  # fmt: skip
    """s cos(theta_y + m(a)), m(a) = (u_m - l_m) / (u_a - l_a) (a - l_a) + l_m, plus weight (1 / a + a / u_a^2) for each sample.

    Meng et al., "MagFace", https://arxiv.org/abs/2103.06627. a = |x| clipped to [l_a, u_a] has a gradient, through both
    terms.
    """
    norms = [x.norm().clamp(l_a, u_a) for x in embeddings.double()]

    def target(i: int, c: Tensor) -> Tensor:
        return scale * cos_of_sum(c, (u_m - l_m) / (u_a - l_a) * (norms[i] - l_a) + l_m)

    penalty = [weight * (1 / a + a / u_a**2) for a in norms]
    return softmax_loss(cosines(embeddings, centres), labels, target, scale, Composition(**composition), penalty), {}
