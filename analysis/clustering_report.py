"""Writes a page of clusters: pictures of the largest ones, and of faces that are near to two.

Shapes: n = faces.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.base import FaceDataset
from utils.report.contact_sheet import captioned_sheet
from utils.report.page import Page

from .clustering import Clusters

_ROWS, _EACH = 16, 8  # of a sheet
_SHEETS = {
    "Largest clusters": "The face that is most like the others of its cluster, and then those that are least like them.",
    "Least sure faces with company": "A face, and those of its cluster that are most like the others.",
}


def write_page(
    path: Path, title: str, found: Clusters, dataset: FaceDataset, indices: np.ndarray, facts: Sequence[tuple[str, str]]
) -> None:
    """Write the page, with facts at its top; `indices` (n,) are those of the faces in the set."""
    order = np.lexsort((indices, -found.own, found.labels))
    clusters = np.split(order, np.flatnonzero(np.diff(found.labels[order])) + 1)
    doubtful = np.flatnonzero(~found.sure & (found.own >= 0))
    doubtful = doubtful[np.lexsort((indices[doubtful], (found.own - found.other)[doubtful]))]
    rows = (
        [(rows[0], *rows[:0:-1][: _EACH - 1]) for rows in clusters[:_ROWS]],
        [(row, *(one for one in clusters[found.labels[row]][:_EACH] if one != row)) for row in doubtful[:_ROWS]],
    )
    page = Page(title)
    page.facts(facts)
    for (heading, meaning), sheet in zip(_SHEETS.items(), rows, strict=True):
        page.section(heading)
        page.text(meaning)
        if sheet:
            cells = [[_cell(found, dataset, indices, int(row)) for row in line] for line in sheet]
            page.picture(captioned_sheet(cells), "index in the set; cluster, and mean cosine with its other faces")
    page.write(path)


def _cell(found: Clusters, dataset: FaceDataset, indices: np.ndarray, row: int) -> tuple[np.ndarray | None, Sequence[str]]:
    return dataset.picture(int(indices[row])), (str(indices[row]), f"{found.labels[row]}: {found.own[row]:.3f}")
