"""Reads the configuration files of arcface_torch, which are Python programs, without running them.

They may contain config = edict(), its import, and config.KEY = VALUE, where VALUE consists of literals, arithmetic and earlier
keys (config.num_epoch // 10). Anything else is an error that names the line.
"""

import ast
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from utils.files import MAX_SMALL_TEXT, read_text

# the last version of configs/base.py, without the keys of logging services and workers, which have no counterpart here
DEFAULTS: dict[str, Any] = {
    "margin_list": (1.0, 0.5, 0.0),
    "network": "r50",
    "resume": False,
    "save_all_states": False,
    "output": None,  # there "ms1mv3_arcface_r50" by default; here the name of the file
    "embedding_size": 512,
    "sample_rate": 1,
    "interclass_filtering_threshold": 0,
    "fp16": False,
    "batch_size": 128,
    "optimizer": "sgd",
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "verbose": 2000,
    "frequent": 10,
    "gradient_acc": 1,
    "seed": 2048,
}
_LARGEST = 1e30  # bound of every number, so that no file can cause endless computations
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Given(NamedTuple):
    """A value and where it was given."""

    value: Any
    place: str  # file:line, or "the defaults of arcface_torch"
    explicit: bool = True


def default_values() -> dict[str, Given]:
    """Return the default of each key."""
    return {key: Given(value, "the defaults of arcface_torch", explicit=False) for key, value in DEFAULTS.items()}


def read_config(path: Path, before: dict[str, Given]) -> dict[str, Given]:
    """Return the keys of a file merged over those in `before`, which it may refer to.

    Raises:
        ValueError: the file is not Python, or does more than set keys.
    """
    try:
        text = read_text(path, MAX_SMALL_TEXT, "utf-8")
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno or 1}: is not Python: {error.msg}") from None
    except (UnicodeDecodeError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{path}: is not Python text ({type(error).__name__})") from None
    found = dict(before)
    for node in tree.body:
        place = f"{path}:{node.lineno}"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue  # a bare string, often old settings that were commented out
        if (isinstance(node, ast.ImportFrom) and node.module == "easydict") or _is_new_config(node):
            continue
        key = _key(node)
        if key is None or not isinstance(node, ast.Assign):
            raise ValueError(f"{place}: only config.KEY = VALUE can be converted, got {_excerpt(node)}")
        try:
            found[key] = Given(_value(node.value, found), place)
        except (ArithmeticError, TypeError, RecursionError) as error:
            raise ValueError(f"{place}: {_excerpt(node)} cannot be computed ({type(error).__name__})") from None
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    return found


def _is_new_config(node: ast.stmt) -> bool:
    """Return whether this is config = edict()."""
    if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.value, ast.Call)):
        return False
    target, call = node.targets[0], node.value
    named = isinstance(target, ast.Name) and target.id == "config" and isinstance(call.func, ast.Name)
    return named and call.func.id in ("edict", "EasyDict") and not call.args and not call.keywords  # type: ignore[attr-defined]


def _key(node: ast.AST) -> str | None:
    """Return KEY of config.KEY, or of an assignment to it, else None."""
    if isinstance(node, ast.Assign):
        return _key(node.targets[0]) if len(node.targets) == 1 else None
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "config":
        return node.attr
    return None


def _value(node: ast.expr, known: dict[str, Given]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float, str, type(None))):
        return _bounded(node.value)
    if isinstance(node, (ast.Tuple, ast.List)):
        return [_value(item, known) for item in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        return {str(_value(key, known)): _value(item, known) for key, item in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.operand, known))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _bounded(_OPERATORS[type(node.op)](_number(node.left, known), _number(node.right, known)))
    key = _key(node)
    if key is not None:
        if key not in known:
            raise ValueError(f"config.{key} is used before it is set")
        return known[key].value
    raise ValueError(f"{_excerpt(node)} is neither a literal nor arithmetic on literals; write its value")


def _number(node: ast.expr, known: dict[str, Given]) -> Any:
    value = _value(node, known)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{_excerpt(node)} is not a number, so arithmetic on it is impossible; write the value")
    return value


def _bounded(value: Any) -> Any:
    if isinstance(value, (int, float)) and not abs(value) <= _LARGEST:
        raise ValueError("a number is too large")
    return value


def _excerpt(node: ast.AST) -> str:
    """Return one line of the source; strings, which may be secret keys of a service, are not shown."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, (str, bytes)):
            part.value = "..."
    try:
        text = ascii(ast.unparse(node).splitlines()[0])[1:-1]
    except (ValueError, RecursionError):
        text = type(node).__name__
    return f"`{text[:80]}`"
