"""Searches pictures in a gallery, and reports whom they resemble, how many answers are right, and a sheet."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from utils.cli import progress
from utils.files import shown
from utils.text import one_line

from ..embed.embedder import Embedder, open_embedder
from ..faces.crops import Crop, Rejected
from ..faces.detector import open_detector
from ..output import write_file
from ..thresholds import Threshold, threshold_of
from .enrol import NO_DIRECTION, require_network, warn_of_other_detector
from .people import Picture, find_pictures, read_faces, with_people
from .rates import measure
from .search import Match, Searcher
from .sheet import MAX_ROWS, draw_sheet
from .store import Gallery


class Query(NamedTuple):
    """A face to search, and what was found."""

    picture: Picture
    hash: bytes
    crop: Crop
    norm: float
    matches: list[Match]


def search_all(options: argparse.Namespace) -> None:
    """Search the pictures of the command line in the gallery, and report."""
    threshold = threshold_of(options)
    found = [one for path in options.pictures for one in find_pictures(path)]
    several = len(options.pictures) > 1
    pictures = [Picture(path, str(path) if several else name, "") for path, name in found]
    rejected: list[Rejected] = []
    if options.labelled:
        pictures, rejected = with_people(found, options.person_from, None, several)
    with Gallery(options.gallery) as gallery:
        embedder, detector = open_embedder(options), open_detector(options)
        require_network(gallery, embedder)
        warn_of_other_detector(gallery, one_line(detector.name) if detector else "", options.which)
        searcher = gallery.searcher(options.by, options.weights)
        if not len(searcher.people):
            raise ValueError(f"{shown(options.gallery)}: nobody is enrolled; python -m scripts.deploy.enrol does it")
        _print_threshold(threshold, searcher)
        queries: list[Query] = []
        raw: list[np.ndarray] = []
        waiting: list[tuple[Picture, bytes, Crop]] = []
        faces = read_faces(pictures, detector, embedder.image_size, options.which, options.threads)
        for one in progress(faces, len(pictures), "searching", "picture"):
            if isinstance(one.crops, Rejected):
                rejected.append(one.crops)
            else:
                waiting += [(one.picture, one.hash, crop) for crop in one.crops or ()]
            if len(waiting) >= options.batch_size:
                raw.append(_search(waiting, queries, rejected, embedder, searcher, options.k))
                waiting = []
        raw.append(_search(waiting, queries, rejected, embedder, searcher, options.k))
        for query in () if options.quiet else queries:
            _print_query(query, threshold, detector is not None)
        for picture in rejected:
            print(f"rejected: {shown(picture.name)}: {one_line(picture.reason)}")
        if not queries:
            raise ValueError(f"none of {len(found)} pictures has a face to search; the reasons are above")
        embeddings = np.concatenate(raw)
        report: dict[str, Any] = {"rates": {}}
        if options.labelled:
            report["rates"] = _rates(queries, embeddings, searcher, threshold, gallery)
        if options.sheet:
            rows = [(query.crop.pixels, shown(query.picture.name), query.matches) for query in queries[:MAX_ROWS]]
            write_file(options.sheet, draw_sheet(rows, gallery, None if threshold is None else threshold.cosine))
            print(f"sheet: {shown(options.sheet)}")
        if options.json:
            report |= _as_json(queries, rejected, threshold, gallery, options)
            write_file(options.json, (json.dumps(report, indent=1) + "\n").encode())


def _search(
    waiting: Sequence[tuple[Picture, bytes, Crop]],
    queries: list[Query],
    rejected: list[Rejected],
    embedder: Embedder,
    searcher: Searcher,
    k: int,
) -> np.ndarray:
    """Embed and search faces, append them to the queries or the rejected, and return the queries' embeddings (n, D)."""
    if not waiting:
        return np.zeros((0, embedder.embedding_size), dtype=np.float32)
    raw = embedder.embed(np.stack([crop.pixels for _, _, crop in waiting]))
    norms = np.linalg.norm(raw.astype(np.float64), axis=1)
    sound = np.isfinite(norms) & (norms > 0)
    rejected += [Rejected(picture.name, NO_DIRECTION) for (picture, _, _), good in zip(waiting, sound, strict=True) if not good]
    kept = [one for one, good in zip(waiting, sound, strict=True) if good]
    nothing = np.zeros((0, 0, 3), dtype=np.uint8)
    for (picture, found, crop), norm, matches in zip(kept, norms[sound], searcher.search(raw[sound], k), strict=True):
        # only those of the sheet keep their pixels; those of a large folder would fill the memory
        shown_crop = crop if len(queries) < MAX_ROWS else crop._replace(pixels=nothing)
        queries.append(Query(picture, found, shown_crop, float(norm), matches))
    return raw[sound]


def _print_threshold(threshold: Threshold | None, searcher: Searcher) -> None:
    """Say what decides between known and unknown, and how often it errs in a gallery of this size."""
    if threshold is None:
        print("no threshold: the people are only ranked, and somebody is first for a stranger, too; see --far and --threshold")
    elif not threshold.far:
        print(f"unknown: not above the {threshold.words}")
    else:
        count = len(searcher.entries)
        what = "templates" if searcher.by == "template" else "images"
        print(f"unknown: not above the {threshold.words}")
        print(
            f"this is a rate per comparison. A stranger is compared with {count:,} {what}, so expect about "
            f"{count * float(threshold.far):.2g} false matches per search of a stranger, if strangers here are like the "
            "impostor pairs of that set"
        )


def _print_query(query: Query, threshold: Threshold | None, detected: bool) -> None:
    face = f", face {query.crop.number}" if detected else ""
    print(f"{shown(query.picture.name)}{face}")
    if threshold is not None and not (query.matches and query.matches[0].cosine > threshold.cosine):
        print("      unknown; the most similar are")
    for place, match in enumerate(query.matches, 1):
        below = threshold is not None and match.cosine <= threshold.cosine
        print(f"  {place:>3} {match.cosine:8.4f}  {one_line(match.person)}{'  (below the threshold)' if below else ''}")


def _rates(
    queries: Sequence[Query], embeddings: np.ndarray, searcher: Searcher, threshold: Threshold | None, gallery: Gallery
) -> dict[str, Any]:
    """Print and return the rates of queries whose people are known."""
    there = {image.hash for image in gallery.images()}
    own = sum(query.hash in there for query in queries)
    if own:
        line = f"warning: {own} of the {len(queries)} queries are enrolled pictures themselves, which makes the rates too good"
        print(line, file=sys.stderr)
    people = [query.picture.person for query in queries]
    rates = measure(searcher, embeddings, people, None if threshold is None else threshold.cosine)
    for key, value in rates.items():
        text = f"{100 * value:.2f} %" if isinstance(value, float) else "not measurable" if value is None else f"{value:,}"
        print(f"  {key.replace('_', ' '):<34}{text}")
    return rates


def _as_json(
    queries: Sequence[Query],
    rejected: Sequence[Rejected],
    threshold: Threshold | None,
    gallery: Gallery,
    options: argparse.Namespace,
) -> dict[str, Any]:
    cosine = None if threshold is None else threshold.cosine
    return {
        "network": gallery.facts.title,
        "gallery": shown(options.gallery),
        "by": options.by,
        "threshold": cosine,
        "far": None if threshold is None else threshold.far or None,
        "queries": [
            {
                "picture": shown(query.picture.name),
                "face": query.crop.number,
                "norm": query.norm,
                "known": None if cosine is None else bool(query.matches) and query.matches[0].cosine > cosine,
                "matches": [match._asdict() for match in query.matches],
            }
            for query in queries
        ],
        "rejected": [{"picture": shown(one.name), "reason": one.reason} for one in rejected],
    }
