"""KappaFace: margins that follow how concentrated and how large a class is.

Source: Oinar et al., "KappaFace: Adaptive Additive Angular Margin Loss for Deep Face Recognition", 2022,
https://arxiv.org/abs/2201.07394.
Shapes: B = samples, the global batch; n = classes of one shard; D = embedding size; k = samples of one shard.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .angles import at_least_float32, cos_of_sum
from .margin import ClassNumber, Margin, Published, Ranks, angle_margin, number_in

_LEAST_SPREAD = 1e-3  # of 1 - r^2, so that equal images of one class do not give it an infinite concentration
_FEWEST = 2.0  # images by which a concentration can be estimated


class KappaFace(Margin):
    """Margins by how spread and how small a class is; `every` should be about an epoch.

    s cos(theta + margin psi_y), with psi of each class from its images of the last `every` optimizer steps.

    With r the length of the mean unit embedding of a class and n the number of its images,

        kappa = r (D - r^2) / (1 - r^2)                               concentration of a von Mises-Fisher distribution
        psi = gamma (1 - sigmoid(temperature (kappa - mean) / std)) + (1 - gamma) (cos(pi n / (1.05 max n)) + 1) / 2

    so that spread and small classes have large margins. Mean, standard deviation and largest n are over all classes with two
    images or more; the others keep their psi. Until the first refresh psi is 0.5, that of a class of mean concentration and
    half the largest size. These are the authors' program's constants; their paper has gamma = 0.3 and max n. Where their
    program computes the embeddings of all images anew after each epoch, this adds up those of the training steps.

    Args:
        margin: the largest angle in radians.
        temperature: steepness of the part of the concentration.
        gamma: its share in psi, in [0, 1].
        every: optimizer steps between refreshes; it should be about an epoch, so that n is the size of a class.
    """

    family = "adaptive"
    published = (Published("kappaface", "KappaFace", "2201.07394"),)

    def __init__(
        self,
        scale: float = 64.0,
        margin: float = 0.8,
        temperature: float = 0.4,
        gamma: float = 0.7,
        every: int = 2000,
        **shared: Any,
    ) -> None:
        super().__init__(scale, **shared)
        self.margin = angle_margin("margin", margin, " for kappaface")
        self.temperature = number_in("temperature", temperature, 0.0, 100.0)
        self.gamma = number_in("gamma", gamma, 0.0, 1.0, " (the share of the concentration)")
        self.every = int(number_in("every", every, 1, 1e9, " (optimizer steps)"))

    def class_numbers(self, dim: int) -> Mapping[str, ClassNumber]:
        """Return psi, the sum of the unit embeddings since the last refresh, and their number."""
        return {"psi": ClassNumber((), 0.5), "sums": ClassNumber((dim,)), "counts": ClassNumber(())}

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        cosine = at_least_float32(cosine)
        margin = (self.share * self.margin) * state["psi"].to(cosine.dtype)
        return self.logits_with_derivative(cosine, *cos_of_sum(cosine, margin))

    @torch.no_grad()
    def collect(self, numbers: Mapping[str, Tensor], rows: Tensor, unit: Tensor, good: Tensor) -> None:
        """Add the unit embeddings (k, D) to the sums of their classes."""
        # samples of one class get the same sum and write the same value: index_add_ has no fixed order on CUDA
        same = (rows[:, None] == rows[None]).float()
        added = torch.where(good, same @ unit, 0.0)
        numbers["sums"][rows] = numbers["sums"][rows] + added
        numbers["counts"][rows] = numbers["counts"][rows] + torch.where(good, same.sum(dim=1), 0.0)

    @torch.no_grad()
    def refresh(self, numbers: Mapping[str, Tensor], step: int, good: Tensor, ranks: Ranks) -> None:
        """Compute psi of all classes in every `every`-th step, and begin new sums."""
        if step % self.every:
            return
        psi, sums, counts = (numbers[name] for name in ("psi", "sums", "counts"))
        seen = counts >= _FEWEST
        length = torch.linalg.vector_norm(sums, dim=1) / counts.clamp_min(1.0)
        kappa = length * (sums.shape[1] - length**2) / (1.0 - length**2).clamp_min(_LEAST_SPREAD)
        count, total = ranks.sum(torch.stack([seen.sum().float(), torch.where(seen, kappa, 0.0).sum()]))
        mean = total / count.clamp_min(1.0)
        squares = ranks.sum(torch.where(seen, (kappa - mean) ** 2, 0.0).sum()[None])[0]
        std = (squares / (count - 1.0).clamp_min(1.0)).sqrt()
        largest = ranks.max(counts.amax()[None])[0]
        standard = torch.where(std > 0, (kappa - mean) / std, 0.0)
        of_concentration = 1.0 - torch.sigmoid(self.temperature * standard)
        of_size = ((counts * (math.pi / 1.05) / largest.clamp_min(1.0)).cos() + 1.0) / 2.0
        new = self.gamma * of_concentration + (1.0 - self.gamma) * of_size
        psi.copy_(torch.where(seen & good, new, psi))
        sums.mul_(~good)
        counts.mul_(~good)
