"""Draw the packages of this repository and their imports: python -m scripts.architecture docs/images/architecture.png

A room is a program, a package at the root, or a folder of scripts. Rooms are arranged in layers. A room may import from the
layers below it, but not from its own layer or above. Only folders of scripts may use one another; the picture lists these
imports. The picture is drawn from the import statements, and an import against the rule is an error.

Example: python -m scripts.architecture docs/images/architecture.png
"""

if __name__ == "__main__" and not __package__:
    raise SystemExit("error: start it from the root of the clone with python -m scripts.architecture")

import argparse
import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from utils.cli import make_parser
from utils.program import run_main
from utils.report.figure import make_figure

_ROOT = Path(__file__).parents[1]
# (title, rooms), from top to bottom; a room is a path below the root, without the rooms below that path
LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "programs put the parts together",
        (
            *("train.py", "eval/__main__.py", "scripts", "scripts/data", "scripts/eval", "scripts/benchmark"),
            *("scripts/arcface_torch", "scripts/deploy", "scripts/demo", "scripts/launch"),
        ),
    ),
    ("what the programs are made of", ("training", "deploy", "migration")),
    ("parts know nothing of one another", ("configs", "backbones", "losses", "partial_fc", "data", "eval")),
    ("everybody may use", ("utils",)),
)
_COLOURS = ("#f6dfb8", "#f3ead2", "#d5e6f6", "#dff0df")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and draw; return the exit status."""
    parser = make_parser("python -m scripts.architecture", __doc__)
    parser.add_argument("out", type=Path, help="PNG file")
    options = parser.parse_args(arguments)
    return run_main(lambda: draw(options))


def draw(options: argparse.Namespace) -> None:
    """Write the picture."""
    if wrong := wrong_arrows():
        raise ValueError(f"imports go downwards only, but {'; '.join(wrong)}. Move what both need into a layer below")
    within = [f"{start} uses {end}" for start, end in sorted(room_arrows()) if layer_of(start) == layer_of(end) == 0]
    figure = make_figure(11, 5.2, dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 11), ylim=(0, 5.2))
    axes.axis("off")
    y = 5.1
    for number, (title, rooms) in enumerate(LAYERS):
        rows = [rooms[begin : begin + 6] for begin in range(0, len(rooms), 6)] if number == 0 else [rooms]
        height = 0.45 + 0.5 * len(rows) + 0.2 * (number == 0)
        y -= height
        axes.axhspan(y, y + height, xmin=0.01, xmax=0.99, facecolor=_COLOURS[number], edgecolor="white", linewidth=3)
        axes.text(0.25, y + height - 0.26, title, fontsize=10, color="0.3")
        if number == 0:
            axes.text(5.5, y + 0.1, "; ".join(within), fontsize=8, color="0.3", ha="center")
        for line, row in enumerate(rows):
            for place, room in enumerate(row):
                x = 11 * (place + 0.5) / len(row)
                box = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": "0.55"}
                axes.text(x, y + height - 0.65 - 0.5 * line, room, ha="center", va="center", fontsize=10, bbox=box)
        if number < len(LAYERS) - 1:
            arrow = {"arrowstyle": "-|>", "linewidth": 2}
            axes.annotate("", xy=(10.3, y - 0.3), xytext=(10.3, y + 0.15), arrowprops=arrow, zorder=3)
        y -= 0.12
    figure.savefig(options.out)


def wrong_arrows() -> list[str]:
    """Return the imports against the rule: upwards, or within a layer except between folders of scripts."""
    arrows = sorted(room_arrows())
    wrong = [(a, b) for a, b in arrows if layer_of(b) < layer_of(a) or (layer_of(a) == layer_of(b) and "scripts" not in a)]
    return [f"{start} imports {end}" for start, end in wrong]


def layer_of(room: str) -> int:
    """Return the layer of a room, 0 at the top."""
    return next(number for number, (_, rooms) in enumerate(LAYERS) if room in rooms)


def room_arrows() -> dict[tuple[str, str], int]:
    """Return how many files of one room import from another, by (importing room, imported room)."""
    arrows: dict[tuple[str, str], int] = {}
    for path in _sources():
        imported = {_room_of(file) for name in _imports(path) if (file := _file_of(name)) is not None}
        for room in imported - {_room_of(path)}:
            arrows[_room_of(path), room] = arrows.get((_room_of(path), room), 0) + 1
    return arrows


def _sources() -> Iterator[Path]:
    roots = sorted({Path(room).parts[0] for _, rooms in LAYERS for room in rooms})
    for root in roots:
        yield from [_ROOT / root] if root.endswith(".py") else sorted((_ROOT / root).rglob("*.py"))


def _room_of(path: Path) -> str:
    """Return the room of a file, the one with the longest path above it."""
    inside = path.relative_to(_ROOT)
    places = [room for _, rooms in LAYERS for room in rooms if inside.is_relative_to(room)]
    return max(places, key=len)


def _file_of(module: str) -> Path | None:
    """Return the file of a module of this repository, also for the name of something in a module."""
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        path = _ROOT.joinpath(*parts[:count])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def _imports(path: Path) -> Iterator[str]:
    """Yield what a file imports, but not for type checks alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    for_types = {inner for node in blocks for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


if __name__ == "__main__":
    raise SystemExit(main())
