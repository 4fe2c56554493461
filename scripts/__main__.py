"""List the programs: python -m scripts"""

import ast
import sys
from pathlib import Path

from utils.cli import leave_closed_output

_ROOT = Path(__file__).parent


def main() -> int:
    """List the programs; return the exit status."""
    try:
        list_programs()
        sys.stdout.flush()
    except BrokenPipeError as error:
        return leave_closed_output(error)
    return 0


def list_programs() -> None:
    """Print each program's name and purpose, the first line of its docstring, by folder."""
    for folder in [_ROOT, *sorted(path.parent for path in _ROOT.rglob("*/__init__.py"))]:
        programs = [line for path in sorted(folder.glob("*.py")) if (line := _line_of(path))]
        if programs:
            purpose, _, _ = _docstring_of(folder / "__init__.py").partition("\n")
            print(f"{'' if folder == _ROOT else chr(10)}{purpose}", *programs, sep="\n    ")
    print("\nEach explains itself with --help. Training: python train.py --help. Evaluation: python -m eval --help.")


def _docstring_of(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _line_of(path: Path) -> str:
    """Return the line for a file, "" if it is not a program: a program's main() takes the arguments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    main_takes = [len(node.args.args) for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    if main_takes != [1] or path.name == "__main__.py":
        return ""
    module = ".".join(path.relative_to(_ROOT.parent).with_suffix("").parts)
    return f"python -m {module:<40} {_docstring_of(path).splitlines()[0].split(':')[0].rstrip('.')}"


if __name__ == "__main__":
    raise SystemExit(main())
