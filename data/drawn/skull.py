"""The solid head of a demo face: turns its points and projects them to the canvas, which has flat coloured
polygons and a layer of soft shadows.

A head is a stack of ovals, one at each height y, with a half width, a depth in front and a depth behind; the profile
line adds nose, lips and chin. A point is named by (x, y) as seen from the front and a lift above the surface, or by its
longitude around the vertical axis. Points on the hidden side are moved to the visible edge, so that the far half of a
feature collapses there, as it does in a photograph.
Shapes: n = points; canvas = SIZE x SIZE pixels.
"""

import math

import cv2
import numpy as np

from .identity import Colour, Identity, Shot

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


SIZE = 224  # drawn at twice the final size, then reduced
_SCALE = SIZE / 112


class Head:
    """The head of one person in one pose."""

    def __init__(self, identity: Identity, shot: Shot) -> None:
        self.identity = identity
        self.sag = 0.07 * shot.age
        self.cos_yaw, self.sin_yaw = math.cos(shot.yaw), math.sin(shot.yaw)
        self.cos_pitch, self.sin_pitch = math.cos(shot.pitch), math.sin(shot.pitch)
        self.scale = shot.scale * _SCALE
        cos_roll, sin_roll = math.cos(shot.roll) * self.scale, math.sin(shot.roll) * self.scale
        self.to_canvas = np.array([[cos_roll, sin_roll], [-sin_roll, cos_roll]])
        # Rows: where the canvas takes a step along x, y and z; yaw and pitch, then roll and scale.
        yaw_pitch = [(self.cos_yaw, self.sin_yaw * self.sin_pitch), (0.0, self.cos_pitch)]
        yaw_pitch.append((self.sin_yaw, -self.cos_yaw * self.sin_pitch))
        self.axes = (np.array(yaw_pitch) @ self.to_canvas).tolist()
        # A turned head reaches further to the back than to the front: keep the middle of it in the picture.
        centre = (SIZE / 2 - 0.1 * self.scale * self.sin_yaw, SIZE / 2 + 0.06 * self.scale)
        self.centre = np.array(centre) + _SCALE * np.array(shot.offset)
        self.profile = self._profile_line(shot)
        width, (front, back) = self.half_width(_TABLE_Y), self.depths(_TABLE_Y)
        # A table from heights to half width, depths and visible edges, which saves half of the drawing time.
        self.table = np.stack([width, front, back, *self.edges(width, front, back)])

    def half_width(self, y: np.ndarray) -> np.ndarray:
        """Return the head's half width (n,) at heights y (n,)."""
        p = self.identity
        upper = (1.0 - np.clip(-y, 0, 1) ** p.crown_power) ** 0.5
        t = np.clip(y / p.chin, 0, 1)
        jaw = min(1.0, p.jaw + self.sag)
        lower = (1.0 - t ** (1.8 + 2.2 * jaw)) ** (0.72 - 0.28 * jaw)
        bump = p.cheek * np.exp(-(((t - 0.25) / 0.25) ** 2)) + self.sag * np.exp(-(((t - 0.72) / 0.16) ** 2))
        return p.width * np.where(y < 0, upper, lower) + bump * (y > 0) + 1e-4

    def depths(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the depths in front of and behind the vertical axis, (n,) each, at heights y (n,)."""
        p = self.identity
        t = np.where(y < 0, -y, y / p.chin).clip(0, 1)
        front = p.forehead_depth * (1.0 - t ** np.where(y < 0, 2.8, 6.0)) ** 0.5
        back = np.interp(y / p.chin, _BACK_Y, _BACK_DEPTH)
        return front + 1e-4, back + 1e-4

    def shell(self, y: np.ndarray, swell: float, top: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return half width, front and back depth (n,) of the hair: an enlarged skull that continues straight down."""
        p = self.identity
        t = np.clip(-y / (1.0 + top), 0, 1)
        rounded = (1.0 - t**p.crown_power) ** 0.5 + 1e-4
        narrow = 1.0 - 0.05 * np.clip(y, 0, 1)
        return (p.width + swell) * rounded * narrow, (p.forehead_depth + 0.3 * swell) * rounded, (0.88 + swell) * rounded

    def edges(self, width: np.ndarray, front: np.ndarray, back: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the longitudes (n,) of the left and the right edge that the viewer sees of ovals (n,)."""
        turn = abs(self.sin_yaw)
        near = np.arctan2(width * self.cos_yaw, front * turn)
        far = math.pi - np.arctan2(width * self.cos_yaw, back * turn)
        return (-far, near) if self.sin_yaw >= 0 else (-near, far)

    def on_oval(self, longitude: np.ndarray, y: np.ndarray, ovals: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
        """Return canvas points (n, 2) at longitudes (n,), moved to the visible edge where hidden."""
        width, front, back = ovals
        longitude = np.clip(longitude, *self.edges(width, front, back))
        z = np.cos(longitude)
        return self.turn(width * np.sin(longitude), y, z * np.where(z > 0, front, back))

    def on_face(self, x: np.ndarray, y: np.ndarray, lift: np.ndarray | float = 0.0) -> np.ndarray:
        """Return canvas points (n, 2) of the places (x, y) on the face, `lift` above its skin."""
        width, front, back, left, right = self._look_up(y)
        sine = np.maximum(np.minimum(x / width, 1.0), -1.0)
        longitude = np.maximum(np.minimum(np.arcsin(sine), right), left)
        sine, cosine = np.sin(longitude), np.cos(longitude)
        return self.turn((width + lift) * sine, y, cosine * (np.where(cosine > 0, front, back) + lift))

    def facing(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Return how much the places (x, y) on the face look at the viewer, (n,): 1 = straight, below 0 = hidden."""
        longitude = np.arcsin(np.clip(x / self._look_up(y)[0], -1, 1))
        return np.cos(longitude) * self.cos_yaw - np.sin(longitude) * self.sin_yaw

    def outline(self) -> np.ndarray:
        """Return the closed outline (n, 2) of skull, face, nose and chin on the canvas."""
        y = np.concatenate([np.linspace(-1, -0.8, 8), np.linspace(-0.75, 0.85, 34), np.linspace(0.88, 1.0, 10)])
        y = np.where(y > 0, y * self.identity.chin, y)
        width, (front, back) = self.half_width(y), self.depths(y)
        left, right = self.edges(width, front, back)
        sides = [self._on_edge(edge, y, width, front, back) for edge in (left, right)]
        nose = self.turn(np.zeros_like(y), y, front + np.interp(y, *self.profile))
        # The profile line counts where it stands out beyond the cheek. "Beyond" is measured along the turned x axis.
        along = self.to_canvas[0] / self.scale
        near = 1 if self.sin_yaw >= 0 else 0
        beyond = (nose - sides[near]) @ along * (1 if near else -1) > 0
        sides[near] = np.where(beyond[:, None], nose, sides[near])
        return np.concatenate([sides[0], sides[1][::-1]])

    def turn(self, x: np.ndarray, y: np.ndarray, z: np.ndarray | float) -> np.ndarray:
        """Return canvas points (n, 2) of solid points (n,), by yaw, pitch, roll and scale."""
        points = np.empty((len(x), 2))
        for axis in (0, 1):
            along_x, along_y, along_z = (row[axis] for row in self.axes)
            points[:, axis] = along_x * x + along_y * y + along_z * z + self.centre[axis]
        return points

    def _look_up(self, y: np.ndarray) -> np.ndarray:
        """Return half widths, depths in front and behind, left and right edges, (5, n), at heights y (n,)."""
        row = ((y - _TABLE_Y[0]) * _ROWS_PER_UNIT + 0.5).astype(np.intp)
        return self.table.take(row, axis=1, mode="clip")

    def _on_edge(self, edge: np.ndarray, y: np.ndarray, width: np.ndarray, front: np.ndarray, back: np.ndarray) -> np.ndarray:
        z = np.cos(edge)
        return self.turn(width * np.sin(edge), y, z * np.where(z > 0, front, back))

    def _profile_line(self, shot: Shot) -> tuple[list[float], list[float]]:
        """Return heights and lifts of the line from forehead to chin, as seen from the side."""
        p = self.identity
        nose_y, mouth_y = p.nose_y, p.mouth_y
        heights = [-1.0, -0.5, p.eye_y - 0.18, p.eye_y, nose_y - 0.08, nose_y - 0.02, nose_y + 0.05]
        lifts = [0.0, 0.02, 0.06, 0.05, p.nose_length * 0.9, p.nose_length, p.nose_length * 0.7]
        heights += [nose_y + 0.08, mouth_y - 0.06, mouth_y, mouth_y + 0.07, mouth_y + 0.15, p.chin * 0.9, p.chin]
        lip = 0.05 + p.lip_upper
        lifts += [0.05, lip, 0.04, 0.04 + p.lip_lower * 0.6, 0.02, 0.03 + p.chin_depth, 0.0]
        return heights, lifts


_ROWS_PER_UNIT = 400
_TABLE_Y = np.arange(-_ROWS_PER_UNIT, int(1.2 * _ROWS_PER_UNIT)) / _ROWS_PER_UNIT
_BACK_Y = [-1.0, -0.96, -0.88, -0.7, -0.4, 0.0, 0.25, 0.45, 0.7, 0.9, 1.0]
_BACK_DEPTH = [0.0, 0.3, 0.55, 0.78, 0.92, 0.9, 0.72, 0.38, 0.2, 0.12, 0.0]
