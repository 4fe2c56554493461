"""What reports consist of: pictures as PNG bytes (sheets of faces, histograms, figures of matplotlib), and a page of HTML.

Captions are drawn in the font that comes with matplotlib, by Pillow, which comes with it too. matplotlib takes a second to
import, so both are imported where they are first used. Without pyplot no window opens, and two figures share no state.
Shapes: H, W = height and width of a face in pixels.
"""

import base64
import functools
import html
import io
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .image import resize_square, to_png
from .text import printable


def make_figure(width: float, height: float, layout: Literal["constrained"] | None = None) -> Any:
    """Return an empty matplotlib.figure.Figure of `width` x `height` inches.

    Args:
        layout: "constrained" makes room for all texts, which takes as long as drawing; None leaves the margins to the caller.
    """
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout=layout)


def png_of(figure: Any) -> bytes:
    """Return the PNG file of a figure."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


_GAP, _CAPTION = 4, 18  # pixels
_LETTER, _BASE = 12, 13  # pixels: size of the font, and of a caption above its base line
_LONGEST = 400  # characters of a caption that are looked at; a reason for a rejection may have thousands
_APART = 28  # pixels, between the first picture of a row and the others
_WHITE, _INK = 255, (40, 40, 40)
# the colours of matplotlib that are easy to distinguish on white; gray is for impostor pairs
_SET_COLOURS = [f"tab:{name}" for name in ("blue", "orange", "green", "purple", "brown", "pink", "olive", "cyan", "red")]


def set_colours(names: Iterable[str]) -> dict[str, str]:
    """Return the colour of each verification set by its position, so that it is the same in every picture of a run."""
    return {name: _SET_COLOURS[number % len(_SET_COLOURS)] for number, name in enumerate(names)}


def sheet(rows: Sequence[tuple[str, Sequence[np.ndarray]]], columns: int, across: int = 1, side: int = 112) -> bytes:
    """Return a PNG with a caption above the pictures (H, W, 3) uint8 RGB of each row, resized to side x side.

    Args:
        columns: the most pictures of a row; one more leaves a gap between rows that stand side by side.
        across: rows that stand side by side.
    """
    width, height = columns * (side + _GAP) + _GAP, side + _CAPTION + _GAP
    canvas = np.full((-(-len(rows) // across) * height + _GAP, across * width, 3), _WHITE, dtype=np.uint8)
    for number, (caption, pictures) in enumerate(rows):
        top, begin = number // across * height + _CAPTION, number % across * width + _GAP
        _write(canvas, caption, begin, top - 5, width - 3 * _GAP)
        for column, picture in enumerate(pictures[:columns]):
            left = begin + column * (side + _GAP)
            canvas[top : top + side, left : left + side] = resize_square(picture, side)
    return to_png(canvas)


def captioned_sheet(rows: Sequence[Sequence[tuple[np.ndarray | None, Sequence[str]]]], side: int = 112) -> bytes:
    """Return a PNG with rows of pictures (H, W, 3) uint8 RGB, each above its own lines of text; None leaves the place empty.

    The first picture of a row is set apart from the others.
    """
    columns = max(map(len, rows))
    lines = max(len(texts) for row in rows for _, texts in row)
    height = side + lines * _CAPTION + _APART // 2
    canvas = np.full((len(rows) * height, columns * (side + _GAP) + _APART, 3), _WHITE, dtype=np.uint8)
    for number, row in enumerate(rows):
        for column, (picture, texts) in enumerate(row):
            top, left = number * height, column * (side + _GAP) + (_APART if column else _GAP)
            if picture is not None:
                canvas[top : top + side, left : left + side] = resize_square(picture, side)
            for line, text in enumerate(texts, 1):
                _write(canvas, text, left, top + side + line * _CAPTION - 5, side)
    return to_png(canvas)


def _write(canvas: np.ndarray, text: str, left: int, base: int, width: int) -> None:
    """Write a caption, shortened to fit `width` pixels."""
    from PIL import Image, ImageDraw

    font, letters = _font()
    # a character that cannot be shown, or that the font lacks, is written as \x1b or \u738b
    drawn = (c if ord(c) in letters else c.encode("unicode_escape").decode() for c in printable(text[:_LONGEST]))
    text = _fitted("".join(drawn), font.getlength, width)
    mask = Image.new("L", (width, _CAPTION))
    ImageDraw.Draw(mask).text((0, _BASE), text, fill=255, font=font, anchor="ls")
    place = canvas[base - _BASE : base - _BASE + _CAPTION, left : left + width]
    ink = np.asarray(mask, dtype=np.float32)[: place.shape[0], : place.shape[1], None] / 255
    place[:] = np.round(place + ink * (np.array(_INK, dtype=np.float32) - place)).astype(np.uint8)


@functools.cache
def _font() -> tuple[Any, Collection[int]]:
    """Return the font of captions, and the characters that it has."""
    import matplotlib
    from matplotlib.ft2font import FT2Font
    from PIL import ImageFont

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    return ImageFont.truetype(path, _LETTER), frozenset(FT2Font(str(path)).get_charmap())


def _fitted(text: str, length: Callable[[str], float], width: float) -> str:
    """Return the longest beginning of a text, with two dots if it is cut, whose length is at most `width`."""
    if length(text) <= width:
        return text
    return next((cut for end in range(len(text) - 1, 0, -1) if length(cut := f"{text[:end]}..") <= width), "..")


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


Facts = Sequence[tuple[str, str]]  # names and values
ReadPixels = Callable[[str], np.ndarray] | None  # of a picture by its name; None = show no pixels
_STYLE = Path(__file__).with_suffix(".css")


class Page:
    """A page, collected from top to bottom; `write` puts all into one file to mail. Text is escaped, and no script is in it."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts = [f"<h1>{html.escape(title)}</h1>"]
        self._headings: list[str] = []
        self._contents = -1  # place among the parts

    def section(self, heading: str) -> None:
        """Begin a section and add it to the table of contents."""
        self._headings.append(heading)
        self._parts.append(f'<h2 id="section-{len(self._headings)}">{html.escape(heading)}</h2>')

    def facts(self, facts: Iterable[tuple[str, str]]) -> None:
        """Add a list of (name, value), usually below the title."""
        self._parts.append("<dl>" + "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts) + "</dl>")

    def contents(self) -> None:
        """Insert a table of contents here, with links to all sections, including later ones."""
        self._contents = len(self._parts)
        self._parts.append("")

    def text(self, text: str, note: bool = False) -> None:
        """Add a paragraph; a note is styled differently."""
        self._parts.append(f'<p class="note">{html.escape(text)}</p>' if note else f"<p>{html.escape(text)}</p>")

    def table(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table; columns of numbers, or of text that starts with one, are right-aligned, including their headers."""
        texts = [[f"{value:,}" if isinstance(value, int) else str(value) for value in row] for row in rows]
        kinds = [' class="number"' if _is_number([row[place] for row in texts]) else "" for place in range(len(head))]
        cells = "".join(f"<th{kind}>{html.escape(name)}</th>" for kind, name in zip(kinds, head, strict=True))
        body = "".join(
            "<tr>" + "".join(f"<td{kind}>{html.escape(text)}</td>" for kind, text in zip(kinds, row, strict=True)) + "</tr>"
            for row in texts
        )
        self._parts.append(f'<div class="wide"><table><tr>{cells}</tr>{body}</table></div>')

    def picture(self, png: bytes, alt: str) -> None:
        """Add a PNG."""
        data = base64.b64encode(png).decode()
        self._parts.append(
            f'<figure><img src="data:image/png;base64,{data}" alt="{html.escape(alt)}">'
            f'<figcaption class="note">{html.escape(alt)}</figcaption></figure>'
        )

    def write(self, path: Path) -> None:
        """Write the page; the file appears when it is complete."""
        head = (
            f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(self.title)}</title>'
        )
        text = f'<!doctype html>\n<html lang="en"><head>{head}<style>\n{_STYLE.read_text("utf-8")}</style></head>\n<body>\n'
        if self._contents >= 0:
            links = (f'<li><a href="#section-{n}">{html.escape(h)}</a></li>' for n, h in enumerate(self._headings, 1))
            self._parts[self._contents] = f"<nav><ul>{''.join(links)}</ul></nav>"
        text += "\n".join(self._parts) + "\n</body></html>\n"
        from .files import write_file  # it needs xxhash, and benchmarks draw with torch alone

        write_file(path, text.encode("utf-8", "backslashreplace"))


def _is_number(column: Sequence[str]) -> bool:
    """Return whether all cells of a column, except empty ones and dashes, are numbers or text that starts with one."""
    cells = [text for text in column if text not in ("", "-")]
    return bool(cells) and all(text.lstrip("-+")[:1].isdigit() for text in cells)
