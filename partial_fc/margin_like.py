"""What the head asks of a margin. losses/margin.py documents the interface; partial_fc imports nothing of losses/.

Shapes: B = samples of the global (micro-)batch, D = embedding size, c = classes of one chunk, n = classes of a shard.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .collectives import Collectives

State = dict[str, Tensor]


class NegativesLike(Protocol):
    """The function from the cosines of the negatives to their logits; see losses/negatives.py."""

    @property
    def kind(self) -> str:
        """The name of the function."""

    @property
    def coefficients(self) -> Tensor:
        """(6, B) fp32: scale, quadratic, slope, constant, threshold and offset of each sample."""

    @property
    def straight(self) -> bool:
        """Whether the derivative is the scale."""

    def logits(self, cosine: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (c, B) of cosines (c, B), and their derivatives with respect to the cosines (c, B)."""


class ClassNumberLike(Protocol):
    """What a margin keeps of each class; see losses/margin.py."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one class."""

    @property
    def first(self) -> float:
        """The first value."""

    @property
    def trained(self) -> bool:
        """Whether the head's optimizer changes it."""

    @property
    def low(self) -> float:
        """The smallest value of a trained number."""

    @property
    def high(self) -> float:
        """The largest value of a trained number."""


class MarginLike(Protocol):
    """The interface of a margin that the head uses; see losses/margin.py."""

    link: str
    negative_weight: float
    target_weight: float
    scale: float

    @property
    def logit_bound(self) -> float: ...
    @property
    def lowest_negative(self) -> float: ...
    @property
    def linear_negatives(self) -> bool: ...
    @property
    def constant_scale(self) -> bool: ...
    def prepare(self, num_classes: int, num_counted: int) -> None: ...
    def at_step(self, step: int) -> None: ...
    def observe(self, cosine: Tensor, norm: Tensor, seed: int = 0, of_class: Mapping[str, Tensor] | None = None) -> State: ...
    def negatives(self, cosine: Tensor, norm: Tensor, state: State) -> NegativesLike: ...
    def negative_scale(self, norm: Tensor, state: State) -> float | Tensor: ...
    def negative_offset(self, state: State) -> Tensor | None: ...
    def complete(self, state: State, log_z: Tensor, hard: Tensor) -> State: ...
    def target(self, cosine: Tensor, norm: Tensor, state: State) -> Tensor: ...
    def penalty(self, norm: Tensor) -> Tensor | None: ...
    def commit(self, states: Sequence[State], good: Tensor | None = None) -> None: ...
    def class_numbers(self, dim: int) -> Mapping[str, ClassNumberLike]: ...
    def class_penalty(self, numbers: Mapping[str, Tensor], num_classes: int) -> tuple[Tensor, State] | None: ...
    def collect(self, numbers: Mapping[str, Tensor], rows: Tensor, unit: Tensor, good: Tensor) -> None: ...
    def refresh(self, numbers: Mapping[str, Tensor], step: int, good: Tensor, ranks: Collectives) -> None: ...
    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...
    def register_buffer(self, name: str, tensor: Tensor | None) -> None: ...
