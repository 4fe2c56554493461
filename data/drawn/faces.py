"""Cartoon portraits for the demo data set: draw_face(identity, shot, rng) -> (112, 112, 3) uint8 RGB.

The picture is drawn flat at twice its size, from back to front, and then reduced, which smooths all edges. Three layers make
it look natural: soft shadows, a lamp on the solid head, and the defects of a camera.
Shapes: n = points; canvas = SIZE x SIZE pixels, soft = half of it.
"""

import math

import cv2
import numpy as np

from .identity import SIZE, Canvas, Colour, Head, Identity, Shot, mix

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
    swell, top = 0.6 * p.hair_side, 0.8 * p.hair_top
    strands = [strand for strand in range(3, 72, 5 if p.hair_style != "buzz" else 80) if seen[strand]]
    for strand in strands:
        y = np.linspace(-0.97 - top, min(line[strand], 0.9) - 0.03, 7)
        around = longitude[strand] * np.linspace(0.75, 1.0, 7)
        canvas.line(head.on_oval(around, y, head.shell(y, swell, top)), tone * 0.8, 2)
    if strands:
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


IMAGE_SIZE = 112
_CIRCLE = np.linspace(0, 2 * np.pi, 25)[:-1]
_COS, _SIN = np.cos(_CIRCLE), np.sin(_CIRCLE)
_SPAN = np.linspace(-1, 1, 15)


def draw_face(identity: Identity, shot: Shot, rng: np.random.Generator) -> np.ndarray:
    """Return a (112, 112, 3) uint8 RGB portrait; rng draws everything that is not in the Shot (background, clothes, noise)."""
    canvas, head = Canvas(), Head(identity, shot)
    hair_colour = mix(identity.hair, np.array([196.0, 196.0, 200.0]), identity.greying * shot.age)
    _draw_background(canvas, rng)
    _draw_body(canvas, head, identity, rng)
    draw_back(canvas, head, identity, hair_colour)
    _draw_skull(canvas, head, identity, shot)
    _draw_wrinkles(canvas, head, identity, shot)
    _draw_marks(canvas, head, identity)
    _draw_beard(canvas, head, identity, hair_colour)
    _draw_mouth(canvas, head, identity, shot)
    for side in (-1.0, 1.0):
        _draw_eye(canvas, head, identity, shot, side)
        _draw_brow(canvas, head, identity, shot, hair_colour, side)
    _draw_nose(canvas, head, identity, shot)
    draw_front(canvas, head, identity, hair_colour, shot.age)
    if shot.hat:
        draw_hat(canvas, head, rng.uniform(20, 235, 3))
    if shot.glasses != "none":
        _draw_glasses(canvas, head, identity, shot, rng)
    if shot.occluder:
        _draw_occluder(canvas, rng)
    return _photograph(canvas, head, identity, shot, rng)


def landmarks(identity: Identity, shot: Shot) -> np.ndarray:
    """Return where eyes, nose and corners of the mouth are drawn, (5, 2) x and y as shares of the side, left ones first."""
    mouth = identity.mouth_width * (1 + 0.14 * shot.smile)
    x = np.array([-identity.eye_x, identity.eye_x, 0.0, -mouth, mouth])
    corner = identity.mouth_y - 0.04 * shot.smile
    y = np.array([identity.eye_y, identity.eye_y, identity.nose_y, corner, corner])
    return Head(identity, shot).on_face(x, y, np.array([0, 0, identity.nose_length, 0, 0])) / SIZE


def _draw_background(canvas: Canvas, rng: np.random.Generator) -> None:
    """Fill the canvas with a blurred room: a colour field and, mostly, a few shapes."""
    cells = int(rng.integers(1, 7))
    base = _muted(rng.uniform(20, 235, 3))
    grid = rng.normal(0, 35, (cells + 1, cells + 1, 1)) + rng.normal(0, 16, (cells + 1, cells + 1, 3))
    field = np.clip(base + grid, 0, 255).astype(np.uint8)
    cv2.resize(field, (SIZE, SIZE), dst=canvas.pixels, interpolation=cv2.INTER_LINEAR)
    for _ in range(int(rng.integers(0, 4))):
        corner, size = rng.uniform(-20, SIZE, 2), rng.uniform(20, 150, 2)
        colour = _muted(rng.uniform(10, 245, 3))
        if rng.random() < 0.5:
            canvas.fill(corner + size * np.array([(0, 0), (1, 0), (1, 1), (0, 1)]), colour)
        else:
            canvas.fill(corner + size[0] * 0.5 * np.stack([_COS, _SIN], axis=1), colour)


def _muted(colour: Colour) -> Colour:
    """Return the colour, shifted towards its grey."""
    return mix(colour, np.full(3, colour.mean()), 0.45)


def _draw_body(canvas: Canvas, head: Head, p: Identity, rng: np.random.Generator) -> None:
    """Draw shoulders and neck, in clothes of any colour."""
    clothes = mix(_muted(rng.uniform(15, 240, 3)), rng.uniform(15, 240, 3), 0.5)
    t = np.linspace(0, np.pi, 24)
    shoulders = head.turn(1.5 * np.cos(t), 2.2 - 0.82 * np.sin(t) ** 0.7, -0.25)
    canvas.fill(shoulders, clothes)
    half = 0.56 * p.width + 0.04
    x = np.array([-half, -half, -half * 1.15, half * 1.15, half, half])
    y = np.array([0.4, 0.9, 1.55, 1.55, 0.9, 0.4])
    canvas.fill(head.turn(x, y, -0.22), p.skin * 0.74)
    collar = head.turn(half * 1.25 * np.cos(t), 1.42 + rng.uniform(0.02, 0.3) * np.sin(t), -0.2)
    canvas.fill(collar, p.skin * 0.74)


def _draw_skull(canvas: Canvas, head: Head, p: Identity, shot: Shot) -> None:
    """Draw ears and the skin of the head, with the soft shadows that every face has."""
    _draw_ear(canvas, head, p, shot, far=True)
    canvas.fill(head.outline(), p.skin)
    _draw_ear(canvas, head, p, shot, far=False)
    eye_y = np.full(2, p.eye_y)
    eyes = head.on_face(np.array([-p.eye_x, p.eye_x]), eye_y - 0.04)
    for centre, facing in zip(eyes, head.facing(np.array([-p.eye_x, p.eye_x]), eye_y), strict=True):
        if facing > 0.25:
            canvas.shade(centre + head.scale * np.stack([0.17 * facing * _COS, 0.12 * _SIN], axis=1), 0.86)
    cheeks = head.on_face(np.array([-0.42, 0.42]) * p.width / 0.73, np.full(2, 0.28))
    for centre in cheeks:
        canvas.shade(centre + 0.14 * head.scale * np.stack([_COS, 0.8 * _SIN], axis=1), np.array([1.04, 0.93, 0.93]))
    canvas.shade(head.on_face(0.14 * _COS, p.mouth_y + p.lip_lower + 0.08 + 0.03 * _SIN, 0.02), 0.88)
    canvas.shade(head.on_face(0.3 * _COS, -0.42 + 0.1 * _SIN), 1.07)


def _draw_ear(canvas: Canvas, head: Head, p: Identity, shot: Shot, far: bool) -> None:
    """Draw the ear that the turned head hides (behind the skull) or shows (on it)."""
    side = (1.0 if shot.yaw >= 0 else -1.0) * (1 if far else -1)
    turn = abs(head.sin_yaw)
    if far and turn > 0.35:
        return
    y = np.array([0.5 * (p.eye_y + p.nose_y)])
    x = side * (head.half_width(y) + 0.3 * p.ear_out)
    centre = head.turn(x * (1 - 0.15 * turn), y, -0.06)
    half = (p.ear_out * head.cos_yaw + 0.55 * p.ear * turn) * head.scale
    for size, tone in ((1.0, 0.94), (0.58, 0.74)):
        shape = np.stack([size * half * _COS, size * p.ear * head.scale * _SIN * (1 - 0.2 * _COS * side)], axis=1)
        canvas.fill(centre + shape @ head.to_canvas / head.scale, p.skin * tone)


def _draw_wrinkles(canvas: Canvas, head: Head, p: Identity, shot: Shot) -> None:
    """Draw lines on forehead, at the eyes and from nose to mouth: with age, and the last ones in a smile too."""
    depth = p.wrinkling * np.clip(shot.age - 0.25, 0, 1) / 0.75
    fold = max(depth, 0.35 * max(0.0, shot.smile - 0.3))
    t = np.linspace(0, 1, 7)
    for side in (-1.0, 1.0):
        x = side * (p.nose_width * 0.9 + (p.mouth_width * 1.1 - p.nose_width * 0.9 + 0.03) * t**0.8)
        y = p.nose_y - 0.04 + (p.mouth_y + 0.04 - p.nose_y) * t
        if head.facing(x, y).min() > 0.15:
            canvas.line(head.on_face(x, y), p.skin * (1 - 0.32 * fold), 2)
            if depth > 0.1:
                bag = side * (p.eye_x + p.eye_width * (2 * t - 1))
                drop = p.eye_y + p.eye_width * p.eye_open + 0.02 + 0.06 * np.sin(np.pi * t)
                canvas.line(head.on_face(bag, drop), p.skin * (1 - 0.26 * depth), 2)
    if depth > 0.1:
        x = np.linspace(-0.36, 0.36, 9)
        for k in range(3):
            y = -0.56 + 0.09 * k - 0.02 * np.cos(4 * x) + 0 * x
            canvas.line(head.on_face(x, y), p.skin * (1 - 0.25 * depth), 2)


def _draw_marks(canvas: Canvas, head: Head, p: Identity) -> None:
    """Draw freckles and moles where they are visible."""
    for points, radius, tone in ((p.freckles, 2, 0.76), (p.moles, 3, 0.42)):
        if len(points):
            visible = head.facing(points[:, 0], points[:, 1]) > 0.15
            for point in head.on_face(points[:, 0], points[:, 1])[visible]:
                canvas.disc(point, radius, p.skin * tone)


def _draw_beard(canvas: Canvas, head: Head, p: Identity, colour: Colour) -> None:
    """Draw the beard that belongs to the person, if any, before the mouth."""
    if p.beard == "none":
        return
    tone = mix(p.skin, colour * 0.9, 0.35 if p.beard == "stubble" else 0.92)
    if p.beard in ("stubble", "full"):
        length = p.beard_length if p.beard == "full" else 0.0
        canvas.fill(beard_outline(head, p, length), tone)
    if p.beard == "goatee":
        t = _CIRCLE
        y = p.mouth_y + 0.1 + (p.chin - p.mouth_y - 0.08 + p.beard_length * (np.sin(t) > 0)) * np.sin(t)
        canvas.fill(head.on_face(0.21 * np.cos(t), np.minimum(y, p.chin * 1.15), p.chin_depth + 0.03), tone)
    if p.beard != "stubble":
        half = p.mouth_width * 1.08
        low = p.mouth_y - 0.01 + 0.07 * np.abs(_SPAN) ** 2
        high = p.mouth_y - 0.05 - (p.mouth_y - p.nose_y - 0.1) * (1 - _SPAN**2) ** 0.6
        x = np.concatenate([half * _SPAN, half * _SPAN[::-1]])
        canvas.fill(head.on_face(x, np.concatenate([high, low[::-1]]), 0.07), tone)


def _draw_mouth(canvas: Canvas, head: Head, p: Identity, shot: Shot) -> None:
    """Draw the lips, and what is between them when they part."""
    smile, age = shot.smile, shot.age
    half = p.mouth_width * (1 + 0.14 * smile)
    rim = np.clip(1 - _SPAN**2, 0, 1)
    bend = p.mouth_y - 0.06 * smile * _SPAN**2 + 0.02 * smile
    gap = (shot.mouth_open + 0.035 * max(0.0, smile - 0.4)) * rim**0.6
    cupid = 1 - 0.35 * np.exp(-((_SPAN / 0.16) ** 2))
    thin = 1 - 0.3 * age
    high = bend - 0.4 * gap - p.lip_upper * thin * rim**0.6 * cupid
    low = bend + 0.8 * gap + p.lip_lower * thin * rim**0.7
    x = half * _SPAN
    lift = 0.05 * rim

    def region(top: np.ndarray, bottom: np.ndarray, colour: Colour) -> None:
        edge = head.on_face(
            np.concatenate([x, x[::-1]]), np.concatenate([top, bottom[::-1]]), np.concatenate([lift, lift[::-1]])
        )
        canvas.fill(edge, colour)

    lips = p.lips * (1 - 0.08 * age)
    region(high, bend, lips * 0.88)
    region(bend, low, lips)
    if gap.max() > 0.012:
        region(bend - 0.4 * gap, bend + 0.8 * gap, np.array([70, 22, 26]))
        region(bend - 0.4 * gap, bend + 0.05 * gap, np.array([240, 236, 228]))
    else:
        canvas.line(head.on_face(x, bend, lift), lips * 0.5, 2)


def _draw_eye(canvas: Canvas, head: Head, p: Identity, shot: Shot, side: float) -> None:
    """Draw one eye: white, iris and pupil cut off by the lids, lashes and crease."""
    centre_x = side * p.eye_x
    if head.facing(np.array([centre_x]), np.array([p.eye_y]))[0] < 0.02:
        return
    half = p.eye_width
    height = half * p.eye_open * shot.eye_open * (1 - 0.22 * shot.age)
    tilt = -p.eye_tilt * half * _SPAN * side + 0.02 * shot.age * _SPAN * side
    rim = np.clip(1 - _SPAN**2, 0, 1)
    high, low = p.eye_y + tilt - height * rim**0.7, p.eye_y + tilt + 0.75 * height * rim**0.8
    x = centre_x + half * _SPAN
    both_x = np.concatenate([x, x[::-1]])
    canvas.fill(head.on_face(both_x, np.concatenate([high, low[::-1]])), np.array([244, 242, 238]))
    iris_x = centre_x + 0.35 * half * float(np.clip(shot.gaze, -1, 1))
    radius = min(0.085, max(0.6 * half, 0.06))
    for size, colour in ((1.0, p.iris * 0.6), (0.84, p.iris), (0.42, np.array([14, 12, 14]))):
        disc_x = iris_x + size * radius * _COS
        disc_y = np.clip(p.eye_y + size * radius * _SIN, np.interp(disc_x, x, high), np.interp(disc_x, x, low))
        canvas.fill(head.on_face(disc_x, disc_y), colour)
    glint = head.on_face(np.array([iris_x + 0.3 * radius]), np.array([p.eye_y - 0.25 * radius]))[0]
    canvas.disc(glint, 2, np.array([255, 255, 255]))
    canvas.line(head.on_face(x, high), mix(p.skin * 0.4, np.array([12.0, 10, 12]), p.lash), 1 + round(3 * p.lash))
    canvas.line(head.on_face(x, low), p.skin * 0.66, 1)
    canvas.line(head.on_face(x, high - 0.035 - 0.02 * rim), p.skin * (0.72 - 0.1 * shot.age), 2)


def _draw_brow(canvas: Canvas, head: Head, p: Identity, shot: Shot, colour: Colour, side: float) -> None:
    """Draw one eyebrow, thick at the nose and thin at the temple."""
    outward = _SPAN if side > 0 else -_SPAN
    x = side * p.eye_x * 1.05 + p.brow_width * _SPAN
    if head.facing(x, np.full_like(x, -0.2)).max() < 0.1:
        return
    middle = p.eye_y - p.brow_gap - shot.brow_lift - p.brow_tilt * 0.16 * outward - p.brow_arch * (1 - _SPAN**2)
    middle += 0.02 * shot.age * outward
    thick = p.brow_thick * (1 - 0.2 * shot.age) * np.clip(1.05 - 0.45 * (outward + 1), 0.1, 1)
    points = head.on_face(np.concatenate([x, x[::-1]]), np.concatenate([middle - thick, (middle + thick)[::-1]]), 0.02)
    canvas.fill(points, mix(colour * 0.72, p.skin * 0.5, 0.2))


def _draw_nose(canvas: Canvas, head: Head, p: Identity, shot: Shot) -> None:
    """Draw the nose as a solid that stands out: it hides what is behind it, and its sides are in shadow."""
    root, tip = p.eye_y - 0.02, p.nose_y
    half = p.nose_width
    y = np.array([root, 0.5 * (root + tip), tip - 0.08, tip, tip + 0.06])
    wide = np.array([0.05, 0.06, 0.55 * half, half, 0.72 * half])
    height = np.array([0.05, 0.55, 0.85, 0.5, 0.3]) * np.array([1, p.nose_length, p.nose_length, p.nose_length, 0.2])
    ridge = np.array([0.05, 0.6 * p.nose_length, 0.95 * p.nose_length, p.nose_length, 0.5 * p.nose_length])
    left, right = head.on_face(-wide, y, 0.4 * height), head.on_face(wide, y, 0.4 * height)
    top = head.on_face(0 * y, y, ridge)
    lit = 1.0 if shot.light[0] > 0 else -1.0
    shadow = left if lit > 0 else right
    if abs(shot.yaw) > 0.3:  # the side seen from outside hides the far eye
        far = right if shot.yaw > 0 else left
        canvas.fill(np.concatenate([far, top[::-1]]), p.skin * 0.97)
    canvas.shade(np.concatenate([shadow, top[::-1]]), 0.78)
    canvas.shade(head.on_face(0.35 * half * _COS, tip - 0.05 + 0.06 * _SIN, p.nose_length), 1.12)
    base = np.linspace(-1, 1, 11)
    under = tip + 0.03 + 0.045 * np.cos(base * np.pi) * (np.abs(base) < 0.75)
    lift = p.nose_length * (0.25 + 0.5 * (1 - base**2))
    canvas.line(head.on_face(half * base, under, lift), p.skin * 0.6, 2)
    for side in (-1.0, 1.0):
        x = side * 0.48 * half
        if side * shot.yaw < 0.35:
            nostril = head.on_face(x + 0.24 * half * _COS, tip + 0.045 + 0.02 * _SIN, 0.6 * p.nose_length)
            canvas.fill(nostril, p.skin * 0.38)
        wing = np.linspace(-1, 1, 6)
        if side * shot.yaw < 0.55:
            edge = head.on_face(side * half * (1 - 0.12 * wing**2), tip + 0.06 * wing, 0.2 * p.nose_length)
            canvas.line(edge, p.skin * 0.68, 2)


def _draw_glasses(canvas: Canvas, head: Head, p: Identity, shot: Shot, rng: np.random.Generator) -> None:
    """Draw spectacles or sunglasses; the far lens goes with the far eye."""
    frame = rng.uniform(10, 110, 3)
    half, tall = p.eye_x * 0.74, rng.uniform(0.13, 0.2)
    boxy = rng.uniform(0.4, 1.0)
    for side in (-1.0, 1.0):
        x = side * p.eye_x * 1.04 + half * np.sign(_COS) * np.abs(_COS) ** boxy
        y = p.eye_y + 0.02 + tall * np.sign(_SIN) * np.abs(_SIN) ** boxy
        lens = head.on_face(x, y, 0.09)
        if shot.glasses == "dark":
            canvas.fill(lens, frame * 0.4)
        canvas.line(np.concatenate([lens, lens[:1]]), frame, 3)
        temple = head.on_face(side * np.array([p.eye_x * 1.04 + half, p.width]), np.full(2, p.eye_y), 0.07)
        canvas.line(temple, frame, 3)
    bridge = np.array([-1.0, 0, 1.0]) * (p.eye_x * 1.04 - half)
    canvas.line(head.on_face(bridge, np.full(3, p.eye_y), np.array([0.09, 0.12, 0.09])), frame, 3)


def _draw_occluder(canvas: Canvas, rng: np.random.Generator) -> None:
    """Draw something that stands between the camera and the lower or outer part of the face."""
    angle = rng.uniform(0.15 * np.pi, 0.85 * np.pi) if rng.random() < 0.7 else rng.uniform(0, 2 * np.pi)
    centre = SIZE / 2 + SIZE * rng.uniform(0.38, 0.5) * np.array([np.cos(angle), np.sin(angle)])
    wide, tall = rng.uniform(18, 60, 2)
    canvas.fill(centre + np.stack([wide * _COS, tall * _SIN], axis=1), rng.uniform(10, 245, 3))


def _photograph(canvas: Canvas, head: Head, p: Identity, shot: Shot, rng: np.random.Generator) -> np.ndarray:
    """Return the finished picture: reduced, shaded, lit, and with the defects of a camera."""
    image = canvas.reduced()
    image *= _lamp(head, p, shot) * (shot.exposure * shot.cast).astype(np.float32)
    grey = cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    image = cv2.addWeighted(image, shot.saturation, grey, 1 - shot.saturation, 0)
    if shot.resolution < IMAGE_SIZE:
        small = cv2.resize(image, (shot.resolution, shot.resolution), interpolation=cv2.INTER_AREA)
        image = cv2.resize(small, (IMAGE_SIZE, IMAGE_SIZE), interpolation=cv2.INTER_LINEAR)
    if shot.blur > 0.3:
        image = cv2.GaussianBlur(image, (0, 0), shot.blur)
    grain = rng.standard_normal(image.shape, dtype=np.float32)
    return cv2.scaleAdd(grain, shot.noise, image).clip(0, 255).astype(np.uint8)


def _lamp(head: Head, p: Identity, shot: Shot) -> np.ndarray:
    """Return the (112, 112, 1) brightness of a solid head of this size and place under the shot's lamp."""
    grid = np.mgrid[0:28, 0:28].astype(np.float32) * 4 + 1.5
    centre = head.turn(np.zeros(1), np.array([0.05]), 0.1)[0] / 2
    x = (grid[1] - centre[0]) / (0.5 * head.scale * (p.width + 0.25))
    y = (grid[0] - centre[1]) / (0.5 * head.scale * 1.25)
    z = np.sqrt(np.clip(1 - x * x - y * y, 0.03, 1))
    length = np.sqrt(x * x + y * y + z * z)
    facing = (x * shot.light[0] + y * shot.light[1] + z * shot.light[2]) / length
    brightness = (1 + shot.contrast * (np.clip(facing, -0.3, 1) - 0.7)).astype(np.float32)
    return cv2.resize(brightness, (IMAGE_SIZE, IMAGE_SIZE), interpolation=cv2.INTER_LINEAR)[:, :, None]
