"""Losses that weigh negatives by how near they are to the sample, relative to its own class.

CurricularFace, MV-Softmax and NPCFace call a negative hard if its cosine exceeds cos(theta + m) of the target class, or
cos theta - m. The comparison is with the bare cosine, as in the published programs: beyond theta + m = pi, where the target
logit continues to fall, the bare cosine rises again, so fewer negatives are hard. What depends on the target class has no
gradient in the logits of the negatives, as published.
Shapes: B = samples, the global batch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .angles import at_least_float32, bare_cos_of_sum, cos_of_sum
from .arcface import ArcFace
from .margin import Margin, Published, State, angle_margin, cosine_margin, number_above, number_in, one_of
from .negatives import Negatives, negatives_of


class CurricularFace(ArcFace):
    """ArcFace whose hard negatives count more as training goes on: for long trainings on clean data.

    s cos(theta + m) for the target class; s c_j (t + c_j) for hard negatives.

    Source: Huang et al., "CurricularFace", CVPR 2020, https://arxiv.org/abs/2004.00288. t follows the mean target cosine,
    so hard negatives count little at first and much later. In a program whose ranks average over their own samples, t depends
    on the number of GPUs; here it is that of the global batch, and is saved with the run.

    Args:
        margin: angle m in radians.
        alpha: weight of the batch in the running mean, in [0, 1]. 0.01 is the authors'; TFace has 0.1.
    """

    family = "hard_and_sums"
    published = (Published("curricularface", "CurricularFace", "2004.00288"),)

    t: Tensor

    def __init__(self, scale: float = 64.0, margin: float = 0.5, alpha: float = 0.01, **shared: Any) -> None:
        super().__init__(scale, margin, **shared)
        self.alpha = number_in("alpha", alpha, 0.0, 1.0, " (the weight of the batch)")
        self.register_buffer("t", torch.zeros(()))

    def observe(self, cosine: Tensor, norm: Tensor, seed: int = 0, of_class: Mapping[str, Tensor] | None = None) -> State:
        """Return the mean target cosine (), and t () with it."""
        mean = at_least_float32(cosine.detach()).mean()
        return {"mean": mean, "t": torch.lerp(self.t.to(mean.dtype), mean, self.alpha)}

    def negatives(self, cosine: Tensor, norm: Tensor, state: State) -> Negatives:
        """Return c (t + c) for hard negatives."""
        threshold = bare_cos_of_sum(cosine, self.share * self.margin)
        return negatives_of("hard", cosine, scale=self.scale, quadratic=1.0, slope=state["t"], threshold=threshold)

    def commit(self, states: Sequence[State], good: Tensor | None = None) -> None:
        """Store t with the mean over all micro-batches."""
        mean = torch.stack([state["mean"] for state in states]).mean()
        self.keep(good, t=torch.lerp(self.t.to(mean.dtype), mean, self.alpha))

    @property
    def logit_bound(self) -> float:
        """2 s: t is a mean of cosines, so c (t + c) is at most 2."""
        return 2.0 * self.scale


class MVSoftmax(Margin):
    """Hard negatives count more from the first step.

    Hard negatives become s ((t + 1) c_j + t), which is s c_j raised by s t (c_j + 1).

    Source: Wang et al., "Mis-classified Vector Guided Softmax Loss", AAAI 2020, https://arxiv.org/abs/1912.00833.

    Args:
        kind: "am": target s (cos theta - m), hard c_j > cos theta - m; "arc": target s cos(theta + m), hard
            c_j > cos(theta + m).
        margin: m, a cosine for "am", an angle in radians for "arc".
        t: weight of hard negatives, in [0, 10].
    """

    family = "hard_and_sums"
    published = (
        Published("mv_softmax", "MV-Softmax (AM)", "1912.00833"),
        Published("mv_softmax_arc", "MV-Softmax (Arc)", "1912.00833", {"kind": "arc", "margin": 0.5}),
    )

    def __init__(self, kind: str = "am", scale: float = 32.0, margin: float = 0.35, t: float = 0.2, **shared: Any) -> None:
        super().__init__(scale, **shared)
        self.kind = one_of("kind", kind, ("am", "arc"))
        check = cosine_margin if kind == "am" else angle_margin
        self.margin = check("margin", margin, f" for mv_softmax of kind {kind}")
        self.t = number_in("t", t, 0.0, 10.0, " (0 = hard negatives count as the others do)")

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        cosine = at_least_float32(cosine)
        if self.kind == "am":
            return self.scale * (cosine - self.share * self.margin)
        return self.logits_with_derivative(cosine, *cos_of_sum(cosine, self.share * self.margin))

    def negatives(self, cosine: Tensor, norm: Tensor, state: State) -> Negatives:
        """Return (t + 1) c + t for hard negatives."""
        cosine, margin = at_least_float32(cosine), self.share * self.margin
        threshold = cosine - margin if self.kind == "am" else bare_cos_of_sum(cosine, margin)
        return negatives_of("hard", cosine, scale=self.scale, slope=self.t + 1.0, constant=self.t, threshold=threshold)

    @property
    def logit_bound(self) -> float:
        """s (2 t + 1), of a hard negative with cosine 1."""
        return self.scale * (2.0 * self.t + 1.0)


class NPCFace(Margin):
    """ArcFace whose margin grows where negatives are near.

    s cos(theta + m_i) with m_i = m0 + m1 mean(c_j of hard j); s (t c_j + a) for hard negatives, c_j > cos(theta + m).

    Source: Zeng et al., "NPCFace", 2020, https://arxiv.org/abs/2007.10172. The mean over a sample's hard negatives is
    over all classes in its sum; without any it is 0. With sampled classes it is an unbiased estimate, unlike their number.

    Args:
        margin: angle m in radians, of the threshold alone.
        m0: least angle of the target's margin, in radians.
        m1: how much it grows with the hard negatives' mean cosine; m0 + m1 is at most pi / 2.
        t, a: factor in [0, 10] and offset in [0, 1] of hard negatives.
    """

    family = "hard_and_sums"
    published = (Published("npcface", "NPCFace", "2007.10172"),)

    def __init__(
        self,
        scale: float = 64.0,
        margin: float = 0.5,
        m0: float = 0.4,
        m1: float = 0.2,
        t: float = 1.1,
        a: float = 0.2,
        **shared: Any,
    ) -> None:
        super().__init__(scale, **shared)
        self.margin = angle_margin("margin", margin, " for npcface")
        self.m0 = angle_margin("m0", m0, " for npcface")
        if not 0.0 <= m1 <= math.pi / 2 - self.m0:
            raise ValueError(f"m1 must be in [0, pi / 2 - m0] for npcface (radians, not degrees), got {m1} with m0={m0}")
        self.m1 = float(m1)
        self.t = number_in("t", t, 0.0, 10.0, " (a factor on the cosines of hard negatives)")
        self.a = number_in("a", a, 0.0, 1.0, " (added to the cosines of hard negatives)")

    def complete(self, state: State, log_z: Tensor, hard: Tensor) -> State:
        """Return the mean cosine (B,) of each sample's hard negatives."""
        return {**state, "mean": hard[1] / hard[0].clamp_min(1.0)}

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        cosine = at_least_float32(cosine)
        margin = self.share * (self.m0 + self.m1 * state["mean"].to(cosine.dtype))
        return self.logits_with_derivative(cosine, *cos_of_sum(cosine, margin))

    def negatives(self, cosine: Tensor, norm: Tensor, state: State) -> Negatives:
        """Return t c + a for hard negatives."""
        threshold = bare_cos_of_sum(cosine, self.share * self.margin)
        return negatives_of("hard", cosine, scale=self.scale, slope=self.t, constant=self.a, threshold=threshold)

    @property
    def logit_bound(self) -> float:
        """s max(1, t + a), of a hard negative with cosine 1."""
        return self.scale * max(1.0, self.t + self.a)

    @property
    def lowest_negative(self) -> float:
        """s min(-1, a - t), of negatives with cosine -1."""
        return self.scale * min(-1.0, self.a - self.t)


class ArcNegFace(ArcFace):
    """Negatives near the own class count most; nearer ones, perhaps the same person, count less.

    s cos(theta + m) for the target class; s (w c_j + w - 1) with w = alpha exp(-(c_j - h)^2 / sigma) for all others.

    Source: Liu et al., "Towards Flops-constrained Face Recognition", ICCVW 2019, https://arxiv.org/abs/1909.00632. h is the
    cosine of the target logit, with its continuation beyond theta + m = pi. Negatives near h count most; the weights w have no
    gradient.

    Args:
        margin: angle m in radians.
        alpha: the largest weight, in (0, 10].
        sigma: how fast the weight falls, above 0.
    """

    family = "hard_and_sums"
    published = (Published("arcnegface", "ArcNegFace", "1909.00632"),)

    def __init__(self, scale: float = 64.0, margin: float = 0.5, alpha: float = 1.2, sigma: float = 2.0, **shared: Any) -> None:
        super().__init__(scale, margin, **shared)
        self.alpha = number_above("alpha", number_in("alpha", alpha, 0.0, 10.0), 0.0, " (1.2 is usual)")
        self.sigma = number_in("sigma", sigma, 1e-3, 1e6, " (2 is usual)")

    def negatives(self, cosine: Tensor, norm: Tensor, state: State) -> Negatives:
        """Return w c + w - 1."""
        level, _ = cos_of_sum(at_least_float32(cosine), self.share * self.margin)
        return negatives_of("arcneg", cosine, scale=self.scale, slope=self.alpha, threshold=level, constant=self.sigma)

    @property
    def logit_bound(self) -> float:
        """s max(1, 2 alpha - 1): a weight is at most alpha, and w (c + 1) - 1 grows with both."""
        return self.scale * max(1.0, 2.0 * self.alpha - 1.0)
