"""Suggestions for mistyped names."""

import difflib
from collections.abc import Iterable

# share of equal characters: a typo in a name of four letters passes; 'adaface' for 'arcface' or 'vit_b' for 'mbf' does not
_CUTOFF = 0.75


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name nearest to `name`, ignoring case; None if none is near, because a distant one would mislead."""
    folded = {other.casefold(): other for other in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=_CUTOFF)
    return folded[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean NAME?' for the end of an error, or '' if no known name is near."""
    near = nearest(name, known)
    return f" Did you mean {near}?" if near else ""
