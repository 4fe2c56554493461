"""Margins by name: what separates one face recognition loss from another. See margin.py for what a head may rely on."""

from collections.abc import Callable

from utils.suggest import did_you_mean

from .arcface import ArcFace
from .combined import Combined
from .cosface import CosFace
from .margin import Margin

# name -> (class, the arguments it takes besides scale and gradient)
MARGINS: dict[str, tuple[Callable[..., Margin], tuple[str, ...]]] = {
    "arcface": (ArcFace, ("margin",)),
    "cosface": (CosFace, ("margin",)),
    "combined": (Combined, ("m1", "m2", "m3")),
}


def list_margins() -> list[str]:
    """Return the names that build_margin knows."""
    return list(MARGINS)


def build_margin(name: str, scale: float, margin: float, m1: float, m2: float, m3: float, gradient: str = "exact") -> Margin:
    """Return the margin of that name. arcface and cosface read `margin`, combined reads m1, m2 and m3."""
    if name not in MARGINS:
        hint = did_you_mean(name, MARGINS)
        raise ValueError(f"loss.name must be one of {', '.join(MARGINS)}, got '{name}'.{hint}")
    values = {"margin": margin, "m1": m1, "m2": m2, "m3": m3}
    margin_class, arguments = MARGINS[name]
    return margin_class(scale=scale, gradient=gradient, **{key: values[key] for key in arguments})
