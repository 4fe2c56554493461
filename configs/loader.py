"""Read a run's YAML, its `_base_` files and the command line's overrides into one read-only EasyDict.

base.yaml lies under every config and is the schema: its keys are all the keys there are, and the type of each default is the
type of the key. Errors are ValueErrors that name the file or override, the key, the rule, the value and, for a typo, the
nearest key.
"""

import copy
import difflib
import math
import re
from pathlib import Path
from typing import Any

import yaml
from easydict import EasyDict

from .rules import ENTRIES, check_rules

SCHEMA = Path(__file__).with_name("base.yaml")


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 5e-4 as a number (YAML 1.1 wants 5.0e-4) and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise ValueError(f"key {key_node.value!r} stands twice (line {key_node.start_mark.line + 1}); keep one")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


class Config(EasyDict):
    """EasyDict that cannot be changed once it is frozen, so that a run means one thing from start to end."""

    def __init__(self) -> None:
        dict.__init__(self)  # EasyDict's own would turn the methods below into keys

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_frozen", False):
            self._refuse()
        if isinstance(value, tuple):  # EasyDict would make each section in it anew
            object.__setattr__(self, name, value)
            dict.__setitem__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("the configuration is read-only after loading; use a local variable for a derived value")

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(as_plain(self), memo)

    __setitem__ = __setattr__
    __delattr__ = __delitem__ = __ior__ = pop = popitem = clear = update = setdefault = _refuse


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> EasyDict:
    """Return the merged, checked, read-only configuration of a run.

    Args:
        path: a YAML file; `_base_: other.yaml` in it (relative to it) is read first.
        overrides: `section.key=value`, the value in YAML, as on the command line; they pass the same checks.

    Raises:
        ValueError: a missing file, a key that does not exist, a wrong type, or a rule between keys that is broken.
    """
    path = Path(path)
    tree = _read(SCHEMA)
    for layer in _layers(path, ()):
        _merge(tree, _read(layer), str(layer))
    for override in overrides:
        _merge(tree, _parse_override(override), f"override {override!r}")
    if not tree["run"]["name"]:
        tree["run"]["name"] = path.stem
    check_rules(tree)
    return _to_config(tree)


def dump_config(config: EasyDict) -> str:
    """Return the configuration as YAML that `load_config` reads back to the same values."""
    return yaml.safe_dump(as_plain(config), sort_keys=False)


def as_plain(config: EasyDict | dict[str, Any]) -> dict[str, Any]:
    """Return the configuration as plain dicts and lists."""
    return {
        key: as_plain(value) if isinstance(value, dict) else _plain_list(value) if isinstance(value, (list, tuple)) else value
        for key, value in config.items()
    }


def _plain_list(values: list[Any] | tuple[Any, ...]) -> list[Any]:
    return [as_plain(value) if isinstance(value, dict) else value for value in values]


def _to_config(tree: dict[str, Any]) -> Config:
    config = Config()
    for key, value in tree.items():
        # a tuple: a list inside a read-only config could still be appended to
        if isinstance(value, list):
            value = tuple(_to_config(item) if isinstance(item, dict) else item for item in value)
        config[key] = _to_config(value) if isinstance(value, dict) else value
    object.__setattr__(config, "_frozen", True)
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a UTF-8 text file"
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f" Did you mean {path.parent / near[0]}?" if near else ""
        raise ValueError(f"config {path}: cannot be read ({reason}).{hint}") from None
    try:
        tree = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"config {path}{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
    except ValueError as error:
        raise ValueError(f"config {path}: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ValueError(f"config {path}: must hold sections like 'train:', got {type(tree).__name__}")
    return tree


def _layers(path: Path, above: tuple[Path, ...]) -> list[Path]:
    """Return the files to merge in order, the `_base_` chain first; base.yaml itself is always underneath."""
    resolved = path.resolve()
    if resolved == SCHEMA.resolve():
        return []
    if resolved in above:
        raise ValueError(f"config {path}: _base_ goes round in a circle; remove one of the _base_ lines")
    base = _read(path).get("_base_")
    if base is None:
        return [path]
    if not isinstance(base, str):
        raise ValueError(f"config {path}: _base_ must be one file name, got {base!r}")
    return [*_layers(path.parent / base, (*above, resolved)), path]


def _parse_override(override: str) -> dict[str, Any]:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted.strip():
        raise ValueError(f"override {override!r}: must read section.key=value, for example optimizer.lr=0.05")
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError):
        raise ValueError(f"override {override!r}: the value is not valid YAML; quote it") from None
    tree: Any = "" if value is None else value
    for key in reversed(dotted.strip().split(".")):
        tree = {key: tree}
    return tree


def _merge(tree: dict[str, Any], layer: dict[str, Any], source: str, prefix: str = "") -> None:
    """Write layer's values over tree's in place, after checking that each key exists and keeps its type."""
    for key, value in layer.items():
        name = f"{prefix}{key}"
        if name == "_base_":
            continue
        if key not in tree:
            raise ValueError(f"{source}: no key {name!r}.{_nearest(tree, prefix, str(key))}")
        if isinstance(tree[key], dict):
            if not isinstance(value, dict):
                raise ValueError(f"{source}: {name} is a section, got {value!r}; set a key in it: {name}.KEY=VALUE")
            _merge(tree[key], value, source, f"{name}.")
        elif name in ENTRIES:
            tree[key] = _entries(ENTRIES[name], value, source, name)
        else:
            tree[key] = _typed(tree[key], value, f"{source}: {name}")


def _entries(schema: dict[str, Any], value: Any, source: str, name: str) -> list[dict[str, Any]]:
    """Return a list of sections that each have the keys of `schema`."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{source}: {name} must be a list of entries like {{{', '.join(schema)}}}, got {value!r}")
    entries = [dict(schema) for _ in value]
    for number, (entry, item) in enumerate(zip(entries, value, strict=True)):
        _merge(entry, item, source, f"{name}[{number}].")
    return entries


def _nearest(tree: dict[str, Any], prefix: str, key: str) -> str:
    near = difflib.get_close_matches(key, list(tree), n=1, cutoff=0.5)
    if near:
        return f" Did you mean {prefix}{near[0]!s}?"
    if not prefix:  # a key written without its section, for example lr=0.1
        inside = [f"{section}.{key}" for section, keys in tree.items() if isinstance(keys, dict) and key in keys]
        if inside:
            return f" Did you mean {inside[0]}?"
    return f" Allowed: {', '.join(sorted(str(k) for k in tree))}"


def _typed(default: Any, value: Any, where: str) -> Any:
    """Return value if it has the type of default (an int counts as a float), else raise."""
    if isinstance(default, bool) or isinstance(value, bool):
        fits = isinstance(default, bool) and isinstance(value, bool)
    elif isinstance(default, float):
        fits = isinstance(value, (int, float)) and math.isfinite(value)
        value = float(value) if fits else value
    elif isinstance(default, list):
        fits = isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
        value = list(value) if fits else value
    else:
        fits = isinstance(value, type(default))
    if not fits:
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list of names"}
        raise ValueError(f"{where} must be {names[type(default)]}, got {value!r}")
    return value
