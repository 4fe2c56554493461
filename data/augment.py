"""Transforms of training images: augmentation in the decoder threads, mirroring and normalisation on the device.

Augmentation changes single uint8 images in place, with OpenCV, right after decoding. It costs a fraction of the decoding, the
device still receives bytes, and CPU and GPU runs see the same images. The augmentation of an image is a function of (seed,
position in the stream of samples), so threads, processes and resuming do not change it.

Sources: `affine` is for faces that are not well aligned, as CVLface trains KP-RPE (Kim et al., CVPR 2024; there a fifth of the
images is rotated, all are scaled and shifted). AdaFace trains with random crop (a rectangle stays in place, the rest turns
black), low resolution and photometric change, each on a fifth of the images (Kim, Jain and Liu, CVPR 2022). Cutout is by
DeVries and Taylor (2017). Brightness, contrast and saturation are blends as in torchvision's ColorJitter: with black, with the
mean gray value of the picture, and with the gray picture. Unlike in torchvision, nothing is clipped or rounded in between, so
their order does not matter.
Shapes: b, n = images, H = W = data.image_size.
"""

from collections.abc import Callable, Mapping

import cv2
import numpy as np
import torch
from torch import Tensor

from utils.image import normalise
from utils.randomness import derive, uniform

_INTERPOLATIONS = (cv2.INTER_NEAREST, cv2.INTER_LINEAR, cv2.INTER_AREA, cv2.INTER_CUBIC, cv2.INTER_LANCZOS4)
_GRAY = np.array([[0.299, 0.587, 0.114]], dtype=np.float64)  # weights of red, green, blue (ITU-R BT.601)
_NUMBERS = 6  # random numbers per operation; the first decides whether it is applied


def mirror(images: Tensor, mirrored: Tensor) -> Tensor:
    """Return images (b, H, W, 3), mirrored where (b,) bool says so."""
    return torch.where(mirrored[:, None, None, None], images.flip(2), images)


def prepare(images: Tensor, mirrored: Tensor) -> Tensor:
    """Return the network's input (b, 3, H, W) float32 from (b, H, W, 3) uint8, mirrored where (b,) bool says so."""
    return normalise(mirror(images, mirrored))


class Augment:
    """The operations of the section `augment` of a config whose probability is above 0, in the order of `OPERATIONS`."""

    def __init__(self, section: Mapping[str, float], seed: int) -> None:
        self.section, self.seed = section, seed
        self.names = [name for name in OPERATIONS if section[name] > 0]

    def __bool__(self) -> bool:
        return bool(self.names)

    def draw(self, positions: np.ndarray, *only: str) -> np.ndarray:
        """Return the random numbers (n, operations, 6) float64 in [0, 1) for samples at `positions` (n,) of the stream."""
        names = only or self.names
        numbers = np.empty((len(positions), len(names), _NUMBERS))
        for column, name in enumerate(names):
            for k in range(_NUMBERS):
                numbers[:, column, k] = uniform(derive(self.seed, "augment", name, k), positions)
        return numbers

    def apply(self, pixels: np.ndarray, numbers: np.ndarray) -> None:
        """Change an image (H, W, 3) uint8 RGB in place, by its row (operations, 6) of `draw`."""
        for name, row in zip(self.names, numbers, strict=True):
            if row[0] < self.section[name]:
                OPERATIONS[name](pixels, row[1:], self.section)

    def move(self, points: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return landmarks (n, 5, 2), as shares of the side, where `affine` moves those of the samples at `positions` (n,)."""
        moved = points.astype(np.float32)
        if "affine" in self.names:
            for place, row in enumerate(self.draw(positions, "affine")[:, 0]):
                if row[0] < self.section["affine"]:
                    matrix = _matrix(row[1:], self.section, 1.0, 0.5)
                    moved[place] = moved[place] @ matrix[:, :2].T + matrix[:, 2]
        return moved


def affine(pixels: np.ndarray, numbers: np.ndarray, section: Mapping[str, float]) -> None:
    """Rotate and scale a square picture about its centre, and shift it; what comes from outside is black."""
    side = len(pixels)
    matrix = _matrix(numbers, section, side, (side - 1) / 2)
    pixels[...] = cv2.warpAffine(pixels, matrix, (side, side), borderValue=(0, 0, 0))


def _matrix(numbers: np.ndarray, section: Mapping[str, float], side: float, centre: float) -> np.ndarray:
    """Return the matrix (2, 3) of `affine` for coordinates in which the picture has this side and this centre."""
    turn, size, *shift = 2 * numbers[:4] - 1
    angle, scale = section["affine_degrees"] * turn, 1 + section["affine_scale"] * size
    matrix = cv2.getRotationMatrix2D((centre, centre), angle, scale).astype(np.float64)
    matrix[:, 2] += side * section["affine_shift"] * np.array(shift)
    return matrix


def photometric(pixels: np.ndarray, numbers: np.ndarray, section: Mapping[str, float]) -> None:
    """Change brightness, contrast and saturation, each by a factor in 1 +- photometric_strength.

    Together they are one linear map of the colours. Without clipping in between, the three commute: saturation does not change
    the mean gray value, and a blend with a constant gray does not change saturation.
    """
    strength = section["photometric_strength"]
    brightness, contrast, saturation = 1 + strength * (2 * numbers[:3] - 1)
    gray = float(_GRAY[0] @ cv2.mean(pixels)[:3])  # the mean gray value of the picture
    matrix = np.empty((3, 4))
    matrix[:, :3] = brightness * contrast * ((1 - saturation) * _GRAY + saturation * np.eye(3))
    matrix[:, 3] = brightness * (1 - contrast) * gray
    cv2.transform(pixels, matrix, dst=pixels)


def grayscale(pixels: np.ndarray, numbers: np.ndarray, section: Mapping[str, float]) -> None:
    """Convert to gray."""
    cv2.cvtColor(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB, dst=pixels)


def crop(pixels: np.ndarray, numbers: np.ndarray, section: Mapping[str, float]) -> None:
    """Keep a rectangle in place and turn the rest black; its area is crop_area to 1 of the picture, its sides 3:4 to 4:3."""
    height, width = pixels.shape[:2]
    area = section["crop_area"] + (1 - section["crop_area"]) * numbers[0]
    ratio = np.exp(np.log(4 / 3) * (2 * numbers[1] - 1))
    rows = min(height, max(1, round(height * np.sqrt(area / ratio))))
    columns = min(width, max(1, round(width * np.sqrt(area * ratio))))
    top, left = int(numbers[2] * (height - rows + 1)), int(numbers[3] * (width - columns + 1))
    pixels[:top] = 0
    pixels[top + rows :] = 0
    pixels[:, :left] = 0
    pixels[:, left + columns :] = 0


def blur(pixels: np.ndarray, numbers: np.ndarray, section: Mapping[str, float]) -> None:
    """Blur by a Gaussian of a standard deviation from 0.2 to blur_sigma pixels."""
    cv2.GaussianBlur(pixels, (0, 0), 0.2 + (section["blur_sigma"] - 0.2) * float(numbers[0]), dst=pixels)


def low_resolution(pixels: np.ndarray, numbers: np.ndarray, section: Mapping[str, float]) -> None:
    """Shrink the sides by a factor of low_resolution_side to 1 and enlarge again, each with one of five interpolations."""
    height, width = pixels.shape[:2]
    side = section["low_resolution_side"] + (1 - section["low_resolution_side"]) * numbers[0]
    shape = (max(1, round(width * side)), max(1, round(height * side)))
    small = cv2.resize(pixels, shape, interpolation=_INTERPOLATIONS[int(5 * numbers[1])])
    cv2.resize(small, (width, height), dst=pixels, interpolation=_INTERPOLATIONS[int(5 * numbers[2])])


def jpeg(pixels: np.ndarray, numbers: np.ndarray, section: Mapping[str, float]) -> None:
    """Compress as JPEG with a quality from jpeg_quality to 95, and decode."""
    quality = int(section["jpeg_quality"] + (96 - section["jpeg_quality"]) * numbers[0])
    encoded = cv2.imencode(".jpg", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, min(quality, 95)])[1]
    pixels[...] = cv2.imdecode(encoded, cv2.IMREAD_COLOR_RGB)


def cutout(pixels: np.ndarray, numbers: np.ndarray, section: Mapping[str, float]) -> None:
    """Cover a rectangle, each side up to cutout_side of the picture's, with mean gray."""
    height, width = pixels.shape[:2]
    rows = max(1, round(section["cutout_side"] * height * numbers[0]))
    columns = max(1, round(section["cutout_side"] * width * numbers[1]))
    top, left = int(numbers[2] * (height - rows + 1)), int(numbers[3] * (width - columns + 1))
    pixels[top : top + rows, left : left + columns] = 127


# in the order of a camera: where the face is, light, occlusion, lens, sensor, file; cutout comes last
OPERATIONS: dict[str, Callable[[np.ndarray, np.ndarray, Mapping[str, float]], None]] = {
    one.__name__: one for one in (affine, photometric, grayscale, crop, blur, low_resolution, jpeg, cutout)
}
