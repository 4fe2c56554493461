"""Aligns a face by five points: the similarity transform that brings them nearest to the usual template.

Source: Umeyama, "Least-squares estimation of transformation parameters between two point patterns", TPAMI 1991, Eq. 40 to 43.
With points of the plane as complex numbers, a similarity is z -> a z + b, and the least squares solution is a quotient of two
sums. MS1MV2, Glint360K and the IJB evaluations are aligned to this template.
Points: left eye, right eye, nose, left corner of the mouth, right corner, as seen in the picture; (5, 2) x and y in pixels.
"""

import cv2
import numpy as np

from .image import IMAGE_SIZE

POINTS = ("left eye", "right eye", "nose", "left corner of the mouth", "right corner of the mouth")
OUTSIDE = 0.15  # of the aligned crop's side: 17 of its 112 pixels, half the distance of the eyes
_EMPTY = 0.99  # largest share of the crop that may be outside the picture
_ABSURD = 1e7  # pixels; no real landmark has such a coordinate
MIN_SIDE = 8  # smallest side of an aligned crop, in pixels of the picture
TEMPLATE = np.array(  # for 112 x 112 pixels
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)


def similarity_transform(points: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the (2, 3) float64 matrix of the rotation, scaling and shift that brings points (n, 2) nearest to target (n, 2).

    Raises:
        ValueError: a coordinate is not finite, or all points coincide, so that there is no scale.
    """
    source, wanted = (np.asarray(p, dtype=np.float64) @ np.array([1, 1j]) for p in (points, target))
    if not np.isfinite(source).all():
        raise ValueError("landmarks must be finite numbers")
    centred, wanted_centred = source - source.mean(), wanted - wanted.mean()
    spread = float((np.abs(centred) ** 2).sum())
    if spread < 1e-6:
        raise ValueError(f"landmarks must differ, but all lie at ({source[0].real:g}, {source[0].imag:g})")
    a = (centred.conj() * wanted_centred).sum() / spread
    b = wanted.mean() - a * source.mean()
    return np.array([[a.real, -a.imag, b.real], [a.imag, a.real, b.imag]])


def check_points(points: np.ndarray, height: int, width: int) -> float:
    """Check that five points (5, 2) can belong to a face in a picture of height x width pixels; return its padding_share.

    If the picture cuts a face off, a detector may place an eye or a corner of the mouth outside the picture. So a point may be
    outside by a fraction of the face: OUTSIDE times the side of the aligned crop in the picture's pixels, or times the
    picture's longer side if the crop is larger than that.

    Raises:
        ValueError: a point is farther outside, or the face has fewer than MIN_SIDE pixels; the message names the point.
    """
    absurd = ~(np.abs(points) < _ABSURD).all(axis=1)  # nan too
    if absurd.any():  # squares of such numbers overflow
        x, y = points[int(absurd.argmax())]
        raise ValueError(
            f"landmarks must lie in the picture of {width} x {height} pixels, but the {POINTS[int(absurd.argmax())]} is at "
            f"({x:g}, {y:g})"
        )
    scale = float(np.hypot(*similarity_transform(points, TEMPLATE)[:, 0]))
    side = IMAGE_SIZE / max(scale, 1e-9)
    if side < MIN_SIDE:
        shares = ", as shares of the picture do: multiply them by its width and height" if points.max() <= 2 else ""
        raise ValueError(
            f"landmarks must be in pixels, but these make a face of {side:.2g} pixels in a picture of {width} x "
            f"{height}{shares}"
        )
    outside = np.maximum(-0.5 - points, points - (np.array([width, height]) - 0.5)).max(axis=1)  # (5,) pixels
    worst = int(outside.argmax())
    allowed = OUTSIDE * min(side, max(height, width))
    if outside[worst] > allowed:
        x, y = points[worst]
        swapped = bool(((points >= 0) & (points[:, ::-1] <= np.array([width, height]))).all())
        cause = "Are x and y swapped?" if swapped else "Are they of another resolution, or of another picture?"
        raise ValueError(
            f"landmarks must lie in the picture of {width} x {height} pixels (up to {allowed:.0f} outside, for a face that is "
            f"cut off), but the {POINTS[worst]} is at ({x:g}, {y:g}). {cause}"
        )
    return padding_share(points, height, width)


def padding_share(points: np.ndarray, height: int, width: int) -> float:
    """Return the share, in [0, 1], of the aligned crop that is outside a picture of height x width pixels, and so is black."""
    matrix = similarity_transform(points, TEMPLATE)
    corners = np.array([[-0.5, -0.5], [width - 0.5, -0.5], [width - 0.5, height - 0.5], [-0.5, height - 0.5]])
    picture = (corners @ matrix[:, :2].T + matrix[:, 2]).astype(np.float32)
    low, high = -0.5, IMAGE_SIZE - 0.5
    crop = np.array([[low, low], [high, low], [high, high], [low, high]], dtype=np.float32)
    return 1.0 - min(1.0, float(cv2.intersectConvexConvex(crop, picture)[0]) / IMAGE_SIZE**2)


def align(image: np.ndarray, points: np.ndarray, size: int = IMAGE_SIZE, smooth: bool = False) -> np.ndarray:
    """Return the (size, size, 3) uint8 face of an image (H, W, 3) uint8, by its five points (5, 2); the outside is black.

    Args:
        smooth: if the face shrinks, average the source pixels of each pixel. False interpolates only the four nearest pixels,
            like insightface and the training sets of published models; this aliases from twice the size on.

    Raises:
        ValueError: the points are not a face: see similarity_transform; or one is far from its place after the best fit; or
            almost nothing of the picture would be in the crop.
    """
    target = TEMPLATE * (size / IMAGE_SIZE)
    matrix = similarity_transform(points, target)
    error = float(np.abs(points @ matrix[:, :2].T + matrix[:, 2] - target).max()) / size
    if error > 0.18:
        raise ValueError(
            f"landmarks are no face: after alignment one is {100 * error:.0f} % of the picture away from its place. The order "
            "is left eye, right eye, nose, left and right corner of the mouth, as seen in the picture, x before y"
        )
    height, width = image.shape[:2]
    if padding_share(points, height, width) > _EMPTY:
        raise ValueError(f"landmarks place the face outside the picture of {width} x {height} pixels: nothing of it would show")
    shrink = 1 / float(np.hypot(matrix[0, 0], matrix[1, 0]))
    if not smooth or shrink <= 1:
        return cv2.warpAffine(image, matrix, (size, size), borderValue=(0, 0, 0))
    if shrink > 3:  # pixel centres are at half-integers, so a resize by f moves x to (x + 1/2) f - 1/2
        small = cv2.resize(
            image, (max(1, round(2.5 * width / shrink)), max(1, round(2.5 * height / shrink))), interpolation=cv2.INTER_AREA
        )
        factor = np.array([small.shape[1] / width, small.shape[0] / height])
        return align(small, (points + 0.5) * factor - 0.5, size, smooth)
    times = int(np.ceil(shrink)) + 1
    fine = matrix * times
    fine[:, 2] += (times - 1) / 2
    return cv2.resize(cv2.warpAffine(image, fine, (size * times, size * times)), (size, size), interpolation=cv2.INTER_AREA)
