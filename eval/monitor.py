"""Scores a network, offline and during training: runs each protocol on all ranks, and keeps the score that ranks checkpoints.

A target is a set of pairs (a name or a path), or KIND:PATH with a kind of PROTOCOLS, such as ijbc:/data/IJBC.
"""

import dataclasses
import difflib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn

from utils.distributed import World, all_gather_objects, broadcast_module
from utils.log import TRAINING, RunLog
from utils.text import prefix_errors

from .embed import EmbedSettings
from .identification import Identification, OpenFaces
from .pair_sets.bin_file import SUFFIXES, PairSet, read_pairs
from .protocol import STOPPED, Embed, Found, Protocol, Result
from .report import draw_overview, format_table, pair_results, write_summary
from .templates import TemplateProtocol
from .verification import FOLDS

# kind -> (folder, opener of labelled images) -> the protocol; ValueError names what is wrong with the folder
PROTOCOLS: dict[str, Callable[[Path, OpenFaces], Protocol[Result]]] = {
    "ijbb": lambda folder, _: TemplateProtocol(folder, "ijbb"),
    "ijbc": lambda folder, _: TemplateProtocol(folder, "ijbc"),
    "identify": Identification,
}


def load_protocols(
    folder: str | Path, targets: Iterable[str], open_faces: OpenFaces, setting: str, folder_setting: str
) -> list[Protocol[Result]]:
    """Return what the targets name, in their order, all read and checked, so that no error comes later.

    A relative path of KIND:PATH is first relative to the current folder, then to `folder`. The other targets and arguments are
    those of `load_pair_sets`; `open_faces` opens labelled images, such as data.datasets.open_set.

    Raises:
        ValueError: a target is missing, damaged or named twice, or two have the same name.
    """
    targets = list(targets)
    kinds = {target: target.partition(":")[0] for target in targets if ":" in target}
    kinds = {target: kind for target, kind in kinds.items() if kind in PROTOCOLS}
    pair_sets = iter(load_pair_sets(folder, [t for t in targets if t not in kinds], setting, folder_setting))
    found: list[Protocol[Result]] = []
    for target in targets:
        if target not in kinds:
            found.append(next(pair_sets))
            continue
        places = [Path(target.partition(":")[2]), Path(folder) / target.partition(":")[2]]
        place = next(filter(Path.is_dir, places), None)
        if place is None:
            raise ValueError(f"{setting}: {target}: no folder {places[0]}. Give the folder of the set, or leave it out")
        with prefix_errors(f"{setting}: {target}"):
            found.append(PROTOCOLS[kinds[target]](place, open_faces))
    names = [protocol.name for protocol in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{setting}: two sets are called {twice}, the name of their figures; rename one, or leave it out")
    return found


def load_pair_sets(folder: str | Path, targets: Iterable[str], setting: str, folder_setting: str) -> list[PairSet]:
    """Return the verification sets, all read and checked, so that no error comes later.

    A target is a name, of folder/NAME.bin (or .safetensors, .csv, or a folder of people), or a path, with or without the
    extension. A target with a slash or an extension is first relative to the current folder, then to `folder`. A set is named
    after its file without the extension; if two files have the same name, it begins with the folders in which they differ.

    Args:
        folder: "" if all targets are paths.
        setting, folder_setting: the settings that name the targets and their folder, for error messages: keys of the
            configuration, or "--targets" and "--data".

    Raises:
        ValueError: a set is missing, named twice, not a verification set, or has fewer pairs than folds.
    """
    target_of: dict[Path, str] = {}
    paths = []
    for target in targets:
        path = _find_set(str(folder), target, setting, folder_setting)
        if path.resolve() in target_of:
            raise ValueError(f"{setting} names a set twice: {target_of[path.resolve()]} and {target} are both {path}")
        target_of[path.resolve()] = target
        paths.append(path)
    sets = []
    for name, path in zip(_distinct_names(paths), paths, strict=True):
        pair_set = dataclasses.replace(read_pairs(path, name), path=str(path))
        if len(pair_set.same) < FOLDS:
            raise ValueError(f"{setting}: {path} has {len(pair_set.same)} pairs; {FOLDS}-fold accuracy needs {FOLDS}")
        sets.append(pair_set)
    return sets


def _find_set(folder: str, target: str, setting: str, folder_setting: str) -> Path:
    """Return the file or folder that a target means; raise ValueError if there is none."""
    is_path = "/" in target or Path(target).suffix in SUFFIXES[:-1]
    if not folder and not is_path:
        raise ValueError(f"{setting}: {target!r} is the name of a set; give its folder with {folder_setting}, or give a path")
    bases = ([Path(target)] if is_path else []) + ([Path(folder) / target] if folder else [])
    for base in bases:
        endings = ("",) if base.suffix in SUFFIXES[:-1] else SUFFIXES
        paths = (Path(f"{base}{ending}") for ending in endings)
        path = next((p for p in paths if (p.is_file() if p.suffix in SUFFIXES[:-1] else p.is_dir())), None)
        if path is not None:
            return path
    where = bases[0]
    present = sorted({p.stem for ending in SUFFIXES if ending for p in where.parent.glob(f"*{ending}")})
    near = difflib.get_close_matches(where.stem, present, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else f"The folder has {', '.join(present)}. " if present else ""
    shown = " or ".join(dict.fromkeys(str(base) if base.suffix in SUFFIXES[:-1] else f"{base}.bin" for base in bases))
    raise ValueError(f"{setting}: no file {shown}. {hint}Put it there, or drop {target!r} from {setting}")


def _distinct_names(paths: list[Path]) -> list[str]:
    """Return a distinct name for each file: its stem, and if that is not enough its folders too, joined by _."""
    stems = [path.stem if path.suffix in SUFFIXES[:-1] else path.name for path in paths]
    parts = [(*path.resolve().parts[1:-1], stem) for path, stem in zip(paths, stems, strict=True)]
    names = stems
    for depth in range(2, max(map(len, parts), default=0) + 1):  # one more folder each time, where names are still equal
        longer = ["_".join(part[-depth:]) for part in parts]
        names = [longer[place] if names.count(name) > 1 else name for place, name in enumerate(names)]
    endings = [path.suffix[1:] for path in paths]  # of a.bin and a.csv in one folder
    return [f"{name}_{ending}" if names.count(name) > 1 else name for name, ending in zip(names, endings, strict=True)]


def check_metric(protocols: Sequence[Protocol[Result]], metric: str) -> None:
    """Raise ValueError if no protocol has the figure `metric` of eval.metric, or if one is too small to measure it."""
    ranking = [protocol for protocol in protocols if protocol.has_metric(metric)]
    if protocols and not ranking:
        raise ValueError(
            f"eval.metric={metric} is a figure of none of eval.targets: sets of pairs have all but rank_1, ijbb: and ijbc: "
            "tar@FAR, identify: rank_1. Choose another metric, or add a set"
        )


def selection_score(results: Mapping[str, Result], metric: str) -> float:
    """Return the figure eval.metric, which ranks checkpoints, mean over the sets that have it; larger is better (minus eer)."""
    values = [result.figures[metric] for result in results.values() if metric in result.figures]
    known = [-value if metric == "eer" else value for value in values if value is not None]
    if not known or len(known) < len(values):
        raise ValueError(f"eval.metric={metric} cannot be measured with so few pairs")
    return sum(known) / len(known)


def evaluate(embed: Embed, protocols: Iterable[Protocol[Found]]) -> Iterator[tuple[str, Found]]:
    """Yield (name, result) of each protocol, the same on every rank; ValueError, on every rank, names the set."""
    for protocol in protocols:
        try:
            yield protocol.name, protocol.score(embed)
        except ValueError as error:
            raise type(error)(f"evaluation of {protocol.name}: {error}") from None


_AVERAGE = "ema/"  # no set has this in its name, which is that of a file


def check_names(protocols: Sequence[Protocol[Result]]) -> None:
    """Raise ValueError if a set has the name under which the log keeps the numbers of training."""
    for protocol in protocols:
        if protocol.name == TRAINING:
            raise ValueError(
                f"eval.targets: {protocol.path} must not be called {TRAINING!r}: the numbers of training have that name in "
                "metrics.jsonl and TensorBoard; rename it"
            )


class Evaluator(NamedTuple):
    """Scores a backbone by all protocols during training."""

    backbone: nn.Module
    protocols: Sequence[Protocol[Result]]
    world: World
    settings: EmbedSettings
    metric: str  # as for `selection_score`
    log: RunLog
    name: str  # of the run, for the title of the figures
    last_step: int  # the step after which results.json, results.md and verification.png are written to `folder`
    folder: Path
    average: nn.Module | None = None  # of the backbone's weights, scored beside it: sets then have names that begin with `ema/`
    is_stopped: Callable[[], bool] = lambda: False  # asked after each batch; may differ between the ranks

    def score(self, step: int) -> float | None:
        """Evaluate after `step` optimizer steps; return the score, equal on all ranks.

        The score is that of the moving average, if there is one; None without protocols, or where a stop came before its end.

        Raises:
            ValueError: on every rank, naming the set that cannot be scored.
        """
        if not self.protocols:
            return None
        started = time.perf_counter()
        results: dict[str, Result] = {}
        networks = {"": self.backbone} if self.average is None else {"": self.backbone, _AVERAGE: self.average}
        for prefix, network in networks.items():
            broadcast_module(network, self.world)
            try:
                embed = Embed(network, self.world, self.settings, is_stopped=self.is_stopped)
                ranking = {f"{prefix}{name}": result for name, result in evaluate(embed, self.protocols)}
            except ValueError as error:  # resumed, the run begins with this evaluation
                if STOPPED in str(error):  # without asking the ranks, of which one may be gone
                    return None
                error.args = (f"{error}. If the set is at fault, mend it or take it out of eval.targets; the run then goes on",)
                raise
            results |= ranking
        for name, result in results.items():
            self.log.record(step, name, dict(result.figures))
        self.log.info(f"evaluation after step {step}, {time.perf_counter() - started:.1f} s\n{format_table(results)}")
        if self.world.rank == 0:
            # no other rank draws, so an error here must not look like one of the evaluation, which all ranks have
            with self.log.tolerant("the figures of an evaluation", ValueError, RuntimeError):
                self._draw(step, results)
        # different processors may round differently, but the ranks must agree on the best checkpoint
        return all_gather_objects(selection_score(ranking, self.metric), self.world)[0]

    def _draw(self, step: int, results: dict[str, Result]) -> None:
        pairs = pair_results(results)
        picture = draw_overview(pairs, f"{self.name} after step {step}") if pairs else b""
        if picture:
            self.log.picture(step, "verification", picture)
        if step == self.last_step:
            write_summary(self.folder, picture, results)
