"""What the command lines share: a parser whose --help shows the module's docstring and the defaults of the options."""

import argparse
from typing import Any


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description, and adds an option's default where its help does not tell it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False or action.default in ("", [], argparse.SUPPRESS)
        if not action.help or silent or action.nargs == 0 or "default" in action.help:
            return action.help
        value = action.default
        shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        return f"{action.help} (default: {shown.replace('%', '%%')})"


class Parser(argparse.ArgumentParser):
    """ArgumentParser with the help format of all programs here, also for its subcommands."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _Help)
        super().__init__(*args, **kwargs)


def make_parser(command: str, docstring: str | None) -> Parser:
    """Return the parser of a program.

    Args:
        command: how it is started, for example python -m scripts.data.align.
        docstring: of its module: what it is for, an example, the formats of the files it reads. --help shows it as it is.
    """
    return Parser(prog=command, description=docstring)
