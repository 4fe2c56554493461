"""Sections whose key `name` selects a class, and whose other keys are the arguments of that class: `loss` and `backbone`.

The arguments, their types and their defaults come from the class's constructor, so a new loss or backbone adds no key to
base.yaml. If a file or override selects another class than the files below it, their arguments stay if the new class takes them
too.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from utils.suggest import nearest

from .values import typed

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
