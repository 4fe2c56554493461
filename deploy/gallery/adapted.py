"""Adapted galleries: their vectors are another network's, mapped by an adapter, and only its own thresholds hold for them.

`Facts.digest` of such a gallery is the digest of the new network, ADAPTED, and a line of JSON; a program that knows nothing of
adapters takes it for that of an unknown network.
"""

import argparse
import functools
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

from utils.checkpoint.tensor_file import file_hash
from utils.files import shown
from utils.text import one_line

from ..embed.adapter import apply, check_thresholds, read_adapter
from ..results import SetResult, Threshold, threshold_of
from .database import ADAPTED, Facts, journal_of
from .store import Gallery

_LONGEST = 10_000  # characters of a digest


class Adapted(NamedTuple):
    """What a gallery says of its adapter."""

    adapter: str  # hash of the file
    source: str  # title of the old network
    thresholds: dict[str, tuple[float, float]]  # as in Adapter

    @property
    def words(self) -> str:
        """The thresholds in words."""
        found = ", ".join(f"--far {far} (cosine {cosine:.4f})" for far, (cosine, _) in self.thresholds.items())
        return found or "none, because it had too few pairs"


def adapted_of(gallery: Gallery) -> Adapted | None:
    """Return what an adapted gallery says of its adapter, None for others; ValueError if that is damaged."""
    _, mark, text = gallery.facts.digest.partition(ADAPTED)
    if not mark:
        return None
    try:
        found: dict[str, Any] = json.loads(text) if len(text) <= _LONGEST else {}
        return Adapted(one_line(found["adapter"])[:80], one_line(found["source"]), check_thresholds(found["thresholds"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(
            f"{shown(gallery.path)}: does not say how its vectors were adapted; adapt the old gallery again"
        ) from None


def threshold_for(options: argparse.Namespace) -> Threshold | None:
    """Return the threshold of the command line for a search; of an adapted gallery only its adapter's own.

    Args:
        options: with those of `add_threshold_arguments`, `run` and `gallery`.

    Raises:
        ValueError: another threshold is asked for, or the adapter did not measure that FAR.
    """
    with Gallery(options.gallery) as gallery:
        adapted = adapted_of(gallery)
    if adapted is None:
        return threshold_of(options)
    for flag in ("threshold", "results", "set"):
        if getattr(options, flag) is not None:
            raise ValueError(
                f"--{flag}: {shown(options.gallery)} is adapted from another network, for which only the thresholds that its "
                f"adapter measured hold: {adapted.words}; leave --{flag} out"
            )
    if options.far is None:
        return None
    for far, (cosine, tar) in adapted.thresholds.items():
        if math.isclose(float(far), float(options.far), rel_tol=1e-9):
            return Threshold(cosine, far, tar, "of the adapter's people")
    raise ValueError(f"--far {options.far}: {shown(options.gallery)} is adapted, and its adapter measured {adapted.words}")


def result_for_page(
    options: argparse.Namespace, gallery: Gallery, found: tuple[SetResult | None, str]
) -> tuple[SetResult | None, str]:
    """Return what `result_of` found; nothing for an adapted gallery, because the page has one threshold for all it compares."""
    if adapted_of(gallery) is None:
        return found
    for flag in ("far", "results", "pairs", "set"):
        if getattr(options, flag) is not None:
            raise ValueError(
                f"--{flag}: {shown(options.gallery)} is adapted from another network, and the page has no threshold for it; "
                f"leave --{flag} out, or search with `face search`, which has that of the adapter"
            )
    return None, ""


def adapt_gallery(options: argparse.Namespace) -> None:
    """Write a copy of a gallery of the old network of an adapter, as one of its new network."""
    adapter, out = read_adapter(options.adapter), Path(options.out)
    if os.path.lexists(out):
        raise ValueError(f"--out: {shown(out)} exists already; choose another name")
    new, unfinished = adapter.new, out.with_name(f".{out.name}.unfinished")
    with Gallery(options.gallery) as gallery:
        facts = gallery.facts
        if facts.digest != adapter.old.digest:
            raise ValueError(
                f"{shown(options.gallery)}: was embedded by {one_line(facts.title)}, and the adapter is for galleries of "
                f"{one_line(adapter.old.title)}; fit one for this network"
            )
        says = {"adapter": file_hash(options.adapter), "source": facts.title, "thresholds": adapter.thresholds}
        changed = Facts(
            *(new.title, f"{new.digest}{ADAPTED}{json.dumps(says)}", new.embedding_size, new.image_size),
            *(facts.detector, facts.which, new.network_path, facts.detector_path),
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        for left in (unfinished, journal_of(unfinished)):  # by a copy that was killed
            left.unlink(missing_ok=True)
        unfinished.touch(0o600 | stat.S_IMODE(Path(options.gallery).stat().st_mode), exist_ok=False)  # no more readers
        try:
            gallery.copy_to(unfinished)
            with Gallery(unfinished) as copied:
                count = copied.adapt(changed, functools.partial(apply, adapter.tensors), adapter.lengths)
            os.link(unfinished, out)  # fails if the name has been taken since
        finally:
            unfinished.unlink(missing_ok=True)
    held = Adapted("", "", adapter.thresholds).words
    print(f"{shown(out)}: {count:,} vectors adapted to {one_line(new.title)}; thresholds that hold for them: {held}")
