"""The stages of a training: from given steps on, other classes are sampled, or the loss has another scale or margin.

Source of such a training: You et al., "LVFace", ICCV 2025, https://arxiv.org/abs/2501.13420, which samples the classes first
and then takes all of them. Its penalty on the expectation of features, in between, is not here.
"""

from typing import Any, NamedTuple

from losses import build_margin, margin_arguments
from losses.margin import Margin

_OF_LOSS = ("scale", "margin")


class Stage(NamedTuple):
    """What holds from an optimizer step on, until the next stage begins."""

    first: int  # that step, counted from 0
    sample_rate: float  # share of the class centres in the softmax
    loss: dict[str, float]  # those arguments of the loss that any stage changes, as they are in this one


def head_stages(head: Any, loss: Any, steps_per_epoch: float) -> list[Stage]:
    """Return the stages that the section `head` names, the first from step 0 on; [] if nothing changes.

    Raises:
        ValueError: the loss has no such argument, or two stages begin in the same step.
    """
    changed = [key for key in _OF_LOSS if any(entry[key] != -1 for entry in head.stages)]
    arguments = margin_arguments(loss.name)
    trained = build_margin(loss.name, **{key: loss[key] for key in arguments}).class_numbers(1).keys()
    for key in changed:
        if key not in arguments.keys() - trained:
            has = "trains it" if key in trained else "has no such argument"
            raise ValueError(f"head.stages: {key} cannot change with loss.name={loss.name}, which {has}; take it out")
    stages = [Stage(0, head.sample_rate, {key: loss[key] for key in changed})]
    for number, entry in enumerate(head.stages):
        before = stages[-1]
        first = int(entry.steps) or round(entry.epochs * steps_per_epoch)
        if number and first <= before.first:
            raise ValueError(
                f"head.stages[{number}] must begin after the one before it, got step {first} and {before.first}, at "
                f"{steps_per_epoch:g} steps in an epoch; move it, or take it out"
            )
        rate = before.sample_rate if entry.sample_rate == -1 else entry.sample_rate
        now = Stage(first, rate, {key: before.loss[key] if entry[key] == -1 else entry[key] for key in changed})
        stages = [*stages, now] if first else [now]
    return stages if head.stages else []


def staged_margin(loss: dict[str, Any], stages: list[Stage]) -> Margin:
    """Return the margin of a loss, its `name` and arguments, through these stages; ValueError if one is out of its range."""
    if not stages:
        return build_margin(**loss)
    built = []
    for stage in stages:
        try:
            built.append(build_margin(**{**loss, **stage.loss}))
        except ValueError as error:
            raise ValueError(f"head.stages: from step {stage.first} on loss.{error}") from None
    margin, steps = built[0], [stage.first + 1 for stage in stages]
    numbers = [{key: value for key, value in vars(other).items() if isinstance(value, float)} for other in built]
    # also those that a loss computes from its arguments, such as m1 of sphereface_r
    changed = [*stages[0].loss, *sorted({key for other in numbers for key, value in (other.items() - numbers[0].items())})]
    margin.stages = tuple((step, {key: other[key] for key in changed}) for step, other in zip(steps, numbers, strict=True))
    return margin
