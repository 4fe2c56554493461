"""Checks of the arguments of losses. The errors name the key, the rule and the value."""

import math
from collections.abc import Sequence

from utils.text import did_you_mean


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
