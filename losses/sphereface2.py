"""SphereFace2: every class has a binary classifier of its own, with one bias for all.

Source: Wen et al., "SphereFace2", ICLR 2022, https://arxiv.org/abs/2108.01513.
Shapes: B = samples, the global batch.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .angles import at_least_float32
from .margin import Margin, Published, State, cosine_margin, number_in
from .negatives import Negatives, negatives_of


class SphereFace2(Margin):
    """A binary classifier for each class: for verification at one threshold.

    l softplus(-s (g(c_y) - m) - b) + (1 - l) sum_j softplus(s (g(c_j) + m) + b), with g(c) = 2 ((c + 1) / 2)^t - 1.

    b is trained. It begins where the target and the negatives pull equally on it if all cosines are 0. Otherwise the sum over
    all classes would pull on it alone for thousands of steps. As nothing is normalised over the classes, no sample waits for
    another shard's sum. A softplus of |z| beyond 88 needs log(1 + exp) in its stable form.

    Args:
        scale: s (r in the paper).
        margin: m in [0, 1), a cosine.
        t: exponent in [1, 10]: a larger one moves g(c) down.
        balance: l, weight of the target class, in [0, 1].
        gradient: "straight_through" gives g the derivative 1, for the negatives, too, as OpenSphere does.
    """

    family = "hard_and_sums"
    published = (Published("sphereface2", "SphereFace2", "2108.01513"),)

    link = "sum"

    def __init__(self, scale: float = 40.0, margin: float = 0.4, t: float = 3.0, balance: float = 0.7, **shared: Any) -> None:
        super().__init__(scale, **shared)
        self.margin = cosine_margin("margin", margin, " for sphereface2")
        self.t = number_in("t", t, 1.0, 10.0, " (an exponent)")
        self.balance = number_in("balance", balance, 0.01, 0.99, " (the weight of the target class)")
        self.target_weight, self.negative_weight = self.balance, 1.0 - self.balance
        self.bias = nn.Parameter(torch.zeros(()))

    @torch.no_grad()
    def prepare(self, num_classes: int, num_counted: int) -> None:
        """Set the first bias, which solves l sigmoid(-p - b) = (1 - l) (C - 1) sigmoid(q + b) for the C classes that count.

        p = s (g(0) - m) and q = s (g(0) + m). With B = exp(b) and z = l / ((1 - l) (C - 1)) this is the quadratic equation
        exp(p + q) B^2 + (1 - z) exp(q) B - z = 0. B is computed without the cancellation of 1 - z, and in logarithms.
        """
        z = self.balance / ((1.0 - self.balance) * max(num_counted - 1, 1))
        at_zero, margin = 2.0 * 0.5**self.t - 1.0, self.share * self.margin
        p, q = self.scale * (at_zero - margin), self.scale * (at_zero + margin)
        root = math.sqrt((1.0 - z) ** 2 + 4.0 * z * math.exp(p - q))
        if z == 1.0:  # the root may be 0
            first = -(p + q) / 2.0
        else:
            first = math.log(2.0 * z / (1.0 - z + root)) - q if z < 1.0 else math.log((z - 1.0 + root) / 2.0) - p
        self.bias.fill_(first)

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        cosine = at_least_float32(cosine)
        with torch.no_grad():
            half = ((cosine + 1.0) * 0.5).clamp(0.0, 1.0)
            value = 2.0 * half**self.t - 1.0 - self.share * self.margin
            derivative = self.t * half ** (self.t - 1.0)
        return self.logits_with_derivative(cosine, value, derivative) + state["bias"]

    def negatives(self, cosine: Tensor, norm: Tensor, state: State) -> Negatives:
        """Return s (g(c) + m) + b."""
        straight, constant = self.gradient == "straight_through", self.share * self.margin
        return negatives_of("power", cosine, straight, scale=self.scale, slope=self.t, constant=constant, offset=state["bias"])

    def negative_offset(self, state: State) -> Tensor:
        """Return b, ()."""
        bias: Tensor = state["bias"]
        return bias

    @property
    def logit_bound(self) -> float:
        """Infinite, since the bias is trained; a sum of softplus needs no bound."""
        return math.inf
