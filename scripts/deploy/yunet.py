"""YuNet detectors through OpenCV's own interface, cv2.FaceDetectorYN, with a model file of opencv_zoo.

OpenCV's right eye is that of the person, so the left one as seen: its order of the points is that of this project. OpenCV reads
the outputs of the file without a look at their sizes, so these are checked here, once for each size of the input.
"""

if __name__ == "__main__":
    raise SystemExit("error: scripts/deploy/yunet.py is no program; python -m scripts lists them")

import threading
from pathlib import Path

import cv2
import numpy as np

from .detections import MULTIPLE, STRIDES, Candidates, Detector, Settings

_WIDTHS = {"cls": 1, "obj": 1, "bbox": 4, "kps": 10}  # numbers of a cell
OUTPUTS = frozenset(f"{kind}_{stride}" for kind in _WIDTHS for stride in STRIDES)
_NO_CONFIG = np.zeros(0, dtype=np.uint8)
_ALL = 5000  # boxes that OpenCV keeps before it drops double ones


class YuNet(Detector):
    """A YuNet graph. FaceDetectorYN may be used by one thread only, so each thread has its own."""

    own_min_score = 0.9  # score_threshold of OpenCV

    def __init__(self, path: Path, settings: Settings, fixed: tuple[int, int] | None) -> None:
        super().__init__(path, settings, fixed)
        self._own, self._file = threading.local(), np.frombuffer(path.read_bytes(), dtype=np.uint8)
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # its messages are in the errors it raises
        self._checked: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        try:
            self._graph = cv2.dnn.readNetFromONNX(self._file)
        except cv2.error as error:
            raise ValueError(f"{path}: OpenCV cannot read it: {error.err}") from None
        self.candidates(np.zeros((*(fixed or (2 * MULTIPLE, 3 * MULTIPLE)), 3), dtype=np.uint8), 1.0)

    def candidates(self, canvas: np.ndarray, minimum: float) -> Candidates:
        size = (canvas.shape[1], canvas.shape[0])
        try:
            with self._lock:
                if size not in self._checked:
                    self._check(*size)
                    self._checked.add(size)
            if not hasattr(self._own, "detector"):
                self._own.detector = cv2.FaceDetectorYN.create("onnx", self._file, _NO_CONFIG, size, minimum, 1.0, _ALL)
            self._own.detector.setInputSize(size)
            self._own.detector.setScoreThreshold(minimum)
            found = self._own.detector.detect(np.ascontiguousarray(canvas[:, :, ::-1]))[1]
        except cv2.error as error:
            raise ValueError(f"{self.path}: OpenCV cannot run it on an image {canvas.shape}: {error.err}") from None
        numbers = np.zeros((0, 15)) if found is None else np.asarray(found, dtype=np.float64)
        boxes = np.concatenate([numbers[:, :2], numbers[:, :2] + numbers[:, 2:4]], axis=1)
        return Candidates(numbers[:, 14], boxes, numbers[:, 4:14].reshape(-1, 5, 2))

    def _check(self, width: int, height: int) -> None:
        """Raise ValueError unless the outputs for an input of this size have a row for each cell."""
        self._graph.setInput(np.zeros((1, 3, height, width), dtype=np.float32))
        names = sorted(OUTPUTS)
        for name, output in zip(names, self._graph.forward(names), strict=True):
            kind, stride = name.split("_")
            numbers = (height // int(stride)) * (width // int(stride)) * _WIDTHS[kind]
            if output.size != numbers or output.dtype != np.float32:
                raise ValueError(
                    f"{self.path}: the output {name} of a YuNet detector must have {numbers} numbers for {width} x {height} "
                    f"pixels, this has {output.size} of {output.dtype}"
                )
