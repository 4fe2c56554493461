"""ElasticFace: margins drawn anew for every sample of every step.

Source: Boutros et al., "ElasticFace", CVPRW 2022, https://arxiv.org/abs/2109.09416.
Shapes: B = samples, the global batch.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .angles import at_least_float32, cos_of_sum
from .margin import Margin, Published, State, angle_margin, cosine_margin, number_in, one_of

_PUBLISHED = {  # margin and standard deviation, by kind and plus
    ("arc", False): (0.5, 0.05),
    ("arc", True): (0.5, 0.0175),
    ("cos", False): (0.35, 0.05),
    ("cos", True): (0.35, 0.02),
}


class ElasticFace(Margin):
    """A margin drawn for each sample: when a fixed one seems too rigid.

    s cos(theta + m_i) or s (cos theta - m_i), with m_i of each sample from a normal distribution.

    The draws come from the run's seed, the step and the micro-batch, so a resumed run draws as an uninterrupted one does, and
    all ranks have the same. Draws beyond [0, pi / 2] (arc) or [0, 1] (cos) are clipped; with the published deviations
    that is seven or more of them away.

    Args:
        kind: "arc" or "cos".
        plus: whether the samples farthest from their centres get the largest draws, instead of any.
        margin: mean of the draws: radians for "arc", a cosine for "cos"; -1 = the published one, 0.5 or 0.35.
        std: their standard deviation, in [0, 0.5]; -1 = the published one: 0.05; with plus 0.0175 (arc) or 0.02 (cos).
    """

    published = (
        Published("elasticface", "ElasticFace-Arc", "2109.09416"),
        Published("elasticface_arc_plus", "ElasticFace-Arc+", "2109.09416", {"plus": True}),
        Published("elasticface_cos", "ElasticFace-Cos", "2109.09416", {"kind": "cos"}),
        Published("elasticface_cos_plus", "ElasticFace-Cos+", "2109.09416", {"kind": "cos", "plus": True}),
    )

    def __init__(
        self, kind: str = "arc", plus: bool = False, scale: float = 64.0, margin: float = -1.0, std: float = -1.0, **shared: Any
    ) -> None:
        super().__init__(scale, **shared)
        self.kind, self.plus = one_of("kind", kind, ("arc", "cos")), plus
        published_margin, published_std = _PUBLISHED[kind, plus]
        check = cosine_margin if kind == "cos" else angle_margin
        note = f" for elasticface of kind {kind}, or -1 for the published one"
        self.margin = published_margin if margin == -1 else check("margin", margin, note)
        self.std = published_std if std == -1 else number_in("std", std, 0.0, 0.5, ", or -1 for the published one")

    def observe(self, cosine: Tensor, norm: Tensor, seed: int = 0, of_class: Mapping[str, Tensor] | None = None) -> State:
        """Return the margins (B,) fp32."""
        # From uniform numbers in fp64, because normal ones depend on the processor's instructions. Ranks may differ in these.
        uniform = torch.rand(len(cosine), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        draws = self.margin + self.std * math.sqrt(2.0) * torch.erfinv(2.0 * uniform - 1.0)
        draws = draws.clamp(0.0, 1.0 if self.kind == "cos" else math.pi / 2).float()
        if cosine.is_cuda:
            draws = draws.pin_memory()
        draws = draws.to(cosine.device, non_blocking=True)
        if not self.plus:
            return {"margin": draws}
        nearest_first = cosine.detach().argsort(descending=True, stable=True)
        return {"margin": torch.empty_like(draws).index_copy_(0, nearest_first, draws.sort().values)}

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        cosine = at_least_float32(cosine)
        margin = self.share * state["margin"].to(cosine.dtype)
        if self.kind == "cos":
            return self.scale * (cosine - margin)
        return self.logits_with_derivative(cosine, *cos_of_sum(cosine, margin))
