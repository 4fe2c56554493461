"""Captions of sheets: names of people and files can be read, or are escaped, and stay in their place."""

import cv2
import numpy as np
import pytest

from utils.report import captioned_sheet, sheet

SIDE = 112


def _caption(text: str) -> np.ndarray:
    """Return a caption below a place without a picture, (H, W) gray."""
    data = np.frombuffer(captioned_sheet([[(None, (text,))]]), dtype=np.uint8)
    return cv2.imdecode(data, cv2.IMREAD_GRAYSCALE)[SIDE:]


@pytest.mark.parametrize("name", ["Zoë", "Ærøskøbing", "Łódź", "Яна", "Ελένη", "עדה"])
def test_letters_of_the_font_are_drawn(name: str):
    found = _caption(name)
    assert not np.array_equal(found, _caption(name.encode("ascii", "replace").decode()))
    assert not np.array_equal(found, _caption(name.encode("ascii", "backslashreplace").decode()))


def test_an_accent_is_drawn_above_its_letter():
    plain, accented = _caption("Rene"), _caption("René")
    different = np.flatnonzero((plain != accented).any(axis=1))
    letter = np.flatnonzero((_caption("e") < 128).any(axis=1))
    assert len(different) and different.max() < letter.min()


@pytest.mark.parametrize(
    ("name", "escaped"),
    [("王", r"\u738b"), ("a\nb", r"a\nb"), ("\x1b[2J", r"\x1b[2J"), ("a\u202eb", r"a\u202eb"), ("\udcff", r"\udcff")],
)
def test_what_cannot_be_drawn_is_escaped(name: str, escaped: str):
    assert np.array_equal(_caption(name), _caption(escaped)) and (_caption(name) < 255).any()


@pytest.mark.parametrize("text", ["W" * 300, "i" * 300, "王" * 300, "x" * 100_000])
def test_a_long_caption_ends_in_dots_within_its_width(text: str):
    found = _caption(text)
    inked = np.flatnonzero((found < 255).any(axis=0))
    assert inked.min() >= 4 and 4 + 0.8 * SIDE < inked.max() < 4 + SIDE
    last = inked[inked > inked.max() - 5]  # the dots, which are on the base line
    assert np.flatnonzero((found[:, last] < 128).any(axis=1)).min() > 9


def test_a_sheet_has_its_captions():
    face = np.zeros((SIDE, SIDE, 3), dtype=np.uint8)
    pixels = cv2.imdecode(np.frombuffer(sheet([("Zoë, 0.5", [face, face])], 2), dtype=np.uint8), cv2.IMREAD_GRAYSCALE)
    assert (pixels[:18] < 128).any() and sheet([("Zoë", [face])], 1) != sheet([("Zo?", [face])], 1)
