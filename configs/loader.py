"""Read a run's YAML, its `_base_` files and the command line's overrides into one read-only EasyDict.

base.yaml is the base of every config, and the schema: no other keys exist, and the type of a key is the type of its default.
values.py reads each value as that type. In a named section, such as `loss`, the key `name` selects a class, whose arguments are
keys as well. Errors are ValueErrors that name the file or override, the key, the rule, the value and, for a typo, the nearest
key.
"""

import copy
import functools
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml
from easydict import EasyDict

from utils.checkpoint.format import sections
from utils.files import MAX_SMALL_TEXT, read_text
from utils.text import nearest, prefix_errors

from .rules import ENTRIES, RENAMED, TASK, TASK_SECTIONS, check_rules, check_tasks
from .values import (
    SECTIONS,
    Given,
    GivenSection,
    Loader,
    NamedSection,
    Plain,
    fill_named,
    is_nothing,
    read_yaml,
    shown,
    take_arguments,
    typed,
)

# paths and resources of one machine; whether the run folder is shared is checked when it is locked
_MAY_DIFFER = {
    *("run.output", "run.device", "run.threads", "data.path", "data.index_cache", "data.threads", "eval.path"),
    *("data.landmarks", "init.backbone", "init.head", "init.classes", "compatible.path", "compatible.classes"),
}
# keys that hold a word or a path; two different paths count as equal
_WORDS = {"data.labels": ("offset", "same"), "checkpoint.resume": ("auto", "never"), "teacher.path": ("", "average")}


def shared_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal in all processes of a plain configuration, by dotted key: all but paths and resources."""
    settings: dict[str, Any] = {}
    for section, values in sections(config).items():
        for name, value in values.items():
            key = f"{section.rpartition('.')[2]}.{name}"  # of a task as of the whole run
            if key in _MAY_DIFFER:
                continue
            if key in _WORDS and value not in _WORDS[key]:
                value = "a path"
            elif key == "eval.targets":
                value = [PurePath(str(target)).stem for target in value]
            elif key == "data.sources":
                value = [{**source, "path": "a path"} for source in value]
            settings[f"{section}.{name}"] = value
    return settings


SCHEMA = Path(__file__).with_name("base.yaml")


class Config(EasyDict):
    """EasyDict that is read-only once it is frozen, so that the settings of a run never change."""

    def __init__(self) -> None:
        dict.__init__(self)  # EasyDict.__init__ would turn the methods below into keys

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_frozen", False):
            self._refuse()
        if isinstance(value, tuple):  # EasyDict would copy each section in it
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


def load_config(
    path: str | Path, overrides: list[str] | tuple[str, ...] = (), named: Mapping[str, NamedSection] | None = None
) -> EasyDict:
    """Return the merged, checked, read-only configuration of a run.

    Args:
        path: a YAML file, or the name of one in configs/; if it contains `_base_: other.yaml` (relative to it), that file is
            read first.
        overrides: `section.key=value`, with the value in YAML, as on the command line; they pass the same checks.
        named: the checks of the sections of named.py; without it the arguments of these sections are left out.

    Raises:
        ValueError: a missing file, a key that does not exist, a wrong type, or a rule between keys that is broken.
    """
    path = find_config(Path(path))
    tree = copy.deepcopy(_schema(SCHEMA))
    layers = [(number, _read(file), str(file)) for number, file in enumerate(_layers(path, ()))]
    layers += [(len(layers), _parse_override(override), f"override {override!r}") for override in overrides]
    picked = {section: tree[section]["name"] for section in SECTIONS}
    given: Given = {section: GivenSection([], {}) for section in SECTIONS}
    known = {name: {**tree[name], **section.arguments(picked[name])} for name, section in (named or {}).items()}
    tasks: tuple[Any, str] = ([], "")
    for number, layer, source in layers:
        tasks = (layer.pop("tasks"), source) if "tasks" in layer else tasks
        _merge(tree, take_arguments(layer, tree, given, number, source), source, known=known)
    if not tree["run"]["name"]:
        tree["run"]["name"] = path.stem
    own = [(len(layers), entry, f"{tasks[1]}: tasks[{place}]") for place, entry in enumerate(_list_of_tasks(*tasks))]
    tree["tasks"] = [_task(tree, given, entry, named or {}, picked) for entry in own]
    check_rules(tree)
    check_tasks(tree)
    fill_named(tree, given, named or {}, picked)
    return _to_config(tree)


def _list_of_tasks(value: Any, source: str) -> list[dict[str, Any]]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(entry, dict) for entry in value):
        keys = ", ".join([*TASK, *TASK_SECTIONS])
        raise ValueError(f"{source}: tasks must be a list of entries like {{{keys}}}, got {shown(value)}")
    return list(value)


def _task(
    tree: dict[str, Any], given: Given, entry: tuple[int, Any, str], named: Mapping[str, NamedSection], picked: dict[str, str]
) -> dict[str, Any]:
    """Return a task: what its entry says of itself, and its sections, the keys that it does not name as in `tree`."""
    number, values, source = entry
    task, mine = dict(TASK), copy.deepcopy({**tree, "tasks": []})
    of_sections = {name: value for name, value in values.items() if name in TASK_SECTIONS}
    of_entry = {name: value for name, value in values.items() if name not in TASK_SECTIONS}
    _merge(task, of_entry, source, known={name: mine[name] for name in TASK_SECTIONS})
    arguments = {name: GivenSection(list(picks), dict(found)) for name, (picks, found) in given.items()}
    _merge(mine, take_arguments(of_sections, mine, arguments, number, source), source)
    with prefix_errors(f"tasks: {task['name'] or 'an entry'}"):
        check_rules(mine)
        fill_named(mine, arguments, named, picked)
    return {**task, **{name: mine[name] for name in TASK_SECTIONS}}


def task_configs(config: EasyDict) -> list[EasyDict]:
    """Return for each task the configuration with its data, head and loss, and its entry as `task`; one without `tasks`."""
    plain = as_plain(config)
    found = []
    for task in plain["tasks"] or [{**plain, **TASK, "batch_size": config.train.batch_size}]:
        own, entry = ({name: task[name] for name in names} for names in (TASK_SECTIONS, TASK))
        found.append(_to_config({**plain, **own, "tasks": [], "task": entry}))
    return found


def find_config(path: Path) -> Path:
    """Return the file that a command line names: a path, or a name in this folder; both with or without .yaml."""
    places = [path, SCHEMA.parent / path] if path == Path(path.name) else [path]
    for place in places:
        for file in (place, place.with_name(f"{place.name}.yaml")):
            if file.is_file():
                return file
    return SCHEMA.parent / f"{path.name.removesuffix('.yaml')}.yaml" if path == Path(path.name) else path


def dump_config(config: EasyDict | dict[str, Any]) -> str:
    """Return the configuration as YAML that `load_config` reads back to the same values."""
    return yaml.safe_dump(as_plain(config), sort_keys=False)


def as_plain(config: Any) -> Any:
    """Return a configuration, or a value of it, as plain dicts and lists."""
    if isinstance(config, dict):
        return {key: as_plain(value) for key, value in config.items()}
    return [as_plain(value) for value in config] if isinstance(config, (list, tuple)) else config


def _to_config(tree: dict[str, Any]) -> Config:
    config = Config()
    for key, value in tree.items():
        # a tuple, because a list could still be changed
        if isinstance(value, list):
            value = tuple(_to_config(item) if isinstance(item, dict) else item for item in value)
        config[key] = _to_config(value) if isinstance(value, dict) else value
    object.__setattr__(config, "_frozen", True)
    return config


def _read(path: Path, loader: type[yaml.SafeLoader] = Loader) -> dict[str, Any]:
    try:
        text = read_text(path, MAX_SMALL_TEXT, "utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a UTF-8 text file"
        near = nearest(path.name, [p.name for p in path.parent.glob("*.yaml") if p.name != path.name])
        hint = f" Did you mean {path.parent / near}?" if near else ""
        raise ValueError(f"config {path}: cannot be read ({reason}).{hint}") from None
    try:
        tree = read_yaml(text, loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"config {path}{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
    except ValueError as error:
        raise ValueError(f"config {path}: {error}") from None
    if is_nothing(tree):
        return {}
    if not isinstance(tree, dict):
        kind = "a list" if isinstance(tree, list) else shown(tree)
        raise ValueError(f"config {path}: must hold sections like 'train:', got {kind}")
    return tree


@functools.cache
def _schema(path: Path) -> dict[str, Any]:
    """Return the schema, which no caller may change; reading it takes longer than all else of a small configuration."""
    return _read(path, yaml.SafeLoader)


def _layers(path: Path, above: tuple[Path, ...]) -> list[Path]:
    """Return the files to merge in order, the `_base_` chain first; base.yaml itself is always underneath."""
    resolved = path.resolve()
    if resolved == SCHEMA.resolve():
        return []
    if resolved in above:
        raise ValueError(f"config {path}: the _base_ lines form a cycle; remove one of them")
    base = _read(path).get("_base_")
    if is_nothing(base):
        return [path]
    if not isinstance(base, str):
        raise ValueError(f"config {path}: _base_ must be one file name, got {base!r}")
    return [*_layers(path.parent / base, (*above, resolved)), path]


def _parse_override(override: str) -> dict[str, Any]:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted.strip():
        raise ValueError(f"override {override!r}: must read section.key=value, for example optimizer.lr=0.05")
    try:
        value = read_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        no_text = isinstance(error, yaml.reader.ReaderError)  # such as the name of a file from a machine without UTF-8
        fault = "has characters that are no text; rename the file" if no_text else "is not valid YAML; quote it"
        raise ValueError(f"override {override!r}: the value {fault}") from None
    if text.strip() != (value or "") and (value is None or isinstance(value, Plain)):
        raise ValueError(f"override {override!r}: in YAML # begins a comment and & an anchor; quote the value twice: '\"...\"'")
    tree: Any = value
    for key in reversed(dotted.strip().split(".")):
        tree = {key: tree}
    return tree


def _merge(
    tree: dict[str, Any], layer: dict[str, Any], source: str, prefix: str = "", known: dict[str, Any] | None = None
) -> None:
    """Overwrite tree's values with layer's, after checking that each key exists and keeps its type.

    Args:
        known: sections with more keys than in `tree`, for the hint about a key without its section.
    """
    for key, value in layer.items():
        name = f"{prefix}{key}"
        if name == "_base_":
            continue
        if name in RENAMED:
            raise ValueError(f"{source}: {name} is now {RENAMED[name]}")
        if key not in tree:
            raise ValueError(f"{source}: no key {name!r}.{_nearest({**tree, **(known or {})}, prefix, str(key))}")
        if isinstance(tree[key], dict):
            if not isinstance(value, dict):
                raise ValueError(f"{source}: {name} is a section, got {shown(value)}; set a key in it: {name}.KEY=VALUE")
            _merge(tree[key], value, source, f"{name}.")
        elif name in ENTRIES:
            tree[key] = _entries(ENTRIES[name], value, source, name)
        else:
            tree[key] = typed(tree[key], value, name, f"{source}: {name}")


def _entries(schema: dict[str, Any], value: Any, source: str, name: str) -> list[dict[str, Any]]:
    """Return a list of sections that each have the keys of `schema`."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{source}: {name} must be a list of entries like {{{', '.join(schema)}}}, got {value!r}")
    entries = [dict(schema) for _ in value]
    for number, (entry, item) in enumerate(zip(entries, value, strict=True)):
        _merge(entry, item, source, f"{name}[{number}].")
    return entries


def _nearest(tree: dict[str, Any], prefix: str, key: str) -> str:
    near = nearest(key, [str(other) for other in tree])
    if near:
        return f" Did you mean {prefix}{near}?"
    if not prefix:  # a key written without its section, for example lr=0.1
        inside = [f"{section}.{key}" for section, keys in tree.items() if isinstance(keys, dict) and key in keys]
        if inside:
            return f" Did you mean {inside[0]}?"
    return f" Allowed: {', '.join(sorted(str(k) for k in tree))}"
