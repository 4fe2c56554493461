r"""Text for terminals, logs and Markdown that holds words of others: names of files, of people, of verification sets.

A name may hold anything but a zero byte. On a terminal an escape character in it moves the cursor or rewrites the title, and in
Markdown a bar adds a column and <img> an element. So control characters are shown as \x1b, and marks of Markdown are escaped.
"""

import html
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

# an underscore inside a word, and a star between blanks, are no marks
_MARKS = re.compile(r"([\\`\[\]|]|(?<![^\W_])_|_(?![^\W_])|\*(?=\S)|(?<=\S)\*|^[*+#-](?=[\s#-]))")
_LONGEST = 4000  # characters of a message


def printable(text: str, keep: str = "") -> str:
    r"""Return the text with each character that cannot be printed, apart from those in `keep`, as \xff or \u202e."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def one_line(message: object) -> str:
    """Return a message as one line that no terminal takes for commands: a file's name, or what stands in it, may hold any."""
    text = str(message)
    if len(text) > _LONGEST:  # a value of a million digits that was given for a key, say
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return printable(text)


@contextmanager
def prefix_errors(setting: str) -> Iterator[None]:
    """Name a key or a flag in front of an error of a part, which knows nothing of configurations and command lines."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from None


def markdown_table(rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table whose first row is the head; each cell is shown as the text it is."""
    lines = ["| " + " | ".join(markdown_text(str(cell)) for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join("---" for _ in rows[0]) + " |", *lines[1:]])


def markdown_text(text: str) -> str:
    """Return Markdown that is shown as this text, in one line."""
    return html.escape(_MARKS.sub(r"\\\1", printable(text)), quote=False).replace("~", "&#126;")


def label_text(text: str) -> str:
    """Return a label that matplotlib draws as this text: a pair of dollar signs would begin and end a formula."""
    return printable(text).replace("$", r"\$")


class PrintableOutput:
    """A stream whose text is written with what cannot be printed escaped; ends of lines and tabs are kept."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text without control characters."""
        return self._stream.write(printable(text, keep="\n\r\t"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
