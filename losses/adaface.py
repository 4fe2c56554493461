"""AdaFace: a margin that follows the norm of the embedding, as a measure of the image's quality.

Source: Kim et al., "AdaFace", CVPR 2022, https://arxiv.org/abs/2204.00964.
Shapes: B = samples, the global batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .angles import at_least_float32, cos_of_sum
from .margin import Margin, Published, State, cosine_margin, number_in

_SHORTEST, _LONGEST = 1e-3, 100.0  # norms beyond these are taken as these
_EPS = 1e-3  # added to the standard deviation


class AdaFace(Margin):
    """A margin that follows the image's quality, read from |x|: for sets with many bad images.

    s (cos(theta - m z) - (m + m z)) with z = clip(h (|x| - mean) / (std + eps), -1, 1), which has no gradient.

    Mean and standard deviation (of B - 1) of the norms are running averages, which include the present batch. They begin at
    20 and 100, as published. In a program whose ranks average over their own samples they depend on the number of GPUs; here
    they are those of the global batch, and are saved with the run. The angle theta - m z is 0 where it would be negative, as
    in the authors' program. That also clips angles beyond pi, where no gradient would be left; here the logit continues as
    ArcFace's does.

    Args:
        margin: m in [0, 1).
        h: how fast the margin follows the norm, in [0, 10].
        alpha: weight of the batch in the running averages, in [0, 1].
    """

    family = "adaptive"
    published = (
        Published(
            "adaface", "AdaFace", "2204.00964", training="augment.crop=0.2 augment.low_resolution=0.2 augment.photometric=0.2"
        ),
    )

    mean: Tensor
    std: Tensor

    def __init__(self, scale: float = 64.0, margin: float = 0.4, h: float = 0.333, alpha: float = 0.01, **shared: Any) -> None:
        super().__init__(scale, **shared)
        self.margin = cosine_margin("margin", margin, " for adaface")
        self.h = number_in("h", h, 0.0, 10.0, " (0 = norms do not count)")
        self.alpha = number_in("alpha", alpha, 0.0, 1.0, " (the weight of the batch)")
        self.register_buffer("mean", torch.tensor(20.0))
        self.register_buffer("std", torch.tensor(100.0))

    def observe(self, cosine: Tensor, norm: Tensor, seed: int = 0, of_class: Mapping[str, Tensor] | None = None) -> State:
        """Return mean and deviation of the batch's norms, (), and z (B,) by the running averages with them."""
        norm = at_least_float32(norm.detach()).clamp(_SHORTEST, _LONGEST)
        # one sample has no deviation, so it changes nothing
        mean, std = norm.mean(), norm.std() if len(norm) > 1 else self.std.to(norm.dtype)
        running = self._running(mean, std)
        z = (self.h * (norm - running["mean"]) / (running["std"] + _EPS)).clamp(-1.0, 1.0)
        return {"batch_mean": mean, "batch_std": std, "z": z}

    def _running(self, mean: Tensor, std: Tensor) -> State:
        return {
            "mean": torch.lerp(self.mean.to(mean.dtype), mean, self.alpha),
            "std": torch.lerp(self.std.to(std.dtype), std, self.alpha),
        }

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        cosine = at_least_float32(cosine)
        margin = self.share * self.margin
        of_norm = margin * state["z"].to(cosine.dtype)
        value, derivative = cos_of_sum(cosine, -of_norm)
        return self.logits_with_derivative(cosine, value - (margin + of_norm), derivative)

    def commit(self, states: Sequence[State], good: Tensor | None = None) -> None:
        """Store the running averages with the means over the micro-batches."""
        mean, std = (torch.stack([state[name] for state in states]).mean() for name in ("batch_mean", "batch_std"))
        self.keep(good, **self._running(mean, std))
