"""The random parameters of the demo faces: of the person, and of the picture.

An Identity has what all pictures of one person share; a Shot has what differs between pictures. Both are functions of
(seed, number), so that any picture can be drawn alone, in any process.
Units: a head reaches from y = -1 (crown) to about y = 1 (chin), x to the viewer's right, z towards the viewer; angles in
radians, colours RGB in [0, 255], age from 0 (young adult) to 1 (old)."""

import math
from dataclasses import dataclass
from typing import Annotated

import cv2
import numpy as np

Colour = np.ndarray  # (3,) float RGB

_SKIN_TONES = [(255, 226, 204), (246, 204, 170), (228, 178, 134), (201, 142, 98), (155, 98, 64), (98, 62, 44)]
_NATURAL_HAIR = [
    (28, 24, 26), (62, 40, 28), (104, 66, 38), (142, 78, 38), (176, 82, 40), (204, 160, 92), (236, 214, 160), (112, 104, 104),
]  # fmt: skip
_DYED_HAIR = [(52, 92, 190), (206, 78, 140), (44, 138, 110), (120, 66, 168), (190, 40, 48), (230, 130, 60)]
_IRISES = [(74, 44, 26), (120, 78, 36), (70, 118, 66), (62, 118, 180), (122, 140, 152), (34, 26, 24), (40, 130, 130)]
_HAIR_STYLES = ("bald", "buzz", "short", "quiff", "curly", "bob", "long", "fringe", "bun")
_HAIR_STYLE_ODDS = (0.07, 0.08, 0.17, 0.13, 0.13, 0.12, 0.13, 0.1, 0.07)
_BEARD_STYLES = ("none", "stubble", "moustache", "goatee", "full")
_BEARD_STYLE_ODDS = (0.56, 0.1, 0.11, 0.1, 0.13)


@dataclass(frozen=True)
class Identity:
    """The parameters of a person, with the ranges from which most are drawn, in this order.

    Lengths are in head units, see the module; `*_y` are heights on the face.
    """

    skin: Colour
    hair: Colour
    iris: Colour
    lips: Colour
    width: Annotated[float, 0.62, 0.84]  # half width of the head
    crown_power: Annotated[float, 2.0, 3.0]  # shape of the upper outline: 2 = ellipse, more = boxy
    jaw: Annotated[float, 0.0, 1.0]  # 0 = pointed chin, 1 = square jaw
    chin: Annotated[float, 0.88, 1.12]  # height of the lower half
    cheek: Annotated[float, -0.03, 0.09]
    forehead_depth: Annotated[float, 0.7, 0.84]
    eye_x: Annotated[float, 0.25, 0.36]
    eye_y: Annotated[float, -0.1, 0.06]
    eye_width: Annotated[float, 0.115, 0.19]
    eye_open: Annotated[float, 0.38, 0.8]  # height of an eye over its width
    eye_tilt: Annotated[float, -0.22, 0.3]
    lash: Annotated[float, 0.2, 1.0]
    brow_gap: Annotated[float, 0.14, 0.25]
    brow_width: Annotated[float, 0.13, 0.23]
    brow_thick: Annotated[float, 0.018, 0.075]
    brow_tilt: Annotated[float, -0.3, 0.35]
    brow_arch: Annotated[float, 0.0, 0.09]
    nose_y: Annotated[float, 0.28, 0.46]
    nose_width: Annotated[float, 0.085, 0.21]
    nose_length: Annotated[float, 0.14, 0.34]
    mouth_y: Annotated[float, 0.56, 0.7]
    mouth_width: Annotated[float, 0.17, 0.33]
    lip_upper: Annotated[float, 0.025, 0.075]
    lip_lower: Annotated[float, 0.035, 0.1]
    chin_depth: Annotated[float, 0.0, 0.13]
    ear: Annotated[float, 0.12, 0.24]
    ear_out: Annotated[float, 0.03, 0.14]
    hair_style: str
    hair_top: float
    hair_side: float
    hair_length: float
    hairline: float
    hair_part: float  # -1..1, where the hairline is highest
    hair_wave: float
    beard: str
    beard_length: float
    moles: np.ndarray  # (n, 2)
    freckles: np.ndarray  # (n, 2)
    greying: float
    wrinkling: float


_SPANS = {name: kind.__metadata__ for name, kind in Identity.__annotations__.items() if hasattr(kind, "__metadata__")}


@dataclass(frozen=True)
class Shot:
    """The parameters of a picture."""

    yaw: float  # above 0 the face looks to the viewer's right
    pitch: float
    roll: float
    scale: float  # pixels of the final picture per head unit
    offset: tuple[float, float]  # pixels
    age: float
    smile: float  # -1..1
    mouth_open: float
    eye_open: float
    brow_lift: float
    gaze: float
    light: tuple[float, float, float]  # direction towards the lamp, unit length
    contrast: float
    exposure: float
    cast: Colour  # factor per colour channel
    saturation: float
    blur: float
    noise: float
    resolution: int  # of the simulated camera, pixels per side
    quality: int  # of the JPEG
    glasses: str  # none, clear, dark
    hat: bool
    occluder: bool


def sample_identity(seed: int, number: int) -> Identity:
    """Return person `number` of the endless population that belongs to the seed."""
    rng = np.random.default_rng([seed, 1, number])
    u = rng.uniform
    style = str(rng.choice(_HAIR_STYLES, p=_HAIR_STYLE_ODDS))
    beard = "none" if style in ("bob", "long", "bun") else str(rng.choice(_BEARD_STYLES, p=_BEARD_STYLE_ODDS))
    skin = _between(_SKIN_TONES, u(0, len(_SKIN_TONES) - 1)) * u(0.95, 1.04, 3)
    hair = np.array(_DYED_HAIR[rng.integers(len(_DYED_HAIR))] if u() < 0.3 else _NATURAL_HAIR[rng.integers(8)])
    volume = _hair_volume(rng, style)
    return Identity(
        skin=np.clip(skin, 20, 255),
        hair=np.clip(hair * u(0.85, 1.15) + u(-8, 8, 3), 12, 245),
        iris=np.clip(np.array(_IRISES[rng.integers(len(_IRISES))]) * u(0.85, 1.15), 10, 230),
        lips=mix(skin, np.array([(196, 60, 74), (214, 104, 104), (150, 52, 70), (176, 92, 78)])[rng.integers(4)], u(0.4, 0.95)),
        **{name: u(*span) for name, span in _SPANS.items()},
        hair_style=style,
        **volume,
        hairline=-0.36 if style == "fringe" else u(-0.72, -0.48),
        hair_part=u(-1, 1),
        beard=beard,
        beard_length=u(0.02, 0.26),
        moles=_scatter(rng, int(rng.choice(4, p=(0.5, 0.25, 0.15, 0.1))), 0.42, -0.3, 0.75),
        freckles=_scatter(rng, int(rng.integers(14, 26)), 0.45, 0.08, 0.42) if u() < 0.16 else np.zeros((0, 2)),
        greying=u(0.3, 0.6),
        wrinkling=u(0.5, 1.0),
    )


def sample_shot(rng: np.random.Generator, yaw: float, age: float) -> Shot:
    """Return the random parameters of a picture for a given pose and age."""
    u, normal = rng.uniform, rng.normal
    light = np.array([normal(0, 0.6), normal(-0.35, 0.35), 1.0])
    light /= np.linalg.norm(light)
    glasses = str(rng.choice(("none", "clear", "dark"), p=(0.9, 0.08, 0.02)))
    return Shot(
        yaw=yaw,
        pitch=float(np.clip(normal(0, 0.08), -0.2, 0.2)),
        roll=float(normal(0, 0.05)),
        scale=u(44.0, 48.0),
        offset=(float(normal(0, 1.8)), float(normal(0, 1.8))),
        age=age,
        smile=u(-0.5, 1.0),
        mouth_open=float(max(0.0, normal(-0.02, 0.05))),
        eye_open=u(0.75, 1.15),
        brow_lift=float(normal(0, 0.02)),
        gaze=float(normal(0, 0.25)),
        light=(float(light[0]), float(light[1]), float(light[2])),
        contrast=u(0.15, 0.55),
        exposure=float(np.exp(np.clip(normal(-0.02, 0.13), -0.35, 0.24))),
        cast=np.exp(normal(0, 0.04, 3)),
        saturation=u(0.8, 1.12),
        blur=max(0.0, u(-1.2, 0.8)),
        noise=u(0, 4),
        resolution=int(rng.integers(44, 100)) if u() < 0.1 else 112,
        quality=int(rng.integers(70, 96)),
        glasses=glasses,
        hat=bool(u() < 0.03),
        occluder=bool(u() < 0.04),
    )


def sample_yaw(rng: np.random.Generator) -> float:
    """Return the random yaw of an unconstrained picture: mostly near frontal, sometimes up to profile."""
    return float(np.clip(rng.normal(0, 0.3), -1, 1)) if rng.random() < 0.5 else float(rng.uniform(-1.15, 1.15))


def _hair_volume(rng: np.random.Generator, style: str) -> dict[str, float]:
    """Return thickness at the top and at the sides, the height where the hair ends, and how wavy its outline is."""
    u = rng.uniform
    top, side, length, wave = {
        "bald": ((0, 0), (0, 0), (0, 0), (0, 0)),
        "buzz": ((0.02, 0.05), (0.01, 0.03), (0.3, 0.4), (0, 0)),
        "short": ((0.08, 0.2), (0.04, 0.1), (0.3, 0.5), (0, 0.02)),
        "quiff": ((0.22, 0.4), (0.02, 0.07), (0.2, 0.4), (0, 0.03)),
        "curly": ((0.2, 0.42), (0.14, 0.36), (0.3, 0.9), (0.03, 0.06)),
        "bob": ((0.08, 0.2), (0.12, 0.28), (0.7, 1.0), (0, 0.02)),
        "long": ((0.08, 0.2), (0.1, 0.24), (1.3, 1.9), (0, 0.03)),
        "fringe": ((0.1, 0.22), (0.08, 0.22), (0.4, 1.5), (0, 0.02)),
        "bun": ((0.05, 0.1), (0.02, 0.06), (0.3, 0.4), (0, 0.01)),
    }[style]
    return {"hair_top": u(*top), "hair_side": u(*side), "hair_length": u(*length), "hair_wave": u(*wave)}


def _scatter(rng: np.random.Generator, count: int, x_max: float, y_min: float, y_max: float) -> np.ndarray:
    """Return (count, 2) points of the face."""
    return np.stack([rng.uniform(-x_max, x_max, count), rng.uniform(y_min, y_max, count)], axis=1)


def _between(palette: list[tuple[int, int, int]], position: float) -> Colour:
    """Return the colour at a fractional position of a palette."""
    low = min(int(position), len(palette) - 2)
    return mix(np.array(palette[low]), np.array(palette[low + 1]), position - low)


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
        front, back = self.depths(y)
        oval = self.half_width(y), front, back
        sides = [self.on_oval(edge, y, oval) for edge in self.edges(*oval)]
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
