"""Values of a file or override: kept as text until the type of their key is known.

YAML alone would choose a type for `off`, `010`, `001`, `12:30` or `2024-05-01` without knowing the key. Here the schema
decides: text keys take an unquoted word literally, and number keys take decimal numbers only.

In the sections `loss` and `backbone` the key `name` selects a class, and the other keys are its arguments. Their types and
defaults come from the class's constructor, so a new loss or backbone adds no key to base.yaml. If a file or override selects
another class than the files below it, their arguments stay if the new class takes them too.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import yaml

from utils.text import nearest

_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")
_MOST_ALIASES = 16  # in one text; even nested, so few make few values
_LONGEST = 1 << 18  # characters of a text; PyYAML takes 10 s for a million
_DEEPEST = 100  # brackets open at once; PyYAML's time grows with the square
_COMMENT = re.compile(r"(^|\s)#.*", re.MULTILINE)
_NOTHING = ("null", "~")
_DIGITS = r"[0-9](_?[0-9])*"  # as Python takes them
_WHOLE = r"[-+]?(0|[1-9](_?[0-9])*)"
_INTEGER = re.compile(_WHOLE)
_NUMBER = re.compile(rf"({_WHOLE}(\.({_DIGITS})?)?|[-+]?\.{_DIGITS})([eE][-+]?[0-9]+)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+([.eE].*)?")
# text keys with the documented value `off`, for which YAML 1.1 has other spellings, such as `no` and `false`
_OFF = ("data.index_cache",)
_NUMBERS = ("schedule.milestones", "schedule.milestone_steps")  # lists of numbers; others are of names
_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list of names"}


class Plain(str):
    """An unquoted scalar; a quoted one is a str."""


def _tagged(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    """Return a tagged number. If the text is not a number, the error names the line and the fix, which Python's would not."""
    kind = node.tag.rpartition(":")[2]
    try:
        return yaml.SafeLoader.yaml_constructors[node.tag](loader, node)
    except ValueError:
        line = node.start_mark.line + 1
        raise ValueError(f"line {line}: the tag !!{kind} does not fit {str(node.value)[:20]!r}; leave out the tag") from None


class Loader(yaml.SafeLoader):
    """SafeLoader that keeps unquoted scalars as text, and rejects duplicate keys."""

    num_aliases = 0  # seen so far
    yaml_implicit_resolvers: ClassVar = {"<": [("tag:yaml.org,2002:merge", re.compile("^<<$"))]}  # type: ignore[misc]
    yaml_constructors: ClassVar = {
        **yaml.SafeLoader.yaml_constructors,
        "tag:yaml.org,2002:int": _tagged,
        "tag:yaml.org,2002:float": _tagged,
        "tag:yaml.org,2002:str": lambda loader, node: Plain(node.value) if node.style is None else str(node.value),
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping, after checking that its keys are names without duplicates."""
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"line {node.start_mark.line + 1}: a tag says mapping, but the value is none; leave out the tag")
        seen = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ValueError(f"line {line}: a key must be a name, not a list or mapping; put text with [ or {{ in quotes")
            if key_node.value in seen:
                raise ValueError(f"key {key_node.value!r} is given twice (line {line}); keep one")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node; too many aliases are an error."""
        if self.check_event(yaml.AliasEvent):  # nine levels of nine make a billion values
            self.num_aliases += 1
            if self.num_aliases > _MOST_ALIASES:
                name = self.peek_event().anchor
                raise ValueError(f"*{name}: at most {_MOST_ALIASES} aliases (*name) are allowed; write the values out")
        return super().compose_node(parent, index)


def read_yaml(text: str, loader: type[yaml.SafeLoader] = Loader) -> Any:
    """Return the contents of a YAML text.

    Raises:
        yaml.YAMLError: it is not valid YAML.
        ValueError: it is valid YAML, but cannot be a configuration.
    """
    if len(text) > _LONGEST:
        raise ValueError(
            f"it has {len(text):,} characters, and may have {_LONGEST:,} at most; put lists into files of their own"
        )
    try:
        _check_depth(text)
        return yaml.load(text, loader)
    except RecursionError:
        raise ValueError("lists and mappings are nested too deeply") from None
    except (TypeError, AttributeError, KeyError, IndexError, OverflowError) as error:  # wrong tags, such as !!int [1]
        raise ValueError(f"a tag does not fit its value ({type(error).__name__}); leave out the !! tags") from None


def _check_depth(text: str) -> None:
    """Raise RecursionError if lists and mappings in brackets are nested too deeply."""
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", _COMMENT.sub("", text)):  # quoted brackets count too; no real value has a hundred
        depth = max(0, depth + (1 if bracket in "[{" else -1))
        if depth > _DEEPEST:
            raise RecursionError


def is_nothing(value: Any) -> bool:
    """Whether a value is missing: `key:`, or null or ~ without quotes."""
    return value is None or (isinstance(value, Plain) and (not value or value.lower() in _NOTHING))


def typed(default: Any, value: Any, name: str, where: str) -> Any:
    """Return value, converted to the type of default.

    Args:
        value: as Loader returned it.
        name: the key, as section.key.
        where: the beginning of an error message: the file or override, and the key.

    Raises:
        ValueError: it cannot be read as that type.
    """
    if isinstance(default, str):
        return _text(value, where, name in _OFF)
    if isinstance(default, list):
        return _numbers(value, where) if name in _NUMBERS else _names(value, where)
    if isinstance(default, bool):
        return _boolean(value, where)
    return _integer(value, where) if isinstance(default, int) else _float(value, where)


def _refuse(kind: type, value: Any, where: str, fix: str = "") -> ValueError:
    return ValueError(f"{where} must be {_TYPES[kind]}, got {shown(value)}{fix}")


def shown(value: Any) -> str:
    """Return a value for an error message; numbers, booleans and null have no quotes."""
    if value is None or (isinstance(value, Plain) and not value):
        return "nothing"
    bare = isinstance(value, Plain) and (value.lower() in (*_YES, *_NO, *_NOTHING) or re.fullmatch(r"[-+]?\.?[0-9]\S*", value))
    return str(value) if bare else repr(value)


def _boolean(value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, Plain) and value.lower() in (*_YES, *_NO):
        return value.lower() in _YES
    raise _refuse(bool, value, where)


def _integer(value: Any, where: str) -> int:
    if isinstance(value, str) and len(value) > 100:
        raise _refuse(int, f"{value[:20]}... ({len(value)} characters)", where)
    if isinstance(value, Plain) and _INTEGER.fullmatch(value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):  # `!!int 5`
        return value
    raise _refuse(int, value, where, _without_zeros(value))


def _float(value: Any, where: str) -> float:
    if isinstance(value, Plain) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e308:  # false for nan
        return float(value)
    raise _refuse(float, value, where, _without_zeros(value))


def _without_zeros(value: Any) -> str:
    leading = isinstance(value, Plain) and _LEADING_ZERO.fullmatch(value)
    return "; write it without the leading zero" if leading else ""


def _text(value: Any, where: str, has_off: bool = False) -> str:
    if value is None or (isinstance(value, Plain) and not value):
        return ""
    if is_nothing(value):
        raise _refuse(str, value, where, f"; write '' for nothing, or '\"{value}\"' for the word itself")
    if not isinstance(value, str):
        raise _refuse(str, value, where, "; put text with : # [ ] { } , in quotes, for example '\"a: b\"'")
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise ValueError(f"{where} must be one line of text without control characters, got {str(value)!r}")
    if has_off and isinstance(value, Plain) and value.lower() in (*_YES, *_NO):
        if value.lower() in _YES:
            raise ValueError(f"{where} must be auto, off or a folder, got {value}; for a folder of that name write ./{value}")
        return "off"
    return str(value)


def _numbers(value: Any, where: str) -> list[float]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{where} must be a list of numbers, got {shown(value)}; write [8, 14], or [] for none")
    return [_float(item, where) for item in value]


def _names(value: Any, where: str) -> list[str]:
    if not isinstance(value, (list, tuple)):
        raise _refuse(list, value, where, "; write [] for none" if is_nothing(value) or value == "" else "; write [a, b]")
    for item in value:
        if is_nothing(item) or item == "":
            raise _refuse(list, list(map(str, value)), where, "; a name is empty or null: leave it out, or put it in quotes")
        if not isinstance(item, str):
            raise _refuse(list, value, where)
    return [_text(item, where) for item in value]


SECTIONS = ("backbone", "loss")


class NamedSection(NamedTuple):
    """The checks of a named section. Both functions raise ValueError with a message that continues `SECTION.`."""

    arguments: Callable[[str], Mapping[str, Any]]  # the name of a class -> its arguments with their defaults
    check: Callable[..., object]  # called with the name and all arguments


class _Argument(NamedTuple):
    """An argument as given by a file or override."""

    value: Any  # as the YAML loader read it
    layer: int  # the number of the file or override, in the order of merging
    source: str  # for errors


class GivenSection(NamedTuple):
    """The class and arguments that files and overrides give for a named section."""

    picks: list[tuple[int, str]]  # (layer, name) of each selection of a class
    arguments: dict[str, _Argument]  # by key; the last layer wins


Given = dict[str, GivenSection]


def take_arguments(layer: dict[str, Any], tree: dict[str, Any], given: Given, number: int, source: str) -> dict[str, Any]:
    """Move the arguments of named sections from a layer to `given`, since their class is known only after the last layer.

    Return the rest of the layer.
    """
    rest = dict(layer)
    for section, (picks, arguments) in given.items():
        values = layer.get(section)
        if not isinstance(values, dict):
            continue
        known = {key: value for key, value in values.items() if key in tree[section]}
        arguments |= {str(key): _Argument(value, number, source) for key, value in values.items() if key not in known}
        if "name" in known:
            picks.append((number, str(known["name"])))
        rest[section] = known
    return rest


def fill_named(tree: dict[str, Any], given: Given, named: Mapping[str, NamedSection], schema: Mapping[str, str]) -> None:
    """Write the arguments of the selected classes into the sections of `tree`, and check them.

    Args:
        schema: the classes that base.yaml selects, by section.

    Raises:
        ValueError: an unknown class or argument, a value of the wrong type, or one that the class rejects.
    """
    for section, (arguments_of, check) in named.items():
        values, (picks, found) = tree[section], given[section]
        try:
            defaults = arguments_of(values["name"])
            # the class that each layer was written for; an argument of a class that was replaced later is dropped
            picked = [(-1, schema[section]), *picks]
            classes = {layer: [name for number, name in picked if number <= layer][-1] for _, layer, _ in found.values()}
            taken = {layer: arguments_of(name) for layer, name in classes.items()}
        except ValueError as error:
            raise ValueError(f"{section}.{error}") from None
        for key, (value, layer, source) in found.items():
            name = f"{section}.{key}"
            if key not in defaults and key not in taken[layer]:
                near = nearest(key, [*taken[layer], *values])
                hint = f" Did you mean {section}.{near}?" if near else ""
                takes = ", ".join(taken[layer])
                raise ValueError(f"{source}: no key {name!r}.{hint} {section}.name={classes[layer]} takes {takes}")
            read = typed(defaults[key] if key in defaults else taken[layer][key], value, name, f"{source}: {name}")
            if key in defaults:
                values[key] = read
        ours = {key: values.pop(key, default) for key, default in defaults.items()}
        tree[section] = {"name": values.pop("name"), **ours, **values}
        try:
            check(tree[section]["name"], **ours)
        except ValueError as error:
            raise ValueError(f"{section}.{error}") from None
