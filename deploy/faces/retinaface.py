"""RetinaFace detectors of biubug6/Pytorch_Retinaface as ONNX files: offsets from prior boxes, scores, landmarks.

Source: Deng et al., "RetinaFace: Single-stage Dense Face Localisation in the Wild", CVPR 2020, and Liu et al., "SSD: Single
Shot MultiBox Detector", ECCV 2016, section 2.2: a prior box has centre c and size s; a box has centre c + 0.1 s t and size
s exp(0.2 u), a landmark is at c + 0.1 s v. Input: BGR minus (104, 117, 123).
"""

from pathlib import Path

import numpy as np

from .detections import MULTIPLE, STRIDES, Candidates, Detector, Session, Settings

_SIZES = ((16, 32), (64, 128), (256, 512))  # pixels, of the two prior boxes of a cell, for each stride
_MEANS = np.array([104, 117, 123], dtype=np.float32)  # of blue, green, red
_CENTRE, _SIZE = 0.1, 0.2  # the variances of the source


class RetinaFace(Detector):
    """A RetinaFace graph with three outputs: boxes (1, A, 4), scores (1, A, 2) and landmarks (1, A, 10), in any order."""

    own_min_score = 0.6  # vis_thres of the source

    def __init__(self, path: Path, settings: Settings, session: Session) -> None:
        super().__init__(path, settings, session.fixed)
        self._session = session
        self.candidates(np.zeros((*(session.fixed or (2 * MULTIPLE, 3 * MULTIPLE)), 3), dtype=np.uint8), 2.0)

    def candidates(self, canvas: np.ndarray, minimum: float) -> Candidates:
        images = (canvas[:, :, ::-1].astype(np.float32) - _MEANS).transpose(2, 0, 1)[None]
        outputs = self._session.run(np.ascontiguousarray(images))
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
        boxes, points = decode(priors[chosen], of_width[4][chosen], of_width[10][chosen])
        return Candidates(scores[chosen], boxes, points)


def prior_boxes(height: int, width: int) -> np.ndarray:
    """Return the (A, 3) centre x, centre y and side of the prior boxes of an image, in pixels, row by row for each stride."""
    parts = []
    for stride, sizes in zip(STRIDES, _SIZES, strict=True):
        y, x = np.mgrid[: -(-height // stride), : -(-width // stride)]
        cells = (np.stack([x, y], axis=-1).reshape(-1, 1, 2) + 0.5) * stride
        sides = np.broadcast_to(np.array(sizes, dtype=np.float64)[None, :, None], (len(cells), len(sizes), 1))
        parts.append(np.concatenate([np.broadcast_to(cells, (len(cells), len(sizes), 2)), sides], axis=2).reshape(-1, 3))
    return np.concatenate(parts)


def face_scores(numbers: np.ndarray) -> np.ndarray:
    """Return the (A,) probability of a face from two numbers of each prior box (A, 2): probabilities, or logits."""
    if ((numbers >= 0) & (numbers <= 1)).all() and np.allclose(numbers.sum(axis=1), 1, atol=1e-3):
        return numbers[:, 1].astype(np.float64)
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(numbers[:, 0].astype(np.float64) - numbers[:, 1]))


def decode(priors: np.ndarray, offsets: np.ndarray, landmarks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return boxes (n, 4) and points (n, 5, 2) in pixels, from prior boxes (n, 3), offsets (n, 4) and landmarks (n, 10)."""
    places, sides = priors[:, :2], priors[:, 2:]
    with np.errstate(over="ignore", invalid="ignore"):
        centres = places + _CENTRE * sides * offsets[:, :2]
        halves = sides * np.exp(_SIZE * offsets[:, 2:].astype(np.float64)) / 2
        boxes = np.concatenate([centres - halves, centres + halves], axis=1)
        points = places[:, None] + _CENTRE * sides[:, None] * landmarks.reshape(-1, 5, 2)
    return boxes, points
