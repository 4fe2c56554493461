"""Thresholds that a run measured: from the results.json that training and `python -m eval RUN --report DIR` write."""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

from utils.checkpoint.format import list_checkpoints, read_manifest
from utils.files import shown
from utils.text import did_you_mean, printable

from .card.facts import planned_steps
from .results_file import SetResult, read_results_of

RESULTS = "results.json"  # in the folder of a run


class Threshold(NamedTuple):
    """A cosine similarity above which two faces count as the same person's."""

    cosine: float
    far: str  # as the user wrote it
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
    parser.add_argument("--threshold", type=_cosine, metavar="COSINE", help="faces above this cosine are of one person")
    parser.add_argument(
        "--far", type=_rate, metavar="FAR", help="take the threshold from the run's report, at this false accept rate (1e-3)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="JSON",
        help="results.json of a run, or of `python -m eval RUN --report DIR`; default: that of the run that is the network",
    )
    parser.add_argument(
        "--set", metavar="NAME", help="verification set of the threshold; default: the set with the highest threshold"
    )


def threshold_of(options: argparse.Namespace) -> Threshold | None:
    """Return the threshold of the command line, None if it has none.

    Args:
        options: with those of `add_threshold_arguments`, and `run`, the network.
    """
    if options.far is None:
        for flag in ("results", "set"):
            if getattr(options, flag) is not None:
                raise ValueError(f"--{flag} is where the threshold at a --far comes from; add --far 1e-3, or leave it out")
        return None if options.threshold is None else Threshold(options.threshold, "", None, "")
    if options.threshold is not None:
        raise ValueError("--threshold and --far are both given; leave one of them out")
    results = options.results
    if results is None:
        results = options.run / RESULTS
        if not results.is_file():
            raise ValueError(
                f"--far {options.far} needs the results of the network, and there is no {shown(results)}: name one with "
                "--results, as python -m eval RUN --report DIR writes it"
            )
        for flag in ("best", "untrained"):
            if getattr(options, flag, False):
                raise ValueError(
                    f"--far {options.far}: {shown(results)} is of the run's end, not of --{flag}; name others with --results"
                )
        _check_step(options, results)
    return read_threshold(results, options.far, options.set, getattr(options, "ema", False))


def _check_step(options: argparse.Namespace, results: Path) -> None:
    """Raise ValueError if the newest checkpoint of the run is not that of its end, of which its results.json is."""
    checkpoints = list_checkpoints(options.run)
    if not checkpoints:
        return  # which whoever opens the network says
    manifest = read_manifest(checkpoints[-1])
    last = planned_steps(manifest.get("config", {}), manifest.get("run_signature", {}))
    if last is not None and manifest["step"] != last:
        raise ValueError(
            f"--far {options.far}: {shown(results)} is of the run's end, and its newest checkpoint is of step "
            f"{manifest['step']:,} of {last:,}; name others with --results, as python -m eval RUN --report DIR writes them"
        )


def read_threshold(results: Path, far: str, name: str | None = None, average: bool = False) -> Threshold:
    """Return the threshold for a false accept rate from a results.json.

    Args:
        far: for example 1e-3.
        name: of the verification set; None = the set with the highest threshold, which is the strictest.
        average: for the moving average of a run's weights.

    Raises:
        ValueError: the file cannot be read, has no such set, or has too few impostor pairs for this rate.
    """
    sets = read_results_of(results, average, name)
    if name is not None:
        if name not in sets:
            raise ValueError(f"{shown(results)}: no set {name!r}; it has {_names(sets)}.{did_you_mean(name, sets)}")
        sets = {name: sets[name]}
    wanted = float(far)
    found = [
        Threshold(point.cosine, far, point.tar, which)
        for which, one in sets.items()
        for point in one.points
        if point.cosine is not None and point.tar is not None and math.isclose(float(point.target), wanted, rel_tol=1e-9)
    ]
    if not found:
        raise ValueError(f"{shown(results)}: no threshold for FAR {far}: {_measurable(sets, wanted)}")
    return max(found, key=lambda one: one.cosine)


def _measurable(sets: dict[str, SetResult], wanted: float) -> str:
    """Return in words why a rate has no threshold, and which rates have one."""
    most = max((one.num_impostor or 0 for one in sets.values()), default=0)
    known = {float(point.target): point.target for one in sets.values() for point in one.points if point.tar is not None}
    texts = [known[rate] for rate in sorted(known, reverse=True)]
    rates = f"thresholds are there for {', '.join(texts)}" if texts else "no rate was measured"
    if wanted * most < 1:
        return f"it needs {math.ceil(1 / wanted):,} impostor pairs, {_names(sets)} has {most:,} at most; {rates}"
    return f"{_names(sets)} was not measured there; {rates}"


def _names(sets: dict[str, SetResult]) -> str:
    return printable(", ".join(sets))[:300] or "no set"


def _cosine(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not -1 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a cosine from -1 to 1, got {text}")
    return value


def _rate(text: str) -> str:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1e-12 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a rate above 0, at most 1, such as 1e-3, got {text}")
    return text
