"""SCRFD detectors of insightface as ONNX files: for each stride a grid of scores, distances to the sides, and landmarks.

Source: Guo et al., "Sample and Computation Redistribution for Efficient Face Detection", ICLR 2022, and the files themselves.
Input: RGB, (x - 127.5) / 128. The anchors of cell (row i, column j) of a grid of stride s are at (j s, i s) and follow each
other; distances and offsets are in units of s.
"""

from pathlib import Path

import numpy as np

from .detections import MULTIPLE, STRIDES, Candidates, Detector, Session, Settings

_WIDTHS = (1, 4, 10)  # numbers of an anchor: score, distances, offsets of five points


class Scrfd(Detector):
    """An SCRFD graph: nine outputs, scores, distances and offsets for each of three strides, in any order."""

    own_min_score = 0.5  # det_thresh of insightface

    def __init__(self, path: Path, settings: Settings, session: Session) -> None:
        super().__init__(path, settings, session.fixed)
        self._session = session
        self.candidates(np.zeros((*(session.fixed or (2 * MULTIPLE, 3 * MULTIPLE)), 3), dtype=np.uint8), 2.0)

    def candidates(self, canvas: np.ndarray, minimum: float) -> Candidates:
        images = ((canvas.astype(np.float32) - 127.5) / 128).transpose(2, 0, 1)[None]
        outputs = self._session.run(np.ascontiguousarray(images))
        height, width = canvas.shape[:2]
        grids = [(-(-height // stride), -(-width // stride)) for stride in STRIDES]
        parts = by_stride(outputs, self.path)
        counts = [len(scores) for scores, _, _ in parts]
        per_cell = counts[0] // (grids[0][0] * grids[0][1])
        if not per_cell or counts != [rows * columns * per_cell for rows, columns in grids]:
            raise ValueError(
                f"{self.path}: an SCRFD detector has equally many anchors in each cell of its grids, which for {width} x "
                f"{height} pixels have {' and '.join(str(rows * columns) for rows, columns in grids)} cells, this has {counts}"
            )
        kept: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for stride, grid, (scores, distances, offsets) in zip(STRIDES, grids, parts, strict=True):
            centres = anchor_centres(*grid, stride, per_cell)
            chosen = np.flatnonzero(~(scores[:, 0] < minimum))  # also what is no number, which is an error
            boxes, points = decode(centres[chosen], distances[chosen] * stride, offsets[chosen] * stride)
            kept.append((scores[chosen, 0], boxes, points))
        return Candidates(*(np.concatenate(parts) for parts in zip(*kept, strict=True)))


def by_stride(outputs: list[np.ndarray], path: Path) -> list[list[np.ndarray]]:
    """Return [scores (n, 1), distances (n, 4), offsets (n, 10)] for each stride, finest first.

    Raises:
        ValueError: the outputs are others.
    """
    rows = [part.reshape(-1, part.shape[-1]) if part.size else np.zeros((0, 0)) for part in map(np.atleast_1d, outputs)]
    kinds = [sorted((part for part in rows if part.shape[1] == width), key=len, reverse=True) for width in _WIDTHS]
    found = [list(parts) for parts in zip(*kinds, strict=False)]
    same = all(len({len(part) for part in parts}) == 1 for parts in found)
    if len(rows) != 9 or len(found) != 3 or not same:
        raise ValueError(
            f"{path}: an SCRFD detector returns scores (n, 1), boxes (n, 4) and landmarks (n, 10) for each of three strides, "
            f"this returns {', '.join(str(part.shape) for part in outputs)}"
        )
    return found


def anchor_centres(rows: int, columns: int, stride: int, per_cell: int) -> np.ndarray:
    """Return the (rows * columns * per_cell, 2) x and y of all anchors, row by row; those of a cell follow each other."""
    y, x = np.mgrid[:rows, :columns]
    return np.repeat(np.stack([x, y], axis=-1).reshape(-1, 2) * stride, per_cell, axis=0).astype(np.float64)


def decode(centres: np.ndarray, distances: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return boxes (n, 4) and points (n, 5, 2), from anchors, their distances to left, top, right, bottom, and offsets."""
    boxes = np.concatenate([centres - distances[:, :2], centres + distances[:, 2:]], axis=1)
    return boxes, centres[:, None] + offsets.reshape(-1, 5, 2)
