"""Hard versions of aligned faces: each kind of damage at a strength, as a pure function of (kind, strength, seed, picture).

The strength of a kind has the unit that KINDS names; 0 is the picture itself. What is random (place, direction, colour, noise)
depends on the seed, the kind and the bytes of the image file, not on the strength: along a curve only the strength changes.
Landmarks are those of the template of aligned crops (utils/alignment.py), so the faces must be aligned crops of 112 x 112.

The polygon of a mask follows the idea of MFR2 and MaskTheFace (Anwar and Raychowdhury, 2020): from the bridge of the nose to
the chin. Exposure is in stops, halvings of the light, with a display gamma of 2.2.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import cv2
import numpy as np

from data import augment
from utils.alignment import TEMPLATE
from utils.image import IMAGE_SIZE
from utils.randomness import derive, uniform
from utils.text import did_you_mean

_MASK = np.array([[22, 66], [56, 58], [90, 66], [92, 88], [76, 111], [56, 116], [36, 111], [20, 88]], dtype=np.int32)
_BRIDGE, _CHIN = 58, 112  # rows between which a mask lies
_COLOURS = ((150, 190, 215), (235, 235, 235), (40, 40, 45), (190, 60, 70))  # of masks
_EYES, _MOUTH = slice(0, 2), slice(3, 5)  # rows of TEMPLATE
_GAMMA = 2.2

Change = Callable[[np.ndarray, float, np.ndarray, int], np.ndarray]  # pixels, strength, uniform numbers (3,), seed


class Kind(NamedTuple):
    """A kind of damage."""

    change: Change  # returns the changed picture; may write into its argument
    unit: str  # of the strength
    strengths: tuple[float, ...]  # that are measured by default, from mild to hard
    low: float  # the smallest strength but 0
    high: float
    whole: bool = False  # strengths are whole numbers


def degrade(pixels: np.ndarray, kind: str, strength: float, encoded: bytes, seed: int = 0) -> np.ndarray:
    """Return a hard version (112, 112, 3) uint8 of an aligned face (112, 112, 3) uint8 RGB, which stays as it is.

    Args:
        kind: of KINDS.
        strength: in the unit of the kind; 0 returns the picture.
        encoded: the file of the picture, whose hash and `seed` decide what is random.
    """
    if not strength:
        return pixels
    own = derive(seed, "degrade", kind, hashlib.sha256(encoded).hexdigest())
    return KINDS[kind].change(pixels.copy(), strength, uniform(own, np.arange(3)), own)


def parse_kinds(texts: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Return the strengths by kind of words KIND or KIND=S,S,...; ValueError if there is no such kind or strength."""
    found: dict[str, tuple[float, ...]] = {}
    for text in texts:
        name, _, given = text.partition("=")
        if name not in KINDS:
            close = did_you_mean(name, KINDS)
            raise ValueError(f"--kinds: there is no kind {name!r:.80}.{close} There are {', '.join(KINDS)}")
        kind = KINDS[name]
        try:
            own = tuple(float(word) for word in given.split(",")) if given else kind.strengths
        except ValueError:
            own = (math.nan,)
        fits = [value == 0 or (kind.low <= value <= kind.high and not (kind.whole and value % 1)) for value in own]
        if not all(fits):
            raise ValueError(
                f"--kinds: strengths of {name} ({kind.unit}) must be 0 or {'whole numbers ' if kind.whole else ''}from "
                f"{kind.low:g} to {kind.high:g}, separated by commas, got {text!r:.80}"
            )
        found[name] = tuple(dict.fromkeys([*found.get(name, ()), *own]))
    return found


def _masked(pixels: np.ndarray, strength: float, numbers: np.ndarray, seed: int) -> np.ndarray:
    """Draw a mask in one colour over its lower share `strength`: 1 up to the bridge of the nose, 0.5 below the nose."""
    covered = np.zeros(pixels.shape[:2], dtype=np.uint8)
    cv2.fillPoly(covered, [_MASK], 1)
    covered[: round(_CHIN - strength * (_CHIN - _BRIDGE))] = 0
    pixels[covered > 0] = _COLOURS[int(len(_COLOURS) * numbers[0])]
    return pixels


def _box(pixels: np.ndarray, strength: float, numbers: np.ndarray, seed: int, points: slice) -> np.ndarray:
    """Cover landmarks with a black box, `strength` eye distances high; it reaches half of that beyond the outer ones."""
    reach = strength * np.ptp(TEMPLATE[_EYES, 0]) / 2
    (left, top), (right, bottom) = TEMPLATE[points].min(0) - reach, TEMPLATE[points].max(0) + reach
    pixels[max(0, round(top)) : round(bottom) + 1, max(0, round(left)) : round(right) + 1] = 0
    return pixels


def _augmented(
    pixels: np.ndarray, strength: float, numbers: np.ndarray, seed: int, key: str, drawn: tuple[float | None, ...]
) -> np.ndarray:
    """Change the pixels by the operation of data.augment to which `key` belongs; None in `drawn` is a random number."""
    name = next(name for name in augment.OPERATIONS if key.startswith(name))
    chosen = [numbers[place % 3] if value is None else value for place, value in enumerate(drawn)]
    augment.OPERATIONS[name](pixels, np.array(chosen), {key: strength})
    return pixels


def _low_resolution(pixels: np.ndarray, strength: float, numbers: np.ndarray, seed: int) -> np.ndarray:
    """Shrink to `strength` pixels a side by areas, and enlarge by cubic interpolation."""
    return _augmented(pixels, strength / IMAGE_SIZE, numbers, seed, "low_resolution_side", (0.0, 0.5, 0.7))


def _motion(pixels: np.ndarray, strength: float, numbers: np.ndarray, seed: int) -> np.ndarray:
    """Average along a line of `strength` pixels in a random direction, sampled eight times a pixel, bilinear."""
    angle, radius = math.pi * numbers[0], math.ceil(strength / 2) + 1
    places = np.linspace(-strength / 2, strength / 2, 8 * math.ceil(strength) + 1)[:, None]
    points = places * [math.sin(angle), math.cos(angle)] + radius  # row, column in the kernel
    weights = np.maximum(0, 1 - np.abs(points[:, :, None] - np.arange(2 * radius + 1)))  # (samples, 2, kernel)
    return cv2.filter2D(pixels, -1, weights[:, 0].T @ weights[:, 1] / len(places), borderType=cv2.BORDER_REPLICATE)


def _noise(pixels: np.ndarray, strength: float, numbers: np.ndarray, seed: int) -> np.ndarray:
    """Add Gaussian noise to each number, of a standard deviation of `strength` gray levels."""
    generator = np.random.RandomState([seed >> 32, seed & 0xFFFFFFFF])  # whose numbers numpy never changes (NEP 19)
    return np.clip(np.rint(pixels + strength * generator.standard_normal(pixels.shape)), 0, 255).astype(np.uint8)


def _exposed(pixels: np.ndarray, strength: float, numbers: np.ndarray, seed: int, sign: int) -> np.ndarray:
    """Multiply the light by 2 ** (sign * strength); what is too bright becomes white."""
    change = abs(2 ** (sign * strength / _GAMMA) - 1)
    return _augmented(pixels, change, numbers, seed, "photometric_strength", (float(sign > 0), 0.5, 0.5))


def _misaligned(pixels: np.ndarray, strength: float, numbers: np.ndarray, seed: int, what: str) -> np.ndarray:
    """Rotate, scale or shift the crop, in a random direction; what comes from outside is black, as in an aligned crop."""
    sign, middle = (1 if numbers[0] < 0.5 else -1), (len(pixels) - 1) / 2
    angle = sign * strength if what == "rotated" else 0.0
    scale = (1 + strength) ** sign if what == "scaled" else 1.0
    matrix = cv2.getRotationMatrix2D((middle, middle), angle, scale).astype(np.float64)
    if what == "shifted":
        direction = 2 * math.pi * numbers[1]
        matrix[:, 2] += strength * len(pixels) * np.array([math.cos(direction), math.sin(direction)])
    return cv2.warpAffine(pixels, matrix, pixels.shape[1::-1], borderValue=(0, 0, 0))


_SIDE = "share of the side"
_EYE = "height in eye distances"
KINDS: dict[str, Kind] = {
    "masked": Kind(_masked, "share of a mask up to the nose bridge", (0.5, 0.75, 1), 0.1, 1),
    "eyes": Kind(partial(_box, points=_EYES), _EYE, (0.3, 0.6, 0.9), 0.05, 2),
    "mouth": Kind(partial(_box, points=_MOUTH), _EYE, (0.3, 0.6, 0.9), 0.05, 2),
    "occluded": Kind(
        partial(_augmented, key="cutout_side", drawn=(1.0, 1.0, None, None)), f"box, {_SIDE}", (0.2, 0.4, 0.5, 0.6), 0.01, 0.99
    ),
    "low_resolution": Kind(_low_resolution, "pixels a side", (56, 28, 20, 14, 10, 7), 1, IMAGE_SIZE, True),
    "jpeg": Kind(partial(_augmented, key="jpeg_quality", drawn=(0.0,)), "quality", (50, 30, 20, 10, 5), 1, 95, True),
    "blur": Kind(partial(_augmented, key="blur_sigma", drawn=(1.0,)), "Gaussian, sigma in pixels", (1, 2, 3, 4, 6), 0.2, 100),
    "motion": Kind(_motion, "length in pixels", (5, 9, 15, 21), 1, 200),
    "noise": Kind(_noise, "sigma in gray levels", (10, 20, 40, 60), 0.1, 255),
    "dark": Kind(partial(_exposed, sign=-1), "stops", (1, 2, 4, 6), 0.1, 16),
    "bright": Kind(partial(_exposed, sign=1), "stops", (0.5, 1, 2, 3), 0.1, 16),
    "rotated": Kind(partial(_misaligned, what="rotated"), "degrees", (5, 10, 20, 30), 0.1, 180),
    "shifted": Kind(partial(_misaligned, what="shifted"), _SIDE, (0.03, 0.06, 0.12, 0.2), 0.001, 0.9),
    "scaled": Kind(partial(_misaligned, what="scaled"), "larger or smaller by", (0.05, 0.1, 0.2, 0.4), 0.001, 3),
}
