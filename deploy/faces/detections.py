"""What all face detectors share: the letterbox, the choice among overlapping boxes, and the bounds on what a file may return.

Coordinates are pixels with the centre of the first pixel at 0, so that a picture of W pixels reaches from -0.5 to W - 0.5. A
picture that is scaled by f has its point x at (x + 0.5) f - 0.5, which is how OpenCV resizes.
Shapes: H, W = height and width of a picture, n = candidates, A = cells of all strides times anchors of a cell.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from eval.foreign_networks import open_session, parse_onnx
from utils.text import one_line

STRIDES = (8, 16, 32)  # pixels of the detector's input for each cell of its three grids
MULTIPLE = 32  # of each side of an input without a fixed size: the coarsest stride
_MAX_CANDIDATES = 5000  # that are compared with each other, best first; a photograph of a crowd has some thousands
_MAX_FACES = 1000  # of a picture
LONGEST = 8192  # pixels, of a side of a detector's input; the image alone then has 0.8 GB as float32
_DIGITS = 3  # of coordinates, in pixels; what landmarks.csv has is then what was aligned by


class Face(NamedTuple):
    """A detected face, in pixels of the picture."""

    box: np.ndarray  # (4,) x1 y1 x2 y2, inside the picture
    points: np.ndarray  # (5, 2) left eye, right eye, nose, left and right corner of the mouth, as seen
    score: float


class Candidates(NamedTuple):
    """What a detector found before the weak and the double ones are dropped, in pixels of its input."""

    scores: np.ndarray  # (n,)
    boxes: np.ndarray  # (n, 4) x1 y1 x2 y2
    points: np.ndarray  # (n, 5, 2)


class Detector:
    """A face detector, whose graph onnxruntime runs. `detect` may be called by several threads at once.

    Args:
        options: min_score (None = that of the detector's authors), min_size, overlap and longest_side of
            `add_detector_arguments`, which say what faces of a picture count.

    Raises:
        ValueError: its input is too large, or its outputs are not those of such a detector.
    """

    own_min_score = 0.5

    def __init__(self, path: Path, options: argparse.Namespace, session: "Session") -> None:
        fixed = session.fixed
        if fixed and not 1 <= min(fixed) <= max(fixed) <= LONGEST:
            raise ValueError(f"{path}: its input has {fixed[1]} x {fixed[0]} pixels, and a side may have {LONGEST:,} at most")
        self.path, self.options, self.fixed, self.name = path, options, fixed, path.name
        self._session = session
        self.candidates(np.zeros((*(fixed or (2 * MULTIPLE, 3 * MULTIPLE)), 3), dtype=np.uint8), 2.0)

    def detect(self, pixels: np.ndarray) -> list[Face]:
        """Return the faces of a picture (H, W, 3) uint8 RGB, best score first.

        Raises:
            ValueError: the detector fails on it, or returns what cannot be faces.
        """
        canvas, factor = letterbox(pixels, self.fixed, self.options.longest_side)
        minimum = self.own_min_score if self.options.min_score is None else self.options.min_score
        found = strongest(self.candidates(canvas, minimum), minimum, self.path)
        kept = suppress(found.boxes, found.scores, self.options.overlap)
        return to_picture(Candidates(*(part[kept] for part in found)), factor, pixels.shape[:2], self.options.min_size)

    def candidates(self, canvas: np.ndarray, minimum: float) -> Candidates:
        """Return the candidates on a canvas (h, w, 3) uint8 RGB; those with a score below `minimum` may be left out."""
        raise NotImplementedError


def letterbox(pixels: np.ndarray, fixed: tuple[int, int] | None, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a picture on a black canvas of the detector's size, at the top left, and its scale factors (x, y).

    A picture is shrunk to fit, never enlarged.
    """
    height, width = pixels.shape[:2]
    room = fixed or (longest, longest)
    scale = min(1.0, room[0] / height, room[1] / width)
    inner = (max(1, round(height * scale)), max(1, round(width * scale)))
    if inner != (height, width):
        pixels = cv2.resize(pixels, inner[::-1], interpolation=cv2.INTER_AREA)
    outer = fixed or (-(-inner[0] // MULTIPLE) * MULTIPLE, -(-inner[1] // MULTIPLE) * MULTIPLE)
    canvas = np.zeros((*outer, 3), dtype=np.uint8)
    canvas[: inner[0], : inner[1]] = pixels
    return canvas, np.array([inner[1] / width, inner[0] / height])


def strongest(found: Candidates, minimum: float, path: Path) -> Candidates:
    """Return the candidates that count, best first; of equal ones the first.

    Raises:
        ValueError: a score, or a coordinate of one that counts, is not finite.
    """
    if not np.isfinite(found.scores).all():
        raise ValueError(f"{path}: the detector returns scores that are no finite numbers")
    kept = np.flatnonzero(found.scores >= minimum)
    kept = kept[np.argsort(-found.scores[kept], kind="stable")][:_MAX_CANDIDATES]
    scores, boxes, points = (part[kept].astype(np.float64) for part in found)
    if not (np.isfinite(boxes).all() and np.isfinite(points).all()):
        raise ValueError(f"{path}: the detector returns boxes or landmarks that are no finite numbers")
    solid = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    return Candidates(scores[solid], boxes[solid], points[solid])


def suppress(boxes: np.ndarray, scores: np.ndarray, overlap: float) -> np.ndarray:
    """Return the numbers of the boxes (n, 4), best score first, that overlap none of the better ones kept by more than a share.

    The share is that of the intersection in the union.
    """
    waiting, kept = np.argsort(-scores, kind="stable"), list[int]()
    while len(waiting) and len(kept) < _MAX_FACES:
        best, waiting = waiting[0], waiting[1:]
        kept.append(int(best))
        shared, union = shared_areas(boxes[best], boxes[waiting])
        waiting = waiting[shared <= overlap * union]
    return np.array(kept, dtype=np.int64)


def shared_areas(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the areas of intersection and union of boxes (..., 4), which are broadcast."""
    low, high = np.maximum(first[..., :2], second[..., :2]), np.minimum(first[..., 2:], second[..., 2:])
    shared = np.maximum(high - low, 0).prod(axis=-1)
    areas = [(boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1]) for boxes in (first, second)]
    return shared, areas[0] + areas[1] - shared


def to_picture(found: Candidates, factor: np.ndarray, shape: tuple[int, int], min_size: float) -> list[Face]:
    """Return candidates as faces in pixels of the picture; boxes are cut at its border, and small ones dropped."""
    boxes = (found.boxes.reshape(-1, 2, 2) + 0.5) / factor - 0.5
    boxes = np.clip(boxes, -0.5, np.array(shape[::-1]) - 0.5)
    points = np.round((found.points + 0.5) / factor - 0.5, _DIGITS)
    sides = (boxes[:, 1] - boxes[:, 0]).min(axis=1, initial=np.inf)
    return [
        Face(np.round(box.reshape(4), _DIGITS), of_face, float(score))
        for score, box, of_face, side in zip(found.scores, boxes, points, sides, strict=True)
        if side > 0 and side >= min_size
    ]


class Session:
    """An ONNX graph under onnxruntime, from an input (1, 3, H, W) float32 to all its outputs. Threads may share it.

    Args:
        any_size: the sizes that the file names are those with which it was written, and no rule.

    Attributes:
        fixed: (height, width) of its input; None = any multiples of MULTIPLE.
    """

    def __init__(self, path: Path, any_size: bool = False) -> None:
        model = _without_sizes(path) if any_size else None
        self.path, self._session = path, open_session(path, 1, model)  # pictures are processed at once by several threads
        entries = self._session.get_inputs()
        shape = entries[0].shape if len(entries) == 1 else []
        sides = [side if isinstance(side, int) and side > 0 else None for side in shape[2:]]
        colours = shape[1] if len(shape) == 4 else 0
        if (isinstance(colours, int) and colours != 3) or (None in sides and any(sides)):
            raise ValueError(f"{path}: a detector has one input (1, 3, height, width), this has {[e.shape for e in entries]}")
        self._entry, self.names = entries[0].name, [output.name for output in self._session.get_outputs()]
        self.fixed = (int(sides[0]), int(sides[1])) if sides[0] and sides[1] else None

    def run(self, image: np.ndarray) -> list[np.ndarray]:
        """Return all outputs for an image (H, W, 3) float32; ValueError if the graph fails on it."""
        images = np.ascontiguousarray(image.transpose(2, 0, 1)[None])
        try:
            outputs: list[Any] = self._session.run(None, {self._entry: images})
        except Exception as error:
            last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise ValueError(f"{self.path}: it cannot run on an image {images.shape}: {one_line(last)}") from None
        if not all(isinstance(part, np.ndarray) and part.dtype.kind == "f" for part in outputs):
            raise ValueError(f"{self.path}: a detector returns floating-point numbers only")
        return outputs


def _without_sizes(path: Path) -> bytes:
    model = parse_onnx(path)
    for entry in (*model.graph.input[:1], *model.graph.output):
        for axis, dim in enumerate(entry.type.tensor_type.shape.dim):
            if axis != 1:
                dim.dim_param = f"{entry.name}_{axis}"
    data: bytes = model.SerializeToString()
    return data
