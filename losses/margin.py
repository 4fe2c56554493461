"""The interface between a margin and the head: cosines in, logits out.

Source: the losses of Wang et al. (CosFace), Deng et al. (ArcFace), Liu et al. (SphereFace) and their successors are all
cross-entropy, or a sum over classes, of logits that are a function of the cosines. They differ in that function.
Shapes: B = samples, the global batch; c = classes of one chunk of the head.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from utils.text import did_you_mean

from .negatives import Negatives, negatives_of

GRADIENTS = ("exact", "straight_through")
SCHEDULE = ("margin_start", "margin_steps")  # arguments that a class takes as **schedule and hands on to Margin
SHARED = ("gradient", *SCHEDULE)  # and those that it takes as **shared
State = dict[str, Tensor]
Stages = tuple[tuple[int, Mapping[str, float]], ...]  # the optimizer step, counted from 1, and the arguments from there on


class Ranks(Protocol):
    """What a margin may ask of the other ranks. All call it equally often; the results are equal on all."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum over the ranks; tensor is overwritten."""

    def max(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks; tensor is overwritten."""


class ClassNumber(NamedTuple):
    """A number, or a tensor, that a margin keeps of each class. It lives with the centre of the class.

    A trained number is updated by the optimizer of the class centres, without weight decay, for all classes in every step.
    `observe` must hand it on in the state under its name, by which `target` is differentiable.
    """

    shape: tuple[int, ...] = ()  # of one class; those of shape () are given to `observe`
    first: float = 0.0  # the first value of each
    trained: bool = False
    low: float = -math.inf  # a trained number is kept between low and high
    high: float = math.inf


class Published(NamedTuple):
    """Settings with which a paper, or its authors' program, trains a loss: a row of the tables and of the benchmark."""

    name: str  # of the row; that of the settings which are the defaults is the loss's own
    title: str  # for tables and pictures
    paper: str  # arXiv number, or venue
    arguments: Mapping[str, Any] = MappingProxyType({})  # of the loss, where they differ from the defaults
    head: Mapping[str, Any] = MappingProxyType({})  # keys of the section `head` that differ from the configuration
    training: str = ""  # what else the paper trains with, as overrides on the command line


class Margin(nn.Module):
    """Maps cosines to logits, without knowledge of ranks, labels or class centres. Subclasses define at least `target`.

    A margin's part in an optimizer step:

        margin.at_step(step)                                     # once; numbers that follow a schedule
        state = margin.observe(cosine, norm, seed, of_class)     # once per micro-batch; changes nothing
        margin.negatives(cosine, norm, state)                    # the function of the negatives, if it is not linear
        state = margin.complete(state, log_z, hard)              # after the sums over all classes; changes nothing
        margin.target(cosine, norm, state)                       # the logits of the samples' own classes
        margin.commit([state of each micro-batch], good)         # once, when the step updates the centres

    The head may rely on the following:
    - `target` and `negatives` depend only on their arguments and on what `at_step` set, sample by sample, and change nothing.
    - `target` is differentiable by autograd with respect to cosine, norm and the trained numbers in `state`. Its values and
      derivatives are finite for every finite cosine, including rounding errors beyond [-1, 1]. It computes in fp32 or better,
      for any autocast setting and any input dtype.
    - No method makes the host wait for the device: a number that depends on a batch stays a tensor.
    - For cosines in [-1, 1], no logit of any step is above `logit_bound`, and no negative's is below `lowest_negative`. Both
      may change with the arguments, which `at_step` sets where a training has stages.
      A cosine that rounding puts beyond 1 may exceed them in proportion.
    - A margin keeps state between steps in buffers, so `state_dict` and `.to(device)` include it. The state is equal on all
      ranks, since all methods get the global batch.

    - Trained numbers are the parameters of the module, () each and equal on all ranks. `observe` hands them on in the state,
      by which `target` and `negative_offset` are differentiable.

    Args:
        scale: factor s on all cosines.
        gradient: "exact" differentiates the margin; "straight_through" gives every target logit the derivative `scale`,
            as arcface_torch does. The values are the same.
        margin_start: share of the margin with which a training begins, in [0, 1]; 1 = no schedule.
        margin_steps: optimizer steps in which the share rises to 1, linearly.
    """

    family = "added"  # the picture of face bench losses in which it is drawn
    published: tuple[Published, ...] = ()  # the first row is that of the defaults

    link = "softmax"  # or "sum": each class has a loss of its own, softplus(-t) of the target, softplus(z) of a negative
    negative_weight = 1.0  # of the negatives' softplus, in a sum
    target_weight = 1.0  # of the target's softplus, in a sum
    stages: Stages = ()  # of the training, ascending; the last one that has begun holds. Empty = the arguments never change

    def __init__(self, scale: float = 64.0, gradient: str = "exact", margin_start: float = 1.0, margin_steps: int = 0) -> None:
        super().__init__()
        if not 0 < scale <= 1e30:  # false of nan
            raise ValueError(f"scale must be a number above 0 and at most 1e30 (64 is usual), got {scale}")
        self.scale = float(scale)
        self.gradient = one_of("gradient", gradient, GRADIENTS)
        self.margin_start = number_in("margin_start", margin_start, 0.0, 1.0, " (a share of the margin)")
        self.margin_steps = int(number_in("margin_steps", margin_steps, 0, math.inf, " (optimizer steps)"))
        if (margin_start < 1.0) != (margin_steps > 0):
            rule, fix = (
                ("1 or more where margin_start is below 1", "set in how many steps the margin grows, or margin_start=1")
                if margin_start < 1.0
                else ("0 where margin_start is 1", "set with which share of the margin to begin, or margin_steps=0")
            )
            raise ValueError(f"margin_steps must be {rule}, got {margin_steps}; {fix}")
        self.share = 1.0  # of the margin, in this step
        Margin.at_step(self, 1)

    def prepare(self, num_classes: int, num_counted: int) -> None:
        """Set first values that depend on how many classes there are, and how many the loss of a step counts, over all ranks.

        The head calls it once, before a checkpoint is loaded.
        """

    def at_step(self, step: int) -> None:
        """Set what depends on the number of the optimizer step, counted from 1: a stage's arguments, the margin's share."""
        for name, value in self.arguments_at(step).items():
            setattr(self, name, value)
        if self.margin_steps:
            self.share = self.margin_start + (1.0 - self.margin_start) * min(1.0, step / self.margin_steps)

    def arguments_at(self, step: int) -> Mapping[str, float]:
        """Return the arguments that the stages set for an optimizer step, counted from 1."""
        return next((arguments for first, arguments in reversed(self.stages) if first <= step), {})

    def observe(self, cosine: Tensor, norm: Tensor, seed: int = 0, of_class: Mapping[str, Tensor] | None = None) -> State:
        """Return the state of a micro-batch that the other methods need: here the parameters by name, and of_class.

        All micro-batches see the buffers of the last optimizer step.

        Args:
            cosine: (B,) fp32, of each sample with its class.
            norm: (B,) fp32, of the embeddings.
            seed: for random numbers: equal on all ranks, different for each micro-batch of a run.
            of_class: by the names of `class_numbers` that have the shape (): the numbers (B,) of the samples' classes. None,
                without a head, stands for the first ones.
        """
        if of_class is None:
            specs = self.class_numbers(1).items()
            of_class = {name: torch.full_like(cosine, spec.first) for name, spec in specs if spec.shape == ()}
        return {**dict(self.named_parameters()), **of_class}

    def negatives(self, cosine: Tensor, norm: Tensor, state: State) -> Negatives:
        """Return the function of the negatives for samples with these target cosines (B,) and norms (B,).

        A margin that overrides it has negatives that are not linear; the others give `negative_scale`.
        """
        return negatives_of("linear", cosine, scale=self.negative_scale(norm, state))

    def negative_scale(self, norm: Tensor, state: State) -> float | Tensor:
        """Return the factor on the cosines of linear negatives: a number, a tensor of one number, or (B,).

        It is differentiable with respect to the norms (B,) if it depends on them.
        """
        return self.scale

    def negative_offset(self, state: State) -> Tensor | None:
        """Return the part of the offset of `negatives` that is trained, () and differentiable; None = nothing is trained.

        A trained number reaches the logits of negatives in this way alone. The offset is equal for all samples, so the head
        needs only the sum of the losses' derivatives with respect to the logits.
        """
        return None

    def complete(self, state: State, log_z: Tensor, hard: Tensor) -> State:
        """Return the state for `target` and `commit`, once the sums over all classes are known.

        Args:
            log_z: (B,) log sum_j exp(logit) over each sample's negatives. Only if link is "softmax".
            hard: (2, B) how many of them are hard, and the sum of their cosines. Zeros unless `negatives` is of kind "hard".
        """
        return state

    def target(self, cosine: Tensor, norm: Tensor, state: Any = None) -> Tensor:
        """Return the (B,) logits of the target classes, from their cosines (B,) and the norms of the embeddings (B,)."""
        raise NotImplementedError(f"{type(self).__name__} must define target(cosine, norm, state)")

    def penalty(self, norm: Tensor) -> Tensor | None:
        """Return what is added to each sample's loss, (B,), differentiable with respect to the norms (B,); None = nothing."""
        return None

    def commit(self, states: Sequence[State], good: Tensor | None = None) -> None:
        """Update the buffers from the states of the micro-batches of an optimizer step.

        Args:
            good: () bool on the device; where it is False, all buffers keep their values. None = True.
        """

    @torch.no_grad()
    def keep(self, good: Tensor | None, **values: Tensor) -> None:
        """Store new values of the buffers with these names, unless good is False."""
        for name, value in values.items():
            buffer = getattr(self, name)
            buffer.copy_(value if good is None else torch.where(good, value, buffer))

    def class_numbers(self, dim: int) -> Mapping[str, ClassNumber]:
        """Return what the margin keeps of each class, by name, for embeddings of dim numbers.

        The methods that get these numbers get (n, *shape) of the n classes of one shard, which they may change in place.
        """
        return {}

    def class_penalty(self, numbers: Mapping[str, Tensor], num_classes: int) -> tuple[Tensor, State] | None:
        """Return a shard's part () of what the loss has of all num_classes classes, and its gradients by name; None = 0."""
        return None

    def collect(self, numbers: Mapping[str, Tensor], rows: Tensor, unit: Tensor, good: Tensor) -> None:
        """Take the samples of a micro-batch whose classes lie in the shard, after a step, if the margin has numbers of classes.

        Args:
            rows: (k,) int64, the row of each sample's class.
            unit: (k, D) fp32, the unit embeddings.
            good: () bool on the device; where it is False, nothing may change.
        """

    def refresh(self, numbers: Mapping[str, Tensor], step: int, good: Tensor, ranks: Ranks) -> None:
        """Recompute numbers of all classes after the step-th optimizer step, counted from 1; `good` is as in `collect`."""

    @property
    def logit_bound(self) -> float:
        """An upper bound of all logits; infinite if there is none before the batch is known."""
        return self.scale

    @property
    def lowest_negative(self) -> float:
        """A lower bound of the logits of the negatives: s times a cosine of -1, where no subclass has another."""
        return -self.scale if math.isfinite(self.logit_bound) else -math.inf

    @property
    def linear_negatives(self) -> bool:
        """Whether the negative logits are exactly negative_scale * cosine, so that the scale can go into a matrix product."""
        return type(self).negatives is Margin.negatives

    @property
    def constant_scale(self) -> bool:
        """Whether linear negatives are exactly `scale` * cosine in every step, so that nothing of the batch must be known."""
        return type(self).negative_scale is Margin.negative_scale

    def logits_with_derivative(self, cosine: Tensor, value: Tensor, derivative: Tensor) -> Tensor:
        """Return the (B,) logits scale * value. Their derivative is scale * derivative, or scale if straight-through.

        Autograd through acos or a square root gives infinity at |cosine| = 1, and NaN even in a branch that torch.where
        does not take. So `value` and `derivative`, both (B,), are computed without autograd.
        """
        distance = cosine - cosine.detach()  # zero, but autograd sees the identity
        if self.gradient == "exact":
            distance = derivative * distance
        return self.scale * (value + distance)


# checks of the arguments of losses; the errors name the key, the rule and the value


def number_in(key: str, value: float, low: float, high: float, note: str = "") -> float:
    """Return value; ValueError, with `note` behind the rule, if it is not finite, or not in [low, high]."""
    if not (low <= value <= high and math.isfinite(value)):  # false of nan
        rule = f"{low:g} or more" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{key} must be {rule}{note}, got {value}")
    return float(value)


def number_above(key: str, value: float, low: float, note: str = "") -> float:
    """Return value; ValueError if value is not above low, or it is not finite."""
    if not (value > low and math.isfinite(value)):
        raise ValueError(f"{key} must be a number above {low:g}{note}, got {value}")
    return float(value)


def angle_margin(key: str, value: float, note: str = "") -> float:
    """Return value; ValueError if value is not in [0, pi / 2]."""
    if not 0.0 <= value <= math.pi / 2:
        raise ValueError(f"{key} must be in [0, pi / 2]{note} (radians, not degrees), got {value}")
    return float(value)


def cosine_margin(key: str, value: float, note: str = "") -> float:
    """Return value; ValueError if value is not in [0, 1)."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{key} must be in [0, 1){note} (a cosine, not an angle), got {value}")
    return float(value)


def one_of(key: str, value: str, choices: Sequence[str]) -> str:
    """Return value; ValueError if value is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{key} must be one of {', '.join(choices)}, got '{value}'.{did_you_mean(value, choices)}")
    return value
