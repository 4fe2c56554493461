"""The settings that must be equal in all processes of a run."""

from pathlib import PurePath
from typing import Any

# paths and resources of one machine; whether the run folder is shared is checked when it is locked
_MAY_DIFFER = {
    "run.output",
    "run.device",
    "run.threads",
    "data.path",
    "data.index_cache",
    "data.threads",
    "init.backbone",
    "init.head",
    "init.classes",
    "eval.path",
}
# keys that hold a word or a path; two different paths count as equal
_WORDS = {"data.labels": ("offset", "same"), "checkpoint.resume": ("auto", "never")}


def shared_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, by dotted key, that must be equal in all processes of a run: all but paths and resources.

    Args:
        config: the merged configuration, as plain dicts and lists.
    """
    settings: dict[str, Any] = {}
    for section, values in config.items():
        for name, value in values.items():
            key = f"{section}.{name}"
            if key in _MAY_DIFFER:
                continue
            if key in _WORDS and value not in _WORDS[key]:
                value = "a path"
            elif key == "eval.targets":
                value = [PurePath(str(target)).stem for target in value]
            elif key == "data.sources":
                value = [{**source, "path": "a path"} for source in value]
            settings[key] = value
    return settings
