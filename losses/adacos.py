"""AdaCos: scaled cosines without a margin, whose scale follows the training.

Source: Zhang et al., "AdaCos", CVPR 2019, https://arxiv.org/abs/1905.00292.
Shapes: B = samples, the global batch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .angles import at_least_float32
from .margin import Margin, Published, State

_LEAST_SCALE = 1.0


class AdaCos(Margin):
    """No margin, and a scale that follows the training: when no scale is to be chosen.

    s cos theta for all classes, with s = ln(B_avg) / cos(min(pi / 4, median theta_y)).

    B_avg is the mean over the samples of sum_{j != y} exp(s c_j) with the last s, which begins as sqrt(2) ln(C - 1). The
    published program uses the new scale in the same step, which would take a second pass over all classes. Here it holds
    from the next step on. Its median and mean are those of the global batch, and it is saved with the run. The median of an
    even number is the lower one, as torch's. B_avg is of the classes in the loss; with weights for sampled negatives
    (head.logit_correction) it estimates that of all. The scale stays at 1 or more: a few classes could turn it negative.

    Args:
        dynamic: whether the scale follows the training; if not, it stays as it begins ("fixed AdaCos").
    """

    family = "adaptive"
    published = (
        Published("adacos", "AdaCos", "1905.00292"),
        Published("adacos_fixed", "AdaCos, fixed scale", "1905.00292", {"dynamic": False}),
    )

    running_scale: Tensor

    def __init__(self, dynamic: bool = True) -> None:
        super().__init__(scale=1.0)  # until the number of classes is known
        self.dynamic = dynamic
        if dynamic:
            self.register_buffer("running_scale", torch.ones(()))

    def prepare(self, num_classes: int, num_counted: int) -> None:
        """Set the first scale."""
        self.scale = max(_LEAST_SCALE, math.sqrt(2.0) * math.log(max(num_classes - 1, 1)))
        if self.dynamic:
            self.running_scale.fill_(self.scale)

    def observe(self, cosine: Tensor, norm: Tensor, seed: int = 0, of_class: Mapping[str, Tensor] | None = None) -> State:
        """Return the scale () of this step, and the target angles (B,) that the next one follows."""
        if not self.dynamic:
            return {}
        return {"scale": self.running_scale.clone(), "theta": at_least_float32(cosine.detach()).clamp(-1.0, 1.0).acos()}

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        return self.negative_scale(norm, state) * at_least_float32(cosine)

    def negative_scale(self, norm: Tensor, state: State) -> float | Tensor:
        """Return the scale of this step, () if it is dynamic."""
        return state["scale"] if self.dynamic else self.scale

    def complete(self, state: State, log_z: Tensor, hard: Tensor) -> State:
        """Return the state with log_z (B,), of which the next scale is made."""
        return {**state, "log_z": log_z} if self.dynamic else state

    def commit(self, states: Sequence[State], good: Tensor | None = None) -> None:
        """Store the scale of the next step, from the samples of all micro-batches."""
        if not self.dynamic:
            return
        theta, log_z = (torch.cat([state[name] for state in states]) for name in ("theta", "log_z"))
        log_average = log_z.logsumexp(0) - math.log(len(log_z))
        scale = log_average / theta.median().clamp_max(math.pi / 4).cos()
        self.keep(good, running_scale=scale.clamp_min(_LEAST_SCALE))

    @property
    def constant_scale(self) -> bool:
        """Whether the scale is fixed."""
        return not self.dynamic

    @property
    def logit_bound(self) -> float:
        """Infinite if the scale is dynamic, because only the device knows it."""
        return math.inf if self.dynamic else self.scale
