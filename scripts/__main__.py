"""List the programs: python -m scripts"""

import ast
from pathlib import Path


def main() -> int:
    """Print each program's name and purpose, the first line of its docstring; return the exit status."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        main_takes = [len(node.args.args) for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
        purpose = (ast.get_docstring(tree) or "").split("\n")[0].split(":")[0].rstrip(".")
        if main_takes == [1] and path.name != "__main__.py":
            print(f"python -m scripts.{path.stem:<24} {purpose}")
    print("\nEach explains itself with --help. Training: python train.py --help. Evaluation: python -m eval --help.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
