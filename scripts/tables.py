"""Write the tables of all losses and backbones, made from their classes, into pages: python -m scripts.tables PAGE...

A page that has the lines <!-- begin: losses --> or <!-- begin: backbones -->, and <!-- end --> after them, gets the table
between them. A test fails while a page differs from the classes.

Example: python -m scripts.tables docs/losses.md docs/backbones.md
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from backbones import BACKBONES, backbone_arguments
from losses import MARGINS, Published, margin_arguments
from losses.margin import SHARED
from utils.cli import make_parser
from utils.program import run_main


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("python -m scripts.tables", __doc__)
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE", help="Markdown files")
    return run_main(write, parser.parse_args(arguments).pages)


def write(pages: Sequence[Path]) -> None:
    """Make the tables of these pages anew."""
    for page in pages:
        page.write_text(with_tables(page), encoding="utf-8")


def with_tables(page: Path) -> str:
    """Return the text of a page with its tables made anew; ValueError if it has no place for a table."""
    text, found = page.read_text(encoding="utf-8"), False
    for name, rows in (("losses", _losses()), ("backbones", _backbones())):
        before, begin, rest = text.partition(f"<!-- begin: {name} -->\n")
        _, end, after = rest.partition("\n<!-- end -->")
        if begin and end:
            found, text = True, "\n".join([before + begin, *rows, end + after])
    if not found:
        raise ValueError(f"{page}: must have a line <!-- begin: losses --> or <!-- begin: backbones -->, then <!-- end -->")
    return text


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _values(arguments: Mapping[str, Any]) -> str:
    return " ".join(f"`{key}={value}`" for key, value in arguments.items())


def _paper(title: str, paper: str) -> str:
    """Return a title with a link, or the venue, of its paper."""
    return f"[{title}](https://arxiv.org/abs/{paper})" if re.fullmatch(r"\d{4}\.\d{5}", paper) else f"{title} ({paper})"


def _published(row: Published) -> str:
    head = {f"head.{key}": value for key, value in row.head.items()}
    overrides = [*(f"`{word}`" for word in row.training.split()), _values(row.arguments), _values(head)]
    return f"{_paper(row.title, row.paper)} {' '.join(filter(None, overrides))}".strip()


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").partition("\n")[0].rstrip(".")


def _losses() -> Iterable[str]:
    yield _row("`loss.name`", "what it is, and when to take it", "arguments", "published")
    yield _row(*["---"] * 4)
    for name, margin in MARGINS.items():
        arguments = {key: value for key, value in margin_arguments(name).items() if key not in SHARED}
        published = "; ".join(map(_published, margin.published))
        yield _row(f"`{name}`", _first_line(margin), _values(arguments), published)


def _backbones() -> Iterable[str]:
    yield _row("`backbone.name`", "what it is, and when to take it", "source", "arguments")
    yield _row(*["---"] * 4)
    kinds: dict[Any, dict[str, list[str]]] = {}  # class: arguments: names
    for name, network in BACKBONES.items():
        kinds.setdefault(network.func, {}).setdefault(_values(backbone_arguments(name)), []).append(name)
    for kind, variants in kinds.items():
        papers = ", ".join(_paper(paper, paper) for paper in kind.papers)
        shared = [word for word in next(iter(variants)).split() if all(word in arguments.split() for arguments in variants)]
        cells = [" ".join(shared)]
        for arguments, names in variants.items():
            own = [word for word in arguments.split() if word not in shared]
            cells += [f"{_names(names)}: {' '.join(own)}"] if own else []
        yield _row(_names(name for names in variants.values() for name in names), _first_line(kind), papers, "; ".join(cells))


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    raise SystemExit(main())
