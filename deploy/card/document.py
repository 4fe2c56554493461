"""A document that is written twice, as Markdown and as an HTML page, with a mark that shows whether a person changed it since.

All text is shown literally in both, whatever markup it contains.
"""

import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from utils.distributed.agreement import digest
from utils.files import MAX_SMALL_TEXT, read_text, shown
from utils.report.page import Page
from utils.text import markdown_table, markdown_text, printable

from ..journal import write_file

_MARK = "<!-- written by python -m scripts.deploy.card; hash of the text above: {} -->"
_MARKED = re.compile(_MARK.format("([0-9a-f]{32})"))


class Document:
    """Collects the parts of both files from top to bottom."""

    def __init__(self, title: str) -> None:
        self._page = Page(printable(title))
        self._markdown = [f"# {markdown_text(title)}"]
        self._pictures: dict[str, bytes] = {}

    def section(self, heading: str) -> None:
        """Begin a section."""
        self._page.section(printable(heading))
        self._markdown.append(f"## {markdown_text(heading)}")

    def text(self, text: str) -> None:
        """Add paragraphs; an empty line parts them, other line ends do not count."""
        for paragraph in re.split(r"\n\s*\n", text.strip()):
            line = printable(" ".join(paragraph.split()))
            self._page.text(line)
            self._markdown.append(markdown_text(line))

    def missing(self, text: str) -> None:
        """Add the place of a text that somebody must write; `text` says what it is to say."""
        self._page.text(f"[To be filled in: {printable(text)}]", note=True)
        self._markdown.append(f"**To be filled in:** *{markdown_text(text)}*")

    def table(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table."""
        texts = [[printable(f"{cell:,}" if type(cell) is int else str(cell)) for cell in row] for row in rows]
        self._page.table(head, texts)
        self._markdown.append(markdown_table([head, *texts]))

    def facts(self, facts: Iterable[tuple[str, object]]) -> None:
        """Add a list of names and values."""
        texts = [(name, printable(str(value))) for name, value in facts]
        self._page.facts(texts)
        self._markdown.append(markdown_table([("", ""), *texts]))

    def picture(self, name: str, png: bytes, words: str) -> None:
        """Add a PNG, which the page contains and the Markdown file has beside it as `name`."""
        self._page.picture(png, words)
        self._markdown.append(f"![{markdown_text(words)}]({name})")
        self._pictures[name] = png

    def write(self, folder: Path, stem: str) -> None:
        """Write STEM.html, the pictures and STEM.md into a folder, each of which appears when it is complete.

        Raises:
            ValueError: a person changed one of the two files, and would lose the changes.
        """
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{stem}.html", folder / f"{stem}.md"]
        for path in files:
            _require_own(path)
        with tempfile.TemporaryDirectory() as aside:
            page = Path(aside) / files[0].name
            self._page.write(page)
            text = page.read_text(encoding="utf-8")
        for name, png in self._pictures.items():
            write_file(folder / name, png)
        for path, content in zip(files, (text, "\n\n".join(self._markdown) + "\n"), strict=True):
            data = content.encode("utf-8", "backslashreplace")
            write_file(path, data + f"{_MARK.format(digest([data]))}\n".encode())


def _require_own(path: Path) -> None:
    """Raise ValueError if a file exists that this class did not write, or that somebody changed since."""
    if not os.path.lexists(path):
        return
    try:
        text = read_text(path, MAX_SMALL_TEXT, "utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    body, _, last = text.removesuffix("\n").rpartition("\n")
    found = _MARKED.fullmatch(last)
    if not found or digest([f"{body}\n".encode()]) != found[1]:
        raise ValueError(
            f"{shown(path)} was changed by hand, or is no card of this program, and would be lost. Move your text into the "
            "file of the fields (card.yaml), and rename this one; or give another folder with --out"
        )
