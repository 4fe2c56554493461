"""Escapes untrusted text for terminals, logs and Markdown: names of files, of people, of verification sets.

A name may contain anything but a zero byte. On a terminal an escape character can move the cursor or rewrite the title; in
Markdown a bar adds a column and <img> an element. So control characters are shown as \x1b, and Markdown syntax is escaped.
"""

import difflib
import html
import importlib.metadata
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

# an underscore inside a word, and a star between spaces, are not syntax
_MARKS = re.compile(r"([\\`\[\]|]|(?<![^\W_])_|_(?![^\W_])|\*(?=\S)|(?<=\S)\*|^[*+#-](?=[\s#-]))")
_NUMBER = re.compile(r"^([0-9]{1,9})([.)])(?=\s|$)")  # of an item of a list
_LONGEST = 4000  # characters of a message that are shown


def printable(text: str, keep: str = "") -> str:
    r"""Return the text with each unprintable character, except those in `keep`, as \xff or \u202e."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def one_line(message: object) -> str:
    """Return a message as one line without terminal control sequences, which the name or text of a file may contain."""
    text = str(message)
    if len(text) > _LONGEST:  # for example a key's value of a million digits
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return printable(text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, the name of its kind if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip()


@contextmanager
def prefix_errors(setting: str) -> Iterator[None]:
    """Name a key or a flag in front of an error of a part, which knows nothing of configurations and command lines."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None


def pip_install(*names: str) -> str:
    """Return the command that installs packages in the versions that the tests run with, and keeps the torch that is there."""
    with suppress(importlib.metadata.PackageNotFoundError):
        if not names[0].startswith("torch=="):
            names += (f"torch=={importlib.metadata.version('torch')}",)
    pip = f"{shlex.quote(sys.executable)} -m pip"  # another pip would install into another environment
    return f"{pip} install {' '.join(names)} -c {shlex.quote(str(Path(__file__).parents[1] / 'requirements-optional.txt'))}"


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal, whose first row is the header, with a line below it."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def markdown_table(rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table whose first row is the header; the text of each cell is shown literally."""
    lines = ["| " + " | ".join(markdown_text(str(cell)) for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join("---" for _ in rows[0]) + " |", *lines[1:]])


def markdown_text(text: str) -> str:
    """Return Markdown that renders as exactly this text, in one line."""
    marked = _NUMBER.sub(r"\1\\\2", _MARKS.sub(r"\\\1", printable(text)))
    return html.escape(marked, quote=False).replace("~", "&#126;").replace("$", "&#36;")  # GitHub draws $x$ as a formula


def label_text(text: str) -> str:
    """Return a label that matplotlib draws as exactly this text: a pair of dollar signs would make a formula."""
    return printable(text).replace("$", r"\$")


class PrintableOutput:
    """A stream that escapes unprintable characters, except line ends and tabs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text with control characters escaped."""
        return self._stream.write(printable(text, keep="\n\r\t"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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
