"""Draws hair, beards and hats of the demo faces."""

import math

import numpy as np

from .canvas import Canvas
from .identity import Colour, Identity
from .skull import Head

_COVERS_EARS = ("bob", "long", "curly", "fringe")
# Longitudes, in degrees from the nose, at which the hairline has a height of its own.
_HAIRLINE_AT = np.radians([0, 25, 50, 68, 78, 92, 106, 125, 180])


def draw_back(canvas: Canvas, head: Head, p: Identity, colour: Colour) -> None:
    """Draw the hair that is seen behind the face."""
    if p.hair_style == "bald":
        return
    if p.hair_style == "bun":
        angle = np.linspace(0, 2 * math.pi, 24)
        radius = 0.28
        crown = head.turn(np.zeros(1), np.array([-1.12]), -0.35)
        canvas.fill(crown + radius * head.scale * np.stack([np.cos(angle), np.sin(angle)], axis=1), colour * 0.8)
    left, right = _outline(head, p, p.hair_length)
    canvas.fill(np.concatenate([left, right[::-1]]), colour * 0.68)


def draw_front(canvas: Canvas, head: Head, p: Identity, colour: Colour, age: float) -> None:
    """Draw the hair from the hairline over the crown, with its strands and a gleam."""
    if p.hair_style == "bald":
        return
    longitude = np.linspace(-math.pi, math.pi, 73)
    line = _hairline(p, longitude, age)
    left_edge, right_edge = head.edges(*head.shell(np.array([-0.3]), 0.02, 0.0))
    seen = (longitude > left_edge) & (longitude < right_edge)
    hairline = head.on_oval(longitude[seen], line[seen], head.shell(line[seen], 0.02, 0.04))
    first, last = np.flatnonzero(seen)[[0, -1]]
    left, _ = _outline(head, p, float(line[first]))
    _, right = _outline(head, p, float(line[last]))
    tone = colour if p.hair_style != "buzz" else colour * 0.6 + p.skin * 0.4
    canvas.fill(np.concatenate([hairline, right[::-1], left]), tone)
    strands = []
    swell, top = 0.6 * p.hair_side, 0.8 * p.hair_top
    for strand in np.arange(3, 72, 5 if p.hair_style != "buzz" else 80):
        if seen[strand]:
            y = np.linspace(-0.97 - top, min(line[strand], 0.9) - 0.03, 7)
            around = longitude[strand] * np.linspace(0.75, 1.0, 7)
            strands.append(head.on_oval(around, y, head.shell(y, swell, top)))
    if strands:
        canvas.lines(strands, tone * 0.8, 2)
        y = np.full(9, -0.74 - 0.7 * p.hair_top)
        gleam = np.linspace(-0.7, 0.4, 9)
        upper, lower = (head.on_oval(gleam, y + d, head.shell(y + d, swell, p.hair_top)) for d in (-0.05, 0.05))
        canvas.shade(np.concatenate([upper, lower[::-1]]), 1.3)


def draw_hat(canvas: Canvas, head: Head, colour: Colour) -> None:
    """Draw a cap over the hair, down to the forehead."""
    y = np.linspace(-1.16, -0.55, 14)
    ovals = head.shell(y, 0.14, 0.17)
    left, right = (head.on_oval(edge, y, ovals) for edge in head.edges(*ovals))
    canvas.fill(np.concatenate([left, right[::-1]]), colour)
    band = np.full(25, -0.5)
    around = np.linspace(-math.pi / 2, math.pi / 2, 25)
    upper = head.on_oval(around, band - 0.12, head.shell(band, 0.17, 0.15))
    lower = head.on_oval(around, band + 0.06 * np.cos(around), head.shell(band, 0.17, 0.15))
    canvas.fill(np.concatenate([upper, lower[::-1]]), colour * 0.75)


def beard_outline(head: Head, p: Identity, length: float) -> np.ndarray:
    """Return the outline (n, 2) of a full beard: from ear to ear along the cheeks, and back along the jaw."""
    around = np.radians(np.linspace(-82, 82, 25))
    low = p.mouth_y - 0.1
    top = np.interp(np.abs(around), np.radians([0, 15, 35, 60, 82]), [low, low, p.mouth_y - 0.12, 0.34, 0.08])
    upper = head.on_oval(around, top, (head.half_width(top) + 0.01, *head.depths(top)))
    y = np.linspace(0.1, p.chin, 14)
    front, back = head.depths(y)
    ovals = (head.half_width(y) + 0.02, front + 0.03 + p.chin_depth * (y > 0.7 * p.chin), back)
    drop = y + length * ((y - 0.1) / (p.chin - 0.1)) ** 3
    left, right = head.edges(*ovals)
    jaw_left = head.on_oval(np.maximum(left, -1.4), drop, ovals)
    jaw_right = head.on_oval(np.minimum(right, 1.4), drop, ovals)
    return np.concatenate([upper, jaw_right, jaw_left[::-1]])


def _hairline(p: Identity, longitude: np.ndarray, age: float) -> np.ndarray:
    """Return the heights (n,) at which the hair begins, at longitudes (n,)."""
    front = p.hairline - 0.05 * age
    covers = p.hair_style in _COVERS_EARS
    side = min(p.hair_length, 1.3) if covers else 0.06
    nape = max(side, 0.5)
    heights = [front, front + 0.02, front + 0.16, -0.2, side, side, side if covers else -0.12, nape, nape]
    parted = np.abs(longitude - 0.35 * p.hair_part * np.cos(longitude / 2))
    line = np.interp(parted, _HAIRLINE_AT, heights)
    if p.hair_style == "fringe":
        line = np.where(np.abs(longitude) < 1.1, np.maximum(line, front), line)
    ripple = 0.02 + p.hair_wave if p.hair_style in ("fringe", "curly") else 0.3 * p.hair_wave
    return line + ripple * np.sin(longitude * 23 + 3 * p.hair_part) * (line < 0.2)


def _outline(head: Head, p: Identity, end: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the visible left and right edge (n, 2) of the hair, from the crown down to the height `end`."""
    crown = -(1.0 + p.hair_top)
    t = np.linspace(0, 1, 22) ** 1.7
    y = crown + (end - crown) * t
    ovals = head.shell(y, p.hair_side, p.hair_top)
    if end > 1.0:  # long hair narrows at its tips
        taper = 1.0 - 0.25 * np.clip((y - 0.6) / (end - 0.6), 0, 1) ** 2
        ovals = (ovals[0] * taper, ovals[1] * taper, ovals[2] * taper)
    middle = head.turn(np.zeros_like(y), y, 0.0)
    edges = []
    for edge, phase in zip(head.edges(*ovals), (0.0, 1.3), strict=True):
        points = head.on_oval(edge, y, ovals)
        ripple = 1.0 + 1.6 * p.hair_wave * np.sin(9.0 * y + 7 * p.hair_part + phase)[:, None]
        edges.append(middle + (points - middle) * ripple)
    return edges[0], edges[1]
