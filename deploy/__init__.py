"""From weights to use: faces in photographs, tables of embeddings, galleries, exported networks, cards, and a page.

from deploy import FaceNetwork, Gallery
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gallery.store import Gallery
    from .network import FaceNetwork

__all__ = ["FaceNetwork", "Gallery"]


def __getattr__(name: str) -> Any:
    """Import a class when it is asked for: programs that only need a part of this package start faster."""
    if name == "FaceNetwork":
        from .network import FaceNetwork

        return FaceNetwork
    if name == "Gallery":
        from .gallery.store import Gallery

        return Gallery
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
