"""The files of a fuzzer case, including links, pipes and odd names: written to a folder, or dumped as JSON."""

import base64
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

MARKER = "marker"  # the file beside the case's folder that payloads create
_STAMP = 10**18  # modification time of all files of a case, in nanoseconds; fixed, because caches depend on it


class Link(NamedTuple):
    """A symbolic link."""

    target: str


class Fifo(NamedTuple):
    """A named pipe."""


class Folder(NamedTuple):
    """An empty folder."""


Entry = bytes | Link | Fifo | Folder | None  # None removes a file of the input's valid files
Files = Mapping[str, Entry]


class Case(NamedTuple):
    """A command, and the files that differ from the input's valid files; names are relative, and may contain any bytes."""

    command: list[str]  # a program and its arguments
    files: dict[str, Entry]


class Place(NamedTuple):
    """The folders of cases: `work` is the case's own folder; everything else in `root` must not change."""

    root: Path
    work: Path
    said: Path

    @classmethod
    def below(cls, folder: Path) -> "Place":
        """Make the folders of one input."""
        place = cls(folder, folder / "case", folder / "said")
        folder.mkdir(parents=True)
        (folder / "canary").write_bytes(b"sing")
        return place

    def left(self) -> dict[str, str]:
        """Return a case's output, and what it changed outside its folder, and clean that up."""
        said = self.said.read_bytes()[-20_000:].decode("utf-8", "backslashreplace") if self.said.exists() else ""
        return {"said": said, "fault": self._fault()}

    def _fault(self) -> str:
        """Return what a case changed outside its folder, "" if nothing, and clean it up."""
        names = {entry.name for entry in os.scandir(self.root)}
        found = ""
        if MARKER in names:
            found = "marker: a payload was executed"
        elif names - {"case", "said", "canary"}:
            found = "outside: a file beside the folder of the case"
        elif not (self.root / "canary").is_file() or (self.root / "canary").read_bytes() != b"sing":
            found = "outside: a file beside the folder of the case was changed"
        for name in names - {"case", "said", "canary"}:
            _remove(self.root / name)
        (self.root / "canary").write_bytes(b"sing")
        return found


def lay_out(work: Path, sound: Files, files: Files) -> None:
    """Write the files of a case into an empty folder."""
    _remove(work)
    work.mkdir()
    for name, entry in {**sound, **files}.items():
        path = work / name
        if entry is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, bytes):
            path.write_bytes(entry)
            os.utime(path, ns=(_STAMP, _STAMP))
        elif isinstance(entry, Link):
            path.symlink_to(entry.target)
        elif isinstance(entry, Fifo):
            os.mkfifo(path)
        else:
            path.mkdir(exist_ok=True)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def dump_case(case: Case, facts: Mapping[str, Any]) -> str:
    """Return a case as JSON: binary files in base64, and bytes of names that are not UTF-8 as lone surrogates."""
    return (
        json.dumps(
            {**facts, "command": case.command, "files": {name: _dump(entry) for name, entry in case.files.items()}}, indent=1
        )
        + "\n"
    )


def _dump(entry: Entry) -> Any:
    if isinstance(entry, bytes):
        try:
            text = entry.decode("ascii")
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(entry).decode()}
        return text
    return (
        {"link": entry.target}
        if isinstance(entry, Link)
        else {type(entry).__name__.lower(): True}
        if entry is not None
        else None
    )
