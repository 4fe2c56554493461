"""LAMB: Adam whose step has, in every layer, a length in proportion to the layer's weights.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", https://arxiv.org/abs/1904.00962,
Algorithm 2. For the weights w of a layer, which is one parameter tensor here, with the gradient g, element by element,

    m <- beta1 m + (1 - beta1) g,  s <- beta2 s + (1 - beta2) g^2
    u = (m / (1 - beta1^k)) / (sqrt(s / (1 - beta2^k)) + eps) + weight_decay w
    w <- w - lr (|w| / |u|) u                                                  in step number k, from 1

The trust ratio |w| / |u| is 1 where one of the norms is 0, and for parameters without weight decay, so they move as Adam's: the
authors' program leaves norms and biases out of both as well, since the length of a bias that began at 0 says nothing.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """LAMB over parameter groups, on any device; its moments have the names of torch's AdamW."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        # () float on the device, set by `step_if`: the next step changes nothing if it is 1; None = every step counts
        self.found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step; on CUDA the host waits for nothing."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if weights:
                self._move(weights, group)

    def _move(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        good = torch.ones((), device=weights[0].device) if self.found_inf is None else 1.0 - self.found_inf
        # zeros in the place of a bad gradient: times 0 it would still be nan
        gradients = [torch.where(good > 0, weight.grad, 0.0) for weight in weights if weight.grad is not None]
        first, second, steps = (list(kept) for kept in zip(*(self._moments(weight) for weight in weights), strict=True))
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, [good] * len(steps))
        torch._foreach_mul_(first, 1.0 - (1.0 - beta1) * good)  # a skipped step multiplies by 1 and adds 0
        torch._foreach_add_(first, gradients, alpha=1.0 - beta1)
        torch._foreach_mul_(second, 1.0 - (1.0 - beta2) * good)
        torch._foreach_addcmul_(second, gradients, gradients, value=1.0 - beta2)
        # in float64, since 1 - 0.999^k would lose half of its digits; at least 1, so that a skipped first step divides by no 0
        count = torch.stack(steps).double().clamp_min(1.0)
        corrections = [(1.0 - beta**count).float().unbind() for beta in (beta1, beta2)]
        spread = torch._foreach_div(second, corrections[1])
        torch._foreach_sqrt_(spread)
        torch._foreach_add_(spread, group["eps"])
        update = torch._foreach_div(first, corrections[0])
        torch._foreach_div_(update, spread)
        rates = good * group["lr"]
        if group["weight_decay"] != 0:
            torch._foreach_add_(update, weights, alpha=group["weight_decay"])
            of_weights, of_update = torch.stack(torch._foreach_norm(weights)), torch.stack(torch._foreach_norm(update))
            trust = torch.where((of_weights > 0) & (of_update > 0), of_weights / of_update, 1.0)
            torch._foreach_mul_(update, (rates * trust).unbind())
        else:
            torch._foreach_mul_(update, rates)
        torch._foreach_sub_(weights, update)

    def _moments(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return both moments of a parameter and the number of its steps, which are zeros at first."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        return state["exp_avg"], state["exp_avg_sq"], state["step"]
