"""The results.json of an evaluation, whose values are all checked, since somebody else may have written it; and thresholds."""

import argparse
import itertools
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from utils.checkpoint.format import list_checkpoints, read_manifest
from utils.cli import COSINE, rate_text
from utils.files import MAX_SMALL_TEXT, read_bytes, reading, shown
from utils.text import did_you_mean, one_line, printable

from .card.facts import planned_steps

Checked = TypeVar("Checked")
Interval = tuple[float, float]

_AVERAGE = "ema/"  # begins the names of the moving average's results in a training's results.json
_MAX_SETS = 60
_MAX_LIST = 10_000  # points of a curve; 201 are written
_LARGEST_COUNT = 10**15  # of pairs


class Point(NamedTuple):
    """A threshold and its error rates; None stands for what too few pairs cannot measure."""

    target: str  # the FAR, as the file writes it
    cosine: float | None  # a pair is accepted above it
    tar: float | None
    far: float | None  # at this threshold
    num_accepted: int  # impostor pairs above the threshold


class SetResult(NamedTuple):
    """The numbers of a verification set; None stands for those that the file lacks, or that cannot be measured."""

    name: str
    accuracy: float | None
    eer: float | None
    auc: float | None
    num_genuine: int | None
    num_impostor: int | None
    points: list[Point]
    intervals: dict[str, Interval]  # 95 %: accuracy, eer, auc, and the TAR of points by their target
    # how many genuine and impostor pairs have a cosine between two of the edges, one more; None in files of earlier versions
    histogram: dict[str, list] | None

    def measured(self) -> list[Point]:
        """Return the thresholds that the pairs could measure, from the highest FAR to the lowest."""
        points = [point for point in self.points if point.cosine is not None and point.tar is not None]
        return sorted(points, key=lambda point: -float(point.target))


def read_results(path: Path) -> dict[str, SetResult]:
    """Return the results of each set in a results.json, by name.

    Raises:
        ValueError: one line that names the file and, of a wrong value, its place.
    """
    with reading(path):
        data = read_bytes(path, MAX_SMALL_TEXT)
    try:
        return parse_results(json.loads(data.decode(), parse_constant=_reject_constant))
    except UnicodeDecodeError:
        reason = "no UTF-8 text"
    except RecursionError:
        reason = "nested too deep"
    except ValueError as error:
        reason = one_line(error)[:300]
    raise ValueError(f"{shown(path)}: {_NO_RESULTS}: {reason}")


def read_results_of(path: Path, average: bool, name: str | None = None) -> dict[str, SetResult]:
    """Return the results of a network, or of the moving average of its weights; a training writes both into one file.

    Args:
        average: --ema of the command line. A file without names that begin with `ema/` has results of one network.
        name: a set that was asked for; if it is one of the other network alone, it is returned.

    Raises:
        ValueError: as for `read_results`, or the file has no results of this network.
    """
    found = read_results(path)
    averages = {name.removeprefix(_AVERAGE): result for name, result in found.items() if name.startswith(_AVERAGE)}
    plain = {name: result for name, result in found.items() if not name.startswith(_AVERAGE)}
    chosen = {name: result._replace(name=name) for name, result in (averages if average and averages else plain).items()}
    if name in found and name not in chosen:
        return {name: found[name]}
    if not chosen:
        raise ValueError(f"{shown(path)}: it has results of the moving average alone; add --ema, or give another --results")
    return chosen


def parse_results(found: Any) -> dict[str, SetResult]:
    """Return the results of each set from the contents of a results.json; ValueError for what no evaluation writes."""
    if not isinstance(found, dict) or not 0 < len(found) <= _MAX_SETS:
        raise ValueError(f"it must be an object with an entry for each of at most {_MAX_SETS} sets")
    return {name: _set_result(name, numbers) for name, numbers in found.items()}


_NO_RESULTS = "not the results of an evaluation; write them anew with face eval RUN --report DIR"


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _set_result(name: str, numbers: Any) -> SetResult:
    if not isinstance(numbers, dict):
        raise ValueError(f"{name!r:.80} must be an object")
    at = f"{name[:80]}."
    given = _object(numbers.get("intervals_95"), f"{at}intervals_95")
    intervals = {key: _interval(value, f"{at}intervals_95.{key[:20]}") for key, value in given.items() if value is not None}
    points = numbers.get("operating_points")
    return SetResult(
        name,
        _optional(_rate, numbers.get("accuracy"), f"{at}accuracy"),
        _optional(_rate, numbers.get("eer"), f"{at}eer"),
        _optional(_rate, numbers.get("auc"), f"{at}auc"),
        _optional(_count, numbers.get("num_genuine"), f"{at}num_genuine"),
        _optional(_count, numbers.get("num_impostor"), f"{at}num_impostor"),
        [_point(value, f"{at}operating_points") for value in _list([] if points is None else points, at, 20)],
        intervals,
        _optional(_histogram, numbers.get("similarities"), f"{at}similarities"),
    )


def _point(value: Any, at: str) -> Point:
    entry = _object(value, at)
    target = entry.get("target")
    try:
        wrong = not isinstance(target, str) or len(target) > 20 or not 0 < float(target) <= 1
    except ValueError:
        wrong = True
    if wrong:
        raise ValueError(f"{at}: target must be a FAR such as 1e-3, got {target!r:.80}")
    cosine = _optional(_cosine, entry.get("cosine_threshold"), f"{at}.cosine_threshold")
    tar, far = (_optional(_rate, entry.get(key), f"{at}.{key}") for key in ("tar", "far"))
    accepted = _count(entry.get("num_accepted", 0), f"{at}.num_accepted")
    return Point(str(target), cosine, tar, far, accepted)


def _histogram(value: Any, at: str) -> dict[str, list]:
    entry = _object(value, at)
    edges = [_cosine(one, at) for one in _list(entry.get("cosine"), at)]
    genuine, impostor = ([_count(one, at) for one in _list(entry.get(key), at)] for key in ("genuine", "impostor"))
    if not len(edges) - 1 == len(genuine) == len(impostor) or not genuine:
        raise ValueError(f"{at}: there must be one more edge than counts of each kind, and a count")
    if any(low >= high for low, high in itertools.pairwise(edges)):
        raise ValueError(f"{at}: the edges must ascend")
    return {"edges": edges, "genuine": genuine, "impostor": impostor}


def _optional(check: Callable[[Any, str], Checked], value: Any, at: str) -> Checked | None:
    return None if value is None else check(value, at)


def _object(value: Any, at: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{at} must be an object, got {value!r:.80}")
    return value or {}


def _list(value: Any, at: str, longest: int = _MAX_LIST) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) > longest:
        raise ValueError(f"{at}: a list of at most {longest} values is missing")
    return value


def _interval(value: Any, at: str) -> Interval:
    ends = [_rate(end, at) for end in _list(value, at, 2)]
    if len(ends) != 2 or ends[0] > ends[1]:
        raise ValueError(f"{at} must be the low and the high end of an interval, got {value!r:.80}")
    return ends[0], ends[1]


def _number(value: Any, at: str, low: float, high: float) -> float:
    if type(value) not in (int, float) or not low <= value <= high:  # false for nan
        raise ValueError(f"{at} must be a number from {low:g} to {high:g}, got {value!r:.80}")
    return float(value)


_rate = partial(_number, low=0.0, high=1.0)
_cosine = partial(_number, low=-1.1, high=1.1)  # rounding, and intervals that are wider than their one value


def _count(value: Any, at: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST_COUNT:
        raise ValueError(f"{at} must be a whole number from 0, got {value!r:.80}")
    return int(value)


RESULTS = "results.json"  # in the folder of a run


class Threshold(NamedTuple):
    """A cosine similarity above which two faces count as the same person's."""

    cosine: float
    far: str  # as the results write it
    tar: float | None  # share of the set's genuine pairs that is accepted
    set: str  # verification set on which it was measured

    @property
    def words(self) -> str:
        """The threshold in words."""
        if not self.far:
            return f"cosine {self.cosine:g}"
        found = "" if self.tar is None else f", where {100 * self.tar:.2f} % of the genuine pairs are accepted"
        return f"cosine {self.cosine:.4f}: FAR {self.far} on the set {printable(self.set)}{found}"


def add_threshold_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `threshold_of` reads."""
    parser.add_argument("--threshold", type=COSINE, metavar="COSINE", help="faces above this cosine are of one person")
    parser.add_argument("--far", type=rate_text, help="take the threshold from the run's report, at this false accept rate")
    usual = "results.json of an evaluation; default: that of the run that is the network"
    parser.add_argument("--results", type=Path, metavar="JSON", help=usual)
    parser.add_argument("--set", metavar="NAME", help="verification set of the threshold; default: that of the highest one")


def threshold_of(options: argparse.Namespace) -> Threshold | None:
    """Return the threshold of options: those of `add_threshold_arguments`, and `run`, the network; None if they have none."""
    if options.far is None:
        for flag in ("results", "set"):
            if getattr(options, flag) is not None:
                raise ValueError(f"--{flag} is where the threshold at a --far comes from; add --far 1e-2, or leave it out")
        return None if options.threshold is None else Threshold(options.threshold, "", None, "")
    if options.threshold is not None:
        raise ValueError("--threshold and --far are both given; leave one of them out")
    results, why = results_file(options)
    if results is None:
        raise ValueError(
            f"--far {options.far}: {shown(options.run)}: {why}; name others with --results, as face eval RUN --report DIR "
            "writes them"
        )
    sets = read_results_of(results, getattr(options, "ema", False), options.set)
    return find_threshold(sets, options.far, options.set, results)


def results_file(options: argparse.Namespace) -> tuple[Path | None, str]:
    """Return the file with the results of the network, or None and the reason in words that name no folder.

    Args:
        options: `results`, `run`, and if the program has them `best` and `untrained`.
    """
    path = options.results or options.run / RESULTS
    if options.results:
        return path, ""
    if not path.is_file():
        return None, f"there is no {RESULTS} of the network"
    for flag in ("best", "untrained"):
        if getattr(options, flag, False):
            return None, f"its {RESULTS} is of the run's end, not of --{flag}"
    checkpoints = list_checkpoints(options.run)
    if checkpoints:  # if not, whoever opens the network says so
        manifest = read_manifest(checkpoints[-1])
        step, last = manifest["step"], planned_steps(manifest.get("config", {}), manifest.get("run_signature", {}))
        if last not in (None, step):
            return None, f"its {RESULTS} is of the run's end, and its newest checkpoint is of step {step:,} of {last:,}"
        if manifest.get("score") is None and path.stat().st_mtime < (checkpoints[-1] / "manifest.json").stat().st_mtime:
            return None, f"its {RESULTS} is older than its newest checkpoint, which was saved without a score"
    return path, ""


def find_threshold(sets: dict[str, SetResult], far: str, name: str | None, results: Path) -> Threshold:
    """Return the threshold for a false accept rate.

    Args:
        sets: the results by verification set, which `results` has.
        far: for example 1e-3.
        name: of the verification set; None = the set with the highest threshold, which is the strictest.

    Raises:
        ValueError: there is no such set, or it has too few impostor pairs for this rate.
    """
    if name is not None:
        sets = {name: set_of(sets, name, results)}
    wanted = float(far)
    found = [
        Threshold(point.cosine, point.target, point.tar, which)
        for which, one in sets.items()
        for point in one.measured()
        if point.cosine is not None and math.isclose(float(point.target), wanted, rel_tol=1e-9)
    ]
    if not found:
        raise ValueError(f"{shown(results)}: no threshold for FAR {far}: {_measurable(sets, wanted)}")
    return max(found, key=lambda one: one.cosine)


def set_of(sets: dict[str, SetResult], name: str, results: Path) -> SetResult:
    """Return the results of the set that a user named."""
    if name not in sets:
        raise ValueError(f"--set: {shown(results)} has no set {name!r:.200}; it has {_names(sets)}.{did_you_mean(name, sets)}")
    return sets[name]


def _measurable(sets: dict[str, SetResult], wanted: float) -> str:
    """Return in words why a rate has no threshold, and which rates have one."""
    most = max((one.num_impostor or 0 for one in sets.values()), default=0)
    known = {float(point.target): point.target for one in sets.values() for point in one.measured()}
    texts = [known[rate] for rate in sorted(known, reverse=True)]
    rates = f"thresholds are there for {', '.join(texts)}" if texts else "no rate was measured"
    if wanted * most < 1:
        return f"it needs {math.ceil(1 / wanted):,} impostor pairs, {_names(sets)} has {most:,} at most; {rates}"
    return f"{_names(sets)} was not measured there; {rates}"


def _names(sets: dict[str, SetResult]) -> str:
    return printable(", ".join(sets))[:300] or "no set"
