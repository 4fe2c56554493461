"""Enrols pictures of people in a gallery, batch by batch."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from utils.checkpoint.format import newest_run
from utils.cli import progress
from utils.files import shown
from utils.text import one_line

from ..embed.embedder import Embedder, open_embedder
from ..faces.detector import open_detector
from ..faces.pictures import Crop, Rejected
from .database import Facts
from .people import Faces, Picture, find_pictures, read_faces, with_people
from .store import Gallery, NewImage, check_person

NO_DIRECTION = "the network returns no direction for it: zero, or not finite"
DEFAULT = Path("people.gallery")
_SQLITE = b"SQLite format 3\0"  # at the start of its files
Waiting = tuple[Picture, bytes, Crop]  # a face to enrol, with the hash of its picture


def enrol_all(options: argparse.Namespace) -> None:
    """Enrol the pictures of the command line, and say what became of them."""
    if options.person is not None:
        options.person = check_person(options.person)
    pictures, rejected = with_people(find_pictures(options.folder), options.person_from, options.person)
    embedder, detector = open_embedder(options), open_detector(options)
    facts = Facts(
        one_line(embedder.title),
        embedder.digest,
        embedder.embedding_size,
        embedder.image_size,
        one_line(detector.name) if detector else "",
        options.which,
        network_path(options),
        _stored_path(options.detector) if options.detector else "",
    )
    with Gallery.create(options.gallery, facts) as gallery:
        require_network(gallery, embedder)
        warn_of_other_detector(gallery, facts.detector, options.which)
        known = gallery.images()
        there = {(image.person, image.hash) for image in known}
        owners = {image.hash: image.person for image in known}
        counts, waiting = {"enrolled": 0, "skipped": 0}, []
        faces = read_faces(pictures, detector, embedder.image_size, options.which, options.threads, there)
        with progress([], len(pictures), "enrolling", "picture") as bar:
            for one in faces:
                _warn_of_other_person(one, owners)
                if one.crops is None:
                    counts["skipped"] += 1
                    bar.update()
                elif isinstance(one.crops, Rejected):
                    rejected.append(one.crops)
                    bar.update()
                else:
                    waiting += [(one.picture, one.hash, crop) for crop in one.crops]
                if len(waiting) >= options.batch_size:
                    _enrol(waiting, gallery, embedder, options, counts, rejected)
                    bar.update(len(waiting))
                    waiting = []
            _enrol(waiting, gallery, embedder, options, counts, rejected)
            bar.update(len(waiting))
        people = gallery.people()
    for picture in rejected:
        print(f"rejected: {shown(picture.name)}: {one_line(picture.reason)}")
    print(
        f"{shown(options.gallery)}: {counts['enrolled']} pictures enrolled, {counts['skipped']} were there already, "
        f"{len(rejected)} rejected; now {sum(people.values()):,} of {len(people):,} people"
    )
    if rejected and not counts["enrolled"] and not counts["skipped"]:
        raise ValueError(f"{shown(options.folder)}: none of {len(rejected)} pictures could be enrolled; the reasons are above")


def _enrol(
    waiting: Sequence[Waiting],
    gallery: Gallery,
    embedder: Embedder,
    options: argparse.Namespace,
    counts: dict[str, int],
    rejected: list[Rejected],
) -> None:
    """Embed faces and add them in one transaction."""
    if not waiting:
        return
    raw = embedder.embed(np.stack([crop.pixels for _, _, crop in waiting]))
    images = []
    for (picture, found, crop), embedding in zip(waiting, raw, strict=True):
        if not np.isfinite(embedding).all() or not embedding.any():
            rejected.append(Rejected(picture.name, NO_DIRECTION))
            continue
        quality = 1.0 if crop.face is None else float(crop.face.score)
        pixels = None if options.no_pictures else crop.pixels
        images.append(NewImage(picture.person, picture.name, found, crop.number, quality, embedding, pixels))
    for image, number in zip(images, gallery.add(images), strict=True):
        counts["enrolled" if number else "skipped"] += 1
        if options.list and number:
            print(f"enrolled: {shown(image.picture)} as {image.person}, image {number}", flush=True)


def _warn_of_other_person(faces: Faces, owners: dict[bytes, str]) -> None:
    """Say it if the same picture is enrolled as somebody else: one of the two names is wrong."""
    if isinstance(faces.crops, Rejected) or not faces.hash:
        return
    other = owners.setdefault(faces.hash, faces.picture.person)
    if other != faces.picture.person:
        line = f"{shown(faces.picture.name)} is enrolled as {faces.picture.person}, and the same picture as {other}"
        print(f"warning: {one_line(line)}", file=sys.stderr)


def require_network(gallery: Gallery, embedder: Embedder) -> None:
    """Raise ValueError unless a gallery was embedded by this network: cosines of different networks mean nothing."""
    if gallery.facts.digest != embedder.digest:
        raise ValueError(
            f"{shown(gallery.path)}: was embedded by {one_line(gallery.facts.title)}, another network than "
            f"{one_line(embedder.title)}; use that one, or change the gallery: face gallery reembed "
            f"{shown(gallery.path)} NETWORK"
        )
    if (gallery.facts.embedding_size, gallery.facts.image_size) != (embedder.embedding_size, embedder.image_size):
        raise ValueError(f"{shown(gallery.path)}: has other sizes than its own network; take a copy of the gallery")


def warn_of_other_detector(gallery: Gallery, detector: str, which: str) -> None:
    """Say it if the faces of the gallery were found in another way than those that come to it."""
    facts = gallery.facts
    if (facts.detector, facts.which) != (detector, which) and (facts.detector or detector):
        before, now = (f"{name} ({rule})" if name else "aligned crops" for name, rule in (facts[4:6], (detector, which)))
        line = f"the faces of {shown(gallery.path)} are from {before}, these from {now}; cosines may be lower"
        print(f"warning: {one_line(line)}", file=sys.stderr)


def choose_words(words: Sequence[Path]) -> tuple[Path | None, Path, list[Path]]:
    """Return network, gallery and the other words of a command line [[NETWORK] GALLERY] WORDS...

    A word is a gallery if it ends in .gallery or is a file of SQLite; without one it is people.gallery.
    """
    for place, word in enumerate(words[:2]):
        if place + 1 < len(words) and _is_gallery(word):
            return (words[0] if place else None), word, list(words[place + 1 :])
    return None, DEFAULT, list(words)


def _is_gallery(path: Path) -> bool:
    if path.suffix == DEFAULT.suffix or (path / "gallery.sqlite").exists():
        return True
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def take_recorded_network(options: argparse.Namespace) -> None:
    """Set the network and the detector of the options to those that the gallery was enrolled with."""
    with Gallery(options.gallery) as gallery:
        facts = gallery.facts
    path = Path(facts.network_path)
    if not facts.network_path or not path.exists():
        raise ValueError(
            f"{shown(options.gallery)}: its network, {one_line(facts.title)}, is not at {shown(path)}; name it before the "
            f"gallery: face search NETWORK {shown(options.gallery)} PICTURES"
        )
    options.run = path
    if options.detector is None and facts.detector_path:
        options.detector = Path(facts.detector_path)


def network_path(options: argparse.Namespace) -> str:
    """Return where the network of the command line is, as a gallery records it."""
    return _stored_path(options.run or newest_run())


def _stored_path(path: Path) -> str:
    return os.fsencode(path.resolve()).decode("utf-8", "replace")
