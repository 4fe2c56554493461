"""YuNet detectors through OpenCV's own interface, cv2.FaceDetectorYN, with a model file of opencv_zoo.

OpenCV's right eye is that of the person, so the left one as seen: its order of the points is that of this project. OpenCV reads
the outputs of the file without a look at their sizes, so these are checked here, once for each size of the input. A damaged
file can end the process that reads it, by a division by zero for example, so another process tries it first.
"""

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import cv2
import numpy as np

from utils.text import one_line

from .detections import MULTIPLE, STRIDES, Candidates, Detector, Settings

_WIDTHS = {"cls": 1, "obj": 1, "bbox": 4, "kps": 10}  # numbers of a cell
OUTPUTS = frozenset(f"{kind}_{stride}" for kind in _WIDTHS for stride in STRIDES)
_NO_CONFIG = np.zeros(0, dtype=np.uint8)
_ALL = 5000  # boxes that OpenCV keeps before it drops double ones
_PATIENCE = 120  # seconds for the trial; it takes half of one
_TRIAL = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
import cv2, numpy as np
data, size = np.fromfile(sys.argv[1], np.uint8), (int(sys.argv[2]), int(sys.argv[3]))
graph = cv2.dnn.readNetFromONNX(data)
graph.setInput(np.zeros((1, 3, size[1], size[0]), np.float32))
graph.forward(sys.argv[4:])
"""


class YuNet(Detector):
    """A YuNet graph. FaceDetectorYN may be used by one thread only, so each thread has its own."""

    own_min_score = 0.9  # score_threshold of OpenCV

    def __init__(self, path: Path, settings: Settings, fixed: tuple[int, int] | None) -> None:
        super().__init__(path, settings, fixed)
        height, width = fixed or (2 * MULTIPLE, 3 * MULTIPLE)
        self._own, self._file = threading.local(), np.frombuffer(path.read_bytes(), dtype=np.uint8)
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # its messages are in the errors it raises
        _try(path, hashlib.sha256(self._file.tobytes()).hexdigest(), width, height)
        self._checked: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        try:
            self._graph = cv2.dnn.readNetFromONNX(self._file)
        except cv2.error as error:
            raise ValueError(f"{path}: OpenCV cannot read it: {_words(error)}") from None
        self.candidates(np.zeros((height, width, 3), dtype=np.uint8), 1.0)

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
            raise ValueError(f"{self.path}: OpenCV cannot run it on an image {canvas.shape}: {_words(error)}") from None
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


def _words(error: cv2.error) -> str:
    return one_line(" ".join(str(error.err).split()))


@functools.cache
def _try(path: Path, digest: str, width: int, height: int) -> None:
    """Raise ValueError if OpenCV takes the process down that reads this file; what it says otherwise is said again here.

    Args:
        digest: of the file: one that has changed is tried again.
    """
    # from the same places as here: -I leaves out packages of the user and of PYTHONPATH, and without OpenCV nothing is tried
    places = json.dumps([place for place in sys.path if isinstance(place, str)])
    words = [sys.executable, "-I", "-c", _TRIAL, places, str(path), str(width), str(height), *sorted(OUTPUTS)]
    environment = {**os.environ, "OPENCV_LOG_LEVEL": "SILENT"}
    try:
        status = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE, env=environment
        ).returncode
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{path}: OpenCV does not get through it within {_PATIENCE} seconds; it is no YuNet detector"
        ) from None
    if status < 0:
        raise ValueError(f"{path}: OpenCV crashes on it ({signal.Signals(-status).name}); the file is damaged")
