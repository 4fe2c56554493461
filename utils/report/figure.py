"""Figures of matplotlib as PNG files, without pyplot: no window is opened, and no state is shared by two figures.

matplotlib takes a second to import, so it is imported where the first figure is made.
"""

import io
from typing import Any, Literal

_DPI = 110  # of all figures but those whose caller says otherwise


def make_figure(width: float, height: float, dpi: int = _DPI, layout: Literal["constrained"] | None = None) -> Any:
    """Return an empty matplotlib.figure.Figure of `width` x `height` inches.

    Args:
        layout: "constrained" makes room for all texts, which takes as long as drawing; None leaves the margins to the caller.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def png_of(figure: Any) -> bytes:
    """Return the PNG file of a figure."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
