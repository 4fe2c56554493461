"""From weights to use: faces in photographs, tables of embeddings, galleries, exported networks, cards, and a page.

from deploy import FaceNetwork, Gallery
"""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gallery.store import Gallery
    from .network import FaceNetwork

__all__ = ["FaceNetwork", "Gallery"]


def __getattr__(name: str) -> Any:
    """Import a class when it is asked for: programs that only need a part of this package start faster."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for package in ("backbones", "configs", "data", "eval", "utils"):
        found = importlib.util.find_spec(package)
        if found and found.origin and Path(found.origin).parent.parent != Path(__file__).parent.parent:
            raise ImportError(f"{found.origin} hides the package {package!r} that deploy needs; give that file another name")
    if name == "Gallery":
        from .gallery.store import Gallery

        return Gallery
    from .network import FaceNetwork

    return FaceNetwork
