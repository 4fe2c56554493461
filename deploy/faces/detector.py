"""The face detectors, ONNX files, run by onnxruntime: what all share, then each; a file's outputs tell which it is.

Reading ONNX files executes nothing. A file that refers to tensors outside its own folder is refused.
Coordinates are pixels with the centre of the first pixel at 0, so that a picture of W pixels reaches from -0.5 to W - 0.5. A
picture that is scaled by f has its point x at (x + 0.5) f - 0.5, which is how OpenCV resizes.
Shapes: H, W = height and width of a picture, n = candidates, A = cells of all strides times anchors of a cell.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from eval.foreign_networks import check_outside_data, open_session, parse_onnx
from utils.cli import SHARE, int_in_range
from utils.files import check_file
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
    return model.SerializeToString()


_SIZES = ((16, 32), (64, 128), (256, 512))  # pixels, of the two prior boxes of a cell, for each stride
_MEANS = np.array([104, 117, 123], dtype=np.float32)  # of blue, green, red
_CENTRE, _SIZE = 0.1, 0.2  # the variances of the source
_CELL = 4  # pixels of CenterFace's input
_WIDTHS = {"cls": 1, "obj": 1, "bbox": 4, "kps": 10}  # numbers of a cell
OUTPUTS = frozenset(f"{kind}_{stride}" for kind in _WIDTHS for stride in STRIDES)


class YuNet(Detector):
    """A YuNet graph of opencv_zoo: cls_8 to kps_32, each with a row for each cell of the grid of its stride s.

    Source: Wu et al., "YuNet: A Tiny Millisecond-level Face Detector", 2023; cv2.FaceDetectorYN. The score is the root of
    cls obj. The box of the cell at corner c has the centre c + s bbox[:2] and size s exp(bbox[2:]), a landmark is at c + s kps.
    The source's right eye is the person's, so the left one as seen: its order of the points is ours. Input: BGR from 0 to 255.
    """

    own_min_score = 0.9  # score_threshold of OpenCV

    def candidates(self, canvas: np.ndarray, minimum: float) -> Candidates:
        outputs = dict(zip(self._session.names, self._session.run(canvas[:, :, ::-1].astype(np.float32)), strict=True))
        height, width = canvas.shape[:2]
        kept: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for stride in STRIDES:
            corners, parts = anchor_centres(height // stride, width // stride, stride, 1), []
            for kind, numbers in _WIDTHS.items():
                output = outputs[f"{kind}_{stride}"]
                if output.size != len(corners) * numbers or output.shape[-1] != numbers:
                    raise ValueError(
                        f"{self.path}: the output {kind}_{stride} of a YuNet detector must have {len(corners) * numbers} "
                        f"numbers, {numbers} a row, for {width} x {height} pixels, this is {output.shape}"
                    )
                parts.append(output.reshape(-1, numbers).astype(np.float64))
            scores = np.sqrt(parts[0].clip(0, 1) * parts[1].clip(0, 1))[:, 0]
            chosen = np.flatnonzero(~(scores < minimum))
            corners, boxes, points = (part[chosen] for part in (corners, *parts[2:]))
            with np.errstate(over="ignore", invalid="ignore"):
                centres, halves = corners + stride * boxes[:, :2], stride * np.exp(boxes[:, 2:]) / 2
                boxes = np.concatenate([centres - halves, centres + halves], axis=1)
                kept.append((scores[chosen], boxes, corners[:, None] + stride * points.reshape(-1, 5, 2)))
        return Candidates(*(np.concatenate(parts) for parts in zip(*kept, strict=True)))


class RetinaFace(Detector):
    """A RetinaFace graph with three outputs: boxes (1, A, 4), scores (1, A, 2) and landmarks (1, A, 10), in any order.

    Source: biubug6/Pytorch_Retinaface; Deng et al., "RetinaFace: Single-stage Dense Face Localisation in the Wild", CVPR 2020;
    Liu et al., "SSD: Single Shot MultiBox Detector", ECCV 2016, section 2.2: a prior box has centre c and size s; a box has
    centre c + 0.1 s t and size s exp(0.2 u), a landmark is at c + 0.1 s v. Input: BGR minus (104, 117, 123).
    """

    own_min_score = 0.6  # vis_thres of the source

    def candidates(self, canvas: np.ndarray, minimum: float) -> Candidates:
        outputs = self._session.run(canvas[:, :, ::-1].astype(np.float32) - _MEANS)
        priors = prior_boxes(*canvas.shape[:2])
        of_width = {part.shape[-1]: part[0] for part in outputs if part.ndim == 3 and len(part) == 1}
        if len(outputs) != 3 or {width: len(part) for width, part in of_width.items()} != dict.fromkeys(
            (4, 2, 10), len(priors)
        ):
            raise ValueError(
                f"{self.path}: a RetinaFace detector returns boxes (1, {len(priors)}, 4), scores (1, {len(priors)}, 2) and "
                f"landmarks (1, {len(priors)}, 10) for {canvas.shape[1]} x {canvas.shape[0]} pixels, this returns "
                f"{', '.join(str(part.shape) for part in outputs)}"
            )
        scores = face_scores(of_width[2])
        chosen = np.flatnonzero(~(scores < minimum))
        boxes, points = decode_priors(priors[chosen], of_width[4][chosen], of_width[10][chosen])
        return Candidates(scores[chosen], boxes, points)


def prior_boxes(height: int, width: int) -> np.ndarray:
    """Return the (A, 3) centre x, centre y and side of the prior boxes of an image, in pixels, row by row for each stride."""
    parts = []
    for stride, sizes in zip(STRIDES, _SIZES, strict=True):
        cells = anchor_centres(-(-height // stride), -(-width // stride), stride, len(sizes)) + stride / 2
        parts.append(np.column_stack([cells, np.resize(sizes, len(cells))]))
    return np.concatenate(parts)


def face_scores(numbers: np.ndarray) -> np.ndarray:
    """Return the (A,) probability of a face from two numbers of each prior box (A, 2): probabilities, or logits."""
    if ((numbers >= 0) & (numbers <= 1)).all() and np.allclose(numbers.sum(axis=1), 1, atol=1e-3):
        return numbers[:, 1].astype(np.float64)
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(numbers[:, 0].astype(np.float64) - numbers[:, 1]))


def decode_priors(priors: np.ndarray, offsets: np.ndarray, landmarks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return boxes (n, 4) and points (n, 5, 2) in pixels, from prior boxes (n, 3), offsets (n, 4) and landmarks (n, 10)."""
    places, sides = priors[:, :2], priors[:, 2:]
    with np.errstate(over="ignore", invalid="ignore"):
        centres = places + _CENTRE * sides * offsets[:, :2]
        halves = sides * np.exp(_SIZE * offsets[:, 2:].astype(np.float64)) / 2
        boxes = np.concatenate([centres - halves, centres + halves], axis=1)
        points = places[:, None] + _CENTRE * sides[:, None] * landmarks.reshape(-1, 5, 2)
    return boxes, points


class CenterFace(Detector):
    """A CenterFace graph with four outputs (1, k, h / 4, w / 4): scores (k = 1), sizes (2), offsets (2) and landmarks (10).

    Source: Xu et al., "CenterFace: Joint Face Detection and Alignment Using Face as Point", 2019; Star-Clouds/CenterFace. All
    pairs have y first. The box of cell c has centre 4 (c + offset + 0.5) and size 4 exp(size), landmarks are at its top left
    corner plus landmark times size. Input: RGB from 0 to 255. Its file says 32 x 32, and takes multiples of 32.
    """

    own_min_score = 0.35  # threshold of the source's demo

    def candidates(self, canvas: np.ndarray, minimum: float) -> Candidates:
        outputs = self._session.run(canvas.astype(np.float32))
        height, width = (side // _CELL for side in canvas.shape[:2])
        if [part.shape for part in outputs] != [(1, numbers, height, width) for numbers in (1, 2, 2, 10)]:
            raise ValueError(
                f"{self.path}: a CenterFace detector returns scores, sizes, offsets and landmarks (1, 1 to 10, {height}, "
                f"{width}) for {canvas.shape[1]} x {canvas.shape[0]} pixels, this returns "
                f"{', '.join(str(part.shape) for part in outputs)}"
            )
        scores, sizes, offsets, landmarks = (part[0].reshape(len(part[0]), -1).T.astype(np.float64) for part in outputs)
        chosen = np.flatnonzero(~(scores[:, 0] < minimum))
        cells = np.stack(np.divmod(chosen, width), axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            sides = _CELL * np.exp(sizes[chosen])
            corners = _CELL * (cells + offsets[chosen] + 0.5) - sides / 2
            points = corners[:, None] + sides[:, None] * landmarks[chosen].reshape(-1, 5, 2)
            boxes = np.stack([corners, corners + sides], axis=1)
        return Candidates(scores[chosen, 0], boxes[:, :, ::-1].reshape(-1, 4), points[:, :, ::-1])


_ANCHOR_WIDTHS = (1, 4, 10)  # numbers of an anchor: score, distances, offsets of five points


class Scrfd(Detector):
    """An SCRFD graph: nine outputs, scores, distances and offsets for each of three strides, in any order.

    Source: Guo et al., "Sample and Computation Redistribution for Efficient Face Detection", ICLR 2022; insightface.
    Input: RGB, (x - 127.5) / 128. The anchors of cell (row i, column j) of a grid of stride s are at (j s, i s) and follow each
    other; distances and offsets are in units of s.
    """

    own_min_score = 0.5  # det_thresh of insightface

    def candidates(self, canvas: np.ndarray, minimum: float) -> Candidates:
        outputs = self._session.run((canvas.astype(np.float32) - 127.5) / 128)
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
            boxes, points = decode_distances(centres[chosen], distances[chosen] * stride, offsets[chosen] * stride)
            kept.append((scores[chosen, 0], boxes, points))
        return Candidates(*(np.concatenate(parts) for parts in zip(*kept, strict=True)))


def by_stride(outputs: list[np.ndarray], path: Path) -> list[list[np.ndarray]]:
    """Return [scores (n, 1), distances (n, 4), offsets (n, 10)] by stride, finest first; ValueError for other outputs."""
    rows = [part.reshape(-1, part.shape[-1]) if part.size else np.zeros((0, 0)) for part in map(np.atleast_1d, outputs)]
    kinds = [sorted((part for part in rows if part.shape[1] == width), key=len, reverse=True) for width in _ANCHOR_WIDTHS]
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


def decode_distances(centres: np.ndarray, distances: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return boxes (n, 4) and points (n, 5, 2), from anchors, their distances to left, top, right, bottom, and offsets."""
    boxes = np.concatenate([centres - distances[:, :2], centres + distances[:, 2:]], axis=1)
    return boxes, centres[:, None] + offsets.reshape(-1, 5, 2)


def add_detector_arguments(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Add the arguments that `open_detector` reads."""
    kinds = "a face detector: YuNet, CenterFace, SCRFD with landmarks, or RetinaFace"
    kinds += "" if required else " (without it, pictures are aligned crops)"
    parser.add_argument("--detector", type=Path, required=required, metavar="FILE.onnx", help=kinds)
    least = "(default: 0.35 for CenterFace, 0.5 for SCRFD, 0.6 for RetinaFace, 0.9 for YuNet, as their authors have it)"
    parser.add_argument("--min-score", type=SHARE, metavar="P", help=f"faces with a lower score do not count {least}")
    side = int_in_range(1, 32000)
    parser.add_argument("--min-size", type=side, default=20, metavar="PIXELS", help="nor those of a shorter side")
    parser.add_argument("--overlap", type=SHARE, default=0.4, help="of two boxes that overlap more, the weaker is dropped")
    shrunk = "a larger picture is shrunk to this for the detector, if its file leaves the size open"
    parser.add_argument("--longest-side", type=int_in_range(64, LONGEST), default=640, metavar="PIXELS", help=shrunk)


def open_detector(options: argparse.Namespace) -> Detector | None:
    """Return the detector of the command line, None without --detector; ValueError if it is unreadable, or has no landmarks."""
    path: Path | None = options.detector
    if path is None:
        return None
    check_file(path)
    check_outside_data(path)
    session = Session(path)
    names = session.names
    if OUTPUTS.issubset(names):
        return YuNet(path, options, session)
    if len(names) == 3:
        return RetinaFace(path, options, session)
    if len(names) == 4:
        return CenterFace(path, options, Session(path, any_size=True))
    if len(names) == 9:
        return Scrfd(path, options, session)
    if len(names) == 6:
        raise ValueError(f"{path}: a detector without landmarks, which align the faces; take the file with keypoints (kps)")
    raise ValueError(
        f"{path}: no detector that is known here: YuNet has the outputs {', '.join(sorted(OUTPUTS))}, SCRFD nine, CenterFace "
        f"four, RetinaFace three, this has {len(names)}"
    )
