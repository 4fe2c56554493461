"""A picture of searches: each face, and beside it the people whom it resembles most."""

from collections.abc import Sequence

import numpy as np

from utils.report.contact_sheet import captioned_sheet

from .search import Match
from .store import Gallery

MAX_ROWS = 100  # faces on a sheet
_MOST = 10  # people beside a face; --k may be 1,000, and the sheet would take gigabytes
_LETTERS = 15  # of the name of a picture that is searched


def draw_sheet(rows: Sequence[tuple[np.ndarray, str, Sequence[Match]]], gallery: Gallery, threshold: float | None) -> bytes:
    """Return a PNG with a row for each face (H, W, 3) uint8 RGB: the face, its name, and the people found.

    Where the gallery keeps no picture of an image, the place is grey.
    """
    drawn = []
    for pixels, name, matches in rows:
        cells: list[tuple[np.ndarray | None, tuple[str, ...]]] = [(pixels, (_end(name), _verdict(matches, threshold)))]
        for match in matches[:_MOST]:
            face = gallery.picture(match.image)
            grey = np.full((8, 8, 3), 200, dtype=np.uint8)
            cells.append((grey if face is None else face, (match.person, f"{match.cosine:.3f}")))
        drawn.append(cells)
    return captioned_sheet(drawn)


def _end(name: str) -> str:
    """Return the end of a name, which is what tells the pictures of a folder apart."""
    return name if len(name) <= _LETTERS else f"..{name[2 - _LETTERS :]}"


def _verdict(matches: Sequence[Match], threshold: float | None) -> str:
    if threshold is None:
        return ""
    return "known" if matches and matches[0].cosine > threshold else "unknown"
