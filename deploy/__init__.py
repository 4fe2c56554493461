"""From weights to use: faces in photographs, tables of embeddings, galleries, exported networks, cards, and a page.

from deploy import FaceNetwork, Gallery
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gallery.store import Gallery
    from .network import FaceNetwork

__all__ = ["FaceNetwork", "Gallery"]
_HERE = Path(__file__).resolve().parent


def __getattr__(name: str) -> Any:
    """Import a class when it is asked for: programs that only need a part of this package start faster."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name == "Gallery":
            from .gallery.store import Gallery

            return Gallery
        from .network import FaceNetwork

        return FaceNetwork
    except ImportError as error:
        for package in ("backbones", "data", "eval", "utils"):
            place = Path(getattr(sys.modules.get(package), "__file__", None) or __file__).resolve()
            if place.parent not in (_HERE, _HERE.parent / package):
                raise ImportError(f"{place} hides the package {package!r} that deploy needs; rename it") from error
        raise
