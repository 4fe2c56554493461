"""Measures networks on hard versions of verification sets, made on the fly, and reports accuracy over strength.

The clean pictures are embedded once. For each kind and strength the second picture of a pair is degraded and embedded (a probe
against a clean reference), or both. A picture is degraded at 112 x 112 pixels, and then resized like training images, so that a
strength means the same for any input size. Besides the usual figures, a row has TAR and FAR at a threshold that was chosen on
the clean pairs, because who operates a network does not choose another for bad pictures.
Shapes: N = images of the set, U = degraded images, D = embedding size, P = pairs.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import nn

from eval.embed import EmbedSettings, embed_images
from eval.pair_sets.bin_file import PairSet
from eval.verification import VerificationResult
from utils.cli import Advance
from utils.distributed import World
from utils.files import write_csv, write_file
from utils.image import resize_square
from utils.report import Page, make_figure, png_of, set_colours, sheet
from utils.text import label_text

from .degrade import KINDS, degrade

Kinds = Mapping[str, Sequence[float]]  # strengths by the name of the kind


class Row(NamedTuple):
    """The result of a network on a set at a strength of a kind: a row of the table; None = cannot be measured."""

    network: str
    set: str
    kind: str  # "clean" with strength 0: as it is
    strength: float
    accuracy: float
    accuracy_std: float
    far: str | None  # the smallest from 1e-3 on that the set can measure
    tar: float | None
    tar_at_clean_threshold: float | None
    far_at_clean_threshold: float | None
    eer: float | None


def _row(name: tuple[str, str, str, float], result: VerificationResult, clean: VerificationResult) -> Row:
    """Return the row of a result; its name has the network, the set, the kind and the strength."""
    points = [place for place, point in enumerate(clean.points) if point.tar is not None and float(point.target) >= 1e-3]
    far = tar = kept = false = None
    if points:
        point = result.points[points[-1]]
        far, tar, limit = point.target, point.tar, clean.points[points[-1]].threshold
        accepted = result.distances < limit
        kept, false = float(accepted[result.same].mean()), float(accepted[~result.same].mean())
    return Row(*name, result.accuracy, result.accuracy_std, far, tar, kept, false, result.eer)


def count_images(pairs: PairSet, kinds: Kinds, both: bool) -> int:
    """Return how many pictures `measure` embeds for a set."""
    used = len(_used(pairs, both))
    return len(pairs.images) + used * sum(bool(strength) for strengths in kinds.values() for strength in strengths)


def measure(
    model: nn.Module,
    name: str,
    pairs: PairSet,
    kinds: Kinds,
    both: bool,
    seed: int,
    world: World,
    settings: EmbedSettings,
    progress: Advance,
    done: Mapping[tuple[str, float], Row],
) -> Iterator[Row]:
    """Yield the clean row, then one for each strength of each kind. A collective call, with the same rows on every rank.

    Args:
        name: of the network.
        both: degrade both pictures of a pair, not the second alone.
        progress: called with the number of images that this rank has embedded since the last call.
        done: rows by kind and strength that are not measured again, the same on every rank.
    """
    wanted = [("clean", 0.0), *((kind, strength) for kind, strengths in kinds.items() for strength in strengths)]
    used = _used(pairs, both)
    views = np.empty(0)
    clean: VerificationResult | None = None
    if not all(case in done for case in wanted):
        views = embed_images(
            model, lambda index: pairs.decode(index, settings.image_size), len(pairs.images), world, settings, progress
        )
        clean = pairs.verify_views(*views)
    for kind, strength in wanted:
        if clean is None or (kind, strength) in done:
            progress(len(used) // world.world_size if strength else 0)
            yield done[kind, strength]
            continue
        result = clean
        if strength:

            def decode(place: int, kind: str = kind, strength: float = strength) -> np.ndarray:
                index = int(used[place])
                pixels = degrade(pairs.decode(index), kind, strength, pairs.images[index], seed)
                return pixels if settings.image_size == len(pixels) else resize_square(pixels, settings.image_size)

            result = _score(pairs, views, embed_images(model, decode, len(used), world, settings, progress), used, both)
        yield _row((name, pairs.name, kind, strength), result, clean)


def _used(pairs: PairSet, both: bool) -> np.ndarray:
    """Return the images (U,) of which a hard version is needed."""
    return np.unique(np.concatenate([pairs.first, pairs.second]) if both else pairs.second)


def _score(pairs: PairSet, clean: np.ndarray, hard: np.ndarray, used: np.ndarray, both: bool) -> VerificationResult:
    """Return the numbers of the pairs from raw embeddings: clean (2, N, D), and hard (2, U, D) of the images `used`."""
    second = clean.shape[1] + np.searchsorted(used, pairs.second)
    first = clean.shape[1] + np.searchsorted(used, pairs.first) if both else pairs.first
    rows, places = np.unique(np.concatenate([first, second]), return_inverse=True)
    plain, mirrored = np.concatenate([clean, hard], axis=1)[:, rows]
    return dataclasses.replace(pairs, first=places[: len(first)], second=places[len(first) :]).verify_views(plain, mirrored)


def write_robustness(folder: Path, rows: Sequence[Row], sets: Sequence[PairSet], kinds: Kinds, both: bool, seed: int) -> None:
    """Write report.html, accuracy_SET.png and pictures_SET.png of each set, results.json and results.csv into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "results.csv", Row._fields, rows)
    facts = {"degraded": "both" if both else "second", "seed": seed, "units": {kind: KINDS[kind].unit for kind in kinds}}
    write_file(folder / "results.json", json.dumps(facts | {"results": [row._asdict() for row in rows]}, indent=1))
    page = Page("Accuracy on hard versions of verification sets")
    page.contents()
    for pairs in sets:
        page.section(pairs.name)
        which = "Both pictures of a pair are degraded" if both else "The second of a pair is degraded, the first is clean"
        page.text(f"{pairs.describe()}. {which}.")
        for what, png, text in (
            ("accuracy", draw(rows, pairs.name, kinds), "Accuracy over strength; the first point is the set as it is."),
            ("pictures", examples(pairs, kinds, seed), "What each strength looks like; the first picture is clean."),
        ):
            page.picture(png, text)
            write_file(folder / f"{what}_{pairs.name}.png", png)
        page.text("TAR and FAR at the clean threshold: it is chosen on the clean pairs, at the FAR of the column before.")
        page.table([name for name in Row._fields if name != "set"], [_cells(row) for row in rows if row.set == pairs.name])
    page.write(folder / "report.html")


def _cells(row: Row) -> list[str]:
    """Return the cells of a table: rates in percent, but for the FAR of a column."""
    rates = ("-" if value is None else value if isinstance(value, str) else f"{100 * value:.2f} %" for value in row[4:])
    return [row.network, row.kind, f"{row.strength:g}", *rates]


def draw(rows: Sequence[Row], name: str, kinds: Kinds) -> bytes:
    """Return a PNG with the accuracy of a set over the strength: axes for each kind, a curve for each network."""
    networks = list(dict.fromkeys(row.network for row in rows))
    colours = set_colours(networks)
    columns = min(4, len(kinds))
    height = -(-len(kinds) // columns)
    figure = make_figure(3.4 * columns, 2.7 * height + 0.5, layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False, sharey=True).ravel()
    for axis in axes[len(kinds) :]:
        axis.set_visible(False)
    for axis, (kind, strengths) in zip(axes, kinds.items(), strict=False):
        for network in networks:
            of_kind = [row for row in rows if (row.network, row.set) == (network, name) and row.kind in ("clean", kind)]
            axis.plot([100 * row.accuracy for row in of_kind], "o-", markersize=3, color=colours[network])
        axis.set_xticks(range(1 + len(strengths)), ["clean", *(f"{strength:g}" for strength in strengths)])
        axis.set(title=kind, xlabel=KINDS[kind].unit)
        axis.grid(alpha=0.3)
    for axis in axes[::columns]:
        axis.set_ylabel("accuracy, %")
    labels = [label_text(network) for network in networks]
    figure.legend(axes[0].get_lines(), labels, loc="outside upper center", ncols=min(3, len(labels)), fontsize=8)
    return png_of(figure)


def examples(pairs: PairSet, kinds: Kinds, seed: int) -> bytes:
    """Return a PNG with a picture of the set, clean and at each strength of each kind."""
    index = int(pairs.second[0])
    pixels = pairs.decode(index)
    shown = []
    for kind, strengths in kinds.items():
        caption = f"{kind} ({KINDS[kind].unit}): {', '.join(f'{strength:g}' for strength in strengths)}"
        shown.append((caption, [pixels, *(degrade(pixels, kind, value, pairs.images[index], seed) for value in strengths)]))
    return sheet(shown, 1 + max(map(len, kinds.values())), across=2)
