"""One-page HTML reports: everything, including pictures, is in one file that can be mailed and opened anywhere. No scripts."""

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from utils.files import write_file

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: min(110rem, 96vw); margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } p { max-width: 70rem; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; margin: .8rem 0; } th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--line); }
th, td { text-align: left; vertical-align: top; } tr:first-child th { background: var(--soft); vertical-align: bottom; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; } td.number { white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; } dt { opacity: .75; } dd { margin: 0; }
dd { overflow-wrap: anywhere; } nav ul { columns: 18rem; padding-left: 1.2rem; }
.wide { overflow-x: auto; } img { max-width: 100%; background: white; } .note { opacity: .75; }
figure { margin: 1rem 0; overflow-x: auto; }
@media (max-width: 50rem) { figure img { max-width: 56rem; } }
"""


class Page:
    """Collects the parts of a page from top to bottom; `write` creates the file. All text is escaped."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts = [f"<h1>{html.escape(title)}</h1>"]
        self._headings: list[str] = []
        self._contents = -1  # place among the parts

    def section(self, heading: str) -> None:
        """Begin a section and add it to the table of contents."""
        self._headings.append(heading)
        self._parts.append(f'<h2 id="section-{len(self._headings)}">{html.escape(heading)}</h2>')

    def facts(self, facts: Iterable[tuple[str, str]]) -> None:
        """Add a list of (name, value), usually below the title."""
        self._parts.append("<dl>" + "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts) + "</dl>")

    def contents(self) -> None:
        """Insert a table of contents here, with links to all sections, including later ones."""
        self._contents = len(self._parts)
        self._parts.append("")

    def text(self, text: str, note: bool = False) -> None:
        """Add a paragraph; a note is styled differently."""
        self._parts.append(f'<p class="note">{html.escape(text)}</p>' if note else f"<p>{html.escape(text)}</p>")

    def table(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table; columns of numbers, or of text that starts with one, are right-aligned, including their headers."""
        texts = [[f"{value:,}" if isinstance(value, int) else str(value) for value in row] for row in rows]
        kinds = [' class="number"' if _is_number([row[place] for row in texts]) else "" for place in range(len(head))]
        cells = "".join(f"<th{kind}>{html.escape(name)}</th>" for kind, name in zip(kinds, head, strict=True))
        body = "".join(
            "<tr>" + "".join(f"<td{kind}>{html.escape(text)}</td>" for kind, text in zip(kinds, row, strict=True)) + "</tr>"
            for row in texts
        )
        self._parts.append(f'<div class="wide"><table><tr>{cells}</tr>{body}</table></div>')

    def picture(self, png: bytes, alt: str) -> None:
        """Add a PNG."""
        data = base64.b64encode(png).decode()
        self._parts.append(
            f'<figure><img src="data:image/png;base64,{data}" alt="{html.escape(alt)}">'
            f'<figcaption class="note">{html.escape(alt)}</figcaption></figure>'
        )

    def write(self, path: Path) -> None:
        """Write the page; the file appears when it is complete."""
        head = (
            f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(self.title)}</title>'
        )
        text = f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n'
        if self._contents >= 0:
            links = (f'<li><a href="#section-{n}">{html.escape(h)}</a></li>' for n, h in enumerate(self._headings, 1))
            self._parts[self._contents] = f"<nav><ul>{''.join(links)}</ul></nav>"
        text += "\n".join(self._parts) + "\n</body></html>\n"
        write_file(path, text.encode("utf-8", "backslashreplace"))


def _is_number(column: Sequence[str]) -> bool:
    """Return whether all cells of a column, except empty ones and dashes, are numbers or text that starts with one."""
    cells = [text for text in column if text not in ("", "-")]
    return bool(cells) and all(text.lstrip("-+")[:1].isdigit() for text in cells)
