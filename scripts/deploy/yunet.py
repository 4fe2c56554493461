"""YuNet detectors through OpenCV's own interface, cv2.FaceDetectorYN, with a model file of opencv_zoo.

OpenCV's right eye is that of the person, so the left one as seen: its order of the points is that of this project.
"""

if __name__ == "__main__":
    raise SystemExit("error: scripts/deploy/yunet.py is no program; python -m scripts lists them")

import threading
from pathlib import Path

import cv2
import numpy as np

from .detections import MULTIPLE, Candidates, Detector, Settings

OUTPUTS = frozenset(f"{kind}_{stride}" for kind in ("cls", "obj", "bbox", "kps") for stride in (8, 16, 32))
_ALL = 5000  # boxes that OpenCV keeps before it drops double ones


class YuNet(Detector):
    """A YuNet graph. FaceDetectorYN may be used by one thread only, so each thread has its own."""

    own_min_score = 0.9  # score_threshold of OpenCV

    def __init__(self, path: Path, settings: Settings, fixed: tuple[int, int] | None) -> None:
        super().__init__(path, settings, fixed)
        self._own = threading.local()
        self.candidates(np.zeros((*(fixed or (2 * MULTIPLE, 3 * MULTIPLE)), 3), dtype=np.uint8), 1.0)

    def candidates(self, canvas: np.ndarray, minimum: float) -> Candidates:
        size = (canvas.shape[1], canvas.shape[0])
        try:
            if not hasattr(self._own, "detector"):
                self._own.detector = cv2.FaceDetectorYN.create(str(self.path), "", size, minimum, 1.0, _ALL)
            self._own.detector.setInputSize(size)
            self._own.detector.setScoreThreshold(minimum)
            found = self._own.detector.detect(np.ascontiguousarray(canvas[:, :, ::-1]))[1]
        except cv2.error as error:
            raise ValueError(f"{self.path}: OpenCV cannot run it on an image {canvas.shape}: {error.err}") from None
        numbers = np.zeros((0, 15)) if found is None else np.asarray(found, dtype=np.float64)
        boxes = np.concatenate([numbers[:, :2], numbers[:, :2] + numbers[:, 2:4]], axis=1)
        return Candidates(numbers[:, 14], boxes, numbers[:, 4:14].reshape(-1, 5, 2))
