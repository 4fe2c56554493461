"""Margins by name. The margin is the part in which face recognition losses differ; margin.py defines its interface."""

import inspect
from typing import Any

from utils.text import did_you_mean

from .adacos import AdaCos
from .adaface import AdaFace
from .adaptiveface import AdaptiveFace
from .angular import LiArcFace, QAMFace
from .arcface import ArcFace
from .circle import Circle
from .combined import Combined
from .cosface import CosFace
from .elasticface import ElasticFace
from .hard_negatives import ArcNegFace, CurricularFace, MVSoftmax, NPCFace
from .kappaface import KappaFace
from .magface import MagFace
from .margin import SCHEDULE, SHARED
from .margin import Margin as Margin
from .margin import Published as Published
from .normface import NormFace
from .sphereface import SphereFace, SphereFaceR
from .sphereface2 import SphereFace2
from .uniface import UniFace

_CLASSES: tuple[type[Margin], ...] = (
    *(NormFace, CosFace, ArcFace, Combined, SphereFace, SphereFaceR, SphereFace2, UniFace, CurricularFace, MVSoftmax),
    *(ArcNegFace, NPCFace, AdaCos, AdaptiveFace, AdaFace, MagFace, ElasticFace, KappaFace, Circle, LiArcFace, QAMFace),
)
MARGINS = {margin.published[0].name: margin for margin in _CLASSES}


def margin_arguments(name: str) -> dict[str, Any]:
    """Return the arguments of the margin of that name, with their defaults; ValueError if no margin has that name."""
    if name not in MARGINS:
        raise ValueError(f"name must be one of {', '.join(MARGINS)}, got '{name}'.{did_you_mean(name, MARGINS)}")
    own, base = (inspect.signature(margin).parameters for margin in (MARGINS[name], Margin))
    found = {key: parameter.default for key, parameter in own.items() if parameter.kind is not parameter.VAR_KEYWORD}
    handed_on = {"shared": SHARED, "schedule": SCHEDULE}  # by the name under which a class hands them to its base
    return found | {key: base[key].default for name in own.keys() & handed_on.keys() for key in handed_on[name]}


def build_margin(name: str, **arguments: Any) -> Margin:
    """Return the margin of that name; its class documents the arguments; ValueError for a wrong name or argument."""
    margin_arguments(name)
    return MARGINS[name](**arguments)
