"""The fields of a model card that only a person can fill in: a YAML file of texts, which no program ever changes."""

import errno
import os
from pathlib import Path
from typing import NamedTuple

import yaml

from configs.values import is_nothing, read_yaml
from utils.files import MAX_SMALL_TEXT, read_text, shown
from utils.suggest import did_you_mean
from utils.text import one_line


class Field(NamedTuple):
    """A text of the card."""

    heading: str
    asks: str  # what it is to say


FIELDS = {
    "intended_use": Field("Intended use", "what the network is meant for, by whom, and with which people's consent"),
    "not_for": Field("Not meant for", "uses that you rule out, such as decisions about people that no person checks"),
    "limits": Field("Limits", "where it fails or was not tested: ages, skin tones, poses, cameras, disguises, twins"),
    "data_licence": Field("Licence of the data", "the licence of the training images, and whether the people on them agreed"),
    "weights_licence": Field(
        "Licence of the weights", "who may use the weights, and for what; the licence of the data may limit it"
    ),
    "contact": Field("Contact", "who answers questions, corrects errors, and removes people on request"),
}
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # of file systems without hard links, such as exFAT
_TEMPLATE = """\
# What only a person can say of this network. Write the text after the colon, or several lines below "key: |", each indented by
# two spaces; an empty line begins a paragraph. Then make the card again with the same command. No program changes this file.
"""


def read_fields(path: Path) -> dict[str, str]:
    """Return the texts of the fields that are filled in, by key.

    Raises:
        ValueError: the file cannot be read, has a key that is no field, or a value that is no text.
    """
    try:
        found = read_yaml(read_text(path, MAX_SMALL_TEXT))
    except OSError as error:
        raise ValueError(f"{shown(path)}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{shown(path)}: cannot be read: no UTF-8 text") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{shown(path)}: not the fields of a card: {_where(error)}") from None
    if is_nothing(found):
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{shown(path)}: not the fields of a card: it must have lines 'field: text'")
    for key, value in found.items():
        if key not in FIELDS:
            hint = did_you_mean(str(key), FIELDS)
            raise ValueError(f"{shown(path)}: {one_line(repr(key))[:80]} is no field.{hint} They are {', '.join(FIELDS)}")
        if not is_nothing(value) and not isinstance(value, str):
            raise ValueError(f"{shown(path)}: {key} must be text; put it in quotes, or below '{key}: |'")
    return {str(key): str(value) for key, value in found.items() if not is_nothing(value) and str(value).strip()}


def write_template(path: Path) -> None:
    """Write a file of empty fields, unless there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [_TEMPLATE, *(f"# {field.heading}: {field.asks}\n{key}:\n" for key, field in FIELDS.items())]
    aside = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        aside.write_text("\n".join(lines), encoding="utf-8")
        os.link(aside, path)  # which, unlike a rename, never replaces what a person wrote
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not path.exists():
            os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _where(error: Exception) -> str:
    """Return the first fault of a YAML text, with its line."""
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or error
    return one_line(f"line {mark.line + 1}: {what}" if mark else what)[:300]
