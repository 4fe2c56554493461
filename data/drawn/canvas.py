"""The canvas of the demo faces: flat coloured polygons, and a layer of soft shadows that multiplies them."""

import cv2
import numpy as np

from .identity import Colour
from .skull import SIZE

_SHIFT = 3  # OpenCV takes points in units of 1 / 2**_SHIFT pixels
_NEUTRAL = 128  # this value of the soft layer is a factor of 1


class Canvas:
    """A (SIZE, SIZE, 3) uint8 picture and its (SIZE / 2, SIZE / 2, 3) soft layer."""

    def __init__(self) -> None:
        self.pixels = np.empty((SIZE, SIZE, 3), np.uint8)
        self.soft = np.full((SIZE // 2, SIZE // 2, 3), _NEUTRAL, np.uint8)

    def fill(self, points: np.ndarray, colour: Colour) -> None:
        """Fill the polygon through canvas points (n, 2)."""
        cv2.fillPoly(self.pixels, [_fixed(points, 1.0)], _bgr_free(colour), cv2.LINE_AA, _SHIFT)

    def line(self, points: np.ndarray, colour: Colour, thickness: int) -> None:
        """Draw a line through canvas points (n, 2)."""
        cv2.polylines(self.pixels, [_fixed(points, 1.0)], False, _bgr_free(colour), thickness, cv2.LINE_AA, _SHIFT)

    def lines(self, curves: list[np.ndarray], colour: Colour, thickness: int) -> None:
        """Draw several lines, each through canvas points (n, 2)."""
        fixed = [_fixed(points, 1.0) for points in curves]
        cv2.polylines(self.pixels, fixed, False, _bgr_free(colour), thickness, cv2.LINE_AA, _SHIFT)

    def disc(self, centre: np.ndarray, radius: int, colour: Colour) -> None:
        """Draw a small disc around the canvas point (2,)."""
        x, y = _fixed(centre, 1.0).tolist()
        cv2.circle(self.pixels, (x, y), radius << _SHIFT, _bgr_free(colour), -1, cv2.LINE_AA, _SHIFT)

    def shade(self, points: np.ndarray, factor: Colour | float) -> None:
        """Darken or brighten softly the polygon through canvas points (n, 2), by one factor or one per channel."""
        colour = np.broadcast_to(np.asarray(factor) * _NEUTRAL, 3)
        cv2.fillPoly(self.soft, [_fixed(points, 0.5)], _bgr_free(colour), cv2.LINE_8, _SHIFT)

    def reduced(self) -> np.ndarray:
        """Return the (SIZE / 2, SIZE / 2, 3) float32 picture with its soft shadows."""
        small = cv2.resize(self.pixels, (SIZE // 2, SIZE // 2), interpolation=cv2.INTER_AREA)
        soft = cv2.GaussianBlur(self.soft, (0, 0), 2.5)
        return cv2.multiply(small, soft, scale=1 / _NEUTRAL, dtype=cv2.CV_32F)


def mix(a: Colour, b: Colour, share: float) -> Colour:
    """Return a (1 - share) + b share."""
    return a * (1.0 - share) + b * share


def _fixed(points: np.ndarray, scale: float) -> np.ndarray:
    return np.rint(points * (scale * (1 << _SHIFT))).astype(np.int32)


def _bgr_free(colour: Colour) -> tuple[float, float, float]:
    """Return the channels in RGB order, because OpenCV takes three numbers in any order."""
    red, green, blue = colour.tolist()
    return min(red, 255.0), min(green, 255.0), min(blue, 255.0)
