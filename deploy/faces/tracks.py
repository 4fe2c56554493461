"""Follows faces over the frames of a video, and keeps the best few of each.

Source: Bewley et al., "Simple Online and Realtime Tracking", ICIP 2016: the faces of a frame are assigned to tracks by where
these are expected, with the greatest sum. Here it is that of overlap and likeness. A person with two tracks is found twice, but
a track of two people has an embedding of nobody: so what is in doubt begins a new track.
Shapes: T = tracks, n = faces of a frame, S = size of a crop, L = numbers of a look.
"""

from datetime import timedelta
from typing import NamedTuple

import cv2
import numpy as np

from utils.alignment import align, check_points

from .detector import Face, shared_areas
from .video import Frame

GAP = 1.0  # seconds without its face, after which a track ends
KEPT, _PARTS = 8, 4  # faces of a track that are kept, and how many of a second
_OVERLAP, _ALIKE = 0.2, 0.3  # least intersection over union, and least likeness, of a face and the track that it goes on with
_CUT = 0.5  # likeness of two frames below which the scene has changed
_LOOK, _NOISE = 16, 2.0  # pixels; levels by which pixels differ that show the same


class Span(NamedTuple):
    """When a face was in view: first and last second, and the number of frames in which it was found."""

    first: float
    last: float
    faces: int

    def __str__(self) -> str:
        return f"{timedelta(seconds=int(self.first))}-{timedelta(seconds=int(self.last))}, {self.faces} faces"


class Track:
    """A face over time: where it was in frame `number`, how it moves, and the best of it."""

    def __init__(self, frame: Frame, face: Face, look: np.ndarray, size: int) -> None:
        self.span, self.problem = Span(frame.time, frame.time, 0), ""  # why a face could not be aligned
        # by part of a second: quality, score of the detector, crop (S, S, 3) uint8 RGB
        self.kept: dict[int, tuple[float, float, np.ndarray]] = {}
        self.box, self.number, self.speed = face.box, frame.number - 1, np.zeros(2)  # pixels from frame to frame
        self.add(frame, face, look, size)

    def add(self, frame: Frame, face: Face, look: np.ndarray, size: int) -> None:
        """Go on with a face of a frame, and keep it if it is one of the best, the best of its part of a second."""
        moved = (face.box - self.box).reshape(2, 2).mean(axis=0) / (frame.number - self.number)
        self.speed = moved if self.span.faces < 2 else (self.speed + moved) / 2
        self.box, self.number, self.look = face.box, frame.number, look
        self.span = Span(self.span.first, frame.time, self.span.faces + 1)
        part, sharp = int(frame.time * _PARTS), min(1.0, (face.box[2:] - face.box[:2]).min() / size)
        full = part not in self.kept and len(self.kept) == KEPT
        rival = min(self.kept, key=lambda one: (self.kept[one][0], -one)) if full else part
        try:
            quality = face.score * sharp * (1 - check_points(face.points, *frame.pixels.shape[:2]))
            if rival not in self.kept or self.kept[rival][0] < quality:
                crop = align(frame.pixels, face.points, size, smooth=True)
                self.kept.pop(rival, None)
                self.kept[part] = quality, face.score, crop
        except ValueError as error:
            self.problem = str(error)


class Tracker:
    """Assigns the faces of each frame to `tracks`, those that go on; crops have `size` pixels."""

    def __init__(self, size: int) -> None:
        self.tracks: list[Track] = []
        self._size, self._view = size, np.zeros((0, 0))

    def update(self, frame: Frame, faces: list[Face]) -> list[Track]:
        """Go on with a frame; return the tracks that have ended."""
        before, self._view = self._view, _look(frame.pixels, np.array([0, 0, *frame.pixels.shape[1::-1]]))[None]
        cut = before.size and _alike(before, self._view)[0, 0] < _CUT
        ended = [track for track in self.tracks if cut or frame.time - track.span.last > GAP]
        self.tracks = [track for track in self.tracks if track not in ended]
        new = {number: (frame, face, _look(frame.pixels, face.box), self._size) for number, face in enumerate(faces)}
        if self.tracks and faces:
            expected = [track.box + np.tile(track.speed * (frame.number - track.number), 2) for track in self.tracks]
            shared, union = shared_areas(np.stack(expected)[:, None], np.stack([face.box for face in faces]))
            likeness = _alike(np.stack([track.look for track in self.tracks]), np.stack([one[2] for one in new.values()]))
            from scipy.optimize import linear_sum_assignment  # a sixth of the start of each program that searches

            gain = np.where((shared >= _OVERLAP * union) & (likeness >= _ALIKE), shared / union + likeness, 0)
            for row, column in zip(*linear_sum_assignment(gain, maximize=True), strict=True):
                if gain[row, column]:
                    self.tracks[row].add(*new.pop(column))
        self.tracks += [Track(*one) for one in new.values()]
        return ended


def _look(pixels: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Return a part of a picture as few numbers (L,), whose mean is 0."""
    left, top, right, bottom = np.maximum(np.round(box).astype(int), 0)
    part = pixels[top : max(bottom, top + 1), left : max(right, left + 1)]
    small = cv2.resize(part, (_LOOK, _LOOK), interpolation=cv2.INTER_AREA).astype(np.float64).ravel()
    return small - small.mean()


def _alike(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the correlation (T, n) of looks (T, L) and (n, L); two parts without contrast are alike."""
    noise = first.shape[1] * _NOISE**2
    lengths = [np.sqrt((looks**2).sum(axis=1) + noise) for looks in (first, second)]
    return (first @ second.T + noise) / np.outer(*lengths)
