"""Margins by name. The margin is the part in which face recognition losses differ; margin.py defines its interface."""

import inspect
from collections.abc import Callable
from typing import Any

from utils.suggest import did_you_mean

from .arcface import ArcFace
from .combined import Combined
from .cosface import CosFace
from .margin import Margin

MARGINS: dict[str, Callable[..., Margin]] = {
    "arcface": ArcFace,
    "cosface": CosFace,
    "combined": Combined,
}


def list_margins() -> list[str]:
    """Return the names that build_margin knows."""
    return list(MARGINS)


def margin_arguments(name: str) -> dict[str, Any]:
    """Return the arguments of the margin of that name, with their defaults.

    Raises:
        ValueError: no margin has that name.
    """
    if name not in MARGINS:
        raise ValueError(f"name must be one of {', '.join(MARGINS)}, got '{name}'.{did_you_mean(name, MARGINS)}")
    return {key: parameter.default for key, parameter in inspect.signature(MARGINS[name]).parameters.items()}


def build_margin(name: str, **arguments: Any) -> Margin:
    """Return the margin of that name; its class documents the arguments.

    Raises:
        ValueError: no margin has that name, or an argument is out of its range.
    """
    margin_arguments(name)
    return MARGINS[name](**arguments)
