"""What a run of scripts.deploy.detect has done: an entry for each picture, appended when its crops are on the disk."""

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.files import check_file, shown

from ..journal import Journal
from .crops import UNREADABLE
from .detections import Face

Stamp = tuple[int, int]  # size in bytes and time of change in ns, of a picture


class Found(NamedTuple):
    """A face of a picture, and the share of its crop that is outside the picture."""

    face: Face
    padding: float


class Done(NamedTuple):
    """A picture that is done: its faces, or why there are none."""

    name: str
    stamp: Stamp
    faces: tuple[Found, ...]
    reason: str


def crop_name(name: str, which: str, number: int) -> str:
    """Return the relative name of a crop; `number` counts the crops of a picture from 0."""
    path = Path(name)
    return str(path.with_name(f"{path.stem}_{number + 1}.jpg" if which == "all" else f"{path.stem}.jpg"))


class Detections:
    """The pictures that are done, in OUT/detect.jsonl.

    Args:
        facts: what the crops depend on; a journal of others is an error.
        again: forget what it has, and remove those crops.

    Raises:
        ValueError: it is of another detector or of other settings, or the folder has files and no journal.
    """

    NAME = "detect.jsonl"

    def __init__(self, out: Path, journal: Journal, facts: Mapping[str, object], again: bool) -> None:
        self._out, self._journal = out, journal
        found = [done for entry in journal.entries if (done := _done(entry.record))]
        self.done = {done.name: done for done in found}
        if journal.facts is None and (other := _file_of_others(out)):
            if not journal.path.stat().st_size:
                journal.path.unlink(missing_ok=True)  # the lock made it
            raise ValueError(
                f"{shown(out)}: holds {shown(other)} and no {self.NAME}, so it is no folder of crops, and its files might be "
                "overwritten; name a new or empty one"
            )
        if again:
            self._remove_crops(journal.facts)
            self.done = {}
        journal.begin(facts, again, str(out), "its crops were made with")

    def _remove_crops(self, facts: Any) -> None:
        """Remove the crops that are listed, so that none of other settings is left; names that lead elsewhere are skipped."""
        which = str(facts.get("which")) if isinstance(facts, dict) else ""
        root = self._out.resolve()
        for done in self.done.values():
            for number in range(len(done.faces)):
                with contextlib.suppress(OSError, ValueError):  # no name of a file
                    crop = self._out / crop_name(done.name, which, number)
                    if crop.parent.resolve().is_relative_to(root):
                        crop.unlink()

    def stamp(self, picture: Path) -> Stamp:
        """Return what changes with the file; (0, 0) if it cannot be asked."""
        try:
            status = picture.stat()
        except OSError:
            return 0, 0
        return status.st_size, status.st_mtime_ns

    def is_done(self, folder: Path, name: str, which: str) -> bool:
        """Return whether a picture is the one that was done, and its crops are there."""
        done = self.done.get(name)
        if done is None or done.stamp != self.stamp(folder / name) or done.reason.startswith(UNREADABLE):
            return False
        return all(_has_bytes(self._out / crop_name(name, which, number)) for number in range(len(done.faces)))

    def forget(self, name: str, which: str) -> None:
        """Remove the crops of a picture that is to be done again, as it may have fewer faces now."""
        if name in self.done:
            for number in range(len(self.done.pop(name).faces)):
                (self._out / crop_name(name, which, number)).unlink(missing_ok=True)

    def add(self, done: Done) -> None:
        """Record a picture."""
        faces = [
            {"box": face.box.tolist(), "points": face.points.tolist(), "score": face.score, "padding": padding}
            for face, padding in done.faces
        ]
        self._journal.add({"name": done.name, "stamp": done.stamp, "faces": faces, "reason": done.reason})
        self.done[done.name] = done


def _file_of_others(out: Path) -> str:
    """Return a name in a folder that has no journal yet, "" if there is none; desktops leave hidden files anywhere."""
    return min((name for name in os.listdir(out) if name != Detections.NAME and not name.startswith(".")), default="")


def _has_bytes(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return check_file(path) > 0
    return False


def _done(record: Any) -> Done | None:
    """Return what a line says; None if it is no line of this program, so that its picture is done again."""
    try:
        size, time = record["stamp"]
        faces = tuple(_found(face) for face in record["faces"])
        name, reason = record["name"], record["reason"]
    except (KeyError, TypeError, ValueError):
        return None
    if not (isinstance(name, str) and isinstance(reason, str) and (faces or reason)):
        return None
    return Done(name, (size, time), faces, reason)


def _found(record: Any) -> Found:
    box, points = np.array(record["box"], dtype=np.float64), np.array(record["points"], dtype=np.float64)
    score, padding = float(record["score"]), float(record["padding"])
    if box.shape != (4,) or points.shape != (5, 2) or not math.isfinite(score + padding + float(box.sum() + points.sum())):
        raise ValueError("no face")
    return Found(Face(box, points, score), padding)
