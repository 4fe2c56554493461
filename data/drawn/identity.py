"""The random parameters of the demo faces: of the person, and of the picture.

An Identity has what all pictures of one person share; a Shot has what differs between pictures. Both are functions of
(seed, number), so that any picture can be drawn alone, in any process.
Units: a head reaches from y = -1 (crown) to about y = 1 (chin), x to the viewer's right, z towards the viewer; angles in
radians, colours RGB in [0, 255], age from 0 (young adult) to 1 (old).
"""

from dataclasses import dataclass

import numpy as np

Colour = np.ndarray  # (3,) float RGB

_SKIN_TONES = [(255, 226, 204), (246, 204, 170), (228, 178, 134), (201, 142, 98), (155, 98, 64), (98, 62, 44)]
_NATURAL_HAIR = [
    (28, 24, 26),
    (62, 40, 28),
    (104, 66, 38),
    (142, 78, 38),
    (176, 82, 40),
    (204, 160, 92),
    (236, 214, 160),
    (112, 104, 104),
]
_DYED_HAIR = [(52, 92, 190), (206, 78, 140), (44, 138, 110), (120, 66, 168), (190, 40, 48), (230, 130, 60)]
_IRISES = [(74, 44, 26), (120, 78, 36), (70, 118, 66), (62, 118, 180), (122, 140, 152), (34, 26, 24), (40, 130, 130)]
_HAIR_STYLES = ("bald", "buzz", "short", "quiff", "curly", "bob", "long", "fringe", "bun")
_HAIR_STYLE_ODDS = (0.07, 0.08, 0.17, 0.13, 0.13, 0.12, 0.13, 0.1, 0.07)
_BEARD_STYLES = ("none", "stubble", "moustache", "goatee", "full")
_BEARD_STYLE_ODDS = (0.56, 0.1, 0.11, 0.1, 0.13)


@dataclass(frozen=True)
class Identity:
    """The parameters of a person. Lengths are in head units, see the module; `*_y` are heights on the face."""

    skin: Colour
    hair: Colour
    iris: Colour
    lips: Colour
    width: float  # half width of the head
    crown_power: float  # shape of the upper outline: 2 = ellipse, more = boxy
    jaw: float  # 0 = pointed chin, 1 = square jaw
    chin: float  # height of the lower half
    cheek: float
    forehead_depth: float
    eye_x: float
    eye_y: float
    eye_width: float
    eye_open: float  # height of an eye over its width
    eye_tilt: float
    lash: float
    brow_gap: float
    brow_width: float
    brow_thick: float
    brow_tilt: float
    brow_arch: float
    nose_y: float
    nose_width: float
    nose_length: float
    mouth_y: float
    mouth_width: float
    lip_upper: float
    lip_lower: float
    chin_depth: float
    ear: float
    ear_out: float
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
    top, side, length, wave = _hair_volume(rng, style)
    return Identity(
        skin=np.clip(skin, 20, 255),
        hair=np.clip(hair * u(0.85, 1.15) + u(-8, 8, 3), 12, 245),
        iris=np.clip(np.array(_IRISES[rng.integers(len(_IRISES))]) * u(0.85, 1.15), 10, 230),
        lips=_mix(
            skin, np.array([(196, 60, 74), (214, 104, 104), (150, 52, 70), (176, 92, 78)])[rng.integers(4)], u(0.4, 0.95)
        ),
        width=u(0.62, 0.84),
        crown_power=u(2.0, 3.0),
        jaw=u(0.0, 1.0),
        chin=u(0.88, 1.12),
        cheek=u(-0.03, 0.09),
        forehead_depth=u(0.7, 0.84),
        eye_x=u(0.25, 0.36),
        eye_y=u(-0.1, 0.06),
        eye_width=u(0.115, 0.19),
        eye_open=u(0.38, 0.8),
        eye_tilt=u(-0.22, 0.3),
        lash=u(0.2, 1.0),
        brow_gap=u(0.14, 0.25),
        brow_width=u(0.13, 0.23),
        brow_thick=u(0.018, 0.075),
        brow_tilt=u(-0.3, 0.35),
        brow_arch=u(0.0, 0.09),
        nose_y=u(0.28, 0.46),
        nose_width=u(0.085, 0.21),
        nose_length=u(0.14, 0.34),
        mouth_y=u(0.56, 0.7),
        mouth_width=u(0.17, 0.33),
        lip_upper=u(0.025, 0.075),
        lip_lower=u(0.035, 0.1),
        chin_depth=u(0.0, 0.13),
        ear=u(0.12, 0.24),
        ear_out=u(0.03, 0.14),
        hair_style=style,
        hair_top=top,
        hair_side=side,
        hair_length=length,
        hairline=-0.36 if style == "fringe" else u(-0.72, -0.48),
        hair_part=u(-1, 1),
        hair_wave=wave,
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


def _hair_volume(rng: np.random.Generator, style: str) -> tuple[float, float, float, float]:
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
    return u(*top), u(*side), u(*length), u(*wave)


def _scatter(rng: np.random.Generator, count: int, x_max: float, y_min: float, y_max: float) -> np.ndarray:
    """Return (count, 2) points of the face."""
    return np.stack([rng.uniform(-x_max, x_max, count), rng.uniform(y_min, y_max, count)], axis=1)


def _between(palette: list[tuple[int, int, int]], position: float) -> Colour:
    """Return the colour at a fractional position of a palette."""
    low = min(int(position), len(palette) - 2)
    return _mix(np.array(palette[low]), np.array(palette[low + 1]), position - low)


def _mix(a: Colour, b: Colour, share: float) -> Colour:
    """Return a (1 - share) + b share."""
    return a * (1.0 - share) + b * share
