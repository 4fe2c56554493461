"""The face detectors, ONNX files, run by onnxruntime. Their outputs tell which one it is.

Reading ONNX files executes nothing. A file that refers to tensors outside its own folder is refused.
"""

import argparse
from pathlib import Path

import numpy as np

from eval.foreign_networks import check_outside_data
from utils.cli import SHARE, int_in_range
from utils.files import check_file

from .detections import LONGEST, STRIDES, Candidates, Detector, Session

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
