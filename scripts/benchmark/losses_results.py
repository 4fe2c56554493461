"""The results of scripts.benchmark.losses: a file for each run, and one for all, and what must be true of them."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from losses import MARGINS, Published, margin_arguments
from utils.files import read_text, replace_text, shown


# The numbers are those that a paper or its authors' program trains with, on millions of photographs of tens of thousands of
# people; no search was made for settings that suit the demo. Only three losses say themselves how a number follows from the
# number of identities, and have that here as well: the scale of AdaCos, and the first biases of SphereFace2 and UniFace.
# KappaFace refreshes its margins after each epoch, as published.
#
class Setting(NamedTuple):
    """A row of the benchmark: a loss and the settings that it is trained with."""

    loss: str
    row: Published

    @property
    def title(self) -> str:
        """For tables and pictures."""
        return self.row.title

    @property
    def is_variant(self) -> bool:
        """Whether another row of the same loss stands for it by default."""
        return bool(self.row.arguments)


SETTINGS: dict[str, Setting] = {
    "demo": Setting("cosface", Published("demo", "CosFace as in the demo", "1801.09414", {"scale": 32.0, "margin": 0.3})),
    **{row.name: Setting(loss, row) for loss, margin in MARGINS.items() for row in margin.published},
}


def chosen_settings(names: list[str] | None) -> list[str]:
    """Return the rows that the user named; None = all but variants, ["all"] = every row.

    Raises:
        ValueError: there is no such row.
    """
    if not names:
        return [name for name, setting in SETTINGS.items() if not setting.is_variant]
    if names == ["all"]:
        return list(SETTINGS)
    unknown = [name for name in names if name not in SETTINGS]
    if unknown:
        raise ValueError(f"--losses must be all, or among {', '.join(SETTINGS)}; got {' '.join(names)}")
    return list(dict.fromkeys(names))


def loss_arguments(setting: Setting, epoch_steps: int) -> dict[str, Any]:
    """Return every argument of the loss, since one that is left out would keep the value of the configuration below.

    Args:
        epoch_steps: optimizer steps of an epoch, after which KappaFace refreshes its margins.
    """
    defaults = margin_arguments(setting.loss)
    return {**defaults, **({"every": epoch_steps} if "every" in defaults else {}), **setting.row.arguments}


MEASURED = "measured.json"  # in the folder of a run
BINS = np.linspace(-1.0, 1.0, 101)  # of cosines
_MOST_BYTES = 64 << 20  # of a file of results
_LARGEST = 1e12

Row = dict[str, Any]


def write_measured(folder: Path, found: Row) -> None:
    """Write the numbers of a run to its folder; the file appears when it is complete."""
    replace_text(folder / MEASURED, json.dumps(found, indent=1) + "\n")


def read_measured(out: Path) -> list[Row]:
    """Return the numbers of all runs in a folder that have ended well, whichever command line started them.

    Raises:
        ValueError: a file is none that write_measured wrote.
    """
    rows = []
    for path in sorted((out / "runs").glob(f"*/{MEASURED}")):
        rows.append(_read(path, "", dict))
    return rows


def write_results(path: Path, rows: Sequence[Row]) -> None:
    """Write the numbers of all runs to one file, which appears when it is complete."""
    replace_text(path, "[\n{}\n]\n".format(",\n".join(json.dumps(row) for row in rows)))


def read_results(path: Path, option: str) -> list[Row]:
    """Return what write_results wrote.

    Raises:
        ValueError: the file, which `option` names, cannot be read, or is none that this program wrote.
    """
    rows: list[Row] = _read(path, f"{option}: ", list)
    return rows


def require_kept(path: Path, runs: Iterable[str]) -> None:
    """Raise ValueError if the file of --json, unless it is new, has results of other runs than these, which it would lose."""
    if not path.exists():
        return
    here = set(runs)
    lost = [row["run"] for row in read_results(path, "--json") if row["run"] not in here]
    if lost:
        raise ValueError(
            f"--json: {shown(path)} has {len(lost)} results that this command does not have, such as {lost[0]}, and would lose "
            "them; it was not written. Give it to --known as well, or write another file"
        )


def require_alike(rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError if a table would have runs that differ in more than loss and seed, or a line such that differ in more
    than the seed.

    Args:
        rows: of each run `run`, the table and line in which it stands, and what it trained, as hashes `common` and `recipe`.
    """
    common: dict[Any, Mapping[str, Any]] = {}
    recipe: dict[Any, Mapping[str, Any]] = {}
    for row in rows:
        line = tuple(row[key] for key in ("setup", "setting", "rate", "steps"))
        for place, key, known in ((row["setup"], "common", common), (line, "recipe", recipe)):
            other = known.setdefault(place, row)
            if other[key] != row[key]:
                raise ValueError(
                    f"{row['run']} and {other['run']} belong into one table, but were trained with other settings or data. "
                    "Give another --out, and if a --known has one of them, leave that out"
                )


def _read(path: Path, option: str, kind: type) -> Any:
    try:
        value = json.loads(read_text(path, _MOST_BYTES), parse_constant=_refuse)
        rows = value if isinstance(value, list) else [value]
        if type(value) is not kind or not all(_is_row(row) for row in rows):
            _refuse("")
        return value
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no file of results, as this program writes it"
        raise ValueError(f"{option}{shown(path)}: {why}") from None


def _refuse(_: str) -> NoReturn:
    raise ValueError("no result")


def _is_row(row: Row) -> bool:
    numbers = [row[key] for key in ("rate", "loss", "step_seconds", "memory_gib", "positive_cosine")]
    for kind in ("genuine", "impostor"):
        numbers += [row[kind]["mean"], row[kind]["std"]]
        counts = row[kind]["histogram"]
        if len(counts) != len(BINS) - 1 or not all(_is_count(count) for count in counts):
            return False
    numbers += row["accuracy"].values()
    texts = [row["setup"], row["machine"], row["recipe"], row["common"], *row["accuracy"]]
    return (
        row["setting"] in SETTINGS
        and re.fullmatch(r"\w[\w.-]*", row["run"], re.ASCII) is not None
        and 0 < row["rate"] <= 1
        and all(_is_count(row[key]) for key in ("seed", "steps", "threads"))
        and all(type(number) in (int, float) and abs(number) < _LARGEST for number in numbers)
        and all(type(text) is str and text.isprintable() and not set(text) & set("<>|`") for text in texts)
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST
