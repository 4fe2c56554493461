"""Sections whose key `name` picks a class, and whose other keys are the arguments of that class: `loss` and `backbone`.

Arguments, their types and defaults are those of the class's constructor, so a new loss or backbone adds no key to base.yaml.
Where a file or override picks another class than the files below it, their arguments stay if the new class takes them too.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from utils.suggest import nearest

from .values import typed

SECTIONS = ("backbone", "loss")


class NamedSection(NamedTuple):
    """How a section with classes by name is checked. Both functions raise ValueError, in words that follow `SECTION.`."""

    arguments: Callable[[str], Mapping[str, Any]]  # the name of a class -> its arguments with their defaults
    check: Callable[..., object]  # called with the name and all arguments


class _Argument(NamedTuple):
    """An argument as a file or override has it."""

    value: Any  # as the YAML loader read it
    layer: int  # of the file, in the order of merging; all overrides are one
    source: str  # for errors


Given = dict[str, dict[str, _Argument]]  # by section and key; "name" tells where the class was picked


def take_arguments(layer: dict[str, Any], tree: dict[str, Any], given: Given, number: int, source: str) -> dict[str, Any]:
    """Return a layer without the arguments of named sections, which go into `given`: their class is known at the end only."""
    rest = dict(layer)
    for section, arguments in given.items():
        values = layer.get(section)
        if not isinstance(values, dict):
            continue
        known = {key: value for key, value in values.items() if key in tree[section]}
        arguments |= {str(key): _Argument(value, number, source) for key, value in values.items() if key not in known}
        if "name" in known:
            arguments["name"] = _Argument(known["name"], number, source)
        rest[section] = known
    return rest


def fill_named(tree: dict[str, Any], given: Given, named: Mapping[str, NamedSection]) -> None:
    """Write the arguments of the classes that were picked into the sections of `tree`, and check them.

    Raises:
        ValueError: an unknown class or argument, a value of another type, or one that the class refuses.
    """
    for section, (arguments_of, check) in named.items():
        values, found = tree[section], dict(given[section])
        picked = found.pop("name", _Argument(values["name"], -1, ""))
        try:
            defaults = arguments_of(values["name"])
        except ValueError as error:
            raise ValueError(f"{section}.{error}") from None
        for key, (value, layer, source) in found.items():
            if key not in defaults:
                if layer < picked.layer:
                    continue  # for the class that a file below had picked
                near = nearest(key, [*defaults, *values])
                hint = f" Did you mean {section}.{near}?" if near else ""
                takes = ", ".join(defaults)
                raise ValueError(f"{source}: no key '{section}.{key}'.{hint} {section}.name={values['name']} takes {takes}")
            name = f"{section}.{key}"
            values[key] = typed(defaults[key], value, name, f"{source}: {name}")
        ours = {key: values.pop(key, default) for key, default in defaults.items()}
        tree[section] = {"name": values.pop("name"), **ours, **values}
        try:
            check(tree[section]["name"], **ours)
        except ValueError as error:
            raise ValueError(f"{section}.{error}") from None
