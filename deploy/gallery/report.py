"""Searches pictures in a gallery, and reports whom they resemble, how many answers are right, and a picture of them."""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from eval.identification import identify
from eval.verification import unit_rows
from utils.cli import progress, warn
from utils.files import check_folder_of, shown, write_file
from utils.parallel import map_in_order
from utils.report import captioned_sheet
from utils.text import one_line

from ..embed.embedder import Embedder, open_embedder
from ..faces.detector import Detector, open_detector
from ..faces.pictures import Crop, Rejected
from ..faces.tracks import Track, Tracker
from ..faces.video import SUFFIXES, read_frames
from ..results import Threshold
from . import commands
from .adapted import threshold_for
from .commands import EmbeddedFace, Picture
from .search import Match, Searcher
from .store import Gallery

MAX_ROWS = 100  # faces on a sheet
_MOST = 10  # people beside a face; --k may be 1,000, and the sheet would take gigabytes
_KNOWN, _GREEN, _FRAME = "known", (0, 200, 0), 7  # pixels, of which the picture shows the inner half
_LETTERS = 15  # of the name of a picture that is searched
_RANKS = (1, 5)
_MISSING = 0.1  # share of the frames that a video claims; files that only know how long it takes err by less


Query = tuple[EmbeddedFace, list[Match]]  # a face to search, and what was found


def search_all(options: argparse.Namespace) -> None:
    """Search the pictures of the command line in the gallery, and report."""
    for option, file in (("--sheet", options.sheet), ("--json", options.json)):
        check_folder_of(file, option)
    if options.run is None:
        commands.take_recorded_network(options)
    threshold = threshold_for(options)
    found = [one for path in options.pictures for one in commands.find_pictures(path)]
    several = len(options.pictures) > 1
    pictures = [Picture(path, str(path) if several else name, "") for path, name in found]
    rejected: list[Rejected] = []
    if options.labelled:
        pictures, rejected = commands.with_people(found, options.person_from, None, several)
    videos = [one for one in pictures if one.path.suffix.lower() in SUFFIXES]
    if options.camera is not None:
        videos.append(Picture(Path(), f"camera {options.camera}", ""))
    if videos and options.which in ("central", "only"):
        raise ValueError(f"--which {options.which}: all faces of a video count; leave it out")
    with Gallery(options.gallery) as gallery:
        embedder, detector = open_embedder(options), open_detector(options)
        commands.require_network(gallery, embedder)
        commands.warn_of_other_detector(gallery, one_line(detector.name) if detector else "", options.which)
        searcher = gallery.searcher(options.by, options.weights)
        if not searcher.people:
            raise ValueError(f"{shown(options.gallery)}: nobody is enrolled; `face enrol` does it")
        _print_threshold(threshold, searcher)
        del searcher  # if the gallery changes, another one takes its memory
        queries: list[Query] = []
        stills = [one for one in pictures if one.path.suffix.lower() not in SUFFIXES]
        faces = commands.read_faces(stills, detector, embedder.image_size, options.which, options.threads)
        batches = [commands.embed_faces(faces, len(stills), "searching", embedder, rejected)] if stills else []
        batches += [_embed_video(one, detector, embedder, options, rejected) for one in videos]
        for batch in itertools.chain.from_iterable(batches):
            raw = np.stack([face.embedding for face in batch]) if batch else np.zeros((0, embedder.embedding_size))
            for face, matches in zip(batch, gallery.search(raw, options.k, options.by, options.weights), strict=True):
                # only those of the sheet keep their pixels; those of a large folder would fill the memory
                crop = face.crop if len(queries) < MAX_ROWS else face.crop._replace(pixels=np.zeros((0, 0, 3), dtype=np.uint8))
                queries.append((face._replace(crop=crop), matches))
                if options.camera is not None and not options.quiet:  # before Ctrl-C
                    _print_query(face, matches, threshold, False)
        for face, matches in () if options.quiet or options.camera is not None else queries:
            _print_query(face, matches, threshold, detector is not None)
        commands.print_rejected(rejected)
        if not queries:
            raise ValueError(f"none of {len(stills) + len(videos)} pictures has a face to search; the reasons are above")
        report: dict[str, Any] = {"rates": {}}
        if options.labelled:
            with gallery.reading():
                searcher = gallery.searcher(options.by, options.weights)
                report["rates"] = _rates(queries, searcher, threshold, gallery)
        if options.sheet:
            rows = [(face.crop.pixels, _caption(face), matches) for face, matches in queries[:MAX_ROWS]]
            write_file(options.sheet, draw_sheet(rows, gallery, None if threshold is None else threshold.cosine))
            print(f"sheet: {shown(options.sheet)}")
        if options.json:
            report |= _as_json(queries, rejected, threshold, gallery, options)
            write_file(options.json, (json.dumps(report, indent=1) + "\n").encode())


def _embed_video(
    picture: Picture, detector: Detector | None, embedder: Embedder, options: argparse.Namespace, rejected: list[Rejected]
) -> Iterator[list[EmbeddedFace]]:
    """Yield the embedded tracks of a video, or of the camera if it has no path; what cannot be searched goes to `rejected`."""
    number, reason = 0, ""
    if detector is None:
        raise ValueError(f"{shown(picture.name)}: the faces of a video must be found; name a --detector")
    frames = read_frames(picture.path if picture.path.name else options.camera, options.every)
    with progress([], 0, "searching", "frame") as bar:
        tracker, waiting = Tracker(embedder.image_size), list[Track]()
        try:
            for frame, faces in map_in_order(lambda one: (one, detector.detect(one.pixels)), frames, options.threads, ahead=1):
                waiting += tracker.update(frame, faces)
                bar.total = frame.claimed
                bar.update(frame.number + 1 - bar.n)
                if sum(len(track.kept) for track in waiting) >= embedder.step:
                    yield _embedded(picture, waiting, number, embedder, rejected)
                    waiting, number = [], number + len(waiting)
        except KeyboardInterrupt:
            if picture.path.name:
                raise
        except ValueError as error:  # also of the detector
            reason = one_line(error)
        waiting += tracker.tracks
        yield _embedded(picture, waiting, number, embedder, rejected)
    if not reason and bar.n + options.every <= (1 - _MISSING) * (bar.total or 0):
        reason = f"only {bar.n:,} of its {bar.total:,} frames can be read; the others are missing or damaged"
    if reason or not (waiting or number):
        rejected.append(Rejected(picture.name, reason or f"no face found in {bar.n:,} frames"))


def _embedded(
    picture: Picture, tracks: Sequence[Track], number: int, embedder: Embedder, rejected: list[Rejected]
) -> list[EmbeddedFace]:
    """Return the vectors of tracks, counted from `number`: as of templates, sums of embeddings times the detector's score.

    So poor faces, whose embeddings are short, count for less, and a search makes as many comparisons as that of a picture.
    """
    kept = [sorted(track.kept.values(), key=lambda one: -one[0]) for track in tracks]
    size = embedder.image_size
    crops = [np.zeros((0, size, size, 3), dtype=np.uint8), *(crop[None] for faces in kept for _, _, crop in faces)]
    raw = embedder.embed(np.concatenate(crops)).astype(np.float64)
    raw[~np.isfinite(raw).all(axis=1)] = 0
    found = []
    for place, (track, faces) in enumerate(zip(tracks, kept, strict=True), number):
        rows, raw = raw[: len(faces)], raw[len(faces) :]
        vector = (rows * np.array([score for _, score, _ in faces]).reshape(-1, 1)).sum(axis=0)
        if vector.any():
            found.append(EmbeddedFace(picture, b"", Crop(picture.name, faces[0][2], None, place), vector, track.span))
        else:
            rejected.append(Rejected(f"{picture.name}, {track.span}", commands.NO_DIRECTION if faces else track.problem))
    return found


def _print_threshold(threshold: Threshold | None, searcher: Searcher) -> None:
    """Say what decides between known and unknown, and how often it errs in a gallery of this size."""
    if threshold is None:
        print("no threshold: the people are only ranked, and somebody is first for a stranger, too; see --far and --threshold")
        return
    print(f"a match is above the {threshold.words}")
    if threshold.far:
        count = len(searcher.owner)
        what, rate = "templates" if searcher.by == "template" else "images", count * float(threshold.far)
        print(
            f"this is a rate per comparison. A stranger is compared with {count:,} {what}, so expect about {rate:.2g} false "
            "matches per search of a stranger, if strangers here are like the impostor pairs of that set"
        )


def _print_query(face: EmbeddedFace, matches: Sequence[Match], threshold: Threshold | None, detected: bool) -> None:
    which = f", {face.span}" if face.span else f", face {face.crop.number}" if detected else ""
    answer = _verdict(matches, None if threshold is None else threshold.cosine)
    answer = f"match: {one_line(matches[0].person)}" if answer == _KNOWN else answer
    print(f"{shown(face.picture.name)}{which}{answer and f': {answer}'}")
    for place, match in enumerate(matches, 1):
        below = threshold is not None and match.cosine <= threshold.cosine
        print(f"  {place:>3} {match.cosine:8.4f}  {one_line(match.person)}{'  (below the threshold)' if below else ''}")


def _rates(queries: Sequence[Query], searcher: Searcher, threshold: Threshold | None, gallery: Gallery) -> dict[str, Any]:
    """Print and return the rates of queries whose people are known."""
    there = {found for _, found in gallery.hashes()}
    own = sum(face.hash in there for face, _ in queries)
    if own:
        warn(f"{own} of the {len(queries)} queries are enrolled pictures themselves, which makes the rates too good")
    people, embeddings = [face.picture.person for face, _ in queries], np.stack([face.embedding for face, _ in queries])
    rates = measure(searcher, embeddings, people, None if threshold is None else threshold.cosine)
    for key, value in rates.items():
        text = f"{100 * value:.2f} %" if isinstance(value, float) else "not measurable" if value is None else f"{value:,}"
        print(f"  {key.replace('_', ' '):<34}{text}")
    return rates


def _as_json(
    queries: list[Query], rejected: list[Rejected], threshold: Threshold | None, gallery: Gallery, options: argparse.Namespace
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
                "picture": shown(face.picture.name),
                "face": face.crop.number,
                **(face.span._asdict() if face.span else {}),
                "norm": float(np.linalg.norm(face.embedding.astype(np.float64))),
                "known": None if cosine is None else bool(matches) and matches[0].cosine > cosine,
                "matches": [match._asdict() for match in matches],
            }
            for face, matches in queries
        ],
        "rejected": [{"picture": shown(one.name), "reason": one.reason} for one in rejected],
    }


def measure(
    searcher: Searcher, embeddings: np.ndarray, people: Sequence[str], threshold: float | None
) -> dict[str, float | int | None]:
    """Return the rates of queries (n, D) whose people are known; None = not measurable with these queries.

    FNIR is the share of the queries with an enrolled person that do not find this person first and above the threshold. FPIR is
    the share of the queries without one that find anybody above it.
    """
    number_of = {name: number for number, name in enumerate(searcher.people)}
    owners = np.array([number_of.get(name, -1) for name in people])
    found = identify(np.concatenate(list(searcher.vectors())), searcher.owner, unit_rows(embeddings).astype(np.float32), owners)
    rates: dict[str, float | int | None] = {
        "queries_of_enrolled_people": found.num_mated,
        "queries_of_others": found.num_unmated,
        **{f"rank_{k}": found.rank_rate(k) for k in _RANKS},
    }
    if threshold is not None:
        mated, alarms = found.rank > 0, found.best > threshold
        right = (found.rank == 1) & (found.own > threshold)
        rates["fnir_at_the_threshold"] = float(np.mean(~right[mated])) if mated.any() else None
        rates["fpir_at_the_threshold"] = float(np.mean(alarms[~mated])) if (~mated).any() else None
    return rates


def draw_sheet(rows: Sequence[tuple[np.ndarray, str, Sequence[Match]]], gallery: Gallery, threshold: float | None) -> bytes:
    """Return a PNG with a row for each face (H, W, 3) uint8 RGB: the face, its name, and the people found.

    Where the gallery keeps no picture of an image, the place is grey.
    """
    drawn = []
    for pixels, name, matches in rows:
        cells: list[tuple[np.ndarray | None, tuple[str, ...]]] = [(pixels, (name, _verdict(matches, threshold)))]
        for place, match in enumerate(matches[:_MOST]):
            face = gallery.picture(match.image)
            face = np.full((8, 8, 3), 200, dtype=np.uint8) if face is None else face
            if place == 0 and _verdict(matches, threshold) == _KNOWN:
                face = cv2.rectangle(cv2.resize(face, (112, 112)), (0, 0), (111, 111), _GREEN, _FRAME)
            cells.append((face, (match.person, f"{match.cosine:.3f}")))
        drawn.append(cells)
    return captioned_sheet(drawn)


def _caption(face: EmbeddedFace) -> str:
    """Return when a track was in view, or the end of a picture's name, which is what tells those of a folder apart."""
    name = shown(face.picture.name)
    if face.span:
        return str(face.span).partition(",")[0]
    return name if len(name) <= _LETTERS else f"..{name[2 - _LETTERS :]}"


def _verdict(matches: Sequence[Match], threshold: float | None) -> str:
    if threshold is None:
        return ""
    return _KNOWN if matches and matches[0].cosine > threshold else "unknown"
