"""One-page HTML reports: everything in one file, pictures too, so that it can be mailed and opened anywhere. No scripts."""

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; margin: .8rem 0; } th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--line); }
th { text-align: left; background: var(--soft); } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } img { max-width: 100%; background: white; } .note { opacity: .75; } figure { margin: 1rem 0; }
"""


class Page:
    """Collects the parts of a page, top to bottom; `write` makes the file. All text is escaped."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._parts = [f"<h1>{html.escape(title)}</h1>"]

    def section(self, heading: str) -> None:
        self._parts.append(f"<h2>{html.escape(heading)}</h2>")

    def text(self, text: str, note: bool = False) -> None:
        self._parts.append(f'<p class="note">{html.escape(text)}</p>' if note else f"<p>{html.escape(text)}</p>")

    def table(self, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table; numbers, and text that starts with one, are set flush right."""
        cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
        body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
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
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text(text + "\n".join(self._parts) + "\n</body></html>\n", encoding="utf-8")
        unfinished.replace(path)


def _cell(value: object) -> str:
    text = html.escape(f"{value:,}" if isinstance(value, int) else str(value))
    return f'<td class="number">{text}</td>' if text[:1].isdigit() else f"<td>{text}</td>"
