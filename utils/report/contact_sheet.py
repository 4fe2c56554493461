"""Draws pictures for reports as PNG bytes: sheets of faces, and histograms.

Shapes: H, W = height and width of a face in pixels.
"""

from collections.abc import Iterable, Sequence

import cv2
import numpy as np

from .figure import make_figure, png_of

_GAP, _CAPTION = 4, 18  # pixels
_BETWEEN_PAIRS = 28  # pixels
_WHITE, _INK = 255, (40, 40, 40)
# the colours of matplotlib that are easy to distinguish on white; gray is for impostor pairs
_SET_COLOURS = (
    "tab:blue",
    "tab:orange",
    "tab:green",
    "tab:purple",
    "tab:brown",
    "tab:pink",
    "tab:olive",
    "tab:cyan",
    "tab:red",
)


def set_colours(names: Iterable[str]) -> dict[str, str]:
    """Return the colour of each verification set by its position, so that it is the same in every picture of a run."""
    return {name: _SET_COLOURS[number % len(_SET_COLOURS)] for number, name in enumerate(names)}


def sheet(rows: Sequence[tuple[str, Sequence[np.ndarray]]], columns: int, side: int = 112) -> bytes:
    """Return a PNG with a caption above the pictures (H, W, 3) uint8 RGB of each row, resized to side x side."""
    width = columns * (side + _GAP) + _GAP
    height = len(rows) * (side + _CAPTION + _GAP) + _GAP
    canvas = np.full((height, width, 3), _WHITE, dtype=np.uint8)
    for number, (caption, pictures) in enumerate(rows):
        top = number * (side + _CAPTION + _GAP) + _CAPTION
        _write(canvas, caption, _GAP, top - 5, width)
        for column, picture in enumerate(pictures[:columns]):
            left = _GAP + column * (side + _GAP)
            canvas[top : top + side, left : left + side] = _resized(picture, side)
    return cv2.imencode(".png", cv2.cvtColor(canvas, cv2.COLOR_RGB2BGR))[1].tobytes()


def pair_sheet(pairs: Sequence[tuple[str, np.ndarray, np.ndarray]], columns: int = 2, side: int = 112) -> bytes:
    """Return a PNG of pairs of pictures (H, W, 3) uint8 RGB, `columns` pairs in a row, each under its own caption.

    The two pictures of a pair touch; a wide gap separates the pairs.
    """
    width, height = 2 * side + _BETWEEN_PAIRS, side + _CAPTION + _BETWEEN_PAIRS // 2
    rows = -(-len(pairs) // columns)
    canvas = np.full((rows * height, columns * width - _BETWEEN_PAIRS, 3), _WHITE, dtype=np.uint8)
    for number, (caption, *pictures) in enumerate(pairs):
        row, column = divmod(number, columns)
        top, left = row * height + _CAPTION, column * width
        _write(canvas, caption, left, top - 5, 2 * side)
        for place, picture in enumerate(pictures):
            canvas[top : top + side, left + place * side : left + (place + 1) * side] = _resized(picture, side)
    return cv2.imencode(".png", cv2.cvtColor(canvas, cv2.COLOR_RGB2BGR))[1].tobytes()


def captioned_sheet(rows: Sequence[Sequence[tuple[np.ndarray | None, Sequence[str]]]], side: int = 112) -> bytes:
    """Return a PNG with rows of pictures (H, W, 3) uint8 RGB, each above its own lines of text; None leaves the place empty.

    The first picture of a row is set apart from the others.
    """
    columns = max(map(len, rows))
    lines = max(len(texts) for row in rows for _, texts in row)
    height = side + lines * _CAPTION + _BETWEEN_PAIRS // 2
    canvas = np.full((len(rows) * height, columns * (side + _GAP) + _BETWEEN_PAIRS, 3), _WHITE, dtype=np.uint8)
    for number, row in enumerate(rows):
        for column, (picture, texts) in enumerate(row):
            top, left = number * height, column * (side + _GAP) + (_BETWEEN_PAIRS if column else _GAP)
            if picture is not None:
                canvas[top : top + side, left : left + side] = _resized(picture, side)
            for line, text in enumerate(texts, 1):
                _write(canvas, text, left, top + side + line * _CAPTION - 5, side)
    return cv2.imencode(".png", cv2.cvtColor(canvas, cv2.COLOR_RGB2BGR))[1].tobytes()


def _write(canvas: np.ndarray, text: str, left: int, base: int, width: int) -> None:
    """Write a caption, shortened to fit `width` pixels."""
    text = text.encode("ascii", "replace").decode()
    room = max(8, int(width / 7.2))  # characters
    text = text if len(text) <= room else f"{text[: room - 2]}.."
    cv2.putText(canvas, text, (left, base), cv2.FONT_HERSHEY_SIMPLEX, 0.4, _INK, 1, cv2.LINE_AA)


def _resized(picture: np.ndarray, side: int) -> np.ndarray:
    how = cv2.INTER_AREA if min(picture.shape[:2]) > side else cv2.INTER_LINEAR
    return cv2.resize(picture, (side, side), interpolation=how)


def histograms(images_per_identity: np.ndarray, num_bytes: np.ndarray) -> bytes:
    """Return a PNG of two histograms: identities by their number of images, images by the size of their file in kB."""
    from matplotlib.ticker import MaxNLocator  # slow to import

    figure = make_figure(9.0, 3.2, layout="constrained")
    left, right = figure.subplots(1, 2)
    top = int(images_per_identity.max(initial=1))
    edges = np.unique(np.geomspace(1, top + 1, 40).astype(int)) if top > 40 else np.arange(1, top + 2)
    left.hist(images_per_identity, edges - 0.5, color="tab:blue")
    median = float(np.median(images_per_identity)) if len(images_per_identity) else 0.0
    left.axvline(median, color="black", linewidth=1, label=f"median {median:g}")
    left.set(xlabel="images of an identity", ylabel="identities", xscale="log" if top > 40 else "linear")
    if top <= 40:
        left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.legend()
    right.hist(num_bytes / 1000, 40, color="tab:gray")
    right.set(xlabel="size of an image file, kB", ylabel="images")
    return png_of(figure)
